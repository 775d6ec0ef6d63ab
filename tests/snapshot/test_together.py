"""Small tensors leave together: whatever happens meanwhile, each arrives as it was, or is found to have been edited."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep.capture import leaving as leaving_module
from everstep.capture.leaving import Leaving, NoRoom, Room
from everstep.capture.live import Described
from everstep.memory import CODE_BY_DTYPE, plain, view_bytes
from everstep.store.bases import BaseReader, BaseWriter, piece_sums
from everstep.store.medium import Mapped
from everstep.store.pool import Pool, read_pool
from pools import LAYOUT, RUN, fields, read_back


class Written:
    """A writer that keeps everything; the first that leave together wait before they are copied."""

    def __init__(self, live: Described) -> None:
        self.order = list(range(len(live.slots)))
        self._live = live
        self._next = 0
        self.data: list[Any] = [torch.zeros(slot.shape, dtype=slot.dtype) for slot in live.slots]
        self.runs: list[int] = []
        self.begun, self.go = threading.Event(), threading.Event()

    def add_pieces(self, fill: Callable[[Any, int], None]) -> None:
        fill(view_bytes(self.data[self.order[self._next]]), 0)
        self.runs.append(1)
        self._next += 1

    def add_together(self, count: int, fill: Callable[[list[torch.Tensor]], None]) -> None:
        self.begun.set()
        assert self.go.wait(20)
        fill([self.data[i] for i in self.order[self._next : self._next + count]])
        self.runs.append(count)
        self._next += count

    def sums(self) -> list[tuple[int, ...]]:
        return [piece_sums(view_bytes(t), s.uid, 4) for t, s in zip(self.data, self._live.slots, strict=True)]


def described(num: int) -> tuple[Described, list[torch.Tensor]]:
    live, tensors = Described(), [torch.full((64,), float(i)) for i in range(num)]
    for i, tensor in enumerate(tensors):
        live.add(i, "param", f"p{i}", tensor, settled=False)
    live.find_views()
    return live, tensors


def begun(leaving: Leaving, writer: Written) -> threading.Thread:
    """On its way, and about to copy what leaves together."""
    thread = threading.Thread(target=leaving.carry, args=(writer,))
    thread.start()
    assert writer.begun.wait(20)
    return thread


def first(writer: Written) -> list[float]:
    return [float(t[0]) for t in writer.data]


def test_a_guard_that_copies_one_of_them_lets_the_others_leave_from_where_they_are() -> None:
    live, tensors = described(5)
    leaving, writer = Leaving(live, Room()), Written(live)
    thread = begun(leaving, writer)
    leaving.guard([1, 3])
    for index in (1, 3):
        tensors[index].fill_(-1.0)
    writer.go.set()
    thread.join(20)
    assert first(writer) == [0.0, 1.0, 2.0, 3.0, 4.0] and writer.runs == [5]
    assert not leaving.torn and leaving.has_left and leaving.copied_bytes == 512
    kinds = [event.kind for event in leaving.trace if event.num_bytes]
    assert sorted(kinds) == ["copy", "copy", "in place", "in place", "in place", "snapshot", "snapshot"]


@pytest.mark.parametrize("indices", [None, [2]])
def test_a_guard_without_room_waits_until_all_of_them_have_left(indices: list[int] | None) -> None:
    live, tensors = described(4)
    leaving, writer = Leaving(live, NoRoom()), Written(live)
    thread = begun(leaving, writer)

    def update() -> None:
        leaving.guard(indices)
        tensors[2].fill_(-1.0)

    training = threading.Thread(target=update)
    training.start()
    training.join(0.05)
    assert training.is_alive(), "it has not left"
    writer.go.set()
    training.join(20)
    thread.join(20)
    assert first(writer) == [0.0, 1.0, 2.0, 3.0] and not leaving.torn


def test_no_more_leave_together_than_a_guard_may_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    live, _ = described(10)
    live.add(99, "param", "large", torch.full((20_000,), 10.0), settled=False)
    writer = Written(live)
    writer.go.set()
    monkeypatch.setattr(leaving_module, "MOST_TOGETHER", 4)
    leaving = Leaving(live, Room())
    leaving.carry(writer)
    assert writer.runs == [4, 4, 2, 1] and first(writer) == [float(i) for i in range(11)]
    leaving.second_look(writer.sums(), turn=7)
    assert not leaving.torn


def test_one_that_is_edited_before_it_has_left_is_found_and_named() -> None:
    live, tensors = described(6)
    leaving, writer = Leaving(live, Room()), Written(live)
    thread = begun(leaving, writer)
    tensors[4].add_(1.0)
    writer.go.set()
    thread.join(20)
    assert leaving.torn and leaving.edited == [4]


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("when", ["before it has left", "after"])
def test_one_that_is_edited_without_a_trace_is_found(index: int, when: str) -> None:
    live, tensors = described(6)
    leaving, writer = Leaving(live, Room()), Written(live)
    leaving.first_look(3)
    thread = begun(leaving, writer)
    if when == "before it has left":
        tensors[index].data.add_(1.0)
    writer.go.set()
    thread.join(20)
    if when == "after":
        tensors[index].data.add_(1.0)
    assert not leaving.torn
    leaving.second_look(writer.sums(), turn=5)
    assert leaving.torn and leaving.edited == [index]


def test_nothing_is_looked_at_any_more_when_an_update_has_come() -> None:
    live, tensors = described(6)
    leaving, writer = Leaving(live, Room()), Written(live)
    writer.go.set()
    leaving.carry(writer)
    leaving.guard()
    tensors[2].add_(1.0)
    leaving.second_look(writer.sums(), turn=0)
    assert not leaving.torn


def test_a_state_that_is_cancelled_meanwhile_ends() -> None:
    live, _ = described(4)
    leaving, writer = Leaving(live, NoRoom()), Written(live)
    thread = begun(leaving, writer)
    leaving.cancel()
    leaving.guard()
    writer.go.set()
    thread.join(20)
    assert not thread.is_alive() and first(writer) == [0.0] * 4, "nothing is copied any more"


@pytest.mark.parametrize("edit", ["none", "with a trace", "without", "of one that has not left"])
def test_what_leaves_together_before_the_commit_is_looked_at_again_at_it(edit: str) -> None:
    live, tensors = described(6)
    leaving, writer = Leaving(live.copy(), Room(), is_ready=False), Written(live)
    thread = threading.Thread(target=leaving.carry, args=(writer,))
    thread.start()
    writer.go.set()
    leaving.make_ready([5, 2, 3])
    while leaving.early_bytes < 3 * 256:
        assert thread.is_alive()
    if edit == "with a trace":
        tensors[3].add_(1.0)
    elif edit == "without":
        tensors[3].data.add_(1.0)
    elif edit == "of one that has not left":
        tensors[1].data.fill_(7.0)
    is_state = leaving.complete(live)
    assert is_state == (edit in ("none", "of one that has not left"))
    assert leaving.changed == ([] if is_state else [3]) and leaving.is_deceived == (edit == "without")
    if not is_state:
        leaving.cancel()
    thread.join(20)
    if is_state:
        assert first(writer) == [0.0, 7.0 if edit != "none" else 1.0, 2.0, 3.0, 4.0, 5.0]
        assert writer.order[:3] == [2, 3, 5] and writer.order[3:] == [0, 1, 4]


def odd_tensors() -> list[torch.Tensor]:
    """Random bits of every dtype, in all ways that a tensor can lie in memory."""
    generator = torch.Generator().manual_seed(1)
    found = [torch.tensor(True), torch.zeros(0), torch.zeros(3, 0, dtype=torch.int64)]
    for dtype in CODE_BY_DTYPE:
        if dtype is torch.bool:
            bits = torch.randint(2, (24,), generator=generator).bool()
        else:
            raw = torch.randint(256, (24 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            bits = raw.view(dtype)
        found += [bits, bits.reshape(4, 6).t(), bits[3].reshape(()), bits[::2], bits[:1].expand(5)]
        if dtype.is_complex:
            found += [bits.conj(), bits.imag]
    return found


def stored_bytes(live: Described, tmp_path: Path, name: str) -> tuple[list[bytes], bytes]:
    """What a pool gives back, and its slot's bytes in the file."""
    pool = Pool.create(
        str(tmp_path), name, run=RUN, rank=0, layout=LAYOUT, slots=live.slots, num_slots=2, medium=Mapped
    )
    writer = pool.begin(1)
    leaving = Leaving(live, Room())
    leaving.carry(writer)
    assert not leaving.torn and leaving.has_left
    writer.finish(**fields(1))
    (manifest,) = read_pool(pool.path, RUN)
    start = min(t.offset for t in manifest.tensors)
    raw = Path(pool.path).read_bytes()[start : start + pool._geometry.slot_bytes]
    pool.close()
    return [each.tobytes() for each in read_back(str(tmp_path), manifest)], raw


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_bit_of_every_dtype_arrives_the_same_together_and_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Described()
    for i, tensor in enumerate(odd_tensors()):
        live.add(i, "param", f"p{i}", tensor, settled=i % 3 == 0)
    live.add(10**6, "param", "large", torch.arange(20_000.0), settled=False)
    expected = [view_bytes(plain(t)).tobytes() for t in live.tensors]
    with monkeypatch.context() as patched:
        patched.setattr(leaving_module, "SMALL_BYTES", -1)
        one_by_one = stored_bytes(live, tmp_path, "one")
    together = stored_bytes(live, tmp_path, "all")
    assert together == one_by_one and together[0] == expected


def test_a_base_holds_what_was_added_together(tmp_path: Path) -> None:
    live, _ = described(7)
    writer = BaseWriter(str(tmp_path), 3, live.slots, direct=False)
    Leaving(live, Room()).carry(writer)
    assert writer.sums() == [t.sums for t in writer.stored()] and len(writer.sums()) == 7
    manifest = writer.finish(**fields(3))
    reader = BaseReader(writer.folder, manifest)
    reader.check()
    reader.close()
    assert [np.frombuffer(raw, np.float32)[0] for raw in read_back(writer.folder, manifest)] == list(range(7))
