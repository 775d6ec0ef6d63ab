"""The writer thread: takes what the training thread hands over, writes frames, makes them durable.

Nothing here holds a lock while it touches the disk. What is in flight is bounded; when the bound is reached the training
thread waits, and that time is counted as stall.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from everstep import background
from everstep import cursor as cursors
from everstep.atoms import PIECE_ELEMENTS, Layout
from everstep.capture.encode import Encoder
from everstep.capture.pending import Audit, Item, PendingCommit, PendingEarly, PendingTensor, PendingUpdate, Seal
from everstep.capture.sent import Ledger
from everstep.errors import UsageError
from everstep.frame import AUDIT_DTYPE, Carry, Op, Update
from everstep.memory import plain, view_bytes
from everstep.store import files
from everstep.store.bases import piece_sum
from everstep.store.log import LogWriter
from everstep.tune.averages import Spent

DURABILITIES = ("step", "batch", "os")
POLLED_S = (0.05, 1.0)
"""Where updates are so far apart, the writer is awake when the next is due."""
POLLED_COMMIT_S = (0.01, 1.0)
"""Where a commit comes so long after the first part of its frame, the writer is awake when it is due."""
_POLLED_SHARE, _POLLED_COMMIT_SHARE, _POLLS = 0.3, 0.4, 32
"""For this share of the time that it usually takes, half of it before the next is due, it looks so many times."""
_DISTURBED_S = 0.004
"""Who wakes up so late has waited for Python's lock, and so for a training thread that does not run without it: it is left
alone then."""


class _Expected:
    """When something comes again, as far as can be told from how long it took the last times."""

    def __init__(self, within_s: tuple[float, float], share: float) -> None:
        self._within_s, self._share = within_s, share
        self.usual_s = 0.0
        """0: not known."""

    def came(self, took_s: float) -> None:
        # A pause (validation, a debugger) is no step.
        usual_s = self.usual_s
        self.usual_s = 0.8 * usual_s + 0.2 * min(took_s, 2 * usual_s) if usual_s else took_s

    def next(self, jobs: queue.SimpleQueue[_Job], since: float) -> _Job:
        """The next job. To wake a thread takes 30 µs of whoever does it, which is the training thread: so this one gets up
        by itself when what it expects is due, and looks from time to time until it is there."""
        window_s = self._share * self.usual_s
        early_s = since + self.usual_s - window_s / 2 - time.perf_counter()
        if not self._within_s[0] <= self.usual_s <= self._within_s[1] or early_s < -window_s:
            return jobs.get()
        if early_s > 0:
            with contextlib.suppress(queue.Empty):
                return jobs.get(timeout=early_s)
        pause_s = window_s / _POLLS
        for _ in range(_POLLS):
            if not jobs.empty():
                break
            begun = time.perf_counter()
            time.sleep(pause_s)
            if time.perf_counter() - begun > pause_s + _DISTURBED_S:
                break
        return jobs.get()


@dataclass
class _Open:
    """The frame that is being written."""

    step: int
    ops: list[list[Op]]
    seals: list[tuple[int, Seal]]


class _Flush:
    def __init__(self, hard: bool) -> None:
        self.hard = hard
        self.done = threading.Event()


class _Trash:
    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = tensors


class _Discard:
    """What has been handed over of the frame that is not committed does not count."""


class _Stop:
    def __init__(self, finish: bool) -> None:
        self.finish = finish


_Job = tuple[int, Item, int] | PendingCommit | _Flush | _Stop | _Trash | _Discard


class Offload:
    """Frames on their way to the log."""

    def __init__(
        self, log: LogWriter, layout: Layout, write_layout: Callable[[Layout], None], *, durability: str,
        batch_steps: int, max_inflight_steps: int, max_inflight_bytes: int, ledger: Ledger | None = None,
    ) -> None:  # fmt: skip
        if durability not in DURABILITIES:
            raise UsageError(f"durability must be one of {', '.join(DURABILITIES)}, not {durability!r}")
        self._log = log
        self._encoder = Encoder(log, self._layout_changed, lambda: self.meanwhile(), ledger or Ledger())
        self._write_layout = write_layout
        self._layout = layout
        self._durability = durability
        self._batch_steps = 1 if durability != "batch" else batch_steps
        self._max_steps, self._max_bytes = max_inflight_steps, max_inflight_bytes
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._handed_steps = self._handed_bytes = 0
        """Written by the training thread alone; what is done, by the writer's: so neither needs a lock."""
        self._done_steps = self._done_bytes = 0
        self._frame: _Open | None = None
        self._update = _Expected(POLLED_S, _POLLED_SHARE)
        """The first part of a frame, after that of the last one."""
        self._commit = _Expected(POLLED_COMMIT_S, _POLLED_COMMIT_SHARE)
        """The end of a frame, after its first part."""
        self._last_update = time.perf_counter()
        self._unsynced = 0
        self.written_step = -1
        """Every frame of this writer up to this step is with the operating system: it survives the process."""
        self.synced_step = -1
        """Every frame of this writer up to this step is durable."""
        self.claim: Callable[[], int] = lambda: -1
        """What may be called durable in footers: the run says, since a base must be durable too."""
        self.on_durable: Callable[[int], None] = lambda step: None
        self.meanwhile: Callable[[], None] = lambda: None
        """Called often while the writer thread works."""
        self.before_end: Callable[[], None] = lambda: None
        """Called in the writer thread when all of a frame but its end is written, or would be."""
        self.on_part: Callable[[], None] = lambda: None
        """Some gradients of the open frame have been written before their step."""
        self.error: BaseException | None = None
        self.busy_s = self.cpu_s = 0.0
        self.sync_s = 0.0
        self.waited_s = 0.0
        """The training thread's waiting for room."""
        self.frame_bytes = 0
        self._thread = background.start(self._run, "everstep-write")

    # -- training thread ----------------------------------------------------------------------------------------------

    def put(self, step: int, item: Item) -> None:
        """Hand over a part of the frame of this step; returns at once. What left early may come from any thread."""
        size = _size(item)
        if size:
            self._handed_bytes += size
        self._jobs.put((step, item, size))

    def commit(self, pending: PendingCommit) -> None:
        """Hand over the end of a frame; returns at once."""
        self._handed_steps += 1
        self._jobs.put(pending)

    def set_batch(self, steps: int) -> None:
        """From now on so many steps a sync, if `durability` is "batch". Any thread."""
        if self._durability == "batch":
            self._batch_steps = steps

    def set_lossless(self, tries: bool) -> None:
        """From the next frame on, let lossless codecs make pieces smaller, or not. Any thread."""
        self._encoder.lossless = tries

    def spend(self, spent: Spent) -> None:
        """Count there, from now on, what codecs and the bytes that they leave cost. Before the first frame."""
        self._encoder.spent = spent

    def dispose(self, tensors: list[Any]) -> None:
        """Drop references in the writer thread: freeing large memory takes time."""
        self._jobs.put(_Trash(tensors))

    def discard(self) -> None:
        """Nothing that was handed over since the last commit has happened. Its records stay, and no operation means them."""
        self._jobs.put(_Discard())

    @property
    def is_behind(self) -> bool:
        """Whether the writer is still busy with a step before the last."""
        return self._handed_steps - self._done_steps > 1

    def has_room(self) -> bool:
        steps, num_bytes = self.inflight()
        return steps < self._max_steps and (num_bytes <= self._max_bytes or steps == 0)

    def wait_for_room(self) -> float:
        """Block while too much is in flight; returns the seconds that took."""
        begun = time.perf_counter()
        with self._room:
            self._room.wait_for(lambda: self.has_room() or self.error is not None)
        took = time.perf_counter() - begun
        self.waited_s += took
        return took

    def flush(self, *, hard: bool = False) -> None:
        """Return when everything handed over is durable, or has failed (see `error`).

        `hard`: on stable storage, whatever `durability` promises.
        """
        flush = _Flush(hard)
        self._jobs.put(flush)
        flush.done.wait()

    def restart(self) -> None:
        """Forget the error; the next frame opens a new segment. Only with nothing in flight."""
        self.flush()
        self.error = None
        self.synced_step = -1

    def inflight(self) -> tuple[int, int]:
        return self._handed_steps - self._done_steps, self._handed_bytes - self._done_bytes

    def close(self, *, finish: bool) -> None:
        """Stop the thread; `finish` ends the segment in order, dropping a frame that was not committed."""
        self._jobs.put(_Stop(finish))
        self._thread.join()

    # -- writer thread ------------------------------------------------------------------------------------------------

    def _next(self) -> _Job:
        """Wait for the next job: the first part of a frame, or what follows it."""
        return (self._update if self._frame is None else self._commit).next(self._jobs, self._last_update)

    def _saw_update(self) -> None:
        """At the first part of a frame: how far apart they are."""
        now = time.perf_counter()
        took_s, self._last_update = now - self._last_update, now
        self._update.came(took_s)

    def _run(self) -> None:
        while True:
            job = self._next()
            self.meanwhile()
            if isinstance(job, _Stop):
                self._stop(job.finish)
                return
            if isinstance(job, _Trash):
                job.tensors = []
                continue
            if isinstance(job, _Discard):
                self._drop()
                continue
            begun = time.perf_counter()
            try:
                if isinstance(job, _Flush):
                    if self._unsynced:
                        self._sync(self.written_step)
                    if job.hard and self.error is None:
                        self._log.sync_if_open()
                elif self.error is None:
                    self._write(job)
                elif isinstance(job, PendingCommit):
                    self.before_end()  # nobody has to wait for it at the next update
            except BaseException as e:
                self._fail(e)
            finally:
                self._account(job)
                del job  # its gradients are freed here, not when the next job arrives
                self.busy_s += time.perf_counter() - begun
                self.cpu_s = time.thread_time()

    def _write(self, job: PendingCommit | tuple[int, Item, int]) -> None:
        if isinstance(job, PendingCommit):
            if self._frame is not None:
                waited_s = (time.time_ns() - job.wall_time_ns) / 1e9
                self._commit.came(max(time.perf_counter() - self._last_update - waited_s, 0.0))
            self._finish(job)
        else:
            self._item(job[0], job[1])

    def _account(self, job: _Job) -> None:
        """Release what the training thread may be waiting for, whatever happened to the job."""
        if isinstance(job, _Flush):
            job.done.set()
        elif isinstance(job, PendingCommit):
            with self._room:
                self._done_steps += 1
                self._room.notify_all()
        elif isinstance(job, tuple):
            if isinstance(job[1], PendingUpdate) and job[1].seal is not None:
                job[1].seal.read.set()
            with self._room:
                self._done_bytes += job[2]
                self._room.notify_all()

    def _item(self, step: int, item: Item) -> None:
        frame = self._open(step)
        frame.ops.append(self._encoder.ops(item))
        if isinstance(item, PendingUpdate) and item.seal is not None:
            item.seal.read.set()
            frame.seals.append((len(frame.ops) - 1, item.seal))
        elif isinstance(item, PendingEarly):
            self.on_part()

    def _drop(self) -> None:
        if self._frame is not None:
            for _, seal in self._frame.seals:
                seal.break_open()
            self._frame.ops, self._frame.seals = [], []
        self._encoder.sent.end_frame()

    def _open(self, step: int) -> _Open:
        if self._frame is None:
            self._saw_update()
            self._log.begin(step, self._layout.id, self.claim())
            self._encoder.begin_frame()
            self._frame = _Open(step, [], [])
        return self._frame

    def _finish(self, job: PendingCommit) -> None:
        frame = self._open(job.step)
        self.before_end()
        for index, seal in frame.seals:
            seal.wait()
            for item in seal.also:
                frame.ops.append(self._encoder.ops(item))
            if seal.instead is not None:
                frame.ops[index] = [op for item in seal.instead for op in self._encoder.ops(item)]
        job.audit.done.wait()
        for _, seal in frame.seals:
            if seal.spoiled:
                _refute(job.audit, seal)
        ops = [op for ops in frame.ops for op in ops]
        if any(seal.instead is not None for _, seal in frame.seals):
            ops = _own_up(ops)
        before = self._log.bytes_written
        self._log.finish(
            ops, cursors.encode(job.cursor), encode_audit(job.audit),
            job.audit.complete, self.claim(), job.wall_time_ns, encode_replicas(job.audit),
        )  # fmt: skip
        self.frame_bytes = self._log.bytes_written - before
        self._frame = None
        self._encoder.sent.end_frame()
        self._unsynced += 1
        if self._unsynced >= self._batch_steps:
            self._sync(job.step)
        else:
            self._log.write_out()
        self.written_step = job.step
        files.note(f"written {job.step}")

    def _sync(self, step: int) -> None:
        """All frames up to this step are durable, as far as `durability` promises."""
        if self._durability == "os":
            self._log.write_out()
        else:
            begun = time.perf_counter()
            self._log.sync()
            self.sync_s += time.perf_counter() - begun
        self._unsynced = 0
        self.synced_step = step
        self.on_durable(step)
        files.note(f"synced {step}")

    def _layout_changed(self, layout: Layout) -> None:
        self._write_layout(layout)
        self._layout = layout

    def _fail(self, e: BaseException) -> None:
        if self.error is None:
            self.error = e
        if self._frame is not None:
            for _, seal in self._frame.seals:
                seal.break_open()
        self._frame = None
        self._encoder.sent.end_frame()
        self._unsynced = 0
        self._log.abandon()
        files.note("failed")
        with self._room:
            self._room.notify_all()

    def _stop(self, finish: bool) -> None:
        try:
            if self.error is None:
                if finish:
                    self._log.end_segment(None, self.claim())
                else:
                    self._log.abandon()
        except BaseException as e:
            self._fail(e)


