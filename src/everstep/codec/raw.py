"""Raw: the payload is the piece.

Payload, version 1: the bytes of the piece, unchanged.
"""

from __future__ import annotations

import numpy as np

from everstep.codec.contract import RAW, Bytes
from everstep.errors import CodecError


class Raw:
    """Stores a piece as it is; the codec that always applies."""

    id = RAW
    version = 1
    name = "raw"

    def encode(self, raw: Bytes, itemsize: int, is_float32: bool) -> Bytes | None:
        """Return `raw` itself, uncopied."""
        return raw

    def decode(self, stored: Bytes, itemsize: int, out: Bytes) -> None:
        """Copy `stored` to `out`."""
        if stored.size != out.size:
            raise CodecError(f"raw payload: {stored.size} bytes stored where the piece has {out.size}")
        np.copyto(out, stored)
