"""What every medium of a pool does, and what each of them adds."""

from __future__ import annotations

import errno
import functools
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from everstep.errors import StorageError, UsageError
from everstep.format.pool import BLOCK, Geometry
from everstep.store import files, medium
from everstep.store.files import Event
from everstep.store.medium import MakeMedium, Mapped, Medium, Pmem, Synced, is_pmem, medium_for
from everstep.store.pool import read_pool
from pools import RUN, FakePmem

GEOMETRY = Geometry(RUN, RUN, 0, 3, document_bytes=100, header_bytes=BLOCK, slot_bytes=5 * BLOCK)


def fake_pmem(path: str, geometry: Geometry) -> Medium:
    return Pmem(path, geometry, library=FakePmem())


def no_direct(path: str, geometry: Geometry) -> Medium:
    """An ordinary disk without O_DIRECT."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "supports_direct", lambda folder: False)
        return Synced(path, geometry)


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "disk":
        yield str(tmp_path)
    else:
        made = tempfile.mkdtemp(prefix="everstep-medium-", dir="/dev/shm")
        yield made
        shutil.rmtree(made)


@pytest.fixture(params=[Mapped, Synced, no_direct, fake_pmem])
def made(request: pytest.FixtureRequest, folder: str) -> Iterator[Medium]:
    medium = request.param(os.path.join(folder, "pool"), GEOMETRY)
    yield medium
    medium.close()


def put(made: Medium, offset: int, data: bytes) -> None:
    made.memory(offset, len(data))[:] = np.frombuffer(data, np.uint8)
    made.wrote(offset, len(data))
    made.persist(offset, len(data))


def test_what_was_persisted_is_in_the_file_and_nothing_beside_it_changed(made: Medium, folder: str) -> None:
    expected = bytearray(GEOMETRY.num_bytes)
    made.publish()
    for offset, data in (
        (0, b"head"), (GEOMETRY.header_at(1) + 10, b"header" * 100), (GEOMETRY.data_at(0), b"a" * 5 * BLOCK),
        (GEOMETRY.data_at(1) + 256, b"b" * 5000), (GEOMETRY.header_at(1), bytes(8)),
    ):  # fmt: skip
        if offset >= GEOMETRY.data_offset:
            made.memory(GEOMETRY.data_at(1), 5 * BLOCK)[:] = 0  # a slot is filled before it is persisted
        put(made, offset, data)
        expected[offset : offset + len(data)] = data
    with open(os.path.join(folder, "pool"), "rb") as f:
        assert f.read() == bytes(expected)


def test_a_name_appears_when_it_is_published_and_stays(made: Medium, folder: str) -> None:
    (temporary,) = os.listdir(folder)
    assert temporary.startswith("pool.") and temporary.endswith(".tmp")
    put(made, 0, b"x")
    made.publish()
    assert os.listdir(folder) == ["pool"]
    made.close()
    made.close()
    assert os.listdir(folder) == ["pool"] and os.path.getsize(os.path.join(folder, "pool")) == GEOMETRY.num_bytes


def test_one_that_was_not_published_leaves_nothing(made: Medium, folder: str) -> None:
    put(made, 0, b"x")
    made.close()
    assert os.listdir(folder) == []


def test_every_block_is_there_from_the_beginning(made: Medium, folder: str) -> None:
    (name,) = os.listdir(folder)
    assert os.stat(os.path.join(folder, name)).st_blocks * 512 >= GEOMETRY.num_bytes


def test_the_observer_hears_of_writes_before_the_sync_that_makes_them_durable(made: Medium, folder: str) -> None:
    made.publish()
    heard: list[Event] = []
    at = GEOMETRY.data_at(2)
    with files.observe(heard.append):
        put(made, at, b"a" * BLOCK)
    assert [event.op for event in heard] == ["write", "sync"]
    assert {event.path for event in heard} == {os.path.join(folder, "pool")}
    write, sync = heard
    assert (write.offset, write.data) == (at, b"a" * BLOCK)
    assert (sync.offset, sync.num_bytes) in ((at, BLOCK), (0, 0))


def test_a_failed_sync_is_a_storage_error_that_names_the_file(made: Medium, folder: str) -> None:
    made.publish()

    def fault(op: str, path: str) -> None:
        if op == "sync":
            raise OSError(errno.EIO, "broken")

    with files.observe(fault=fault), pytest.raises(StorageError, match=f"sync {folder}/pool: broken"):
        made.persist(0, 1)


@pytest.mark.sampled(2)
def test_views_outlive_the_medium(made: Medium) -> None:
    """Whoever still looks at its memory does not crash."""
    view = made.memory(GEOMETRY.data_at(0), BLOCK)
    view[:] = 7
    made.close()
    gc.collect()
    assert view.sum() == 7 * BLOCK


def test_what_the_system_says_of_a_failed_sync_is_told(tmp_path: Path) -> None:
    file = files.MappedFile(str(tmp_path / "pool"), BLOCK)
    with pytest.raises(StorageError, match=r"sync .*pool"):
        file.sync_range(0, 2**64 - 2 * BLOCK)  # more than there can be
    file.close()


# -- which one is chosen ----------------------------------------------------------------------------------------------


def test_only_memory_is_not_durable(tmp_path: Path) -> None:
    for folder, make, is_durable in (
        ("/dev/shm", Mapped, False), ("/dev/shm", Synced, False), ("/dev/shm", fake_pmem, True),
        (str(tmp_path), Mapped, True), (str(tmp_path), Synced, True),
    ):  # fmt: skip
        made = make(f"{folder}/everstep-durable-{os.getpid()}", GEOMETRY)  # type: ignore[operator]
        made.close()
        assert made.is_durable is is_durable


def test_memory_is_mapped_and_a_disk_is_written_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(medium, "load_pmem", lambda: None)
    assert medium_for("/dev/shm") is Mapped
    assert medium_for(str(tmp_path)) is Synced
    for folder in ("/dev/shm", str(tmp_path)):
        assert medium_for(folder, "direct") is medium_for(folder, "staged") is Mapped
        assert medium_for(folder, "disk") is Synced
    with pytest.raises(UsageError, match="pool_mode"):
        medium_for("/dev/shm", "quick")


@pytest.mark.parametrize("is_real", [True, False])
def test_persistent_memory_is_chosen_only_if_libpmem_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_real: bool
) -> None:
    library = FakePmem(is_pmem=is_real)
    monkeypatch.setattr(medium, "load_pmem", lambda: library)
    chosen: MakeMedium = medium_for(str(tmp_path), "direct")
    assert isinstance(chosen, functools.partial) == is_real
    assert os.listdir(tmp_path) == []
    gc.collect()
    assert library.maps == {}, "the trial's mapping is still there"
    made = chosen(str(tmp_path / "pool"), GEOMETRY)
    assert made.is_durable and isinstance(made, Pmem) == is_real
    put(made, GEOMETRY.data_at(1), b"x" * 1000)
    assert [size for _, size in library.persisted] == ([1000] if is_real else [])
    made.close()


def test_memory_that_turns_out_not_to_be_persistent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"map .*not persistent memory"):
        Pmem(str(tmp_path / "pool"), GEOMETRY, library=FakePmem(is_pmem=False))
    assert os.listdir(tmp_path) == []


def test_a_library_that_cannot_map_is_told(tmp_path: Path) -> None:
    library = FakePmem()
    library.pmem_map_file = lambda *args: None  # type: ignore[assignment,method-assign,return-value]
    assert not is_pmem(str(tmp_path), library)
    with pytest.raises(StorageError, match="map "):
        Pmem(str(tmp_path / "pool"), GEOMETRY, library=library)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(medium.load_pmem() is None, reason="this system has no libpmem")
def test_libpmem_itself_maps_and_flushes_a_pool_where_it_is_told_to_take_files_for_persistent_memory(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pools import *; from everstep.store.medium import *;"
        "pool = create(sys.argv[2], medium=medium_for(sys.argv[2], 'direct')); assert isinstance(pool._medium, Pmem);"
        "manifests = [commit(pool, step) for step in range(5)];"
        "assert is_of_its_step(sys.argv[2], manifests[-1]); pool.close()"
    )
    tests = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PMEM_IS_PMEM_FORCE": "1"}  # libpmem's own, for tests
    subprocess.run([sys.executable, "-c", code, tests, str(tmp_path)], env=environment, timeout=100, check=True)
    assert [manifest.step for manifest in read_pool(str(tmp_path / "pool"), RUN)] == [4, 3, 2]
