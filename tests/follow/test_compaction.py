"""Bases from the follower process: they appear, are verified, history stays restorable, and nobody is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.follow.compact import Compactor, describe
from everstep.store.bases import BaseWriter, base_folder, read_manifest
from everstep.store.runs import RunPath, read_listing
from truth import Truth, check_history, check_resume, crash


def build(width: int = 16) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Mine(torch.optim.SGD):
    """Not known to any other process."""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_for(true: Callable[[], bool], seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def manifests(path: Any) -> dict[int, Any]:
    return {n: m for t in read_listing(RunPath(path)).timelines.values() for n, m in t.bases.items()}


class Rig:
    """A run with a follower that is up."""

    def __init__(self, path: Any, **options: Any) -> None:
        self.path = path
        self.model, self.optimizer = build()
        options = {"base_interval": 10, "segment_bytes": 60_000, "quiet": True, "retention": {}, **options}
        self.run = everstep.attach(self.model, self.optimizer, path, **options)
        self.truth = Truth(self.run, self.model, self.optimizer)
        self.truth.resume()

    def train_until(self, true: Callable[[], bool], seconds: float = 50) -> None:
        """Slowly enough for a follower on a busy machine to start and to keep up."""
        known = self.bases()
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "waited in vain"
            self.train(1)
            process = self.run._keeper._process
            time.sleep(0.3 if process is not None and self.bases() == known else 0.03)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            step(self.model, self.optimizer)
            self.truth.commit(wait=True)

    def bases(self) -> int:
        return int(self.run.stats()["follower_bases"])

    @property
    def follower(self) -> int:
        process = self.run._keeper._process
        assert process is not None
        return int(process.pid)


def test_bases_come_from_the_follower_and_history_stays_restorable(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run")
    rig.train_until(lambda: rig.bases() >= 3)
    rig.run.flush()
    pid = rig.follower
    assert alive(pid)
    assert os.getpgid(pid) != os.getpgid(os.getpid()), "outside of the trainer's process group"
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    stats = rig.run.stats()
    assert stats["proven_step"] > 0
    last = rig.run.step
    crash(rig.run)
    assert not alive(pid)
    found = manifests(tmp_path / "run")
    assert len(found) == 2, "retention has removed the others"
    assert "folded" in {m.audit for m in found.values()}
    check_history(tmp_path / "run", rig.truth, complete=False)
    assert everstep.open(tmp_path / "run").verify(deep=True).ok
    check_resume(tmp_path / "run", build, rig.truth, last)


def test_the_follower_is_gone_after_close(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run")
    rig.train_until(lambda: rig.run._keeper._process is not None)
    pid = rig.follower
    rig.run.close()
    assert not alive(pid)
    assert rig.run._keeper._process is None or rig.run._keeper._process.returncode is not None


def test_a_follower_that_is_killed_is_replaced(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run")
    rig.train_until(lambda: rig.bases() >= 1)
    first = rig.follower
    os.kill(first, signal.SIGKILL)
    before = rig.bases()
    rig.train_until(lambda: rig.bases() > before)
    assert rig.follower != first
    last = rig.run.step
    crash(rig.run)
    check_history(tmp_path / "run", rig.truth, complete=False)
    check_resume(tmp_path / "run", build, rig.truth, last)


def test_when_followers_keep_dying_the_trainer_takes_the_bases(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run")
    end = time.monotonic() + 60
    killed: set[int] = set()
    while rig.run._keeper._register is not None:
        assert time.monotonic() < end
        process = rig.run._keeper._process
        if process is not None and process.pid not in killed and alive(process.pid):
            killed.add(process.pid)
            os.kill(process.pid, signal.SIGKILL)
        rig.train(1)
        time.sleep(0.01)
    at = rig.run.step
    rig.train(25)
    wait_for(lambda: rig.run.stats()["base_step"] > at)
    last = rig.run.step
    crash(rig.run)
    check_history(tmp_path / "run", rig.truth, complete=False)
    check_resume(tmp_path / "run", build, rig.truth, last)


def test_a_follower_that_hangs_does_not_let_the_log_grow_without_bound(tmp_path: Path) -> None:
    """It is stopped: after some intervals the trainer takes a base itself; close() does not hang."""
    rig = Rig(tmp_path / "run")
    rig.train_until(lambda: rig.bases() >= 1)
    pid = rig.follower
    os.kill(pid, signal.SIGSTOP)
    try:
        at = rig.run.stats()["base_step"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", everstep.errors.EverstepWarning)
            for _ in range(80):
                rig.train(1)
                time.sleep(0.01)
            wait_for(lambda: rig.run.stats()["base_step"] > at)
        size = sum(p.stat().st_size for p in (tmp_path / "run").rglob("*") if p.is_file())
        assert size < 3_000_000
        last = rig.run.step
        began = time.monotonic()
        rig.run.close()
        assert time.monotonic() - began < 15
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    check_history(tmp_path / "run", rig.truth, complete=False)
    check_resume(tmp_path / "run", build, rig.truth, last)


def test_an_optimizer_that_the_follower_cannot_build_gets_its_bases_from_the_trainer(tmp_path: Path) -> None:
    model, _ = build()
    optimizer = Mine(model.parameters(), lr=0.1, momentum=0.9)
    run = everstep.attach(
        model, optimizer, tmp_path / "run", quiet=True, base_interval=5, segment_bytes=20_000, retention={}
    )
    truth = Truth(run, model, optimizer)
    truth.resume()
    for _ in range(28):
        step(model, optimizer)
        truth.commit(wait=True)
        if run._capture.snapshot is not None:
            run._capture.snapshot.wait()
    assert run._keeper._process is None
    assert run.stats()["follower_bases"] == 0
    crash(run)
    found = manifests(tmp_path / "run")
    assert len(found) == 2 and {m.audit for m in found.values()} == {"trainer"}
    assert max(found) >= 20

    def again() -> Any:
        model, _ = build()
        return model, Mine(model.parameters(), lr=0.1, momentum=0.9)

    check_resume(tmp_path / "run", again, truth, 28)


TRAINER = """
    import os, sys, time
    sys.path[:0] = {path!r}
    import torch
    torch.set_num_threads(1)
    from test_compaction import build, step
    import everstep

    model, optimizer = build()
    run = everstep.attach(model, optimizer, {run!r}, quiet=True, base_interval=8)
    run.resume()
    if {fork!r} and os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    told = False
    while True:
        step(model, optimizer)
        run.commit(wait=True)
        process = run._keeper._process
        if process is not None and not told:
            if {fork!r} and os.fork() == 0:  # inherits the pipes of the follower
                time.sleep(60)
                os._exit(0)
            print(process.pid, flush=True)
            told = True
        time.sleep(0.05)
