"""Snapshot mode in the trainer: S(step) itself goes to the pool, straight from the live tensors, while training goes on.

The training thread describes the state at a commit and guards it before the next update; one thread carries it out and
commits the slot. One state is on its way at a time.
"""

from __future__ import annotations

import contextlib
import math
import queue
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everstep import background, forks
from everstep import cursor as cursors
from everstep.atoms import Layout
from everstep.capture.ahead import Ahead, Job
from everstep.capture.carry import is_in
from everstep.capture.layerwise import Layerwise
from everstep.capture.leaving import Event, Leaving, NoRoom, Room, Staging, Writer
from everstep.capture.live import Described, Live, pack_hyper
from everstep.capture.recorder import Destination, Recorder
from everstep.capture.snapshot import COPY_AT_ONCE_BYTES, Snapshot
from everstep.errors import HiddenEditWarning, PoolFullError, StorageError
from everstep.format.documents import LOST, TRAINER, StoredOptimizer
from everstep.naming import Inventory
from everstep.store.bases import Slot
from everstep.store.pools import Pools
from everstep.tune.picture import Row, Seen, draw
from everstep.tune.schedule import GRAIN_BYTES, Ground, Piece, Schedule, drifted, explain, plan

MAX_OVERHEAD = 0.05
"""What snapshots may take from training where the interval is ours to choose."""
MEASURED_AFTER = 3
"""Snapshots, before their cost is believed."""
PLAN_EVERY_S = 1.0
"""Even if nothing has changed much: what must be copied is a small difference of large numbers."""
_TRIES = 3
"""So often a state is stored that must be: what it says may not fit into the pool, or it may be edited on its way."""
_COPY_BANDWIDTH = 2e9
"""Bytes a second, until it has been measured."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How states leave."""

    interval: int | None = 1
    """Steps from one to the next; None: as often as costs little."""
    staged: bool = False
    """What has not left before the next update is copied in memory; else it is waited for."""
    copy_first: bool = False
    """Everything is copied in memory before it leaves."""
    memory_bytes: int | None = None
    """For copies; None: as much as the state takes."""
    max_bandwidth: float | None = None
    """Bytes a second that may leave."""
    pace: Callable[[int], float] | None = None
    """So many bytes have left: how many seconds to wait; None where the pool itself sees to it."""
    layerwise: bool = False
    """Parameters are updated in backward, and leave from then on."""


