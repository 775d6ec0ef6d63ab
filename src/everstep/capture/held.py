"""Gradients held by reference: what can still reach them, and when they may be let go."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any

import torch

from everstep.capture.pending import Item, PendingUpdate, Seal
from everstep.memory import same_bits

SHARE = 8
"""Of many gradients one in so many is looked at: whoever holds the memory of one mostly holds all, and each time."""
version_of = attrgetter("_version")
_num_owners: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
_use_count: Callable[[int], int] = torch._C._storage_Use_Count


class Held:
    """Gradients of one update, held by reference until it is sure what becomes of them."""

    update: PendingUpdate | None = None
    was_released = False
    suspect = False
    """They were let go while something else could still write to their memory."""
    copies: Sequence[torch.Tensor] = ()
    """What they were, where they were copied to learn what becomes of them."""
    is_gathered = True

    def __init__(
        self, params: list[torch.Tensor], grads: list[torch.Tensor | None] | None, seal: Seal | None,
        versions: list[int] | None = None, *, grad_of: Callable[[Any], Any], lock: threading.Lock,
    ) -> None:  # fmt: skip
        """`grads`: None if gather() is to take them. `versions`: their version counters, where all parameters have one."""
        self._grad_of, self._lock = grad_of, lock
        self.params = params
        self.grads: list[Any] = []
        self.versions: list[int] = []
        if grads is None:
            self.is_gathered = False
        else:
            self._fill(grads, versions)
        self.seal = seal
        if seal is not None:
            seal.release = self.release

    def _fill(self, grads: list[torch.Tensor | None], versions: list[int] | None) -> None:
        if versions is None:
            self.params = [p for p, g in zip(self.params, grads, strict=True) if g is not None]
            grads = [g for g in grads if g is not None]
            versions = list(map(version_of, grads))
        self.grads = grads.copy()
        self.versions = versions

    def gather(self) -> None:
        """Take the gradients off their parameters, unless that has been done (any thread, while the step runs or right
        after it: nobody else writes to them then, or puts others there)."""
        with self._lock:
            if self.is_gathered:
                return
            grads = list(map(self._grad_of, self.params))
            versions = versions_of(grads)
            self._fill(grads, None if -1 in versions else versions)
            if self.update is not None:
                self.update.grads = grads
            self.is_gathered = True

    def still_equal(self) -> bool:
        """Whether they have the bits that were copied; also found are writes that no version counter shows."""
        pairs = zip(self.copies, self.grads, strict=True) if len(self.copies) == len(self.grads) else ()
        return all(a.is_sparse or same_bits(a, b) for a, b in pairs)

    def untouched(self) -> bool:
        return list(map(version_of, self.grads)) == self.versions

    def attached(self) -> bool:
        """Whether any is still on its parameter."""
        return any(map(is_, map(self._grad_of, self.params), self.grads))

    def released(self) -> bool:
        """Whether nobody but Everstep can reach them: not on a parameter, no other reference, memory not shared."""
        # A tensor has one owner if its Python object is all that holds it; a parameter would be another.
        return (
            self.untouched()
            and max(map(_num_owners, self.grads), default=1) == 1
            and not self._referenced()
            and not self.shared()
        )

    def release(self) -> bool:
        """Open the seal and let go of them, if they have been released. Returns whether it is open (any thread)."""
        assert self.seal is not None
        with self._lock:
            if not self.seal.open.is_set():
                if self.suspect or not self.released():
                    return False
                self._let_go()
            return True

    def _let_go(self) -> None:
        assert self.seal is not None
        self.was_released = True
        self.seal.break_open()
        self.grads, self.params, self.versions, self.update = [], [], [], None

    def look_at_some(self, turn: int) -> None:
        """They have just been let go: if somebody else has hold of their memory, they cannot be trusted any more."""
        with self._lock:
            self.suspect = self.suspect or any(_sharing(self.grads[turn % SHARE :: SHARE]))

    def open(self, results: Callable[[Seal], list[Item]]) -> bool:
        """Open the seal of gradients that have been read. Returns whether they can be trusted; else `results` are stored."""
        assert self.seal is not None
        with self._lock:
            if self.seal.open.is_set():
                return True
            good = not (self.suspect or not self.untouched() or self.shared())
            if not good:
                self.seal.instead = results(self.seal)
            self.seal.break_open()
            return good

    def _referenced(self) -> bool:
        """Whether anybody else holds one of them."""
        # References: the list here, the pending update's list, getrefcount's argument; the writer has one more in hand.
        writing = -1 if self.update is None else self.update.at
        counts = list(map(sys.getrefcount, self.grads))
        if writing >= 0 and self.update is not None:
            if self.update.at != writing or len(counts) != len(self.update.grads):
                return True
            counts[writing] = 0
        return max(counts, default=0) > 3

    def shared(self) -> bool:
        """Whether other tensors or arrays see the memory: some of those write without moving a version counter."""
        return any(_sharing(self.grads))


def versions_of(grads: Sequence[torch.Tensor | None]) -> list[int]:
    try:
        return list(map(version_of, grads))
    except AttributeError:  # some have none
        return [-1 if g is None else g._version for g in grads]


def clone(g: torch.Tensor) -> torch.Tensor:
    return g.detach().clone()


def _sharing(grads: Sequence[torch.Tensor | None]) -> list[bool]:
    """For each gradient whether anything but these gradients has a hold on its memory."""
    try:
        # The count includes the wrapper that untyped_storage() makes: 2 is a tensor alone with its memory.
        if max([_use_count(g.untyped_storage()._cdata) for g in grads if g is not None], default=0) <= 2:
            return []
    except NotImplementedError:  # sparse tensors have no storage
        pass
    owners: dict[int, int] = {}
    for g in grads:
        if g is not None and not g.is_sparse:
            cdata = g.untyped_storage()._cdata
            owners[cdata] = owners.get(cdata, 0) + 1
    found = []
    for g in grads:
        if g is None:
            found.append(False)
        elif g.is_sparse or g._base is not None:
            found.append(True)
        else:
            storage = g.untyped_storage()
            found.append(_use_count(storage._cdata) - 1 > owners[storage._cdata])
    return found


def unshared(grads: list[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], list[bool]]:
    """Gradients to hold: those whose memory others can write to are copied now. And which those are; empty: none."""
    shared = _sharing(grads)
    if not any(shared):
        return grads, []
    return [clone(g) if s and g is not None else g for g, s in zip(grads, shared, strict=True)], shared