"""


@pytest.mark.parametrize(
    "fork", [pytest.param(False, marks=pytest.mark.long), True], ids=["alone", "with-children-that-live-on"]
)
def test_the_follower_is_gone_soon_after_the_trainer_is_killed(fork: bool, tmp_path: Path) -> None:
    code = TRAINER.format(path=[p for p in sys.path if p], run=str(tmp_path / "run"), fork=fork)
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert trainer.stdout is not None
    try:
        pid = int(trainer.stdout.readline())
        assert alive(pid)
        time.sleep(0.5)
        trainer.kill()
        trainer.wait()
        wait_for(lambda: not alive(pid), 15)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()
        trainer.stdout.close()
    with everstep.attach(*build(), tmp_path / "run", quiet=True) as run:
        assert run.resume() > 5


# -- the compactor in this process ------------------------------------------------------------------------------------


def recorded(path: Any, steps: int, **options: Any) -> Truth:
    model, optimizer = build()
    run = everstep.attach(model, optimizer, path, quiet=True, follower=False, **options)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for _ in range(steps):
        step(model, optimizer)
        truth.commit()
    crash(run)
    return truth


def test_a_folded_base_equals_the_state_that_the_trainer_had(tmp_path: Path) -> None:
    truth = recorded(tmp_path / "run", 12)
    compactor = Compactor(RunPath(tmp_path / "run"), 1, 1)
    for n in (3, 4, 9, 12):
        compactor.advance(n)
        compactor.write_base(direct=False)
    assert sorted(manifests(tmp_path / "run")) == [0, 3, 4, 9, 12]
    for n in (3, 4, 9, 12):
        assert everstep.open(tmp_path / "run").plan(n).frames == ()
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", build, truth, 12)


def test_a_folded_base_carries_gradients_and_cursor(tmp_path: Path) -> None:
    """A resume from a folded base goes on exactly as one from frames."""

    def train(path: Any, compact: bool) -> list[float]:
        model, optimizer = build()
        run = everstep.attach(model, optimizer, path, quiet=True, follower=False)
        run.resume()
        torch.manual_seed(3)
        losses: list[float] = []

        def go(count: int) -> None:
            for _ in range(count):
                loss = model(torch.randn(4, 8)).square().mean()
                loss.backward()  # never zeroed: gradients add up over commits
                optimizer.step()
                run.commit()
                losses.append(loss.item())

        go(7)
        if compact:
            crash(run)
            compactor = Compactor(RunPath(path), 1, 1)
            compactor.advance(7)
            compactor.write_base(direct=False)
            model, optimizer = build()
            torch.manual_seed(99)
            run = everstep.attach(model, optimizer, path, quiet=True, follower=False)
            assert run.resume() == 7
        go(5)
        crash(run)
        return losses

    assert train(tmp_path / "a", False) == train(tmp_path / "b", True)


def test_a_superseded_follower_writes_nothing(tmp_path: Path) -> None:
    recorded(tmp_path / "run", 6)
    compactor = Compactor(RunPath(tmp_path / "run"), 1, 1)
    compactor.advance(3)
    truth = recorded(tmp_path / "run", 4)
    before = set(manifests(tmp_path / "run"))
    with pytest.raises(everstep.EverstepError, match="supersede"):
        compactor.advance(6)
        compactor.write_base(direct=False)
    assert set(manifests(tmp_path / "run")) == before
    assert max(truth.states) == 10


def test_the_trainer_and_the_follower_may_take_a_base_of_one_step_at_once(tmp_path: Path) -> None:
    """Each builds its own beside the name; who is second finds the other's and drops its own."""
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False, base_interval=10**6)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for _ in range(5):
        step(model, optimizer)
        truth.commit()
    run.flush()
    path = RunPath(str(tmp_path / "run"))
    compactor = Compactor(path, 1, 1)
    compactor.advance(5)
    slots, tensors, fields = describe(compactor._state)
    first, second = (BaseWriter(path.bases(1), 5, slots, direct=False) for _ in range(2))
    for writer in (first, second):
        for index in writer.order:
            writer.add(tensors[index])
    common = {
        "run": path.read_run().run, "timeline": 1, "generation": 1, "step": 5, "layout": compactor._state.layout,
        "cursor": compactor._state.cursor, "audit": "folded", "fingerprint": {}, **fields,
    }  # fmt: skip
    mine, theirs = first.finish(**common), second.finish(**common)
    assert theirs == read_manifest(base_folder(path.bases(1), 5)) == mine
    assert sorted(os.listdir(path.bases(1))) == ["000000000000", "000000000005"]
    assert compactor.write_base(direct=False).step == 5
    crash(run)
    check_history(tmp_path / "run", truth)


