"""A pool after a crash of the host, after the kill of its writer, and after damage: one whole step, never a mixture."""

from __future__ import annotations

import errno
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from crash_disk import Crash, Disk, Images, Nothing, Pages, Recorded, Recorder, Some, fingerprint_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_corruption import WITHIN

from everstep.errors import CorruptionError, EverstepError, StorageError
from everstep.format.documents import Manifest
from everstep.format.pool import HEADER_BYTES, unpack_superblock
from everstep.store import files
from everstep.store.bases import Slot
from everstep.store.medium import MakeMedium, Mapped, Pmem, Synced
from everstep.store.pool import Pool, read_pool
from pools import RUN, WRITTEN, FakePmem, commit, create, fill, is_of_its_step

BULK = bytes(random.Random(0).randbytes(6000))
"""In every cursor: headers are of several pages then."""
PAGED = (
    Slot(1, "param", "model.w", torch.float32, (5_000,)),
    Slot(2, "state", "optimizer.w.half", torch.bfloat16, (3_001,)),
    Slot(3, "buffer", "model.seen", torch.int64, (700,)),
)


@pytest.fixture
def shm() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="everstep-crash-", dir="/dev/shm")
    yield folder
    shutil.rmtree(folder)


# -- crashes of the host ----------------------------------------------------------------------------------------------

MEDIA: dict[str, MakeMedium] = {"mapped": Mapped, "synced": Synced, "pmem": functools.partial(Pmem, library=FakePmem())}


def live(root: str, medium: MakeMedium, num_steps: int) -> list[Recorded]:
    """A pool is made and written; slots are held and given up, a sync fails; another pool takes its place."""
    recorder = Recorder()
    failing = False

    def fault(op: str, path: str) -> None:
        recorder.begin(op, path)
        if failing and op == "sync":
            raise OSError(errno.EIO, "injected")

    def step_on(pool: Pool, first: int, last: int) -> None:
        for step in range(first, last):
            commit(pool, step, PAGED, cursor=b"%d " % step + BULK)
            files.note(f"durable {step}")

    os.mkdir(root)
    with files.observe(recorder.observe, fault):
        pool = create(root, "one", slots=PAGED, medium=medium, spare_bytes=10_000)
        step_on(pool, 1, num_steps)
        writer = pool.begin(99)
        fill(writer, PAGED, 99)
        writer.abandon()
        step_on(pool, num_steps, 2 * num_steps)
        failing = True
        with pytest.raises(StorageError):
            commit(pool, 98, PAGED)
        failing = False
        step_on(pool, 2 * num_steps, 2 * num_steps + 2)
        other = create(root, "two", slots=PAGED, medium=medium, num_slots=2, spare_bytes=10_000)
        step_on(other, 2 * num_steps + 2, 2 * num_steps + 4)
        pool.close()
        files.remove(f"{root}/one")
        files.sync_dir(root)
        step_on(other, 2 * num_steps + 4, 3 * num_steps)
        other.close()
    return recorder.events


def newest_in(folder: str) -> int:
    """The newest step of all pools; every slot that counts is whole and of its step."""
    found = [-1]
    for name in files.listing(folder):
        if not name.endswith(".tmp"):
            for manifest in read_pool(os.path.join(folder, name), RUN):
                assert is_of_its_step(folder, manifest, PAGED), f"step {manifest.step} in {name} is not what was written"
                found.append(manifest.step)
    return max(found)


