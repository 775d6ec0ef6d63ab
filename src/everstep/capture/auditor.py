"""The audit: hashes of S(step), taken in the background while nothing may change it.

Between the commit of step t and the next update, parameters and optimizer state are read-only. Parameters are hashed at
every step; optimizer state too as often as a small share of training's time allows for all of it at once, or in rotation
where it is too large for that. The training thread ends the window before the next update; it waits only for parameters,
and in practice never.

The writer's thread does it (`run`), which is busy with the same step: two threads that want the core beside training would
each hold Python's lock while the other one runs, and training waits for that lock. Where the writer is a step behind or
waits for its disk for long, or somebody waits for the hashes, a thread of the audit's own takes over (`wake`).
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Sequence

import torch

from everstep import background
from everstep.capture.pending import Audit
from everstep.capture.watch import StateLook, Watched

ALWAYS_BYTES = 4 << 20
"""Optimizer state up to this size is hashed at every step."""
LATE = 0.25
"""Of a step after its commit: if the writer has not come to it by then, the audit's own thread begins."""
UNHURRIED_BYTES = 64 << 20
"""Up to this size until the next update comes; above that for a share of training's time."""
MAX_BURST = 0.5
"""Of a step: what optimizer state may take at once."""


_Known = Sequence[tuple[list[torch.Tensor], list[int]]]
_Job = tuple[Audit, list[Watched], list[int], list[Watched], list[StateLook], float, _Known]


class Auditor:
    """Hashes the state of one step at a time."""

    def __init__(self, *, full: bool, share: float = 0.02) -> None:
        """`full`: everything at every step, whatever it costs. `share`: of training's time for optimizer state."""
        self._full = full
        self._share = share
        self._left: deque[_Job] = deque()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._current: Audit | None = None
        self._cut = self._hurry = False
        self._turn = 0
        self._saved_s = self._pass_s = 0.0
        self._known: dict[int, int] = {}
        self.error: BaseException | None = None
        self._due = 0.0
        self.busy_s = self.cpu_s = 0.0
        """Of all threads that have hashed; and of the audit's own."""
        self.lent_s = 0.0
        """Of `busy_s`, in others."""
        self._thread = background.start(self._run, "everstep-audit")

    def begin(
        self, audit: Audit, must: list[Watched], versions: list[int], may: list[Watched], looks: list[StateLook],
        step_s: float, known: _Known = (),
    ) -> None:  # fmt: skip
        """Hash S(step) as soon as somebody calls run() or wake(). Called at the commit; `versions` are those of `must` then,
        and `known` tells some of `may`'s."""
        self._current = audit
        self._cut = self._hurry = False
        self._due = time.perf_counter() + LATE * step_s
        self._left.append((audit, must, versions, may, looks, step_s, known))

    def run(self) -> None:
        """Do what begin() has left, if nobody has begun it (any thread)."""
        job = self._take()
        if job is not None:
            begun = time.perf_counter()
            self._do(job)
            self.lent_s += time.perf_counter() - begun

    def wake(self) -> None:
        """Have another thread do it (any thread)."""
        job = self._take()
        if job is not None:
            self._jobs.put(job)

    def wake_if_late(self) -> None:
        """The same, if the next update may be near (any thread)."""
        if self._left and time.perf_counter() > self._due:
            self.wake()

    def _take(self) -> _Job | None:
        try:
            return self._left.popleft()
        except IndexError:  # another thread has it
            return None

    def hurry(self) -> None:
        """Somebody waits for the frame: leave to the next steps what is looked at in rotation anyway."""
        self._hurry = True
        self.wake()

    def end(self) -> float:
        """The state is about to change: return when no thread looks at it any more, and the seconds that took."""
        audit, self._current = self._current, None
        if audit is None or audit.done.is_set():
            return 0.0
        begun = time.perf_counter()
        self.wake()
        if not self._full:
            audit.must_done.wait()
            self._cut = True
        audit.done.wait()
        return time.perf_counter() - begun

    def close(self) -> None:
        self.end()
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            self._do(job)
            self.cpu_s = time.thread_time()

    def _do(self, job: _Job) -> None:
        begun = time.perf_counter()
        audit = job[0]
        try:
            self._hash(*job)
        except BaseException as e:
            self.error = e
        finally:
            audit.must_done.set()
            audit.done.set()
            self.busy_s += time.perf_counter() - begun

    def _hash(
        self, audit: Audit, must: list[Watched], versions: list[int], may: list[Watched], looks: list[StateLook],
        step_s: float, known: _Known,
    ) -> None:  # fmt: skip
        self._known = {id(t): version for each in known for t, version in zip(*each, strict=True)}
        complete = True
        edited = [look for look in looks if not look.run()]
        for w, version in zip(must, versions, strict=True):
            complete &= _hash_one(audit, w, version)
        # Where state was edited, the frame must show that it is not what its updates lead to. (If that was done after the
        # commit, a good step is refused: it cannot be told from here.)
        for look in edited:
            may = [w for w in may if w.owner is None or w.owner[0] != look.name] + look.watch.states_now(look.name)
        may_bytes = sum(w.alias.numel() * w.itemsize for w in may)
        if may_bytes <= ALWAYS_BYTES or edited:
            for w in may:
                complete &= _hash_one(audit, w, self._known.get(id(w.tensor)))
            may = []
        hash_replicas(audit)
        audit.must_done.set()
        if may:
            complete &= self._hash_some(audit, may, step_s, unhurried=self._full or may_bytes <= UNHURRIED_BYTES)
        audit.complete = complete

    def _hash_some(self, audit: Audit, may: list[Watched], step_s: float, *, unhurried: bool) -> bool:
        """Hash as much of this as can be afforded, in turn; returns whether that was all."""
        burst_s = MAX_BURST * step_s
        if not unhurried:
            self._saved_s += self._share * step_s
            if self._saved_s < min(self._pass_s, burst_s):
                return False
        begun = time.perf_counter()
        complete = True
        done = 0
        for i in range(len(may)):
            if self._cut or (not unhurried and (self._hurry or time.perf_counter() > begun + burst_s)):
                break
            w = may[(self._turn + i) % len(may)]
            complete &= _hash_one(audit, w, self._known.get(id(w.tensor)))
            done += 1
        took = time.perf_counter() - begun
        self._turn += done
        self._pass_s = took * len(may) / done if done else self._pass_s
        self._saved_s = max(0.0, self._saved_s - took)
        return complete and done == len(may)


def hash_replicas(audit: Audit) -> None:
    """Of parameters that other ranks store: what their hashes will be compared with."""
    for w in audit.replica_targets:
        audit.replicas += [(w.uid, piece, value) for piece, value in enumerate(w.piece_hashes())]
    audit.replica_targets = []


def _hash_one(audit: Audit, w: Watched, version: int | None = None) -> bool:
    """Add the hashes of one tensor, unless it was changed since it had this version. Returns whether they were added."""
    version = w.tensor._version if version is None else version
    hashes = w.piece_hashes()
    if w.tensor._version != version:
        return False
    audit.add_all(w.uid, hashes)
    return True
