"""DDP on several ranks, trained through or interrupted and resumed by hand, without the rest of Everstep.

    python bucket_training.py train FOLDER RANKS CASE...     trains through; saves what every rank has at every step
    python bucket_training.py resume FOLDER RANKS CASE...    new processes: resumes from each step and compares

FOLDER/CASE.json then holds, for each rank and each step resumed from, whether the later ones were equal ("cold", "warm").
"""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers and DDP import it when they are first made: here, so once for all ranks
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from everstep.capture.buckets import BucketOrders, warm
from support import equal, fork_ranks

STEPS = 5
SMALL = 0.004
"""Bucket size in MB: several buckets for these models."""


class Net(nn.Module):
    """Defined in another order than used; BatchNorm's buffers differ between ranks, dropout draws random numbers."""

    def __init__(self, *, sparse: bool = False, dtypes: bool = False) -> None:
        super().__init__()
        self.middle = nn.Linear(33, 47)
        self.first = nn.Linear(21, 33)
        self.norm = nn.BatchNorm1d(33)
        self.last = nn.Linear(47, 3)
        self.words = nn.Embedding(10, 21, sparse=sparse)
        self.drop = nn.Dropout(0.3)
        self.dtypes = dtypes
        if dtypes:
            self.middle.double()
            self.last.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(self.words(x))).relu()
        x = self.drop(self.middle(x.to(self.middle.weight.dtype))).relu()
        return self.last(x.to(self.last.weight.dtype)).float()


class Branches(nn.Module):
    """Two layers whose gradients become ready in an order that changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 21)
        self.a = nn.Linear(21, 21)
        self.b = nn.Linear(21, 21)
        self.last = nn.Linear(21, 3)
        self.swapped = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = (self.b, self.a) if self.swapped else (self.a, self.b)
        return self.last(other(one(self.words(x)).relu()).relu())


class Partly(nn.Module):
    """`spare` is used on the first rank only, `idle` nowhere."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.net = Net()
        self.idle = nn.Linear(5, 7)
        self.spare = nn.Linear(3, 3)
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.net(x)
        return self.spare(y) if self.rank == 0 else y


class Inside(nn.Module):
    """DDP around a part of the model; one parameter of it is not DDP's."""

    def __init__(self) -> None:
        super().__init__()
        net = Net()
        DDP._set_params_and_buffers_to_ignore_for_model(net, ["first.bias"])
        self.net = DDP(net, bucket_cap_mb=SMALL)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@dataclass
