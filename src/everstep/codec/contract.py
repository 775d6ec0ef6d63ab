"""What every codec promises, and the ids that stand for codecs on disk.

A codec turns one contiguous piece of a tensor, given as raw little-endian bytes, into a payload and back
without losing a bit. It keeps no state, does no I/O and may be used by several threads at once.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""One-dimensional, contiguous; of any alignment."""

RAW = 0
SIXTEEN = 1
SPARSE = 2
BLOCKS = 3


class Codec(Protocol):
    """A lossless coding of bytes. `id` and `version` are what the disk knows it by; they are never reused."""

    id: int
    version: int
    name: str

    def encode(self, raw: Bytes, itemsize: int, is_float32: bool) -> Bytes | None:
        """Return the payload, or None when this codec does not apply or would not be smaller.

        `raw` is only read. The payload is the caller's (and is `raw` itself for the raw codec).
        """
        ...

    def decode(self, stored: Bytes, itemsize: int, out: Bytes) -> None:
        """Fill all of `out`, which must be writable, with the bytes that were encoded.

        Whatever bytes `stored` holds, the outcome is a filled `out`, or a CodecError and an undefined `out`.
        Temporary memory is at most proportional to `stored` and `out`.
        """
        ...
