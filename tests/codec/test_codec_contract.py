"""The suite that every codec passes, whatever it does to the bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.codec import CODECS, RAW, Bytes, Codec, decode
from everstep.errors import CodecError

EVERY_CODEC = pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)

SPECIAL_BITS = [
    0x00000000,  # 0.0
    0x80000000,  # -0.0
    0x00000001,  # least denormal
    0x807FFFFF,  # greatest negative denormal
    0x00800000,  # least normal
    0x7F7FFFFF,  # greatest finite
    0x7F800000,  # inf
    0xFF800000,  # -inf
    0x7FC00000,  # NaN
    0xFFC00001,  # quiet NaN with a payload in the lower bits
    0x7F800001,  # signalling NaN
    0x7FA00000,  # signalling NaN that fits in bf16
    0x7FFFE000,  # quiet NaN that fits in fp16
    0x3F800000,  # 1.0
    0x3F802000,  # 1 + 2**-10: fp16, not bf16
    0x477FE000,  # 65504, the greatest fp16
    0x47800000,  # 65536, just beyond it
    0x33800000,  # 2**-24, the least fp16
    0x33000000,  # 2**-25
]


def float32_bits() -> st.SearchStrategy[int]:
    any_bits = st.integers(0, 2**32 - 1)
    bf16_bits = st.integers(0, 2**16 - 1).map(lambda upper: upper << 16)
    fp16_bits = st.integers(0, 2**16 - 1).map(lambda half: int(widened(half)))
    return st.one_of(st.sampled_from(SPECIAL_BITS), any_bits, bf16_bits, fp16_bits)


def widened(half: int) -> np.uint32:
    with np.errstate(all="ignore"):
        return np.array(half, np.uint16).view(np.float16).astype(np.float32).view(np.uint32)[()]


def float32_pieces() -> st.SearchStrategy[bytes]:
    """Pieces with few distinct values, so that all of them may fit a codec at once."""
    palettes = st.lists(float32_bits(), min_size=1, max_size=4)
    return palettes.flatmap(lambda palette: st.lists(st.sampled_from(palette), max_size=80)).map(
        lambda words: np.array(words, "<u4").tobytes()
    )


def mostly_zero_pieces() -> st.SearchStrategy[bytes]:
    length = st.integers(0, 400)
    spots = st.lists(st.tuples(st.integers(0, 399), st.integers(1, 255)), max_size=8)
    return st.tuples(length, spots).map(lambda drawn: spotted(*drawn))


def spotted(length: int, spots: list[tuple[int, int]]) -> bytes:
    piece = bytearray(length)
    for place, value in spots:
        if place < length:
            piece[place] = value
    return bytes(piece)


PIECES = st.one_of(st.binary(max_size=200), float32_pieces(), mostly_zero_pieces())
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16, 3])


def as_piece(content: bytes, misaligned_by: int = 0) -> Bytes:
    """Return the bytes as a read-only array, as a memory-mapped file would give them."""
    return np.frombuffer(bytes(misaligned_by) + content, np.uint8)[misaligned_by:]


def decoded(codec: Codec, stored: Bytes, itemsize: int, size_bytes: int) -> bytes:
    out = np.full(size_bytes, 0xA5, np.uint8)
    codec.decode(stored, itemsize, out)
    return out.tobytes()


@EVERY_CODEC
@given(content=PIECES, itemsize=ITEMSIZES, is_float32=st.booleans(), misaligned_by=st.integers(0, 7))
@settings(deadline=None)
def test_what_was_encoded_comes_back_bit_for_bit(
    codec: Codec, content: bytes, itemsize: int, is_float32: bool, misaligned_by: int
) -> None:
    raw = as_piece(content, misaligned_by)
    payload = codec.encode(raw, itemsize, is_float32 and itemsize == 4)
    assert raw.tobytes() == content
    if payload is None:
        assert codec.id != RAW
        return
    assert payload.dtype == np.uint8 and payload.ndim == 1
    assert payload.size < raw.size or codec.id == RAW
    stored = as_piece(payload.tobytes(), misaligned_by)
    assert decoded(codec, stored, itemsize, raw.size) == content


@EVERY_CODEC
@pytest.mark.parametrize("num_values", [0, 1, 2, 3, 31_999, 32_000, 32_001, 100_003])
@pytest.mark.parametrize("fill", [0x00000000, 0x3F800000, 0x3F802000, 0x3F800001, 0x80000000])
def test_every_length_comes_back(codec: Codec, num_values: int, fill: int) -> None:
    raw = np.full(num_values, fill, "<u4").view(np.uint8)
    payload = codec.encode(raw, 4, True)
    if payload is not None:
        assert decoded(codec, payload, 4, raw.size) == raw.tobytes()


@EVERY_CODEC
def test_an_empty_piece_is_decoded_or_refused_and_nothing_else(codec: Codec) -> None:
    raw = np.empty(0, np.uint8)
    payload = codec.encode(raw, 4, True)
    assert payload is None or decoded(codec, payload, 4, 0) == b""


@EVERY_CODEC
@given(stored=st.binary(max_size=120), itemsize=ITEMSIZES, size_bytes=st.integers(0, 200))
@settings(deadline=None)
def test_any_bytes_decode_or_are_refused_by_name(
    codec: Codec, stored: bytes, itemsize: int, size_bytes: int
) -> None:
    decodes_or_refuses(codec, stored, itemsize, size_bytes)


@EVERY_CODEC
@given(data=st.data(), content=st.one_of(float32_pieces(), mostly_zero_pieces()))
@settings(deadline=None)
def test_damaged_payloads_decode_or_are_refused_by_name(
    codec: Codec, data: st.DataObject, content: bytes
) -> None:
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8]))
    payload = codec.encode(as_piece(content), itemsize, itemsize == 4)
    if payload is None or payload.size == 0:
        return
    damaged = bytearray(payload.tobytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, max(len(damaged) - 1, 0)))
        how = data.draw(st.sampled_from(["flip", "set", "cut", "grow"]))
        if how == "flip" and damaged:
            damaged[place] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "set" and damaged:
            damaged[place] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
        elif how == "cut":
            del damaged[place:]
        else:
            damaged += data.draw(st.binary(max_size=12))
    decodes_or_refuses(codec, bytes(damaged), itemsize, len(content))


def decodes_or_refuses(codec: Codec, stored: bytes, itemsize: int, size_bytes: int) -> None:
    guard = 64
    around = np.full(size_bytes + 2 * guard, 0xA5, np.uint8)
    try:
        codec.decode(as_piece(stored), itemsize, around[guard : guard + size_bytes])
    except CodecError as error:
        assert codec.name in str(error)
    assert (around[:guard] == 0xA5).all() and (around[guard + size_bytes :] == 0xA5).all()


@pytest.mark.parametrize(("codec", "version"), [(0, 2), (1, 0), (4, 1), (250, 1)])
def test_an_unknown_codec_or_version_says_to_upgrade(codec: int, version: int) -> None:
    with pytest.raises(CodecError, match=rf"codec {codec} version {version}.*upgrade"):
        decode(codec, version, np.empty(4, np.uint8), 4, np.empty(4, np.uint8))


def test_decode_finds_the_codec_by_id_and_version() -> None:
    out = np.empty(3, np.uint8)
    decode(RAW, 1, as_piece(b"abc"), 1, out)
    assert out.tobytes() == b"abc"
