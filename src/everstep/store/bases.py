"""Bases: S(t) in full. One safetensors file a rank, then a manifest; with the manifest the base exists.

Shadows that share a run's atoms write a base in parts, a file and a manifest each; it exists when all of these do.

Other tools can open the safetensors file; checksums, strides, dtypes that safetensors lacks and everything that is not a
tensor are in the manifest.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import itertools
import json
import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from everstep.atoms import PIECE_ELEMENTS, piece_elements
from everstep.errors import CorruptionError, StorageError
from everstep.format import documents, parts
from everstep.format.documents import TRAINER, Manifest, StoredTensor
from everstep.format.parts import Part
from everstep.memory import Bytes, Scratch, dtype_name, dtype_named, is_aligned, new_pages, plain, typed, view_bytes
from everstep.store import files

MANIFEST = "manifest.json"
_PART = re.compile(r"part-(\d{5})-of-(\d{5})\.json")
_READ_BYTES = 4 << 20
_CHUNK_BYTES = 2 << 20
"""What a piece waits for is little more than itself."""
_PASSING_BYTES = 256 << 10
"""Tensors up to this size do not interrupt what passes through: each run of that has buffers and reads of its own."""
SMALL_BYTES = 32 << 10
"""Tensors up to this size are copied together: what Python does for each would take longer than the copy. (It is less than
a piece of any dtype, and less than torch would use several threads for.)"""
ALONE_BYTES = 1 << 20
"""So much is read and verified sooner than threads for it are started."""
_NOTHING: Bytes = np.empty(0, np.uint8)
_numbers = itertools.count()
_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip


def piece_sum(data: Bytes, uid: int, start: int) -> int:
    """The hash of one piece of an atom: keyed by what it is and where in it the piece begins."""
    return xxhash.xxh3_64_intdigest(data, (uid + start) & 0xFFFFFFFFFFFFFFFF)


def piece_sums(
    data: Bytes, uid: int, itemsize: int, first_element: int = 0, piece: int = PIECE_ELEMENTS
) -> tuple[int, ...]:
    """piece_sum of every piece of `piece` elements; one for an empty tensor."""
    step = piece * itemsize
    return tuple(
        piece_sum(data[i : i + step], uid, first_element + i // itemsize) for i in range(0, max(len(data), 1), step)
    )


@dataclass(frozen=True)
class Slot:
    """One tensor that a base will hold."""

    uid: int
    role: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    @functools.cached_property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def base_folder(bases: str, step: int) -> str:
    return os.path.join(bases, f"{step:012d}")


def manifest_name(part: Part | None) -> str:
    return MANIFEST if part is None else f"part-{part[0]:05d}-of-{part[1]:05d}.json"


def part_file(part: Part) -> str:
    return f"part-{part[0]:05d}-of-{part[1]:05d}.safetensors"


class _Sums:
    """piece_sum of every piece of a tensor whose bytes come in parts of any size."""

    def __init__(self, slot: Slot, *, fine: bool) -> None:
        self._uid = slot.uid
        self._elements = piece_elements(slot.num_bytes // slot.dtype.itemsize, fine=fine)
        self._left = self._step = self._elements * slot.dtype.itemsize
        self._found: list[int] = []
        self._begin()

    def _begin(self) -> None:
        self._open = xxhash.xxh3_64(seed=(self._uid + len(self._found) * self._elements) & 0xFFFFFFFFFFFFFFFF)
        self._left = self._step

    def add(self, data: Bytes) -> None:
        while len(data):
            if not self._left:
                self._found.append(self._open.intdigest())
                self._begin()
            part, data = data[: self._left], data[self._left :]
            self._open.update(part)
            self._left -= len(part)

    def finish(self) -> tuple[int, ...]:
        return (*self._found, self._open.intdigest())


class BaseWriter:
    """Writes one base. Not there at all until finish() returns; a crash before leaves only litter."""

    def __init__(
        self, bases: str, step: int, slots: Sequence[Slot], *, direct: bool, rank: int = 0, part: Part | None = None,
        fine: bool = False,
    ) -> None:  # fmt: skip
        """With `part`, one part of a base: others write theirs, into the same folder or elsewhere. `fine`: its pieces."""
        self._fine = fine
        self._name = rank_file(rank) if part is None else part_file(part)
        self.folder = base_folder(bases, step)
        self._part = part
        self._temporary = f"{self.folder}.{os.getpid()}-{next(_numbers)}.tmp"
        order = self.order = file_order(slots)
        """Indices into slots in the order in which add() wants them."""
        self._slots = slots
        self._next = 0
        header, offsets = file_header([slots[i] for i in order])
        self._stored: list[StoredTensor | None] = [None] * len(slots)
        self._offsets = dict(zip(order, offsets, strict=True))
        try:
            files.make_dir(self._temporary)
            self._file = files.Appender(os.path.join(self._temporary, self._name), direct=direct)
        except StorageError:
            with contextlib.suppress(StorageError):  # the first error is the one to report
                files.remove_dir(self._temporary)
            raise
        self._file.put(np.frombuffer(header, np.uint8))

    def add(self, tensor: torch.Tensor) -> None:
        """The next tensor of `order`. Its bytes have been copied when this returns."""
        data = view_bytes(plain(tensor))
        self.add_pieces(lambda region, start: np.copyto(region, data[start : start + len(region)]))

    def add_pieces(self, fill: Callable[[Bytes, int], None]) -> None:
        """The next tensor of `order`, 2^19 elements at a time: fill(memory, first byte) is asked to copy, and touches no
        disk."""
        index = self.order[self._next]
        slot = self._slots[index]
        step = PIECE_ELEMENTS * slot.dtype.itemsize
        sums = _Sums(slot, fine=self._fine)
        for i in range(0, max(slot.num_bytes, 1), step):
            region = self._file.reserve(min(step, slot.num_bytes - i))
            fill(region, i)
            sums.add(region)
        self._stored[index] = StoredTensor(
            slot.uid, slot.role, slot.key, dtype_name(slot.dtype), slot.shape, self._offsets[index], slot.num_bytes,
            sums.finish(), slot.strides, fine=self._fine,
        )  # fmt: skip
        self._next += 1

    def add_together(self, count: int, fill: Callable[[list[torch.Tensor]], None]) -> None:
        """The next so many tensors of `order`: fill(memory for them, as tensors) is asked to copy them all."""
        slots = [self._slots[i] for i in self.order[self._next : self._next + count]]
        tensors = [torch.empty(slot.shape, dtype=slot.dtype) for slot in slots]
        fill(tensors)
        for tensor in tensors:
            self.add(tensor)

    def sums(self) -> list[tuple[int, ...]]:
        """Of the pieces of each tensor; none of one that has not been added."""
        return [() if t is None else t.sums for t in self._stored]

    def stored(self) -> list[StoredTensor]:
        """What has been added so far."""
        return [t for t in self._stored if t is not None]

    def finish(self, **fields: Any) -> Manifest:
        """Everything durable, then the manifest, then the folder's own name: after this the base exists.

        If the other process (trainer or follower) has finished one of the same step before, that one is returned: but the
        trainer's replaces a follower's that is not the same.
        """
        if self._next != len(self._slots):
            raise AssertionError("a base is missing tensors")
        size = self._file.offset
        self._file.close(sync=True)
        cursor: bytes = fields.pop("cursor")
        manifest = Manifest(
            tensors=tuple(self.stored()), files={self._name: size},
            cursor=base64.b64encode(cursor).decode(), part=self._part, **fields,
        )  # fmt: skip
        files.write_whole(os.path.join(self._temporary, manifest_name(self._part)), documents.encode(manifest))
        return self._publish(manifest) if self._part is None else self._publish_part(manifest)

    def _publish_part(self, manifest: Manifest) -> Manifest:
        """Into the folder that other parts may be in; the part's manifest goes first and comes last."""
        files.make_dirs(self.folder)
        name = manifest_name(self._part)
        if os.path.exists(os.path.join(self.folder, name)):  # of a dead generation, or of a shadow that died
            files.remove(os.path.join(self.folder, name))
            files.sync_dir(self.folder)
        for each in (self._name, name):
            files.rename(os.path.join(self._temporary, each), os.path.join(self.folder, each))
        files.remove_dir(self._temporary)
        return manifest

    def _publish(self, manifest: Manifest) -> Manifest:
        if os.path.isdir(self.folder):
            theirs = None
            with contextlib.suppress(CorruptionError):  # ours is as good
                theirs = read_manifest(self.folder)
            if theirs is not None and not _replaces(manifest, theirs):
                files.remove_dir(self._temporary)
                return theirs
            # A generation may have begun at theirs, and nothing else lead to this step: there is always one of the two.
            if files.exchange(self._temporary, self.folder):
                files.remove_dir(self._temporary)
                return manifest
            if theirs is not None and theirs.generation == manifest.generation:
                files.remove_dir(self._temporary)
                return theirs
            remove_base(self.folder)
        try:
            files.rename(self._temporary, self.folder)
        except StorageError as e:
            if getattr(e.__cause__, "errno", 0) not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return self._publish(manifest)  # the other process was a moment quicker
        return manifest

    def abandon(self) -> None:
        """Give up: what was written is removed if the disk lets us."""
        self._file.abandon()
        files.remove_dir(self._temporary)


