"""Codecs in a real log: gradients that compress come back with every bit, and do compress."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture import encode
from everstep.capture.capture import Capture
from everstep.tune.averages import Spent
from truth import Truth, check_history, crash

NUMEL = 60_000


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def bf16(t: int) -> torch.Tensor:
    return torch.randn(NUMEL).bfloat16().float()


def fp16(t: int) -> torch.Tensor:
    return torch.randn(NUMEL).half().float()


def sparse(t: int) -> torch.Tensor:
    g = torch.zeros(NUMEL)
    g[torch.randperm(NUMEL)[:500]] = torch.randn(500)
    return g


def zeros(t: int) -> torch.Tensor:
    return torch.zeros(NUMEL)


def negative_zeros(t: int) -> torch.Tensor:
    g = torch.zeros(NUMEL)
    g[t::7] = -0.0
    return g


def sparse_negative_zeros(t: int) -> torch.Tensor:
    g = torch.zeros(NUMEL)
    g[t * 13 : t * 13 + 5] = -0.0
    return g


def nan_payloads(t: int) -> torch.Tensor:
    """NaNs that differ in payload, sign and kind, among values that a 16-bit codec likes."""
    g = torch.randn(NUMEL).bfloat16().float()
    raw = bits(g)
    raw[0::1000] = 0x7FC00001 + t
    raw[1::1000] = -0x400000 + 5
    raw[2::1000] = 0x7F800001
    raw[3::1000] = 0x7FFF0000
    return g


def sparse_nan_payloads(t: int) -> torch.Tensor:
    g = torch.zeros(NUMEL)
    bits(g)[100:120] = torch.arange(20, dtype=torch.int32) + 0x7F800001
    return g


def denormals(t: int) -> torch.Tensor:
    g = torch.zeros(NUMEL)
    bits(g)[:] = torch.randint(0, 1000, (NUMEL,), dtype=torch.int32)
    return g


def infinities(t: int) -> torch.Tensor:
    g = torch.randn(NUMEL).bfloat16().float()
    g[::50], g[1::50] = float("inf"), -float("inf")
    return g


def almost_bf16(t: int) -> torch.Tensor:
    """One value of all does not fit, now here, now there."""
    g = torch.randn(NUMEL).bfloat16().float()
    bits(g)[(t * 7919) % NUMEL] ^= 1
    return g


def changing(t: int) -> torch.Tensor:
    return [bf16, sparse, almost_bf16, nan_payloads, zeros][t % 5](t)


def plain(t: int) -> torch.Tensor:
    return torch.randn(NUMEL)


KINDS = [
    bf16, fp16, sparse, zeros, negative_zeros, sparse_negative_zeros, nan_payloads, sparse_nan_payloads, denormals,
    infinities, almost_bf16, changing, plain,
]  # fmt: skip


class Echo(torch.optim.Optimizer):
    """Its state is the gradient it saw: nothing can hide a wrong bit."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["seen"] = p.grad.clone()


everstep.register(Echo)


def train(path: Any, make: Any, steps: int = 7) -> tuple[Truth, float]:
    torch.manual_seed(1)
    model = nn.ParameterDict({"big": nn.Parameter(torch.zeros(NUMEL)), "small": nn.Parameter(torch.zeros(100))})
    optimizer = Echo(model.parameters())
    run = everstep.attach(model, optimizer, path, quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for t in range(steps):
        model["big"].grad = make(t)
        model["small"].grad = make(t)[:100].clone()
        optimizer.step()
        optimizer.zero_grad()
        truth.commit()
    run.flush()
    per_step = run.stats()["log_bytes"] / steps
    crash(run)
    return truth, per_step


@pytest.mark.parametrize("make", KINDS)
def test_gradients_come_back_with_every_bit(make: Any, tmp_path: Any) -> None:
    truth, _ = train(tmp_path / "run", make)
    check_history(tmp_path / "run", truth)


@pytest.mark.parametrize(("make", "share"), [(bf16, 0.65), (sparse, 0.2), (zeros, 0.15), (negative_zeros, 1.2)])
def test_gradients_that_compress_take_less_room(make: Any, share: float, tmp_path: Any) -> None:
    _, per_step = train(tmp_path / "run", make)
    assert per_step < share * NUMEL * 4 + 14_000


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_gradients_of_other_dtypes_come_back_with_every_bit(dtype: torch.dtype, tmp_path: Any) -> None:
    torch.manual_seed(1)
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(20_000, dtype=dtype))})
    optimizer = Echo(model.parameters())
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for t in range(6):
        g = torch.randn(20_000, dtype=dtype)
        if t % 2:
            g[100:] = 0
        g.view(torch.uint8)[:4000] = torch.randint(0, 256, (4000,), dtype=torch.uint8)
        model["w"].grad = g
        optimizer.step()
        optimizer.zero_grad()
        truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)


class Given(nn.Module):
    """One parameter, whose gradient is told."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))


def test_without_codecs_frames_are_raw_but_for_a_few_and_every_step_comes_back(tmp_path: Any, monkeypatch: Any) -> None:
    """What the tuner does when codecs do not pay: two of so many frames tell what they would save."""
    monkeypatch.setattr(encode, "RETRY_EVERY", 5)
    torch.manual_seed(0)
    model = Given()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes, states, spent = [], [], Spent()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False) as run:
        run.resume()
        assert isinstance(run._capture, Capture)
        offload = run._capture.offload
        offload.spend(spent)
        offload.set_lossless(False)
        for t in range(12):
            before = run.stats()["log_bytes"]  # the writer begins with the step, before the commit
            model.weight.grad = sparse(t)
            optimizer.step()
            run.commit(wait=True)
            sizes.append(run.stats()["log_bytes"] - before)
            states.append(model.weight.detach().clone())
        offload.set_lossless(True)
        model.weight.grad = sparse(12)
        optimizer.step()
        run.commit(wait=True)
    is_small = [size < NUMEL for size in sizes]
    assert is_small == [True, True, False, False, False] * 2 + [True, True]
    assert spent.tried_frames == 7 and spent.saved_bytes == 7 * (4 * NUMEL) - (spent.put_bytes - 6 * 4 * NUMEL)
    assert spent.put_s > 0 and spent.choose_s >= spent.choose_cpu_s > 0
    history = everstep.open(tmp_path / "run")
    for step, state in enumerate(states, 1):
        assert torch.equal(bits(history.state(step)["model"]["weight"]), bits(state))