class Training:
    models: dict[str, nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    turn: Callable[[Training, int], None] | None = None
    parts: int = 1
    hooks: list[powerSGD_hook.PowerSGDState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizers = {
            name: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) for name, model in self.models.items()
        }

    def step(self, t: int) -> None:
        torch.manual_seed(1000 * t + dist.get_rank())
        if self.turn is not None:
            self.turn(self, t)
            return
        (model,) = self.models.values()
        for part in range(self.parts):
            x, y = self.batch(self.parts * t + part)
            with model.no_sync() if part < self.parts - 1 else nullcontext():
                (model(x) - y).square().mean().backward()
        self.update("model")

    def update(self, name: str) -> None:
        self.optimizers[name].step()
        self.optimizers[name].zero_grad()

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "models": {name: dict(model.state_dict()) for name, model in self.models.items()},
                "optimizers": {name: o.state_dict() for name, o in self.optimizers.items()},
                "hooks": [of_power_sgd(state) for state in self.hooks],
            }
        )

    def load(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        for name, model in self.models.items():
            model.load_state_dict(dict(zip(model.state_dict(), state["models"][name].values(), strict=True)))
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        for hook, values in zip(self.hooks, state["hooks"], strict=True):
            hook.rng.set_state(values.pop("rng"))
            for key, value in values.items():
                setattr(hook, key, value)


def of_power_sgd(state: powerSGD_hook.PowerSGDState) -> dict[str, Any]:
    """Its residuals and what else its next step depends on."""
    return {k: getattr(state, k) for k in state.__slots__ if k != "process_group"} | {"rng": state.rng.get_state()}


def simple(model: Callable[[], nn.Module] = Net, parts: int = 1, **options: Any) -> Training:
    return Training({"model": DDP(model(), bucket_cap_mb=SMALL, **options)}, batch, parts=parts)


def batch(t: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * t + dist.get_rank())
    return torch.randint(0, 10, (9,), generator=generator), torch.randn(9, 3, generator=generator)


def changing() -> Training:
    def turn(training: Training, t: int) -> None:
        model = training.models["model"]
        model.module.swapped = t % 2 == 1
        x, y = batch(t)
        (model(x) - y).square().mean().backward()
        training.update("model")

    training = simple(Branches)
    training.turn = turn
    return training


def gan() -> Training:
    """The discriminator runs twice within the first step, so that its buckets are rebuilt in it."""

    def turn(training: Training, t: int) -> None:
        g, d = training.models["g"], training.models["d"]
        x, y = batch(t)
        fake = g(x)
        d(y).square().mean().backward()
        (1 - d(fake.detach())).square().mean().backward()
        training.update("d")
        d.zero_grad()
        with d.no_sync():
            d(fake).square().mean().backward()
        training.update("g")
        d.zero_grad()

    judge = nn.Sequential(nn.Linear(3, 41), nn.Tanh(), nn.Linear(41, 31), nn.Tanh(), nn.Linear(31, 1))
    models: dict[str, nn.Module] = {"g": DDP(Net(), bucket_cap_mb=SMALL), "d": DDP(judge, bucket_cap_mb=SMALL)}
    return Training(models, batch, turn)


def fp16_hook(**options: Any) -> Training:
    training = simple(**options)
    training.models["model"].register_comm_hook(None, default_hooks.fp16_compress_hook)
    return training


def built_in() -> Training:
    training = simple()
    training.models["model"]._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return training


def power_sgd() -> Training:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    training = Training({"model": DDP(Net())}, batch)  # one bucket: with several, its callbacks deadlock on gloo
    training.models["model"].register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    training.hooks.append(state)
    return training


def compiled() -> Training:
    return Training({"model": torch.compile(DDP(Net()), backend="aot_eager")}, batch)


CASES: dict[str, Callable[[], Training]] = {
    "plain": simple,
    "views": lambda: simple(gradient_as_bucket_view=True),
    "one-bucket": lambda: Training({"model": DDP(Net())}, batch),
    "accumulation": lambda: simple(parts=3),
    "changing": changing,
    "dtypes": lambda: simple(lambda: Net(dtypes=True)),
    "sparse": lambda: simple(lambda: Net(sparse=True)),
    "inside": lambda: Training({"model": Inside()}, batch),
    "gan": gan,
    "static": lambda: simple(static_graph=True),
    "static-views": lambda: simple(static_graph=True, gradient_as_bucket_view=True),
    "static-unused": lambda: simple(lambda: Partly(dist.get_rank()), static_graph=True),
    "static-hook": lambda: fp16_hook(static_graph=True),
    "find-unused": lambda: simple(lambda: Partly(dist.get_rank()), find_unused_parameters=True),
    "fp16-hook": fp16_hook,
    "built-in-hook": built_in,
    "power-sgd": power_sgd,
    "compiled": compiled,
}


def build(case: str) -> Training:
    torch.manual_seed(0)
    return CASES[case]()


def train(folder: Path, case: str) -> None:
    training = build(case)
    orders = BucketOrders(training.models)
    assert not orders.value
    saved = []
    for t in range(STEPS):
        training.step(t)
        orders.look()
        saved.append({"state": training.state(), "orders": copy.deepcopy(orders.value)})
    torch.save(saved, folder / f"{case}-{dist.get_rank()}.pt")


def resume(folder: Path, case: str) -> None:
    saved = torch.load(folder / f"{case}-{dist.get_rank()}.pt", weights_only=False)
    report: dict[int, dict[str, Any]] = {}
    for first in range(1, STEPS):
        found: dict[str, Any] = {}
        for way in ("warm",) if case == "power-sgd" else ("cold", "warm"):
            training = build(case)
            if way == "warm":
                before = (training.state(), torch.get_rng_state())
                grads = [p.grad for m in training.models.values() for p in m.parameters()]
                versions = [p._version for m in training.models.values() for p in m.parameters()]
                # What the first rank gives is what counts.
                orders = saved[first - 1]["orders"] if dist.get_rank() == 0 else {}
                found["notices"] = warm(training.models, orders)
                assert not equal(before, (training.state(), torch.get_rng_state()))
                assert grads == [p.grad for m in training.models.values() for p in m.parameters()]
                assert versions == [p._version for m in training.models.values() for p in m.parameters()]
                if orders:
                    assert BucketOrders(training.models).value == orders
            training.load(saved[first - 1]["state"])
            found[way] = []
            for t in range(first, STEPS):
                training.step(t)
                found[way].append(not equal(training.state(), saved[t]["state"]))
        report[first] = found
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    if dist.get_rank() == 0:
        (folder / f"{case}.json").write_text(json.dumps(reports))


def run_rank(rank: int, verb: str, folder: Path, ranks: int, cases: list[str]) -> None:
    warnings.simplefilter("ignore")  # torch's own
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{verb}-{os.getppid()}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    for case in cases:
        {"train": train, "resume": resume}[verb](folder, case)
    dist.destroy_process_group()


def main(verb: str, folder: str, ranks: str, *cases: str) -> int:
    return fork_ranks(int(ranks), lambda rank: run_rank(rank, verb, Path(folder), int(ranks), list(cases)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
