"""Trainings with durability="batch" that are really killed: python batch_training.py FOLDER. Prints what was left, as JSON.

Each is forked, tells after every commit how far it is, and is killed in the middle of it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import everstep
from everstep.store import files

BATCH, INFLIGHT = 1000, 3
CASES: dict[str, dict[str, Any]] = {
    "direct": {"direct_io": True},
    "cached": {"direct_io": False},
}


def train(path: Path, options: dict[str, Any], tell: int) -> None:
    """Until killed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 300), nn.Linear(300, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    run = everstep.attach(
        model, optimizer, path, durability="batch", batch_steps=BATCH, max_inflight_steps=INFLIGHT, follower=False,
        quiet=True, base_interval=10**6, **options,
    )  # fmt: skip
    run.resume()
    while True:
        model(torch.randn(4, 100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.commit()
        stats = run.stats()
        os.write(tell, json.dumps([stats[k] for k in ("step", "written_step", "durable_step")]).encode() + b"\n")


def killed_at(path: Path, options: dict[str, Any], step: int) -> list[int]:
    """What a training last told that was killed at this step or a little later."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            train(path, options, write)
        finally:
            os._exit(1)
    os.close(write)
    told: list[int] = []
    with os.fdopen(read) as lines:
        for line in lines:
            told = json.loads(line)
            if told[0] >= step and told[1] >= 0:
                break
        os.kill(pid, signal.SIGKILL)
        for line in lines:  # what it told until it was dead; the last line may be cut
            if line.endswith("\n"):
                told = json.loads(line)
    os.waitpid(pid, 0)
    return told


if __name__ == "__main__":
    torch.set_num_threads(1)
    found: dict[str, list[Any]] = {}
    for name, given in CASES.items():
        run_path = Path(sys.argv[1], name)
        if given.get("direct_io") and not files.supports_direct(sys.argv[1]):
            continue
        found[name] = []
        for at in (15, 33):
            last = killed_at(run_path, given, at)
            found[name].append([*last, everstep.open(run_path).steps[-1]])
    print(json.dumps(found))
