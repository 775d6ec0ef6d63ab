"""One contract for every place of the log: what a LogWriter has finished there is found and read, and nothing else is."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep.errors import CorruptionError, StorageError, UsageError
from everstep.format.segment import parse_name
from everstep.frame import TensorRef
from everstep.store import files, shared
from everstep.store.log import DiskPlace, LogWriter, Place
from everstep.store.segments import FrameEntry, Segment, StoredFrame
from everstep.store.shared import MappedReader, MemoryPlace

RUN = "0123456789abcdef" * 2
FLOAT32 = 1


@pytest.fixture(params=["disk", "disk, direct", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param != "memory":
        yield DiskPlace(str(tmp_path), direct="direct" in request.param, segment_bytes=1 << 20)
        return
    with in_memory() as made:
        yield made


class in_memory:  # noqa: N801
    """A MemoryPlace in a folder of its own."""

    def __enter__(self) -> MemoryPlace:
        self._top = tempfile.mkdtemp(prefix="es-", dir="/dev/shm")
        self.place = MemoryPlace(os.path.join(self._top, "everstep", "run", "log"))
        self.place.segment_bytes = 1 << 20
        return self.place

    def __exit__(self, *exc: object) -> None:
        self.place.close()
        shutil.rmtree(self._top)


def writer(place: Place, generation: int = 1) -> LogWriter:
    return LogWriter(place, run=RUN, timeline=1, generation=generation, rank=0, fingerprint={"num_threads": 1})


def values(step: int, elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(step))


def put(log: LogWriter, step: int, elements: int) -> None:
    data = values(step, elements).numpy().view(np.uint8)
    log.data([data], uid=7, dtype=FLOAT32, start=0, count=elements, raw_bytes=len(data))


def write(log: LogWriter, step: int, elements: int = 1000) -> FrameEntry:
    """A frame whose gradient and cursor are known from its step."""
    log.begin(step, "layout", -1)
    put(log, step, elements)
    log.finish([], b"cursor %d" % step, b"", False, -1, 0)
    log.sync()
    assert log.last is not None
    return log.last


def segments(place: Place) -> list[Segment]:
    found = []
    for name in sorted(os.listdir(place.folder)):
        parsed = parse_name(name)
        assert parsed is not None, name
        found.append(Segment(os.path.join(place.folder, name), RUN, 0, *parsed, in_memory=place.in_memory).scan())
    return found


def entries(place: Place) -> dict[int, FrameEntry]:
    """Every frame that is there."""
    found: dict[int, FrameEntry] = {}
    for segment in segments(place):
        assert segment.problems == [] and segment.holes == []
        for entry in segment.frames:
            assert entry.step not in found
            found[entry.step] = entry
    return found


def seed(entry: FrameEntry) -> int:
    parsed = parse_name(os.path.basename(entry.path))
    assert parsed is not None
    return Segment(entry.path, RUN, 0, *parsed).seed


def check(place: Place, entry: FrameEntry, elements: int = 1000) -> None:
    """The frame has the bits that were written, by every reader that the place has."""
    readers: list[Any] = [files.Reader(entry.path), files.Reader(entry.path, direct=True)]
    if place.in_memory:
        readers += [MappedReader(entry.path), MappedReader(entry.path)]
        readers[-1].copies = True
    for reader in readers:
        frame = StoredFrame(entry, reader, seed(entry))
        frame.check_payloads()
        (got,) = frame.read([(TensorRef(FLOAT32, (elements,), 0, 1), 0, elements)])
        assert torch.equal(got, values(entry.step, elements))
        (part,) = frame.read([(TensorRef(FLOAT32, (elements,), 0, 1), 3, 11)])
        assert torch.equal(part, values(entry.step, elements)[3:11])
        assert frame.cursor() == b"cursor %d" % entry.step
        reader.close()


def test_frames_are_found_where_the_writer_says_and_read_as_they_were_written(place: Place) -> None:
    log = writer(place)
    told = {n: write(log, n) for n in range(1, 6)}
    assert entries(place) == told
    log.end_segment(None, -1)
    assert entries(place) == told
    for entry in told.values():
        check(place, entry)


def test_a_full_segment_is_followed_by_another(place: Place) -> None:
    log = writer(place)
    told = {n: write(log, n, 100_000) for n in range(1, 10)}
    assert len(segments(place)) == 3, "a segment is ended when it is 1 MB or more"
    assert entries(place) == told
    for entry in told.values():
        check(place, entry, 100_000)


def test_a_frame_much_larger_than_a_segment_is_one_frame(place: Place) -> None:
    log = writer(place)
    write(log, 1)
    large = write(log, 2, 3_000_000)
    after = write(log, 3)
    assert entries(place) == {1: entries(place)[1], 2: large, 3: after}
    check(place, large, 3_000_000)
    check(place, after)


def test_a_frame_that_is_not_finished_is_not_there(place: Place) -> None:
    log = writer(place)
    told = {n: write(log, n) for n in (1, 2)}
    log.begin(3, "layout", -1)
    put(log, 3, 300_000)
    log.write_out()
    assert entries(place) == told
    log.abandon()
    assert entries(place) == told


def test_a_frame_that_was_not_finished_is_dropped_at_the_end_of_a_segment(place: Place) -> None:
    log = writer(place)
    told = {n: write(log, n) for n in (1, 2)}
    log.begin(3, "layout", -1)
    put(log, 3, 5000)
    log.end_segment(None, -1)
    assert entries(place) == told
    (segment,) = segments(place)
    assert segment.end is not None and segment.torn_bytes == 0


def test_a_scan_goes_on_where_the_last_one_ended(place: Place) -> None:
    log = writer(place)
    write(log, 1)
    (segment,) = segments(place)
    for n in (2, 3):
        write(log, n)
        segment.scan()
        assert [f.step for f in segment.frames] == list(range(1, n + 1))


def test_a_changed_byte_is_noticed(place: Place) -> None:
    log = writer(place)
    entry = write(log, 1)
    with open(entry.path, "r+b") as f:
        f.seek(entry.offset + 500)
        byte = f.read(1)
        f.seek(entry.offset + 500)
        f.write(bytes([byte[0] ^ 1]))
    reader: Any = MappedReader(entry.path) if place.in_memory else files.Reader(entry.path)
    with pytest.raises(CorruptionError, match="step 1 "):
        StoredFrame(entry, reader, seed(entry)).check_payloads()
    reader.close()


def test_a_file_that_was_taken_away_is_noticed(place: Place) -> None:
    log = writer(place)
    entry = write(log, 1)
    os.unlink(entry.path)
    with pytest.raises(StorageError):
        write(log, 2)
    log.abandon()
    assert write(log, 3).step == 3, "the next frame opens a new segment"


def test_a_log_moves_from_one_place_to_the_other_and_back(tmp_path: Path) -> None:
    with in_memory() as memory:
        disk = DiskPlace(str(tmp_path), direct=False, segment_bytes=1 << 20)
        log = LogWriter(
            memory, run=RUN, timeline=1, generation=1, rank=0, fingerprint={"num_threads": 1}, chained=False
        )
        told = {}
        for n in range(1, 10):
            log.place = disk if n in (4, 5, 6) else memory
            told[n] = write(log, n)
        assert sorted(entries(disk)) == [4, 5, 6]
        assert sorted(entries(memory)) == [1, 2, 3, 7, 8, 9]
        assert {**entries(disk), **entries(memory)} == told
        for n, entry in told.items():
            check(disk if n in (4, 5, 6) else memory, entry)


# ------------------------------------------------------------------------------------------ memory only


def test_a_recycled_file_never_shows_what_it_held_before() -> None:
    with in_memory() as place:
        log = writer(place)
        for n in range(1, 8):
            write(log, n, 300_000)  # a segment each
            place.release(lambda path: False)
            found = entries(place)
            assert n in found and set(found) >= {n}
        assert place.reused >= 4
        assert len(os.listdir(place.folder)) <= 4
        # A large frame is over where a small one is now: its tail is still in the file.
        for n in range(8, 12):
            entry = write(log, n, 1000)
            assert entries(place)[n] == entry
            check(place, entry)
        (open_now,) = [s for s in segments(place) if 11 in {f.step for f in s.frames}]
        assert {f.step for f in open_now.frames} == set(range(open_now.first_step, 12))
        # Another generation with the same steps in the same files.
        log.end_segment(None, -1)
        place.release(lambda path: False)
        other = writer(place, generation=2)
        write(other, 5, 1000)
        for segment in segments(place):
            if segment.generation == 2:
                assert [f.step for f in segment.frames] == [5]


def test_segments_that_are_needed_are_not_given_back_however_many_get_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_SPARE_BYTES", 5 << 20)
    with in_memory() as place:
        log = writer(place)
        for n in range(1, 11):
            write(log, n, 300_000)
            place.release(lambda path: True)
            assert place.num_bytes() >= (n - 1) * 1_200_000, "what waits is counted"
        assert sorted(entries(place)) == list(range(1, 11))
        place.release(lambda path: False)
        assert place.num_bytes() == 0
        assert len(os.listdir(place.folder)) <= 3, "two of 2 MB are kept for later, one is open"


def test_files_are_used_again_in_the_long_run() -> None:
    with in_memory() as place:
        log = writer(place)
        inodes = set()
        for n in range(1, 60):
            entry = write(log, n, 300_000)
            inodes.add(os.stat(entry.path).st_ino)
            place.release(lambda path: False)
        assert len(inodes) <= 4
        assert len(os.listdir(place.folder)) <= 4


def test_a_mapped_reader_sees_what_a_file_holds_now_even_if_someone_wrote_into_what_it_gave() -> None:
    with in_memory() as place:
        log = writer(place)
        entry = write(log, 1, 300_000)
        reader = MappedReader(entry.path)
        reader.copies = True
        (got,) = StoredFrame(entry, reader, seed(entry)).read([(TensorRef(FLOAT32, (300_000,), 0, 1), 0, 300_000)])
        got.zero_()  # as optimizers do
        check(place, entry, 300_000)
        StoredFrame(entry, reader, seed(entry)).check_payloads()
        reader.close()


@pytest.mark.parametrize("at_once", [True, False], ids=["at the first byte", "when a file grows"])
def test_full_shared_memory_is_a_storage_error_and_not_a_signal(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_memory() as place:
        log = writer(place)
        if not at_once:
            told = write(log, 1)
        real = os.posix_fallocate
        full = True

        def fallocate(fd: int, offset: int, length: int) -> None:
            if full and (at_once or length > 2 << 20):
                raise OSError(errno.ENOSPC, "No space left on device")
            real(fd, offset, length)

        monkeypatch.setattr(os, "posix_fallocate", fallocate)
        with pytest.raises(StorageError, match="full"):
            write(log, 2, 1_000_000)
        log.abandon()
        full = False
        after = write(log, 3)
        found = entries(place)
        assert found == ({3: after} if at_once else {1: told, 3: after})


def test_a_folder_of_others_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "top" / "run"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o755)
    with pytest.raises(UsageError, match="only this user"):
        shared.make_private(str(folder))


def test_what_is_available_is_what_control_groups_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "self"
    own.write_text("4:memory:/old\n0::/pod/step\n")
    pod, step = tmp_path / "pod", tmp_path / "pod" / "step"
    step.mkdir(parents=True)
    (pod / "memory.max").write_text("1000000\n")
    (pod / "memory.current").write_text("900000\n")
    (pod / "memory.stat").write_text("anon 1\nactive_file 70000\ninactive_file 50000\n")
    (step / "memory.max").write_text("max\n")
    limits = shared._limits(str(tmp_path), str(own))
    assert limits == ((str(pod), 1_000_000),)
    assert shared._limits(str(tmp_path), str(tmp_path / "none")) == ()
    monkeypatch.setattr(shared, "_limits", lambda: limits)
    assert shared.available_bytes() == 150_000
    (pod / "memory.current").write_text("1100000\n")
    assert shared.available_bytes() == 0
    (pod / "memory.current").unlink()
    assert shared.available_bytes() > 1 << 30, "nothing is known of it: what the host has"
