"""A pool: slots written in place, committed by their headers, read as bases."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep.atoms import Layout
from everstep.errors import CorruptionError, FormatError, PoolError, PoolFullError, StorageError, UsageError
from everstep.format import pool as formats
from everstep.format.pool import BLOCK, HEADER_BYTES
from everstep.store import files
from everstep.store.bases import BaseReader, BaseWriter, Slot, piece_sums
from everstep.store.medium import MakeMedium, Mapped, Synced
from everstep.store.pool import Pool, read_pool
from pools import LARGE, LAYOUT, RUN, SMALL, bytes_of_step, commit, create, fields, fill, is_of_its_step, of_step


def steps(folder: Path, name: str = "pool") -> list[int]:
    return [manifest.step for manifest in read_pool(str(folder / name), RUN)]


@pytest.mark.parametrize("medium", [Mapped, Synced])
def test_the_last_steps_come_back_as_bases_newest_first(tmp_path: Path, medium: MakeMedium) -> None:
    pool = create(str(tmp_path), slots=LARGE, medium=medium)
    written = [commit(pool, step, LARGE) for step in range(5)]
    assert pool.newest == 4
    pool.close()
    found = read_pool(str(tmp_path / "pool"), RUN)
    assert found == written[:1:-1]
    for manifest in found:
        assert is_of_its_step(str(tmp_path), manifest, LARGE)
        assert all(t.offset % 256 == 0 for t in manifest.tensors)
        assert manifest.files == {"pool": os.path.getsize(tmp_path / "pool")}


def test_a_slot_says_all_that_a_base_of_the_same_state_says(tmp_path: Path) -> None:
    pool = create(str(tmp_path))
    slot = commit(pool, 7)
    writer = BaseWriter(str(tmp_path), 7, SMALL, direct=False)
    for index in writer.order:
        writer.add(of_step(SMALL[index], 7))
    base = writer.finish(**fields(7))
    for a, b in zip(slot.tensors, base.tensors, strict=True):
        a.offset = b.offset = 0
    slot.files = base.files = {}
    assert slot == base
    pool.close()


def test_tensors_may_be_filled_out_of_order_and_by_several_threads(tmp_path: Path) -> None:
    pool = create(str(tmp_path), slots=LARGE)
    writer = pool.begin(3)

    def work(indices: range) -> None:
        for index in indices:
            slot, memory = LARGE[index], writer.memory(index)
            memory[:] = np.frombuffer(bytes_of_step(slot, 3), np.uint8)
            writer.set_sums(index, piece_sums(memory, slot.uid, slot.dtype.itemsize))

    threads = [threading.Thread(target=work, args=(range(i, -1, -2),)) for i in (4, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(writer.sums())
    writer.finish(**fields(3))
    (manifest,) = read_pool(pool.path, RUN)
    assert is_of_its_step(str(tmp_path), manifest, LARGE)
    pool.close()


def test_a_slot_that_is_not_finished_is_not_there(tmp_path: Path) -> None:
    pool = create(str(tmp_path))
    commit(pool, 1)
    writer = pool.begin(2)
    fill(writer, SMALL, 2)
    assert steps(tmp_path) == [1]
    writer.abandon()
    writer.abandon()
    assert steps(tmp_path) == [1] and pool.newest == 1
    commit(pool, 3)
    assert steps(tmp_path) == [3, 1]
    pool.close()


def test_a_slot_is_not_finished_before_all_tensors_are_there(tmp_path: Path) -> None:
    pool = create(str(tmp_path))
    writer = pool.begin(2)
    writer.add(of_step(SMALL[0], 2))
    with pytest.raises(AssertionError, match="missing"):
        writer.finish(**fields(2))
    writer.abandon()
    pool.close()


def test_the_newest_is_never_overwritten(tmp_path: Path) -> None:
    pool = create(str(tmp_path))
    for step in (1, 2, 3, 4, 5):
        commit(pool, step)
        writer = pool.begin(99)
        assert steps(tmp_path)[0] == step
        writer.abandon()
    assert steps(tmp_path) == [5, 4]
    pool.close()


def test_one_slot_is_written_at_a_time(tmp_path: Path) -> None:
    pool = create(str(tmp_path))
    pool.begin(1)
    with pytest.raises(UsageError, match="being written"):
        pool.begin(2)
    pool.close()


def test_documents_that_outgrow_their_place_are_refused_and_the_pool_goes_on(tmp_path: Path) -> None:
    pool = create(str(tmp_path), spare_bytes=1000)
    commit(pool, 1)
    with pytest.raises(PoolFullError, match=r"step 2: .* bytes"):
        commit(pool, 2, cursor=bytes(2 * BLOCK))
    assert steps(tmp_path) == [1]
    commit(pool, 3)
    assert steps(tmp_path) == [3, 1]
    pool.close()


def test_a_slot_may_have_another_layout_than_the_pool(tmp_path: Path) -> None:
    pool = create(str(tmp_path))
    other = Layout(LAYOUT.atoms, (), ("other",))
    commit(pool, 1, layout=other)
    commit(pool, 2)
    assert [m.layout for m in read_pool(str(tmp_path / "pool"), RUN)] == [LAYOUT, other]
    pool.close()


def test_a_pool_fits_exactly_the_tensors_it_was_made_for(tmp_path: Path) -> None:
    pool = create(str(tmp_path))
    assert pool.fits(list(SMALL))
    assert not pool.fits(SMALL[:-1])
    assert not pool.fits((*SMALL[:-1], Slot(4, "state", "optimizer.w.half", torch.bfloat16, (33, 70))))
    pool.close()


def test_a_newer_generation_comes_before_a_higher_step(tmp_path: Path) -> None:
    pool = create(str(tmp_path))
    commit(pool, 9, generation=1)
    commit(pool, 5, generation=2)
    assert steps(tmp_path) == [5, 9] and pool.newest == 5
    pool.close()


def test_nothing_is_there_under_its_name_before_it_is_whole_and_nothing_after_a_failure(tmp_path: Path) -> None:
    for operation in ("create", "allocate", "map", "sync", "rename"):

        def fault(op: str, path: str, operation: str = operation) -> None:
            assert not os.path.exists(tmp_path / "pool")
            if op == operation:
                raise OSError(errno.ENOSPC, "no space")

        with pytest.raises(StorageError, match=f"{operation} .*pool.*no space.*full"), files.observe(fault=fault):
            create(str(tmp_path))
        assert os.listdir(tmp_path) == []


def test_a_full_medium_is_told_at_creation(tmp_path: Path) -> None:
    size = os.statvfs("/dev/shm")
    huge = Slot(1, "param", "w", torch.uint8, (size.f_blocks * size.f_frsize,))
    folder = f"/dev/shm/everstep-test-{os.getpid()}"
    os.mkdir(folder)
    try:
        with pytest.raises(StorageError, match=r"allocate .*full"):
            create(folder, slots=(huge,), num_slots=2)
        assert os.listdir(folder) == []
    finally:
        os.rmdir(folder)


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    commit(pool := create(str(tmp_path)), 1)
    pool.close()
    with pytest.raises(PoolError, match="there already"):
        create(str(tmp_path))
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("medium", [Mapped, Synced])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_after_a_failed_sync_the_step_does_not_count_and_the_next_one_does(
    tmp_path: Path, medium: MakeMedium, at: int
) -> None:
    pool = create(str(tmp_path), medium=medium)
    commit(pool, 1)
    syncs = 0

    def fault(op: str, path: str) -> None:
        nonlocal syncs
        syncs += op == "sync"
        if op == "sync" and syncs == at:
            raise OSError(errno.EIO, "broken")

    with pytest.raises(StorageError, match=r"sync .*broken"), files.observe(fault=fault):
        commit(pool, 2)
    assert pool.newest == 1
    commit(pool, 3)
    commit(pool, 4)
    assert steps(tmp_path) == [4, 3, 1]
    pool.close()


# -- what is no pool of this run --------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pool = create(str(tmp_path))
    for step in (1, 2, 3):
        commit(pool, step)
    pool.close()
    return tmp_path / "pool"


def test_a_pool_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=f"no pool at {tmp_path}/pool"):
        read_pool(str(tmp_path / "pool"), RUN)


def test_a_pool_of_another_run_is_told(path: Path) -> None:
    with pytest.raises(PoolError, match=f"{path} is a pool of another run"):
        read_pool(str(path), "ff" * 16)


def test_a_pool_of_a_newer_format_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = formats.unpack_superblock(path.read_bytes()[:128], "")
    monkeypatch.setattr(formats, "POOL_MAJOR", 2)
    newer = formats.pack_superblock(geometry)
    monkeypatch.undo()
    path.write_bytes(newer + path.read_bytes()[len(newer) :])
    with pytest.raises(FormatError, match=f"{path} is a pool of format 2.0.*Upgrade"):
        read_pool(str(path), RUN)


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"", "is empty"), (b"EVSPOOL1", "is damaged"), (b"{}" * 5000, "is not a pool"), (bytes(9000), "is not a pool")],
)
def test_what_is_no_pool_is_told(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "pool").write_bytes(content)
    with pytest.raises(CorruptionError, match=f"{tmp_path}/pool {told}.*"):
        read_pool(str(tmp_path / "pool"), RUN)


def test_a_pool_that_is_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    with pytest.raises(StorageError, match=f"{tmp_path}/pool"):
        read_pool(str(tmp_path / "pool"), RUN)


def test_a_pool_that_is_cut_short_is_told(path: Path) -> None:
    os.truncate(path, os.path.getsize(path) - 1)
    with pytest.raises(CorruptionError, match=f"{path} is cut short"):
        read_pool(str(path), RUN)


def test_damaged_metadata_is_told(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[BLOCK + 50] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=f"the document of {path} is damaged"):
        read_pool(str(path), RUN)


def test_damaged_data_is_found_by_whoever_reads_it_and_the_next_slot_is_whole(path: Path) -> None:
    newest, older, _ = read_pool(str(path), RUN)
    data = bytearray(path.read_bytes())
    data[newest.tensors[3].offset] ^= 1
    path.write_bytes(data)
    assert read_pool(str(path), RUN)[0] == newest
    reader = BaseReader(str(path.parent), newest)
    with pytest.raises(CorruptionError, match=f"step 3 is damaged: optimizer.w.half in {path}") as told:
        reader.check()
    assert told.value.in_base and told.value.step == 3
    with pytest.raises(CorruptionError, match="step 3 is damaged"):
        reader.load().need(3)
    reader.close()
    assert is_of_its_step(str(path.parent), older)


def test_a_header_in_another_place_does_not_count(path: Path) -> None:
    data = bytearray(path.read_bytes())
    g = formats.unpack_superblock(bytes(data[:128]), "")
    a, b = (slice(g.header_at(i), g.header_at(i) + g.header_bytes) for i in (0, 1))
    data[a], data[b] = data[b], data[a]
    path.write_bytes(data)
    assert steps(path.parent) == [3]


def test_headers_of_another_pool_of_the_same_run_do_not_count(path: Path) -> None:
    """A removed pool's blocks may be handed out again."""
    pool = create(str(path.parent), "other")
    commit(pool, 9)
    pool.close()
    data, other = path.read_bytes(), bytearray((path.parent / "other").read_bytes())
    g = formats.unpack_superblock(data[:128], "")
    other[g.headers_offset :] = data[g.headers_offset :]
    (path.parent / "other").write_bytes(other)
    assert steps(path.parent, "other") == []


