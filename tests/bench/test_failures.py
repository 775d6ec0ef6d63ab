"""The benchmark of failures on a tiny model: that each happens, is overcome, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from everstep.bench import failures
from everstep.bench.workloads import Workload

QUICK = Workload().quick()
FEW = ["trainer killed", "shadow killed", "record damaged on the way"]


@pytest.mark.parametrize("names", [pytest.param(None, marks=pytest.mark.long), FEW], ids=["all", "few"])
def test_what_failures_cost_is_measured_and_nothing_is_left(
    names: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tempfile.mkdtemp(prefix="es-")  # a socket's path is short
    monkeypatch.setenv("EVERSTEP_SHARED", memory)
    found = failures.measure(QUICK, names=names, num_repetitions=1, folder=str(tmp_path))["failures"]
    assert set(found) == set(names or failures.FAILURES)
    for name, m in found.items():
        if name == "shared memory nearly full" and not m["all"]:
            continue  # mounting is not allowed here
        (cost,) = m["all"]
        assert cost["step_s"] > 0 and cost["back_s"] >= 0
        is_trainer_dead = "trainer killed" in name or "both" in name
        assert (cost["lost_steps"] is not None) == is_trainer_dead
        assert (cost["longest_step_s"] is None) == is_trainer_dead
    assert os.listdir(tmp_path) == []
    assert sum(path.stat().st_size for path in Path(memory).rglob("*") if path.is_file()) == 0
    shutil.rmtree(memory)
