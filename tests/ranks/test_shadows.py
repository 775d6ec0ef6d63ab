"""Every rank has a shadow, and all of them go on from one step: ranks and shadows killed, layouts changed."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killing import launch, listening, shadows_in
from layouts import LAYOUTS
from workers import World

import everstep
from everstep.follow import recover
from everstep.follow.gather import common_step, reaches_all, writes_for
from everstep.store.runs import RunPath

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


class Left:
    """A run that was left to its shadows."""

    def __init__(self, world: World, memory: Path, path: Path, layout: str, **options: Any) -> None:
        self.path = path
        self._world, self._memory, self._layout = world, str(memory), layout
        self._losses = self._job("leave_to_shadows", layout, str(path), self._memory, **options)[0]

    def _job(self, job: str, layout: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._world.run(f"jobs:{job}", layout, "adamw", *args, ranks=LAYOUTS[layout].ranks, **kwargs)

    def go_on(self, source: str, layout: str | None = None, **options: Any) -> str:
        """Under this layout (None: its own), from this source, and as if nothing had happened; what was said."""
        target = layout or self._layout
        results = self._job("go_on_from_shadows", target, str(self.path), self._memory, source, **options)
        assert not [problem for problems, *_ in results for problem in problems]
        losses, plain = self._losses + results[0][1], self._job("train_plainly", self._layout, 6)[0]
        if target == self._layout:
            assert losses == plain, target
        else:
            assert losses[:3] == plain[:3] and losses[3:] == pytest.approx(plain[3:], rel=0, abs=1e-5), target
        return "".join(said for *_, said in results)


@pytest.fixture
def leave(world: World, memory: Path, tmp_path: Path) -> Callable[..., Left]:
    """Of one of LAYOUTS, with options for attach."""
    return lambda layout, name="run", **options: Left(world, memory, tmp_path / name, layout, **options)


@pytest.mark.parametrize("layout", ["ddp2", pytest.param("fsdp2", marks=pytest.mark.long)])
def test_ranks_go_on_from_the_memory_of_all_their_shadows(layout: str, leave: Callable[..., Left]) -> None:
    leave(layout).go_on("shadow")


@pytest.mark.parametrize("layout", ["ddp2", pytest.param("fsdp2", marks=pytest.mark.long)])
def test_a_run_that_goes_on_without_shadows_takes_what_they_hold_and_they_end(
    layout: str, leave: Callable[..., Left], memory: Path
) -> None:
    leave(layout).go_on("shadow", mode="delta")
    wait_until(lambda: not shadows_in(memory), "the shadows to end")


@pytest.mark.parametrize("layout", ["fsdp2", pytest.param("ddp2", marks=pytest.mark.long)])
def test_a_shadow_that_cannot_hand_out_intact_what_one_rank_had_leaves_all_to_the_disk(
    layout: str, leave: Callable[..., Left]
) -> None:
    left = leave(layout)
    key = damage(left.path, 1)
    said = left.go_on("disk")
    assert "nothing is taken from shadows: DamagedStateError" in said and key in said


@pytest.mark.parametrize("layout", ["ddp2", pytest.param("fsdp2", marks=pytest.mark.long)])
def test_shadows_that_no_trainer_comes_back_to_leave_bases_of_all_ranks_and_end(
    layout: str, leave: Callable[..., Left], memory: Path
) -> None:
    left = leave(layout, shadow_idle_s=0.5)
    wait_until(lambda: not shadows_in(memory), "the shadows to end")
    assert not list(memory.glob("**/*.frames")), "what is on disk is not kept in memory"
    assert [plan.base.step for plan in everstep.open(left.path).plans()] == [3, 3]
    left.go_on("disk")


@pytest.mark.long
@pytest.mark.timeout(120)
def test_shadows_that_end_while_ranks_resume_leave_bases_that_are_found(world: World, memory: Path, tmp_path: Path) -> None:
    args = ("ddp2", "adamw", str(tmp_path / "run"), str(memory))
    assert world.run("jobs:resume_while_shadows_end", *args, ranks=2) == [[0, 2, 4]] * 2


def damage(path: Path, rank: int) -> str:
    """Flip a bit of what the shadow of a rank hands out; of which tensor."""
    offer = recover.find(RunPath(path).part(rank), RunPath(path).read_run().run)
    assert offer is not None and offer.file
    stored = next(t for t in offer.manifest.tensors if t.role == "param" and t.num_bytes)
    with open(offer.file, "r+b") as f:
        f.seek(stored.offset)
        (byte,) = f.read(1)
        f.seek(stored.offset)
        f.write(bytes([byte ^ 1]))
    offer.release()
    return stored.key


def wait_until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_layout_goes_on_from_shadows_and_under_another_from_bases_of_what_they_hold(
    leave: Callable[..., Left],
) -> None:
    for layout in ("zero2", "fsdp4", "hsdp2x2", "tp2", "fsdp2xtp2", "pp2", "pp2xdp2"):
        leave(layout, layout).go_on("shadow")
    for source, target in (("ddp2", "one"), ("one", "ddp2"), ("fsdp2", "ddp4"), ("ddp2", "fsdp4"), ("ddp4", "fsdp2")):
        leave(source, f"{source} to {target}").go_on("disk", target)


# -- killed ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[str, Any]]:
    """What training without Everstep gives, with FSDP2 or with DDP."""

    @functools.cache
    def find(fsdp: bool) -> dict[str, Any]:
        found = launch(tmp_path_factory.mktemp("none"), STEPS, plain=True, fsdp=fsdp)
        assert found is not None
        return found

    return find


class Training:
    """A run that is started, killed, and started again."""

    def __init__(self, path: Path, plain: Callable[[bool], dict[str, Any]]) -> None:
        self.path = path
        self.fsdp = False
        self.attach: dict[str, Any] = {}
        self.orders: dict[str, Any] = {}
        self._plain = plain

    def run(self, **orders: Any) -> dict[str, Any] | None:
        attach = {**SHADOW, **self.attach, **orders.pop("attach", {})}
        told = {"fsdp": self.fsdp, "attach": attach, "await_shadow": True, **self.orders, **orders}
        return launch(self.path, STEPS, **told)

    def goes_on(self, *at: int, source: str = "shadow") -> dict[str, Any]:
        """To its end, from one of these steps, and as if nothing had happened."""
        found, plain = self.run(), self._plain(self.fsdp)
        assert found is not None
        assert found["resumed"] in at and found["stats"]["resumed_from"] == source, found["said"]
        assert found["losses"] == plain["losses"][found["resumed"] :]
        assert found["digest"] == plain["digest"]
        return found


@pytest.fixture
def training(plain: Callable[[bool], dict[str, Any]], memory: Path, tmp_path: Path) -> Training:
    return Training(tmp_path / "run", plain)


def killed(test: Callable[..., None]) -> Callable[..., None]:
    """Ranks are started several times."""
    return pytest.mark.long(pytest.mark.timeout(600)(test))


@killed
@pytest.mark.parametrize("fsdp", [False, True])
def test_ranks_killed_at_different_moments_twice_in_a_row(fsdp: bool, training: Training, memory: Path) -> None:
    training.fsdp = fsdp
    training.run(slow_rank=1, slow_after=4, kill_at={0: 6, 1: 6})
    (pid,) = shadows_in(memory)  # ranks of one host share it
    training.run(slow_rank=1, slow_after=5, kill_at={0: 7, 1: 7})
    training.goes_on(5)
    assert pid not in shadows_in(memory), "the run is closed"
    report = everstep.open(training.path).verify(deep=True)
    assert report.ok, str(report)


@killed
def test_one_rank_killed_alone_and_resumes_killed_before_and_after_their_generation_is_there(training: Training) -> None:
    training.run(kill_at={1: 5})
    for orders in ({"kill_in_resume": 1}, {"kill_in_start": 0}, {"kill_in_start": 1}, {"kill_in_start": 0}):
        training.run(**orders)
    training.goes_on(*range(5, STEPS))


@killed
@pytest.mark.parametrize("log", ["memory", "disk"])
def test_without_the_shadows_it_is_the_disk_and_it_says_why(log: str, training: Training, memory: Path) -> None:
    training.attach = {"log": log, "base_interval": 4}
    training.run(kill_at={0: 7, 1: 7}, pause_s=0.2)
    kill_shadows(memory)
    # 7 with the log in memory: the frames since the base had not been folded, and are still there
    found = training.goes_on(*((7,) if log == "disk" else (4, 7)), source="disk")
    assert "nothing is taken from shadows: rank 0: no shadow answers" in found["said"][0]


@killed
def test_ranks_on_hosts_of_their_own_go_on_from_bases_of_what_their_shadows_hold(
    training: Training, memory: Path
) -> None:
    shared = training.orders["shared"] = [str(memory / "a"), str(memory / "b")]
    for folder in shared:
        os.mkdir(folder)
    training.run(slow_rank=1, slow_after=4, kill_at={0: 6, 1: 6})
    assert len(shadows_in(memory)) == 2
    training.goes_on(4, source="disk")
    training.path /= "gone"
    training.run(kill_at={0: 6, 1: 6}, attach={"base_interval": 4})
    kill_shadows(memory / "b")
    training.goes_on(0, 4, source="disk")


@killed
@pytest.mark.parametrize("fsdp", [False, True])
def test_one_host_keeps_the_shadows_of_all_ranks_over_tcp(fsdp: bool, training: Training, tmp_path: Path) -> None:
    training.fsdp = fsdp
    with listening(tmp_path / "there") as address:
        training.attach = {"shadow": address}
        training.run(slow_rank=1, slow_after=4, kill_at={0: 6, 1: 6})
        training.run(slow_rank=0, slow_after=5, kill_at={0: 7, 1: 7})
        training.goes_on(5)


@killed
def test_a_shadow_killed_while_training_goes_on_is_replaced_and_all_go_on_from_its_successor(training: Training) -> None:
    training.run(kill_shadow_at=3, kill_at={0: 8, 1: 8})
    training.goes_on(7, 8)


def kill_shadows(memory: Path) -> None:
    for pid in shadows_in(memory):
        os.kill(pid, signal.SIGKILL)