def _replaces(ours: Manifest, theirs: Manifest) -> bool:
    """Whether a new base takes the place of one of the same step. A follower has residuals of earlier steps only."""
    if theirs.generation != ours.generation:
        return theirs.generation < ours.generation
    return ours.audit == TRAINER and theirs.audit != TRAINER and _contents(ours) != _contents(theirs)


def _contents(manifest: Manifest) -> dict[tuple[int, str], tuple[int, ...]]:
    return {(t.uid, t.role): t.sums for t in manifest.tensors}


def file_order(slots: Sequence[Slot]) -> list[int]:
    """Multiples of 64 bytes first, then large element sizes: then all are aligned though safetensors allows no holes."""
    return sorted(range(len(slots)), key=lambda i: (slots[i].num_bytes % 64 != 0, -slots[i].dtype.itemsize))


def file_header(slots: Sequence[Slot]) -> tuple[bytes, list[int]]:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "everstep": "1"}}
    ends = []
    position = 0
    for slot in slots:
        dtype = _SAFETENSORS.get(dtype_name(slot.dtype))
        shape = list(slot.shape)
        if dtype is None:
            dtype, shape = "U8", [slot.num_bytes]
        ends.append(position)
        entries[slot.key] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + slot.num_bytes]}
        position += slot.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % files.BLOCK)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + e for e in ends]


