"""Shared settings: one torch thread, bf16 kernels that run on any machine, a temporary folder that goes with the session."""

import os
import shutil
import tempfile
from collections import Counter

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)
_own: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """What children that are killed leave behind (pymp-*, torchelastic_*, a shadow's files) goes with the session.

    Only children use its temporary folder: names of sockets in pytest's own would become too long.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:  # else it has been done
        _own.append(tempfile.mkdtemp(prefix="everstep-tests-"))
        os.environ["EVERSTEP_TESTS_TMPDIR"], os.environ["TMPDIR"] = tempfile.gettempdir(), _own[0]
        if os.path.isdir("/dev/shm"):
            _own.append(tempfile.mkdtemp(prefix="es-", dir="/dev/shm"))
            os.environ["EVERSTEP_SHARED"] = _own[1]
    tempfile.tempdir = os.environ["EVERSTEP_TESTS_TMPDIR"]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    for folder in _own:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `sampled` leaves out of `make test` is long."""
    counts: Counter[tuple[object, ...]] = Counter()
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is None or item.get_closest_marker("long"):
            continue
        test = item.path, item.name.partition("[")[0]
        if counts[test] % marker.args[0]:
            item.add_marker("long")
        counts[test] += 1