def _own_up(ops: list[Op]) -> list[Op]:
    """Gradients that were to be carried as an update consumed them are lost where that update was not stored after all."""
    found: list[Op] = []
    stored: set[int] = set()
    for op in ops:
        if isinstance(op, Update):
            stored.update(g.uid for g in op.grads if g.dense is not None)
        if isinstance(op, Carry) and op.kind == "consumed":
            kept, lost = (tuple(u for u in op.uids if (u in stored) is is_stored) for is_stored in (True, False))
            found += [Carry(kind, uids) for kind, uids in (("consumed", kept), ("lost", lost)) if uids]
        else:
            found.append(op)
    return found


def _refute(audit: Audit, seal: Seal) -> None:
    """Parameters, or their optimizer state, have been edited since the step was committed, and only what they are now could
    be stored. Whoever restores this step must find that it is not what it was: it gets hashes that cannot be right."""
    edited = [i for i in seal.instead or () if isinstance(i, PendingTensor) and i.uid in seal.spoiled]
    refuted = {item.uid for item in edited}
    others = [e for e in zip(audit.uids, audit.pieces, audit.hashes, strict=True) if e[0] not in refuted]
    audit.uids, audit.pieces, audit.hashes = ([e[i] for e in others] for i in range(3))
    for item in edited:
        first = view_bytes(plain(item.tensor))[: PIECE_ELEMENTS * item.tensor.element_size()]
        audit.add(item.uid, 0, piece_sum(first, item.uid, 0) ^ 1)


def encode_audit(audit: Audit) -> bytes:
    for uids, shapes, flat in audit.buffers:
        data, itemsize, offset = view_bytes(plain(flat)), flat.element_size(), 0
        for uid, shape in zip(uids, shapes, strict=True):
            size = math.prod(shape) * itemsize
            audit.add(uid, 0, piece_sum(data[offset : offset + size], uid, 0))
            offset += size
    return encode_hashes(audit.uids, audit.pieces, audit.hashes)


def encode_replicas(audit: Audit) -> bytes:
    return encode_hashes(*(list(each) for each in zip(*audit.replicas, strict=True))) if audit.replicas else b""


def encode_hashes(uids: list[int], pieces: list[int], hashes: list[int]) -> bytes:
    out = np.zeros(len(uids), AUDIT_DTYPE)
    out["uid"], out["piece"], out["hash"] = uids, pieces, hashes
    return out.tobytes()


def _size(item: Item) -> int:
    if isinstance(item, PendingUpdate):
        return item.num_bytes
    tensor = getattr(item, "tensor", None)
    return tensor.numel() * tensor.element_size() if tensor is not None else 0
