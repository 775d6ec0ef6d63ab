"""Live state on its way out, tensor by tensor, while training goes on.

Between two updates tensors are read-only, so they are carried straight from where they are. Before the next update the
training thread calls guard(): what has not left yet is then copied in memory first if there is room for it, and else waited
for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from everstep.atoms import PIECE_ELEMENTS
from everstep.capture.live import Described
from everstep.format.documents import Manifest, StoredTensor
from everstep.memory import Bytes, new_pages, plain, view_bytes
from everstep.store.bases import Slot, piece_sum

SECOND_LOOK_BYTES = 16 << 20
LOOK_AT_PIECES = 8
"""So much, and so many pieces further each time, is hashed once more before the next update: an edit that no version counter
shows is found."""

FIRST_LOOK_BYTES = 1 << 20
"""So much, other pieces each time, is hashed at the commit itself: an edit that no version counter shows is then found, too,
if it came before the tensor had left."""

GIVE_WAY_S = 0.05
"""At most, for each piece: a reduction that hangs must not keep states from leaving."""


class Event(NamedTuple):
    """A part of a tensor was carried, from where it is or from a copy, or copied (times of perf_counter)."""

    kind: str
    """`in place`, `snapshot`, `copy`"""
    tensor: int
    num_bytes: int
    begun_s: float
    ended_s: float


class Writer(Protocol):
    """Where a state goes: a base or a slot of a pool."""

    @property
    def order(self) -> Sequence[int]:
        """Indices into the slots in the order in which add_pieces() wants them."""

    def add_pieces(self, fill: Callable[[Bytes, int], None]) -> None: ...

    def stored(self) -> list[StoredTensor]: ...

    def finish(self, **fields: object) -> Manifest: ...

    def abandon(self) -> None: ...


class Room:
    """Memory for what must be copied before it has left. This one has as much as is asked for."""

    limit = 0

    def take(self, num_bytes: int) -> Bytes | None:
        """Memory, or None if there is none left."""
        return new_pages(num_bytes)

    def give_back(self) -> None:
        """All that was taken."""


class NoRoom(Room):
    """Nothing is copied: what has not left is waited for."""

    def take(self, num_bytes: int) -> Bytes | None:
        return None


class Staging(Room):
    """Up to so many bytes, which are used again and again."""

    def __init__(self, num_bytes: int) -> None:
        self.limit = num_bytes
        self._memory: Bytes = np.empty(0, np.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Bytes | None:
        first = -(-self._used // 64) * 64
        if first + num_bytes > self.limit:
            return None
        if not len(self._memory):
            self._memory = new_pages(self.limit)  # takes no memory before it is used
        self._used = first + num_bytes
        return self._memory[first : first + num_bytes]

    def give_back(self) -> None:
        self._used = 0


def _piece_bytes(slot: Slot) -> int:
    return PIECE_ELEMENTS * slot.dtype.itemsize


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes can be looked at where they are."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class Leaving:
    """One state. Made on the training thread while it is S(step); carried by another."""

    torn = False
    """Something changed a tensor before it had left: what arrives is of no step."""
    has_left = False
    """Nothing of it is looked at in the live objects any more."""

    def __init__(
        self, live: Described, room: Room, *, pace: Callable[[int], float] | None = None,
        copy_at: Callable[[int], float] | None = None, give_way: Callable[[], bool] | None = None, is_ready: bool = True,
    ) -> None:  # fmt: skip
        """`pace`: so many bytes have been carried: how many seconds to wait. `copy_at`: when (monotonic) to begin to copy
        the rest, of so many bytes, since the next update is near. `give_way`: whether somebody else needs the memory's
        bandwidth more. Not `is_ready`: tensors are as they will be stored only when make_ready() or complete() says so."""
        self._live = live
        self._is_ready = [is_ready] * len(live.tensors)
        self._give_way = give_way
        self._is_awaited = self._is_guarded = False
        self._settled = list(live.settled)
        self._versions = [t._version for t in live.tensors]
        self._bytes: list[Bytes | None] = [None] * len(live.tensors)
        self._room = room
        self._pace, self._copy_at = pace, copy_at
        self._copied_rest = False
        self._rest = live.num_bytes - sum(live.slots[i].num_bytes for i, settled in enumerate(live.settled) if settled)
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._over = False
        self._first_look: dict[tuple[int, int], int] = {}
        self.edited: list[int] = []
        """uids of what was changed too early."""
        self.copy_s = 0.0
        self.copied_bytes = 0
        self.trace: list[Event] = []
        """What happened, in the order in which it ended."""

    # -- the training thread ------------------------------------------------------------------------------------------

    def first_look(self, turn: int) -> None:
        """At the commit: what some of it is, to be compared with what arrives."""
        slots, left = self._live.slots, FIRST_LOOK_BYTES
        for k in range(len(slots)):
            index = (turn + k) % len(slots)
            if self._live.settled[index] or not _is_plain(self._live.tensors[index]):
                continue
            piece = turn // len(slots) % -(-max(slots[index].num_bytes, 1) // _piece_bytes(slots[index]))
            data = self._piece(index, piece)
            left -= len(data)
            if left < 0 and self._first_look:
                return
            self._first_look[index, piece] = piece_sum(data, slots[index].uid, piece * PIECE_ELEMENTS)

    def _pieces(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """(tensor, piece) of all that is where it can be looked at; `counts`: how many pieces each tensor has."""
        return [
            (index, piece)
            for index, count in enumerate(counts)
            if not self._live.settled[index] and _is_plain(self._live.tensors[index])
            for piece in range(count)
        ]

    def _piece(self, index: int, piece: int) -> Bytes:
        step = _piece_bytes(self._live.slots[index])
        return view_bytes(self._live.tensors[index])[piece * step : (piece + 1) * step]

    def guard(self, indices: Iterable[int] | None = None) -> None:
        """These tensors (all, if not told) are about to change: return when they may. Waits for no more than it must."""
        if self._over:
            return
        with self._lock:
            self._is_guarded = True
        if self.has_left:
            return
        self._is_awaited = True
        for index in range(len(self._settled)) if indices is None else indices:
            with self._lock:
                if not self._settled[index] and not self._copy(index):
                    self._moved.wait_for(lambda: self._settled[index] or self._over)  # noqa: B023  # called here only
        self._is_awaited = False
        if indices is None:
            self.has_left = True

    def is_ready(self, index: int) -> bool:
        return self._is_ready[index]

    def make_ready(self, indices: Iterable[int]) -> None:
        """These tensors are as they will be stored, until guard() is called for them."""
        with self._lock:
            for index in indices:
                self._is_ready[index] = True
                self._versions[index] = self._live.tensors[index]._version
            self._moved.notify_all()

    def complete(self, live: Described) -> bool:
        """The state is this: whether that is what has been made ready, so that the rest can follow."""
        old = self._live
        with self._lock:
            if self._over or live.slots != old.slots:
                return False
            for index, tensor in enumerate(live.tensors):
                known = old.tensors[index]
                if self._is_ready[index]:
                    if live.settled[index] or tensor is not known or tensor._version != self._versions[index]:
                        return False
                    continue
                old.tensors[index], self._settled[index] = tensor, live.settled[index]
                self._rest -= live.slots[index].num_bytes if live.settled[index] else 0
                self._versions[index] = tensor._version
            self._is_ready = [True] * len(live.tensors)
            self._moved.notify_all()
        return True

    def cancel(self) -> None:
        """It will not be a state of any step."""
        self.torn = True
        self.end()

    # -- the thread that carries --------------------------------------------------------------------------------------

    def carry(self, writer: Writer) -> None:
        """All of it; writer.finish(), and forget() whatever happens, are the caller's."""
        for index in writer.order:
            with self._lock:
                self._moved.wait_for(lambda: self._is_ready[index] or self._over)  # noqa: B023  # called here only
                if self._over:
                    return
            writer.add_pieces(partial(self._fill, index))
            with self._lock:
                if not self._settled[index]:
                    self._settle(index)
                self._bytes[index] = None
        self.has_left = True

    def end(self) -> None:
        """Nobody is waited for any longer, whatever has happened."""
        with self._lock:
            self._over = self.has_left = True
            self._moved.notify_all()

    def forget(self) -> None:
        """Let go of all tensors."""
        self.end()
        self._live, self._bytes = Described(), []

    def second_look(self, stored: Sequence[StoredTensor], turn: int) -> None:
        """Whether some of what has left, other pieces at each turn, is still what it was, as long as no update comes."""
        for (index, piece), then in self._first_look.items():
            if stored[index].sums[piece] != then:
                self._was_edited(index)
        pieces = self._pieces([len(tensor.sums) for tensor in stored])
        left = SECOND_LOOK_BYTES
        for k in range(len(pieces)):
            index, piece = pieces[(turn * LOOK_AT_PIECES + k) % len(pieces)]
            with self._lock:
                if self._is_guarded or left <= 0:
                    return
                data = self._piece(index, piece)
                left -= len(data)
                uid = self._live.slots[index].uid
                if piece_sum(data, uid, piece * PIECE_ELEMENTS) != stored[index].sums[piece]:
                    self._was_edited(index)

    def _was_edited(self, index: int) -> None:
        self.torn = True
        uid = self._live.slots[index].uid
        if uid not in self.edited:
            self.edited.append(uid)

    def _fill(self, index: int, region: Bytes, start: int) -> None:
        begun = time.perf_counter()
        with self._lock:  # guard() may put a copy in the tensor's place between two pieces
            np.copyto(region, self._source(index)[start : start + len(region)])
            kind = "snapshot" if self._settled[index] else "in place"
        self._carry_on(len(region))
        self.trace.append(Event(kind, index, len(region), begun, time.perf_counter()))

    def _carry_on(self, num_bytes: int) -> None:
        """So much has left: keep to the pace, and out of the way of others."""
        if self._pace is not None or self._copy_at is not None:
            self._wait(num_bytes)
        if self._give_way is not None:
            until = time.monotonic() + GIVE_WAY_S
            while self._give_way() and not self._is_awaited and time.monotonic() < until:
                time.sleep(0.0005)

    def _wait(self, num_bytes: int) -> None:
        """Keep to the pace, and begin to copy in time."""
        until = time.monotonic() + (self._pace(num_bytes) if self._pace is not None else 0.0)
        while True:
            now = time.monotonic()
            copy_at = float("inf")
            if self._copy_at is not None and not self._copied_rest and not self.has_left:
                copy_at = self._copy_at(self._rest)
                if now >= copy_at:
                    self._copy_rest()
            if now >= until:
                return
            time.sleep(max(0.0, min(until, copy_at, now + 0.01) - now))

    def _copy_rest(self) -> None:
        """Of what is ready: there may be more later."""
        self._copied_rest = all(self._is_ready)
        for index in range(len(self._settled)):
            with self._lock:
                if self._is_ready[index] and not self._settled[index] and not self._copy(index):
                    return

    # -- either, with the lock ----------------------------------------------------------------------------------------

    def _source(self, index: int) -> Bytes:
        found = self._bytes[index]
        if found is None:
            tensor = self._live.tensors[index]
            dense = plain(tensor)
            found = self._bytes[index] = view_bytes(dense)
            if dense.data_ptr() != tensor.data_ptr() and not self._settled[index]:
                self._settle(index)  # that was a copy already
        return found

    def _copy(self, index: int) -> bool:
        """Whether there was room."""
        begun = time.perf_counter()
        source = self._source(index)
        if self._settled[index]:
            return True
        memory = self._room.take(len(source))
        if memory is None:
            return False
        np.copyto(memory, source)
        self._bytes[index] = memory
        self._settle(index)
        ended = time.perf_counter()
        self.copied_bytes += len(source)
        self.copy_s += ended - begun
        self.trace.append(Event("copy", index, len(source), begun, ended))
        return True

    def _settle(self, index: int) -> None:
        """This tensor has been read: was it left alone until now?"""
        if self._live.tensors[index]._version != self._versions[index]:
            self._was_edited(index)
        self._settled[index] = True
        self._rest -= self._live.slots[index].num_bytes
        self._moved.notify_all()
