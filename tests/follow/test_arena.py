"""Where a shadow keeps its state, and the memory that it holds for the next trainer."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from everstep.atoms import Layout
from everstep.fold import State
from everstep.follow import arena
from everstep.follow.arena import AtHand, Home
from everstep.format.documents import StoredTensor
from everstep.memory import HUGE_BYTES, make_huge, map_shared, new_pages, same_bits
from everstep.store import shared


def of_bytes(num_bytes: int) -> list[StoredTensor]:
    return [StoredTensor(1, "param", "w", "float32", (num_bytes // 4,), 0, num_bytes, ())]


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "available_bytes", lambda: 1 << 40)


@pytest.mark.usefixtures("plenty")
def test_memory_that_is_held_is_there_and_is_gone_when_it_has_been_given_back() -> None:
    at_hand = AtHand()
    at_hand.hold(of_bytes(40 << 20))
    held = at_hand._memory
    assert at_hand.num_bytes >= 40 << 20
    with open("/proc/self/pagemap", "rb", buffering=0) as f:  # is every page there?
        for part in held:
            f.seek((part.ctypes.data >> 12) * 8)
            pages = f.read((len(part) >> 12) * 8)
            assert all(pages[i * 8 + 7] & 0x80 for i in range(len(part) >> 12))
    at_hand.give_back()
    assert at_hand.num_bytes == 0
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name.endswith("(_drop_on)"):
            thread.join()
    assert held == [], "each part is let go of on another processor"
    at_hand.give_back()


@pytest.mark.usefixtures("plenty")
def test_who_comes_while_memory_is_being_touched_does_not_wait_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    at_hand = AtHand()
    touched: list[int] = []

    class Part:
        """Of which touching says so, and where somebody comes after a while."""

        def __len__(self) -> int:
            return 400 << 20

        def __setitem__(self, key: slice, value: int) -> None:
            touched.append(key.start)
            if len(touched) == 3:
                comes.start()
                comes.join()

    comes = threading.Thread(target=at_hand.give_back)
    monkeypatch.setattr(arena, "new_pages", lambda num_bytes: Part())
    at_hand.hold(of_bytes(800 << 20))
    assert at_hand.num_bytes == 0
    assert len(touched) == 3


def test_no_memory_is_held_where_it_is_scarce_or_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    at_hand = AtHand()
    monkeypatch.setattr(shared, "available_bytes", lambda: 2 << 30)
    at_hand.hold(of_bytes(1 << 30))
    assert at_hand.num_bytes == 0
    monkeypatch.setattr(shared, "available_bytes", lambda: 1 << 40)

    def fails(num_bytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(arena, "new_pages", fails)
    at_hand.hold(of_bytes(1 << 20))
    assert at_hand.num_bytes == 0


def test_a_state_stays_what_it_is_while_its_pages_are_put_together(memory: Path) -> None:
    home = Home(str(memory))
    generator = torch.Generator().manual_seed(0)
    right = {uid: torch.randn(1 << 20, generator=generator) for uid in range(1, 12)}
    state = State(1, Layout((), (), ()), {uid: t.clone() for uid, t in right.items()}, {}, {})
    assert not home.can_be_huge
    assert home.settle(state) and home.can_be_huge
    turns = 0
    while home.can_be_huge:
        home.make_huge()
        turns += 1
        assert turns < 100
    assert turns > 1, "whoever asks waits for one of these at most"
    assert all(same_bits(state.tensors[uid], t) for uid, t in right.items())
    for tensor in state.tensors.values():
        tensor.add_(1)
    assert home._arena is not None
    with open(home._arena.path, "rb") as f:
        for uid, tensor in state.tensors.items():
            offset = home._arena.offset_of(tensor)
            assert offset is not None
            f.seek(offset)
            assert f.read(tensor.nbytes) == (right[uid] + 1).numpy().tobytes()
    state.tensors[12] = torch.ones(1 << 20)
    assert home.settle(state) and home.can_be_huge, "there is more now"
    home.close()


def test_a_file_is_mapped_where_it_can_be_in_huge_pages(memory: Path) -> None:
    with open(memory / "file", "w+b") as f:
        f.truncate(5 * HUGE_BYTES + 4096)
        mapped = map_shared(f.fileno(), 5 * HUGE_BYTES + 4096)
        assert len(mapped) == 5 * HUGE_BYTES + 4096 and mapped.ctypes.data % HUGE_BYTES == 0
        mapped[-1] = 7
        f.seek(len(mapped) - 1)
        assert f.read() == b"\7"
        last = mapped[-4096:]
        del mapped
        assert last[-1] == 7, "a view keeps it"
        del last
        with open("/proc/self/maps") as maps:
            assert f.name not in maps.read(), "it goes with the last view"
    with pytest.raises(OSError, match="Errno 9"):
        map_shared(-1, 4096)


def test_pages_that_cannot_be_put_together_stay_as_they_are() -> None:
    memory = new_pages(mmap.PAGESIZE)
    memory[:] = 5
    assert not make_huge(memory[1:])  # not at the beginning of a page
    assert (memory == 5).all()


def test_tensors_are_of_the_model_or_of_what_is_known_of_it() -> None:
    stored = of_bytes(4)[0]
    of_model = [msgspec.structs.replace(stored, role=role).of_model for role in ("param", "buffer", "state", "grad")]
    assert of_model == [True, True, False, False]
