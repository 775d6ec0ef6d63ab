"""The kernel called directly leaves the bits that step() leaves, and what is out of the ordinary to step()."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from everstep.fold.fused import fused_adam
from everstep.memory import same_bits

Make = Callable[[list[Any]], torch.optim.Optimizer]
ORDINARY: dict[str, Make] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "adam with decay": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.99), eps=1e-6, fused=True),
    "maximizing": lambda p: torch.optim.AdamW(p, maximize=True, fused=True),
}
OTHERS: dict[str, Make] = {
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "another class": lambda p: torch.optim.SGD(p, lr=1e-3, fused=True),
    "a class of its own": lambda p: type("Mine", (torch.optim.AdamW,), {})(p, fused=True),
}


def params(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator, dtype=dtype) for n in (1000, 64, 4097)]


def step(optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in tensors]
    for p, g in zip(tensors, grads, strict=True):
        p.grad = g
    optimizer.step()
    return grads


def same(a: tuple[torch.optim.Optimizer, list[torch.Tensor]], b: tuple[torch.optim.Optimizer, list[torch.Tensor]]) -> bool:
    return all(
        same_bits(p, q) and all(same_bits(a[0].state[p][k], b[0].state[q][k]) for k in a[0].state[p])
        for p, q in zip(a[1], b[1], strict=True)
    )


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_bit_is_that_of_step(name: str, dtype: torch.dtype) -> None:
    ours, theirs = params(dtype), params(dtype)
    pair = [ORDINARY[name]([{"params": p[:1]}, {"params": p[1:], "lr": 0.5}]) for p in (ours, theirs)]
    for optimizer, tensors in zip(pair, (ours, theirs), strict=True):
        step(optimizer, tensors, 0)  # makes the state
    kernel = fused_adam(pair[0], ours)
    assert kernel is not None
    for seed in range(1, 5):
        for optimizer in pair:
            optimizer.param_groups[1]["lr"] /= 2  # a schedule
        grads = step(pair[1], theirs, seed)
        assert kernel.step(grads)
    assert same((pair[0], ours), (pair[1], theirs))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_out_of_the_ordinary_is_left_to_step(name: str) -> None:
    tensors = params()
    optimizer = OTHERS[name](tensors)
    step(optimizer, tensors, 0)
    kernel = fused_adam(optimizer, tensors)
    assert kernel is None or not kernel.step(tensors)


def test_an_optimizer_without_state_is_left_to_step() -> None:
    tensors = params()
    assert fused_adam(torch.optim.AdamW(tensors, fused=True), tensors) is None


def test_a_group_that_becomes_odd_later_is_left_to_step_with_nothing_done() -> None:
    tensors = params()
    optimizer = torch.optim.AdamW(tensors, fused=True)
    grads = step(optimizer, tensors, 0)
    kernel = fused_adam(optimizer, tensors)
    assert kernel is not None
    before = copy.deepcopy([optimizer.state[p] for p in tensors])
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
    assert not kernel.step(grads)
    for p, old in zip(tensors, before, strict=True):
        assert all(same_bits(optimizer.state[p][k], old[k]) for k in old)
