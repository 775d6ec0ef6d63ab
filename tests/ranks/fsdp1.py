"""What the processes of a world do with FullyShardedDataParallel."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import everstep
from support import equal

FULL = StateDictOptions(full_state_dict=True)


def build(wrap: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sizes that two ranks cannot divide, and groups that differ."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    if wrap == "fsdp2":
        fully_shard(model)  # type: ignore[operator]
    elif wrap == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    rest = [p for name, p in model.named_parameters() if not name.endswith("weight")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(4, 5, generator=generator)).square().sum().backward()
    optimizer.step()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As History.state gives it, in an order of its own."""
    tensors, state = get_state_dict(model, optimizer, options=FULL)
    return {"model": tensors, "optimizer": state}


def load(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    state = copy.deepcopy(state)  # torch puts its own tensors into the dicts that it is given
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=FULL
    )


def differences(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [
        difference
        for part, a, b in (
            ("model", wanted["model"], found["model"]),
            ("state", wanted["optimizer"]["state"], found["optimizer"]["state"]),
            ("groups", hyper(wanted), hyper(found)),
        )
        for difference in equal(in_order(a), in_order(b), part)
    ]


def in_order(values: Any) -> Any:
    return {k: in_order(values[k]) for k in sorted(values)} if isinstance(values, dict) else values


def hyper(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        for group in state["optimizer"]["param_groups"]
        for name in group["params"]
    }


def attach(folder: str) -> str:
    """What attach says."""
    model, optimizer = build("fsdp1")
    try:
        everstep.attach(model, optimizer, Path(folder) / "run", quiet=True)
    except everstep.EverstepError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def out_and_back(folder: str) -> list[str]:
    """Train under FSDP1, go on under FSDP2 with Everstep, and again under FSDP1; where states differ."""
    run_path = Path(folder) / "run"
    model, optimizer = build("fsdp1")
    for number in range(3):
        step(model, optimizer, number)
    begun = full_state(model, optimizer)
    sharded, its_optimizer = build("fsdp2")
    load(sharded, its_optimizer, begun)
    with everstep.attach(sharded, its_optimizer, run_path, quiet=True, follower=False) as run:
        run.resume()
        for number in range(3, 6):
            step(sharded, its_optimizer, number)
            run.commit()
    dist.barrier()
    history = everstep.open(run_path)
    problems = differences(begun, history.state(0))
    model, optimizer = build("fsdp1")
    load(model, optimizer, history.state())
    return problems + differences(history.state(), full_state(model, optimizer))
