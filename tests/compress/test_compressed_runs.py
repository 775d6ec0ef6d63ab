"""Compressed gradients in a run: the payload is the frame, and what comes back has every bit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep import codec, payloads
from everstep.compress import Half, Quantize, TopK
from everstep.errors import MismatchError, UsageError
from everstep.frame import Update
from everstep.restore.execute import open_frames
from everstep.restore.plan import line_of
from everstep.store.bases import base_folder, read_manifest
from everstep.store.runs import RunPath, read_listing
from support import crash, equal

STEPS, CRASH_AT = 12, 8
EVERY: dict[str, tuple[Callable[[], Any], int]] = {
    "topk": (lambda: TopK(0.01, residual="log"), codec.SPARSE),
    "quantize": (lambda: Quantize(), codec.BLOCKS),
    "four-bits": (lambda: Quantize(4, rounding="stochastic", error_feedback=True, residual="log"), codec.BLOCKS),
    "fp16": (lambda: Half("fp16"), codec.SIXTEEN),
    "bf16": (lambda: Half("bf16"), codec.SIXTEEN),
}


class Training:
    def __init__(self, make: Callable[[], Any], after: Callable[[list[torch.Tensor], int], None] | None = None) -> None:
        """`after` does something to the gradients when they have been compressed."""
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(100, 120), nn.ReLU(), nn.Linear(120, 90))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.compressor = make()
        self.compressor.attach(self.optimizer)
        self.at = 0
        if after is not None:
            params = list(self.model.parameters())
            self.optimizer.register_step_pre_hook(lambda *_: after([p.grad for p in params if p.grad is not None], self.at))

    def step(self, at: int) -> None:
        self.at = at
        g = torch.Generator().manual_seed(at)
        self.model(torch.randn(16, 100, generator=g)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def through(self, steps: int) -> Training:
        for at in range(steps):
            self.step(at)
        return self

    def attach(self, run: Path, **options: Any) -> everstep.Run:
        given = {"quiet": True, "follower": False, "durability": "os", "compress": self.compressor, **options}
        return everstep.attach(self.model, self.optimizer, run, **given)

    def state(self) -> dict[str, Any]:
        moments = [dict(self.optimizer.state[p]) for p in self.model.parameters()]
        return {"model": dict(self.model.state_dict()), "optimizer": moments, "own": self.compressor.state_dict()}

    def residuals(self) -> list[torch.Tensor]:
        return [r.clone() for r in self.compressor.state_dict()["residuals"]]


def go_on(run: everstep.Run, training: Training, steps: int) -> None:
    for at in range(run.step, steps):
        training.step(at)
        run.commit()
    run.flush()


def codecs_of(path: Path) -> set[int]:
    """Codecs of the gradients that have records of their own, in the last frame."""
    line = line_of(read_listing(RunPath(path)))
    frames, readers = open_frames(line, line.plans(line.latest())[0])
    with contextlib.ExitStack() as stack:
        for reader in readers:
            stack.callback(reader.close)
        frame = frames[-1]
        (update,) = [op for op in frame.ops if isinstance(op, Update)]
        return {frame.headers[g.dense.first].codec for g in update.grads if g.dense and frame.headers[g.dense.first].uid}


@pytest.mark.parametrize("name", EVERY)
def test_a_crashed_run_goes_on_bit_for_bit_and_its_frames_are_the_payloads(name: str, tmp_path: Path) -> None:
    make, codec_id = EVERY[name]
    whole = Training(make).through(STEPS).state()
    training = Training(make)
    run = training.attach(tmp_path)
    run.resume()
    go_on(run, training, CRASH_AT)
    stats = run.stats()
    assert stats["reused_bytes"] == CRASH_AT * 4 * (12000 + 10800)  # the two weights; biases share a record
    assert stats["reused_void_bytes"] == 0
    crash(run)
    assert codecs_of(tmp_path) == {codec_id}
    training = Training(make)
    with training.attach(tmp_path) as run:
        assert run.resume() == CRASH_AT
        go_on(run, training, STEPS)
    assert not equal(whole, training.state())


def clipped(grads: list[torch.Tensor], at: int) -> None:
    torch._foreach_mul_(grads, 0.1 + 0.01 * at)


def unscaled_unseen(grads: list[torch.Tensor], at: int) -> None:
    for g in grads:
        g.data.mul_(1 / 3)


def shifted(grads: list[torch.Tensor], at: int) -> None:
    for g in grads:
        g[..., 0] += 1e-3


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("after", [clipped, unscaled_unseen, shifted])
def test_what_is_done_to_gradients_after_compression_is_in_the_frame(name: str, after: Any, tmp_path: Path) -> None:
    make, _ = EVERY[name]
    whole = Training(make, after).through(STEPS).state()
    training = Training(make, after)
    run = training.attach(tmp_path)
    run.resume()
    go_on(run, training, CRASH_AT)
    stats = run.stats()
    if after is shifted:
        assert stats["reused_bytes"] == 0 and stats["reused_void_bytes"] > 0
    else:
        assert stats["reused_scaled_bytes"] == stats["reused_bytes"] > 0 and stats["reused_void_bytes"] == 0
    crash(run)
    training = Training(make, after)
    with training.attach(tmp_path) as run:
        run.resume()
        go_on(run, training, STEPS)
    assert not equal(whole, training.state())


def test_with_residual_base_a_crash_goes_on_with_the_residuals_of_the_last_base(tmp_path: Path) -> None:
    training = Training(lambda: TopK(0.01))
    run = training.attach(tmp_path, base_interval=5)
    run.resume()
    go_on(run, training, 5)
    at_base = training.residuals()
    go_on(run, training, 8)
    everything = training.state()
    crash(run)
    training = Training(lambda: TopK(0.01))
    run = training.attach(tmp_path, base_interval=5)
    assert run.resume() == 8
    assert not equal(at_base, training.residuals())
    found = training.state()
    for key in ("model", "optimizer"):
        assert not equal(everything[key], found[key])
    crash(run)


def test_after_a_clean_close_residuals_are_exactly_what_they_were(tmp_path: Path) -> None:
    whole = Training(lambda: TopK(0.01)).through(STEPS).state()
    training = Training(lambda: TopK(0.01))
    with training.attach(tmp_path, base_interval=50) as run:
        run.resume()
        go_on(run, training, CRASH_AT)
    training = Training(lambda: TopK(0.01))
    with training.attach(tmp_path, base_interval=50) as run:
        assert run.resume() == CRASH_AT
        go_on(run, training, STEPS)
    assert not equal(whole, training.state())


@pytest.mark.parametrize("options", [{"follower": True}, {"mode": "shadow"}], ids=["follower", "shadow"])
@pytest.mark.sampled(2)
def test_after_a_clean_close_residuals_are_exact_where_a_follower_had_made_a_base_of_the_last_step(
    options: Any, tmp_path: Path
) -> None:
    """Its residuals are those of the last multiple of base_interval."""
    training = Training(lambda: TopK(0.01))
    with training.attach(tmp_path, base_interval=4) as run:
        run.resume()
        go_on(run, training, 3)
    training = Training(lambda: TopK(0.01))
    with training.attach(tmp_path, base_interval=4, **options) as run:
        assert run.resume() == 3
        go_on(run, training, 7)
        wait_for(lambda: run.stats()["base_step"] == 7)
        assert read_manifest(base_folder(RunPath(tmp_path).bases(1), 7)).audit.startswith("folded")  # type: ignore[union-attr]
    exact = training.residuals()
    training = Training(lambda: TopK(0.01))
    run = training.attach(tmp_path, base_interval=4)
    assert run.resume() == 7
    assert not equal(exact, training.residuals())
    go_on(run, training, STEPS)
    crash(run)
    assert not equal(Training(lambda: TopK(0.01)).through(STEPS).state()["model"], dict(training.model.state_dict()))


def test_a_run_that_is_closed_without_a_step_keeps_the_base_that_is_there(tmp_path: Path) -> None:
    training = Training(lambda: TopK(0.01))
    with training.attach(tmp_path, base_interval=4) as run:
        run.resume()
        go_on(run, training, 3)
    manifest = Path(base_folder(RunPath(tmp_path).bases(1), 3), "manifest.json")
    before = manifest.stat().st_ino
    with Training(lambda: TopK(0.01)).attach(tmp_path, base_interval=4) as run:
        assert run.resume() == 3
    assert manifest.stat().st_ino == before


def wait_for(true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_payload_that_no_reader_would_take_is_not_stored(tmp_path: Path) -> None:
    """The writer encodes what was consumed."""
    training = Training(lambda: Quantize())

    def leave_nonsense(*_: Any) -> None:
        for p in training.model.parameters():
            if p.dim() == 2:
                scales = torch.full((-(-p.numel() // 256),), float("nan"), dtype=torch.bfloat16)
                payloads.leave(p, payloads.Codes(scales, torch.zeros(p.numel(), dtype=torch.int8), 256, 8))

    training.optimizer.register_step_pre_hook(leave_nonsense)
    run = training.attach(tmp_path)
    run.resume()
    go_on(run, training, 3)
    assert run.stats()["reused_bytes"] == 0 and run.stats()["reused_void_bytes"] > 0
    state = training.state()
    crash(run)
    training = Training(lambda: Quantize())
    run = training.attach(tmp_path)
    assert run.resume() == 3 and not equal(state, training.state())
    crash(run)


def test_a_follower_keeps_residuals_in_the_bases_that_it_makes(tmp_path: Path) -> None:
    training = Training(lambda: TopK(0.01))
    run = training.attach(tmp_path, base_interval=4, follower=True)
    run.resume()
    go_on(run, training, 4)
    at_base = training.residuals()
    go_on(run, training, 6)
    crash(run)
    training = Training(lambda: TopK(0.01))
    run = training.attach(tmp_path, base_interval=4, follower=True)
    assert run.resume() == 6
    assert not equal(at_base, training.residuals())
    crash(run)


def test_a_run_is_resumed_with_the_compressor_that_it_was_written_with(tmp_path: Path) -> None:
    training = Training(lambda: TopK(0.01))
    with training.attach(tmp_path) as run:
        run.resume()
        go_on(run, training, 3)
    for other in (lambda: TopK(0.02), lambda: Half("fp16")):
        training = Training(other)
        run = training.attach(tmp_path)
        with pytest.raises(MismatchError, match="compressed by"):
            run.resume()
        crash(run)
    run = training.attach(tmp_path, compress=None)
    with pytest.raises(MismatchError, match="compressed by"):
        run.resume()
    crash(run)


def test_compression_may_begin_in_mid_run(tmp_path: Path) -> None:
    training = Training(lambda: TopK(0.5))
    with training.attach(tmp_path, compress=None) as run:
        run.resume()
        go_on(run, training, 3)
    training = Training(lambda: TopK(0.5))
    with training.attach(tmp_path) as run:
        assert run.resume() == 3
        assert all(not r.any() for r in training.residuals())
        go_on(run, training, 5)


def test_something_else_is_no_compressor(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="compress must be a compressor"):
        Training(lambda: TopK(0.1)).attach(tmp_path, compress="topk")
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="can be called 'residuals'"):
        everstep.attach({"residuals": model}, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)


@pytest.mark.filterwarnings("ignore::everstep.errors.NonFiniteWarning")
def test_nan_gradients_are_in_the_frame_bit_for_bit(tmp_path: Path) -> None:
    def make() -> tuple[nn.Parameter, torch.optim.Optimizer, TopK]:
        p = nn.Parameter(torch.zeros(20_000))
        optimizer = torch.optim.SGD([p], lr=1.0)
        compressor = TopK(0.01, error_feedback=False)
        compressor.attach(optimizer)
        return p, optimizer, compressor

    def step(p: nn.Parameter, optimizer: torch.optim.Optimizer, at: int) -> None:
        p.grad = torch.randn(20_000, generator=torch.Generator().manual_seed(at))
        if at == 5:
            p.grad[:3] = torch.tensor([0x7FC00123, -0x400000, 0x7F800000], dtype=torch.int32).view(torch.float32)
        optimizer.step()
        optimizer.zero_grad()

    p, optimizer, compressor = make()
    run = everstep.attach(nn.ParameterList([p]), optimizer, tmp_path, compress=compressor, quiet=True, follower=False)
    run.resume()
    for at in range(7):
        step(p, optimizer, at)
        run.commit()
    run.flush()
    assert run.stats()["nonfinite_gradients"] == 1
    crash(run)
    restored, optimizer, compressor = make()
    run = everstep.attach(nn.ParameterList([restored]), optimizer, tmp_path, compress=compressor, quiet=True, follower=False)
    assert run.resume() == 7
    assert torch.equal(restored.view(torch.int32), p.view(torch.int32)) and restored.isnan().any()
    assert compressor.nonfinite_gradients == 1
    crash(run)


def test_the_state_of_a_step_has_the_model_alone_and_no_residuals(tmp_path: Path) -> None:
    training = Training(lambda: TopK(0.01))
    with training.attach(tmp_path) as run:
        run.resume()
        go_on(run, training, 3)
    state = everstep.open(tmp_path).state(3)
    assert list(state) == ["model", "optimizer", "extras"]
    assert not equal(dict(training.model.state_dict()), state["model"])


@pytest.mark.parametrize("compressor_first", [True, False])
def test_random_rounding_is_the_same_with_everstep_and_without_whatever_the_order_of_groups(
    compressor_first: bool, tmp_path: Path
) -> None:
    """An optimizer may have parameters in another order than the model."""

    def train(begin: int, end: int, path: Path | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
        groups = [{"params": [p for p in model.parameters() if p.dim() == dim]} for dim in (2, 1)]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        compressor = Quantize(4, rounding="stochastic", error_feedback=True, residual="log")
        if compressor_first:
            compressor.attach(optimizer)
        run = None
        if path is not None:
            run = everstep.attach(model, optimizer, path, quiet=True, follower=False, compress=compressor)
            assert run.resume() == begin
        if not compressor_first:
            compressor.attach(optimizer)
        for at in range(begin, end):
            model(torch.randn(3, 40, generator=torch.Generator().manual_seed(at))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if run is not None:
                run.commit()
        if run is not None:
            run.flush()
            crash(run)
        return [p.detach().clone() for p in model.parameters()]

    whole = train(0, 6, None)
    train(0, 3, tmp_path)
    assert not equal(whole, train(3, 6, tmp_path))
