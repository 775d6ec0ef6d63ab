"""Records: the one unit of log, memory and wire. Header (128 bytes) + payload, 64-byte aligned. No I/O."""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from everstep.errors import CorruptionError, FormatError

MAGIC = b"EVR1"
HEADER_BYTES = 128
ALIGN = 64
BLOCK = 4096
"""Frames and segments begin at multiples of this, so that they can be written with O_DIRECT."""

SEGMENT, DATA, CURSOR, FOOTER, END = 1, 2, 3, 4, 5
KNOWN_TYPES = frozenset((SEGMENT, DATA, CURSOR, FOOTER, END))
REFUSE_IF_UNKNOWN = 1
"""Flag: a reader that does not know this record type must not use the frame."""

_LAYOUT = struct.Struct("<4sBBBBIIQQIHHQQQQQ40xQ")
assert _LAYOUT.size == HEADER_BYTES
_SUMMED = HEADER_BYTES - 8


class Header(NamedTuple):
    """What a record is. `start`/`count` are elements of the box; uid 0 means several small tensors in one record."""

    type: int
    flags: int
    codec: int
    codec_version: int
    generation: int
    ordinal: int
    step: int
    uid: int
    box: int
    dtype: int
    start: int
    count: int  # type: ignore[assignment]  # an element count, not tuple.count
    raw_bytes: int
    stored_bytes: int
    payload_sum: int

    @property
    def padded_bytes(self) -> int:
        """Header, payload and padding to the next record."""
        return aligned(HEADER_BYTES + self.stored_bytes, ALIGN)


def aligned(n: int, to: int) -> int:
    return -(-n // to) * to


def seed_of(run: bytes, generation: int, rank: int, first_step: int) -> int:
    """Base of all checksum seeds of one segment; bytes of another run, generation or segment never look valid."""
    return xxhash.xxh3_64_intdigest(b"everstep" + run + struct.pack("<QQQ", generation, rank, first_step))


def at(seed: int, offset: int) -> int:
    """The seed for the record at this offset."""
    return (seed + offset) & 0xFFFFFFFFFFFFFFFF


def pack(h: Header, seed: int) -> bytes:
    """The 128 bytes of a header whose record lies at the offset that `seed` was made for."""
    body = _LAYOUT.pack(
        MAGIC, h.type, h.flags, h.codec, h.codec_version, h.generation, h.ordinal, h.step, h.uid, h.box, h.dtype, 0,
        h.start, h.count, h.raw_bytes, h.stored_bytes, h.payload_sum, 0,
    )  # fmt: skip
    return body[:_SUMMED] + struct.pack("<Q", xxhash.xxh3_64_intdigest(body[:_SUMMED], seed))


def unpack(data: bytes | memoryview, seed: int) -> Header | None:
    """The header in these bytes, or None if they are not one written for this place."""
    if len(data) < HEADER_BYTES:
        return None
    raw = bytes(data[:HEADER_BYTES])
    if raw[:4] != MAGIC or xxhash.xxh3_64_intdigest(raw[:_SUMMED], seed) != struct.unpack_from("<Q", raw, _SUMMED)[0]:
        return None
    f = _LAYOUT.unpack(raw)
    header = Header(*f[1:11], *f[12:17])
    if header.type not in KNOWN_TYPES and header.flags & REFUSE_IF_UNKNOWN:
        raise FormatError(
            f"step {header.step} holds a record of type {header.type}, which this version does not know and must not "
            "skip: it was written by a newer Everstep. Upgrade to read this run."
        )
    return header


def payload_sum(payload: object, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed)  # type: ignore[arg-type]


def headers_in(directory: bytes) -> list[Header]:
    """The headers in a footer's directory, whose bytes were already proven by the footer's checksum."""
    if len(directory) % HEADER_BYTES:
        raise CorruptionError("a frame's directory has an impossible length")
    return [Header(*f[1:11], *f[12:17]) for f in _LAYOUT.iter_unpack(directory)]


def unpack_trusted(data: bytes) -> Header:
    """A header from a directory whose bytes were already proven by the footer's checksum."""
    f = _LAYOUT.unpack(data)
    return Header(*f[1:11], *f[12:17])
