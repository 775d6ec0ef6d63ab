"""The pool: the last few full states at fixed places of one file, written in place. A committed slot is a base.

A slot is committed by its header, which is written when all of its data is durable, and made invalid before any of it is
touched again. The newest committed slot is never touched: whatever happens, it stays.
"""

from __future__ import annotations

import base64
import itertools
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from everstep.atoms import PIECE_ELEMENTS, Layout
from everstep.errors import CorruptionError, PoolError, PoolFullError, UsageError
from everstep.format import documents
from everstep.format.documents import Manifest, PoolDocument, SlotDocument, StoredTensor
from everstep.format.pool import (
    ALIGNMENT,
    BLOCK,
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    Geometry,
    Header,
    blocks,
    body_bytes,
    pack_header,
    pack_superblock,
    unpack_header,
    unpack_superblock,
)
from everstep.memory import Bytes, dtype_name, dtype_named, plain, typed, view_bytes
from everstep.store import files
from everstep.store.bases import SMALL_BYTES, Slot, piece_sum
from everstep.store.medium import MakeMedium, Medium

_SPARE_BYTES, _SPARE_BYTES_A_TENSOR = 256 << 10, 512
_LOOKS = 16
"""So often a reader looks at the headers of a pool that is being written before it takes what it has seen."""