# -- a reader beside the writer ---------------------------------------------------------------------------------------


def test_a_reader_beside_a_writer_gets_one_step_or_an_error(tmp_path: Path) -> None:
    pool = create(str(tmp_path), slots=LARGE, num_slots=2)
    commit(pool, 0, LARGE)
    stop, failed = threading.Event(), []

    def write() -> None:
        step = 0
        try:
            while not stop.is_set():
                step += 1
                commit(pool, step, LARGE)
        except BaseException as e:
            failed.append(e)

    writer = threading.Thread(target=write)
    writer.start()
    outcomes = {"right": 0, "overwritten": 0}
    try:
        while min(outcomes.values()) < 3 and not failed:
            found = read_pool(str(tmp_path / "pool"), RUN)
            try:
                assert is_of_its_step(str(tmp_path), found[-1], LARGE)
                outcomes["right"] += 1
            except CorruptionError as e:
                assert e.in_base
                outcomes["overwritten"] += 1
    finally:
        stop.set()
        writer.join()
        pool.close()
    assert not failed


def test_a_reader_that_is_overtaken_while_it_looks_for_the_newest_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two slots, one read before it is committed and the other after it is overwritten: there would be none."""
    pool = create(str(tmp_path), num_slots=2)
    commit(pool, 1)
    commit(pool, 2)
    writer = pool.begin(3)
    fill(writer, SMALL, 3)
    read, reads = files.Reader.read, 0

    def overtaken(self: files.Reader, offset: int, num_bytes: int) -> bytes:
        nonlocal reads
        data = read(self, offset, num_bytes)
        reads += num_bytes == HEADER_BYTES
        if reads == 2:  # after the superblock and the first header
            writer.finish(**fields(3))
            pool.begin(4)
            reads += 1
        return data

    monkeypatch.setattr(files.Reader, "read", overtaken)
    assert steps(tmp_path) == [3]
    pool.close()


def test_names_of_the_steps_survive_what_wrote_them(tmp_path: Path) -> None:
    """No reader needs the process that wrote the pool, nor its document elsewhere: another one reads it alone."""
    pool = create(str(tmp_path))
    commit(pool, 1)
    del pool
    (manifest,) = read_pool(str(tmp_path / "pool"), RUN)
    assert [t.key for t in manifest.tensors] == [slot.key for slot in SMALL]
    assert manifest.tensors[3].strides == (1, 33)


def _never(*_: Any) -> Pool:
    raise AssertionError


def test_a_pool_has_at_least_two_slots(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two slots"):
        create(str(tmp_path), num_slots=1, medium=_never)
