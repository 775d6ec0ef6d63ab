"""What the audit hashes, and when."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from everstep.capture.auditor import Auditor
from everstep.capture.pending import Audit
from everstep.capture.watch import Watched


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
