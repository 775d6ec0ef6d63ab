"""The log: frames in order, in segments, written by one thread. (segments.py finds and reads them.)"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from everstep import codec
from everstep.format import records
from everstep.format.records import BLOCK, CURSOR, DATA, END, FOOTER, HEADER_BYTES, SEGMENT, Header, aligned
from everstep.format.segment import SegmentEnd, SegmentHeader, file_name
from everstep.frame import Footer, Op
from everstep.memory import Bytes
from everstep.store import files
from everstep.store.segments import FrameEntry

_MAX_SEGMENT_FRAMES = 1024


class Appender(Protocol):
    """A new file that grows at its end: files.Appender on a disk, shared.MappedAppender in memory."""

    @property
    def path(self) -> str: ...

    @property
    def offset(self) -> int: ...

    def reserve(self, num_bytes: int) -> Bytes: ...

    def view(self, offset: int, num_bytes: int) -> Bytes | None: ...

    def pad(self, multiple: int) -> None: ...

    def write_out(self) -> None: ...

    def sync(self) -> None: ...

    def check_still_there(self) -> None: ...

    def truncate(self, offset: int) -> None: ...

    def close(self, *, sync: bool = True) -> None: ...

    def abandon(self) -> None: ...


class Place(Protocol):
    """Where segments are made: a folder on a disk, or in memory."""

    @property
    def folder(self) -> str: ...

    @property
    def segment_bytes(self) -> int: ...

    @property
    def in_memory(self) -> bool: ...

    def create(self, path: str) -> Appender: ...

    def sync_folder(self) -> None:
        """Return when the names in it are on stable storage."""
        ...


class DiskPlace:
    """A folder on a disk."""

    in_memory = False

    def __init__(self, folder: str, *, direct: bool, segment_bytes: int) -> None:
        self.folder = folder
        self.direct = direct
        self.segment_bytes = segment_bytes

    def create(self, path: str) -> files.Appender:
        return files.Appender(path, direct=self.direct)

    def sync_folder(self) -> None:
        files.sync_dir(self.folder)


class OpenFrame(NamedTuple):
    """A segment has been written up to here, in the middle of the frame of this step."""

    step: int
    path: str
    end_offset: int


class LogWriter:
    """Appends frames to segments of one rank and generation. One thread. Durable when sync() returns."""

    def __init__(
        self, place: Place, *, run: str, timeline: int, generation: int, rank: int, fingerprint: dict[str, Any],
        chained: bool = True, on_begun: Callable[[], None] = lambda: None, fine: bool = False,
    ) -> None:  # fmt: skip
        """`on_begun` is called when the first segment on a disk is durable, before anything in it counts as that."""
        self.place = place
        """Of the next segment. Setting another begins a new one."""
        self._run, self._timeline, self._generation, self._rank = run, timeline, generation, rank
        self._fingerprint = fingerprint
        self._chained = chained
        """Whether a finished segment names the next one, so that its loss is noticed; not if that may be in memory."""
        self.fine = fine
        """Whether it gets fine pieces and hashes of such."""
        self._on_begun = on_begun
        self._has_begun = False
        self._seeds: dict[str, int] = {}
        self._file: Appender | None = None
        self._file_place = place
        self._step = -1
        self._begin = 0
        self._headers: list[bytes] = []
        self._offsets: list[int] = []
        self._index: list[tuple[int, int, int]] = []
        self._previous = 0
        self.bytes_written = 0
        self.last: FrameEntry | None = None
        """The frame that was finished last."""

    @property
    def in_memory(self) -> bool:
        """Whether the open segment is in memory."""
        return self._file_place.in_memory

    def begin(self, step: int, layout: str, durable_step: int) -> None:
        """Start the frame of this step; a new segment if the open one is full or there is none."""
        if self._file is not None and (
            self._file.offset >= self._file_place.segment_bytes
            or len(self._index) >= _MAX_SEGMENT_FRAMES
            or self._file_place is not self.place
        ):
            # The next file is there, durably, before this one says so: then a missing file is damage, never a crash.
            old, index = self._file, self._index
            try:
                self._open(step, layout)
                self.sync()
                self._end(old, index, step if self._chained else None, durable_step)
            except BaseException:
                old.abandon()
                raise
        if self._file is None:
            self._open(step, layout)
        assert self._file is not None
        self._step, self._begin, self._headers, self._offsets = step, self._file.offset, [], []

    def _open(self, step: int, layout: str) -> None:
        # The folder is synced before the first frame counts as durable: sync() does it once per segment.
        place = self.place
        self._file = place.create(os.path.join(place.folder, file_name(self._generation, step)))
        self._file_place = place
        self._index = []
        self._folder_synced = False
        self._seeds[self._file.path] = records.seed_of(bytes.fromhex(self._run), self._generation, self._rank, step)
        head = SegmentHeader(self._run, self._timeline, self._generation, self._rank, layout, step, self._fingerprint)
        self._record(SEGMENT, [np.frombuffer(msgspec.msgpack.encode(head), np.uint8)], step=step, ordinal=0)
        self._file.pad(BLOCK)

    def _record(
        self, type_: int, parts: Sequence[Bytes], *, step: int, ordinal: int, uid: int = 0, dtype: int = 0,
        start: int = 0, count: int = 0, raw_bytes: int | None = None, codec_id: int = 0, codec_version: int = 0,
        flags: int = 0, file: Appender | None = None,
    ) -> bytes:  # fmt: skip
        file = file or self._file
        assert file is not None
        offset = file.offset
        stored = sum(len(p) for p in parts)
        region = file.reserve(aligned(HEADER_BYTES + stored, records.ALIGN))
        done = HEADER_BYTES
        for part in parts:
            np.copyto(region[done : done + len(part)], part)
            done += len(part)
        region[done:] = 0
        seed = records.at(self._seeds[file.path], offset)
        header = records.pack(
            Header(
                type_, flags, codec_id, codec_version, self._generation, ordinal, step, uid, 0, dtype, start, count,
                stored if raw_bytes is None else raw_bytes, stored,
                records.payload_sum(region[HEADER_BYTES:done], seed),
            ),
            seed,
        )  # fmt: skip
        region[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
        self.bytes_written += len(region)
        return header

    def data(
        self, parts: Sequence[Bytes], *, uid: int, dtype: int, start: int, count: int, raw_bytes: int,
        codec_id: int = codec.RAW, codec_version: int = 1,
    ) -> int:  # fmt: skip
        """Append one piece of a tensor (uid 0: several small tensors); returns its ordinal."""
        assert self._file is not None
        ordinal = len(self._headers)
        self._offsets.append(self._file.offset)
        self._headers.append(
            self._record(
                DATA, parts, step=self._step, ordinal=ordinal, uid=uid, dtype=dtype, start=start, count=count,
                raw_bytes=raw_bytes, codec_id=codec_id, codec_version=codec_version,
            )
        )  # fmt: skip
        return ordinal

    def holds(self, ordinal: int, payload: Bytes) -> bool:
        """Whether the payload of this DATA record of the open frame is these bytes (by its checksum)."""
        assert self._file is not None
        seed = records.at(self._seeds[self._file.path], self._offsets[ordinal])
        return records.payload_sum(payload, seed) == records.unpack_trusted(self._headers[ordinal]).payload_sum

    def payload(self, ordinal: int) -> Bytes | None:
        """The payload of this DATA record of the open frame, not to be written to; None if it is not in memory any more.

        (On a disk only that of the last record is sure to be, and only until the next.)
        """
        assert self._file is not None
        stored = records.unpack_trusted(self._headers[ordinal]).stored_bytes
        return self._file.view(self._offsets[ordinal] + HEADER_BYTES, stored)

    def open_frame(self) -> OpenFrame:
        """How far the frame that was begun has been written."""
        assert self._file is not None
        return OpenFrame(self._step, self._file.path, self._file.offset)

    def finish(self, ops: Sequence[Op], cursor: bytes, audit: bytes, audit_complete: bool, durable_step: int,
               wall_time_ns: int, replicas: bytes = b"") -> None:  # fmt: skip
        """Cursor and footer: after this (and sync) the frame is valid."""
        assert self._file is not None
        ordinal = len(self._headers)
        self._headers.append(self._record(CURSOR, [np.frombuffer(cursor, np.uint8)], step=self._step, ordinal=ordinal))
        footer = Footer(
            num_records=len(self._headers), ops=tuple(ops), directory=b"".join(self._headers), previous=self._previous,
            durable_step=durable_step, audit=audit, audit_complete=audit_complete, wall_time_ns=wall_time_ns,
            replicas=replicas, fine=self.fine,
        )  # fmt: skip
        at = self._file.offset
        header = self._record(
            FOOTER, [np.frombuffer(msgspec.msgpack.encode(footer), np.uint8)], step=self._step, ordinal=ordinal + 1
        )
        self._file.pad(BLOCK)
        self._previous = records.unpack_trusted(header).payload_sum
        self._index.append((self._step, self._begin, at))
        self.last = FrameEntry(self._step, self._begin, at, self._file.path, self._generation, self._file.offset)

    def write_out(self) -> None:
        """Hand every finished frame to the operating system: survives the process, not the host."""
        assert self._file is not None
        self._file.write_out()
        self._file.check_still_there()

    def sync(self) -> None:
        """Return when every finished frame is on stable storage."""
        assert self._file is not None
        self._file.sync()
        self._file.check_still_there()
        if not self._folder_synced:
            self._file_place.sync_folder()
            self._folder_synced = True
        if not self._has_begun and not self.in_memory:
            self._on_begun()
            self._has_begun = True

    def sync_if_open(self) -> None:
        """sync(), if there is an open segment; finished ones are on stable storage anyway."""
        if self._file is not None:
            self.sync()

    def end_segment(self, next_step: int | None, durable_step: int) -> None:
        """Finish the open segment with its index, durably. An unfinished frame is dropped."""
        if self._file is None:
            return
        if self._headers and (not self._index or self._index[-1][0] != self._step):
            self._file.truncate(self._begin)
        self._headers = []
        file, self._file = self._file, None
        self._end(file, self._index, next_step, durable_step)
        if not self._folder_synced:
            self._file_place.sync_folder()

    def _end(
        self, file: Appender, index: list[tuple[int, int, int]], next_step: int | None, durable_step: int
    ) -> None:
        end = SegmentEnd(
            tuple(i[0] for i in index), tuple(i[1] for i in index), tuple(i[2] for i in index), durable_step, next_step
        )
        file.sync()  # a reader believes the index without looking at the frames: they must be there first
        payload = [np.frombuffer(msgspec.msgpack.encode(end), np.uint8)]
        self._record(END, payload, step=index[-1][0] if index else 0, ordinal=0, file=file)
        file.pad(BLOCK)
        file.sync()
        file.close(sync=False)
        del self._seeds[file.path]

    def abandon(self) -> None:
        """Leave the open segment as it is (after an error); the next frame opens a new one."""
        if self._file is not None:
            self._file.abandon()
        self._file, self._headers, self._previous = None, [], 0
