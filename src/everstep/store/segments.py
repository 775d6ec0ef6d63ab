"""Segments of the log as they are found: scanning a file for frames, reading what a frame holds.

A frame is valid when its footer is; a footer is written only after everything before it. What follows the last valid
footer is a torn tail. A hole *before* a valid footer is damage, and is reported as such.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from everstep import codec
from everstep.atoms import PIECE_ELEMENTS
from everstep.codec.sparse import kept
from everstep.errors import CorruptionError, UnreadableError
from everstep.format import records
from everstep.format.records import BLOCK, CURSOR, DATA, END, FOOTER, HEADER_BYTES, SEGMENT, Header, aligned
from everstep.format.segment import SegmentEnd, SegmentHeader
from everstep.frame import Footer, Op, TensorRef, Wanted, audit_entries
from everstep.memory import Bytes, Scratch, dtype_of, typed
from everstep.store import files

_MAX_META_BYTES = 1 << 30
# Made while one thread imports this: msgspec prepares a type at its first use, and crashes if two threads are at it at once.
_DECODERS: dict[type[Any], Any] = {kind: msgspec.msgpack.Decoder(kind) for kind in (SegmentHeader, SegmentEnd, Footer)}
_READ_BYTES = 4 << 20
"""Records that follow each other are read together up to about this size."""


class Reader(Protocol):
    """An open segment: files.Reader on a disk, shared.MappedReader in memory."""

    @property
    def num_bytes(self) -> int: ...

    def read(self, offset: int, num_bytes: int) -> bytes: ...

    def read_direct(self, buffer: Bytes, offset: int, num_bytes: int) -> Bytes: ...

    def begin_direct(self, buffer: Bytes, offset: int, num_bytes: int) -> Callable[[], Bytes]: ...

    def close(self) -> None: ...


class FrameEntry(NamedTuple):
    """Where a valid frame is."""

    step: int
    offset: int
    footer_offset: int
    path: str
    generation: int
    end_offset: int


class Segment:
    """One log file, scanned: its frames, and what is wrong with it, if anything is."""

    def __init__(
        self, path: str, run: str, rank: int, generation: int, first_step: int, *, in_memory: bool = False
    ) -> None:
        self.path = path
        self.in_memory = in_memory
        """Written in order, in a file that may have held something else: nothing valid follows what is not valid."""
        self.generation = generation
        self.first_step = first_step
        self.run = run
        self.rank = rank
        self.seed = records.seed_of(bytes.fromhex(run), generation, rank, first_step)
        self.header: SegmentHeader | None = None
        self.frames: list[FrameEntry] = []
        self.end: SegmentEnd | None = None
        self.durable_step = -1
        self.torn_bytes = 0
        self.problems: list[str] = []
        """Damage: a bad header, a name that does not fit."""
        self.holes: list[tuple[int, int, str]] = []
        """(first step, last step, text) of what is not valid before something that is: damage, if any of it was durable."""
        self._next = 0
        self._unread = -1
        self.is_gone = False
        """The name was there, and the file is not any more."""

    @property
    def is_cut_off(self) -> bool:
        """Whether something after its last frame cannot be read: there may be more frames."""
        return self.end is None and self._unread >= (self.frames[-1].end_offset if self.frames else 0)

    @property
    def num_bytes(self) -> int:
        return files.size(self.path)

    def scan(self) -> Segment:
        """Find all valid frames; may be called again on a file that has grown."""
        try:
            reader = files.Reader(self.path)
        except FileNotFoundError:
            self.is_gone = True
            return self
        except UnreadableError as e:
            self._cannot_read(0, e)
            return self
        with reader:
            if self.header is None and not self._scan_header(reader):
                return self
            if self.end is None and not self._scan_end(reader):
                self._walk(reader, self._next)
        return self

    def give_up(self) -> None:
        """Take nothing of it for valid, since it makes no sense; whatever was in there may be lost."""
        self.header, self.frames, self.end, self._unread = None, [], None, self.num_bytes

    def _cannot_read(self, offset: int, error: UnreadableError) -> None:
        if self._unread < 0:
            self.problems.append(f"{error}, at byte {offset}")
        self._unread = max(self._unread, offset)

    def _read(self, reader: files.Reader, offset: int, num_bytes: int) -> bytes:
        """Nothing where the disk does not give the bytes back: that is not valid, whatever it is."""
        try:
            return reader.read(offset, num_bytes)
        except UnreadableError as e:
            self._cannot_read(offset, e)
            return b""

    def _payload(self, reader: files.Reader, offset: int, header: Header) -> bytes | None:
        if header.stored_bytes > min(_MAX_META_BYTES, reader.num_bytes):
            return None
        data = self._read(reader, offset + HEADER_BYTES, header.stored_bytes)
        if len(data) != header.stored_bytes:
            return None
        if records.payload_sum(data, records.at(self.seed, offset)) != header.payload_sum:
            return None
        return data

    def _scan_header(self, reader: files.Reader) -> bool:
        header = records.unpack(self._read(reader, 0, HEADER_BYTES), records.at(self.seed, 0))
        payload = None
        if header is not None and header.type == SEGMENT:
            payload = self._payload(reader, 0, header)
        if header is None or payload is None:
            self._walk(reader, self._resync(reader, BLOCK))
            if self.in_memory:
                return False  # it has been given back and not begun
            if self.end is not None or self.durable_step >= self.first_step:
                self.problems.append(f"{self.path}: the segment header is damaged")
            else:  # nothing in here was ever durable: a torn first write
                self.frames, self.torn_bytes = [], reader.num_bytes
            return False
        found: SegmentHeader = _decode(payload, SegmentHeader, self.path)
        told = (found.run, found.generation, found.rank, found.first_step)
        if told != (self.run, self.generation, self.rank, self.first_step):
            self.problems.append(f"{self.path} is not what its name says: it holds {told}")
            return False
        self.header = found
        self._next = aligned(header.padded_bytes, BLOCK)
        return True

    def _scan_end(self, reader: files.Reader) -> bool:
        """Use the index at the end of a finished segment instead of walking it."""
        if self.in_memory or self.frames or reader.num_bytes < 2 * BLOCK:
            return False
        # The END record is small but may span blocks: look for its header backwards, a few blocks at most.
        for back in range(1, 17):
            offset = reader.num_bytes // BLOCK * BLOCK - back * BLOCK
            if offset <= 0:
                return False
            header = records.unpack(self._read(reader, offset, HEADER_BYTES), records.at(self.seed, offset))
            if header is None:
                continue
            if header.type != END:
                return False
            payload = self._payload(reader, offset, header)
            if payload is None:
                return False
            end = _decode(payload, SegmentEnd, self.path)
            ends = (*end.offsets, offset)[1:]
            entries = zip(end.steps, end.offsets, end.footers, ends, strict=True)
            frames = [FrameEntry(s, b, f, self.path, self.generation, e) for s, b, f, e in entries]
            self.frames, self.end = frames, end
            self.durable_step = max(self.durable_step, end.durable_step)
            return True
        return False

    def _walk(self, reader: files.Reader, offset: int | None) -> None:
        """Frame by frame to the end. What is not valid on the way is a hole if anything valid follows, else a torn tail."""
        broken: list[tuple[int, int]] = []
        """(frames found before it, byte at which its frame begins)"""
        self.torn_bytes = 0
        while offset is not None:
            begin, offset = self._walk_valid(reader, offset)
            if offset is not None:
                broken.append((len(self.frames), begin))
                offset = self._resync(reader, aligned(offset + 1, BLOCK))
        while broken and broken[-1][0] == len(self.frames) and self.end is None:
            self.torn_bytes = reader.num_bytes - broken.pop()[1]
        for known, begin in sorted(dict(reversed(broken)).items()):  # of those without a frame between them, the first
            self._add_hole(reader, known, begin)

    def _walk_valid(self, reader: files.Reader, offset: int) -> tuple[int, int | None]:
        """Up to what is not valid: the byte at which its frame begins, and its own; None if there is no such thing."""
        begin, ordinal = offset, 0
        while offset < reader.num_bytes:
            header = records.unpack(self._read(reader, offset, HEADER_BYTES), records.at(self.seed, offset))
            if header is None or offset + header.padded_bytes > aligned(reader.num_bytes, BLOCK):
                return begin, offset
            if header.type == END:
                payload = self._payload(reader, offset, header)
                if payload is None:
                    return begin, offset
                self.end = _decode(payload, SegmentEnd, self.path)
                self.durable_step = max(self.durable_step, self.end.durable_step)
                return begin, None
            if header.ordinal != ordinal:
                return begin, offset
            if header.type == FOOTER:
                footer = self._footer(reader, offset, header)
                if footer is None:
                    return begin, offset
                self.durable_step = max(self.durable_step, footer.durable_step)
                after = aligned(offset + header.padded_bytes, BLOCK)
                self.frames.append(FrameEntry(header.step, begin, offset, self.path, self.generation, after))
                begin, ordinal = after, -1
                offset = after - header.padded_bytes
                self._next = after
            offset += header.padded_bytes
            ordinal += 1
        if offset > begin:
            self.torn_bytes = reader.num_bytes - begin
        return begin, None

    def _add_hole(self, reader: files.Reader, known: int, begin: int) -> None:
        """After so many frames."""
        first = self.frames[known - 1].step + 1 if known else self.first_step
        listed = max(self.end.steps, default=first) if self.end is not None else first
        is_last = known == len(self.frames)
        last, end = (listed, reader.num_bytes) if is_last else (self.frames[known].step - 1, self.frames[known].offset)
        self.holes.append((first, last, f"{self.path}: damaged between bytes {begin} and {end}"))

    def _footer(self, reader: files.Reader, offset: int, header: Header) -> Footer | None:
        payload = self._payload(reader, offset, header)
        return None if payload is None else _decode(payload, Footer, self.path)

    def _resync(self, reader: files.Reader, offset: int) -> int | None:
        """The next block that begins a frame (or the end record); None if there is none."""
        while offset < reader.num_bytes and not self.in_memory:
            header = records.unpack(self._read(reader, offset, HEADER_BYTES), records.at(self.seed, offset))
            if header is not None and (header.type == END or header.ordinal == 0):
                return offset
            offset += BLOCK
        return None


def _ordinals(parts: list[list[tuple[int, int, int]]]) -> list[int]:
    return sorted({ordinal for p in parts for ordinal, _, _ in p})


def _decode(payload: bytes, kind: type[Any], path: str) -> Any:
    try:
        return _DECODERS[kind].decode(payload)
    except msgspec.MsgspecError as e:
        raise CorruptionError(f"{path}: a {kind.__name__} cannot be decoded: {e}") from e


class StoredFrame:
    """A valid frame on disk, ready to be folded (a FrameData). Every payload is verified when it is read."""

    def __init__(self, entry: FrameEntry, reader: Reader, seed: int) -> None:
        self.entry = entry
        self.reader = reader
        self._seed = seed
        header = records.unpack(reader.read(entry.footer_offset, HEADER_BYTES), records.at(seed, entry.footer_offset))
        if header is None or header.type != FOOTER or header.step != entry.step:
            raise self._damaged("its footer")
        payload = reader.read(entry.footer_offset + HEADER_BYTES, header.stored_bytes)
        if records.payload_sum(payload, records.at(seed, entry.footer_offset)) != header.payload_sum:
            raise self._damaged("its footer")
        self.footer: Footer = _decode(payload, Footer, entry.path)
        self.footer_sum = header.payload_sum
        self.num_bytes = entry.end_offset - entry.offset

    @functools.cached_property
    def headers(self) -> list[Header]:
        """Of the records of this frame before its footer."""
        headers = records.headers_in(self.footer.directory)
        size = sum(header.padded_bytes for header in headers)
        if self.entry.offset + size != self.entry.footer_offset or len(headers) != self.footer.num_records:
            raise self._damaged("its directory")
        return headers

    @functools.cached_property
    def _offsets(self) -> list[int]:
        """Where those begin."""
        sizes = [self.entry.offset, *(header.padded_bytes for header in self.headers)]
        return list(itertools.accumulate(sizes))[:-1]

    def _damaged(self, what: str) -> CorruptionError:
        error = CorruptionError(f"step {self.entry.step} is damaged: {what} in {self.entry.path} does not fit its checksum.")
        error.step = self.entry.step
        return error

    @property
    def step(self) -> int:
        return self.entry.step

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.footer.ops

    @property
    def audit(self) -> Any:
        return audit_entries(self.footer)

    def cursor(self) -> bytes:
        """The encoded cursor of this step."""
        return self._raw(len(self.headers) - 1, CURSOR).tobytes()

    def _raw(self, ordinal: int, type_: int = DATA) -> Bytes:
        """Decoded payload of one record, verified."""
        return self._load([ordinal], Scratch(), type_)[ordinal]

    def _load(
        self, ordinals: Sequence[int], scratch: Scratch, type_: int = DATA, bare: Set[int] = frozenset()
    ) -> dict[int, Bytes]:
        """Decoded payloads of records (ascending), verified; of those in `bare` the payloads themselves."""
        found: dict[int, Bytes] = {}
        for first, stop, part in self._ranges(ordinals, type_):
            data = self.reader.read_direct(scratch.take(stop - first), first, stop - first)
            self._decode(part, first, data, scratch, found, type_, bare)
        return found

    def _ranges(self, ordinals: Sequence[int], type_: int) -> list[tuple[int, int, Sequence[int]]]:
        """Bytes of the file to be read at once, and the records in them: those that follow each other."""
        found = []
        i = 0
        while i < len(ordinals):
            first, stop = self._range(ordinals[i], type_)
            j = i + 1
            while j < len(ordinals) and ordinals[j] == ordinals[j - 1] + 1 and stop - first < _READ_BYTES:
                stop = self._range(ordinals[j], type_)[1]
                j += 1
            found.append((first, stop, ordinals[i:j]))
            i = j
        return found

    def _decode(
        self, ordinals: Sequence[int], at: int, data: Bytes, scratch: Scratch, found: dict[int, Bytes], type_: int,
        bare: Set[int],
    ) -> None:  # fmt: skip
        for ordinal in ordinals:
            start, end = self._range(ordinal, type_)
            found[ordinal] = self._payload(ordinal, data[start - at : end - at], scratch, is_bare=ordinal in bare)

    def _range(self, ordinal: int, type_: int) -> tuple[int, int]:
        """The bytes of the file that are the payload of this record."""
        if ordinal >= len(self.headers) or self.headers[ordinal].type != type_:
            raise self._damaged("a reference to a record")
        first = self._offsets[ordinal] + HEADER_BYTES
        return first, first + self.headers[ordinal].stored_bytes

    def _payload(self, ordinal: int, stored: Bytes, scratch: Scratch, *, is_bare: bool = False) -> Bytes:
        """Verified and decoded; if `is_bare`, only verified."""
        header = self.headers[ordinal]
        if (
            len(stored) != header.stored_bytes
            or records.payload_sum(stored, records.at(self._seed, self._offsets[ordinal])) != header.payload_sum
        ):
            raise self._damaged(f"record {ordinal}")
        if header.codec == codec.RAW or is_bare:
            return stored
        itemsize = dtype_of(header.dtype).itemsize if header.dtype else 1
        out = scratch.take(header.raw_bytes)[: header.raw_bytes]
        codec.decode(header.codec, header.codec_version, stored, itemsize, out)
        return out

    def check_payloads(self) -> None:
        """Read and verify every record, on-disk headers included."""
        self.check_records(range(len(self.headers)))

    def check_records(self, ordinals: Iterable[int]) -> None:
        """Read and verify these records."""
        for ordinal in ordinals:
            if ordinal >= len(self.headers):
                raise self._damaged("a reference to a record")
            header, offset = self.headers[ordinal], self._offsets[ordinal]
            on_disk = records.unpack(self.reader.read(offset, HEADER_BYTES), records.at(self._seed, offset))
            if on_disk != header:
                raise self._damaged(f"the header of record {ordinal}")
            self._raw(ordinal, header.type)

    def read(
        self, wanted: Sequence[Wanted], scratch: Scratch | None = None, *, sparse: bool = False
    ) -> list[torch.Tensor]:
        """Logical elements [start, stop) of tensors in this frame, each as a 1-D tensor of its dtype.

        `sparse`: those that are all of a record which keeps only some of them, as a sparse tensor.
        """
        parts = [self._parts(*w) for w in wanted]
        bare = self._bare(parts) if sparse else frozenset()
        raws = self._load(_ordinals(parts), scratch or Scratch(), DATA, bare)
        return self._tensors(wanted, parts, raws, bare)

    def begin(
        self, wanted: Sequence[Wanted], scratch: Scratch, *, sparse: bool = False
    ) -> Callable[[], list[torch.Tensor]]:
        """read() that goes on in the background; the same thread calls the result."""
        parts = [self._parts(*w) for w in wanted]
        bare = self._bare(parts) if sparse else frozenset()
        under_way = [
            (self.reader.begin_direct(scratch.take(stop - first), first, stop - first), first, part)
            for first, stop, part in self._ranges(_ordinals(parts), DATA)
        ]

        def get() -> list[torch.Tensor]:
            raws: dict[int, Bytes] = {}
            for data, first, part in under_way:
                self._decode(part, first, data(), scratch, raws, DATA, bare)
            return self._tensors(wanted, parts, raws, bare)

        return get

    def piece_elements(self, ref: TensorRef) -> int:
        """A record is verified as a whole."""
        if ref.num_pieces <= 1:
            return PIECE_ELEMENTS
        if ref.first >= len(self.headers):
            raise self._damaged("a reference to a record")
        return max(1, self.headers[ref.first].count)

    def _bare(self, parts: list[list[tuple[int, int, int]]]) -> frozenset[int]:
        """Records with the codec sparse of which all elements are wanted, and for one tensor alone."""
        return frozenset(
            part[0][0]
            for part in parts
            if len(part) == 1
            and (header := self.headers[part[0][0]]).codec == codec.SPARSE
            and header.uid != 0
            and part[0][2] == header.count
        )

    def _tensors(
        self, wanted: Sequence[Wanted], parts: list[list[tuple[int, int, int]]], raws: dict[int, Bytes], bare: Set[int]
    ) -> list[torch.Tensor]:
        return [
            self._kept(raws[p[0][0]], dtype_of(ref.dtype), stop - start)
            if p and p[0][0] in bare
            else self._elements(ref, stop - start, p, raws)
            for (ref, start, stop), p in zip(wanted, parts, strict=True)
        ]

    def _kept(self, stored: Bytes, dtype: torch.dtype, count: int) -> torch.Tensor:
        indices, values = kept(stored, dtype.itemsize, count * dtype.itemsize)
        found = torch.from_numpy(indices.astype(np.int64)).unsqueeze(0)
        return torch.sparse_coo_tensor(
            found, self._typed(values, dtype, len(indices)), (count,), is_coalesced=True, check_invariants=False
        )

    def _parts(self, ref: TensorRef, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(ordinal, first byte, elements) of the pieces that hold elements [start, stop)."""
        size = dtype_of(ref.dtype).itemsize
        found = []
        piece = self.piece_elements(ref)
        skipped = start // piece if ref.num_pieces > 1 else 0
        position = skipped * piece
        for ordinal in range(ref.first + skipped, ref.first + ref.num_pieces):
            if position >= stop:
                break
            if ordinal >= len(self.headers):
                raise self._damaged("a reference to a record")
            header = self.headers[ordinal]
            if header.uid and header.start != position:
                raise self._damaged("a reference to a tensor")
            count = header.count if header.uid else ref.numel
            low, high = max(start, position), min(stop, position + count)
            if low < high:
                found.append((ordinal, ref.offset + (low - position) * size, high - low))
            position += count
        return found

    def _elements(
        self, ref: TensorRef, count: int, parts: list[tuple[int, int, int]], raws: dict[int, Bytes]
    ) -> torch.Tensor:
        dtype = dtype_of(ref.dtype)
        size = dtype.itemsize
        found = [self._typed(raws[ordinal][first : first + n * size], dtype, n) for ordinal, first, n in parts]
        if sum(n for _, _, n in parts) != max(count, 0):
            raise self._damaged("a reference to a tensor")
        if not found:
            return torch.empty(0, dtype=dtype)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _typed(self, raw: Bytes, dtype: torch.dtype, count: int) -> torch.Tensor:
        if len(raw) != count * dtype.itemsize:
            raise self._damaged("the length of a tensor")
        return typed(raw, dtype)
