"""The next state, which begins to leave before it is committed: with layer-wise updates a tensor is as it will be stored
long before the others are.

What has left early is right only if nothing changes it until the commit. That is learned: the first states are not begun
early, and parameters are hashed when they have been updated and again at the commit. Who edits them there in a way that no
version counter shows (`p.data.clamp_()`) is found then, and states are begun at commits from then on. Later version counters
and samples of bytes tell; a tensor that a version counter has shown to be edited leaves after the commit from then on. A
state that was begun early in vain is given up, and begun again at its commit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import xxhash

from everstep.atoms import Layout
from everstep.capture.leaving import Leaving
from everstep.capture.live import Described, Live
from everstep.memory import plain, view_bytes
from everstep.naming import Inventory
from everstep.store.bases import Slot

WATCHED_STATES = 3
"""As many as updates by step() that layerwise.py watches: before, nothing is updated in backward."""


class Job:
    """One state on its way to the pool."""

    def __init__(
        self, step: int, layout: Layout, live: Described, leaving: Leaving, fields: Callable[[], dict[str, Any]] | None
    ) -> None:
        """`fields`: None as long as it is not known what else a manifest of it says."""
        self.step = step
        self.layout = layout
        self.live = live
        self.leaving = leaving
        self.fields = fields
        self.is_early = fields is None
        self.committed_at = time.perf_counter()
        self.done = threading.Event()


class Ahead:
    """All on the training thread."""

    def __init__(self, live: Live, begin: Callable[[Described], Job]) -> None:
        """`begin`: a job of which nothing is ready, on its way."""
        self._live = live
        self._begin = begin
        self.job: Job | None = None
        self.order: list[int] = []
        """Of slots: parameters of the last layers are updated first; what is not updated at all comes at the commit."""
        self._slots: list[Slot] = []
        self._positions: dict[int, list[int]] = {}
        self._inventory: Inventory | None = None
        """For which these hold."""
        self._late: set[int] = set()
        """uids of what is edited between its update and the commit."""
        self._num_watched = 0
        self._seen: dict[int, tuple[torch.Tensor, int, int]] = {}
        """By id of a parameter: itself, its version and hash after its update."""
        self._is_given_up = False
        """Parameters are edited after their updates without a trace."""
        self.is_deceived = False
        """That was found out later than it should have been."""

    def places(self, params: Iterable[torch.Tensor], slots: list[Slot]) -> list[int] | None:
        """Where these and what their optimizers keep of them are among these slots; None: that is not known."""
        found = [self._positions.get(id(p)) for p in params]
        if slots != self._slots or None in found:
            return None
        return [i for places in found if places is not None for i in places]

    def before(self, params: list[torch.Tensor]) -> None:
        """These are about to be updated."""
        if self.job is None:
            return
        places = self.places(params, self._slots)
        if places is None or any(map(self.job.leaving.is_ready, places)):
            self.drop()  # another step, and none was committed between

    def after(self, params: list[torch.Tensor], carried: Iterable[Slot] | None) -> None:
        """These are as they will be at the next commit, most likely. `carried`: places of gradients that there may be at it;
        None: that state is not due."""
        if self._num_watched < WATCHED_STATES:
            self._seen.update((id(p), (p, p._version, _hash(p))) for p in params)
            return
        if self.job is None and carried is not None and not self._is_given_up:
            self._open(carried)
        if self.job is not None:
            places = self.places(params, self._slots) or ()
            self.job.leaving.make_ready(i for i in places if self._slots[i].uid not in self._late)

    def _open(self, carried: Iterable[Slot]) -> None:
        known = self._live.known()
        if known is None:
            return
        for slot in carried:
            known.add_again(slot)
        if self._inventory is not self._live.inventory or known.slots != self._slots:
            self._inventory, self._slots = self._live.inventory, known.slots
            self._positions = self._live.positions(known)
            first = [i for places in reversed(self._positions.values()) for i in places]
            self.order = [*first, *sorted(set(range(len(known.slots))).difference(first))]
        self.job = self._begin(known)

    def look(self) -> None:
        """At a commit, as long as it is watched what happens between updates and commits."""
        seen, self._seen = self._seen, {}
        self._num_watched += bool(seen)
        self._is_given_up |= any(p._version == version and _hash(p) != value for p, version, value in seen.values())

    def complete(self, step: int, live: Described, fields: Callable[[], dict[str, Any]], turn: int) -> Job | None:
        """What has begun to leave, if it is S(step), of which this is the description."""
        job, self.job = self.job, None
        if job is None:
            return None
        job.fields = fields
        if job.step == step and job.leaving.complete(live, turn):
            return job
        job.leaving.cancel()
        self._late.update(job.leaving.changed)
        self.is_deceived = job.leaving.is_deceived
        self._is_given_up |= self.is_deceived
        return None

    def drop(self) -> Job | None:
        """What has begun to leave will be no state."""
        job, self.job = self.job, None
        self._seen = {}
        if job is not None:
            job.leaving.cancel()
        return job


def _hash(param: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(view_bytes(plain(param.detach())))