def check_images(shm: str, medium: MakeMedium, fates: Callable[[int, Disk], list[Crash]], num_steps: int = 4) -> int:
    """All prefixes of what was recorded, each with several fates of what was not synced; how many images that made."""
    disk, images, seeds = Disk(f"{shm}/live"), Images(f"{shm}/image"), random.Random(3)
    seen: set[tuple[bytes, int]] = set()
    promised = -1
    for index, recorded in enumerate(live(disk.root, medium, num_steps)):
        disk.feed(recorded)
        if recorded.event.op == "note":
            promised = int(recorded.event.path.split()[1])
        for how in [Nothing()] if disk.is_settled else [Nothing(), Crash(), *fates(seeds.randrange(1 << 30), disk)]:
            tree = disk.tree(how)
            key = fingerprint_of(tree), promised
            if key in seen:
                continue
            seen.add(key)
            images.show(tree)
            where = f"after event {index} ({recorded.event.op}), {type(how).__name__} {vars(how).get('seed', '')}"
            try:
                newest = newest_in(images.root)
            except CorruptionError as e:
                raise AssertionError(f"{where}: a crash is no damage: {e}") from e
            assert newest >= promised, f"{where}: step {promised} was durable, the newest is {newest}"
    return len(seen)


def pages(num: int, unit: int = 4096) -> Callable[[int, Disk], list[Crash]]:
    return lambda seed, disk: [Pages(seed + i, unit) for i in range(num)]


def sectors(num: int) -> Callable[[int, Disk], list[Crash]]:
    return lambda seed, disk: [(Some(seed + i, b"") if i % 2 else Pages(seed + i)) for i in range(num)]


FATES = {"mapped": pages, "synced": sectors, "pmem": functools.partial(pages, unit=64)}


@pytest.mark.parametrize("medium", MEDIA)
def test_every_crash_leaves_the_last_durable_step_whole(shm: str, medium: str) -> None:
    assert check_images(shm, MEDIA[medium], FATES[medium](6)) > 100


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("medium", MEDIA)
def test_thousands_of_crashes_leave_the_last_durable_step_whole(shm: str, medium: str) -> None:
    assert check_images(shm, MEDIA[medium], FATES[medium](60), num_steps=12) > 2000


class Careless(Mapped):
    """Leaves out one kind of sync."""

    def __init__(self, path: str, geometry: Any, *, kind: str) -> None:
        super().__init__(path, geometry)
        self._kind, self._geometry = kind, geometry

    def persist(self, offset: int, num_bytes: int) -> None:
        if offset >= self._geometry.data_offset:
            kind = "data"
        elif offset >= self._geometry.headers_offset:
            kind = "invalid" if num_bytes == HEADER_BYTES else "header"
        else:
            kind = "metadata"
        if kind != self._kind:
            super().persist(offset, num_bytes)


@pytest.mark.parametrize("kind", ["data", "invalid", "header"])
def test_these_images_find_a_writer_that_leaves_out_a_sync(shm: str, kind: str) -> None:
    with pytest.raises(AssertionError, match="after event"):
        check_images(shm, functools.partial(Careless, kind=kind), pages(20))


# -- kills of the writer ----------------------------------------------------------------------------------------------


class Writer:
    """A process that forks others which write pools until they are killed."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("pool_writer.py")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([sys.executable, str(script)], text=True, **pipes)

    def _say(self, line: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def start(self, folder: str, medium: str) -> int:
        return int(self._say(f"start {folder} {medium}"))

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert self._say("wait") == "-9"

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(30) == 0


@pytest.fixture(scope="module")
def writer() -> Iterator[Writer]:
    made = Writer()
    yield made
    made.close()


def kill_often(folder: str, writer: Writer, medium: str, num_kills: int) -> None:
    delays = random.Random(num_kills)
    committed = 0
    for number in range(num_kills):
        os.mkdir(f"{folder}/{number}")
        pid = writer.start(f"{folder}/{number}", medium)
        told = Path(f"{folder}/{number}.told")
        while not told.exists() or not told.read_bytes():
            time.sleep(0.001)
        time.sleep(delays.random() * 0.02)
        writer.kill(pid)
        at_least = int.from_bytes(told.read_bytes(), "little")
        found = read_pool(f"{folder}/{number}/pool", RUN)
        for m in found:
            assert is_of_its_step(f"{folder}/{number}", m, WRITTEN), f"kill {number}: step {m.step} is a mixture"
        assert found[0].step >= at_least, f"kill {number}: step {at_least} was committed, the newest is {found[0].step}"
        committed += found[0].step
        shutil.rmtree(f"{folder}/{number}")
    assert committed > num_kills, "kills came before anything was overwritten"


@pytest.mark.parametrize(("medium", "num_kills"), [("mapped", 20), ("synced", 10)])
def test_a_killed_writer_leaves_the_last_committed_step_whole(
    shm: str, writer: Writer, medium: str, num_kills: int
) -> None:
    kill_often(shm, writer, medium, num_kills)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("medium", ["mapped", "synced"])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_hundreds_of_kills_leave_the_last_committed_step_whole(
    shm: str, tmp_path: Path, writer: Writer, medium: str, place: str
) -> None:
    kill_often(shm if place == "memory" else str(tmp_path), writer, medium, 200)


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole() -> tuple[bytes, list[Manifest]]:
    """A pool's file, and what was committed to it."""
    with tempfile.TemporaryDirectory(prefix="everstep-damage-", dir="/dev/shm") as folder:
        pool = create(folder, spare_bytes=10_000)
        written = [commit(pool, step, cursor=b"%d " % step + BULK) for step in range(1, 6)]
        pool.close()
        return Path(folder, "pool").read_bytes(), written[:1:-1]


