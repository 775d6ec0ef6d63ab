"""Gradients that left during backward, until their step comes. Runs on the writer thread.

What left early counts only if it is proven, at the step, to be what the optimizer consumed: the record's checksum is that of
the consumed bytes, or (after clipping or unscaling) the record's elements times one coefficient are. Else the consumed
gradient is written as ever, and the record that left early belongs to no operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from everstep import codec
from everstep.atoms import piece_elements
from everstep.capture.scaling import Coefficients
from everstep.frame import Gradient, ScaledGradient, TensorRef
from everstep.memory import CODE_BY_DTYPE, Bytes, strides_of, view_bytes
from everstep.store.log import LogWriter

MAX_MISSES = 4
"""A gradient that was sent for nothing so many times in a row is not sent early again."""


@dataclass
class Ledger:
    """What became of gradients that left early, and of compression's payloads. Kept by the writer thread; others read it."""

    used_bytes: int = 0
    """Of gradients that had left before their step and were what it consumed."""
    scaled_bytes: int = 0
    """Those of them that had been multiplied in between."""
    void_bytes: int = 0
    """Of gradients that had left for nothing: they were changed, or added to, or no step followed."""
    hopeless: set[int] = field(default_factory=set)
    """Parameters whose gradients are not sent early any more."""
    reused_bytes: int = 0
    """Of gradients that were stored by the payload that compression had made of them."""
    reused_scaled_bytes: int = 0
    """Those of them that had been multiplied since."""
    reused_void_bytes: int = 0
    """Of gradients that were no longer what compression had made of them, and were encoded anew."""


class Piece(NamedTuple):
    """One DATA record as the encoder wrote it."""

    ordinal: int
    codec: int
    codec_version: int
    payload: Bytes


_Part = tuple[int, int | None, Bytes | None]
"""(record, checksum of what it decodes to; None: it is the payload's own; its elements, if they are kept)."""


class _Sent(NamedTuple):
    ref: TensorRef
    pieces: list[_Part]
    num_bytes: int


