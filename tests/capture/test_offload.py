"""The writer thread."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture import offload
from truth import Truth, check_history, crash


def test_a_writer_that_gets_up_when_an_update_is_due_misses_none_that_comes_earlier_or_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "POLLED_S", (0.01, 1.0))
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for pause_s in (*[0.03] * 12, 0.0, 0.0, 0.2, 0.028, 0.03, 0.032, 0.1, 0.03):
        time.sleep(pause_s)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.commit()
    begun = time.perf_counter()
    run.flush()  # does not wait for the next update
    assert run.durable_step == run.step == 20
    assert run._live().offload._update.usual_s > 0.01
    assert time.perf_counter() - begun < 30.0
    crash(run)
    check_history(tmp_path / "run", truth)


def test_a_writer_that_expects_a_commit_misses_none_that_comes_earlier_or_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps whose commit comes long after their update: the writer is awake when it is due, in the middle of a frame."""
    monkeypatch.setattr(offload, "POLLED_COMMIT_S", (0.005, 1.0))
    polled: list[bool] = []
    plain = offload._Expected.next

    def watched(self: Any, jobs: Any, since: float) -> Any:
        polled.append(self is writer._commit and self.usual_s > 0.005)
        return plain(self, jobs, since)

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    writer = run._live().offload
    monkeypatch.setattr(offload._Expected, "next", watched)
    for pause_s in (*[0.03] * 12, 0.0, 0.2, 0.028, 0.03, 0.032, 0.1, 0.03):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(pause_s)
        optimizer.zero_grad()
        truth.commit()
    assert 0.01 < writer._commit.usual_s < 0.2
    assert any(polled)
    run.flush()
    assert run.durable_step == run.step == 19
    crash(run)
    check_history(tmp_path / "run", truth)