def _num_pieces(tensor: StoredTensor, itemsize: int) -> int:
    return max(1, -(-tensor.num_bytes // (PIECE_ELEMENTS * itemsize)))


def _place(slots: Sequence[Slot]) -> tuple[tuple[StoredTensor, ...], int]:
    """Where each tensor is in a slot, in the order given, and how large that is."""
    placed, end = [], 0
    for slot in slots:
        placed.append(
            StoredTensor(
                slot.uid, slot.role, slot.key, dtype_name(slot.dtype), slot.shape, end, slot.num_bytes, (), slot.strides
            )
        )
        end += -(-slot.num_bytes // ALIGNMENT) * ALIGNMENT
    return tuple(placed), max(blocks(end), BLOCK)


def _with_sums(stored: Sequence[StoredTensor], slot_offset: int, header: Header) -> list[StoredTensor]:
    """The tensors of a slot whose data begins there, with the sums that its header has."""
    left = iter(header.sums)
    found = []
    for t in stored:
        sums = tuple(itertools.islice(left, _num_pieces(t, dtype_named(t.dtype).itemsize)))
        found.append(
            StoredTensor(t.uid, t.role, t.key, t.dtype, t.shape, slot_offset + t.offset, t.num_bytes, sums, t.strides)
        )
    return found


def _manifest(name: str, g: Geometry, layout: Layout, header: Header, tensors: Sequence[StoredTensor]) -> Manifest:
    """The base that a slot is."""
    document = header.document
    return Manifest(
        run=g.run, timeline=header.timeline, generation=header.generation, step=header.step,
        layout=document.layout or layout, tensors=tuple(tensors), optimizers=document.optimizers, cursor=document.cursor,
        files={name: g.num_bytes}, carried=document.carried, audit=document.audit, fingerprint=document.fingerprint,
    )  # fmt: skip


class Pool:
    """A pool that this process has made and writes. One slot at a time is being written."""

    def __init__(self, path: str, geometry: Geometry, document: PoolDocument, slots: Sequence[Slot], medium: Medium) -> None:
        self.path, self.name = path, os.path.basename(path)
        self._geometry = geometry
        self._document = document
        self._slots = tuple(slots)
        self._medium = medium
        self._lock = threading.Lock()
        self._steps: list[int | None] = [None] * geometry.num_slots
        """The step that each slot holds; None: none that counts."""
        self._newest: int | None = None
        self._writing: int | None = None
        self._places: dict[int, _Places] = {}
        """Of slots that have been written."""
        small_first = sorted(range(len(slots)), key=lambda i: slots[i].num_bytes > SMALL_BYTES)
        self._order = tuple(small_first)

    @classmethod
    def create(
        cls, folder: str, name: str, *, run: str, rank: int, layout: Layout, slots: Sequence[Slot], num_slots: int = 3,
        medium: MakeMedium, spare_bytes: int | None = None,
    ) -> Pool:  # fmt: skip
        """A new pool: every byte of it is allocated, and the file is durable on return. `spare_bytes`: for the documents."""
        if num_slots < 2:
            raise UsageError(f"a pool has at least two slots, not {num_slots}: one stays while another is written")
        path = os.path.join(folder, name)
        if os.path.lexists(path):
            raise PoolError(f"{path} is there already: a new pool has a name of its own, so that an old one is not lost")
        tensors, slot_bytes = _place(slots)
        document = PoolDocument(layout, tensors)
        encoded = documents.encode(document)
        if spare_bytes is None:
            spare_bytes = _SPARE_BYTES + _SPARE_BYTES_A_TENSOR * len(slots)
        num_sums = sum(_num_pieces(t, slot.dtype.itemsize) for t, slot in zip(tensors, slots, strict=True))
        header_bytes = blocks(HEADER_BYTES + 8 * num_sums + spare_bytes)
        geometry = Geometry(run, uuid.uuid4().hex, rank, num_slots, len(encoded), header_bytes, slot_bytes)
        made = medium(path, geometry)
        try:
            for offset, data in ((0, pack_superblock(geometry)), (geometry.document_offset, encoded)):
                np.copyto(made.memory(offset, len(data)), np.frombuffer(data, np.uint8))
                made.wrote(offset, len(data))
            made.persist(0, geometry.headers_offset)
            made.publish()
        except BaseException:
            made.close()
            raise
        return cls(path, geometry, document, slots, made)

    @property
    def is_durable(self) -> bool:
        """Whether a committed slot survives the host."""
        return self._medium.is_durable

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return self._geometry.num_bytes

    @property
    def newest(self) -> int | None:
        """The step that was committed last."""
        with self._lock:
            return None if self._newest is None else self._steps[self._newest]

    def fits(self, slots: Sequence[Slot]) -> bool:
        """Whether these are the tensors that it was made for."""
        return tuple(slots) == self._slots

    def begin(self, step: int) -> SlotWriter:
        """The oldest slot but for the newest committed one, to hold this step. It is invalid from now on."""
        with self._lock:
            if self._writing is not None:
                raise UsageError(f"a slot of {self.path} is being written already: finish or abandon it first")
            free = [i for i in range(len(self._steps)) if i != self._newest]
            slot = min(free, key=lambda i: -1 if (held := self._steps[i]) is None else held)
            self._steps[slot] = None
            self._writing = slot
        try:
            at = self._geometry.header_at(slot)
            self._medium.memory(at, HEADER_BYTES)[:] = 0
            self._medium.wrote(at, HEADER_BYTES)
            self._medium.persist(at, HEADER_BYTES)
        except BaseException:
            self._done(None)
            raise
        places = self._places.get(slot)
        if places is None:
            places = self._places[slot] = _Places(self._medium, self._geometry.data_at(slot), self._document, self._slots)
        return SlotWriter(self, slot, step, places)

    def check_still_there(self) -> None:
        """StorageError if its name no longer leads to its file: what is written then, nobody will find."""
        self._medium.check_still_there()

    def close(self) -> None:
        """Let go of the file, which stays."""
        self._places.clear()
        self._medium.close()

    def _done(self, step: int | None) -> None:
        """The slot that was being written holds this step now; None: nothing that counts."""
        with self._lock:
            if step is not None:
                assert self._writing is not None
                self._steps[self._writing], self._newest = step, self._writing
            self._writing = None


class _Places:
    """Where the tensors of one slot are: found once, since a pool never changes its layout."""

    def __init__(self, medium: Medium, data_at: int, document: PoolDocument, slots: Sequence[Slot]) -> None:
        self.at = [(data_at + t.offset, t.num_bytes) for t in document.tensors]
        """(offset in the file, bytes) of each."""
        self.memory = [medium.memory(*at) for at in self.at]
        self.tensors = [typed(m, s.dtype).view(s.shape) for m, s in zip(self.memory, slots, strict=True)]
        """The same, as dense tensors."""


class SlotWriter:
    """One slot being written, in place. Not there at all until finish() returns; whoever gives up calls abandon()."""

    def __init__(self, pool: Pool, slot: int, step: int, places: _Places) -> None:
        """By Pool.begin()."""
        self.step = step
        self.order = list(pool._order)
        """Indices into the pool's slots in the order in which they are wanted: small ones, which leave together, first."""
        self._pool = pool
        self._medium = pool._medium
        self._slot = slot
        self._places = places
        self._next = 0
        self._sums: list[tuple[int, ...] | None] = [None] * len(self.order)
        self._is_open = True

    def memory(self, index: int) -> Bytes:
        """The place of a tensor, to be filled by its owner, who then gives its sums. Any thread."""
        return self._places.memory[index]

    def set_sums(self, index: int, sums: Sequence[int]) -> None:
        """This tensor has been filled, and these are bases.piece_sums() of what was put there. Any thread."""
        self._medium.wrote(*self._places.at[index])
        self._sums[index] = tuple(sums)

    def add(self, tensor: torch.Tensor) -> None:
        """The next tensor of `order`. Its bytes have been copied when this returns."""
        data = view_bytes(plain(tensor))
        self.add_pieces(lambda region, start: np.copyto(region, data[start : start + len(region)]))

    def add_pieces(self, fill: Callable[[Bytes, int], None]) -> None:
        """The next tensor of `order`, piece by piece: fill(memory, first byte) is asked to copy, and touches no disk."""
        index = self.order[self._next]
        slot, memory = self._pool._slots[index], self.memory(index)
        step = PIECE_ELEMENTS * slot.dtype.itemsize
        sums = []
        for i in range(0, max(slot.num_bytes, 1), step):
            region = memory[i : i + step]
            fill(region, i)
            sums.append(piece_sum(region, slot.uid, i // slot.dtype.itemsize))
        self.set_sums(index, sums)
        self._next += 1

    def add_together(self, count: int, fill: Callable[[list[torch.Tensor]], None]) -> None:
        """The next so many tensors of `order`, each of one piece: fill(memory for them, as tensors) copies them all."""
        indices = self.order[self._next : self._next + count]
        fill([self._places.tensors[i] for i in indices])
        for i in indices:
            self.set_sums(i, (piece_sum(self._places.memory[i], self._pool._slots[i].uid, 0),))
        self._next += count

    def sums(self) -> list[tuple[int, ...]]:
        """Of the pieces of each tensor; none of one that has not been filled."""
        return [sums or () for sums in self._sums]

    def finish(self, **fields: Any) -> None:
        """Everything durable, then the header: after this the slot is committed. Fields as those of BaseWriter.finish().

        PoolFullError if what they say does not fit into the header's place.
        """
        pool, g = self._pool, self._pool._geometry
        sums = [s for s in self._sums if s is not None]
        if len(sums) != len(self.order) or not self._is_open:
            raise AssertionError("a slot is missing tensors, or was finished or abandoned before")
        if (fields["run"], fields["step"]) != (g.run, self.step):
            raise AssertionError("a slot was begun for another step, or the pool made for another run")
        layout, usual = fields["layout"], pool._document.layout
        header = Header(
            self.step, fields["timeline"], fields["generation"], tuple(itertools.chain.from_iterable(sums)),
            SlotDocument(
                tuple(fields["optimizers"]), base64.b64encode(fields["cursor"]).decode(), tuple(fields["carried"]),
                fields["audit"], fields["fingerprint"], None if layout is usual or layout == usual else layout,
            ),
        )  # fmt: skip
        data = pack_header(g, self._slot, header)
        if len(data) > g.header_bytes:
            full = PoolFullError(
                f"step {self.step}: optimizers, cursor and checksums take {len(data)} bytes, and {pool.path} has room for "
                f"{g.header_bytes} in each slot: a pool with more spare_bytes is needed"
            )
            full.num_bytes = len(data)
            raise full
        used_bytes = max((t.offset + t.num_bytes for t in pool._document.tensors), default=0)
        if used_bytes:
            self._medium.persist(g.data_at(self._slot), used_bytes)
        at = g.header_at(self._slot)
        np.copyto(self._medium.memory(at, len(data)), np.frombuffer(data, np.uint8))
        self._medium.wrote(at, len(data))
        self._medium.persist(at, len(data))
        self._close(self.step)

    def abandon(self) -> None:
        """Give up: the slot holds nothing, and is the next to be written."""
        if self._is_open:
            self._close(None)

    def _close(self, step: int | None) -> None:
        self._is_open = False
        self._pool._done(step)


def read_pool(path: str, run: str) -> list[Manifest]:
    """The committed slots of a pool, newest first, each as the base that it is: BaseReader(folder, manifest) reads it.

    Slots that were being written are left out. That their tensors are whole is only known when they are read. A pool that
    another process is writing may be read: what is overwritten meanwhile does not fit its checksums.
    """
    try:
        reader = files.Reader(path)
    except FileNotFoundError:
        raise PoolError(f"there is no pool at {path}: it was removed, or its memory did not survive the host") from None
    with reader:
        g = unpack_superblock(reader.read(0, SUPERBLOCK_BYTES), path)
        if g.run != run:
            raise PoolError(f"{path} is a pool of another run ({g.run}, not {run}): give each run a folder of its own")
        if reader.num_bytes < g.num_bytes:
            raise CorruptionError(
                f"{path} is cut short: it has {reader.num_bytes} of {g.num_bytes} bytes. Restore from the run's bases"
            )
        encoded = reader.read(g.document_offset, g.document_bytes)
        document = documents.decode(encoded, PoolDocument, f"the document of {path}")
        found = _committed(reader, g)
    found = sorted(found, key=lambda each: (each[1].generation, each[1].step), reverse=True)
    return [
        _manifest(os.path.basename(path), g, document.layout, header, _with_sums(document.tensors, g.data_at(slot), header))
        for slot, header in found
    ]


def _committed(reader: files.Reader, g: Geometry) -> list[tuple[int, Header]]:
    """The slots with a valid header. If any changes meanwhile, look again: the newest may have moved to one seen before."""
    found: list[tuple[int, Header]] = []
    for _ in range(_LOOKS):
        heads = _heads(reader, g)
        found = []
        for slot, head in enumerate(heads):
            size = body_bytes(g, slot, head)
            if size is not None:
                data = head + reader.read(g.header_at(slot) + HEADER_BYTES, size)
                header = unpack_header(g, slot, data, reader.path)
                if header is not None:
                    found.append((slot, header))
        if _heads(reader, g) == heads:
            break
    return found


def _heads(reader: files.Reader, g: Geometry) -> list[bytes]:
    return [reader.read(g.header_at(slot), HEADER_BYTES) for slot in range(g.num_slots)]
