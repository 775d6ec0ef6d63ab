"""The audit: hashes of S(step), taken in the background while nothing may change it.

Between the commit of step t and the next update, parameters and optimizer state are read-only. Parameters are hashed at
every step; optimizer state too as long as that takes little of the step's time, else in rotation. The training thread
ends the window before the next update; it waits only for parameters, and in practice never.
"""

from __future__ import annotations

import queue
import threading
import time

from everstep import background
from everstep.atoms import PIECE_ELEMENTS
from everstep.capture.pending import Audit
from everstep.capture.watch import StateLook, Watched

ALWAYS_BYTES = 4 << 20
"""Optimizer state up to this size is hashed at every step."""
UNHURRIED_BYTES = 64 << 20
"""Up to this size until the next update comes; above that for a share of the step's time."""


_Job = tuple[Audit, list[Watched], list[Watched], list[StateLook], float]


class Auditor:
    """One thread that hashes the state of one step at a time."""

    def __init__(self, *, full: bool, share: float = 0.1) -> None:
        """`full`: everything at every step, whatever it costs. `share`: of the step's time for optimizer state."""
        self._full = full
        self._share = share
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._current: Audit | None = None
        self._cut = threading.Event()
        self._hurry = False
        self._must_done = threading.Event()
        self._turn = 0
        self.error: BaseException | None = None
        self.busy_s = 0.0
        self._thread = background.start(self._run, "everstep-audit")

    def begin(
        self, audit: Audit, must: list[Watched], may: list[Watched], looks: list[StateLook], step_s: float
    ) -> None:
        """Start hashing S(step). Called at the commit."""
        self._current = audit
        self._cut.clear()
        self._hurry = False
        self._must_done.clear()
        self._jobs.put((audit, must, may, looks, step_s))

    def hurry(self) -> None:
        """Somebody waits for the frame: leave to the next steps what is looked at in rotation anyway."""
        self._hurry = True

    def end(self) -> None:
        """The state is about to change: return when no thread looks at it any more."""
        audit, self._current = self._current, None
        if audit is None:
            return
        if self._full:
            audit.done.wait()
            return
        self._must_done.wait()
        self._cut.set()
        audit.done.wait()

    def close(self) -> None:
        self.end()
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            audit = job[0]
            try:
                self._hash(*job)
            except BaseException as e:
                self.error = e
            finally:
                self._must_done.set()
                audit.done.set()

    def _hash(
        self, audit: Audit, must: list[Watched], may: list[Watched], looks: list[StateLook], step_s: float
    ) -> None:
        begun = time.perf_counter()
        complete = True
        as_expected = [look.run() for look in looks]
        if not all(as_expected):
            must, may = must + may, []  # the frame must show that its state is not what its updates lead to
        may_bytes = sum(w.alias.numel() * w.itemsize for w in may)
        if may_bytes <= ALWAYS_BYTES:
            must, may = must + may, []
        for w in must:
            complete &= _hash_one(audit, w)
        self._must_done.set()
        unhurried = self._full or may_bytes <= UNHURRIED_BYTES
        deadline = float("inf") if unhurried else begun + max(self._share * step_s, 1e-4)
        done = 0
        for i in range(len(may)):
            if self._cut.is_set() or time.perf_counter() > deadline or (self._hurry and not unhurried):
                break
            complete &= _hash_one(audit, may[(self._turn + i) % len(may)])
            done += 1
        self._turn += done
        audit.complete = complete and done == len(may)
        self.busy_s += time.perf_counter() - begun


def _hash_one(audit: Audit, w: Watched) -> bool:
    """Add the hashes of one tensor, unless it was changed meanwhile. Returns whether they were added."""
    version = w.tensor._version
    sums = [(low // w.itemsize, w.hash_range(low, high)) for _, low, high in w.piece_ranges()]
    if w.tensor._version != version:
        return False
    for start, value in sums:
        audit.add(w.uid, start // PIECE_ELEMENTS, value)
    return True