def remove_base(folder: str) -> None:
    """Its manifest goes first, so that it never looks whole."""
    for name in files.listing(folder):
        if name == MANIFEST or _PART.fullmatch(name):
            files.remove(os.path.join(folder, name))
    files.sync_dir(folder)
    files.remove_dir(folder)
    files.sync_dir(os.path.dirname(folder))


def is_there(folder: str, part: Part | None = None) -> bool:
    """Whether the base, or this part of one, exists, as far as names tell."""
    names = set(files.listing(folder))
    if manifest_name(part) in names or part is not None:
        return manifest_name(part) in names
    counts = {int(m[2]) for name in names if (m := _PART.fullmatch(name))}
    return any(all(manifest_name((index, count)) in names for index in range(count)) for count in counts)


def parts_there(folder: str) -> str:
    """Which parts of a base in parts a folder has, for people; empty if none."""
    names = [name for name in files.listing(folder) if _PART.fullmatch(name)]
    return ", ".join(name.removesuffix(".json") for name in names)


def only_part(bases: Sequence[str]) -> Part | None:
    """Which part of bases these folders have; None if they are whole, or parts of several."""
    found = {(int(m[1]), int(m[2])) for folder in bases for name in files.listing(folder) if (m := _PART.fullmatch(name))}
    return found.pop() if len(found) == 1 else None


def read_manifest(folder: str, part: Part | None = None) -> Manifest | None:
    """The manifest of the base in this folder, or of a part; None if there is none (not finished, or removed)."""
    path = os.path.join(folder, manifest_name(part))
    try:
        data = files.read_whole(path)
    except FileNotFoundError:
        return None if part is not None else _read_parts(folder)
    return documents.decode(data, Manifest, path)


def _read_parts(folder: str) -> Manifest | None:
    """The manifest of a base in parts; None if they are not all there."""
    found = [(int(m[1]), int(m[2])) for name in files.listing(folder) if (m := _PART.fullmatch(name))]
    for count in sorted({part[1] for part in found}):
        manifests = [read_manifest(folder, (index, count)) for index in range(count)]
        there = [m for m in manifests if m is not None]
        if len(there) == count and len({m.generation for m in there}) == 1:
            return parts.join(there, folder)
    return None


