"""What compressors do to gradients, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

import everstep
from everstep import codec, payloads
from everstep.compress import Compressor, Half, Quantize, TopK
from everstep.errors import NonFiniteWarning, UsageError

EVERY = {
    "topk": lambda: TopK(0.05),
    "topk-plain": lambda: TopK(0.05, error_feedback=False),
    "eight": lambda: Quantize(),
    "eight-stochastic": lambda: Quantize(rounding="stochastic", seed=3),
    "four": lambda: Quantize(4, error_feedback=True),
    "fp16": lambda: Half("fp16"),
    "bf16": lambda: Half("bf16", error_feedback=True),
}
EVERY_COMPRESSOR = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY.keys())


@pytest.fixture(autouse=True)
def somebody_reads() -> Any:
    class Reader:
        pass

    reader = Reader()
    payloads.readers.add(reader)
    yield
    payloads.readers.discard(reader)


def with_grad(grad: torch.Tensor) -> nn.Parameter:
    p = nn.Parameter(torch.zeros_like(grad))
    p.grad = grad.clone()
    return p


def decoded(payload: payloads.Payload, numel: int) -> torch.Tensor:
    codec_id, version, parts = payload.piece(0, numel)
    out = np.empty(4 * numel, np.uint8)
    codec.decode(codec_id, version, np.concatenate(parts), 4, out)
    return torch.from_numpy(out.view(np.float32))


@EVERY_COMPRESSOR
@pytest.mark.parametrize("numel", [1, 255, 256, 1000, 4097])
def test_the_optimizer_gets_what_the_payload_decodes_to_bit_for_bit(make: Any, numel: int) -> None:
    compressor: Compressor[Any] = make()
    for turn in range(3):
        p = with_grad(torch.randn(numel, generator=torch.Generator().manual_seed(turn)))
        compressor([p])
        assert p.grad is not None
        taken = payloads.take([p])
        assert taken is not None and taken[0] is not None
        assert torch.equal(decoded(taken[0], numel).view(torch.int32), p.grad.view(torch.int32))


@pytest.mark.parametrize("make", [lambda: TopK(0.1), lambda: Quantize(4, error_feedback=True)], ids=["topk", "four"])
def test_with_error_feedback_nothing_is_lost_for_good(make: Any) -> None:
    compressor: Compressor[Any] = make()
    p = with_grad(torch.zeros(500))
    given, consumed = torch.zeros(500, dtype=torch.float64), torch.zeros(500, dtype=torch.float64)
    for turn in range(20):
        p.grad = torch.randn(500, generator=torch.Generator().manual_seed(turn))
        given += p.grad
        compressor([p])
        consumed += p.grad
    residual = compressor.state_dict()["residuals"][0]
    torch.testing.assert_close(consumed + residual, given, atol=1e-4, rtol=0)
    assert residual.abs().max() > 0


def test_topk_keeps_the_largest_and_a_view_in_another_order_is_compressed_too() -> None:
    grad = torch.arange(12.0).reshape(3, 4).t()
    p = nn.Parameter(torch.zeros(3, 4).t())
    p.grad = grad.clone(memory_format=torch.preserve_format)
    assert not p.grad.is_contiguous()
    TopK(0.25)([p])
    assert torch.equal(p.grad, torch.where(grad >= 9, grad, 0.0))


def test_quantize_is_off_by_half_a_step_at_most() -> None:
    p = with_grad(torch.randn(1024))
    before = p.grad.clone()  # type: ignore[union-attr]
    Quantize()([p])
    assert p.grad is not None
    step = before.view(-1, 256).abs().amax(dim=1, keepdim=True) / 127 * (1 + 2**-7)
    assert ((p.grad - before).view(-1, 256).abs() <= step / 2 * (1 + 1e-6)).all()


def test_stochastic_rounding_is_right_on_average_and_repeatable() -> None:
    def run(seed: int) -> torch.Tensor:
        compressor, total = Quantize(4, rounding="stochastic", seed=seed), torch.zeros(256)
        for _ in range(400):
            p = with_grad(torch.linspace(-1, 1, 256))
            compressor([p])
            total += p.grad  # type: ignore[arg-type]
        return total / 400

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    torch.testing.assert_close(run(1), torch.linspace(-1, 1, 256), atol=0.02, rtol=0)


def test_half_does_not_make_infinities() -> None:
    p = with_grad(torch.tensor([1e6, -1e6, 1.0]))
    Half("fp16")([p])
    assert p.grad is not None and p.grad.tolist() == [65504.0, -65504.0, 1.0]


@EVERY_COMPRESSOR
def test_nan_and_infinite_gradients_go_on_bit_for_bit_and_are_counted(make: Any) -> None:
    compressor: Compressor[Any] = make()
    bits = torch.randint(-(2**31), 2**31 - 1, (1000,), dtype=torch.int32)
    bits[3], bits[7] = 0x7FC12345, 0x7F800000
    p, healthy = with_grad(bits.view(torch.float32)), with_grad(torch.randn(1000))
    with pytest.warns(NonFiniteWarning, match="1 gradient"):
        compressor([p, healthy])
    assert p.grad is not None and torch.equal(p.grad.view(torch.int32), bits)
    assert compressor.nonfinite_gradients == 1
    compressor([p])
    assert compressor.nonfinite_gradients == 2
    assert all(r is None or r.isfinite().all() for r in compressor.state_dict()["residuals"])


def test_other_dtypes_and_sparse_gradients_are_left_alone() -> None:
    whole = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    whole.grad = torch.randn(4, 4, dtype=torch.float64)
    table = nn.Parameter(torch.zeros(4, 4))
    table.grad = torch.randn(4, 4).to_sparse()
    before = whole.grad.clone(), table.grad.to_dense()
    Quantize()([whole, table])
    assert torch.equal(whole.grad, before[0]) and torch.equal(table.grad.to_dense(), before[1])


@pytest.mark.parametrize("ratio", [0, -0.1, 1.0001, float("nan"), True, "0.1"])
def test_a_ratio_that_is_none_is_refused(ratio: Any) -> None:
    with pytest.raises(UsageError, match="ratio must be above 0 and at most 1"):
        TopK(ratio)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Quantize(7), "bits must be 4 or 8"),
        (lambda: Quantize(rounding="up"), "rounding must be one of"),
        (lambda: Quantize(seed=-1), "seed must be"),
        (lambda: Half("fp8"), "kind must be one of fp16, bf16"),
        (lambda: TopK(0.1, residual="never"), "residual must be one of base, log"),
        (lambda: everstep.compress.tap(3), "a communication hook is a function"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(make: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        make()


def test_gradients_that_are_still_scaled_are_refused() -> None:
    p = with_grad(torch.randn(4))
    optimizer = torch.optim.SGD([p], lr=0.1)
    TopK(0.5).attach(optimizer)
    optimizer.grad_scale = torch.tensor(2.0)  # as GradScaler.step does for fused optimizers
    with pytest.raises(UsageError, match="unscale_"):
        optimizer.step()


def test_a_closure_computes_the_gradient_that_is_compressed() -> None:
    p = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([p], lr=1.0)
    TopK(0.25).attach(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert p.tolist() == [0.0, 0.0, 0.0, -4.0]


def test_its_own_state_dict_brings_a_compressor_back() -> None:
    params = [nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(20))]
    optimizer = torch.optim.SGD(params, lr=0.1)
    first, second = TopK(0.1), TopK(0.1)
    first.attach(optimizer).remove()
    second.attach(optimizer).remove()

    def turn(compressor: TopK, seed: int) -> list[torch.Tensor]:
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        compressor(params)
        return [p.grad.clone() for p in params if p.grad is not None]

    turn(first, 1)
    second.load_state_dict(first.state_dict())
    assert all(map(torch.equal, turn(first, 2), turn(second, 2)))
    with pytest.raises(UsageError, match="other parameters"):
        TopK(0.1).load_state_dict(first.state_dict())


@pytest.mark.parametrize("make", [EVERY["topk"], EVERY["four"], EVERY["bf16"]])
def test_a_residual_that_somebody_holds_is_not_written_to_any_more(make: Any) -> None:
    p = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([p], lr=0.1)
    compressor = make()
    compressor.attach(optimizer)
    compressor.bind({"model/p": p})
    shown = dict(compressor.residuals.named_buffers())["model/p"]
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for at in range(4):
        p.grad = torch.randn(1000, generator=torch.Generator().manual_seed(at))
        optimizer.step()
        assert dict(compressor.residuals.named_buffers())["model/p"] is shown
        assert torch.equal(shown, compressor.state_dict()["residuals"][0])
        held.append((shown.detach(), shown.clone()))
    assert all(torch.equal(a, b) for a, b in held) and not torch.equal(held[0][0], held[1][0])


class _FailedWork:
    """A collective that another rank did not live to finish: nothing was written to its tensors."""

    def get_future(self) -> Future[Any]:
        failed: Future[Any] = Future()
        failed.set_exception(RuntimeError("Connection closed by peer"))
        return failed


@pytest.mark.parametrize("compressor", [TopK(0.5), Quantize(8), Half("bf16")], ids=lambda c: type(c).__name__)
def test_what_was_never_received_is_no_gradient(compressor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_gather", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *args, **options: _FailedWork())
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    payload = compressor.compress(torch.randn(100), 0)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        compressor.exchange([payload], [False], [0], None).wait()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_quantize_makes_no_infinities_of_the_largest_numbers(bits: int, rounding: str) -> None:
    """The scale is rounded up: the largest code times it may be out of range."""
    largest = torch.finfo(torch.float32).max
    for at, part in enumerate(torch.linspace(0.5, 1.0, 200).tolist()):
        p = with_grad(torch.tensor([part * largest, -part * largest, 0.3 * largest, 0.0]))
        Quantize(bits, rounding=rounding, seed=at)([p])
        assert p.grad is not None and p.grad.isfinite().all()
        taken = payloads.take([p])
        assert taken is not None and taken[0] is not None
        assert torch.equal(decoded(taken[0], 4), p.grad)
        assert ((p.grad[:2].abs() / largest) - part).abs().max() < 1.5 * part / (2 ** (bits - 1) - 1)


@EVERY_COMPRESSOR
def test_an_empty_gradient_is_compressed_to_nothing(make: Any) -> None:
    compressor = make()
    payload = compressor.compress(torch.empty(0), 0)
    out = torch.empty(0)
    compressor.write(payload, out)
    assert payload.numel == 0
