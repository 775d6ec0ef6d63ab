"""What the audit hashes, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture import auditor as auditors
from everstep.capture import watch
from everstep.capture.auditor import Auditor
from everstep.capture.pending import Audit
from everstep.capture.watch import Watched
from everstep.store import files
from truth import Truth, check_history, crash


@pytest.fixture
def auditor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Auditor]:
    """One to which little is much."""
    monkeypatch.setattr("everstep.capture.auditor.ALWAYS_BYTES", -1)
    monkeypatch.setattr("everstep.capture.auditor.UNHURRIED_BYTES", -1)
    found = Auditor(full=False, share=0.02)
    yield found
    found.close()


def watched(num: int) -> list[Watched]:
    return [Watched(uid, torch.randn(8), f"tensor {uid}", None) for uid in range(num)]


def hashed(auditor: Auditor, must: list[Watched], may: list[Watched], step_s: float, versions: list[int]) -> Audit:
    audit = Audit()
    auditor.begin(audit, must, versions, may, [], step_s)
    auditor.wake()
    audit.done.wait()
    return audit


def test_optimizer_state_is_hashed_whole_when_its_share_of_time_has_been_saved_up(auditor: Auditor) -> None:
    must, may = watched(2), watched(3)
    auditor._pass_s = 1.0  # a pass over the state takes a second, and a step ten: every fifth
    audits = []
    for _ in range(5):
        audits.append(hashed(auditor, must, may, 10.0, [0, 0]))
        auditor._pass_s = 1.0
    assert [len(a.uids) for a in audits] == [2, 2, 2, 2, 5]
    assert [a.complete for a in audits] == [False] * 4 + [True]


def test_a_parameter_that_was_edited_after_the_commit_is_not_hashed(auditor: Auditor) -> None:
    must = watched(2)
    versions = [w.tensor._version for w in must]
    must[1].tensor.add_(1)
    audit = hashed(auditor, must, [], 1.0, versions)
    assert audit.uids == [0] and not audit.complete


def test_who_ends_the_window_starts_what_nobody_has_started(auditor: Auditor) -> None:
    audit = Audit()
    auditor.begin(audit, watched(2), [0, 0], [], [], 1.0)
    assert auditor.end() > 0.0
    assert audit.done.is_set() and audit.uids == [0, 1]


def test_whoever_comes_first_hashes_and_nobody_a_second_time(auditor: Auditor) -> None:
    audit = Audit()
    auditor.begin(audit, watched(2), [0, 0], [], [], 1.0)
    auditor.run()  # in this thread
    assert audit.done.is_set() and 0.0 < auditor.busy_s <= auditor.lent_s
    auditor.run()
    auditor.wake()
    assert auditor.end() == 0.0
    assert audit.uids == [0, 1]


def test_the_audits_own_thread_begins_when_a_quarter_of_a_step_is_over_and_the_writer_has_not_come_to_it(
    auditor: Auditor,
) -> None:
    audit = Audit()
    auditor.begin(audit, watched(2), [0, 0], [], [], 1000.0)
    auditor.wake_if_late()
    assert len(auditor._left) == 1
    auditor._due = time.perf_counter() - 1.0
    auditor.wake_if_late()
    audit.done.wait()
    assert audit.uids == [0, 1] and auditor.lent_s == 0.0


def test_a_step_behind_a_slow_disk_is_hashed_before_the_disk_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next update waits for hashes, and must not wait for a disk."""
    monkeypatch.setattr(watch, "SLICE_BYTES", 0)
    monkeypatch.setattr(watch, "SLICED_UP_TO_BYTES", 0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False, max_inflight_steps=8)
    truth = Truth(run, model, optimizer)
    truth.resume()
    may_sync = threading.Event()
    may_sync.set()

    def fault(op: str, path: str) -> None:
        if op == "sync" and path.endswith(".frames"):
            may_sync.wait(30)

    with files.observe(fault=fault):
        for t in range(10):
            if t == 6:
                run.flush()
                may_sync.clear()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            truth.commit()
        assert run.durable_step == 6 and run.stats()["stall_s"] < 10.0
        may_sync.set()
        run.flush()
    crash(run)
    check_history(tmp_path / "run", truth)


@pytest.mark.parametrize("accumulates", [True, False], ids=["accumulates", "overwrites"])
def test_a_step_is_hashed_as_it_was_though_its_parameters_get_other_memory_soon_after(
    accumulates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SLICE_BYTES", 0)  # the other thread hashes, as it does for models that are not tiny
    monkeypatch.setattr(watch, "SLICED_UP_TO_BYTES", 0)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    hash_one = auditors._hash_one

    def late(*args: Any) -> bool:
        time.sleep(0.1)
        return hash_one(*args)

    for t in range(10):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if t == 7:
            monkeypatch.setattr(auditors, "_hash_one", late)
        truth.commit()
        if t == 7:
            model.weight.data = model.weight.data * 0.5
            if accumulates:
                model(torch.ones(2, 4)).sum().backward()
            truth.commit()
            monkeypatch.setattr(auditors, "_hash_one", hash_one)
    run.flush()
    crash(run)
    check_history(tmp_path / "run", truth)
