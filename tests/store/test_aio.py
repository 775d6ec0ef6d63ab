"""Reads under way: the bytes of read_direct(), whatever the place, the order and the system's answer."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from everstep.memory import Bytes, Scratch, new_pages
from everstep.store import aio, files


@pytest.fixture
def blob(tmp_path: Path) -> tuple[str, bytes]:
    data = random.Random(1).randbytes(3 * 4096 * 17 + 1234)
    (tmp_path / "blob").write_bytes(data)
    return str(tmp_path / "blob"), data


def spans(size: int) -> list[tuple[int, int]]:
    lot = random.Random(2)
    found = [(0, size), (0, 1), (4096, 4096), (size - 1, 1), (size - 5000, 9000), (size, 10)]
    return found + [(a, lot.randrange(1, 40000)) for a in (lot.randrange(size) for _ in range(60))]


def test_what_is_under_way_is_what_a_plain_read_gives_in_any_order(blob: tuple[str, bytes]) -> None:
    path, data = blob
    with files.Reader(path, direct=True) as reader:
        under_way = [(a, n, reader.begin_direct(new_pages(n + 8192), a, n)) for a, n in spans(len(data))]
        random.Random(3).shuffle(under_way)
        for a, n, get in under_way:
            assert get().tobytes() == data[a : a + n]


def test_several_threads_may_wait_for_the_reads_of_one(blob: tuple[str, bytes]) -> None:
    path, data = blob
    wrong: list[tuple[int, int]] = []
    with files.Reader(path, direct=True) as reader:
        for seed in range(20):
            under_way = [(a, n, reader.begin_direct(new_pages(n + 8192), a, n)) for a, n in spans(len(data))]
            random.Random(seed).shuffle(under_way)

            def work(mine: list[tuple[int, int, Callable[[], Bytes]]]) -> None:
                wrong.extend((a, n) for a, n, get in mine if get().tobytes() != data[a : a + n])

            workers = [threading.Thread(target=work, args=(under_way[i::4],)) for i in range(4)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(60.0)
                assert not worker.is_alive()
    assert not wrong


def test_it_works_where_the_system_has_none(blob: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = blob
    monkeypatch.setattr(aio, "queue", lambda: None)
    with files.Reader(path, direct=True) as reader:
        for a, n in spans(len(data)):
            assert reader.begin_direct(new_pages(n + 8192), a, n)().tobytes() == data[a : a + n]


def test_a_read_that_the_system_refuses_is_done_again_plainly(
    blob: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = blob
    monkeypatch.setattr(aio.Queue, "wait", lambda self, ticket: -5)
    with files.Reader(path, direct=True) as reader:
        assert reader.begin_direct(new_pages(20000), 100, 9000)().tobytes() == data[100:9100]


def test_memory_outlives_reads_that_nobody_waits_for(blob: tuple[str, bytes]) -> None:
    """A worker that fails leaves reads behind: their memory must not be given to anyone while the disk writes to it."""
    path, _ = blob
    if aio.queue() is None:
        pytest.skip("no asynchronous reads here")
    held: list[object] = []

    def fail() -> None:
        queue = aio.queue()
        assert queue is not None
        with files.Reader(path, direct=True) as reader:
            for _ in range(8):
                reader.begin_direct(Scratch().take(65536), 0, 65536)
        held.append((queue.pid, len(queue._held)))

    for _ in range(20):
        worker = threading.Thread(target=fail)
        worker.start()
        worker.join()
    assert held == [(os.getpid(), 8)] * 20


def test_a_forked_child_has_a_queue_of_its_own(blob: tuple[str, bytes]) -> None:
    path, data = blob
    if aio.queue() is None:
        pytest.skip("no asynchronous reads here")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with files.Reader(path, direct=True) as reader:
                got = reader.begin_direct(new_pages(20000), 100, 9000)()
            status = 0 if np.array_equal(got, np.frombuffer(data[100:9100], np.uint8)) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
