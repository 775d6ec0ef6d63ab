"""Ranks that are killed at different moments go on from the last step that all of them had, with every bit as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from killing import launch

import everstep
from everstep.restore.join import joint_of
from everstep.store.runs import RunPath


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run that nobody disturbed, and its losses."""
    path = tmp_path_factory.mktemp("whole") / "run"
    found = launch(path, 12)
    assert found is not None
    return path, found["losses"]


def check_equal(path: Path, whole: tuple[Path, list[float]], found: dict[str, Any] | None) -> None:
    assert found is not None
    assert found["losses"] == whole[1][found["resumed"] :]
    comparison = everstep.open(path).compare(everstep.open(whole[0]))
    assert comparison.ok, str(comparison)
    report = everstep.open(path).verify(deep=True)
    assert report.ok, str(report)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_step_that_one_rank_had_not_stored_is_not_mixed_in(
    times: int, tmp_path: Path, whole: tuple[Path, list[float]]
) -> None:
    path = tmp_path / "run"
    for i in range(times):
        launch(path, 12, slow_rank=1, slow_after=4 + i, kill_at={0: 6 + i, 1: 6 + i})
        steps = [line.steps()[-1] for line in joint_of(RunPath(path)).eras[0].lines]
        assert steps == [6 + i, 4 + i], "rank 0 has two steps more"
        assert everstep.open(path).steps[-1] == 4 + i
    found = launch(path, 12)
    assert found is not None and found["resumed"] == 3 + times
    check_equal(path, whole, found)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_rank_that_dies_alone_and_a_resume_that_is_killed_itself(tmp_path: Path, whole: tuple[Path, list[float]]) -> None:
    path = tmp_path / "run"
    launch(path, 12, kill_at={1: 5})
    before = everstep.open(path).steps[-1]
    launch(path, 12, kill_in_resume=0)
    launch(path, 12, kill_in_resume=1)
    assert everstep.open(path).steps[-1] == before, "a resume that was killed changes nothing"
    found = launch(path, 12)
    assert found is not None and found["resumed"] == before
    check_equal(path, whole, found)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_four_ranks_whose_buckets_were_rebuilt_go_on_bit_for_bit(tmp_path: Path) -> None:
    undisturbed = launch(tmp_path / "whole", 8, world=4, bucket_cap_mb=0.001)
    launch(tmp_path / "run", 8, world=4, bucket_cap_mb=0.001, kill_at={2: 4})
    found = launch(tmp_path / "run", 8, world=4, bucket_cap_mb=0.001)
    assert found is not None and undisturbed is not None and found["resumed"] >= 1
    check_equal(tmp_path / "run", (tmp_path / "whole", undisturbed["losses"]), found)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_replica_that_drifts_is_named(tmp_path: Path) -> None:
    launch(tmp_path / "run", 12, edit=[1, 5])
    report = everstep.open(tmp_path / "run").verify(deep=True)
    assert not report.ok
    assert any("rank 1's copy of model: " in problem for problem in report.problems), str(report)


@pytest.mark.timeout(120)
def test_every_byte_is_stored_by_one_rank(whole: tuple[Path, list[float]]) -> None:
    lines = joint_of(RunPath(whole[0])).eras[0].lines
    layouts = [line.plans(12)[0].base.layout for line in lines]
    params = [[a.uid for a in layout.atoms if a.role == "param"] for layout in layouts]
    assert not set(params[0]) & set(params[1])
    buffers = {a.uid for a in layouts[0].atoms if a.role == "buffer"}
    assert sorted(params[0] + params[1]) == sorted(set(layouts[0].order) - buffers)
    state = everstep.open(whole[0]).state()
    assert tuple(state["model"]["0.weight"].shape) == (17, 9)
    assert all(isinstance(t, torch.Tensor) for t in state["model"].values())
