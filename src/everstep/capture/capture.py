"""Capture: everything that happens to the training state between two commits becomes one frame.

Runs on the training thread, except for what it hands to the writer (offload.py), the auditor and the base thread.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from everstep import cursor as cursors
from everstep.atoms import RESIDUALS, Layout
from everstep.capture.auditor import Auditor, hash_replicas
from everstep.capture.early import Early
from everstep.capture.live import Described
from everstep.capture.offload import Offload
from everstep.capture.pending import Audit, Item, PendingCommit, PendingLayout, PendingState, PendingTensor
from everstep.capture.recorder import Destination, Recorder
from everstep.capture.sent import Ledger
from everstep.capture.snapshot import COPY_AT_ONCE_BYTES, Snapshot
from everstep.capture.strays import Strays
from everstep.capture.structure import Structure
from everstep.capture.tap import Tap
from everstep.capture.usual import Usual
from everstep.capture.watch import Watch
from everstep.errors import HiddenEditWarning
from everstep.format.documents import LOST, TRAINER
from everstep.naming import Inventory
from everstep.store.log import LogWriter


class Capture(Recorder):
    """The live objects of one generation, watched from its first step to its last."""

    def __init__(
        self, take: Callable[[], Inventory], optimizers: Mapping[str, Optimizer], step: int, log: LogWriter,
        write_layout: Callable[[Layout], None], destination: Destination, *, full_audit: bool, durability: str,
        batch_steps: int, max_inflight_steps: int, max_inflight_bytes: int, early: bool = False,
        residual_interval: int = 1,
    ) -> None:  # fmt: skip
        """`take` reads the live objects: what this rank stores of them. Residuals of gradient compression are in the frames
        of steps that are multiples of `residual_interval`."""
        super().__init__(destination)
        self.step = step
        self._optimizers = dict(optimizers)
        self._log = log
        self._structure = Structure(take)
        inventory = self._inventory = self._structure.inventory
        self._residuals = _residuals_of(inventory)
        self._kept: dict[int, torch.Tensor] = {}
        """Residuals of S(step), until the next update: a DDP hook makes others in backward, in other memory."""
        self._keep_residuals()
        self.ledger = Ledger()
        self.taps = {
            name: Tap(
                name, optimizer, lambda name=name: (self._inventory.groups[name], self._inventory.uid_of), self,  # type: ignore[misc]
                Early(self.put, self.ledger) if early else None,
            )
            for name, optimizer in optimizers.items()
        }  # fmt: skip
        self._strays = Strays(inventory)
        self._watch = Watch(inventory, self._optimizers)
        only = next(iter(self.taps.values())) if len(self.taps) == 1 else None
        self._usual = None if only is None else Usual(only, self._watch, self._structure, self._strays)
        self._auditor = Auditor(full=full_audit)
        self._watch.end_audit = self._auditor.end
        self.offload = Offload(
            log, inventory.layout, write_layout, durability=durability, batch_steps=batch_steps,
            max_inflight_steps=max_inflight_steps, max_inflight_bytes=max_inflight_bytes, ledger=self.ledger,
        )  # fmt: skip
        self.offload.meanwhile = self._auditor.wake_if_late
        self.offload.before_end = self._auditor.run
        self._residual_interval = residual_interval
        self._updates = 0
        self._overwrites = 0
        self.snapshot: Snapshot | None = None
        self.may_finish_base: Callable[[int], bool] = lambda step: True
        """Whether everything that a base of this step stands on is durable: the run says."""
        self.wants_base = ""
        """Why the run should take a base at its next commit; empty: no reason."""
        self.hidden_edits = 0
        self._last_audit: Audit | None = None
        self._cursor: dict[str, Any] | None = None

    @property
    def layout(self) -> Layout:
        return self._inventory.layout

    # -- Recorder: called by taps -------------------------------------------------------------------------------------

    def before_update(self, tap: Tap) -> None:
        """An optimizer is about to change the state."""
        if not tap.updates:
            self.look_for_scaler()
        for each in self.taps.values():
            each.settle(force=True)
        self.stall_s += self._auditor.end()
        if self.snapshot is not None and not self.snapshot.done.is_set():
            begun = time.perf_counter()
            self.snapshot.guard()
            self.stall_s += time.perf_counter() - begun
        if any(t.groups_changed() for t in self.taps.values()):
            self._restructure()
        for item in self._watch.before_update():
            self._overwrites += 1
            self.put(item)
        for each in self.taps.values():
            # Results of an optimizer that is never replayed can wait for the commit, unless this update starts from them.
            if each.results_due and (not each.overwrite or (each is not tap and not set(each.uids).isdisjoint(tap.uids))):
                self._store_results(each)
        for item in tap.changed_groups():
            self.put(item)
        self._warn_hidden()

    def is_quiet(self) -> bool:
        """Whether before_update has nothing to do but to look at the groups of the one optimizer that there is."""
        audit, snapshot = self._last_audit, self.snapshot
        return (
            len(self.taps) == 1
            and self._watch.is_calm()
            and (audit is None or audit.done.is_set())
            and (snapshot is None or snapshot.done.is_set())
        )

    def after_update(self, optimizer: str) -> None:
        self._updates += 1
        if self._kept:
            kept, self._kept = self._kept, {}
            self.dispose([kept])
        self._watch.after_update(optimizer)

    def put(self, item: Item) -> None:
        self.offload.put(self.step + 1, item)

    def state_loaded(self, optimizer: str) -> None:
        """optimizer.load_state_dict was called."""
        self._watch.look_at_states(optimizer)

    def changed_since_commit(self) -> set[int]:
        """Parameters that somebody has edited since, or whose optimizer state."""
        return self._watch.changed_since_commit()

    def dispose(self, tensors: list[Any]) -> None:
        """Let another thread free the memory of gradients that are done with."""
        self.offload.dispose(tensors)

    def warn(self, message: str, category: type[Warning]) -> None:
        warnings.warn(message, category, stacklevel=2)

    # -- the boundary -------------------------------------------------------------------------------------------------

    def commit(self, cursor: Callable[[], dict[str, Any]]) -> bool:
        """Close the frame of the next step, if anything happened. Returns whether it did."""
        if self._usual is not None and self._usual.holds():
            taps: Collection[Tap] = ()
        else:
            taps = self.taps.values()
            self._look(taps)
            if not self._updates:
                if not self._overwrites or self._destination.is_shared:
                    return False
                if any(tap.accumulating() for tap in taps):
                    return False  # the gradients of an accumulation are not in any frame: wait for its update
        now = cursor()  # may raise (an extra's state_dict): then everything stays pending
        for item in self._strays.carried() if taps else ():
            self.put(item)
        for tap in taps:
            for item in (*tap.changed_groups(), *tap.carried()):
                self.put(item)
        if self._residuals or self._kept:
            self._tell_residuals()
        self.step += 1
        self._updates = self._overwrites = 0
        audit = self._audit()
        self.offload.commit(PendingCommit(self.step, now, audit, time.time_ns(), (self._cursor, self._last_audit)))
        self._cursor, self._last_audit = now, audit
        if self.offload.is_behind:
            self._auditor.wake()
        self._watch.after_commit()
        for tap in self.taps.values():
            tap.after_commit()
        self.count_time()
        if not self.offload.has_room():
            self.settle()
            self.stall_s += self.offload.wait_for_room()
        return True

    def _look(self, taps: Collection[Tap]) -> None:
        """Put into the frame whatever has changed since the last look."""
        for tap in taps:
            self._updates += tap.reset_after_exception()
        for item in self._watch.at_commit():
            self._overwrites += 1
            self.put(item)
        if self._watch.reshaped or self._structure.has_changed() or any(t.groups_changed() for t in taps):
            self._restructure()
        for tap in taps:
            if tap.results_due:
                self._store_results(tap)
        self._warn_hidden()

    def _tell_residuals(self) -> None:
        self._keep_residuals()
        if (self.step + 1) % self._residual_interval == 0:
            for uid, residual in self._kept.items():
                self.put(PendingTensor(uid, residual))

    def _keep_residuals(self) -> None:
        """By reference: their memory is not written to again, since the next step's have another. As `.data`: the next ones
        count versions by the same counter."""
        self._kept = {uid: self._inventory.tensors[uid].data for uid in self._residuals}

    def flush(self, cursor: dict[str, Any] | None = None) -> None:
        """Return when everything committed is durable, or has failed."""
        self._auditor.hurry()
        self.settle()
        self.offload.flush()

    def settle(self) -> None:
        """Make sure that nothing in flight waits for the training thread."""
        for tap in self.taps.values():
            tap.settle(force=True)

    def forget_changes(self) -> None:
        """The live objects were set to S(step) again: nothing has happened since."""
        self.settle()
        self.offload.discard()
        self._watch.install(self._inventory)
        for tap in self.taps.values():
            tap.regroup()
        self._keep_residuals()
        self._updates = self._overwrites = 0

    def pending(self) -> bool:
        """Whether something has happened since the last commit."""
        return bool(self._updates or self._overwrites)

    def _audit(self) -> Audit:
        audit, watch = Audit(), self._watch
        if not watch.is_bare():
            audit.buffers = watch.small_buffers()
            audit.replica_targets = watch.next_replicas()
            for uid, piece, value in watch.slice_sums():
                audit.add(uid, piece, value)
        if watch.covers_all():
            audit.complete = True
            hash_replicas(audit)
            audit.done.set()
            return audit
        self.stall_s += self._auditor.end()
        looks, known = watch.states_to_look_at()
        self._auditor.begin(audit, *watch.quiet_targets(), looks, self.step_s, known)
        return audit

    def _store_results(self, tap: Tap) -> None:
        tap.results_due = False
        for item in tap.result_items():
            self.put(item)
        self._overwrites += 1

    def _warn_hidden(self) -> None:
        labels = self._watch.hidden_edits
        if not labels:
            return
        self._watch.hidden_edits = []
        self._watch.look_closely()
        self.hidden_edits += len(labels)
        self.wants_base = f"a hidden edit of {labels[0]} near step {self.step + 1}"
        warnings.warn(
            f"near step {self.step + 1}, {', '.join(labels[:5])} changed by means that no version counter shows (.data, "
            "numpy?). The new values are recorded, and a new base will be taken. Edit tensors under torch.no_grad() "
            "instead, or pass audit='full'",
            HiddenEditWarning,
            stacklevel=2,
        )

    # -- structure ----------------------------------------------------------------------------------------------------

    def _restructure(self) -> None:
        """Atoms or groups have changed: record how, and look at the new ones from now on."""
        for item in (*self._watch.at_commit(), *self._watch.before_install()):
            self.put(item)
        old = self._inventory
        new = self._inventory = self._structure.take()
        self._residuals = _residuals_of(new)
        if new.layout.id != old.layout.id:
            self.put(PendingLayout(new.layout))
        for uid, tensor in new.tensors.items():
            if old.tensors.get(uid) is not tensor:
                self.put(PendingTensor(uid, tensor.detach().clone()))
        for name, tap in self.taps.items():
            if tap.groups_changed() or new.groups[name] != old.groups[name]:
                tap.settle(force=True)
                tap.regroup()
                self.put(tap.groups_item())
            renamed = {new.uid_of[id(p)] for p in tap.params if old.uid_of.get(id(p)) != new.uid_of[id(p)]}
            for item in tap.state_items():
                if isinstance(item, PendingState) and item.uid in renamed and item.state is not None:
                    self.put(item)
            now = {uid for group in new.groups[name] for uid in group}
            for uid in {uid for group in old.groups[name] for uid in group} - now:
                if new.tensors.get(uid) is not old.tensors[uid]:  # else its state stays, though no group has it
                    self.put(PendingState(name, uid, None))
        self._strays.follow(new)
        self._watch.reshaped = False
        self._watch.install(new)
        self._overwrites += 1

    # -- bases --------------------------------------------------------------------------------------------------------

    def is_as_committed(self) -> bool:
        """Whether the live state still is S(step): then a base of it can be taken."""
        intact = self._strays.carry_is_intact() and all(tap.carry.is_intact() for tap in self.taps.values())
        return intact and not self.pending()

    def has_newer_residuals(self) -> bool:
        """Whether a base of S(step) by a follower, if there is one, has residuals of an earlier step."""
        own = self.snapshot
        is_own = own is not None and own.step == self.step and own.manifest is not None
        return bool(self._residuals) and self.step % self._residual_interval != 0 and not is_own

    def take_base(
        self, cursor: dict[str, Any], on_done: Callable[[Snapshot], None], *, copy: bool = False
    ) -> Snapshot:
        """Start a base of S(step): right after a commit, before the first step, or when is_as_committed().

        `copy`: everything is copied now; else in the background, except for what is small or known to be edited.
        """
        if self.snapshot is not None:
            self.snapshot.guard()
            self.snapshot.wait()
        live = Described()
        live.add_atoms(self._inventory, self._kept)
        optimizers = tuple(
            live.add_optimizer(
                self._inventory, tap.name, tap.optimizer, tap.uids, tap.params, tap.group_uids, tap.recorded_hyper
            )
            for tap in self.taps.values()
        )
        carried = self._carried(live)
        small = live.num_bytes <= COPY_AT_ONCE_BYTES
        for i, slot in enumerate(live.slots):
            if not live.settled[i] and (copy or small or self._watch.is_volatile(slot.uid)):
                live.tensors[i], live.settled[i] = _copy(live.tensors[i]), True
        d = self._destination
        layout = self._inventory.layout

        def fields() -> dict[str, Any]:
            return {
                "run": d.run, "timeline": d.timeline, "generation": d.generation, "layout": layout,
                "optimizers": optimizers, "cursor": cursors.encode(cursor), "carried": carried, "audit": TRAINER,
                "fingerprint": d.fingerprint,
            }  # fmt: skip

        self.wants_base = ""
        self.snapshot = Snapshot(
            d.bases, self.step, live, fields, direct=d.direct, audit=self._expected(), on_done=on_done,
            may_finish=self.may_finish_base, rank=d.rank, fine=self._inventory.layout.fine,
        )  # fmt: skip
        return self.snapshot

    def _expected(self) -> Audit | None:
        """Hashes that a base taken now must have."""
        if self._last_audit is not None or not self._watch.covers_all():
            return self._last_audit
        audit = Audit()
        for uid, piece, value in self._watch.slice_sums():
            audit.add(uid, piece, value)
        audit.done.set()
        return audit

    def _carried(self, live: Described) -> tuple[tuple[int, int], ...]:
        out = []
        for tap in self.taps.values():
            for uid, kind, grad in tap.carried_now():
                index = LOST if kind == "lost" else -1
                if kind not in ("zero", "lost"):
                    index = live.add(uid, "grad", f"grad.{uid:016x}", grad.detach().clone(), settled=True)
                out.append((uid, index))
        for uid, grad in self._strays.carried_now():
            out.append((uid, live.add(uid, "grad", f"grad.{uid:016x}", grad.detach().clone(), settled=True)))
        return tuple(out)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, *, finish: bool) -> None:
        """Stop all threads; `finish` ends the log in order. Uncommitted parts are dropped."""
        self.settle()
        for tap in self.taps.values():
            tap.detach()
        self._structure.close()
        self._auditor.close()
        if self.snapshot is not None:
            self.snapshot.guard()
            self.snapshot.wait()
        self.offload.close(finish=finish)

    def inflight(self) -> tuple[int, int]:
        """Steps and bytes on their way to storage."""
        return self.offload.inflight()

    @property
    def synced_step(self) -> int:
        """Every frame of this generation up to this step is durable."""
        return self.offload.synced_step

    def restart(self) -> None:
        """Storage had failed: forget that, and begin anew with the next base."""
        self.settle()
        self.offload.restart()
        self.snapshot = None

    @property
    def hook_s(self) -> float:
        """The training thread's own time in hooks."""
        return sum(t.thread_s for t in self.taps.values())

    def stats(self) -> dict[str, Any]:
        """Numbers that only this way of storing has."""
        return {
            "copied_gradient_bytes": sum(t.copied_bytes for t in self.taps.values()),
            "early_bytes": self.ledger.used_bytes,
            "early_scaled_bytes": self.ledger.scaled_bytes,
            "early_void_bytes": self.ledger.void_bytes,
            "reused_bytes": self.ledger.reused_bytes,
            "reused_scaled_bytes": self.ledger.reused_scaled_bytes,
            "reused_void_bytes": self.ledger.reused_void_bytes,
            "sync_s": self.offload.sync_s,
        }

    @property
    def stored_bytes(self) -> int:
        """Written to the log so far."""
        return self._log.bytes_written

    def errors(self) -> list[BaseException]:
        """What went wrong in the background, the first first."""
        snapshot = self.snapshot
        if self.offload.error is None and self._auditor.error is None and (snapshot is None or snapshot.error is None):
            return []  # what is usual, at every commit
        found = [self.offload.error, self._auditor.error]
        if self.snapshot is not None:
            found.append(self.snapshot.error)
        return [e for e in found if e is not None]

    def background_s(self) -> dict[str, float]:
        return {"write": self.offload.busy_s - self._auditor.lent_s, "audit": self._auditor.busy_s}

    def background_cpu_s(self) -> float:
        """Processor time of the threads that write and hash."""
        return self.offload.cpu_s + self._auditor.cpu_s


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides where there are any to keep."""
    return tensor.clone(memory_format=torch.preserve_format)


def _residuals_of(inventory: Inventory) -> list[int]:
    return [a.uid for a in inventory.layout.atoms if a.owner == RESIDUALS]
