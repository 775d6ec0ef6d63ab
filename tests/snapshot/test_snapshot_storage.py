"""Snapshot mode where the pool's place is full, fails or vanishes: told as asked, never called durable, nothing left."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import StepNotFoundError, StorageError, UnprotectedWarning, UsageError
from everstep.store import files
from support import crash
from truth import Truth, check_history, live_state

OPTIONS: dict[str, Any] = {"mode": "snapshot", "snapshot_interval": 1, "quiet": True}


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def attached(path: Path, **options: Any) -> Truth:
    model, optimizer = build()
    truth = Truth(everstep.attach(model, optimizer, path, **{**OPTIONS, **options}), model, optimizer)
    truth.resume()
    return truth


def train(truth: Truth, num_steps: int = 1, **commit: Any) -> None:
    model, optimizer, _ = truth._objects
    for _ in range(num_steps):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.states[truth.run.step + 1] = live_state(model, optimizer)  # a commit that raises has been one
        truth.run.commit(**commit)


class Failing:
    """An operation on pools that fails while it is told to."""

    def __init__(self, op: str, number: int = errno.ENOSPC) -> None:
        self.op, self.number, self.on = op, number, False

    def __call__(self, op: str, path: str) -> None:
        if self.on and op == self.op and ".pool" in path:
            raise OSError(self.number, os.strerror(self.number))


FAULTS = [
    ("allocate", errno.ENOSPC), ("create", errno.ENOSPC), ("write", errno.EIO), ("sync", errno.EIO), ("stat", errno.ENOENT)
]  # fmt: skip


@pytest.mark.parametrize(("op", "number"), FAULTS)
def test_a_pool_that_fails_is_raised_at_the_next_commit_and_nothing_more_is_called_durable(
    op: str, number: int, tmp_path: Path
) -> None:
    fault = Failing(op, number)
    pool_mode = "disk" if op == "write" else "direct"
    with files.observe(fault=fault):
        truth = attached(tmp_path / "run", pool_mode=pool_mode)
        if op in ("write", "sync", "stat"):
            train(truth, 3, wait=True)
        else:
            truth.run.flush()
        before = truth.run.durable_step
        fault.on = True
        with pytest.raises(StorageError, match=f"steps after {before} could not be stored.*step {before} is safe"):
            train(truth, 3, wait=True)
        assert truth.run.durable_step == before
        with pytest.raises(StorageError):
            truth.run.close()
        fault.on = False
    assert truth.run.durable_step == before
    assert everstep.open(tmp_path / "run").steps[-1] >= before
    check_history(tmp_path / "run", truth, complete=False)


@pytest.mark.parametrize(("op", "number"), FAULTS)
def test_training_goes_on_unprotected_and_is_protected_again(
    op: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, clock = Failing(op, number), [0.0]
    monkeypatch.setattr("everstep.run.time.monotonic", lambda: clock[0])
    with files.observe(fault=fault):
        truth = attached(tmp_path / "run", pool_mode="disk" if op == "write" else "direct", on_error="warn")
        if op in ("write", "sync", "stat"):
            train(truth, 3, wait=True)
        else:
            truth.run.flush()
        before = truth.run.durable_step
        fault.on = True
        with pytest.warns(UnprotectedWarning, match=f"UNPROTECTED from step {before + 1} on"):
            while truth.run.stats()["unprotected_since"] is None:
                train(truth)
                time.sleep(0.005)
        train(truth, 2)
        assert truth.run.durable_step == before
        fault.on = False
        while truth.run.stats()["unprotected_since"] is not None:
            clock[0] += 2.0
            train(truth)
            time.sleep(0.005)
        train(truth, wait=True)
        assert truth.run.durable_step == truth.run.step
        crash(truth.run)
    check_history(tmp_path / "run", truth, complete=False)
    history = everstep.open(tmp_path / "run")
    assert history.steps[-1] == truth.run.step and history.verify().ok


@pytest.mark.parametrize("place", ["", "shm"])
def test_a_pool_whose_folder_vanishes_under_training_is_noticed(place: str, tmp_path: Path, shm: Path) -> None:
    """The file can still be written then, and nobody would ever find it."""
    truth = attached(tmp_path / "run", **({"pool": str(shm)} if place else {}))
    train(truth, 3, wait=True)
    (folder,) = shm.iterdir() if place else [tmp_path / "run/pool"]
    shutil.rmtree(folder)
    with pytest.raises(StorageError, match="gone"):
        train(truth, 2, wait=True)
    assert truth.run.durable_step == 3
    crash(truth.run)


def test_a_base_that_is_taken_while_the_pool_fails_is_of_one_step(tmp_path: Path) -> None:
    """The failure is forgotten, not the base that still looks at the live state."""
    fault = Failing("sync", errno.EIO)
    model = nn.Linear(600, 600)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def slowly(op: str, path: str) -> None:
        fault(op, path)
        if op == "write" and "bases" in path:
            time.sleep(0.02)

    with files.observe(fault=slowly), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprotectedWarning)
        run = everstep.attach(model, optimizer, tmp_path / "run", on_error="warn", base_interval=2, **OPTIONS)
        run.resume()
        for n in range(1, 16):
            fault.on = n % 7 == 3
            optimizer.step()
            model.weight.data.fill_(n)
            run._next_retry = 0.0
            run.commit()
        fault.on = False
        run._next_retry = 0.0
        run.commit()
        crash(run)
    history = everstep.open(tmp_path / "run")
    for n in history.steps[1:]:
        assert set(history.state(n)["model"]["weight"].unique().tolist()) == {float(n)}


def test_close_leaves_a_base_at_the_last_step_and_no_memory(
    shm: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    truth = attached(tmp_path / "run", pool=str(shm), quiet=False, snapshot_interval=4)
    train(truth, 6)
    truth.run._capture._job.done.wait()
    assert list(shm.rglob("*.pool"))
    truth.run.close()
    assert list(shm.iterdir()) == []
    history = everstep.open(tmp_path / "run")
    assert history.steps[-1] == truth.run.durable_step == 6 and not history.plan().base.in_pool
    check_history(tmp_path / "run", truth, complete=False)
    assert history.verify().ok
    said = capfd.readouterr().err
    assert "mode snapshot" in said and str(shm) in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        truth = attached(tmp_path / "run", pool=str(shm))
    assert truth.run.step == 6
    truth.run.close()
    assert list(shm.iterdir()) == [], "a run that was resumed and closed without a step leaves nothing, either"


def test_a_killed_run_resumes_from_memory_and_changes_its_place(shm: Path, tmp_path: Path) -> None:
    truth = attached(tmp_path / "run", pool=str(shm))
    train(truth, 3, wait=True)
    crash(truth.run)
    other = attached(tmp_path / "run")
    assert other.run.stats()["resumed_from"] == "pool" and other.run.step == 3
    assert list(shm.rglob("*.pool")), "until the new pool holds a step"
    train(other, 1, wait=True)
    assert list(shm.iterdir()) == []
    assert len(list((tmp_path / "run/pool").iterdir())) == 1
    crash(other.run)
    check_history(tmp_path / "run", truth.states | other.states, complete=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pool_mode": "fast"}, "pool_mode"), ({"pool_slots": 1}, "pool_slots"),
        ({"snapshot_interval": 0}, "snapshot_interval"),
        ({"max_bandwidth": -1}, "max_bandwidth"), ({"mode": "delta", "pool": "/dev/shm"}, "pool is for mode='snapshot'"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_and_leaves_nothing(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    model, optimizer = build()
    with pytest.raises(UsageError, match=said):
        everstep.attach(model, optimizer, tmp_path / "run", **{"mode": "snapshot", "quiet": True, **options})
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_read_while_it_is_written_gives_whole_states(tmp_path: Path) -> None:
    """Slots are overwritten under the reader's eyes."""
    model = nn.Linear(400, 400)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = everstep.attach(model, optimizer, tmp_path / "run", pool_slots=2, **OPTIONS)
    run.resume()
    stop, numbers = threading.Event(), [0]

    def train() -> None:
        while not stop.is_set():
            optimizer.step()
            model.weight.data.fill_(run.step + 1)
            numbers[0] = run.commit(wait=True)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        while numbers[0] < 3:
            time.sleep(0.001)
        history = everstep.open(tmp_path / "run")
        for k in range(60):
            least = numbers[0]
            found = set(history.state()["model"]["weight"].unique().tolist())
            assert len(found) == 1 and found.pop() >= least
            assert k % 20 or history.verify().ok
            with contextlib.suppress(StepNotFoundError):  # that it is damaged would be another matter
                assert set(history.state(least)["model"]["weight"].unique().tolist()) == {float(least)}
    finally:
        stop.set()
        thread.join()
        run.close()


def test_who_waits_for_a_base_finds_it_told(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flush() and close() go on when it is known to be stored, not when it is."""
    tell = everstep.Run._on_base

    def late(self: everstep.Run, base: Any) -> None:
        time.sleep(0.1)
        tell(self, base)

    monkeypatch.setattr(everstep.Run, "_on_base", late)
    truth = attached(tmp_path / "run", pool=str(shm), snapshot_interval=100)
    base = truth.run._capture.snapshot
    truth.run.flush()
    assert truth.run.durable_step == 0
    assert truth.run._capture.snapshot is base, "one is enough"
    train(truth, 2)
    truth.run.close()
    assert truth.run.durable_step == truth.run._keeper.base_step == 2
    assert list(shm.iterdir()) == []