def test_the_last_frame_with_all_hashes_is_compared_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.capture.auditor.ALWAYS_BYTES", -1)
    monkeypatch.setattr("everstep.capture.auditor.UNHURRIED_BYTES", -1)
    monkeypatch.setattr("everstep.capture.auditor.Auditor._hash_some", lambda *args, **more: False)
    monkeypatch.setattr("everstep.capture.watch.SLICE_BYTES", 0)
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    run.resume()
    for _ in range(6):
        step(model, optimizer)
        run.commit()
    run.flush()
    compactor = Compactor(RunPath(str(tmp_path / "run")), 1, 1)
    compactor.advance(6)
    crash(run)
    assert compactor.step == 6 and not compactor.complete
    assert compactor.proven == 3, "the first three steps are looked at in full"


def test_a_follower_that_is_asked_for_a_step_that_has_a_base_answers_with_it(tmp_path: Path) -> None:
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False) as run:
        run.resume()
        for _ in range(3):
            step(model, optimizer)
            run.commit()
    compactor = Compactor(RunPath(str(tmp_path / "run")), 1, 1)
    compactor.advance(3)
    assert compactor.write_base(direct=False).step == 3
    assert compactor.complete, "what the trainer took is proven"


def test_a_follower_forgets_what_it_has_folded(tmp_path: Path) -> None:
    model, optimizer = build()
    options: dict[str, Any] = {"follower": False, "segment_bytes": 20_000, "retention": {}, "quiet": True}
    run = everstep.attach(model, optimizer, tmp_path / "run", **options)
    run.resume()
    compactor = Compactor(RunPath(str(tmp_path / "run")), 1, 1)
    known = []
    for last in range(10, 61, 10):
        while run.step < last:
            step(model, optimizer)
            run.commit(wait=True)
        compactor.advance(last)
        assert compactor._line is not None and compactor.step == last
        known.append((len(compactor._line.segments), len(compactor._line.frames)))
    names = [name for name in os.listdir(tmp_path / "run/timelines/0001/log/rank-00000") if name.endswith(".frames")]
    assert len(names) > 12, "segments whose files are still there"
    assert max(known) <= (2, 2), known
    assert compactor.proven == 60, "and what it holds is right"
    crash(run)
