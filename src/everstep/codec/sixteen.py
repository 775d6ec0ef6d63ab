"""Sixteen: fp32 pieces whose every value fits in 16 bits, as mixed-precision training makes them.

Payload, version 1, little-endian:

    offset  size  field
    0       1     flavour: 1 = bf16, 2 = fp16
    1       1     exponent k, signed; 0 for bf16, -100 to 112 for fp16
    2       2     zero
    4       2·n   n 16-bit words, one for each fp32 value of the piece, in order

    bf16    The word is the upper half of the fp32 bits; the lower half is zero. Everything fits that has a
            zero lower half, infinities and NaNs with it.
    fp16    The word is an IEEE 754 binary16 number h, and the value is h · 2^k, which fp32 holds exactly.
            Written only for finite values, so that no decoder has to care what its hardware does to NaNs.
            k is there for gradients that a GradScaler has divided by its scale, a power of two.

What fp16 makes of the values is compared with them bit by bit, so a rounding, a flushed denormal or a lost
sign makes encode refuse, never lie.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from everstep.codec.contract import SIXTEEN, Bytes
from everstep.errors import CodecError

_Bits: TypeAlias = npt.NDArray[np.uint32]

BF16 = 1
FP16 = 2

_HEADER_BYTES = 4
_MIN_EXPONENT, _MAX_EXPONENT = -100, 112  # h · 2^k is then zero or a normal fp32 for every finite h
_EXPONENT_OF_FP16_MAX = 15
_FP32_BIAS = 127
_FP16_INFINITY_BITS = 0x7C00
_GUESS_HEADROOM = 3  # powers of two that later values may exceed the first block's by
# numpy converts fp16 in software, several times slower than torch, so torch does it. Below its parallel grain
# size (32,768) torch stays on this thread: other cores are the training's. Blocks also stay in the cache.
_BLOCK_VALUES = 32_000


class Sixteen:
    """Halves fp32 pieces that are exactly bf16, or fp16 times a power of two."""

    id = SIXTEEN
    version = 1
    name = "sixteen"

    def encode(self, raw: Bytes, itemsize: int, is_float32: bool) -> Bytes | None:
        """Return header and 16-bit words, or None when some value does not fit."""
        num_values = raw.size // 4
        if not is_float32 or itemsize != 4 or raw.size % 4 or _HEADER_BYTES + 2 * num_values >= raw.size:
            return None
        bits = raw.view("<u4")
        flavour = flavour_of(bits[:_BLOCK_VALUES])
        if flavour == BF16:
            flavour = flavour_of(bits)
        if flavour is None:
            return None
        payload = np.empty(_HEADER_BYTES + 2 * num_values, np.uint8)
        payload[:_HEADER_BYTES] = (flavour, 0, 0, 0)
        words = payload[_HEADER_BYTES:]
        if flavour == BF16:
            np.copyto(words.view("<u2"), raw.view("<u2")[1::2])
            return payload
        exponent = _encode_fp16(raw, words)
        if exponent is None:
            return None
        payload[1] = exponent & 0xFF
        return payload

    def decode(self, stored: Bytes, itemsize: int, out: Bytes) -> None:
        """Widen the words to fp32."""
        if itemsize != 4 or out.size % 4:
            raise CodecError(f"sixteen payload: is fp32, cannot be {out.size} bytes of itemsize {itemsize}")
        expected = _HEADER_BYTES + out.size // 2
        if stored.size != expected:
            raise CodecError(f"sixteen payload: {stored.size} bytes stored, {expected} needed for {out.size}")
        flavour, exponent = int(stored[0]), int(stored[1:2].view(np.int8)[0])
        words = stored[_HEADER_BYTES:]
        if stored[2] or stored[3]:
            raise CodecError("sixteen payload: reserved header bytes are not zero")
        if flavour == BF16 and exponent == 0:
            np.left_shift(words.view("<u2"), 16, out=out.view("<u4"), dtype=np.uint32)
        elif flavour == FP16 and _MIN_EXPONENT <= exponent <= _MAX_EXPONENT:
            _decode_fp16(words, exponent, out)
        else:
            raise CodecError(f"sixteen payload: no flavour {flavour} with exponent {exponent}")


def flavour_of(bits: _Bits) -> int | None:
    """Return the flavour that fp32 values with these bits may have.

    Sure for bf16. For fp16 (11 significant bits, so the lower 13 are zero) their range has to fit as well.
    """
    union_of_bits = int(np.bitwise_or.reduce(bits))
    if union_of_bits & 0xFFFF == 0:
        return BF16
    if union_of_bits & 0x1FFF == 0:
        return FP16
    return None


def _encode_fp16(raw: Bytes, words: Bytes) -> int | None:
    """Fill `words` and return k, or return None when the values do not fit.

    The best k is the least whose range holds the largest value: what fits with a greater k fits with this one
    too, as its steps near zero are finer. It takes another pass over the values, so a guess goes first.
    """
    bits = raw.view("<u4")
    guess = _exponent_for(bits[:_BLOCK_VALUES], headroom=_GUESS_HEADROOM)
    if _narrow(raw, guess, words):
        return guess
    exponent = _exponent_for(bits, headroom=0)
    return exponent if exponent != guess and _narrow(raw, exponent, words) else None


def _exponent_for(bits: _Bits, headroom: int) -> int:
    """Return the least k with which fp16 holds the largest of the values, times 2^headroom."""
    exponent = (_largest_magnitude(bits) >> 23) - _FP32_BIAS - _EXPONENT_OF_FP16_MAX + headroom
    return min(max(exponent, _MIN_EXPONENT), _MAX_EXPONENT)


def _narrow(raw: Bytes, exponent: int, words: Bytes) -> bool:
    """Fill `words` with the values, and return whether they are all finite and come back as they were."""
    values, bits = raw.view("<f4"), raw.view("<u4")
    down, up = np.float32(2.0**-exponent), np.float32(2.0**exponent)
    scratch = np.empty(min(values.size, _BLOCK_VALUES), np.float32)
    wide_block = torch.from_numpy(scratch)
    halves = torch.split(torch.from_numpy(words.view(np.float16)), _BLOCK_VALUES)
    with np.errstate(all="ignore"):
        for start, narrow in zip(range(0, values.size, _BLOCK_VALUES), halves, strict=True):
            stop = start + narrow.shape[0]
            block, wide = scratch[: stop - start], wide_block[: stop - start]
            np.multiply(values[start:stop], down, out=block)
            narrow.copy_(wide)
            wide.copy_(narrow)
            np.multiply(block, up, out=block)
            difference = np.bitwise_xor(block.view(np.uint32), bits[start:stop], out=block.view(np.uint32))
            if np.bitwise_or.reduce(difference):
                return False
    return _largest_magnitude(words.view("<u2")) < _FP16_INFINITY_BITS


def _largest_magnitude(bits: npt.NDArray[np.unsignedinteger]) -> int:
    """Return the greatest of the bits without their signs, which order as the magnitudes do.

    Read as signed integers, the greatest is the largest positive value; unsigned, the largest negative one.
    """
    signed, sign_bit = f"<i{bits.itemsize}", 1 << (8 * bits.itemsize - 1)
    largest = 0
    for start in range(0, bits.size, 4 * _BLOCK_VALUES):  # by blocks: the second look is then at the cache
        block = bits[start : start + 4 * _BLOCK_VALUES]
        largest = max(largest, int(block.view(signed).max()), int(block.max()) - sign_bit)
    return largest


def _decode_fp16(words: Bytes, exponent: int, out: Bytes) -> None:
    halves, values = words.view(np.float16), out.view("<f4")
    up = np.float32(2.0**exponent)
    # Both ends pass through memory of our own: torch warns of read-only arrays and wants aligned ones.
    narrow = np.empty(min(values.size, _BLOCK_VALUES), np.float16)
    wide = np.empty(narrow.size, np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, values.size, _BLOCK_VALUES):
            stop = min(start + _BLOCK_VALUES, values.size)
            np.copyto(narrow[: stop - start], halves[start:stop])
            torch.from_numpy(wide[: stop - start]).copy_(torch.from_numpy(narrow[: stop - start]))
            np.multiply(wide[: stop - start], up, out=values[start:stop])
