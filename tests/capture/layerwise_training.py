"""DDP on several ranks with updates in backward: python layerwise_training.py FOLDER RANKS CASE...

FOLDER/CASE.json then holds a report of each rank: what differs from the same training without updates in backward and
without a hook, how many parameters had been updated when backward came to the first layer, and what was raised.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
import torch._dynamo  # optimizers and DDP import it when they are first made: here, so once for all ranks
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import everstep
from everstep.capture.early import average
from everstep.capture.layerwise import WATCHED_STEPS, Layerwise
from support import fork_ranks
from truth import different, live_state

STEPS = 8
BUCKET_MB = 0.05
"""One layer's weight in each."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "compressed": {"hook": fp16_compress_hook},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "unhooked": {"unhooked": True},
    "clipped late": {},
    "accumulated late": {},
}
"""Options of DDP, and the user's own communication hook."""


attached: list[Layerwise] = []
reducing: list[bool] = []
"""At each reduction, whether the flag was set."""


class Model(nn.Module):
    """Of the layers in the middle, a rank leaves out one at each step if told to."""

    def __init__(self, *, skips: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(120, 120) for _ in range(5))
        self.skips = skips
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        # At every third step both leave out the same: then nobody has a gradient.
        left_out = 1 + (0 if self.num_calls % 3 == 0 else dist.get_rank() + self.num_calls) % 3
        for i, layer in enumerate(self.layers):
            if not (self.skips and i == left_out):
                x = torch.tanh(layer(x))
        return x


def build(case: str, *, layerwise: bool) -> Any:
    torch.manual_seed(1)
    options = {**CASES[case]}
    hook, unhooked = options.pop("hook", None), options.pop("unhooked", False)
    ddp = DDP(Model(skips=case == "unused"), bucket_cap_mb=BUCKET_MB, **options)
    if layerwise and not unhooked:

        def told(state: Any, bucket: Any) -> Any:
            reducing.append(attached[-1].reducing.is_set())
            return (hook or average)(state, bucket)

        ddp.register_comm_hook(None, everstep.early_hook(told))
    elif hook is not None:
        ddp.register_comm_hook(None, hook)
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-3, weight_decay=0.1)


def train_step(case: str, model: Any, optimizer: Any, step: int) -> None:
    x = torch.randn(8, 120, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    if case == "accumulated late" and step == STEPS - 2:
        with model.no_sync():
            model(x).square().mean().backward()
    model(x).square().mean().backward()
    if case == "clipped late" and step == STEPS - 2:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()


def run_case(case: str) -> dict[str, Any]:
    plain, plain_optimizer = build(case, layerwise=False)
    for step in range(STEPS):
        train_step(case, plain, plain_optimizer, step)
    ddp, optimizer = build(case, layerwise=True)
    updated: list[int] = []
    layerwise = Layerwise(
        optimizer, list(ddp.parameters()), before=lambda _: None, after=lambda _: None, model=ddp, batch_bytes=1
    )
    attached.append(layerwise)
    reducing.clear()

    def before_the_last_but_one(grad: torch.Tensor) -> None:
        """Wait, though not for ever, until some bucket has been reduced."""
        deadline = time.monotonic() + (20 if len(updated) >= WATCHED_STEPS and ddp.require_backward_grad_sync else 0)
        while not layerwise._reduced and not layerwise.num_unfinished and time.monotonic() < deadline:
            time.sleep(0.001)

    layers = ddp.module.layers
    if case not in ("unused", "static", "unhooked"):  # where buckets are reduced late, or nobody tells
        layers[1].weight.register_hook(before_the_last_but_one)
    layers[0].weight.register_hook(lambda _: updated.append(layerwise.num_unfinished))
    raised, still = "", []
    for step in range(STEPS):
        try:
            train_step(case, ddp, optimizer, step)
        except everstep.EverstepError as e:
            raised = f"{type(e).__name__} at {step}: {e}"
            break
        still.append(layerwise.reducing.is_set())
    with contextlib.suppress(RuntimeError):  # of a pass that was broken off
        dist.barrier()
    return {
        "different": different(live_state(plain.module, plain_optimizer), live_state(ddp.module, optimizer)),
        "updated": updated,
        "stats": [layerwise.stats.in_backward, layerwise.stats.at_step],
        "reducing": [all(reducing), any(still)],
        "raised": raised,
    }


def run_rank(rank: int, folder: Path, ranks: int, cases: list[str]) -> None:
    warnings.simplefilter("ignore")  # torch's own
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    for case in cases:
        reports: list[Any] = [None] * ranks
        dist.all_gather_object(reports, run_case(case))
        if rank == 0:
            (folder / f"{case}.json").write_text(json.dumps(reports))
    dist.destroy_process_group()


def main(folder: str, ranks: str, *cases: str) -> int:
    return fork_ranks(int(ranks), lambda rank: run_rank(rank, Path(folder), int(ranks), list(cases)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
