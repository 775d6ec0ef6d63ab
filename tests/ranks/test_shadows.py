"""Every rank has a shadow, and all of them go on from one step: ranks and shadows killed, layouts changed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from killing import launch, listening, shadows_in
from layouts import LAYOUTS
from workers import World

import everstep
from everstep.follow.gather import common_step, reaches_all, writes_for

SHADOW: dict[str, Any] = {"mode": "shadow", "quiet": False, "base_interval": 100}
STEPS = 12


# -- what the shadows tell, and what follows (pure) --------------------------------------------------------------------


def test_the_step_is_the_least_that_a_shadow_has_and_without_one_of_them_there_is_none() -> None:
    assert common_step([[6, 4], [6, 4]]) == (4, "")
    assert common_step([[6, "gone"], [6, "gone"]]) == (-1, "rank 1: gone")


def test_a_shadow_that_only_some_can_reach_is_written_to_disk_by_the_first_who_can() -> None:
    told = [[6, "far away"], ["far away", 4]]
    assert common_step(told) == (4, "") and not reaches_all(told)
    assert [writes_for(told, trainer) for trainer in (0, 1)] == [[0], [1]]
    assert reaches_all([[6, 4], [6, 4]])
    assert [writes_for([[6, 4], [6, 4]], trainer) for trainer in (0, 1)] == [[0, 1], []]


# -- any layout ------------------------------------------------------------------------------------------------------


def go_on(world: World, memory: Path, folder: Path, source: str, target: str) -> tuple[list[float], list[float]]:
    """Losses of the run that was left to its shadows and went on, and of training without Everstep."""
    run, num, kind = str(folder / f"{source} to {target}"), LAYOUTS[source].ranks, "adamw"
    losses = world.run("jobs:leave_to_shadows", source, kind, run, str(memory), ranks=num)[0]
    where = "shadow" if source == target else "disk"
    results = world.run("jobs:go_on_from_shadows", target, kind, run, str(memory), where, ranks=LAYOUTS[target].ranks)
    assert not [problem for problems, _ in results for problem in problems]
    return losses + results[0][1], world.run("jobs:train_plainly", source, kind, 6, ranks=num)[0]


@pytest.mark.parametrize("layout", ["ddp2", pytest.param("fsdp2", marks=pytest.mark.long)])
def test_ranks_go_on_from_the_memory_of_all_their_shadows(
    layout: str, world: World, memory: Path, tmp_path: Path
) -> None:
    found, plain = go_on(world, memory, tmp_path, layout, layout)
    assert found == plain


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_layout_goes_on_from_shadows_and_under_another_from_bases_of_what_they_hold(
    world: World, memory: Path, tmp_path: Path
) -> None:
    for source in ("zero2", "fsdp4", "hsdp2x2", "tp2", "fsdp2xtp2", "pp2", "pp2xdp2"):
        found, plain = go_on(world, memory, tmp_path, source, source)
        assert found == plain, source
    for source, target in (("ddp2", "one"), ("one", "ddp2"), ("fsdp2", "ddp4"), ("ddp2", "fsdp4"), ("ddp4", "fsdp2")):
        found, plain = go_on(world, memory, tmp_path, source, target)
        assert found[:3] == plain[:3] and found[3:] == pytest.approx(plain[3:], rel=0, abs=1e-5), (source, target)


# -- killed ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Any]]:
    """What training without Everstep gives, with FSDP2 and with DDP."""
    found = {fsdp: launch(tmp_path_factory.mktemp("none"), STEPS, plain=True, fsdp=fsdp) for fsdp in (False, True)}
    return {fsdp: result for fsdp, result in found.items() if result is not None}


def train(path: Path, **orders: Any) -> dict[str, Any] | None:
    attach = {**SHADOW, **orders.pop("attach", {})}
    return launch(path, STEPS, **{"attach": attach, "await_shadow": True, **orders})


def check(found: dict[str, Any] | None, plain: dict[str, Any], at: int, source: str = "shadow") -> None:
    assert found is not None
    assert (found["resumed"], found["stats"]["resumed_from"]) == (at, source), found["said"]
    assert found["losses"] == plain["losses"][at:]
    assert found["digest"] == plain["digest"]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fsdp", [False, True])
def test_ranks_killed_at_different_moments_twice_in_a_row(
    fsdp: bool, plain: dict[bool, dict[str, Any]], memory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    train(path, fsdp=fsdp, slow_rank=1, slow_after=4, kill_at={0: 6, 1: 6})
    (pid,) = shadows_in(memory)  # ranks of one host share it
    train(path, fsdp=fsdp, slow_rank=1, slow_after=5, kill_at={0: 7, 1: 7})
    check(train(path, fsdp=fsdp), plain[fsdp], 5)
    assert pid not in shadows_in(memory), "the run is closed"
    report = everstep.open(path).verify(deep=True)
    assert report.ok, str(report)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_one_rank_killed_alone_and_resumes_killed_before_and_after_their_generation_is_there(
    plain: dict[bool, dict[str, Any]], memory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    train(path, kill_at={1: 5})
    for orders in ({"kill_in_resume": 1}, {"kill_in_start": 0}, {"kill_in_start": 1}, {"kill_in_start": 0}):
        train(path, **orders)
    found = train(path)
    assert found is not None and found["resumed"] >= 5
    check(found, plain[False], found["resumed"])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("log", ["memory", "disk"])
def test_without_the_shadows_it_is_the_disk_and_it_says_why(
    log: str, plain: dict[bool, dict[str, Any]], memory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    attach = {"log": log, "base_interval": 4}
    train(path, attach=attach, kill_at={0: 7, 1: 7}, pause_s=0.2)
    for pid in shadows_in(memory):
        os.kill(pid, signal.SIGKILL)
    found = train(path, attach=attach)
    assert found is not None
    if log == "disk":
        assert found["resumed"] == 7
    else:
        assert found["resumed"] in (4, 7)  # 7: the frames since had not been folded, and are still in memory
    check(found, plain[False], found["resumed"], "disk")
    assert "nothing is taken from shadows: rank 0: no shadow answers" in found["said"][0]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ranks_on_hosts_of_their_own_go_on_from_bases_of_what_their_shadows_hold(
    plain: dict[bool, dict[str, Any]], memory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shared = [str(memory / "a"), str(memory / "b")]
    for folder in shared:
        os.mkdir(folder)
    train(path, shared=shared, slow_rank=1, slow_after=4, kill_at={0: 6, 1: 6})
    assert len(shadows_in(memory)) == 2
    check(train(path, shared=shared), plain[False], 4, "disk")
    train(path / "gone", shared=shared, kill_at={0: 6, 1: 6}, attach={"base_interval": 4})
    for pid in shadows_in(memory / "b"):
        os.kill(pid, signal.SIGKILL)
    found = train(path / "gone", shared=shared)
    assert found is not None and found["resumed"] in (0, 4)
    check(found, plain[False], found["resumed"], "disk")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fsdp", [False, True])
def test_one_host_keeps_the_shadows_of_all_ranks_over_tcp(
    fsdp: bool, plain: dict[bool, dict[str, Any]], memory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    with listening(tmp_path / "there") as address:
        attach = {"shadow": address}
        train(path, fsdp=fsdp, attach=attach, slow_rank=1, slow_after=4, kill_at={0: 6, 1: 6})
        train(path, fsdp=fsdp, attach=attach, slow_rank=0, slow_after=5, kill_at={0: 7, 1: 7})
        check(train(path, fsdp=fsdp, attach=attach), plain[fsdp], 5)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_shadow_killed_while_training_goes_on_is_replaced_and_all_go_on_from_its_successor(
    plain: dict[bool, dict[str, Any]], memory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    train(path, kill_shadow_at=3, kill_at={0: 8, 1: 8})
    found = train(path)
    assert found is not None and found["resumed"] >= 7
    check(found, plain[False], found["resumed"])
