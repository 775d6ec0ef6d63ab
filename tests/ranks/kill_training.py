"""A small DDP training that test_kills.py starts, kills and starts again: python kill_training.py RUN STEPS [JSON].

JSON may say: `slow_rank`, `slow_after` (that rank stores nothing after this step), `kill_at` ({rank: step}: right after the
commit of that step), `kill_in_resume` (rank: before its part of the restore is done), `bucket_cap_mb`,
`edit` ([rank, step]: of a parameter that another rank stores). Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.run import Run


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(9, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Dropout(0.1), nn.Linear(17, 33), nn.Linear(33, 3)]
    return nn.Sequential(*layers)


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 9, generator=g), torch.randint(0, 3, (8,), generator=g)
    return x[rank::world], y[rank::world]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    path, steps = sys.argv[1], int(sys.argv[2])
    orders: dict[str, Any] = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(build(), bucket_cap_mb=orders.get("bucket_cap_mb"))
    torch.manual_seed(100 + rank)  # dropout differs between ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = everstep.attach(model, optimizer, path, quiet=True, base_interval=4)
    if orders.get("kill_in_resume") == rank:
        restore = Run._restore_part
        Run._restore_part = lambda *args: (die(), restore(*args))[1]  # type: ignore[assignment,method-assign]
    at = run.resume()
    if orders.get("slow_rank") == rank:
        offload = run._capture.offload
        finish = offload._finish

        def slow(job: Any) -> None:
            if job.step > orders["slow_after"]:
                time.sleep(1000)
            finish(job)

        offload._finish = slow
    kill_at = {int(r): n for r, n in orders.get("kill_at", {}).items()}
    losses = []
    for step in range(at, steps):
        x, y = batch(step, rank, world)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if orders.get("edit") == [rank, step + 1]:
            stored = run._stored
            uids = run._capture._inventory.replicas
            assert uids and not set(uids) & stored
            next(iter(uids.values())).detach().view(-1)[0] += 0.5  # of what the other rank stores
        run.commit()
        losses.append(loss.item())
        if kill_at.get(rank) == step + 1:
            if rank != orders.get("slow_rank"):
                run.flush()
            die()
    run.close()
    if rank == 0:
        print(json.dumps({"resumed": at, "losses": losses, "at": run._resumed}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
