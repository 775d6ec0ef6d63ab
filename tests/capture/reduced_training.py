"""DDP on several ranks with early hand-over: python reduced_training.py FOLDER RANKS CASE...

FOLDER/CASE.json then holds, of each rank, what had been written before each backward ended, what was counted, and what
differs from the same training without Everstep and without a hook, or in the run from what was trained.
"""

from __future__ import annotations

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
from support import fork_ranks
from truth import different, live_state

STEPS = 8
BUCKET_MB = 0.05
"""One layer's weight in each."""
CASES: dict[str, tuple[bool, Any]] = {
    "plain": (False, None),
    "views": (True, None),
    "compressed": (False, fp16_compress_hook),
}
"""gradient_as_bucket_view, and the user's own communication hook."""


def build(case: str, *, early: bool) -> Any:
    torch.manual_seed(1)
    layers = [each for _ in range(2 * dist.get_world_size()) for each in (nn.Linear(120, 120), nn.Tanh())]
    views, hook = CASES[case]
    ddp = DDP(nn.Sequential(*layers), gradient_as_bucket_view=views, bucket_cap_mb=BUCKET_MB)
    if early:
        ddp.register_comm_hook(None, everstep.early_hook(hook))
    elif hook is not None:
        ddp.register_comm_hook(None, hook)
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-3)


def train_step(model: nn.Module, optimizer: Any, step: int) -> None:
    x = torch.randn(8, 120, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def run_case(folder: Path, case: str) -> dict[str, Any]:
    plain, plain_optimizer = build(case, early=False)
    for step in range(STEPS):
        train_step(plain, plain_optimizer, step)
    ddp, optimizer = build(case, early=True)
    left: list[int] = []
    with everstep.attach(ddp, optimizer, folder / f"run-{case}", early=True, quiet=True, follower=False) as run:
        run.resume()
        capture = run._capture
        assert capture is not None
        sent = capture.offload._encoder.sent._sent

        def before_the_last(grad: torch.Tensor) -> None:
            """Backward comes to the first layer last. Wait, though not for ever, until something has left."""
            deadline = time.monotonic() + (20 if len(left) > 2 else 0)  # the first updates teach
            while not sent and time.monotonic() < deadline:
                time.sleep(0.001)
            left.append(sum(each.num_bytes for each in list(sent.values())))

        ddp.module[0].weight.register_hook(before_the_last)
        for step in range(STEPS):
            train_step(ddp, optimizer, step)
            run.commit()
            run.flush()  # what is in `sent` from here on is of the next step
        stats = run.stats()
    report = {
        "left": left,
        "early": [stats["early_bytes"], stats["early_scaled_bytes"], stats["early_void_bytes"]],
        "trained": different(live_state(plain.module, plain_optimizer), live_state(ddp.module, optimizer)),
        "stored": different(live_state(ddp.module, optimizer), everstep.open(folder / f"run-{case}").state()),
    }
    dist.barrier()
    return report


def run_rank(rank: int, folder: Path, ranks: int, cases: list[str]) -> None:
    warnings.simplefilter("ignore")  # torch's own
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    for case in cases:
        reports: list[Any] = [None] * ranks
        dist.all_gather_object(reports, run_case(folder, case))
        if rank == 0:
            (folder / f"{case}.json").write_text(json.dumps(reports))
    dist.destroy_process_group()


def main(folder: str, ranks: str, *cases: str) -> int:
    return fork_ranks(int(ranks), lambda rank: run_rank(rank, Path(folder), int(ranks), list(cases)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
