"""Trainings with compressed gradients on several ranks: python compress_training.py FOLDER WORLD CASE...

Ranks train all cases by turns and are killed (SIGKILL), at any moment after the frames of some steps were written. New ones
resume and go on; each compares what it then has with a training that nothing interrupted and that knows nothing of Everstep,
and leaves what differs as JSON. The cases in SPECIAL are not killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import everstep
from everstep import sharding
from everstep.compress import Half, Quantize, TopK, tap
from support import equal, fork_ranks

KILL_AFTER, GO_ON = 5, 3
OPTIONS: dict[str, Any] = {"quiet": True, "follower": False, "durability": "batch", "batch_steps": 1000}


def power_sgd() -> Any:
    state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
    return tap(powerSGD_hook, state)


HOOKS: dict[str, Callable[[], Any]] = {
    "topk": lambda: TopK(0.02, residual="log"),
    "topk-plain": lambda: TopK(0.02, error_feedback=False),
    "quantize": lambda: Quantize(),
    "stochastic": lambda: Quantize(4, rounding="stochastic", error_feedback=True, residual="log"),
    "fp16": lambda: Half("fp16"),
    "bf16": lambda: Half("bf16"),
    "power-sgd": power_sgd,
    "tapped-fp16": lambda: tap(fp16_compress_hook),
}
SHARDED = {f"{name}-fsdp2": HOOKS[name] for name in ("topk", "stochastic", "fp16")}
"""As gradient transforms, of DTensors."""
CASES = {**HOOKS, **SHARDED}
TAPPED = ("power-sgd", "tapped-fp16")


class Training:
    """A model in DDP or FSDP2 whose first layers (a rank's part of them) are large enough to have records of their own."""

    def __init__(self, case: str, wide: int = 0) -> None:
        torch.manual_seed(0)
        wide = wide or (120 * dist.get_world_size() if case in SHARDED else 120)
        model = nn.Sequential(nn.Linear(90, wide), nn.ReLU(), nn.Linear(wide, 100), nn.ReLU(), nn.Linear(100, 3))
        self.compressor = CASES[case]()
        if case in SHARDED:
            self.model: nn.Module = fully_shard(model)
        else:
            self.model = DDP(model, bucket_cap_mb=0.02)
            self.model.register_comm_hook(self.compressor.state, self.compressor.hook)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if case in SHARDED:
            self.compressor.attach(self.optimizer)

    def attach(self, run: Path) -> everstep.Run:
        return everstep.attach(self.model, self.optimizer, run, compress=self.compressor, **OPTIONS)

    def step(self, at: int) -> None:
        g = torch.Generator().manual_seed(100 * at + dist.get_rank())
        self.model(torch.randn(8, 90, generator=g)).pow(2).sum().backward()
        if isinstance(self.model, DDP):  # after compression, there
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def named_residuals(self) -> dict[str, torch.Tensor]:
        return {n: sharding.local(r).clone() for n, r in self.compressor.residuals.named_buffers()}

    def state(self) -> dict[str, Any]:
        params = dict(self.model.named_parameters())
        moments = {n: sharding.local_values(self.optimizer.state[p]) for n, p in params.items()}
        own = getattr(self.compressor, "state_dict", self.compressor.position)()
        return {"model": {n: sharding.local(p).detach() for n, p in params.items()}, "optimizer": moments, "own": own}


def train_until_killed(folder: Path, cases: list[str], tell: int) -> None:
    """All cases by turns; tells when enough steps of each are where a kill does not reach them."""
    trainings = [Training(case) for case in cases]
    runs = [t.attach(folder / case) for case, t in zip(cases, trainings, strict=True)]
    for run in runs:
        run.resume()
    at, is_told = 0, False
    while True:
        for training, run in zip(trainings, runs, strict=True):
            training.step(at)
            run.commit()
        at += 1
        if not is_told and min(run.stats()["written_step"] for run in runs) >= KILL_AFTER:
            os.write(tell, b"!")
            is_told = True


def differences(case: str, run: Path) -> list[str]:
    """What is not as in an uninterrupted training without Everstep; and whether payloads were used as they should be."""
    training = Training(case)
    with training.attach(run) as attached:
        begin = attached.resume()
        problems = [] if begin >= KILL_AFTER else [f"resumed at step {begin}: steps that were written are gone"]
        for at in range(begin, begin + GO_ON):
            training.step(at)
            attached.commit()
        attached.flush()
        stats = attached.stats()
    whole = Training(case)
    for at in range(begin + GO_ON):
        whole.step(at)
    problems += equal(whole.state(), training.state())
    scaled = stats["reused_scaled_bytes"] or case in SHARDED
    if case not in TAPPED and dist.get_rank() == 0 and not (stats["reused_bytes"] and scaled):
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
        training.attach(run)
    except everstep.EverstepError:
        found.append("a step was committed" if run.exists() else "no step was committed")
    return found


def alike(run: Path) -> list[str]:
    """Every rank's gradients after each step are rank 0's; the third batch of rank 1 has a NaN, in the first layer's weight.

    A hook waits for no message of its own while backward goes on; and the residual of what has a NaN somewhere waits.
    """
    found = []
    waited: list[str] = []
    for name in ("all_reduce", "all_gather"):
        setattr(dist, name, _told(getattr(dist, name), waited))
    for case in ("topk", "quantize", "stochastic", "fp16", "bf16"):
        training = Training(case)
        training.compressor.bind(dict(training.model.module.named_parameters()))
        for at in range(4):
            g = torch.Generator().manual_seed(100 * at + dist.get_rank())
            x = torch.randn(8, 90, generator=g)
            if (at, dist.get_rank()) == (2, 1):
                x[0, 0] = float("nan")
            training.model.zero_grad()
            loss = training.model(x).pow(2).sum()
            if at == 2:  # of the first layer alone: the others' are finite
                first = training.model.module[0].weight
                loss = first.view(-1)[0] * x[0, 0] + sum(p.sum() for p in training.model.parameters())
            before = training.compressor.state_dict()["residuals"]
            waited.clear()
            loss.backward()
            if at and len(waited) != (at == 2):
                found.append(f"{case}: at step {at} a hook waited for {waited}")
            after = training.compressor.state_dict()["residuals"]
            kept = [b is None or torch.equal(a, b) for a, b in zip(after, before, strict=True)]
            if at == 2 and before[0] is not None and kept != [True] + [False] * 5:
                found.append(f"{case}: residuals that stayed as they were: {kept}")
            mine = torch.cat([p.grad.view(-1) for p in training.model.parameters() if p.grad is not None])
            zeroth = mine.clone()
            dist.broadcast(zeroth, 0)
            if not torch.equal(mine.view(torch.int32), zeroth.view(torch.int32)):
                found.append(f"{case}: ranks differ at step {at}")
            if int(mine.isnan().sum()) != (at == 2):
                found.append(f"{case}: NaN at step {at}: {mine.isnan().sum()}")
        if training.compressor.nonfinite_gradients != 1:
            found.append(f"{case}: {training.compressor.nonfinite_gradients} were counted")
    return found


def _told(collective: Any, waited: list[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("async_op"):
            waited.append(collective.__name__)
        return collective(*args, **kwargs)

    return call


def largest(run: Path) -> list[str]:
    """The mean of the largest numbers of float16 is that number, though a third of it is rounded up."""
    model = DDP(nn.Linear(10, 1, bias=False))
    compressor = Half("fp16")
    model.register_comm_hook(compressor.state, compressor.hook)
    (model(torch.ones(1, 10)).sum() * 1e30).backward()
    grad = model.module.weight.grad
    return [] if grad is not None and bool((grad == 65504).all()) else [f"{grad}"]


def alike_on_all_ranks(model: nn.Module) -> list[str]:
    """Names of parameters whose gradients are not those of rank 0, bit for bit."""
    found = []
    for name, p in model.named_parameters():
        assert p.grad is not None
        mine = p.grad.to_dense().contiguous().view(-1).view(torch.uint8)
        zeroth = mine.clone()
        dist.broadcast(zeroth, 0)
        if not torch.equal(mine, zeroth):
            found.append(name)
    return found


def static(run: Path) -> list[str]:
    """NaN of one rank in the first backward, in which DDP takes gradients out of its buckets before its callbacks run."""
    found = []
    for views in (False, True):
        for make in (lambda: TopK(0.1), lambda: Quantize(), lambda: Half()):
            torch.manual_seed(0)
            model = DDP(nn.Linear(40, 30), static_graph=True, gradient_as_bucket_view=views)
            compressor = make()
            model.register_comm_hook(compressor.state, compressor.hook)
            for at in range(3):
                model.zero_grad()
                x = torch.randn(4, 40, generator=torch.Generator().manual_seed(at + 10 * dist.get_rank()))
                if (at, dist.get_rank()) == (0, 1):
                    x[0, 3] = float("nan")
                model(x).sum().backward()
                case = f"{type(compressor).__name__}, views {views}, step {at}"
                found += [f"{case}: {name} differs" for name in alike_on_all_ranks(model)]
                if int(model.module.weight.grad.isnan().sum()) != (30 if at == 0 else 0):
                    found.append(f"{case}: {model.module.weight.grad.isnan().sum()} NaN")
    return found


def sparse(run: Path) -> list[str]:
    """Gradients of an embedding are the plain mean, whatever is done to others."""
    found = []
    for make in (lambda: TopK(0.1), lambda: Quantize(), lambda: Half()):
        torch.manual_seed(0)
        model = DDP(nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3)))
        compressor = make()
        model.register_comm_hook(compressor.state, compressor.hook)
        for at in range(3):
            model.zero_grad()
            rows = [torch.randint(50, (6,), generator=torch.Generator().manual_seed(at + 10 * r)) for r in range(2)]
            model(rows[dist.get_rank()]).sum().backward()
            table, linear = model.module
            mean = torch.zeros(50, 8)
            for index in torch.cat(rows):
                mean[index] += linear.weight.detach().sum(dim=0) / 2
            if not torch.allclose(table.weight.grad.to_dense(), mean):
                found.append(f"{type(compressor).__name__}: not the mean at step {at}")
            found += alike_on_all_ranks(model)
    return found


def in_range(run: Path) -> list[str]:
    """The mean of large numbers is one, though their sum is not."""
    found = []
    for dtype, compressor in (
        (torch.float16, TopK(1.0)), (torch.float32, TopK(1.0)), (torch.float64, TopK(1.0)), (torch.float32, Quantize()),
        (torch.float32, Quantize(4)), (torch.float32, Half("bf16")),
    ):  # fmt: skip
        largest = torch.finfo(dtype).max
        model = DDP(nn.Linear(10, 1, bias=False).to(dtype))
        model.register_comm_hook(compressor.state, compressor.hook)
        model(torch.full((1, 10), 0.99 * largest, dtype=dtype)).sum().backward()
        grad = model.module.weight.grad
        if not bool((grad > 0.8 * largest).all() and grad.isfinite().all()):
            found.append(f"{compressor.describe()}, {dtype}: {grad}")
        found += alike_on_all_ranks(model)
    return found


def buckets(run: Path) -> list[str]:
    """PowerSGD with several buckets: its futures wait for messages of their own."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(*(nn.Linear(60, 60) for _ in range(6))), bucket_cap_mb=0.01)
    tapped = power_sgd()
    model.register_comm_hook(tapped.state, tapped.hook)
    for at in range(20):
        model.zero_grad()
        x = torch.randn(8, 60, generator=torch.Generator().manual_seed(at + 100 * dist.get_rank()))
        model(x).pow(2).sum().backward()
    return alike_on_all_ranks(model) + ([] if len(tapped.state.p_memory_dict) > 2 else ["there was one bucket"])


def resized(run: Path) -> list[str]:
    """Two ranks train and close; then there are more, or one: what each rank's residuals are, and what it was told."""
    found = []
    for case in ("topk", "topk-fsdp2"):
        training = Training(case, wide=240)
        kept = run.with_name(f"{case}-{dist.get_rank()}.pt")
        if dist.get_world_size() == 2:
            with training.attach(run / case) as attached:
                attached.resume()
                for at in range(4):
                    training.step(at)
                    attached.commit()
            torch.save((training.named_residuals(), training.state()["model"]), kept)
            continue
        with training.attach(run / case) as attached, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert attached.resume() == 4
            before, model = torch.load(kept) if kept.exists() else ({}, {})
            after = training.named_residuals()
            same = [n for n, r in after.items() if n in before and not equal(r, before[n]) and r.any()]
            zero = [n for n, r in after.items() if not r.any()]
            is_told = any("residuals" in str(w.message) and w.category is everstep.errors.InexactWarning for w in told)
            found.append(f"{case}: {len(same)} as they were, {len(zero)} zero, told: {is_told}")
            if case == "topk" and model and equal(model, training.state()["model"]):
                found.append("the model is another")
            training.step(4)
            attached.commit()
    return found


SPECIAL = {
    "resized": resized, "different": different, "alike": alike, "largest": largest, "static": static, "sparse": sparse,
    "range": in_range, "buckets": buckets,
}  # fmt: skip


def begin(rank: int, folder: Path, world: int, generation: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{generation}", rank=rank, world_size=world)


def kill(folder: Path, world: int, cases: list[str]) -> None:
    """Ranks that train until each has told; then they are killed."""
    pids, pipes = [], []
    for rank in range(world):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            try:
                begin(rank, folder, world, 0)
                train_until_killed(folder, cases, write)
            except BaseException:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            finally:
                os._exit(1)
        os.close(write)
        pids.append(pid)
        pipes.append(read)
    told = [os.read(pipe, 1) for pipe in pipes]
    time.sleep(random.Random(world).random() / 10)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    ended = [os.waitpid(pid, 0)[1] for pid in pids]
    if told != [b"!"] * world or ended != [signal.SIGKILL] * world:
        sys.exit(f"ranks ended by themselves: {told}, {ended}")


def main(folder: Path, world: int, cases: list[str]) -> int:
    killed = [c for c in cases if c not in SPECIAL]
    if killed:
        kill(folder, world, killed)
    number = len(list(folder.glob("store-*")))

    def work(rank: int) -> None:
        begin(rank, folder, world, number)
        found = {c: SPECIAL[c](folder / c) if c in SPECIAL else differences(c, folder / c) for c in cases}
        Path(folder, f"found-{rank}.json").write_text(json.dumps(found))
        dist.destroy_process_group()

    return fork_ranks(world, work)


if __name__ == "__main__":
    where, number, *names = sys.argv[1:]
    sys.exit(main(Path(where), int(number), names))
