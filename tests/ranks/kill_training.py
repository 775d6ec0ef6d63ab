"""A small DDP training that test_kills.py starts, kills and starts again: python kill_training.py RUN STEPS [JSON].

JSON may say: `slow_rank`, `slow_after` (that rank stores nothing after this step), `kill_at` ({rank: step}: right after the
commit of that step), `kill_in_resume` (rank: before its part of the restore is done), `bucket_cap_mb`,
`kill_in_start` (rank: when the generation is published, and nobody has begun), `edit` ([rank, step]: of a parameter that
another rank stores), `attach` (more options), `fsdp` (FSDP2 in place of DDP), `plain` (without Everstep), `shared` (for each
rank a folder in memory, as if it were on a host of its own), `pause_s` (before each step), `await_shadow` (train when it
holds the state), `await_folded` (end when the shadow has all), `kill_shadow_at` (step). Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.run import Run
from everstep.together import Together


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(9, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Dropout(0.1), nn.Linear(17, 33), nn.Linear(33, 3)]
    return nn.Sequential(*layers)


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 9, generator=g), torch.randint(0, 3, (8,), generator=g)
    return x[rank::world], y[rank::world]


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit of parameters and optimizer state, whatever part of them this rank has."""
    found = hashlib.sha256()
    for p in model.parameters():
        for tensor in (p.detach(), *(v for _, v in sorted(optimizer.state.get(p, {}).items()))):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.update(whole.numpy().tobytes())
    return found.hexdigest()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def turn(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, world: int) -> float:
    x, y = batch(step, rank, world)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def await_shadow(run: Run) -> None:
    """Until there is a shadow that holds something, or needs a base, which the next step will give it."""
    time.sleep(0.3)
    while run.stats()["folded_step"] < 0 and not run._keeper._needs_base:
        time.sleep(0.01)


def main() -> None:
    path, steps = sys.argv[1], int(sys.argv[2])
    orders: dict[str, Any] = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if "shared" in orders:
        os.environ["EVERSTEP_SHARED"] = orders["shared"][rank]
    model = build()
    if orders.get("fsdp"):
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=orders.get("bucket_cap_mb"))
    torch.manual_seed(100 + rank)  # dropout differs between ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if orders.get("plain"):
        losses = [turn(model, optimizer, step, rank, world) for step in range(steps)]
        found = digest(model, optimizer)
        if rank == 0:
            print(json.dumps({"resumed": 0, "losses": losses, "digest": found}), flush=True)
        dist.destroy_process_group()
        return
    options = {"quiet": True, "base_interval": 4, **orders.get("attach", {})}
    run = everstep.attach(model, optimizer, path, **options)
    if orders.get("kill_in_resume") == rank:
        Together._restore_part = lambda *args: die()  # type: ignore[assignment,method-assign,return-value]
    if orders.get("kill_in_start") == rank:
        Run._start = lambda *args: die()  # type: ignore[method-assign]
    at = run.resume()
    if orders.get("slow_rank") == rank:
        offload = run._capture.offload
        finish = offload._finish

        def slow(job: Any) -> None:
            if job.step > orders["slow_after"]:
                time.sleep(1000)
            finish(job)

        offload._finish = slow
    while orders.get("await_shadow") and (run.stats()["shadow_pid"] is None or run.stats()["folded_step"] < at):
        time.sleep(0.01)
    kill_at = {int(r): n for r, n in orders.get("kill_at", {}).items()}
    losses = []
    for step in range(at, steps):
        time.sleep(orders.get("pause_s", 0.0))
        if "kill_shadow_at" in orders and step > orders["kill_shadow_at"]:
            await_shadow(run)
        loss = turn(model, optimizer, step, rank, world)
        if orders.get("edit") == [rank, step + 1]:
            stored = run._opened.training.stored
            uids = run._capture._inventory.replicas
            assert uids and not set(uids) & stored
            next(iter(uids.values())).detach().view(-1)[0] += 0.5  # of what the other rank stores
        run.commit()
        losses.append(loss)
        if rank == 0 and orders.get("kill_shadow_at") == step + 1:
            os.kill(run.stats()["shadow_pid"], signal.SIGKILL)
        if kill_at.get(rank) == step + 1:
            if rank != orders.get("slow_rank"):
                run.flush()
            while rank == orders.get("slow_rank") and run.durable_step < orders["slow_after"]:
                time.sleep(0.005)  # no slower than it was told
            die()
    while orders.get("await_folded") and run.stats()["folded_step"] < steps:
        run.flush()
        time.sleep(0.01)
    stats = run.stats()
    run.close()
    found = digest(model, optimizer)
    if rank == 0:
        told = {"resumed": at, "losses": losses, "at": run._resumed, "digest": found, "stats": stats}
        print(json.dumps(told), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
