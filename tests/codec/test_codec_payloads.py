"""What each codec takes and refuses, and that its payload is what its module's docstring says."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.codec import Bytes
from everstep.codec.blocks import Blocks
from everstep.codec.raw import Raw
from everstep.codec.sixteen import BF16, FP16, Sixteen
from everstep.codec.sparse import Sparse
from everstep.compress import Quantize
from everstep.errors import CodecError


def piece_of_bits(*bits: int) -> Bytes:
    return np.array(bits, "<u4").view(np.uint8)


def piece_of_floats(*values: float) -> Bytes:
    return np.array(values, "<f4").view(np.uint8)


def sixteen_by_the_book(payload: bytes) -> bytes:
    """A decoder written from the docstring alone."""
    flavour, exponent, zero = struct.unpack_from("<BbH", payload)
    assert zero == 0
    words = payload[4:]
    if flavour == 1:
        return b"".join(b"\0\0" + words[at : at + 2] for at in range(0, len(words), 2))
    halves = struct.unpack(f"<{len(words) // 2}e", words)
    return struct.pack(f"<{len(halves)}f", *(half * 2.0**exponent for half in halves))


def sparse_by_the_book(payload: bytes, itemsize: int, size_bytes: int) -> bytes:
    (num_kept,) = struct.unpack_from("<Q", payload)
    indices = struct.unpack_from(f"<{num_kept}I", payload, 8)
    piece = bytearray(size_bytes)
    for order, index in enumerate(indices):
        at = 8 + 4 * num_kept + order * itemsize
        piece[index * itemsize : (index + 1) * itemsize] = payload[at : at + itemsize]
    return bytes(piece)


def test_raw_returns_the_very_array() -> None:
    raw = np.arange(10, dtype=np.uint8)
    assert Raw().encode(raw, 1, False) is raw


def test_sixteen_payload_bytes_for_bf16() -> None:
    payload = Sixteen().encode(piece_of_floats(1.0, -2.0, 0.0), 4, True)
    assert payload is not None
    assert payload.tobytes().hex() == "01000000" + "803f" + "00c0" + "0000"


def test_sixteen_payload_bytes_for_fp16() -> None:
    payload = Sixteen().encode(piece_of_floats(1 + 2**-10, -0.0, 1.0), 4, True)
    assert payload is not None
    assert payload.tobytes().hex() == "02f40000" + "016c" + "0080" + "006c"  # k = -12, halves near 2**12


@given(halves=st.lists(st.integers(0, 2**16 - 1), min_size=3, max_size=60))
@settings(deadline=None)
def test_sixteen_takes_every_bf16_with_its_nan_payload(halves: list[int]) -> None:
    raw = piece_of_bits(*(half << 16 for half in halves))
    payload = Sixteen().encode(raw, 4, True)
    assert payload is not None and payload[0] == BF16
    assert sixteen_by_the_book(payload.tobytes()) == raw.tobytes()


@given(
    halves=st.lists(st.integers(0, 2**16 - 1).filter(lambda half: half & 0x7C00 != 0x7C00), min_size=3),
    scale_exponent=st.integers(-90, 100),
)
@settings(deadline=None)
def test_sixteen_takes_every_finite_fp16_times_a_power_of_two(halves: list[int], scale_exponent: int) -> None:
    values = np.array(halves, "<u2").view("<f2").astype("<f4") * np.float32(2.0**scale_exponent)
    raw = values.view(np.uint8)
    payload = Sixteen().encode(raw, 4, True)
    assert payload is not None
    assert sixteen_by_the_book(payload.tobytes()) == raw.tobytes()


def test_sixteen_finds_the_exponent_when_a_late_value_is_the_largest() -> None:
    values = np.full(100_000, 1 + 2**-10, "<f4")
    values[-1] = 60_000.0
    raw = values.view(np.uint8)
    payload = Sixteen().encode(raw, 4, True)
    assert payload is not None and payload[0] == FP16
    out = np.empty_like(raw)
    Sixteen().decode(payload, 4, out)
    assert out.tobytes() == raw.tobytes()


@pytest.mark.parametrize("place", [0, 1, 31_999, 32_000, 69_999])
@pytest.mark.parametrize("fill", [0x3F800000, 0x3F802000])
@pytest.mark.parametrize("misfit", [0x3F800001, 0x00000001, 0x7FC00001, 0x7F800001, 0x3F801000])
def test_sixteen_refuses_a_piece_for_one_value(place: int, fill: int, misfit: int) -> None:
    bits = np.full(70_000, fill, "<u4")
    bits[place] = misfit
    assert Sixteen().encode(bits.view(np.uint8), 4, True) is None


@pytest.mark.parametrize("not_finite", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FA00000, 0xFFFFE000])
def test_sixteen_writes_no_infinity_or_nan_as_fp16(not_finite: int) -> None:
    bits = np.full(70_000, 0x3F802000, "<u4")
    bits[40_000] = not_finite
    assert Sixteen().encode(bits.view(np.uint8), 4, True) is None


def test_sixteen_is_for_fp32_only() -> None:
    zeros = np.zeros(64, np.uint8)
    assert Sixteen().encode(zeros, 4, False) is None
    assert Sixteen().encode(zeros, 8, False) is None


def test_sixteen_is_exact_while_the_thread_flushes_denormals() -> None:
    halves = np.arange(0x7C00, dtype="<u2").view("<f2").astype("<f4")
    denormals = np.arange(1, 1000, dtype="<u4") << 13
    torch.set_flush_denormal(True)
    try:
        for exponent in (-100, -24, 0, 30):
            raw = (halves * np.float32(2.0**exponent)).view(np.uint8)
            payload = Sixteen().encode(raw, 4, True)
            assert payload is not None
            out = np.empty_like(raw)
            Sixteen().decode(payload, 4, out)
            assert out.tobytes() == raw.tobytes()
        assert Sixteen().encode(denormals.view(np.uint8), 4, True) is None
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    "header", [(0, 0, 0, 0), (3, 0, 0, 0), (1, 1, 0, 0), (2, 113, 0, 0), (2, 0x9B, 0, 0)]
)
def test_sixteen_refuses_headers_it_never_writes(header: tuple[int, ...]) -> None:
    payload = np.array((*header, 0, 0), np.uint8)
    with pytest.raises(CodecError, match="flavour"):
        Sixteen().decode(payload, 4, np.empty(4, np.uint8))


def test_sparse_payload_bytes() -> None:
    raw = piece_of_bits(0, 0, 0x3F800000, 0, 0, 0, 0x80000000, 0, 0, 0)
    payload = Sparse().encode(raw, 4, True)
    assert payload is not None
    assert payload.tobytes().hex() == "0200000000000000" + "02000000" + "06000000" + "0000803f" + "00000080"


def test_sparse_makes_eight_bytes_of_zeros() -> None:
    payload = Sparse().encode(np.zeros(1_000_000, np.uint8), 8, False)
    assert payload is not None and payload.tobytes() == bytes(8)


@given(
    itemsize=st.sampled_from([1, 2, 4, 8]),
    kept=st.dictionaries(st.integers(0, 199), st.integers(1, 255), max_size=20),
)
@settings(deadline=None)
def test_sparse_payloads_can_be_read_by_the_book(itemsize: int, kept: dict[int, int]) -> None:
    words = np.zeros(200, f"<u{itemsize}")
    for index, value in kept.items():
        words[index] = value << (8 * itemsize - 8)
    raw = words.view(np.uint8)
    payload = Sparse().encode(raw, itemsize, False)
    assert payload is not None
    assert payload.size == 8 + len(kept) * (4 + itemsize)
    assert sparse_by_the_book(payload.tobytes(), itemsize, raw.size) == raw.tobytes()


def test_sparse_refuses_what_it_would_shrink_by_less_than_a_tenth() -> None:
    bits = np.zeros(1000, "<u4")
    bits[:450] = 1
    assert Sparse().encode(bits.view(np.uint8), 4, True) is None
    bits[440:] = 0
    assert Sparse().encode(bits.view(np.uint8), 4, True) is not None


def test_sparse_takes_negative_zero_for_a_value() -> None:
    raw = np.full(1000, -0.0, "<f4").view(np.uint8)
    assert Sparse().encode(raw, 4, True) is None


def sparse_payload(num_kept: int, indices: list[int]) -> Bytes:
    content = (
        struct.pack("<Q", num_kept) + struct.pack(f"<{len(indices)}I", *indices) + bytes(4 * len(indices))
    )
    return np.frombuffer(content, np.uint8)


@pytest.mark.parametrize(
    ("num_kept", "indices"),
    [(2, [3, 3]), (2, [4, 3]), (1, [10]), (1, [2**32 - 1]), (2**61, []), (2**64 - 1, [1]), (1, []), (0, [1])],
)
def test_sparse_refuses_indices_and_counts_that_lie(num_kept: int, indices: list[int]) -> None:
    with pytest.raises(CodecError, match="sparse payload"):
        Sparse().decode(sparse_payload(num_kept, indices), 4, np.empty(40, np.uint8))


def blocks_by_the_book(payload: bytes, num_values: int) -> bytes:
    block, bits = struct.unpack_from("<IB", payload)
    num_blocks = -(-num_values // block)
    scales = [struct.unpack("<f", b"\0\0" + payload[8 + 2 * b : 10 + 2 * b])[0] for b in range(num_blocks)]
    stored = payload[8 + 2 * num_blocks :]
    if bits == 8:
        codes = list(struct.unpack(f"{num_values}b", stored))
    else:
        halves = [half for byte in stored for half in (byte & 15, byte >> 4)][:num_values]
        codes = [half - 16 if half > 7 else half for half in halves]
    return struct.pack(f"<{num_values}f", *(code * scales[i // block] for i, code in enumerate(codes)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_values", [0, 1, 255, 256, 257, 1000, 4096])
def test_blocks_payloads_of_the_quantiser_are_what_the_docstring_says(bits: int, num_values: int) -> None:
    flat = torch.randn(num_values, generator=torch.Generator().manual_seed(num_values))
    payload = np.concatenate(Quantize(bits).compress(flat, 0).piece(0, num_values)[2])
    out = np.empty(4 * num_values, np.uint8)
    Blocks().decode(payload, 4, out)
    assert out.tobytes() == blocks_by_the_book(payload.tobytes(), num_values)


@pytest.mark.parametrize(
    ("payload", "match"),
    [
        (struct.pack("<IBBHHb", 0, 8, 0, 0, 0x3F80, 1), "no codes of 8 bits in blocks of 0"),
        (struct.pack("<IBBHHb", 4, 5, 0, 0, 0x3F80, 1), "no codes of 5 bits"),
        (struct.pack("<IBBHHb", 4, 8, 1, 0, 0x3F80, 1), "no codes of 8 bits"),
        (struct.pack("<IBBHHb", 4, 8, 0, 0, 0x7F80, 1), "not finite"),
        (struct.pack("<IBBHHb", 4, 8, 0, 0, 0xBF80, 1), "negative"),
        (struct.pack("<IBBHHB", 4, 4, 0, 0, 0x3F80, 0x11), "left over"),
        (struct.pack("<IBBHH", 4, 8, 0, 0, 0x3F80), "needed for 1"),
    ],
)
def test_blocks_refuses_what_it_never_writes(payload: bytes, match: str) -> None:
    with pytest.raises(CodecError, match=match):
        Blocks().decode(np.frombuffer(payload, np.uint8), 4, np.empty(4, np.uint8))
