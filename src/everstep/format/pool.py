"""A pool's file ↔ numbers: where everything is, what a superblock and a slot's header say. No I/O.

    superblock │ document │ header of slot 0, 1, … │ data of slot 0 │ data of slot 1 │ …
    0            4096       blocks each              blocks each

Nothing of one slot shares a block of 4,096 bytes with anything else. Superblock and document are written once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from everstep.errors import CorruptionError, FormatError
from everstep.format import documents
from everstep.format.documents import SlotDocument

BLOCK = 4096
ALIGNMENT = 256
"""Of tensors in a slot: what persistent memory writes at once."""
SUPERBLOCK_BYTES = HEADER_BYTES = 128
POOL_MAJOR, POOL_MINOR = 1, 0

_SUPERBLOCK = struct.Struct("<8sII16s16sIIQQQQQQ16x")
_HEADER = struct.Struct("<8sQQQIIQ64xQ")
_SUM = struct.Struct("<Q")
_MAGIC, _SLOT_MAGIC = b"EVSPOOL1", b"EVSSLOT1"


def blocks(num_bytes: int) -> int:
    """Rounded up to whole blocks."""
    return -(-num_bytes // BLOCK) * BLOCK


@dataclass(frozen=True)
class Geometry:
    """Whose pool this is, and where its parts are."""

    run: str
    """uuid, hex"""
    pool: str
    """Of this file alone, hex: what another one left on the disk is never taken for this one's."""
    rank: int
    num_slots: int
    document_bytes: int
    header_bytes: int
    """Room for each header, in whole blocks."""
    slot_bytes: int
    """Room for each slot's data, in whole blocks."""
    document_offset: int = BLOCK

    @property
    def headers_offset(self) -> int:
        return self.document_offset + blocks(self.document_bytes)

    @property
    def data_offset(self) -> int:
        return self.headers_offset + self.num_slots * self.header_bytes

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return self.data_offset + self.num_slots * self.slot_bytes

    def header_at(self, slot: int) -> int:
        return self.headers_offset + slot * self.header_bytes

    def data_at(self, slot: int) -> int:
        return self.data_offset + slot * self.slot_bytes

    def seed(self, slot: int, generation: int) -> int:
        """Of a slot's checksums: headers of other runs, files, slots or generations are not valid here."""
        key = bytes.fromhex(self.run) + bytes.fromhex(self.pool) + struct.pack("<QQQ", self.rank, slot, generation)
        return xxhash.xxh3_64_intdigest(b"everstep pool" + key)


def pack_superblock(g: Geometry) -> bytes:
    head = _SUPERBLOCK.pack(
        _MAGIC, POOL_MAJOR, POOL_MINOR, bytes.fromhex(g.run), bytes.fromhex(g.pool), g.rank, g.num_slots,
        g.document_offset, g.document_bytes, g.headers_offset, g.header_bytes, g.data_offset, g.slot_bytes,
    )  # fmt: skip
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def unpack_superblock(data: bytes, where: str) -> Geometry:
    """What the first bytes of a pool say. CorruptionError naming `where` if they are none; FormatError if they are newer."""
    advice = "remove it if it is not a pool of this run; the run's bases are not touched by this"
    if not data:
        raise CorruptionError(f"{where} is empty: a pool was here, or this is no pool. {advice[0].upper()}{advice[1:]}")
    if not data.startswith(_MAGIC):
        raise CorruptionError(f"{where} is not a pool, or its first bytes are damaged: {advice}")
    head, told = data[: _SUPERBLOCK.size], data[_SUPERBLOCK.size : SUPERBLOCK_BYTES]
    if told != _SUM.pack(xxhash.xxh3_64_intdigest(head)):
        raise CorruptionError(f"{where} is damaged: the checksum of its superblock does not fit: {advice}")
    _, major, minor, run, pool, rank, num_slots, *places = _SUPERBLOCK.unpack(head)
    if major > POOL_MAJOR:
        raise FormatError(
            f"{where} is a pool of format {major}.{minor}; this version of Everstep reads up to {POOL_MAJOR}.{POOL_MINOR}. "
            "Upgrade Everstep to use it"
        )
    document_offset, document_bytes, headers, header_bytes, data_at, slot_bytes = places
    found = Geometry(run.hex(), pool.hex(), rank, num_slots, document_bytes, header_bytes, slot_bytes, document_offset)
    if (found.headers_offset, found.data_offset) != (headers, data_at) or header_bytes < HEADER_BYTES:
        raise CorruptionError(f"{where} is not a valid pool: the places that it names do not fit together: {advice}")
    return found


@dataclass(frozen=True)
class Header:
    """What a slot's header says: with it the slot is committed."""

    step: int
    timeline: int
    generation: int
    sums: tuple[int, ...]
    """Of every piece of every tensor, in the order of the pool's document."""
    document: SlotDocument


def pack_header(g: Geometry, slot: int, header: Header) -> bytes:
    body = struct.pack(f"<{len(header.sums)}Q", *header.sums) + documents.encode(header.document)
    seed = g.seed(slot, header.generation)
    head = _HEADER.pack(
        _SLOT_MAGIC, header.step, header.timeline, header.generation, slot, len(header.sums),
        len(body) - 8 * len(header.sums), xxhash.xxh3_64_intdigest(body, seed),
    )  # fmt: skip
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head, seed)) + body


def body_bytes(g: Geometry, slot: int, data: bytes) -> int | None:
    """How much follows these first HEADER_BYTES of a slot's header; None if the slot is not committed."""
    head = data[: _HEADER.size]
    if len(data) < HEADER_BYTES or not data.startswith(_SLOT_MAGIC):
        return None
    _, _, _, generation, told_slot, num_sums, num_bytes, _ = _HEADER.unpack(head)
    if data[_HEADER.size : HEADER_BYTES] != _SUM.pack(xxhash.xxh3_64_intdigest(head, g.seed(slot, generation))):
        return None
    size = 8 * num_sums + num_bytes
    return size if told_slot == slot and HEADER_BYTES + size <= g.header_bytes else None


def unpack_header(g: Geometry, slot: int, data: bytes, where: str) -> Header | None:
    """What the header of this slot says; None if it is not committed. CorruptionError if a valid one makes no sense."""
    size = body_bytes(g, slot, data[:HEADER_BYTES])
    if size is None:
        return None
    _, step, timeline, generation, _, num_sums, _, body_sum = _HEADER.unpack_from(data)
    body = data[HEADER_BYTES : HEADER_BYTES + size]
    if xxhash.xxh3_64_intdigest(body, g.seed(slot, generation)) != body_sum:
        return None
    sums: Sequence[int] = struct.unpack_from(f"<{num_sums}Q", body)
    document = documents.decode(body[8 * num_sums :], SlotDocument, f"the document of step {step} in {where}")
    return Header(step, timeline, generation, tuple(sums), document)
