"""Live state on its way out, tensor by tensor, while training goes on.

Between two updates tensors are read-only, so they are carried straight from where they are. Before the next update the
training thread calls guard(): what has not left yet is then copied in memory first if there is room for it, and else waited
for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from functools import partial
from itertools import compress, cycle, islice
from typing import NamedTuple, Protocol

import numpy as np
import torch

from everstep.atoms import PIECE_ELEMENTS
from everstep.capture.live import Described
from everstep.memory import Bytes, is_plain, new_pages, plain, view_bytes
from everstep.store.bases import SMALL_BYTES, Slot, piece_sum

SECOND_LOOK_BYTES = 16 << 20
LOOK_AT_PIECES = 8
"""So much, and so many pieces further each time, is hashed once more before the next update: an edit that no version counter
shows is found."""

FIRST_LOOK_BYTES = 1 << 20
"""So much, other pieces each time, is hashed at the commit itself: an edit that no version counter shows is then found, too,
if it came before the tensor had left."""

TOGETHER_BYTES, MOST_TOGETHER = 1 << 20, 256
"""So much, and so many tensors, are read at once where they are small: guard() waits no longer for them than for a piece of
a large one."""

GIVE_WAY_S = 0.05
"""At most, for each piece: a reduction that hangs must not keep states from leaving."""

SAMPLE_BYTES = 64
"""Of each piece of a parameter that left before its state was committed: an edit before the commit is part of the state."""


class Event(NamedTuple):
    """A part of a tensor, or several small ones, was carried, from where it is or from a copy, or copied (times of
    perf_counter)."""

    kind: str
    """`in place`, `snapshot`, `copy`"""
    tensor: int
    """The first of them."""
    num_bytes: int
    begun_s: float
    ended_s: float


class Writer(Protocol):
    """Where a state goes: a base or a slot of a pool."""

    @property
    def order(self) -> MutableSequence[int]:
        """Indices into the slots in the order in which they are wanted. A pool lets those be moved that it has not been
        given yet."""

    def add_pieces(self, fill: Callable[[Bytes, int], None]) -> None: ...

    def add_together(self, count: int, fill: Callable[[list[torch.Tensor]], None]) -> None: ...

    def sums(self) -> list[tuple[int, ...]]: ...

    def finish(self, **fields: object) -> object: ...

    def abandon(self) -> None: ...


class Room:
    """Memory for what must be copied before it has left. This one has as much as is asked for."""

    limit = 0

    def take(self, num_bytes: int) -> Bytes | None:
        """Memory, or None if there is none left."""
        return new_pages(num_bytes)

    def give_back(self, num_taken: int) -> None:
        """What so many calls of take() gave."""


class NoRoom(Room):
    """Nothing is copied: what has not left is waited for."""

    def take(self, num_bytes: int) -> Bytes | None:
        return None


class Staging(Room):
    """Up to so many bytes, which are used again and again: from the start when all has been given back, since a state that
    was given up may still be on its way when copies of the next are made. Any thread."""

    def __init__(self, num_bytes: int) -> None:
        self.limit = num_bytes
        self._memory: Bytes = np.empty(0, np.uint8)
        self._used = self._num_taken = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Bytes | None:
        with self._lock:
            first = -(-self._used // 64) * 64
            if first + num_bytes > self.limit:
                return None
            if not len(self._memory):
                self._memory = new_pages(self.limit)  # takes no memory before it is used
            self._used = first + num_bytes
            self._num_taken += 1
            return self._memory[first : first + num_bytes]

    def give_back(self, num_taken: int) -> None:
        with self._lock:
            self._num_taken -= num_taken
            if not self._num_taken:
                self._used = 0


def _piece_bytes(slot: Slot) -> int:
    return PIECE_ELEMENTS * slot.dtype.itemsize


class Leaving:
    """One state. Made on the training thread while it is S(step); carried by another."""

    torn = False
    """Something changed a tensor before it had left: what arrives is of no step."""
    has_left = False
    """Nothing of it is looked at in the live objects any more."""
    is_cancelled = False

    def __init__(
        self, live: Described, room: Room, *, pace: Callable[[int], float] | None = None, copy_first: bool = False,
        copy_at: Callable[[int], float] | None = None, give_way: Callable[[], bool] | None = None, is_ready: bool = True,
        max_copied: int | None = None,
    ) -> None:  # fmt: skip
        """`pace`: so many bytes have been carried: how many seconds to wait. `copy_first`: what is ready is copied at once.
        `copy_at`: when (monotonic) to begin to copy the rest, of so many bytes, since the next update is near. `give_way`:
        whether somebody else needs the memory's bandwidth more. `max_copied`: no more bytes are copied. Not `is_ready`:
        tensors are as they will be stored only when make_ready() or complete() says so, and this is no state before
        complete()."""
        self._live = live
        self._is_ready = [is_ready] * len(live.tensors)
        self._is_whole = is_ready
        self._samples: list[tuple[int, int, int, Bytes]] = []
        """Of what left before complete(): tensor, first byte, stride, and every so many of a piece's bytes."""
        self._give_way = give_way
        self._is_awaited = self._is_guarded = False
        self._settled = list(live.settled)
        self._versions = [t._version for t in live.tensors]
        self._bytes: list[Bytes | None] = [None] * len(live.tensors)
        self._carried = [0] * len(live.tensors)
        """Of each tensor, bytes from its beginning that have been carried."""
        self._copied_from = live.sizes[:]
        """And from where on pieces have been copied:"""
        self._copies: dict[tuple[int, int], Bytes] = {}
        """By tensor and first byte."""
        self._order: Sequence[int] = range(len(live.tensors))
        self._max_copied = max_copied
        self._room = room
        self._num_taken = 0
        self._pace, self._copy_first, self._copy_at = pace, copy_first, copy_at
        self._copied_rest = False
        self._rest = live.num_bytes - sum(compress(self._copied_from, live.settled))
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._over = False
        self._first_look: dict[tuple[int, int], int] = {}
        self.edited: list[int] = []
        """uids of what was changed too early."""
        self.changed: list[int] = []
        """uids of what was changed after make_ready() and before complete()."""
        self.is_deceived = False
        """Some of that was not shown by a version counter."""
        self.copy_s = 0.0
        self.copied_bytes = 0
        self.early_bytes = 0
        """What left before complete()."""
        self.idle_s = 0.0
        """There was nothing to carry yet."""
        self.gave_way_s = 0.0
        self.left_at: float | None = None
        """When (perf_counter) nothing of it was looked at in the live objects any more."""
        self.trace: list[Event] = []
        """What happened, in the order in which it ended."""

    # -- the training thread ------------------------------------------------------------------------------------------

    def first_look(self, turn: int) -> None:
        """At the commit: what some of it is, to be compared with what arrives."""
        slots, left = self._live.slots, FIRST_LOOK_BYTES
        for k in range(len(slots)):
            index = (turn + k) % len(slots)
            view = self._view(index)
            if view is None:
                continue
            step = _piece_bytes(slots[index])
            piece = turn // len(slots) % -(-max(len(view), 1) // step)
            data = view[piece * step : (piece + 1) * step]
            left -= len(data)
            if left < 0 and self._first_look:
                return
            self._first_look[index, piece] = piece_sum(data, slots[index].uid, piece * PIECE_ELEMENTS)

    def _view(self, index: int) -> Bytes | None:
        """The memory of a tensor that was no copy at the commit, if its bytes can be looked at where they are."""
        live = self._live
        if live.settled[index]:
            return None
        tensor, found = live.tensors[index], live.views[index]
        return view_bytes(tensor) if found is None and is_plain(tensor) else found

    def guard(self, indices: Iterable[int] | None = None) -> None:
        """These tensors (all, if not told) are about to change: return when they may. Waits for no more than it must."""
        with self._lock:
            self._is_guarded = True
        if self._over or self.has_left:
            return
        self._is_awaited = True
        wanted = [i for i in (range(len(self._settled)) if indices is None else indices) if not self._settled[i]]
        for index in self._last_first(wanted):
            with self._lock:
                if self._over or (not self._settled[index] and not self._copy(index)):
                    break
        for index in wanted:
            with self._lock:
                self._moved.wait_for(lambda: self._settled[index] or self._over)  # noqa: B023  # called here only
        self._is_awaited = False
        if indices is None:
            self._has_left()

    def is_ready(self, index: int) -> bool:
        return self._is_ready[index]

    def make_ready(self, indices: Iterable[int]) -> None:
        """These tensors are as they will be stored, until guard() is called for them."""
        with self._lock:
            if self._over:  # it failed, or was cancelled
                return
            for index in indices:
                self._is_ready[index] = True
                self._versions[index] = self._live.tensors[index]._version
            self._moved.notify_all()

    def complete(self, live: Described, turn: int = 0) -> bool:
        """The state is this: whether that is what has been made ready, so that the rest can follow."""
        with self._lock:
            old = self._live
            if self._over or live.slots != old.slots:
                return False
            ready = [index for index, is_ready in enumerate(self._is_ready) if is_ready]
            self.changed = [
                live.slots[i].uid
                for i in ready
                if live.settled[i] or live.tensors[i] is not old.tensors[i] or live.tensors[i]._version != self._versions[i]
            ]
            if self.changed or not self._is_as_sampled():
                return False
            for index in set(range(len(live.tensors))).difference(ready):
                old.tensors[index], old.views[index] = live.tensors[index], live.views[index]
                self._settled[index] = live.settled[index]
                self._versions[index] = live.tensors[index]._version
            unsettled = [i for i, settled in enumerate(self._settled) if not settled]
            self._rest = sum(self._copied_from[i] - self._carried[i] for i in unsettled)
            self.first_look(turn)
            self._is_ready = [True] * len(live.tensors)
            self._is_whole = True
            self._moved.notify_all()
        return True

    def _is_as_sampled(self) -> bool:
        """Whether what has left early is still what it was, as far as samples tell."""
        for index, start, stride, sample in self._samples:
            data = view_bytes(self._live.tensors[index])
            if not np.array_equal(data[start :: stride][: len(sample)], sample):
                self.changed.append(self._live.slots[index].uid)
                self.is_deceived = True
        return not self.is_deceived

    def cancel(self) -> None:
        """It will not be a state of any step."""
        self.is_cancelled = True
        self.end()

    # -- the thread that carries --------------------------------------------------------------------------------------

    def carry(self, writer: Writer) -> None:
        """All of it, in the writer's order as far as tensors are ready; returns when it is a state, or was cancelled.
        writer.finish(), and forget() whatever happens, are the caller's."""
        order = self._order = writer.order
        k = 0
        while k < len(order):
            with self._lock:
                self._wait_for(lambda: self._first_ready(order, k) is not None)  # noqa: B023  # called here only
                found = self._first_ready(order, k)
                if self._over or found is None:
                    return
                if found != k:
                    order.insert(k, order.pop(found))
                together = self._together(order, k)
            if len(together) > 1:
                writer.add_together(len(together), partial(self._fill_together, together))
            else:
                writer.add_pieces(partial(self._fill, together[0]))
            with self._lock:
                self._settle(together)
                for index in together:
                    self._bytes[index] = None
            k += len(together)
        with self._lock:
            self._wait_for(lambda: self._is_whole)
        self._has_left()

    def _together(self, order: Sequence[int], start: int) -> list[int]:
        """What leaves next: small tensors that follow each other and are ready; or one."""
        found: list[int] = []
        left = TOGETHER_BYTES
        for index in islice(order, start, start + MOST_TOGETHER):
            num_bytes = self._live.sizes[index]
            left -= num_bytes
            if num_bytes > SMALL_BYTES or left < 0 or not self._is_ready[index]:
                break
            found.append(index)
        return found or [order[start]]

    def _first_ready(self, order: Sequence[int], start: int) -> int | None:
        return next((k for k in range(start, len(order)) if self._is_ready[order[k]]), None)

    def _wait_for(self, is_so: Callable[[], bool]) -> None:
        """With the lock; until it is so, or all is over."""
        if self._over or is_so():
            return
        begun = time.perf_counter()
        self._moved.wait_for(lambda: self._over or is_so())
        self.idle_s += time.perf_counter() - begun

    def _has_left(self) -> None:
        self.has_left = True
        self.left_at = self.left_at or time.perf_counter()

    def end(self) -> None:
        """Nobody is waited for any longer, whatever has happened."""
        with self._lock:
            self._over = self.has_left = True
            self._moved.notify_all()

    def forget(self) -> None:
        """Let go of all tensors."""
        self.end()
        with self._lock:
            self._live, self._bytes, self._copies = Described(), [], {}
            num_taken, self._num_taken = self._num_taken, 0
        self._room.give_back(num_taken)

    def second_look(self, sums: Sequence[Sequence[int]], turn: int) -> None:
        """Whether some of what has left, other pieces at each turn, is still what it was, as long as no update comes.
        `sums`: of each tensor's pieces, as they have arrived."""
        for (index, piece), then in self._first_look.items():
            if sums[index][piece] != then:
                self._was_edited(index)
        views = [self._view(index) for index in range(len(sums))]
        pieces = [(i, view, p) for i, view in enumerate(views) if view is not None for p in range(len(sums[i]))]
        first = turn * LOOK_AT_PIECES % max(len(pieces), 1)
        turns = islice(cycle(pieces), first, first + len(pieces))
        left = SECOND_LOOK_BYTES
        while left > 0:
            with self._lock:
                if self._is_guarded:
                    return
                looked = self._look_at(turns, sums)
            left = left - looked if looked else 0

    def _look_at(self, pieces: Iterator[tuple[int, Bytes, int]], sums: Sequence[Sequence[int]]) -> int:
        """With the lock: the next of them, as many as guard() may wait for. How many bytes; 0 if there is none left."""
        looked = 0
        for index, view, piece in islice(pieces, MOST_TOGETHER):
            slot = self._live.slots[index]
            step = _piece_bytes(slot)
            data = view[piece * step : (piece + 1) * step]
            if piece_sum(data, slot.uid, piece * PIECE_ELEMENTS) != sums[index][piece]:
                self._was_edited(index)
            looked += max(len(data), 1)
            if looked >= TOGETHER_BYTES:
                break
        return looked

    def _was_edited(self, index: int) -> None:
        self.torn = True
        uid = self._live.slots[index].uid
        if uid not in self.edited:
            self.edited.append(uid)

    def _fill(self, index: int, region: Bytes, start: int) -> None:
        begun = time.perf_counter()
        with self._lock:  # guard() may put a copy in the tensor's place between two pieces
            if self._over:
                return  # what is being written will be given up
            copy = self._copies.pop((index, start), None)
            np.copyto(region, self._source(index)[start : start + len(region)] if copy is None else copy)
            kind = "snapshot" if copy is not None or self._settled[index] else "in place"
            if kind == "in place":
                self._rest -= len(region)
                self._carried[index] = start + len(region)
                if self._carried[index] == self._copied_from[index]:
                    self._settle([index])
            if not self._is_whole:
                self.early_bytes += len(region)
                if kind == "in place":
                    self._sample(index, region, start)
        self._carry_on(len(region))
        self.trace.append(Event(kind, index, len(region), begun, time.perf_counter()))

    def _fill_together(self, indices: Sequence[int], into: list[torch.Tensor]) -> None:
        """Small tensors, each in one piece: what _fill() does, for all of them at once."""
        begun = time.perf_counter()
        with self._lock:
            are_there = not self._over and self._copies.keys().isdisjoint((i, 0) for i in indices)
            if are_there:
                in_place, num_bytes = self._copy_together(indices, into)
        if not are_there:
            for index, tensor in zip(indices, into, strict=True):
                self._fill(index, view_bytes(tensor), 0)
            return
        self._carry_on(num_bytes)
        ended = time.perf_counter()
        between = begun + (ended - begun) * in_place / max(num_bytes, 1)
        self.trace.append(Event("in place", indices[0], in_place, begun, between))
        self.trace.append(Event("snapshot", indices[0], num_bytes - in_place, between, ended))

    def _copy_together(self, indices: Sequence[int], into: list[torch.Tensor]) -> tuple[int, int]:
        """With the lock. How many bytes were carried from where they are, and in all."""
        live = self._live
        torch._foreach_copy_(into, [live.tensors[i] for i in indices])  # one call, and the interpreter is free meanwhile
        there = [i for i in indices if not self._settled[i]]
        for i in there:
            self._carried[i] = live.sizes[i]
        self._settle(there)
        in_place, num_bytes = (sum(live.sizes[i] for i in each) for each in (there, indices))
        self._rest -= in_place
        if not self._is_whole:
            self.early_bytes += num_bytes
            for index, tensor in zip(indices, into, strict=True):
                if index in there:
                    self._sample(index, view_bytes(tensor), 0)
        return in_place, num_bytes

    def _carry_on(self, num_bytes: int) -> None:
        """So much has left: keep to the pace, and out of the way of others."""
        if self._pace is not None or self._copy_first or self._copy_at is not None:
            self._wait(num_bytes)
        if self._give_way is not None and self._give_way():
            begun = time.monotonic()
            until = begun + GIVE_WAY_S
            while self._give_way() and not self._is_awaited and not self._over and time.monotonic() < until:
                time.sleep(0.0005)
            self.gave_way_s += time.monotonic() - begun

    def _wait(self, num_bytes: int) -> None:
        """Keep to the pace, and begin to copy in time."""
        until = time.monotonic() + (self._pace(num_bytes) if self._pace is not None else 0.0)
        while not self._over:
            now = time.monotonic()
            copy_at = self._time_to_copy()
            if now >= copy_at:
                self._copy_rest()
            if now >= until:
                return
            time.sleep(max(0.0, min(until, copy_at, now + 0.01) - now))

    def _time_to_copy(self) -> float:
        """When (monotonic)."""
        if self._copied_rest or self.has_left:
            return float("inf")
        if self._copy_first:
            return float("-inf")
        # As long as it is no state its next update is a whole step away.
        return self._copy_at(self._rest) if self._copy_at is not None and self._is_whole else float("inf")

    def _copy_rest(self) -> None:
        """Of what is ready: there may be more later."""
        self._copied_rest = all(self._is_ready)
        for index in self._last_first(i for i, settled in enumerate(self._settled) if not settled):
            with self._lock:
                if self._is_ready[index] and not self._settled[index] and not self._copy(index):
                    return

    def _last_first(self, indices: Iterable[int]) -> list[int]:
        """What will be carried last is copied first: the link may come to the others in time."""
        place = {index: k for k, index in enumerate(self._order)}
        return sorted(indices, key=lambda index: -place.get(index, 0))

    # -- either, with the lock ----------------------------------------------------------------------------------------

    def _source(self, index: int) -> Bytes:
        found = self._bytes[index]
        if found is None:
            found = self._bytes[index] = self._live.views[index]
        if found is None:
            tensor = self._live.tensors[index]
            dense = plain(tensor)
            found = self._bytes[index] = view_bytes(dense)
            if dense.data_ptr() != tensor.data_ptr() and not self._settled[index]:
                self._rest -= len(found)
                self._settle([index])  # that was a copy already
        return found

    def _copy(self, index: int) -> bool:
        """What is left of a tensor, its last pieces first. Whether there was room for all of it."""
        source, step = self._source(index), _piece_bytes(self._live.slots[index])
        end = self._copied_from[index]
        while not self._settled[index] and end > self._carried[index]:
            begun = time.perf_counter()
            start = (end - 1) // step * step
            if self._max_copied is not None and self.copied_bytes + end - start > self._max_copied:
                return False
            memory = self._room.take(end - start)
            if memory is None:
                return False
            self._num_taken += 1
            np.copyto(memory, source[start:end])
            if not self._is_whole:
                self._sample(index, memory, start)
            self._copies[index, start] = memory
            ended = time.perf_counter()
            self.copied_bytes += end - start
            self.copy_s += ended - begun
            self.trace.append(Event("copy", index, end - start, begun, ended))
            self._rest -= end - start
            end = self._copied_from[index] = start
        self._settle([index])
        return True

    def _sample(self, index: int, data: Bytes, start: int) -> None:
        """Keep some bytes of what has left of a parameter: that they are edited after an update is usual of those only."""
        if self._live.slots[index].role == "param":
            stride = max(1, len(data) // SAMPLE_BYTES) | 1  # odd: all bytes of elements get their turn
            self._samples.append((index, start, stride, data[::stride].copy()))

    def _settle(self, indices: Iterable[int]) -> None:
        """These tensors have been read: were they left alone until now?"""
        for index in indices:
            if not self._settled[index]:
                if self._live.tensors[index]._version != self._versions[index]:
                    self._was_edited(index)
                self._settled[index] = True
        self._moved.notify_all()
