"""Storage that fails: the run is told at the next commit, what was durable stays, `warn` goes on and comes back."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture.snapshot import Snapshot
from everstep.errors import EverstepError, HiddenEditWarning, StorageError, UnprotectedWarning
from everstep.store import files
from everstep.store.files import Event
from truth import Truth, check_history, check_resume, crash, different, gate, live_state, slow


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


class Rig:
    """A run in training, and the truth about it."""

    def __init__(self, path: Any, **options: Any) -> None:
        self.path = path
        self.model, self.optimizer = build()
        options = {"quiet": True, "follower": False, **options}
        self.run = everstep.attach(self.model, self.optimizer, path, **options)
        self.truth = Truth(self.run, self.model, self.optimizer)
        self.truth.resume()

    def step(self) -> None:
        self.model(torch.randn(4, 32)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int, **kwargs: Any) -> None:
        for _ in range(steps):
            self.step()
            self.truth.commit(**kwargs)

    def train_until_told(self, limit: int = 50) -> StorageError:
        """Train on until a commit raises."""
        for _ in range(limit):
            self.step()
            try:
                self.truth.commit()
            except StorageError as e:
                return e
            time.sleep(0.005)
        raise AssertionError("nobody told of the error")


def is_log(path: str) -> bool:
    return path.endswith(".frames")


def is_base(path: str) -> bool:
    return "/bases/" in path


class Fault:
    """Fails matching operations while it is armed."""

    def __init__(self, code: int, ops: tuple[str, ...], what: Callable[[str], bool] = is_log) -> None:
        self.code, self.ops, self.what = code, ops, what
        self.armed = False
        self.hits: list[tuple[str, str]] = []

    def __call__(self, op: str, path: str) -> None:
        if self.armed and op in self.ops and self.what(path):
            self.hits.append((op, path))
            raise OSError(self.code, os.strerror(self.code))


FAULTS = {
    "disk-full": (errno.ENOSPC, ("write", "create")),
    "write-error": (errno.EIO, ("write",)),
    "failed-sync": (errno.EIO, ("sync",)),
    "read-only": (errno.EROFS, ("create", "write", "sync")),
    "quota": (errno.EDQUOT, ("write",)),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("durability", ["step", "batch", "os"])
def test_an_error_is_told_at_the_next_commit_and_what_was_durable_stays(
    durability: str, name: str, tmp_path: Path
) -> None:
    if durability == "os" and name == "failed-sync":
        pytest.skip("nothing is synced with durability='os'")
    rig = Rig(tmp_path / "run", durability=durability)
    rig.train(6)
    rig.run.flush()
    assert rig.run.durable_step == 6
    fault = Fault(*FAULTS[name])
    with files.observe(fault=fault):
        fault.armed = True
        told = rig.train_until_told()
        assert fault.hits
        assert rig.run.durable_step == 6
        assert str(tmp_path / "run") in str(told) and "6" in str(told)
        assert os.strerror(FAULTS[name][0]) in str(told)
        fault.armed = False
        rig.step()
        with pytest.raises(StorageError):
            rig.run.commit()
        with pytest.raises(StorageError):
            rig.run.flush()
    crash(rig.run)
    steps = everstep.open(tmp_path / "run").steps
    assert steps[:7] == list(range(7))
    rig.truth.states.setdefault(len(rig.truth.states), live_state(rig.model, rig.optimizer))
    check_history(tmp_path / "run", rig.truth, complete=False)
    check_resume(tmp_path / "run", build, rig.truth, steps[-1])


@pytest.mark.parametrize("name", FAULTS)
def test_leaving_the_with_after_an_error_raises_it_and_releases_the_run(name: str, tmp_path: Path) -> None:
    fault = Fault(*FAULTS[name])
    with files.observe(fault=fault):
        with pytest.raises(StorageError):
            rig = Rig(tmp_path / "run")
            with rig.run:
                rig.train(3)
                rig.run.flush()
                fault.armed = True
                rig.train(1)
        fault.armed = False
    check_history(tmp_path / "run", rig.truth, complete=False)
    with everstep.attach(*build(), tmp_path / "run", quiet=True) as run:
        assert run.resume() >= 3


def test_commit_with_wait_tells_of_an_error_of_its_own_step(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run")
    rig.train(2, wait=True)
    fault = Fault(errno.ENOSPC, ("write",))
    with files.observe(fault=fault):
        fault.armed = True
        rig.step()
        with pytest.raises(StorageError, match="full"):
            rig.run.commit(wait=True)
    crash(rig.run)


def test_flush_tells_of_an_error(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run")
    rig.train(2, wait=True)
    fault = Fault(errno.EIO, ("sync",))
    with files.observe(fault=fault):
        fault.armed = True
        rig.step()
        rig.run.commit()
        with pytest.raises(StorageError):
            rig.run.flush()
    crash(rig.run)


def test_close_tells_of_an_error_in_the_last_step(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run")
    rig.train(2, wait=True)
    fault = Fault(errno.EIO, ("sync",))
    with files.observe(fault=fault):
        fault.armed = True
        rig.step()
        with pytest.raises(StorageError):
            rig.run.close()
    with pytest.raises(EverstepError):
        rig.run.commit()
    with everstep.attach(*build(), tmp_path / "run", quiet=True) as run:
        assert run.resume() in (2, 3), "after a failed sync nobody knows whether step 3 was stored"


def test_after_a_failed_sync_the_segment_is_abandoned_and_never_written_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", on_error="warn")
    rig.train(3)
    rig.run.flush()
    fault = Fault(errno.EIO, ("sync",))
    events: list[Event] = []
    with files.observe(events.append, fault), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprotectedWarning)
        fault.armed = True
        rig.train(3)
        wait_for(lambda: bool(fault.hits))
        fault.armed = False
        failed_at = len(events)
        protect_again(rig)
        rig.run.close()
    [(_, failed)] = fault.hits
    assert is_log(failed)
    touched = [e for e in events[failed_at:] if e.path == failed and e.op != "unlink"]
    assert touched == []
    rig.truth.states[rig.run._capture.step] = live_state(rig.model, rig.optimizer)
    check_history(tmp_path / "run", rig.truth, complete=False)
    check_resume(tmp_path / "run", build, rig.truth, rig.run._capture.step)


def wait_for(true: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def protect_again(rig: Rig, seconds: float = 20) -> None:
    """Train on until the run says that it is protected, then some more."""
    end = time.monotonic() + seconds
    while True:
        rig.train(1)
        if rig.run.stats()["unprotected_since"] is None and rig.run.durable_step >= rig.run.step - 5:
            break
        assert time.monotonic() < end, "never protected again"
        time.sleep(0.05)
    rig.train(4)
    rig.run.flush()
    assert rig.run.durable_step == rig.run.step


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("durability", ["step", "batch", "os"])
@pytest.mark.sampled(2)
def test_with_warn_training_goes_on_says_so_and_protects_itself_again(
    durability: str, name: str, tmp_path: Path
) -> None:
    if durability != "step" and name not in ("disk-full", "failed-sync"):
        pytest.skip("the same path as with durability='step'")
    if durability == "os" and name == "failed-sync":
        pytest.skip("nothing is synced with durability='os'")
    rig = Rig(tmp_path / "run", on_error="warn", durability=durability, batch_steps=3)
    rig.train(5)
    rig.run.flush()
    fault = Fault(*FAULTS[name])
    with files.observe(fault=fault), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fault.armed = True
        for _ in range(30):
            rig.train(1)
            time.sleep(0.005)
        assert [w.category for w in caught] == [UnprotectedWarning], "said once"
        assert "UNPROTECTED" in str(caught[0].message)
        assert rig.run.stats()["unprotected_since"] is not None
        assert rig.run.durable_step == 5
        fault.armed = False
        protect_again(rig)
        assert len(caught) == 1
    last = rig.run.step
    crash(rig.run)
    history = everstep.open(tmp_path / "run")
    assert {0, 1, 2, 3, 4, 5, last, last - 1, last - 2} <= set(history.steps)
    check_history(tmp_path / "run", rig.truth, complete=False)
    check_resume(tmp_path / "run", build, rig.truth, last)


def test_with_warn_storage_may_fail_again_and_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", on_error="warn")
    fault = Fault(errno.ENOSPC, ("write", "create"), lambda path: True)
    with files.observe(fault=fault), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for round_ in range(2):
            rig.train(4)
            rig.run.flush()
            fault.armed = True
            for _ in range(8):
                rig.train(1)
                time.sleep(0.01)
            fault.armed = False
            protect_again(rig)
            assert len(caught) == round_ + 1
    last = rig.run.step
    rig.run.close()
    check_history(tmp_path / "run", rig.truth, complete=False)
    check_resume(tmp_path / "run", build, rig.truth, last)


def test_with_warn_and_a_disk_that_never_comes_back_close_does_not_hang(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", on_error="warn")
    rig.train(4)
    rig.run.flush()
    fault = Fault(errno.ENOSPC, ("write", "create"), lambda path: True)
    with files.observe(fault=fault), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprotectedWarning)
        fault.armed = True
        for _ in range(20):
            rig.train(1)
        began = time.monotonic()
        with pytest.raises(StorageError):
            rig.run.close()
        assert time.monotonic() - began < 10
    assert everstep.open(tmp_path / "run").steps[:5] == [0, 1, 2, 3, 4]
    check_history(tmp_path / "run", rig.truth, complete=False)


def test_a_failing_first_base_is_told_and_warn_takes_another(tmp_path: Path) -> None:
    fault = Fault(errno.ENOSPC, ("write", "create", "mkdir"), is_base)
    fault.armed = True
    with files.observe(fault=fault):
        rig = Rig(tmp_path / "raise")
        told = rig.train_until_told()
        assert "full" in str(told)
        assert rig.run.durable_step == -1
        crash(rig.run)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rig = Rig(tmp_path / "warn", on_error="warn")
            for _ in range(10):
                rig.train(1)
                time.sleep(0.01)
            assert [w.category for w in caught] == [UnprotectedWarning]
            fault.armed = False
            protect_again(rig)
        last = rig.run.step
        crash(rig.run)
    assert everstep.open(tmp_path / "warn").verify().problems == [], "what was never stored is not missed"
    check_history(tmp_path / "warn", rig.truth, complete=False)
    check_resume(tmp_path / "warn", build, rig.truth, last)


def test_a_failing_later_base_is_told_and_costs_nothing_that_was_durable(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", base_interval=6)
    rig.train(4)
    rig.run.flush()
    fault = Fault(errno.ENOSPC, ("write", "create", "mkdir"), is_base)
    fault.armed = True
    with files.observe(fault=fault):
        told = rig.train_until_told()
        assert "full" in str(told)
    crash(rig.run)
    assert len(everstep.open(tmp_path / "run").steps) >= 7
    check_history(tmp_path / "run", rig.truth, complete=False)


def test_with_warn_a_failing_later_base_costs_no_step(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", base_interval=6, on_error="warn")
    rig.train(4)
    rig.run.flush()
    fault = Fault(errno.ENOSPC, ("write", "create", "mkdir"), is_base)
    fault.armed = True
    with files.observe(fault=fault), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            rig.train(1)
            time.sleep(0.01)
        assert fault.hits
        assert len(fault.hits) < 4, "a base is not tried at every step"
        assert [w.category for w in caught] == [UnprotectedWarning]
        assert "UNPROTECTED" not in str(caught[0].message) and "Every step is stored" in str(caught[0].message)
        rig.run.flush()
        assert (rig.run.durable_step, rig.run.stats()["unprotected_since"]) == (16, None)
        time.sleep(1.0)
        rig.train(2)  # tried once more
        wait_for(lambda: len(fault.hits) >= 2)
        fault.armed = False
        time.sleep(1.0)
        rig.train(2)
        wait_for(lambda: rig.run.stats()["base_step"] > 16)
        assert len(caught) == 1
    crash(rig.run)
    assert everstep.open(tmp_path / "run").verify().ok
    check_history(tmp_path / "run", rig.truth)


def test_with_warn_a_base_that_failed_before_the_end_is_taken_at_the_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", base_interval=6, on_error="warn")
    fault = Fault(errno.ENOSPC, ("write", "create", "mkdir"), is_base)
    rig.train(4)
    rig.run.flush()
    with files.observe(fault=fault), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprotectedWarning)
        fault.armed = True
        rig.train(2)
        wait_for(lambda: bool(fault.hits))
        fault.armed = False
        rig.train(1)
        rig.run.close()
    assert everstep.open(tmp_path / "run").plan().base.step == 7
    check_history(tmp_path / "run", rig.truth)


def test_with_warn_a_base_that_fails_while_the_run_is_closed_is_taken_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", base_interval=6, on_error="warn")
    rig.train(4)
    rig.run.flush()
    held = threading.Event()
    failed: list[str] = []

    def once_and_late(op: str, path: str) -> None:
        if op == "mkdir" and is_base(path) and not failed:
            failed.append(path)
            held.wait(10)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with files.observe(fault=once_and_late):
        rig.train(2)
        wait_for(lambda: bool(failed))
        rig.train(1)  # no commit is told of it
        threading.Timer(0.1, held.set).start()
        rig.run.close()
    assert everstep.open(tmp_path / "run").plan().base.step == 7
    check_history(tmp_path / "run", rig.truth)


def test_with_warn_a_last_base_that_fails_is_told_and_costs_no_step(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", base_interval=1000, on_error="warn")
    rig.train(4)
    rig.run.flush()
    fault = Fault(errno.ENOSPC, ("write", "create", "mkdir"), is_base)
    fault.armed = True
    with files.observe(fault=fault), pytest.warns(UnprotectedWarning, match="Every step is stored nevertheless"):
        rig.run.close()
    assert fault.hits
    assert everstep.open(tmp_path / "run").steps[-1] == 4
    check_history(tmp_path / "run", rig.truth)


def test_with_warn_a_gap_that_could_not_be_told_at_once_is_told_later(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", on_error="warn")
    rig.train(3)
    rig.run.flush()
    fault = Fault(errno.EIO, ("write",))
    telling = Fault(errno.ENOSPC, ("create",), lambda path: "kept.json" in path)

    def either(op: str, path: str) -> None:
        fault(op, path)
        telling(op, path)

    with files.observe(fault=either), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprotectedWarning)
        fault.armed = telling.armed = True
        rig.train(2)
        wait_for(lambda: bool(fault.hits))
        rig.train(2)
        fault.armed = False
        time.sleep(1.0)
        rig.train(1)
        assert telling.hits
        telling.armed = False
        protect_again(rig)
    crash(rig.run)
    assert everstep.open(tmp_path / "run").verify().problems == []
    check_history(tmp_path / "run", rig.truth, complete=False)


@pytest.mark.parametrize("when", ["first", "after a failure"])
def test_when_the_base_that_all_stands_on_is_disturbed_another_is_taken(
    when: str, tmp_path: Path, monkeypatch: Any
) -> None:
    disturbed: list[int] = []
    agrees = Snapshot._agrees

    def disagrees(self: Snapshot, writer: Any) -> bool:
        if not disturbed:
            disturbed.append(self.step)
            return False
        return agrees(self, writer)

    if when == "first":
        monkeypatch.setattr(Snapshot, "_agrees", disagrees)
    rig = Rig(tmp_path / "run", on_error="warn", audit="full")
    rig.train(3)
    if when == "first":
        wait_for(lambda: bool(disturbed))
        rig.train(1)
    rig.run.flush()
    fault = Fault(errno.EIO, ("write",))
    if when != "first":
        monkeypatch.setattr(Snapshot, "_agrees", disagrees)
        with files.observe(fault=fault), warnings.catch_warnings():
            warnings.simplefilter("ignore", UnprotectedWarning)
            fault.armed = True
            rig.train(2)
            wait_for(lambda: bool(fault.hits))
            fault.armed = False
            protect_again(rig)
    assert disturbed
    assert rig.run.durable_step == rig.run.step
    crash(rig.run)
    history = everstep.open(tmp_path / "run")
    assert history.verify().problems == [], "what was never stored is not missed"
    assert history.steps[-1] == rig.run.step
    check_history(tmp_path / "run", rig.truth, complete=False)


class Held(Fault):
    """One that fails only when it is told to, and until then stands still. Bases stand still, too, each until it may go."""

    def __init__(self) -> None:
        super().__init__(errno.EIO, ("write",))
        self.fails = threading.Event()
        self.bases: dict[int, threading.Event] = {}

    def __call__(self, op: str, path: str) -> None:
        for step, may_go in self.bases.items():
            if op == "create" and path.endswith(".safetensors") and f"{step:012d}" in path:
                assert may_go.wait(20)
        if self.armed and op in self.ops and is_log(path):
            assert self.fails.wait(20)
        super().__call__(op, path)


def test_with_warn_a_base_on_the_way_when_the_log_fails_leaves_no_hole(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", on_error="warn", base_interval=6)
    rig.train(4)
    rig.run.flush()
    fault = Held()
    with files.observe(fault=fault), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprotectedWarning)
        fault.armed = True
        rig.train(2)
        base = rig.run._capture.snapshot
        assert base.step == 6
        fault.fails.set()
        base.wait()
        rig.train(1)
        crash(rig.run)
    history = everstep.open(tmp_path / "run")
    assert history.verify().problems == []
    assert history.steps == [0, 1, 2, 3, 4]


def test_with_warn_a_base_that_ends_after_the_log_has_failed_makes_nothing_durable(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", on_error="warn", base_interval=6)
    rig.train(4)
    rig.run.flush()
    fault = Held()
    fault.bases = {step: threading.Event() for step in range(6, 30)}
    with files.observe(fault=fault), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprotectedWarning)
        fault.armed = True
        rig.train(2)
        fault.fails.set()
        wait_for(lambda: bool(fault.hits))
        rig.train(2)
        fault.armed = False
        time.sleep(1.1)
        rig.train(3)
        base = rig.run._capture.snapshot
        fault.bases[6].set()
        time.sleep(0.2)
        rig.train(2)
        rig.run._capture.flush()
        assert rig.run.durable_step == 4
        assert everstep.open(tmp_path / "run").steps[-1] == 4
        assert base.step == 6, "nothing is begun anew while it is on its way"
        for event in fault.bases.values():
            event.set()
        protect_again(rig)
    last = rig.run.step
    crash(rig.run)
    assert everstep.open(tmp_path / "run").verify().problems == []
    check_history(tmp_path / "run", rig.truth, complete=False)
    check_resume(tmp_path / "run", build, rig.truth, last)


# -- folders that vanish ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["step", "batch", "os"])
def test_a_deleted_run_folder_is_told(durability: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", durability=durability)
    rig.train(3)
    rig.run.flush()
    shutil.rmtree(tmp_path / "run")
    told = rig.train_until_told()
    assert "gone" in str(told) or "No such file" in str(told)
    crash(rig.run)


@pytest.mark.parametrize("durability", ["step", "batch", "os"])
def test_a_moved_run_folder_is_told_and_can_be_resumed_where_it_is(durability: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", durability=durability)
    rig.train(3)
    rig.run.flush()
    os.rename(tmp_path / "run", tmp_path / "moved")
    told = rig.train_until_told()
    assert "gone" in str(told) or "No such file" in str(told)
    crash(rig.run)
    check_history(tmp_path / "moved", rig.truth, complete=False)
    assert max(everstep.open(tmp_path / "moved").steps) >= 3


def test_with_warn_a_run_folder_that_is_moved_away_and_back_is_protected_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", on_error="warn")
    rig.train(3)
    rig.run.flush()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        os.rename(tmp_path / "run", tmp_path / "moved")
        for _ in range(10):
            rig.train(1)
            time.sleep(0.01)
        assert [w.category for w in caught] == [UnprotectedWarning]
        os.rename(tmp_path / "moved", tmp_path / "run")
        protect_again(rig)
    last = rig.run.step
    crash(rig.run)
    check_history(tmp_path / "run", rig.truth, complete=False)
    check_resume(tmp_path / "run", build, rig.truth, last)


def test_with_warn_a_deleted_run_folder_is_made_anew(tmp_path: Path) -> None:
    """What was there is lost; what follows is protected again, or it is said that it is not."""
    rig = Rig(tmp_path / "run", on_error="warn")
    rig.train(3)
    rig.run.flush()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shutil.rmtree(tmp_path / "run")
        end = time.monotonic() + 4
        while time.monotonic() < end:
            rig.train(1)
            time.sleep(0.02)
        assert caught and all(w.category is UnprotectedWarning for w in caught)
        if rig.run.stats()["unprotected_since"] is None:
            last = rig.run.step
            rig.run.flush()
            crash(rig.run)
            check_resume(tmp_path / "run", build, rig.truth, last)
        else:
            with pytest.raises(StorageError):
                rig.run.close()


# -- a real full disk and a real read-only one ------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of two megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.long
def test_a_disk_that_runs_full_is_told_and_what_was_durable_stays(small_disk: Path) -> None:
    rig = Rig(small_disk / "run")
    told = rig.train_until_told(1000)
    assert "full" in str(told)
    durable = rig.run.durable_step
    assert durable > 3
    crash(rig.run)
    assert max(everstep.open(small_disk / "run").steps) >= durable
    check_history(small_disk / "run", rig.truth, complete=False)


def test_with_warn_a_disk_that_gets_room_again_is_used_again(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    rig = Rig(small_disk / "run", on_error="warn", segment_bytes=1 << 16)
    rig.train(3)
    rig.run.flush()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(OSError), open(ballast, "wb") as f:
            while True:
                f.write(b"\0" * 4096)
                f.flush()
        while not caught:
            rig.train(1)
            time.sleep(0.005)
        ballast.unlink()
        protect_again(rig)
    last = rig.run.step
    crash(rig.run)
    check_history(small_disk / "run", rig.truth, complete=False)
    check_resume(small_disk / "run", build, rig.truth, last)


def test_a_disk_that_turns_read_only_is_told(small_disk: Path) -> None:
    """A read-only remount needs all writers gone; a bind mount of the folder over itself does not."""
    rig = Rig(small_disk / "run", segment_bytes=1)
    rig.train(3)
    rig.run.flush()
    # Every step opens a new segment; these cannot be made once the folder cannot be written.
    subprocess.run(["mount", "--bind", str(small_disk), str(small_disk)], check=True)
    try:
        done = subprocess.run(["mount", "-o", "remount,ro,bind", str(small_disk)], capture_output=True)
        if done.returncode:
            pytest.skip("remounting is not allowed here")
        told = rig.train_until_told()
        assert "read-only" in str(told).lower()
        crash(rig.run)
        check_history(small_disk / "run", rig.truth, complete=False)
        with pytest.raises(StorageError):
            everstep.attach(*build(), small_disk / "run", quiet=True)
        with pytest.raises(StorageError):
            everstep.attach(*build(), small_disk / "new", quiet=True)
    finally:
        subprocess.run(["umount", "-l", str(small_disk)], check=True)


# -- durability and in-flight bounds ----------------------------------------------------------------------------------


def test_every_step_is_synced_by_default(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run")
    rig.run.flush()
    events: list[Event] = []
    with files.observe(events.append):
        for n in range(1, 6):
            rig.train(1, wait=True)
            assert rig.run.durable_step == n
    assert sum(e.op == "sync" and is_log(e.path) for e in events) == 5
    crash(rig.run)


def test_a_batch_of_steps_is_synced_together(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", durability="batch", batch_steps=4)
    rig.run.flush()
    events: list[Event] = []
    with files.observe(events.append):
        rig.train(10)
        wait_for(lambda: rig.run.durable_step == 8)
        time.sleep(0.05)
        assert rig.run.durable_step == 8
        assert sum(e.op == "sync" and is_log(e.path) for e in events) == 2
        rig.run.flush()
        assert rig.run.durable_step == 10
    crash(rig.run)
    check_history(tmp_path / "run", rig.truth)


def test_with_os_durability_nothing_of_the_log_is_synced(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", durability="os")
    rig.run.flush()
    events: list[Event] = []
    with files.observe(events.append):
        rig.train(6)
        rig.run.flush()
    assert rig.run.durable_step == 6
    assert not any(e.op == "sync" and is_log(e.path) for e in events)
    crash(rig.run)
    check_history(tmp_path / "run", rig.truth)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_steps_in_flight_are_bounded_and_waiting_is_counted_as_stall(limit: int, tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", max_inflight_steps=limit)
    rig.run.flush()
    most = 0
    with slow(0.02):
        for _ in range(12):
            rig.train(1)
            most = max(most, rig.run.step - rig.run.durable_step)
            assert rig.run.stats()["inflight_steps"] <= limit
    assert 1 <= most + 1 <= limit + 1
    assert rig.run.stats()["stall_s"] > 0.1
    crash(rig.run)
    check_history(tmp_path / "run", rig.truth)


def test_bytes_in_flight_are_bounded(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", max_inflight_steps=1000, max_inflight_bytes=30_000)
    rig.run.flush()
    with slow(0.02):
        for _ in range(12):
            rig.train(1)
            assert rig.run.stats()["inflight_bytes"] <= 30_000
    assert rig.run.stats()["stall_s"] > 0.05
    crash(rig.run)
    check_history(tmp_path / "run", rig.truth)


def test_a_fast_disk_stalls_nobody(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", durability="os")
    rig.run.flush()
    for _ in range(10):
        rig.train(1)
        time.sleep(0.02)
    assert rig.run.stats()["stall_s"] < 0.05
    crash(rig.run)


def test_flush_returns_only_when_all_is_durable(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run")
    with slow(0.03):
        rig.train(4)
        assert rig.run.durable_step < 4
        rig.run.flush()
        assert rig.run.durable_step == 4
    crash(rig.run)


def test_flush_waits_for_the_first_base(tmp_path: Path) -> None:
    with gate(ops=("sync",), what=lambda path: path.endswith(".safetensors")) as disk:
        disk.close()
        rig = Rig(tmp_path / "run")
        rig.train(2)
        assert rig.run.durable_step == -1
        threading.Timer(0.2, disk.open).start()
        rig.run.flush()
        assert rig.run.durable_step == 2
    crash(rig.run)
    check_history(tmp_path / "run", rig.truth)


@pytest.mark.parametrize("op", ["create", "write", "sync"])
def test_the_first_update_waits_only_for_a_copy_of_the_first_base(op: str, tmp_path: Path) -> None:
    """The disk stands still, training does not. The state is larger than what is staged in memory for one write."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1200, 1200), nn.Linear(1200, 1200), nn.Linear(1200, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with gate(ops=(op,), what=lambda path: path.endswith(".safetensors")) as disk:
        disk.close()
        run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False, max_inflight_steps=100)
        truth = Truth(run, model, optimizer)
        truth.resume()
        assert disk.reached.wait(10)
        opening = threading.Timer(6, disk.open)
        opening.start()
        began = time.monotonic()
        for _ in range(3):
            model(torch.randn(2, 1200)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            truth.commit()
        took = time.monotonic() - began
        opening.cancel()
        disk.open()
        run.flush()
        assert run.durable_step == 3
    crash(run)
    check_history(tmp_path / "run", truth)
    assert took < 5, "training stood still with the disk"


def test_segments_roll_over_and_all_steps_come_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", segment_bytes=40_000)
    rig.train(12)
    rig.run.close()
    assert len(list((tmp_path / "run").glob("timelines/0001/log/*/*.frames"))) > 2
    check_history(tmp_path / "run", rig.truth)


def test_an_error_in_a_background_thread_that_is_not_the_disks_is_raised_too(tmp_path: Path, monkeypatch: Any) -> None:
    rig = Rig(tmp_path / "run", on_error="warn")
    rig.train(3)
    rig.run.flush()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(rig.run._capture.offload._log, "finish", fail)
    rig.step()
    rig.run.commit()
    with pytest.raises(EverstepError, match="a bug of ours"):
        for _ in range(20):
            rig.step()
            rig.run.commit()
            time.sleep(0.01)
    monkeypatch.undo()
    with pytest.raises(EverstepError):
        rig.run.close()
    check_history(tmp_path / "run", rig.truth, complete=False)


def test_hidden_edits_while_unprotected_do_not_matter_afterwards(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", on_error="warn")
    rig.train(6)
    rig.run.flush()
    fault = Fault(errno.ENOSPC, ("write",))
    with files.observe(fault=fault), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprotectedWarning)
        warnings.simplefilter("ignore", HiddenEditWarning)
        fault.armed = True
        for _ in range(5):
            rig.train(1)
            rig.model[0].weight.data.mul_(1.5)
            time.sleep(0.01)
        fault.armed = False
        protect_again(rig)
    last = rig.run.step
    crash(rig.run)
    assert different(rig.truth.states[last], everstep.open(tmp_path / "run").state(last)) == []
