"""Blocks: fp32 pieces that were quantised block by block, as `everstep.compress.Quantize` makes them.

Payload, version 1, little-endian, for a piece of n values:

    offset    size     field
    0         4        B, values in a block (the last may be shorter), 1 or more
    4         1        bits of a code: 4 or 8
    5         3        zero
    8         2·b      scale of each of the b = ceil(n / B) blocks: the upper half of a positive, finite fp32 or 0.0
    8 + 2·b   8 bits: n         codes, signed bytes
              4 bits: ceil(n/2) codes, signed, two in a byte, the first in the lower half; a half that is left over is zero

A value is code · scale. Both have few bits, so that the product is exact, whoever multiplies.

Which scales a piece was made with cannot be told from its values, so there is no encode: the payload comes from the
quantiser itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from everstep.codec.contract import BLOCKS, Bytes
from everstep.errors import CodecError

HEADER_BYTES = 8
_INFINITE = 0x7F80


class Blocks:
    """Keeps codes and the scales of their blocks."""

    id = BLOCKS
    version = 1
    name = "blocks"

    def encode(self, raw: Bytes, itemsize: int, is_float32: bool) -> Bytes | None:
        """None: what was quantised comes with its payload."""
        return None

    def decode(self, stored: Bytes, itemsize: int, out: Bytes) -> None:
        """Multiply codes by their scales."""
        if itemsize != 4 or out.size % 4:
            raise CodecError(f"blocks payload: is fp32, cannot be {out.size} bytes of itemsize {itemsize}")
        if stored.size < HEADER_BYTES:
            raise CodecError(f"blocks payload: {stored.size} bytes are too few for its header")
        block, bits = int(stored[:4].view("<u4")[0]), int(stored[4])
        if not block or bits not in (4, 8) or stored[5:8].any():
            raise CodecError(f"blocks payload: no codes of {bits} bits in blocks of {block}")
        values = out.view("<f4")
        num_blocks = -(-values.size // block)
        codes_at = HEADER_BYTES + 2 * num_blocks
        expected = codes_at + (values.size if bits == 8 else -(-values.size // 2))
        if stored.size != expected:
            raise CodecError(f"blocks payload: {stored.size} bytes stored, {expected} needed for {values.size} values")
        words = stored[HEADER_BYTES:codes_at].view("<u2")
        if np.any(words >= _INFINITE):  # the sign bit is above it
            raise CodecError("blocks payload: a scale is negative or not finite")
        scales = np.left_shift(words, 16, dtype=np.uint32).view("<f4")
        codes = stored[codes_at:].view(np.int8) if bits == 8 else _unpacked(stored[codes_at:], values.size)
        whole = values.size // block * block
        with np.errstate(all="ignore"):
            if whole:
                np.multiply(
                    codes[:whole].reshape(-1, block), scales[: whole // block, None], out=values[:whole].reshape(-1, block)
                )
            if whole < values.size:
                np.multiply(codes[whole:], scales[-1], out=values[whole:])


def header(block: int, bits: int) -> Bytes:
    """The first bytes of a payload."""
    return np.frombuffer(block.to_bytes(4, "little") + bytes((bits, 0, 0, 0)), np.uint8)


def packed(codes: npt.NDArray[np.int8]) -> Bytes:
    """Codes of 4 bits, two in a byte."""
    halves: Bytes = codes.view(np.uint8) & np.uint8(0x0F)
    found: Bytes = halves[::2].copy()
    found[: halves.size // 2] |= np.left_shift(halves[1::2], 4, dtype=np.uint8)
    return found


def _unpacked(stored: Bytes, num_codes: int) -> npt.NDArray[np.int8]:
    codes = np.empty(2 * stored.size, np.int8)
    signed = stored.view(np.int8)
    codes[1::2] = signed >> 4
    codes[::2] = (stored << 4).view(np.int8) >> 4
    if num_codes < codes.size and codes[num_codes]:
        raise CodecError("blocks payload: the half byte that is left over is not zero")
    return codes[:num_codes]