@dataclass
class _Averages:
    """Moving averages of what is measured."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        old = self.values.get(name)
        self.values[name] = value if old is None else 0.8 * old + 0.2 * value

    def get(self, name: str, default: float = 0.0) -> float:
        return self.values.get(name, default)


class States(Recorder):
    """The live objects of one generation, whose states are stored as they are. The counterpart of capture.Capture."""

    def __init__(
        self, take: Callable[[], Inventory], optimizers: Mapping[str, Optimizer], step: int, pools: Pools,
        destination: Destination, write_layout: Callable[[Layout], None], settings: Settings,
        models: Mapping[str, nn.Module],
    ) -> None:  # fmt: skip
        super().__init__(destination)
        self.step = step
        self._optimizers = dict(optimizers)
        self._pools = pools
        self._write_layout = write_layout
        self._settings = settings
        self._live = Live(take, optimizers, is_part=destination.is_shared)
        self._layouts = {self._live.layout.id}
        self._volatile: set[int] = set()
        """uids of tensors that are edited between a commit and the next update: they are copied at once."""
        self._room: Room = NoRoom()
        self._has_looked = False
        self._updates = 0
        self._forks = forks.count
        self._hyper = self._live.hyper()
        self._carried_before: dict[int, Slot] = {}
        """Places of gradients that were once left on their parameters: they are kept, so that the pool fits."""
        self._sparse: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        """Sparse ones that were left when the last state was stored, which are not. Does the next backward add to them?"""
        self._sparse_stay, self._sparse_seen = True, 0
        self._note()
        self._last_begun = step
        self.interval = settings.interval or 1
        self._job: Job | None = None
        self._ahead = Ahead(self._live, self._begin_ahead)
        """With layer-wise updates: the state that backward is making."""
        self._turn = 0
        self.layers: list[Layerwise] = []
        self.gives_way = True
        """While gradients are being reduced. Only a benchmark wants it otherwise."""
        self._is_quiet = False
        """Nothing has been updated since the last commit."""
        self.snapshot: Snapshot | None = None
        self.may_finish_base: Callable[[int], bool] = lambda step: True
        self.on_durable: Callable[[int], None] = lambda step: None
        self.wants_base = ""
        self.error: BaseException | None = None
        self.synced_step = -1
        """The last step in the pool."""
        self.hidden_edits = 0
        self._hidden: list[int] = []
        self._stalled_s = 0.0
        self._committed_at = time.perf_counter()
        self._means = _Averages()
        self._schedule: Schedule | None = None
        self._ground: Ground | None = None
        self._planned_at = 0.0
        self._copied_bytes = 0
        self.last_trace: tuple[float, list[Event]] = (0.0, [])
        """Of the last state that was stored: when it was committed, and how it left."""
        self.num_stored = self.num_skipped = self.num_torn = self.num_early = 0
        self.stored_bytes = self.early_bytes = self.copied_bytes = 0
        self.gave_way_s = self.ahead_s = 0.0
        """Sums over states; the second: how long before the next update nothing of them had to leave any more."""
        self.busy_s = self._hook_s = 0.0
        self._handles = [
            handle
            for optimizer in self._optimizers.values()
            for handle in (
                optimizer.register_step_pre_hook(self._before_update), optimizer.register_step_post_hook(self._after_update)
            )
        ]  # fmt: skip
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = background.start(self._run, "everstep-offload")
        if settings.layerwise:
            try:
                self._watch_layers(models)
            except BaseException:
                self.close(finish=False)
                raise

    @property
    def layout(self) -> Layout:
        return self._live.layout

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _before_update(self, *_: Any) -> None:
        if forks.count != self._forks:
            return  # a forked child trains for itself: no thread carries anything there
        begun, stalled = time.perf_counter(), self.stall_s
        if not self._has_looked:
            self._has_looked = True
            self.look_for_scaler()
        if not self._updates:
            self._means.add("quiet_s", begun - self._committed_at)
            if self._sparse:
                self._sparse_stay = any(is_in(grad, p.grad) for _, p, grad in self._sparse)
                self._sparse_seen += 1
                self._sparse = []
        self._quiet_ends(begun)
        self.guard()
        self._hook_s += time.perf_counter() - begun - (self.stall_s - stalled)

    def _after_update(self, *_: Any) -> None:
        self._updates += forks.count == self._forks

    def _quiet_ends(self, now: float) -> None:
        """Something is about to be updated."""
        if self._is_quiet and self._job is not None:
            left_at = self._job.leaving.left_at
            self.ahead_s += 0.0 if left_at is None else max(0.0, now - left_at)
        self._is_quiet = False

    def guard(self) -> None:
        """The state is about to change: return when nothing looks at it any more."""
        job, snapshot = self._job, self.snapshot
        begun = time.perf_counter()
        if job is not None and not job.done.is_set():
            job.leaving.guard()
        if snapshot is not None and not snapshot.done.is_set():
            snapshot.guard()
        self.stall_s += time.perf_counter() - begun

    # -- layer-wise updates -------------------------------------------------------------------------------------------

    def _watch_layers(self, models: Mapping[str, nn.Module]) -> None:
        order = [p for model in models.values() for p in model.parameters()]
        for optimizer in self._optimizers.values():
            self.layers.append(
                Layerwise(optimizer, order, before=self._before_layer, after=self._after_layer, model=list(models.values()))
            )

    def _before_layer(self, params: list[torch.Tensor]) -> None:
        """These are about to be updated, in backward or by step()."""
        begun, job = time.perf_counter(), self._job
        self._quiet_ends(begun)
        if job is not None and not job.done.is_set():
            job.leaving.guard(self._ahead.places(params, job.live.slots))
        if self.snapshot is not None and not self.snapshot.done.is_set():
            self.snapshot.guard()
        self._ahead.before(params)
        self.stall_s += time.perf_counter() - begun

    def _after_layer(self, params: list[torch.Tensor]) -> None:
        is_due = self.step + 1 - self._last_begun >= self.interval
        self._ahead.after(params, self._carried_before.values() if is_due else None)

    def _begin_ahead(self, live: Described) -> Job:
        """S(step + 1) begins to leave before it is there."""
        job = Job(self.step + 1, self.layout, live, self._leaving(live, is_ready=False), None)
        self._jobs.put(job)
        return job

    def _complete_ahead(self, cursor: dict[str, Any]) -> bool:
        """Whether what has begun to leave is S(step)."""
        if self._ahead.job is None:
            return False
        try:
            job = self._ahead.complete(self.step, *self._state_now(cursor), self._turn)
        finally:
            self._ahead.drop()  # if it could not be described
        if job is None:
            return False
        self._turn += 1
        self._begun(job)
        return True

    def _gives_way(self) -> bool:
        return self.gives_way and any(layer.reducing.is_set() for layer in self.layers)

    # -- the boundary -------------------------------------------------------------------------------------------------

    def commit(self, cursor: Callable[[], dict[str, Any]]) -> bool:
        """End the next step, if anything happened; store its state, if it is due. Returns whether it did."""
        for layer in self.layers:
            layer.check_finished()
        if not self._updates and not self._was_edited():
            return False
        now, hyper = cursor(), self._live.hyper()  # may raise (an extra's state_dict): then everything stays pending
        if self._live.groups_changed():
            self._live.refresh()  # so may this: what is new cannot be stored, or not with several ranks
        self.step += 1
        self._hyper = hyper
        self._stalled_s += self.count_time()
        self._ahead.look()
        try:
            if self.step - self._last_begun >= self.interval and self._is_free():
                if not self._complete_ahead(now):
                    self._begin(now)
            else:
                self._ahead.drop()
        except BaseException:
            self.step -= 1  # it could not be described, or its layout not be stored: it is still pending
            raise
        self._updates = 0
        self._note()
        self._warn_hidden()
        self._committed_at = time.perf_counter()
        self._is_quiet = True
        return True

    def _is_free(self) -> bool:
        """Whether the last state has arrived. If we chose the interval, this one is left out; else it is waited for."""
        job = self._job
        if job is None or job.done.is_set():
            return True
        if self._settings.interval is None:
            self.num_skipped += 1
            return False
        begun = time.perf_counter()
        job.done.wait()
        self.stall_s += time.perf_counter() - begun
        return True

    def _begin(self, cursor: dict[str, Any]) -> Job:
        """Start to carry out S(step), which the live state is."""
        live, fields = self._state_now(cursor)
        memory_bytes = self._memory_bytes(live)
        if self._settings.staged and memory_bytes != self._room.limit:
            self._room = Staging(memory_bytes)
        job = Job(self.step, self.layout, live, self._leaving(live), fields)
        job.leaving.first_look(self._turn)
        self._turn += 1
        self._begun(job)
        self._jobs.put(job)
        return job

    def _leaving(self, live: Described, *, is_ready: bool = True) -> Leaving:
        return Leaving(
            live, self._room, pace=self._settings.pace, copy_first=self._settings.copy_first,
            copy_at=self._copy_at if self._settings.staged else None, is_ready=is_ready,
            give_way=self._gives_way if self.layers else None, max_copied=self._max_copied(),
        )  # fmt: skip

    def _max_copied(self) -> int | None:
        """Where training must wait for the way out whatever is copied, no more is than keeps that busy."""
        schedule = self._schedule
        if self._settings.interval is None or self._settings.copy_first or schedule is None or not schedule.stall_s:
            return None
        return schedule.peak_bytes + GRAIN_BYTES

    def _begun(self, job: Job) -> None:
        """This is the state on its way now."""
        if self.num_stored >= MEASURED_AFTER:
            self._means.add("snapshot_stall_s", self._stalled_s)  # since the last one
        self._stalled_s = 0.0
        self._last_begun = self.step
        self._committed_at = job.committed_at = time.perf_counter()
        self._job = job

    def _state_now(self, cursor: dict[str, Any], *, copy_up_to: int = 0) -> tuple[Described, Callable[[], dict[str, Any]]]:
        """The live state as S(step), copied if it has at most so many bytes; and what a manifest says beside its tensors."""
        live, optimizers = self._live.describe()
        d, layout, hyper = self._destination, self.layout, self._hyper
        if layout.id not in self._layouts:
            self._write_layout(layout)
            self._layouts.add(layout.id)
        carried = self._carry(live)
        copy = live.num_bytes <= copy_up_to
        for i, slot in enumerate(live.slots if copy or self._volatile else ()):
            if not live.settled[i] and (copy or slot.uid in self._volatile):
                live.put_copy(i, live.tensors[i].clone(memory_format=torch.preserve_format))

        def fields() -> dict[str, Any]:
            stored = tuple(
                StoredOptimizer(o.name, o.params, pack_hyper(hyper[o.name], o.name), o.state) for o in optimizers
            )
            return {
                "run": d.run, "timeline": d.timeline, "generation": d.generation, "layout": layout,
                "optimizers": stored, "cursor": cursors.encode(cursor), "carried": carried, "audit": TRAINER,
                "fingerprint": d.fingerprint,
            }  # fmt: skip

        return live, fields

    def _carry(self, live: Described) -> tuple[tuple[int, int], ...]:
        """The gradients that are left on their parameters. Those of some are there at one commit and not at the next."""
        grads = dict(self._live.gradients())
        found = []
        for uid in {**self._carried_before, **grads}:
            if uid in grads:
                index = live.add(uid, "grad", f"grad.{uid:016x}", grads[uid].detach().clone(), settled=True)
                self._carried_before[uid] = live.slots[index]
                found.append((uid, index))
            else:
                live.add_again(self._carried_before[uid])
        self._sparse = self._live.sparse_gradients()
        if self._sparse_stay or self._sparse_seen < 2:
            found += [(uid, LOST) for uid, _, _ in self._sparse]
        return tuple(found)

    def _note(self) -> None:
        """The live objects are S(step): what tells later whether they still are."""
        self._mark = self._live.mark()
        self._buffers, self._grads = self._live.buffers_mark(), self._live.gradients_mark()

    def _warn_hidden(self) -> None:
        if self._ahead.is_deceived:
            self._ahead.is_deceived = False
            warnings.warn(
                f"before step {self.step}, parameters were changed between their update and the commit in a way that no "
                "version counter shows (.data, numpy). This step is stored as it is; whether steps before it lack such a "
                "change is not known. From now on states begin to leave at the commit, in spite of layerwise=True",
                HiddenEditWarning,
                stacklevel=3,
            )
        if not self._hidden:
            return
        uids, self._hidden = self._hidden, []
        labels = self._live.inventory.labels()
        self.hidden_edits += len(uids)
        named = [labels.get(uid, "optimizer state") for uid in uids]
        warnings.warn(
            f"before step {self.step}, {', '.join(named[:5])} changed between a commit and the next update while it was on "
            "its way to the pool: that snapshot was discarded. From now on it is copied at the commit",
            HiddenEditWarning,
            stacklevel=3,
        )

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        turn = 0
        while True:
            job = self._jobs.get()
            if job is None:
                return
            begun = time.perf_counter()
            try:
                if self.error is None:
                    self._store(job, turn)
            except BaseException as e:
                self.error = self.error or e
            finally:
                turn += 1
                job.leaving.forget()
                job.live = Described()  # freed here, not by the training thread when the next one is begun
                self.busy_s += time.perf_counter() - begun - job.leaving.idle_s
                job.done.set()
                del job  # its tensors are freed here, not when the next one comes

    def _store(self, job: Job, turn: int) -> None:
        begun = time.perf_counter()
        writer: Writer = self._pools.begin(job.step, job.layout, job.live.slots, self._ahead.order)
        is_stored = False
        try:
            job.leaving.carry(writer)
            if job.leaving.is_cancelled:
                return
            if not job.leaving.torn:
                job.leaving.second_look(writer.sums(), turn)
            if not job.leaving.torn:
                assert job.fields is not None
                writer.finish(step=job.step, **job.fields())
                is_stored = True
        except PoolFullError as e:
            self._pools.make_larger(e.num_bytes)  # this state is not stored; the next one is, into another pool
        finally:
            if not is_stored:
                with contextlib.suppress(StorageError):  # the first error is the one to report
                    writer.abandon()
        if not is_stored:
            self._volatile.update(job.leaving.edited)
            self._hidden += job.leaving.edited
            self.num_torn += job.leaving.torn
            return
        self.num_stored += 1
        self.num_early += job.is_early
        self.stored_bytes += job.live.num_bytes
        self.early_bytes += job.leaving.early_bytes
        self.copied_bytes += job.leaving.copied_bytes
        self.gave_way_s += job.leaving.gave_way_s
        self._pools.committed(job.step)
        self.synced_step = job.step
        self.on_durable(job.step)
        self._learn(job, time.perf_counter() - begun - job.leaving.idle_s)

    # -- schedule -----------------------------------------------------------------------------------------------------

    def _copy_at(self, num_bytes: int) -> float:
        """When to begin to copy the rest, so that it is done when the next update comes; inf: it will have left by then."""
        quiet_s, bandwidth = self._means.get("quiet_s"), self._bandwidth()
        if not quiet_s or not bandwidth:
            return float("inf")
        now = time.monotonic()
        due = now + self._committed_at + quiet_s - time.perf_counter()
        if now + num_bytes / bandwidth <= due:
            return float("inf")
        return due - 1.2 * num_bytes / self._means.get("copy_bandwidth", _COPY_BANDWIDTH)

    def _memory_bytes(self, live: Described) -> int:
        """For copies of so much."""
        if not self._settings.staged:
            return 0
        given = self._settings.memory_bytes
        return sum(-(-size // 64) * 64 for size in live.sizes) if given is None else given

    def _bandwidth(self) -> float:
        """Of the way out of the live tensors; 0 as long as it is not known."""
        limit = self._settings.max_bandwidth if self._settings.pace is not None else None
        return limit or self._means.get("bandwidth")

    def _learn(self, job: Job, took_s: float) -> None:
        """By the thread, after a state was stored: what it cost, and how often that can be afforded."""
        leaving = job.leaving
        self._copied_bytes = leaving.copied_bytes
        self.last_trace = (job.committed_at, leaving.trace)
        if self.num_stored == 1:
            return  # it made the pool, and touched all memory for the first time
        self._means.add("store_s", took_s)
        in_place = [e for e in leaving.trace if e.kind == "in place"]
        carried, carry_s = sum(e.num_bytes for e in in_place), sum(e.ended_s - e.begun_s for e in in_place)
        if self._settings.pace is None and carry_s:
            self._means.add("bandwidth", carried / carry_s)
        if leaving.copied_bytes and leaving.copy_s:
            self._means.add("copy_bandwidth", leaving.copied_bytes / leaving.copy_s)
        if self.num_stored < MEASURED_AFTER or not self.step_s:
            return
        ground = Ground(
            step_s=max(self.step_s - self._means.get("snapshot_stall_s") / self.interval, 1e-6),
            bandwidth=self._bandwidth() or _COPY_BANDWIDTH,
            copy_bandwidth=self._means.get("copy_bandwidth", _COPY_BANDWIDTH),
            memory_bytes=self._memory_bytes(job.live),
        )
        now = time.perf_counter()
        if self._ground is None or drifted(self._ground, ground) or now - self._planned_at > PLAN_EVERY_S:
            self._ground, self._planned_at = ground, now
            deadline = max(min(self._means.get("quiet_s"), ground.step_s), 1e-6)
            state = Piece("state", job.live.num_bytes, 0.0, deadline)  # all of it: cut into grains, not into small tensors
            self._schedule = plan([state], ground, interval=self._settings.interval, max_overhead=MAX_OVERHEAD)
        if self._settings.interval is None and self._schedule is not None:
            affordable = self._means.get("snapshot_stall_s") / (MAX_OVERHEAD * ground.step_s)
            # One is on its way at a time, until it is durable.
            arrived = self._means.get("store_s") / ground.step_s
            self.interval = max(1, self._schedule.interval, math.ceil(affordable), math.ceil(arrived))

    # -- flushing, bases, the end -------------------------------------------------------------------------------------

    def flush(self, cursor: dict[str, Any] | None = None) -> None:
        """Return when the last committed state is stored, or that has failed. `cursor`: of it."""
        for _ in range(_TRIES):
            job = self._job
            if job is not None:
                job.done.wait()
            if self.synced_step >= self.step or self.error is not None or cursor is None or not self.is_as_committed():
                return
            self._ahead.drop()
            self._begin(cursor).done.wait()

    def settle(self) -> None:
        """Nothing in flight waits for the training thread."""

    def forget_changes(self) -> None:
        """The live objects were set to S(step) again: nothing has happened since."""
        self._live.refresh()
        self._ahead.drop()
        for layer in self.layers:
            layer.reset()
        self._updates = 0
        self._is_quiet = False
        self._hyper = self._live.hyper()
        self._note()

    def pending(self) -> bool:
        """Whether something has happened since the last commit."""
        return bool(self._updates) or any(layer.num_unfinished for layer in self.layers) or self._was_edited()

    def _was_edited(self) -> bool:
        """Whether the state was changed otherwise than by updates since the last commit.

        Buffers that forward changed, or other groups, are no reason for a step while gradients are being accumulated: that
        is one with its update.
        """
        if self._destination.is_shared:
            return False
        has_more = self._buffers_changed() or self._live.groups_changed()
        return self._live.mark() != self._mark or (has_more and self._grads_are_same())

    def _buffers_changed(self) -> bool:
        return self._live.buffers_mark() != self._buffers

    def _grads_are_same(self) -> bool:
        return self._live.has_gradients_of(self._grads)

    def is_as_committed(self) -> bool:
        """Whether the live state still is S(step), as far as version counters tell."""
        return (
            not self.pending()
            and self._live.mark() == self._mark
            and not self._buffers_changed()
            and not self._live.groups_changed()
            and self._grads_are_same()
        )

    def take_base(self, cursor: dict[str, Any], on_done: Callable[[Snapshot], None], *, copy: bool = False) -> Snapshot:
        """Start a base of S(step), straight to disk: before the first step, and now and then."""
        if self.snapshot is not None:
            self.snapshot.guard()
            self.snapshot.wait()
        live, fields = self._state_now(cursor, copy_up_to=sys.maxsize if copy else COPY_AT_ONCE_BYTES)
        d = self._destination
        self.wants_base = ""
        self.snapshot = Snapshot(
            d.bases, self.step, live, fields, direct=d.direct, on_done=on_done, may_finish=self.may_finish_base,
            rank=d.rank, look_twice=True,
        )  # fmt: skip
        return self.snapshot

    def restart(self) -> None:
        """Forget the error; the next state goes into a new pool."""
        for job in (self._job, self._ahead.drop()):
            if job is not None:
                job.done.wait()
        if self.snapshot is not None:  # one that has not failed still looks at the live state
            self.snapshot.guard()
            self.snapshot.wait()
        self.error, self.synced_step, self.snapshot = None, -1, None
        self._pools.forget()

    def close(self, *, finish: bool) -> None:
        self.guard()
        self._ahead.drop()
        for layer in self.layers:
            layer.detach()
        for handle in self._handles:
            handle.remove()
        self._live.close()
        if self.snapshot is not None:
            self.snapshot.wait()
        self._jobs.put(None)
        self._thread.join()
        self._pools.close()

    def errors(self) -> list[BaseException]:
        found = [self.error, None if self.snapshot is None else self.snapshot.error]
        return [e for e in found if e is not None]

    def inflight(self) -> tuple[int, int]:
        job = self._job
        return (0, 0) if job is None or job.done.is_set() else (1, job.live.num_bytes)

    def background_s(self) -> dict[str, float]:
        return {"offload": self.busy_s}

    def picture(self) -> str:
        """The last state on its way out, against the schedule (SVG); empty before there is one."""
        begun_s, trace = self.last_trace
        if self._schedule is None or not trace:
            return ""
        seen, changes = [], []
        copied = {event.tensor for event in trace if event.kind == "copy"}
        for event in trace:
            row: Row = "copies" if event.kind == "copy" else "link"
            name = f"tensor {event.tensor}, {event.kind}"
            seen.append(Seen(row, name, event.begun_s - begun_s, event.ended_s - begun_s))
            if event.kind == "copy":
                changes.append((event.begun_s - begun_s, event.num_bytes))
            elif event.kind == "snapshot" and event.tensor in copied:
                changes.append((event.ended_s - begun_s, -event.num_bytes))
        held, memory = 0, []
        for at_s, num_bytes in sorted(changes):
            held += num_bytes
            memory.append((at_s, max(held, 0)))
        return draw(self._schedule, seen, memory)

    @property
    def hook_s(self) -> float:
        """The training thread's own time in hooks, without what it waited."""
        return self._hook_s

    def stats(self) -> dict[str, Any]:
        """Numbers that only this way of storing has."""
        schedule = self._schedule
        return {
            "snapshots": self.num_stored,
            "snapshots_skipped": self.num_skipped,
            "snapshots_torn": self.num_torn,
            "snapshot_interval": self.interval,
            "snapshots_early": self.num_early,
            "early_bytes": self.early_bytes,
            "gave_way_s": self.gave_way_s,
            "pool_bytes": self._pools.num_bytes,
            "pool_is_durable": self._pools.is_durable,
            "schedule": None if schedule is None else {
                "interval": schedule.interval, "regime": schedule.regime, "stall_s": schedule.stall_s,
                "peak_bytes": schedule.peak_bytes, "says": explain(schedule),
                "measured_stall_s": self._means.get("snapshot_stall_s"), "measured_peak_bytes": self._copied_bytes,
                "bandwidth": schedule.ground.bandwidth, "copy_bandwidth": schedule.ground.copy_bandwidth,
            },
        }  # fmt: skip
