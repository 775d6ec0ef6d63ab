"""Tensors that a model gets in mid-run, where nothing was or something else hung: they are state from then on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from truth import Truth, check_history, check_resume, crash

STEPS = 8


class Model(nn.Module):
    """Has a place for a buffer, a parameter and a module each, and nothing there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4)
        self.register_buffer("seen", None)
        self.register_parameter("scale", None)
        self.register_module("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seen is not None:
            self.seen += x.mean(0)
        y = self.last(self.norm(self.first(x)))
        y = y if self.scale is None else y * self.scale
        return y if self.late is None else self.late(y)


def build() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def a_buffer(model: Model) -> None:
    model.seen = torch.full((4,), 0.5)


def another_module(model: Model) -> None:
    model.norm = nn.BatchNorm1d(4, affine=False, momentum=0.7)


def a_module(model: Model) -> None:
    model.late = nn.BatchNorm1d(4, affine=False)


def a_parameter(model: Model) -> None:
    model.scale = nn.Parameter(torch.full((4,), 1.5), requires_grad=False)


def train(path: Path, change: Callable[[Model], None], **options: Any) -> Truth:
    model, optimizer = build()
    run = everstep.attach(model, optimizer, path, quiet=True, follower=False, **options)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for t in range(1, STEPS + 1):
        if t == 4:
            change(model)
        if t == 7:
            model.seen = None
        model(torch.randn(6, 4) + t).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.commit(wait=True)
    crash(run)
    return truth


@pytest.mark.parametrize("options", [{}, {"base_interval": 2}, {"mode": "snapshot"}], ids=str)
@pytest.mark.parametrize("change", [a_buffer, another_module, a_module, a_parameter], ids=lambda c: c.__name__)
def test_what_a_model_gets_in_mid_run_is_in_every_step_from_then_on(
    change: Callable[[Model], None], options: dict[str, Any], tmp_path: Path
) -> None:
    truth = train(tmp_path / "run", change, **options)
    check_history(tmp_path / "run", truth, complete="mode" not in options)
    if change in (a_buffer, another_module):
        check_resume(tmp_path / "run", build, truth, STEPS, **options)


@pytest.mark.parametrize("mode", ["delta", "snapshot", "shadow"])
def test_a_buffer_that_is_none_until_it_is_needed_comes_back_into_a_new_model(mode: str, tmp_path: Path) -> None:
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, mode=mode, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for t in range(5):
        if t == 2:
            a_buffer(model)
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.commit(wait=True)
    run.close()
    check_resume(tmp_path / "run", build, truth, 5, mode=mode)
    model, optimizer = build()
    assert everstep.open(tmp_path / "run").restore(model, optimizer) == 5
    assert model.seen is not None and torch.equal(model.seen, truth.states[5]["model"]["seen"])
