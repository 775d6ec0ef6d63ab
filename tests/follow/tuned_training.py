"""A training of 10 ms a step on a disk that takes 200 ms for every sync: prints what its tuner does until it is killed."""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from torch import nn

import everstep

SYNC_S = 0.2


def throttle() -> None:
    plain = os.fdatasync

    def slow(fd: int) -> None:
        time.sleep(SYNC_S)
        plain(fd)

    os.fdatasync = slow


def main(path: str) -> None:
    throttle()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    run = everstep.attach(
        model, optimizer, path, quiet=True, tune=True, durability="batch", batch_steps=1, base_interval=8, direct_io=False
    )
    run.resume()
    waited, at = 0.0, run.step
    while True:
        time.sleep(0.01)
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.commit()
        if run.step % 5 == 0:
            told = run.stats()
            waited_s = (told["stall_s"] - waited) / (run.step - at)
            waited, at = told["stall_s"], run.step
            tuner = told["tuner"]
            line = {"step": run.step, "waited_s": waited_s, "setting": tuner["setting"], "failures": tuner["failures"]}
            print(json.dumps({**line, "decisions": len(tuner["decisions"])}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
