"""Snapshot mode on several ranks: each has its pool, and a step counts when all have it. Kills, damage, other layouts."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crash_training import wait_for_keeper
from kill_training import build, digest, turn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.capture.snapshot import Snapshot
from everstep.capture.states import States
from everstep.errors import SetBackWarning, UsageError
from everstep.restore.join import joint_of
from everstep.store.runs import RunPath, read_listing
from pools import wipe_headers
from support import crash, fork_ranks

pytestmark = pytest.mark.timeout(240)
NUM_STEPS = 9
OPTIONS: dict[str, Any] = {"mode": "snapshot", "quiet": True, "base_interval": 4}


class Job:
    """A training on ranks that are forked from this process; what they say is in files beside the run."""

    def __init__(self, folder: Path, *, fsdp: bool, late: bool = False) -> None:
        """`late`: some parameters join the optimizer at step 3."""
        self.folder, self.path, self.fsdp, self.late = folder, folder / "run", fsdp, late
        self._starts = 0
        torch.optim.SGD(build().parameters())  # what torch imports for the first optimizer, ranks need not

    def start(
        self, world: int, steps: int = NUM_STEPS, *, plain: bool = False, prepare: Callable[[int, Any], None] | None = None,
        after: Callable[[int, int], None] | None = None, **options: Any,
    ) -> list[dict[str, Any]] | None:  # fmt: skip
        """What ranks tell in the end; None if they were killed. `prepare(rank, run)`; `after(rank, step)` each commit."""
        self._starts += 1
        meet = self.folder / f"meet-{self._starts}"
        for rank in range(world):
            (self.folder / f"said-{rank}").unlink(missing_ok=True)

        def work(rank: int) -> None:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
            told = self._train(rank, world, steps, plain, prepare, after, {**OPTIONS, **options})
            (self.folder / f"said-{rank}").write_text(json.dumps(told))
            dist.destroy_process_group()

        if fork_ranks(world, work):
            return None
        return [json.loads((self.folder / f"said-{rank}").read_text()) for rank in range(world)]

    def _train(
        self, rank: int, world: int, steps: int, plain: bool, prepare: Callable[[int, Any], None] | None,
        after: Callable[[int, int], None] | None, options: dict[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        model = build()
        if self.fsdp and world > 1:
            fully_shard(model)
        elif world > 1:
            model = DistributedDataParallel(model)
        torch.manual_seed(100 + rank)
        params = list(model.parameters())
        optimizer = torch.optim.AdamW(params[:-2] if self.late else params, lr=1e-2)

        def turn_at(n: int) -> float:
            if self.late and n >= 3 and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": params[-2:], "lr": 1e-3})
            return turn(model, optimizer, n, rank, world)

        if plain:
            losses = [turn_at(n) for n in range(steps)]
            return {"resumed": 0, "losses": losses, "digest": digest(model, optimizer)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = everstep.attach(model, optimizer, self.path, **options)
            at = run.resume()
        came_back = digest(model, optimizer)
        if prepare is not None:
            prepare(rank, run)
        losses = []
        for n in range(at, steps):
            losses.append(turn_at(n))
            run.commit()
            if after is not None:
                after(rank, n + 1)
        run.close()
        return {
            "resumed": at, "losses": losses, "digest": digest(model, optimizer), "came_back": came_back,
            "warned": [w.category.__name__ for w in caught], "durable": run.durable_step,
        }  # fmt: skip

    def pools(self) -> list[str]:
        return sorted(p.name for p in (self.path / "pool").glob("*.pool"))


def die_at(kills: dict[int, int]) -> Callable[[int, int], None]:
    """Right after the commit of these steps, whatever is on its way."""

    def after(rank: int, step: int) -> None:
        if kills.get(rank) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return after


def check_whole(found: list[dict[str, Any]] | None, truth: list[dict[str, Any]]) -> int:
    """The step that all ranks went on from; all that came after is as it was without Everstep."""
    assert found is not None
    (at,) = {each["resumed"] for each in found}
    for each, true in zip(found, truth, strict=True):
        assert each["losses"] == true["losses"][at:]
        assert each["digest"] == true["digest"]
        assert each["durable"] == NUM_STEPS
    return int(at)


def newest(path: Path) -> list[int]:
    """The last step that each rank has."""
    return [line.steps()[-1] for line in joint_of(RunPath(path)).eras[0].lines]


@pytest.mark.parametrize("fsdp", [False, pytest.param(True, marks=pytest.mark.long)], ids=["ddp", "fsdp"])
def test_ranks_that_die_at_different_steps_go_on_from_one_that_all_have(fsdp: bool, tmp_path: Path) -> None:
    job = Job(tmp_path, fsdp=fsdp)
    truth = job.start(2, plain=True)
    assert truth is not None
    assert job.start(2, after=die_at({1: 3})) is None
    assert job.start(2, after=die_at({0: 6, 1: 6})) is None
    common = everstep.open(job.path).steps[-1]
    assert min(newest(job.path)) - 1 <= common <= min(newest(job.path))
    found = job.start(2)
    assert check_whole(found, truth) == common >= 2
    assert everstep.open(job.path).verify(deep=True).ok
    assert len(job.pools()) == 2, "one a rank: those of generations before are gone"


@pytest.mark.long
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("pool_mode", [None, "direct", "staged", "disk"])
def test_kills_at_any_moment(fsdp: bool, pool_mode: str | None, tmp_path: Path) -> None:
    """By time, not by step: in the middle of whatever it is."""
    job, draw = Job(tmp_path, fsdp=fsdp), random.Random(f"{fsdp} {pool_mode}")
    truth = job.start(2, plain=True)
    assert truth is not None
    last = 0
    for _ in range(12):
        victim, wait_s = draw.randrange(2), draw.uniform(0, 0.03)

        def alarm(rank: int, run: Any, victim: int = victim, wait_s: float = wait_s) -> None:
            if rank == victim:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, wait_s + 1e-4)

        job.start(2, prepare=alarm, pool_mode=pool_mode)
        now = max(everstep.open(job.path).steps, default=0)  # killed before all had their first base
        assert now >= last, "a step that all had is not lost"
        last = now
    assert check_whole(job.start(2, pool_mode=pool_mode), truth) == last


def test_a_rank_that_is_ahead_waits_in_its_pool_for_the_others(tmp_path: Path) -> None:
    """Rank 1 stores nothing after step 4, while training goes on as long as it can."""
    job = Job(tmp_path, fsdp=False)
    truth = job.start(2, plain=True)
    assert truth is not None

    def stop_storing(rank: int, run: Any) -> None:
        store = States._store

        def slow(self: States, job: Any, turn: int) -> None:
            if job.step > 4:
                time.sleep(1000)
            store(self, job, turn)

        if rank == 1:
            States._store = slow  # type: ignore[method-assign]

    def after(rank: int, step: int) -> None:
        if rank == 0 and step == 6:
            while newest(job.path) != [6, 4]:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    assert job.start(2, prepare=stop_storing, after=after, base_interval=100) is None
    assert newest(job.path) == [6, 4] and everstep.open(job.path).steps[-1] == 4
    before = job.pools()
    assert job.start(2, prepare=lambda rank, run: time.sleep(0.2) if rank else os.kill(os.getpid(), signal.SIGKILL)) is None
    assert job.pools() == before, "pools stay until all ranks have a step in new ones"
    assert check_whole(job.start(2), truth) == 4


def test_damage_of_one_ranks_slot_sets_all_back(tmp_path: Path) -> None:
    job = Job(tmp_path, fsdp=False)
    truth = job.start(2, plain=True)
    assert truth is not None

    def after(rank: int, step: int) -> None:
        if step == 7:
            time.sleep(0.3)  # until what was committed has been stored
            os.kill(os.getpid(), signal.SIGKILL)

    assert job.start(2, after=after, base_interval=100) is None
    latest = everstep.open(job.path).steps[-1]
    assert latest >= 5
    for manifest, folder in read_listing(RunPath(job.path, 1)).slots:
        if manifest.step == latest:
            with open(Path(folder, *manifest.files), "r+b") as f:
                f.seek(manifest.tensors[0].offset)
                f.write(b"\x7f" * 32)
    with pytest.warns(SetBackWarning, match=f"step {latest}, is not used"):
        everstep.open(job.path).state()
    found = job.start(2)
    assert check_whole(found, truth) == latest - 1
    assert found is not None and all("SetBackWarning" in each["warned"] for each in found)


@pytest.mark.parametrize(
    ("fsdp", "worlds"),
    [
        (True, (2, 1)), pytest.param(False, (1, 2, 1), marks=pytest.mark.long),
        pytest.param(True, (2, 1, 2), marks=pytest.mark.long),
    ],
)
def test_pools_are_restored_into_other_layouts(fsdp: bool, worlds: tuple[int, ...], tmp_path: Path) -> None:
    """Killed, and gone on with on another number of ranks: every bit is the one that the others had."""
    job = Job(tmp_path, fsdp=fsdp)
    at, state = 0, ""
    for world in worlds:
        noted = tmp_path / f"digest-{world}-{at}"

        def prepare(rank: int, run: Any, at: int = at, state: str = state, noted: Path = noted) -> None:
            assert run.step == at
            model, optimizer = run._opened.training.models["model"], run._opened.training.optimizers["optimizer"]
            assert not state or digest(model, optimizer) == state
            commit = run.commit

            def committed() -> int:
                step = int(commit())
                if step == at + 3:
                    run.flush()
                    dist.barrier()
                    found = digest(model, optimizer)
                    if rank == 0:
                        noted.write_text(found)
                    dist.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)
                return step

            run.commit = committed

        assert job.start(world, steps=100, prepare=prepare, base_interval=100) is None
        assert noted.exists(), "it was killed before it should have been"
        at, state = at + 3, noted.read_text()
        assert everstep.open(job.path).steps[-1] == at
    assert len(job.pools()) == worlds[-1], "pools of ranks that there are no more are gone"
    whole = build()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    assert everstep.open(job.path).restore(whole, optimizer) == at
    assert digest(whole, optimizer) == state


def test_pools_in_memory_go_when_the_last_rank_has_closed(tmp_path: Path, shm: Path) -> None:
    job = Job(tmp_path, fsdp=False)
    found = job.start(2, pool=str(shm), snapshot_interval=4)
    assert found is not None and [each["durable"] for each in found] == [NUM_STEPS] * 2
    assert list(shm.iterdir()) == []
    assert everstep.open(job.path).steps[-1] == NUM_STEPS
    model = build()
    run = everstep.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-2), job.path, **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SetBackWarning)
        assert run.resume() == NUM_STEPS
    crash(run)


def die_when_stored(at: int) -> dict[str, Any]:
    """For start(): all ranks are killed when they have stored this step."""
    runs = []

    def after(rank: int, step: int) -> None:
        if step == at:
            runs[0].flush()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    return {"prepare": lambda rank, run: runs.append(run), "after": after}


@pytest.mark.parametrize("fsdp", [False, pytest.param(True, marks=pytest.mark.long)], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("mode", ["snapshot", "delta"])
def test_parameters_that_join_their_optimizer_in_mid_run_come_back_with_its_state(
    mode: str, fsdp: bool, tmp_path: Path
) -> None:
    job = Job(tmp_path, fsdp=fsdp, late=True)
    truth = job.start(2, plain=True)
    assert truth is not None
    assert job.start(2, mode=mode, base_interval=100, **die_when_stored(6)) is None
    assert everstep.open(job.path).steps[-1] == 6
    groups = everstep.open(job.path).state()["optimizer"]["param_groups"]
    assert [len(group["params"]) for group in groups] == [6, 2]
    assert check_whole(job.start(2, mode=mode), truth) == 6


def test_parameters_that_are_added_in_mid_run_are_refused_at_the_commit(tmp_path: Path) -> None:
    job = Job(tmp_path, fsdp=False)

    def prepare(rank: int, run: Any) -> None:
        commit, optimizer = run.commit, run._opened.training.optimizers["optimizer"]

        def committed() -> int:
            if run.step == 3:
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
                for _ in range(2):
                    with pytest.raises(UsageError, match="was added in mid-run"):
                        commit()
                (tmp_path / f"refused-{rank}").touch()
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            return int(commit())

        run.commit = committed

    assert job.start(2, prepare=prepare, snapshot_interval=3) is None
    assert (tmp_path / "refused-0").exists() or (tmp_path / "refused-1").exists()
    assert max(newest(job.path)) <= 3


@pytest.mark.parametrize("how", ["slow", "torn"])
def test_bases_are_of_the_same_steps_on_all_ranks(how: str, tmp_path: Path) -> None:
    """Whatever happens to those of one: the newest of all ranks is never an old one, and old ones go."""
    job = Job(tmp_path, fsdp=False)
    finish = Snapshot._finish

    def finish_otherwise(self: Snapshot, writer: Any) -> None:
        if how == "slow":
            time.sleep(0.3)
        if how == "torn" and self.step == 8:
            self._leaving.torn = True
            writer.abandon()
            return
        finish(self, writer)

    runs = []

    def prepare(rank: int, run: Any) -> None:
        runs.append(run)
        if rank == 1:
            Snapshot._finish = finish_otherwise  # type: ignore[method-assign]

    def after(rank: int, step: int) -> None:
        if step == 14:
            runs[0].flush()
            runs[0]._capture.snapshot.wait()
            dist.barrier()
            wait_for_keeper(runs[0])
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    keep = {"bases": 2, "min_bytes": 0}
    assert job.start(2, steps=100, prepare=prepare, after=after, base_interval=4, retention=keep) is None
    found = [sorted(read_listing(RunPath(job.path, rank)).timelines[1].bases) for rank in range(2)]
    assert found == [[8, 12], [8, 12] if how == "slow" else [4, 12]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([{"pool_slots": 2}] * 2, "pool_slots must be at least 3"),
        ([{"base_interval": 4}, {"base_interval": 5}], "one base_interval"),
        ([{}, {"snapshot_interval": 2}], "one snapshot_interval"),
    ],
)
def test_what_ranks_must_be_given_otherwise_is_refused_and_leaves_nothing(
    options: list[dict[str, Any]], said: str, tmp_path: Path
) -> None:
    def work(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=rank, world_size=2)
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match=said):
            everstep.attach(model, optimizer, tmp_path / "run", mode="snapshot", quiet=True, **options[rank])
        dist.destroy_process_group()

    assert fork_ranks(2, work) == 0
    assert not (tmp_path / "run").exists()


def test_ranks_that_have_no_newer_step_in_common_are_told_of(tmp_path: Path) -> None:
    """As if each pool had two slots, and one rank were a step ahead."""
    job = Job(tmp_path, fsdp=False)
    truth = job.start(2, plain=True)
    assert truth is not None
    assert job.start(2, base_interval=100, **die_when_stored(6)) is None
    for rank in range(2):
        (pool,) = (job.path / "pool").glob(f"rank-{rank:05d}*")
        wipe_headers(pool, keep=[6 - rank])
    assert newest(job.path) == [6, 5]
    with pytest.warns(SetBackWarning, match="none that all have: the last are step 6 on rank 0, step 5 on rank 1"):
        everstep.open(job.path).state()
    found = job.start(2)
    assert check_whole(found, truth) == 0
    assert found is not None and "SetBackWarning" in found[0]["warned"]
