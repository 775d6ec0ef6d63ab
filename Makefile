# Everything on a machine with only Python (3.10 or newer), pip and make:
#
#   make demo        train, kill, resume, and prove that nothing was lost
#   make test        lint, types, layers, tests
#   make test-all    the same with the long suites
#
# PYTHON=python3.12 make test   uses another interpreter for the virtual environment.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.everstep-installed
# The suite is made for two cores; a third process computes while others wait for disks and processes.
PYTEST_ARGS ?= -n 3 --dist worksteal

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all lint clean

help:
	@sed -n 's/^#   //p' Makefile

install: $(STAMP)

# torch first and by itself: afterwards pip finds it there and does not look for a newer one.
$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet '$(TORCH)' -e '.[dev]'
	$(BIN)/everstep native || echo 'everstep works without its native part'
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-all: lint
	$(BIN)/python -m pytest -m "long or not long" $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