def swap_parts(data: bytearray, place: Callable[[int], int]) -> None:
    """Headers, or data, of two slots in each other's place."""
    g = unpack_superblock(bytes(data[:128]), "")
    at, size = ((g.header_at, g.header_bytes), (g.data_at, g.slot_bytes))[place(2)]
    a = place(g.num_slots)
    b = (a + 1 + place(g.num_slots - 1)) % g.num_slots
    one, two = slice(at(a), at(a) + size), slice(at(b), at(b) + size)
    data[one], data[two] = data[two], data[one]


def check_damage(data: st.DataObject, whole: tuple[bytes, list[Manifest]], shm: str) -> None:
    content, written = whole

    def place(below: int) -> int:
        return data.draw(st.integers(0, max(0, below - 1)))

    damaged = bytearray(content)
    g = unpack_superblock(content[:128], "")
    # Most of the file is data: as often as anywhere, the damage is in one part of it.
    parts = [(0, 4096), (4096, g.headers_offset), (g.headers_offset, g.data_offset), (g.data_offset, g.num_bytes)]
    how = data.draw(st.sampled_from([*WITHIN, swap_parts]))
    if how is swap_parts:
        how(damaged, place)
    else:
        low, high = data.draw(st.sampled_from([(0, g.num_bytes), *parts]))
        part = damaged[low:high]
        how(part, place)
        damaged[low:high] = part
    Path(shm, "pool").write_bytes(damaged)
    try:
        found = read_pool(f"{shm}/pool", RUN)
    except EverstepError as e:
        assert f"{shm}/pool" in str(e), f"{how.__name__}: names no file: {e}"
        return
    assert [m for m in found if m not in written] == [], f"{how.__name__}: a slot that nobody wrote"
    assert found == [m for m in written if m in found], f"{how.__name__}: not newest first"
    for manifest in found:
        try:
            assert is_of_its_step(shm, manifest), f"{how.__name__}: step {manifest.step} is not what was written"
        except CorruptionError as e:
            assert e.in_base and e.step == manifest.step and f"{shm}/pool" in str(e)


CHECKED = settings(
    deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate], print_blob=True,
)  # fmt: skip


@settings(CHECKED, max_examples=100)
@given(data=st.data())
def test_damage_gives_what_was_written_or_a_typed_error(
    data: st.DataObject, whole: tuple[bytes, list[Manifest]], shm: str
) -> None:
    check_damage(data, whole, shm)


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(CHECKED, max_examples=2000)
@given(data=st.data())
def test_thousands_of_damages_give_what_was_written_or_a_typed_error(
    data: st.DataObject, whole: tuple[bytes, list[Manifest]], shm: str
) -> None:
    check_damage(data, whole, shm)