def cursor_of(manifest: Manifest) -> bytes:
    return base64.b64decode(manifest.cursor)


class _Chunk:
    """Blocks of the file and their place in memory. Each is read once: memory may be changed as soon as it is filled."""

    def __init__(self, reader: files.Reader, offset: int, memory: Bytes) -> None:
        self._reader = reader
        self._offset = offset
        self._memory = memory
        self._lock = threading.Lock()
        self._under_way: Callable[[], Bytes] | None = None
        self._is_read = False

    def begin(self) -> None:
        with self._lock:
            self._begin()

    def finish(self) -> None:
        with self._lock:
            self._begin()
            under_way, self._under_way = self._under_way, None
            if under_way is not None:
                under_way()  # if it fails, whoever comes next begins anew
                self._is_read = True
                self._arrived()

    def _begin(self) -> None:
        if not self._is_read and self._under_way is None:
            there = max(0, min(len(self._memory), self._reader.num_bytes - self._offset))
            self._under_way = self._reader.begin_direct(self._memory, self._offset, there)

    def _arrived(self) -> None:
        """What was read is in its place."""


class _PassingChunk(_Chunk):
    """Blocks that are read into memory that is used again, and then copied to where they belong."""

    def __init__(self, reader: files.Reader, offset: int, num_bytes: int, spare: list[Bytes]) -> None:
        """`spare`: memory for whoever begins to read next, of _CHUNK_BYTES each."""
        super().__init__(reader, offset, _NOTHING)
        self._num_bytes = num_bytes
        self._spare = spare
        self._buffer: Bytes | None = None
        self.places: list[tuple[slice, Bytes]] = []
        """Which of these bytes go where."""

    def _begin(self) -> None:
        if not self._is_read and self._buffer is None:
            try:
                self._buffer = self._spare.pop()
            except IndexError:
                self._buffer = new_pages(_CHUNK_BYTES)
            self._memory = self._buffer[: self._num_bytes]
        super()._begin()

    def _arrived(self) -> None:
        for here, place in self.places:
            np.copyto(place, self._memory[here])
        assert self._buffer is not None
        self._spare.append(self._buffer)
        self._buffer, self._memory = None, _NOTHING


