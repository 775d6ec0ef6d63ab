"""Gradients whose payload is known: gradient compression made it. Runs on the writer thread.

The payload goes into the frame if it is proven to stand for the gradient that the optimizer consumed, in every bit, or for
one that became that by one multiplication (clipping, unscaling): the frame then has the payload and the coefficient. Version
counters would not do for a proof: `.data` and torch's own unscaling move none. What is not proven is encoded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from everstep import codec
from everstep.atoms import piece_elements
from everstep.capture.scaling import Coefficients
from everstep.capture.sent import Ledger
from everstep.errors import CodecError
from everstep.frame import Gradient, ScaledGradient, TensorRef
from everstep.memory import CODE_BY_DTYPE, Bytes, strides_of
from everstep.payloads import Payload

_WORDS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}


class _Encoded(NamedTuple):
    """One piece: its codec, the parts of its payload, and what of the consumed gradient it stands for."""

    codec: int
    version: int
    parts: list[Bytes]
    consumed: Bytes


class Reuse:
    """Payloads of the update at hand."""

    def __init__(
        self, write: Callable[[int, torch.dtype, int, int, int, int, list[Bytes]], int], ledger: Ledger,
        coefficients: Coefficients, *, fine: bool = False,
    ) -> None:  # fmt: skip
        """`write`: (uid, dtype, start, bytes it decodes to, codec, its version, payload) into a record; gives its number."""
        self._write = write
        self._ledger = ledger
        self._fine = fine
        self._coefficients = coefficients

    def gradient(self, uid: int, grad: torch.Tensor, raw: Bytes, payload: Payload) -> Gradient | None:
        """Write the payload, if it stands for this gradient, whose bytes are `raw`; None: it does not."""
        dtype = grad.dtype
        if payload.dtype != dtype or payload.numel != grad.numel():
            self._ledger.reused_void_bytes += len(raw)
            return None
        count = piece_elements(grad.numel(), fine=self._fine)
        size = count * dtype.itemsize
        pieces = [
            _Encoded(*payload.piece(at // dtype.itemsize, min(at + size, len(raw)) // dtype.itemsize), raw[at : at + size])
            for at in range(0, len(raw), size)
        ]
        try:
            is_same = all(a is not None and np.array_equal(a, b) for a, b in _pairs(pieces, dtype))
            coefficient = None if is_same else self._coefficient(pieces, dtype)
        except CodecError:  # no reader would take this payload
            is_same, coefficient = False, None
        if not is_same and coefficient is None:
            self._ledger.reused_void_bytes += len(raw)
            return None
        if not is_same:
            self._ledger.reused_scaled_bytes += len(raw)
        first = -1
        for i, piece in enumerate(pieces):
            ordinal = self._write(
                uid, dtype, i * count, len(piece.consumed), piece.codec, piece.version, piece.parts
            )
            first = ordinal if first < 0 else first
        self._ledger.reused_bytes += len(raw)
        ref = TensorRef(CODE_BY_DTYPE[dtype], tuple(grad.shape), first, len(pieces), 0, strides_of(grad))
        return Gradient(uid, ref) if coefficient is None else ScaledGradient(uid, ref, None, coefficient)

    def _coefficient(self, pieces: list[_Encoded], dtype: torch.dtype) -> float | None:
        if any(a is None for a, _ in _pairs(pieces, dtype)):
            return None
        found = self._coefficients.find(lambda: ((a, b) for a, b in _pairs(pieces, dtype) if a is not None), dtype)
        # Of elements that a payload leaves out only their being zero was looked at: times this they must still be +0.0.
        return found if found is not None and np.isfinite(found) and not np.signbit(found) else None


def _pairs(pieces: list[_Encoded], dtype: torch.dtype) -> Iterator[tuple[Bytes | None, Bytes]]:
    """(what a payload says, what was consumed) of each piece: elements that can be compared; None: they differ elsewhere."""
    for piece in pieces:
        if piece.codec == codec.SPARSE:
            yield _kept(piece, dtype.itemsize)
        else:
            decoded = np.empty(len(piece.consumed), np.uint8)
            codec.decode(piece.codec, piece.version, np.concatenate(piece.parts), dtype.itemsize, decoded)
            yield decoded, piece.consumed


def _kept(piece: _Encoded, itemsize: int) -> tuple[Bytes | None, Bytes]:
    """Those that the payload keeps; all others must be zero."""
    _, indices, values = piece.parts
    words = piece.consumed.view(_WORDS[itemsize])
    there = words[indices.view("<u4")]
    if np.count_nonzero(words) != np.count_nonzero(there):
        return None, piece.consumed
    return values, there.view(np.uint8)
