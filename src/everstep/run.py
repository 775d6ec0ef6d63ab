"""attach and Run: the rules of commit, storage errors and close."""

from __future__ import annotations

import atexit
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any

from torch import nn
from torch.optim import Optimizer

from everstep import cursor as cursors
from everstep import forks, rng
from everstep.alone import Alone
from everstep.capture import buckets
from everstep.capture.capture import Capture
from everstep.capture.snapshot import Snapshot
from everstep.capture.states import States
from everstep.errors import EverstepError, StorageError, UnprotectedWarning, UsageError
from everstep.follow.attend import ShadowKeeper
from everstep.follow.keeper import Keeper
from everstep.generation import Leftovers, Resumed, computes_differently, own_pools
from everstep.opening import open_run, warn_of_forgotten
from everstep.options import Options
from everstep.passes import Passes
from everstep.restore.execute import Restored
from everstep.restore.history import Step
from everstep.stages import Reports, Stages
from everstep.store import files
from everstep.store.runs import read_listing
from everstep.together import Together, is_in_parts

MODES = ("delta", "shadow", "snapshot", "auto")
PACE_AFTER = 50
"""Steps after which the measured pace is told."""


def attach(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer],
    run: str | os.PathLike[str],
    *,
    mode: str = "delta",
    extras: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Make every step of this training recoverable. Changes no tensor; see Run and Options."""
    if mode not in MODES:
        raise UsageError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    known = Options.__dataclass_fields__
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UsageError(f"unknown option {unknown[0]!r}; attach knows {', '.join(known)}")
    if mode != "shadow" and options.get("shadow"):
        raise UsageError(f"shadow={options['shadow']!r} needs mode='shadow'")
    if mode == "snapshot" and options.get("tune"):
        raise UsageError("tune=True sets nothing with mode='snapshot', which chooses its interval itself: leave it out")
    if mode == "auto":
        options["tune"] = True
    found = Options(**options)
    if mode != "snapshot" and found.of_snapshots:
        raise UsageError(f"{found.of_snapshots[0]} is for mode='snapshot'")
    return Run(model, optimizer, run, cursors.check_extras(extras), found, mode)


class Run:
    """A training run that is being written. Made by attach(); use it as a context manager, from one thread."""

    def __init__(
        self, model: Any, optimizer: Any, run: Any, extras: dict[str, Any], options: Options, mode: str = "delta"
    ) -> None:
        self._opened = open_run(model, optimizer, run, extras, options, mode)
        self._options = self._opened.options
        self._extras = extras
        self._compress = options.compress
        self._say = self._opened.say
        self._orders: buckets.BucketOrders | None = None
        self._bucket_orders: buckets.Orders = {}
        self._capture: Capture | States | None = None
        self._keeper: Keeper | None = None
        self._found: Resumed | None = None
        self._resumed: int | None = None
        self._closed = False
        self._forks = forks.count
        self._passes = Passes(
            may_drop=self._options.cursor == "drop", world_size=self._opened.ranks.size, set_back=self._set_back
        )
        self._durable = -1
        self._base_ready = False
        self._unprotected_since: int | None = None
        self._next_retry = 0.0
        self._rebase = False
        self._told_of_base = False
        self._alone_after: int | None = None
        """No base stands between this step and the next that is stored: steps between them cannot be restored. None: frames
        of the log go on from what was stored before."""
        self._pools_before: list[str] = []
        self._leftovers: Leftovers | None = None
        self._torn = False
        self._last_cursor: dict[str, Any] = {}
        self._restore_s = 0.0
        self._commits = 0
        atexit.register(self._at_exit)

    # -- the public face ----------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        return self._opened.path.path

    @property
    def step(self) -> int:
        """Committed steps so far. UsageError before resume(); after close() the last one."""
        return self._resumed_capture().step

    @property
    def epoch(self) -> int:
        """Which pass the latest call of steps() is in, counted from 0 over all calls."""
        return self._passes.epoch

    @property
    def durable_step(self) -> int:
        """The last step that survives whatever `durability` promises; -1 before the first base is stored."""
        return self._durable

    def resume(self, step: Step = "latest") -> int:
        """Restore in place and return the step: 0 for a new run. Resuming an older step opens a new timeline."""
        if self._closed:
            raise UsageError("this Run is closed")
        if self._resumed is not None:
            raise UsageError(f"already resumed at step {self._resumed}; attach again to resume another step")
        begun = time.perf_counter()
        listing = read_listing(self._opened.path)
        self._pools_before = own_pools(self._opened, listing)
        for _, problem in listing.pool_problems:
            self._say(f"everstep: {self.path}: {problem}")
        if self._opened.ranks.size > 1 or is_in_parts(self._opened, listing, step):
            found, restored = Together(self._opened, self._start).resume(step)
        else:
            found, restored = Alone(self._opened, self._start).resume(listing, step)
        self._go_on(found, restored)
        self._resumed = found.step
        self._restore_s = time.perf_counter() - begun
        return found.step

    def steps(self, loader: Iterable[Any], epochs: int = 1) -> Iterator[Any]:
        """Batches of `loader` from where the run stopped; every turn of the loop is committed.

        Calls are matched by their order: a pass that was finished before the run stopped yields nothing.
        """
        if not isinstance(epochs, Integral) or epochs < 0:
            raise UsageError(f"epochs must be a whole number from 0 on, not {epochs!r}")
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise UsageError(f"steps() takes a loader, or anything else that can be iterated, not {loader!r}")
        if self._resumed is None:
            self.resume()
        for _ in range(epochs):
            self._end_pass()
            current = self._passes.next(loader)
            if current is None:
                continue
            for batch in current:
                yield batch
                self._passes.check_goes_on(current)
                self.commit()
            self._passes.ended(current)

    def _end_pass(self) -> None:
        """Another pass begins: commit what was done after the last batch of one that was left early."""
        if self._passes.left() and self._live().pending():
            with self._passes.at_next():
                self.commit()

    def commit(self, wait: bool = False) -> int:
        """End step t: everything since the last commit becomes its frame. Nothing happened: nothing is committed.

        Returns the step. `wait`: only when it is durable. Raises what went wrong in the background since the last.
        """
        capture = self._live()
        if self._passes.was_made_before():
            return capture.step
        begun = time.perf_counter()
        stalled = capture.stall_s
        if self._unprotected_since is not None or capture.errors():
            self._look_at_errors(capture)
        if capture.commit(self._cursor):
            self._commits += 1
            self._after_commit(capture)
        capture.thread_s += time.perf_counter() - begun - (capture.stall_s - stalled)
        if wait:
            self.flush()
        return capture.step

    def flush(self) -> None:
        """Return when all committed steps are durable."""
        capture = self._live()
        capture.flush(self._last_cursor)
        if capture.snapshot is not None and not self._base_ready:
            capture.snapshot.wait()
            if not self._base_ready and not capture.errors() and capture.is_as_committed():
                capture.take_base(self._last_cursor, self._on_base, copy=True).wait()
        self._look_at_errors(capture)
        if self._unprotected_since is None:
            self._warn_if_not_stored(capture)

    def stats(self) -> dict[str, Any]:
        """Numbers about this run since it was attached; after close() the last ones."""
        capture, found = self._resumed_capture(), self._found
        assert found is not None
        steps, num_bytes = capture.inflight()
        return {
            "step": capture.step,
            "durable_step": self.durable_step,
            "written_step": self._written_step(capture),
            "proven_step": self._keeper.proven_step if self._keeper is not None else None,
            "resumed_step": self._resumed,
            "resumed_from": found.source,
            "resumed_proven": found.proven,
            "resume_s": self._restore_s,
            "fetch_s": found.fetch_s,
            "commits": self._commits,
            "step_s": capture.step_s,
            "training_thread_s": capture.thread_s + capture.hook_s,
            "stall_s": capture.stall_s,
            "inflight_steps": steps,
            "inflight_bytes": num_bytes,
            "log_bytes": capture.stored_bytes,
            "bytes_a_step": capture.stored_bytes / self._commits if self._commits else 0,
            "nonfinite_gradients": getattr(self._compress, "nonfinite_gradients", 0),
            "hidden_edits": capture.hidden_edits,
            "background_s": capture.background_s(),
            "unprotected_since": self._unprotected_since if self._keeper is None else self._since(self._keeper),
            **capture.stats(),
            **(self._keeper.stats() if self._keeper is not None else {}),
        }

    def _written_step(self, capture: Capture | States) -> int:
        """The last step that a kill of this process does not reach."""
        if self._base_ready and isinstance(capture, Capture):
            return max(self._durable, capture.offload.written_step)
        return self._durable

    def _since(self, keeper: Keeper) -> int | None:
        return self._unprotected_since if self._unprotected_since is not None else keeper.unprotected_since

    def close(self) -> None:
        """Commit what is pending, make everything durable, leave a base at the last step, release the run."""
        if self._closed or forks.count != self._forks:
            return
        try:
            if self._capture is not None:
                self.commit()  # a pass that was left early goes on from there: only another one ends it
        finally:
            self._close(finish=True)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            self._close(finish=False)
        except EverstepError as e:
            warnings.warn(f"while closing {self.path}: {e}", UnprotectedWarning, stacklevel=2)

    def __repr__(self) -> str:
        where = "not resumed" if self._capture is None else f"step {self._capture.step}, durable {self.durable_step}"
        return f"<everstep.Run {self.path}: {where}>"

    # -- resuming -----------------------------------------------------------------------------------------------------

    def _start(self, found: Resumed) -> None:
        """A generation is open, with its state in the live objects: start its stages."""
        self._found = found
        if found.orders is not None:
            self._orders = found.orders
            self._bucket_orders = {name: list(orders) for name, orders in found.orders.value.items()}
        leftovers = self._leftovers = Leftovers(self._opened, found, self._pools_before)
        stages = Stages(self._opened, found)
        reports = Reports(
            on_durable=self._on_durable, durable_step=lambda: self._durable, may_finish_base=self._may_finish_base
        )
        capture = self._capture = stages.record(reports, self._pools_before)
        keeper = self._keeper = stages.keep(capture)
        stages.tune(capture, keeper)
        leftovers.dismiss_shadow()

    def _go_on(self, found: Resumed, restored: Restored | None) -> None:
        """The stages have started. What stands on no base that can be replayed from takes one now."""
        assert self._leftovers is not None
        if restored is None:
            self._alone_after = found.step - 1
            self._cursor()
            self._take_base()
            return
        self._passes.resumed(found, restored)
        self._last_cursor = {**found.cursor, "rng": rng.capture()}
        differently = computes_differently(restored.fingerprint)
        if found.is_new or self._leftovers.hold_the_state or differently:
            if found.is_new and (self._opened.ranks.size > 1 or found.resized_from):
                self._alone_after = found.step - 1  # its parts may not be those that the step is stored in
            elif self._leftovers.hold_the_state or differently:
                self._alone_after = found.step
            self._take_base()
        else:
            self._base_ready = True
            self._durable = found.step
        self._say(f"everstep: resumed {self.path} {found.told}")

    def _set_back(self, restored: Restored) -> None:
        """All is as it was when the run was resumed, unless a step has been committed since."""
        if not self._commits:
            assert self._found is not None
            self._opened.training.apply(restored, self._found.cursor)
            self._live().forget_changes()

    def _cursor(self) -> dict[str, Any]:
        """The cursor of the step that is being committed."""
        self._last_cursor = {
            "rng": rng.capture(),
            "data": self._passes.position(),
            "extras": cursors.capture_extras(self._extras) if self._extras else {},
        }
        if self._compress is not None:
            self._last_cursor["compress"] = {"by": self._compress.describe(), "at": self._compress.position()}
        modules = self._opened.training.modules
        if modules.any:
            self._last_cursor["modules"] = modules.capture()
        if self._orders is not None:
            if self._orders.look():  # a cursor of an earlier step may still be on its way: it gets no part in this
                self._bucket_orders = {name: list(orders) for name, orders in self._orders.value.items()}
            self._last_cursor["buckets"] = self._bucket_orders
        return self._last_cursor

    # -- after a commit -----------------------------------------------------------------------------------------------

    def _after_commit(self, capture: Capture | States) -> None:
        keeper = self._keeper
        assert keeper is not None
        self._passes.committed()
        if self._commits <= PACE_AFTER:
            self._tell_of_beginning(capture)
        base = capture.snapshot
        if self._rebase or (self._unprotected_since is not None and self._is_torn(capture)):
            self._rebase = False
            self._take_base()
            return
        if self._unprotected_since is not None:
            return
        if not self._base_ready and base and capture.step - base.step >= self._options.max_inflight_steps:
            # Nothing is durable before the first base is: no more steps than usual may hang on it.
            begun = time.perf_counter()
            capture.settle()
            base.wait()
            capture.stall_s += time.perf_counter() - begun
        # With a base, one that this rank alone takes would not count where all must have it.
        hurried = "" if keeper.is_by_number and self._base_ready else capture.wants_base
        wanted = hurried or keeper.wants_base(capture.step, self._durable, capture.stored_bytes)
        if base is not None and not base.done.is_set():
            if not wanted or not keeper.is_by_number:
                return
            begun = time.perf_counter()
            base.wait()
            capture.stall_s += time.perf_counter() - begun
        if wanted and not capture.errors():
            self._take_base()

    def _tell_of_beginning(self, capture: Capture | States) -> None:
        if self._commits == 1:
            warn_of_forgotten(self._opened.training.optimizers, capture.scalers, self._extras)
        if self._commits == PACE_AFTER:
            self._say(self._pace_line(capture))

    def _is_torn(self, capture: Capture | States) -> bool:
        """Whether the last base was disturbed, and nothing has failed."""
        return self._torn and capture.snapshot is not None and capture.snapshot.done.is_set() and not capture.errors()

    def _take_base(self) -> None:
        copy, self._torn = self._torn, False
        self._live().take_base(self._last_cursor, self._on_base, copy=copy)

    def _on_base(self, snapshot: Snapshot) -> None:
        """In the base thread."""
        capture = self._capture
        if snapshot.torn and capture is not None:
            capture.wants_base = "the last one was disturbed by an edit"
            self._torn = True
        if snapshot.manifest is None or capture is None or self._keeper is None or self._leftovers is None:
            return
        first = not self._base_ready
        self._base_ready = True
        self._alone_after = None
        self._told_of_base = False
        if first:
            self._durable = max(self._durable, capture.synced_step)
        if first or isinstance(capture, States):  # elsewhere the log has told of this step before
            self._durable = max(self._durable, snapshot.step)
            files.note(f"durable {self._durable}")
        self._keeper.base_done(snapshot.step, capture.stored_bytes)
        self._leftovers.base_stored(snapshot.step)

    def _may_finish_base(self, step: int) -> bool:
        """In the base thread: the first base (also after a failure) stands alone, later ones on the log before them.

        StorageError if that log has failed.
        """
        capture = self._capture
        if not isinstance(capture, Capture):
            return True  # a base of a run without a log stands on nothing
        if not self._base_ready:
            first = step if self._alone_after is None else self._alone_after + 1
            if first < step and self._keeper is not None:
                self._keeper.never_stored(first, step - 1)
            return True
        is_os = self._options.durability == "os"
        if self._durable >= step and is_os:
            capture.offload.flush(hard=True)
        error = capture.offload.error
        if error is not None and (self._durable < step or is_os):
            raise StorageError(f"{self.path}: the base of step {step} was given up: the log before it failed") from error
        return self._durable >= step

    def _on_durable(self, step: int) -> None:
        """In the writer thread."""
        if self._keeper is not None:
            self._keeper.written(step)
        if self._base_ready:
            self._durable = max(self._durable, step)
            files.note(f"durable {self._durable}")
            if self._keeper is not None:
                self._keeper.durable(self._durable)

    def _look_at_errors(self, capture: Capture | States) -> None:
        errors = capture.errors()
        if not errors:
            self._come_back(capture)
            return
        error = errors[0]
        if isinstance(error, EverstepError) and not isinstance(error, StorageError):
            raise error
        if self._options.on_error == "raise" or not isinstance(error, StorageError):
            raise StorageError(
                f"{self.path}: steps after {self.durable_step} could not be stored: {error}. Everything up to step "
                f"{self.durable_step} is safe and can be resumed"
            ) from error
        if self._base_ready and _has_log(capture):
            self._base_failed(capture, error)
        elif self._unprotected_since is None:
            self._unprotected_since = capture.step
            self._next_retry = time.monotonic() + 1.0
            warnings.warn(
                f"{self.path}: storage failed, training goes on UNPROTECTED from step {self.durable_step + 1} on: {error}",
                UnprotectedWarning,
                stacklevel=3,
            )
        elif time.monotonic() >= self._next_retry:
            self._next_retry = time.monotonic() + 1.0
            self._begin_anew(capture)

    def _base_failed(self, capture: Capture | States, error: BaseException) -> None:
        """Only a base did: every step is stored nevertheless."""
        if not self._told_of_base:
            self._told_of_base = True
            self._next_retry = time.monotonic() + 1.0
            self._warn_of_base(error, ", and another one will be tried")
        elif time.monotonic() >= self._next_retry:
            self._next_retry = time.monotonic() + 1.0
            capture.snapshot = None
            self._rebase = True

    def _warn_of_base(self, error: BaseException, more: str = "") -> None:
        warnings.warn(
            f"{self.path}: a base could not be stored{more}: {error}. Every step is stored nevertheless, but going on from "
            "there takes longer",
            UnprotectedWarning,
            stacklevel=5,
        )

    def _begin_anew(self, capture: Capture | States) -> None:
        """Storage may be back: what is stored from now on stands on a base that is taken at the next commit."""
        assert self._found is not None and self._keeper is not None
        if capture.snapshot is not None and not capture.snapshot.done.is_set():
            return  # either it gives up, or it is the first one and makes more durable
        if _has_log(capture):
            capture.snapshot = None
        else:
            after = self._durable
            if after < 0:
                after = self._found.step if self._alone_after is None else self._alone_after
            try:
                # With the step that is under way: parts of its frame may have been dropped.
                self._keeper.never_stored(after + 1, capture.step + 1)
            except EverstepError:
                return  # still not back
            self._alone_after = after
            self._base_ready = False
            capture.restart()
        self._rebase = True

    def _come_back(self, capture: Capture | States) -> None:
        if self._unprotected_since is not None and self._base_ready:
            self._say(f"everstep: {self.path}: storage is back; protected again from step {capture.step} on")
            self._unprotected_since = None

    # -- the end ------------------------------------------------------------------------------------------------------

    def _close(self, *, finish: bool) -> None:
        if self._closed or forks.count != self._forks:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        capture = self._capture
        try:
            if capture is not None:
                self._stop(capture, finish)
        finally:
            if self._keeper is not None:
                self._keeper.close(finish=finish)
            self._opened.lock.release()

    def _stop(self, capture: Capture | States, finish: bool) -> None:
        if self._keeper is not None:
            self._keeper.let_go()
        capture.flush(None if finish else self._last_cursor)  # who finishes takes a base
        if self._only_base_failed(capture):
            capture.snapshot = None  # another is taken now
        keeper = self._keeper
        healthy = not capture.errors()
        if finish and healthy and isinstance(keeper, ShadowKeeper):
            keeper.store_log()
        if finish and healthy and keeper is not None and self._lacks_base(capture, keeper) and capture.is_as_committed():
            capture.take_base(self._last_cursor, self._on_base)
        capture.close(finish=healthy)
        if finish and healthy:
            self._leave_pools(keeper)
        if self._base_ready and healthy and isinstance(capture, Capture):
            self._durable = max(self._durable, capture.step if not capture.errors() else self._durable)
        errors = capture.errors()
        if not errors:
            self._warn_if_not_stored(capture)
        elif finish and self._only_base_failed(capture):
            self._warn_of_base(errors[0])
        elif finish:
            raise StorageError(
                f"{self.path}: steps after {self._durable} could not be stored: {errors[0]}"
            ) from errors[0]

    def _only_base_failed(self, capture: Capture | States) -> bool:
        """Whether on_error="warn" holds, every step is stored, and the last base failed, which is waited for."""
        base = capture.snapshot
        if base is None or self._options.on_error != "warn" or not self._base_ready or not _has_log(capture):
            return False
        base.wait()
        return isinstance(base.error, StorageError)

    def _lacks_base(self, capture: Capture | States, keeper: Keeper) -> bool:
        """Whether there is no base of the last step, or one of a follower, which lacks the residuals of that step."""
        if keeper.base_step != capture.step:
            return True
        return self._commits > 0 and isinstance(capture, Capture) and capture.has_newer_residuals()

    def _warn_if_not_stored(self, capture: Capture | States) -> None:
        if isinstance(capture, States) and self._durable < capture.step:
            warnings.warn(
                f"{self.path}: step {capture.step} is not stored: it was not due, and the state has changed since it was "
                f"committed. Step {self._durable} is. Flush or close right after a commit, or use snapshot_interval=1",
                UnprotectedWarning,
                stacklevel=4,
            )

    def _leave_pools(self, keeper: Keeper | None) -> None:
        """When the last step is on disk, neither pools outside the run's folder are left behind nor another mode's."""
        capture = self._capture
        if capture is None or keeper is None or keeper.base_step != capture.step:
            return
        assert self._leftovers is not None
        if not isinstance(capture, States):
            self._leftovers.base_stored(capture.step)
        elif self._options.pool:
            self._leftovers.drop_own_pool(capture.step)

    def _at_exit(self) -> None:
        self.close()

    def _live(self) -> Capture | States:
        if self._closed:
            raise UsageError("this Run is closed")
        if forks.count != self._forks:
            raise UsageError("this Run belongs to the parent process: attach in the process that trains")
        return self._resumed_capture()

    def _resumed_capture(self) -> Capture | States:
        if self._capture is None:
            raise UsageError("call run.resume() first, or iterate over run.steps(loader)")
        return self._capture

    def _pace_line(self, capture: Capture | States) -> str:
        a_step = capture.stored_bytes / self._commits
        a_day = a_step * 86400 / max(capture.step_s, 1e-6)
        hours = self._opened.free_bytes / max(a_day, 1.0) * 24
        return (
            f"everstep: {self.path} · {a_step / 1e6:.2f} MB a step, {capture.step_s * 1e3:.1f} ms a step: "
            f"{a_day / 1e9:.1f} GB a day before retention, disk full in {hours:.1f} h without it"
        )


def _has_log(capture: Capture | States) -> bool:
    """Whether frames are being stored, whatever became of bases."""
    return isinstance(capture, Capture) and capture.offload.error is None
