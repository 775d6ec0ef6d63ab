"""A DDP training with compressed gradients, crashed and resumed: python compress_training.py FOLDER WORLD CASE...

Each rank trains once through without Everstep and once with it and a crash in the middle, and prints what differs, as JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import everstep
from everstep.compress import Half, Quantize, TopK, tap
from support import crash, equal

STEPS, CRASH_AT = 9, 6
OPTIONS: dict[str, Any] = {"quiet": True, "follower": False, "durability": "os"}


def power_sgd() -> Any:
    state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
    return tap(powerSGD_hook, state)


CASES: dict[str, Callable[[], Any]] = {
    "topk": lambda: TopK(0.02, residual="log"),
    "topk-plain": lambda: TopK(0.02, error_feedback=False),
    "quantize": lambda: Quantize(),
    "stochastic": lambda: Quantize(4, rounding="stochastic", error_feedback=True, residual="log"),
    "fp16": lambda: Half("fp16"),
    "bf16": lambda: Half("bf16"),
    "power-sgd": power_sgd,
    "tapped-fp16": lambda: tap(fp16_compress_hook),
}


class Training:
    """A model in DDP whose first layer is large enough to have records of its own."""

    def __init__(self, case: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(90, 120), nn.ReLU(), nn.Linear(120, 100), nn.ReLU(), nn.Linear(100, 3))
        self.model = DDP(model, bucket_cap_mb=1)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.compressor = CASES[case]()
        self.model.register_comm_hook(self.compressor.state, self.compressor.hook)

    def step(self, at: int, *, clip: bool = True) -> None:
        g = torch.Generator().manual_seed(100 * at + dist.get_rank())
        self.model(torch.randn(8, 90, generator=g)).pow(2).sum().backward()
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        names = {id(p): n for n, p in self.model.module.named_parameters()}
        moments = {names[id(p)]: dict(s) for p, s in self.optimizer.state.items()}
        own = getattr(self.compressor, "state_dict", self.compressor.position)()
        return {"model": dict(self.model.module.state_dict()), "optimizer": dict(sorted(moments.items())), "own": own}


def differences(case: str, run: Path) -> list[str]:
    """What is not as in an uninterrupted training without Everstep; and whether payloads were used as they should be."""
    whole = Training(case)
    for at in range(STEPS):
        whole.step(at)
    training = Training(case)
    attached = everstep.attach(training.model, training.optimizer, run, compress=training.compressor, **OPTIONS)
    attached.resume()
    for at in range(CRASH_AT):
        training.step(at)
        attached.commit()
    attached.flush()
    stats = attached.stats()
    crash(attached)
    dist.barrier()
    training = Training(case)
    with everstep.attach(training.model, training.optimizer, run, compress=training.compressor, **OPTIONS) as attached:
        problems = [] if attached.resume() == CRASH_AT else ["resumed elsewhere"]
        for at in range(CRASH_AT, STEPS):
            training.step(at)
            attached.commit()
    problems += equal(whole.state(), training.state())
    is_known = case not in ("power-sgd", "tapped-fp16")
    if is_known and dist.get_rank() == 0 and not (stats["reused_bytes"] and stats["reused_scaled_bytes"]):
        problems.append(f"no payload was used: {stats}")
    if stats["reused_void_bytes"]:
        problems.append(f"payloads were made for nothing: {stats}")
    return problems


def different(run: Path) -> list[str]:
    """Each rank with a ratio of its own: at attach, and where nobody attaches, in the first backward."""
    CASES["different"] = lambda: TopK(0.1 + 0.1 * dist.get_rank())
    training = Training("different")
    found = []
    try:
        training.step(0)
    except everstep.EverstepError as e:
        found.append(f"{type(e).__name__}: {e}")
    dist.barrier()
    try:
        everstep.attach(training.model, training.optimizer, run, compress=training.compressor, **OPTIONS)
    except everstep.EverstepError:
        found.append("a step was committed" if run.exists() else "no step was committed")
    return found


def alike(run: Path) -> list[str]:
    """Every rank's gradients after each step are rank 0's; the third batch of rank 1 has a NaN."""
    found = []
    for case in ("topk", "quantize", "stochastic", "fp16", "bf16"):
        training = Training(case)
        for at in range(4):
            g = torch.Generator().manual_seed(100 * at + dist.get_rank())
            x = torch.randn(8, 90, generator=g)
            if (at, dist.get_rank()) == (2, 1):
                x[0, 0] = float("nan")
            training.model.zero_grad()
            training.model(x).pow(2).sum().backward()
            mine = torch.cat([p.grad.view(-1) for p in training.model.parameters() if p.grad is not None])
            first = mine.clone()
            dist.broadcast(first, 0)
            if not torch.equal(mine.view(torch.int32), first.view(torch.int32)):
                found.append(f"{case}: ranks differ at step {at}")
            if bool(mine.isnan().any()) != (at == 2):
                found.append(f"{case}: NaN at step {at}: {mine.isnan().sum()}")
    return found


SPECIAL = {"different": different, "alike": alike}


def work(rank: int, folder: str, world: int, cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = {c: SPECIAL[c](Path(folder) / c) if c in SPECIAL else differences(c, Path(folder) / c) for c in cases}
    Path(folder, f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    where, number, *names = sys.argv[1:]
    torch.multiprocessing.spawn(work, (where, int(number), names), int(number))  # type: ignore[attr-defined]
