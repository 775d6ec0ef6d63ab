"""durability="batch": B frames a sync, out of memory that is used again, and what kills of the process leave of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import batch_training
import pytest
import torch
from torch import nn

import everstep
from everstep.store import files
from support import crash


@pytest.mark.long
def test_a_real_kill_loses_no_step_that_was_written_and_at_most_what_is_in_flight(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p])}
    done = subprocess.run(
        [sys.executable, batch_training.__file__, tmp_path], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name, kills in json.loads(done.stdout).items():
        assert len(kills) == 2
        for step, written, durable, left in kills:
            assert left >= written >= step - batch_training.INFLIGHT, f"{name}: {step, written, durable, left}"
            assert written > durable, "the step that was resumed is durable, and none after it"


def test_frames_of_a_batch_are_synced_together_out_of_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    new_pages = files.new_pages
    monkeypatch.setattr(files, "new_pages", lambda n: taken.append(n) or new_pages(n))
    model = nn.Linear(100, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    events: list[files.Event] = []
    run = everstep.attach(model, optimizer, tmp_path, durability="batch", batch_steps=5, follower=False, quiet=True)
    run.resume()
    with files.observe(events.append):
        for step in range(40):
            model(torch.randn(4, 100)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
            if step == 9:
                run.flush()
                taken.clear()
                events.clear()
        run.flush()
    frames = [e.op for e in events if e.path.endswith(".frames")]
    assert frames.count("sync") == 6 and frames.count("write") == 30
    assert not taken
    crash(run)
