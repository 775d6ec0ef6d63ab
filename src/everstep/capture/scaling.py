"""By what one gradient was multiplied to become another: found by looking, proven bit for bit. Pure.

Between backward and step gradients are mostly left alone or multiplied by one number: clip_grad_norm_ does that, and so does
a GradScaler (by a power of two; with clipping after it the product of both is still one multiplication). The number itself
is nobody's to tell us, so it is worked out from some elements; any number with which *every* element comes out right, bit
for bit, will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from everstep.memory import Bytes, typed

_BLOCK_ELEMENTS = 32_000
"""Below torch's grain size, so that it stays on this thread; and a block stays in the cache."""
_PRECISION = {torch.float32: (24, -149), torch.float64: (53, -1074), torch.float16: (11, -24), torch.bfloat16: (8, -133)}
"""Bits of the mantissa, and the exponent of the smallest number."""
_WORDS = {4: torch.int32, 8: torch.int64, 2: torch.int16}


def is_product(sent: Bytes, consumed: Bytes, dtype: torch.dtype, coefficient: float) -> bool:
    """Whether consumed = coefficient x sent in every bit, multiplied as fold does it (torch.mul)."""
    if dtype not in _PRECISION or len(sent) != len(consumed):
        return False
    a, b = typed(sent, dtype), typed(consumed, dtype)
    words = _WORDS[dtype.itemsize]
    memory = torch.empty(min(_BLOCK_ELEMENTS, a.numel()), dtype=dtype)
    for start in range(0, a.numel(), _BLOCK_ELEMENTS):
        block, expected = a[start : start + _BLOCK_ELEMENTS], b[start : start + _BLOCK_ELEMENTS]
        product = torch.mul(block, coefficient, out=memory[: block.numel()])
        if not torch.equal(product.view(words), expected.view(words)):
            return False
        if dtype.itemsize == 2 and bool(product.isnan().any()):
            return False  # which NaN a conversion to 16 bits gives depends on where the tensor is cut
    return True


def find_coefficient(sent: Bytes, consumed: Bytes, dtype: torch.dtype) -> float | None:
    """A number that may pass is_product for these, and does for some of their elements; None: there is none."""
    if dtype not in _PRECISION or len(sent) != len(consumed):
        return None
    a, b = typed(sent, dtype), typed(consumed, dtype)
    for start in range(0, a.numel(), _BLOCK_ELEMENTS):
        block, expected = a[start : start + _BLOCK_ELEMENTS], b[start : start + _BLOCK_ELEMENTS]
        found = _interval(_wide(block), _wide(expected), *_PRECISION[dtype])
        if found is None:
            continue  # all zero, or nothing that can be divided
        size = block.numel() * dtype.itemsize
        at = start * dtype.itemsize
        part = sent[at : at + size], consumed[at : at + size]
        return next((k for k in _candidates(*found, dtype) if is_product(*part, dtype, k)), None)
    return None


def _wide(block: torch.Tensor) -> npt.NDArray[np.longdouble]:
    return block.to(torch.float64).numpy().astype(np.longdouble)


def _interval(
    a: npt.NDArray[np.longdouble], b: npt.NDArray[np.longdouble], bits: int, least: int
) -> tuple[np.longdouble, np.longdouble] | None:
    """Between which numbers k must lie for round(a x k) = b in all elements; None if these do not tell."""
    with np.errstate(all="ignore"):
        use = np.isfinite(a) & np.isfinite(b) & (a != 0) & (b != 0)
        a, b = a[use], b[use]
        if not a.size:
            return None
        sign = np.sign(a[0]) * np.sign(b[0])
        a, b = np.abs(a), np.abs(b)
        mantissa, exponent = np.frexp(b)
        half = np.ldexp(np.longdouble(0.5), np.maximum(exponent - bits, least))
        # Below a power of two numbers are twice as close.
        low = ((b - np.where((mantissa == 0.5) & (exponent - bits > least), half / 2, half)) / a).max()
        high = ((b + half) / a).min()
    return (sign * low, sign * high)


def _candidates(low: np.longdouble, high: np.longdouble, dtype: torch.dtype) -> Iterator[float]:
    """Numbers of the precision that torch multiplies with, near the middle; those with few bits first."""
    middle = (low + high) / 2
    if not np.isfinite(middle):
        return
    kind = np.float64 if dtype is torch.float64 else np.float32
    with np.errstate(all="ignore"):
        nearest: Any = kind(middle)
        if dtype is not torch.float64:
            narrow = torch.tensor(float(nearest))
            yield from (float(narrow.to(short)) for short in (torch.bfloat16, torch.float16))
        yield float(nearest)
        for toward in (-np.inf, np.inf):
            near = nearest
            for _ in range(2):
                near = np.nextafter(near, kind(toward))
                yield float(near)


class Coefficients:
    """By what the gradients of one update were multiplied: mostly all by the same."""

    def __init__(self) -> None:
        self._found: list[float] = []

    def begin_update(self) -> None:
        self._found = []

    def find(self, pairs: Callable[[], Iterable[tuple[Bytes, Bytes]]], dtype: torch.dtype) -> float | None:
        """The number by which all of (sent, consumed) come out right, bit for bit; None: there is none."""
        for k in self._found:
            if all(is_product(a, b, dtype, k) for a, b in pairs()):
                return k
        found = next((k for k in (find_coefficient(a, b, dtype) for a, b in pairs()) if k is not None), None)
        if found is None or not all(is_product(a, b, dtype, found) for a, b in pairs()):
            return None
        self._found = [found, *self._found[:3]]
        return found