class Loading:
    """A base on its way into memory: every tensor has its memory, which is filled when it is needed. Any thread.

    Parts are elements [start, stop), all of a tensor if not told. The pieces they are in are each verified once, when they
    are first needed: after that their memory may be changed.
    """

    def __init__(
        self, readers: Mapping[int, files.Reader], manifest: Manifest, damaged: Callable[[StoredTensor], Exception],
        windows: Mapping[int, tuple[int, int]] | None = None, places: Mapping[int, torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """`readers` of the base's files by rank. `windows`: the elements of tensors, by their number, that may be needed;
        None: all. `places`: flat memory for all pieces that have any of these, where the caller has it."""
        self._readers = readers
        self._damaged = damaged
        self._stored = manifest.tensors
        self._itemsize = [dtype_named(t.dtype).itemsize for t in self._stored]
        self._piece: list[int] = []
        """By tensor: how many elements a piece has."""
        self._window: list[range] = []
        """By tensor: the pieces that have memory."""
        for index, stored in enumerate(self._stored):
            numel = stored.num_bytes // self._itemsize[index]
            piece = piece_elements(numel, fine=stored.fine)
            if len(stored.sums) != max(1, -(-numel // piece)):
                raise damaged(stored)
            start, stop = (0, max(numel, 1)) if windows is None else windows.get(index, (0, 0))
            self._piece.append(piece)
            self._window.append(range(start // piece, -(-stop // piece)))
        self._chunks: list[tuple[int, Sequence[_Chunk]]] = [(0, [])] * len(self._stored)
        """By tensor: where it begins in memory that these chunks fill."""
        self._bytes: list[Bytes] = [_NOTHING] * len(self._stored)
        """By tensor: its memory."""
        self._places = self._all_places(places) if places else {}
        self._spare: list[Bytes] = []
        self._locks = [threading.Lock() for _ in self._stored]
        self._is_ready = [[False] * len(window) for window in self._window]
        """By tensor: each of the pieces that have memory."""
        read = (index for index, window in enumerate(self._window) if len(window))
        order = sorted(read, key=lambda i: (self._kind(i), self._stored[i].offset))
        # Parameters and optimizer state in memory of their own: whoever keeps only the ones does not hold the others.
        for _, group in itertools.groupby(order, self._kind):
            self._place(list(group))
        self.tensors = [
            self._places[index] if index in self._places else typed(raw, dtype_named(self._stored[index].dtype))
            for index, raw in enumerate(self._bytes)
        ]
        """Flat logical elements. Those that lie askew in the file have memory of their own, and are copied there."""

    def origin(self, index: int) -> int:
        """The element of a tensor that its memory begins with."""
        return self._window[index].start * self._piece[index]

    def _all_places(self, given: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Smaller ones between those that have a place get one, too: they are read with what they lie among."""
        found = {}
        for index, (stored, window) in enumerate(zip(self._stored, self._window, strict=True)):
            if len(window) and index in given:
                found[index] = given[index]
            elif len(window) and stored.num_bytes <= _PASSING_BYTES:
                first, end = self._in_file(index)
                found[index] = torch.empty((end - first) // self._itemsize[index], dtype=dtype_named(stored.dtype))
        return found

    def _kind(self, index: int) -> tuple[int, bool, bool]:
        is_placed = index in self._places
        return self._stored[index].rank, is_placed, not is_placed and self._stored[index].of_model

    def _place(self, indices: list[int]) -> None:
        """Memory for what may be needed of these, in the order of the file: blocks that follow each other there do here.

        What has a place passes through memory that is used again.
        """
        runs: list[tuple[int, int, list[int]]] = []
        for i in indices:
            first, end = self._in_file(i)
            first, end = first // files.BLOCK * files.BLOCK, -(-end // files.BLOCK) * files.BLOCK
            if runs and first <= runs[-1][1]:
                first, end, together = runs[-1][0], max(end, runs[-1][1]), runs.pop()[2]
            else:
                together = []
            runs.append((first, end, [*together, i]))
        reader = self._readers[self._stored[indices[0]].rank]
        if indices[0] in self._places:
            for origin, end, together in runs:
                self._pass_through(reader, origin, end, together)
            return
        memory = new_pages(sum(end - first for first, end, _ in runs))
        used = 0
        for origin, end, together in runs:
            here = memory[used : used + end - origin]
            used += len(here)
            chunks = [_Chunk(reader, origin + at, here[at : at + _CHUNK_BYTES]) for at in range(0, len(here), _CHUNK_BYTES)]
            for i in together:
                start, stop = (at - origin for at in self._in_file(i))
                self._bytes[i] = here[start:stop]
                self._chunks[i] = start, chunks

    def _pass_through(self, reader: files.Reader, origin: int, end: int, indices: list[int]) -> None:
        chunks = [
            _PassingChunk(reader, at, min(_CHUNK_BYTES, end - at), self._spare) for at in range(origin, end, _CHUNK_BYTES)
        ]
        for index in indices:
            start, stop = (at - origin for at in self._in_file(index))
            self._chunks[index] = start, chunks
            self._bytes[index] = view_bytes(self._places[index])
            if len(self._bytes[index]) != stop - start:
                raise AssertionError("a place for a tensor has another size than the tensor")
            at = start
            while at < stop:
                number, here = divmod(at, _CHUNK_BYTES)
                count = min(stop - at, _CHUNK_BYTES - here)
                place = self._bytes[index][at - start : at - start + count]
                chunks[number].places.append((slice(here, here + count), place))
                at += count

    def _in_file(self, index: int) -> tuple[int, int]:
        """The bytes of a tensor's window."""
        stored, window = self._stored[index], self._window[index]
        step = self._piece[index] * self._itemsize[index]
        return stored.offset + window.start * step, stored.offset + min(window.stop * step, stored.num_bytes)

    def begin(self, index: int, start: int = 0, stop: int | None = None) -> None:
        """Ask for a part that will be needed soon."""
        pieces = self._pieces(index, start, stop)
        for chunk in self._under(index, pieces):
            chunk.begin()

    def need(self, index: int, start: int = 0, stop: int | None = None) -> None:
        """Return when this part has been read and verified."""
        ready = self._is_ready[index]
        pieces = self._pieces(index, start, stop)
        if all(ready[piece] for piece in pieces):
            return
        for chunk in self._under(index, pieces):
            chunk.finish()
        with self._locks[index]:
            for piece in pieces:
                if not ready[piece]:
                    self._settle(index, piece)
                    ready[piece] = True

    def _pieces(self, index: int, start: int, stop: int | None) -> range:
        """Those that have elements [start, stop), counted from the first that has memory."""
        window, piece = self._window[index], self._piece[index]
        if stop is None:
            return range(len(window))
        found = range(start // piece - window.start, -(-stop // piece) - window.start)
        if found and (found.start < 0 or found.stop > len(window)):
            raise AssertionError("a part of a base is needed that was not asked for")
        return found

    def _under(self, index: int, pieces: range) -> Sequence[_Chunk]:
        """Under these pieces."""
        size = self._itemsize[index] * self._piece[index]
        first, chunks = self._chunks[index]
        end = first + min(pieces.stop * size, len(self._bytes[index]))
        return chunks[(first + pieces.start * size) // _CHUNK_BYTES : -(-end // _CHUNK_BYTES)]

    def _settle(self, index: int, piece: int) -> None:
        stored, raw, step = self._stored[index], self._bytes[index], self._piece[index] * self._itemsize[index]
        part = slice(piece * step, (piece + 1) * step)
        number = self._window[index].start + piece
        if piece_sum(raw[part], stored.uid, number * self._piece[index]) != stored.sums[number]:
            raise self._damaged(stored)
        if index not in self._places and not is_aligned(raw):
            view_bytes(self.tensors[index])[part] = raw[part]

    def need_all(self, num_workers: int, wanted: Mapping[int, Sequence[tuple[int, int | None]]]) -> None:
        """Return when these parts of these tensors have been."""
        left = [index for index in wanted if not all(self._is_ready[index])]
        parts = [(index, *part) for index in left for part in wanted[index]]
        if sum(len(self._bytes[index]) for index in left) <= ALONE_BYTES:
            for part in parts:
                self.need(*part)
        else:
            with ThreadPoolExecutor(max(2, num_workers), "everstep-base") as pool:
                list(pool.map(lambda part: self.need(*part), parts))


class BaseReader:
    """An open base. Removal by retention does not pull it away."""

    def __init__(self, folder: str, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._paths = [os.path.join(folder, name) for name in sorted(manifest.files)]
        self._readers: dict[int, files.Reader] = {}
        for number in sorted({t.rank for t in manifest.tensors}):
            try:
                self._readers[number] = files.Reader(self._paths[number], direct=True)
            except FileNotFoundError:
                self.close()
                raise CorruptionError(f"{self._paths[number]} is missing, though the base's manifest is there") from None

    def load(
        self, windows: Mapping[int, tuple[int, int]] | None = None, places: Mapping[int, torch.Tensor] | None = None
    ) -> Loading:
        """Its tensors, to be read into their memory when they are needed. `windows` and `places` as for Loading."""
        return Loading(self._readers, self.manifest, self._damaged, windows, places)

    def check(self) -> None:
        """Read everything and verify it."""
        scratch = Scratch()
        for stored in self.manifest.tensors:
            itemsize = dtype_named(stored.dtype).itemsize
            piece = piece_elements(stored.num_bytes // itemsize, fine=stored.fine)
            step = _READ_BYTES // (piece * itemsize) * piece * itemsize or piece * itemsize
            found: list[int] = []
            for start in range(0, max(stored.num_bytes, 1), step):
                scratch.reset()
                wanted = min(step, stored.num_bytes - start)
                data = self._readers[stored.rank].read_direct(scratch.take(wanted), stored.offset + start, wanted)
                found += piece_sums(data, stored.uid, itemsize, start // itemsize, piece)
            if tuple(found) != stored.sums:
                raise self._damaged(stored)

    def _damaged(self, stored: StoredTensor) -> CorruptionError:
        path = self._paths[stored.rank]
        error = CorruptionError(f"step {self.manifest.step} is damaged: {stored.key} in {path} does not fit its checksum.")
        error.step, error.in_base = self.manifest.step, True
        return error

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


def check_base(folder: str, manifest: Manifest) -> None:
    """Read a base back and verify every piece."""
    reader = BaseReader(folder, manifest)
    try:
        reader.check()
    finally:
        reader.close()
