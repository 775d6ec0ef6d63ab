"""What gradient compression made of a gradient, by parameter: on its way from a compressor to the writer.

A compressor leaves the payload that it communicated, or would have, for whoever stores the gradient: the writer puts it into
the frame, where it would else have to find out again what the gradient is like. It is a hint: the writer compares it with
the bytes that the optimizer consumed (capture/reuse.py), so nothing here has to be right.

Tensors in a payload belong to it: nobody writes to them any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from everstep.codec import BLOCKS, SIXTEEN, SPARSE, blocks
from everstep.codec.sixteen import BF16, FP16
from everstep.memory import Bytes, plain, view_bytes


class Payload(Protocol):
    """A gradient of `numel` elements of `dtype` in row-major order, as a codec stores it."""

    @property
    def numel(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def piece(self, start: int, stop: int) -> tuple[int, int, list[Bytes]]:
        """(codec, its version, the parts of its payload) of elements [start, stop), which is a piece of a tensor."""
        ...


@dataclass(frozen=True)
class Kept:
    """Few elements; all others are zero."""

    indices: torch.Tensor
    """int64, strictly rising."""
    values: torch.Tensor
    numel: int

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def piece(self, start: int, stop: int) -> tuple[int, int, list[Bytes]]:
        indices = self.indices.cpu().numpy()
        low, high = np.searchsorted(indices, (start, stop))
        count = np.array([high - low], "<u8")
        rising = (indices[low:high] - start).astype("<u4")
        return SPARSE, 1, [count.view(np.uint8), rising.view(np.uint8), view_bytes(plain(self.values[low:high]))]


@dataclass(frozen=True)
class Words:
    """float32 elements that are float16 or bfloat16 numbers, all finite."""

    words: torch.Tensor
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        return self.words.numel()

    def piece(self, start: int, stop: int) -> tuple[int, int, list[Bytes]]:
        flavour = BF16 if self.words.dtype is torch.bfloat16 else FP16
        return SIXTEEN, 1, [np.array([flavour, 0, 0, 0], np.uint8), view_bytes(plain(self.words[start:stop]))]


@dataclass(frozen=True)
class Codes:
    """float32 elements that are a small integer times the scale of their block. Pieces begin at multiples of a block."""

    scales: torch.Tensor
    """bfloat16, positive or zero."""
    codes: torch.Tensor
    """int8"""
    block: int
    bits: int
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        return self.codes.numel()

    def piece(self, start: int, stop: int) -> tuple[int, int, list[Bytes]]:
        scales = self.scales[start // self.block : -(-stop // self.block)]
        codes = view_bytes(plain(self.codes[start:stop]))
        stored = codes if self.bits == 8 else blocks.packed(codes.view(np.int8))
        return BLOCKS, 1, [blocks.header(self.block, self.bits), view_bytes(plain(scales)), stored]


_known: dict[int, tuple[weakref.ref[torch.Tensor], Payload]] = {}
readers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Who will take() payloads. Where there is nobody, none need be made."""


def leave(param: torch.Tensor, payload: Payload) -> None:
    """This is what the gradient of a parameter is, as of now."""
    key = id(param)
    _known[key] = (weakref.ref(param, lambda _: _known.pop(key, None)), payload)


def take(params: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> list[Payload | None] | None:
    """What was left for each of these parameters since the last time; None: nothing for any. That of `others` is dropped."""
    if not _known:
        return None
    found: list[Any] = [_known.pop(id(p), None) for p in params]
    for p in others:
        _known.pop(id(p), None)
    return [entry[1] if entry is not None and entry[0]() is p else None for entry, p in zip(found, params, strict=True)]