class SentEarly:
    """Those of the open frame."""

    def __init__(
        self, log: LogWriter, write: Callable[[int, Bytes, torch.dtype, int], Piece], ledger: Ledger,
        coefficients: Coefficients,
    ) -> None:  # fmt: skip
        self._log = log
        self._write = write
        self._ledger = ledger
        self._sent: dict[int, _Sent] = {}
        self._misses: dict[int, int] = {}
        self._coefficients = coefficients
        self._keeps = False
        """Whether elements are kept where the log does not have them at hand: they have been scaled before."""
        self._kept: dict[tuple[int, int], Bytes] = {}

    # -- during backward ----------------------------------------------------------------------------------------------

    def take(self, uid: int, grad: torch.Tensor) -> None:
        """Write a gradient that has just become final, as far as one can know.

        Whoever changes it from now on may do so while it is read: what was written is compared with what is consumed.
        """
        self._drop(uid)
        if type(grad) is not torch.Tensor or grad.is_sparse or not grad.is_contiguous() or grad.device.type != "cpu":
            return  # it leaves at the step
        version = grad._version
        storage = grad.untyped_storage()  # keeps the memory, should somebody give the gradient another meanwhile
        shape, itemsize = tuple(grad.shape), grad.element_size()
        raw = view_bytes(grad, keep_alive=False)
        at = storage.data_ptr() + grad.storage_offset() * itemsize
        if raw.ctypes.data != at or len(raw) != math.prod(shape) * itemsize:
            return
        size = piece_elements(math.prod(shape), fine=self._log.fine) * itemsize
        pieces: list[_Part] = []
        for start in range(0, len(raw), size):
            piece = self._write(uid, raw[start : start + size], grad.dtype, start // itemsize)
            pieces.append(self._note(uid, start, piece, len(raw[start : start + size]), itemsize))
            if grad._version != version:
                self._missed(uid, min(start + size, len(raw)))
                return
        ref = TensorRef(CODE_BY_DTYPE[grad.dtype], shape, pieces[0][0], len(pieces))
        self._sent[uid] = _Sent(ref, pieces, len(raw))
        del storage

    def _note(self, uid: int, start: int, piece: Piece, num_bytes: int, itemsize: int) -> _Part:
        if piece.codec == codec.RAW:
            stored = self._log.payload(piece.ordinal) if self._keeps and not self._log.in_memory else None
            return piece.ordinal, None, None if stored is None else self._keep(uid, start, stored)
        # A codec looks at its input more than once, and that may have changed in between.
        decoded = np.empty(num_bytes, np.uint8)
        codec.decode(piece.codec, piece.codec_version, piece.payload, itemsize, decoded)
        return piece.ordinal, xxhash.xxh3_64_intdigest(decoded), decoded if self._keeps else None

    def _keep(self, uid: int, start: int, stored: Bytes) -> Bytes:
        memory = self._kept.get((uid, start))
        if memory is None or len(memory) != len(stored):
            memory = self._kept[(uid, start)] = np.empty(len(stored), np.uint8)
        np.copyto(memory, stored)
        return memory

    # -- at the step --------------------------------------------------------------------------------------------------

    def __contains__(self, uid: int) -> bool:
        return uid in self._sent

    def consumed(self, uid: int, grad: torch.Tensor, raw: Bytes) -> Gradient | None:
        """The gradient that the optimizer consumed, if what left is that; None: it did not, and is to be written now.

        `raw`: its elements as bytes.
        """
        sent = self._sent.pop(uid)
        found = self._match(uid, sent, grad, raw)
        if found is None:
            self._missed(uid, sent.num_bytes)
            return None
        self._misses.pop(uid, None)
        self._ledger.used_bytes += sent.num_bytes
        if isinstance(found, ScaledGradient):
            self._ledger.scaled_bytes += sent.num_bytes
        return found

    def _match(self, uid: int, sent: _Sent, grad: torch.Tensor, raw: Bytes) -> Gradient | None:
        ref = sent.ref
        if (CODE_BY_DTYPE[grad.dtype], tuple(grad.shape)) != (ref.dtype, ref.shape) or strides_of(grad) is not None:
            return None
        size = piece_elements(grad.numel(), fine=self._log.fine) * grad.element_size()
        parts = [raw[start : start + size] for start in range(0, len(raw), size)]
        if all(self._is_same(ordinal, sum_, part) for (ordinal, sum_, _), part in zip(sent.pieces, parts, strict=True)):
            return Gradient(uid, ref)
        elements = [self._elements(*piece) for piece in sent.pieces]
        if any(e is None for e in elements):
            self._keeps = True
            return None
        pairs = [(e, part) for e, part in zip(elements, parts, strict=True) if e is not None]
        coefficient = self._coefficients.find(lambda: pairs, grad.dtype)
        return None if coefficient is None else ScaledGradient(uid, ref, None, coefficient)

    def _is_same(self, ordinal: int, decoded_sum: int | None, part: Bytes) -> bool:
        if decoded_sum is None:
            return self._log.holds(ordinal, part)
        return xxhash.xxh3_64_intdigest(part) == decoded_sum

    def _elements(self, ordinal: int, decoded_sum: int | None, kept: Bytes | None) -> Bytes | None:
        if kept is not None or decoded_sum is not None:
            return kept
        return self._log.payload(ordinal) if self._log.in_memory else None

    def _missed(self, uid: int, num_bytes: int) -> None:
        self._ledger.void_bytes += num_bytes
        self._misses[uid] = self._misses.get(uid, 0) + 1
        if self._misses[uid] >= MAX_MISSES:
            self._ledger.hopeless.add(uid)

    def _drop(self, uid: int) -> None:
        sent = self._sent.pop(uid, None)
        if sent is not None:
            self._ledger.void_bytes += sent.num_bytes

    def end_frame(self) -> None:
        """What no update has consumed by now belongs to nothing."""
        for uid in list(self._sent):
            self._drop(uid)
