"""attach: the one place where the stages are wired together."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import socket
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from torch import nn
from torch.optim import Optimizer

from everstep import cursor as cursors
from everstep import rng
from everstep.atoms import RESIDUALS
from everstep.capture import buckets
from everstep.capture import loader as loaders
from everstep.capture.capture import Capture
from everstep.capture.recorder import Destination
from everstep.capture.snapshot import Snapshot
from everstep.capture.states import Settings, States
from everstep.capture.tap import NEVER_REPLAYED
from everstep.compress import Compressor
from everstep.compress.agree import check_same, check_same_compressor
from everstep.errors import (
    CorruptionError,
    EverstepError,
    FormatError,
    InexactWarning,
    NothingToRestoreError,
    ReplayError,
    StepNotFoundError,
    StorageError,
    UnprotectedWarning,
    UsageError,
)
from everstep.fingerprint import fingerprint
from everstep.fold import class_name, find_class
from everstep.follow import recover
from everstep.follow.arena import DamagedStateError
from everstep.follow.attend import ShadowKeeper, available_bytes
from everstep.follow.fetch import find_all
from everstep.follow.keeper import Keeper, common_base
from everstep.follow.shares import Partition, coupled, share_out
from everstep.follow.ship import STAGE_BYTES, RemoteShadow
from everstep.follow.tuned import Tuned, choose_mode
from everstep.format.documents import RANKS, GenerationDocument, RunDocument, TimelineDocument
from everstep.naming import Declared, Inventory, named, take_inventory
from everstep.options import Options
from everstep.ranks import Holding, Ranks, aliases_of, assign, check_replicas, hashes_of, holding_id, holdings
from everstep.restore.apply import apply, check_fits
from everstep.restore.execute import Restored, check_before_replay, restore
from everstep.restore.history import Step
from everstep.restore.join import Era, Joint, set_back, warn_if_set_back
from everstep.restore.plan import Line, line_files, line_of
from everstep.store import files, shared
from everstep.store.log import DiskPlace, LogWriter
from everstep.store.medium import Synced, medium_for
from everstep.store.pools import Pools, remove_pools
from everstep.store.runs import Listing, RunPath, WriterLock, describe_writer, read_listing
from everstep.together import Together, forked_already, latest_of, warn_if_inexact
from everstep.tune.averages import Counters
from everstep.tune.choice import MAX_BATCH, Decision
from everstep.tune.model import Setting
from everstep.tune.throttle import Throttle

MODES = ("delta", "shadow", "snapshot", "auto")
LOGS = {"delta": "disk", "shadow": "memory", "snapshot": "pool"}
"""What a generation says about its log."""
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
    if mode == "shadow" and options.get("tune"):
        raise UsageError("tune=True sets nothing with mode='shadow': leave it out, or use mode='auto'")
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
        self._models = named(model, nn.Module, "model")
        self._optimizers = named(optimizer, Optimizer, "optimizer")
        self._extras = extras
        self._options = options
        self._mode = mode
        self._auto: Decision | None = None
        self._declared = Declared(options.rename, tuple(options.layout))
        self._compress = options.compress
        self._bind_residuals()
        inventory = take_inventory(self._models, self._optimizers, self._declared)
        cursors.capture_extras(extras)
        self._ranks = Ranks.current()
        described = None
        if self._compress is not None:
            described = self._compress.describe()
            self._compress.position()  # what cannot be stored is told of now
        check_same([msgspec.json.encode(d).decode() for d in self._ranks.gather("tell how they compress", described)])
        self._declared.check(self._ranks.gather("match their layouts", sorted(inventory.matched)))
        if mode == "auto":
            mode = self._mode = self._choose_mode(RunPath(run))
        modes = sorted(set(self._ranks.gather("say their mode", mode)))
        if len(modes) > 1:
            raise UsageError(f"all ranks must have one mode, not {' and '.join(modes)}")
        self._path = RunPath(run, self._ranks.rank)
        self._stored: set[int] = set()
        """With several ranks: the atoms that this one stores."""
        self._known: set[int] = set()
        self._orders: buckets.BucketOrders | None = None
        self._bucket_orders: buckets.Orders = {}
        self._aliases: dict[int, tuple[str, ...]] = {}
        self._resized_from = 0
        """So many ranks wrote what was resumed, if their number was another."""
        self._lock: WriterLock | None = None
        try:
            self._document: RunDocument = self._open_run()
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise
        self._capture: Capture | States | None = None
        self._keeper: Keeper | None = None
        self._resumed: int | None = None
        self._closed = False
        self._pid = os.getpid()
        self._launch = launch_id()
        self._saved_position: dict[str, Any] | None = None
        self._pass: loaders.Pass | None = None
        self._loader: Any = None
        self._pass_index = -1
        self._skipped_passes = False
        self._restored: Restored | None = None
        self._durable = -1
        self._base_ready = False
        self._unprotected_since: int | None = None
        self._next_retry = 0.0
        self._rebase = False
        self._proven = True
        self._source = ""
        self._shares: list[frozenset[int]] = []
        """What each of several shadows keeps, if they have been asked."""
        self._pools_before: list[str] = []
        """Folders of pools that earlier generations wrote, and nobody else writes."""
        self._old_pools: list[str] = []
        """Folders of pools whose state has been taken over, and that are not needed when it is on disk."""
        self._dismiss_later = False
        """A shadow, or the log that it left in memory, has what is on no disk yet, and is not needed when it is."""
        self._torn = False
        self._last_cursor: dict[str, Any] = {}
        self._resume_cursor: dict[str, Any] = {}
        self._restore_s = self._fetch_s = 0.0
        self._replayed: tuple[float, int] | None = None
        """Seconds that loading a base and replaying so many steps took."""
        self._commits = 0
        atexit.register(self._at_exit)
        self._say(self._attach_line(inventory))
        for name, optimizer in self._optimizers.items():
            note = _note_on(optimizer)
            if note:
                self._say(f"everstep: optimizer {name!r}: {note}")

    def _bind_residuals(self) -> None:
        """The residuals of error feedback are buffers of the run, by the names of their parameters."""
        if RESIDUALS in (*self._models, *self._optimizers):
            raise UsageError(f"neither model nor optimizer can be called {RESIDUALS!r}: that is for those of compression")
        if isinstance(self._compress, Compressor):
            found = take_inventory(self._models, self._optimizers, self._declared)
            names = {a.uid: f"{a.owner}/{a.name}" for a in found.layout.atoms}
            self._compress.bind({names[uid]: p for uid, p in found.params().items() if p.requires_grad})
            if self._compress.error_feedback:
                self._models[RESIDUALS] = self._compress.residuals

    def _choose_mode(self, path: RunPath) -> str:
        """For mode="auto": by what this run has measured so far."""
        options = self._options
        if self._ranks.size > 1:
            return "delta"
        ground = replace(options.ground, memory_bytes=available_bytes())
        found = self._auto = choose_mode(path, ground, options.retention.bases)
        if found is None:
            return "delta"
        self._say(f"everstep: {path.path}: {found.reason}")
        if found.setting.mode == "shadow":  # that keeps to what it is started with
            self._options = replace(options, base_interval=found.setting.base_interval)
        return found.setting.mode

    def _open_run(self) -> RunDocument:
        """The run's document and this rank's right to write; rank 0 makes the run if there is none."""
        opened: list[RunDocument] = []
        found = self._ranks.first("open the run", lambda: opened.append(self._open_first()) or opened[0].run)  # type: ignore[func-returns-value]
        if self._ranks.rank == 0:
            self._ranks.all("lock their parts", lambda: None)
        else:
            self._ranks.all("lock their parts", lambda: opened.append(self._open_other(found)))
        return opened[0]

    def _open_first(self) -> RunDocument:
        """By one process: read or make the run, and lock it."""
        existed = self._path.exists()
        document = self._path.read_run() if existed else None
        if document is not None and document.read_only:
            raise FormatError(
                f"{self._path.path} uses {', '.join(document.read_only)}, which this version of Everstep can read but not "
                "write. Upgrade Everstep to go on with this run"
            )
        if not existed:
            files.make_dirs(self._path.path)
        self._lock = WriterLock(self._path)
        # Only the holder of the lock makes a run: many processes may start at once.
        if document is None and self._path.exists():
            document = self._path.read_run()
        if document is not None:
            self._path.sync([])  # a process that was killed while it made the run may not have
        return document if document is not None else self._path.create()

    def _open_other(self, run: str) -> RunDocument:
        """By the other ranks: rank 0 has opened it."""
        if not os.path.isfile(self._path.run_file()) or self._path.read_run().run != run:
            raise UsageError(
                f"{self._path.path} on {socket.gethostname()} is not the folder that rank 0 has opened: all ranks must see "
                "the same folder, on storage that they share. Node-local disks cannot hold a run of several nodes"
            )
        self._lock = WriterLock(self._path)
        return self._path.read_run()

    # -- the public face ----------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        return self._path.path

    @property
    def step(self) -> int:
        """Committed steps so far. UsageError before resume(); after close() the last one."""
        return self._resumed_capture().step

    @property
    def epoch(self) -> int:
        """Which pass the latest call of steps() is in, counted from 0 over all calls."""
        return max(self._pass_index, 0)

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
        listing = read_listing(self._path)
        folders = {self._path.pool(g.pool) for g in listing.generations().values() if g.pool}
        self._pools_before = sorted(f for f in folders if self._path.is_own_pool(self._document.run, f))
        for _, problem in listing.pool_problems:
            self._say(f"everstep: {self.path}: {problem}")
        if self._ranks.size > 1 or self._is_in_parts(listing, step):
            at = self._resume_parts(step)
        else:
            at = self._resume_whole(listing, step)
        self._resumed = at
        self._restore_s = time.perf_counter() - begun
        return at

    def steps(self, loader: Iterable[Any], epochs: int = 1) -> Iterator[Any]:
        """Batches of `loader` from where the run stopped; every turn of the loop is committed.

        Calls are matched by their order: a pass that was finished before the run stopped yields nothing.
        """
        if self._resumed is None:
            self.resume()
        for _ in range(epochs):
            self._settle_pass()
            self._pass_index += 1
            saved = self._saved_position
            if saved is not None and self._pass_index < saved["pass"]:
                self._skipped_passes = True
                continue
            self._loader = loader
            current = self._pass = self._open_pass(loader)
            for batch in current:
                yield batch
                self.commit()
            self._pass = current

    def commit(self, wait: bool = False) -> int:
        """End step t: everything since the last commit becomes its frame. Nothing happened: nothing is committed.

        Returns the step. `wait`: only when it is durable. Raises what went wrong in the background since the last.
        """
        capture = self._live()
        begun = time.perf_counter()
        stalled = capture.stall_s
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
        capture = self._resumed_capture()
        steps, num_bytes = capture.inflight()
        return {
            "step": capture.step,
            "durable_step": self.durable_step,
            "written_step": self._written_step(capture),
            "proven_step": self._keeper.proven_step if self._keeper is not None else None,
            "resumed_step": self._resumed,
            "resumed_from": self._source,
            "resumed_proven": self._proven,
            "resume_s": self._restore_s,
            "fetch_s": self._fetch_s,
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
        if self._closed or os.getpid() != self._pid:
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

    def _is_in_parts(self, listing: Listing, step: Step) -> bool:
        """Whether steps of this run must be cut or joined to be had in one process that has what this one has."""
        generations = listing.generations()
        eras = any(timeline.document.own_bases for timeline in listing.timelines.values())
        if not generations:
            return False
        newest = generations[max(generations)]
        if eras or any(g.world_size > 1 for g in generations.values()):
            if newest.world_size > 1 or newest.log != "memory":
                return True
            # The newest state may be in a shadow's memory only; but before the first base of its era nothing is there.
            steps = line_of(listing, check_tail=False).steps()
            return not steps or (step != "latest" and step not in steps)
        then = self._path.read_layout(newest.layout, [newest.timeline]).by_uid()
        now = take_inventory(self._models, self._optimizers, self._declared).layout.atoms
        both = [(a, then[a.uid]) for a in now if a.uid in then]
        differ = [a.label() for a, b in both if a.shape == b.shape and a.share != b.share]
        if differ and self._mode == "shadow":
            raise UsageError(
                f"{', '.join(differ[:5])}: layout declares it otherwise than the run was written with. Resume once with "
                "mode='delta' to go on under another layout"
            )
        return bool(differ)

    def _resume_whole(self, listing: Listing, step: Step) -> int:
        """What one process wrote, in one process."""
        begun = time.perf_counter()
        offer = self._find_shadow(listing, step)
        self._fetch_s = time.perf_counter() - begun
        try:
            while True:
                line, asked, offer = self._choose(listing, step, offer)
                if line is None or asked is None:
                    self._begin_new(listing)
                    return 0
                try:
                    if offer is None and step == "latest":
                        warn_if_set_back(self._path, Era([line]), asked)
                    return self._restore_and_begin(listing, line, asked, step, offer)
                except DamagedStateError as e:
                    assert offer is not None
                    offer.is_damaged(str(e))
                    return self._resume_without(listing, step, offer, e)
                except CorruptionError as e:
                    if step != "latest" or not set_back(self._path, Era([line]), asked, e):
                        raise
                    listing = read_listing(self._path)
        finally:
            if offer is not None:
                offer.release()

    def _resume_without(self, listing: Listing, step: Step, offer: recover.Offer, damage: DamagedStateError) -> int:
        """A shadow's state turned out to be damaged when some of it was in the live model: all is taken from disk."""
        self._shares = []
        self._say(f"everstep: {damage}. The shadow (pid {offer.pid}) is not used; taking the state from disk")
        try:
            line, asked, _ = self._choose(listing, step, None)
            if line is None or asked is None:
                raise NothingToRestoreError("no step is on disk")
            return self._restore_and_begin(listing, line, asked, step, None)
        except EverstepError as e:
            if not offer.file:
                raise  # what comes over a connection is verified before it is put anywhere
            raise CorruptionError(
                f"{damage}; and from disk: {e}\nParts of the damaged state are in the live model: it must not be trained or "
                "saved. Build model and optimizer again, and resume, or start another run"
            ) from e

    def _find_shadow(self, listing: Listing, step: Step) -> recover.Offer | None:
        if not self._options.shadows:
            return recover.find(self._path, self._document.run)
        line = None  # for a new run: a shadow that does not let us in says so all the same
        with contextlib.suppress(NothingToRestoreError):
            line = line_of(listing, check_tail=False)
        return find_all(
            self._options.shadows, self._path, self._document.run, () if line is None else line.generations,
            token=self._options.token, tls=self._options.tls, num_streams=self._options.shadow_streams,
            at_least=latest_of(line) if line is not None and step == "latest" else -1,
            say=lambda text: self._say(f"everstep: {self.path}: {text}") if line is not None else None,
        )  # fmt: skip

    def _choose(
        self, listing: Listing, step: Step, offer: recover.Offer | None
    ) -> tuple[Line | None, int | None, recover.Offer | None]:
        """The line and step to restore, and the shadow that has it, if one has; no line for a new run."""
        if step != "latest" and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
            raise UsageError(f"step must be 'latest' or a number from 0 on, not {step!r}")
        try:
            line = line_of(listing, check_tail=offer is None)
            latest = step == "latest" or forked_already(listing, line, step, self._launch)
            if offer is not None and _is_where_it_began(offer, line):
                offer.generation = line.newest.generation
            if offer is not None and offer.generation != line.newest.generation:
                self._say(
                    f"everstep: a shadow (pid {offer.pid}) of generation {offer.generation} is stale: generation "
                    f"{line.newest.generation} has gone on without it"
                )
                offer.release()
                offer = None
            if offer is not None and (offer.step == step or (latest and offer.step >= latest_of(line))):
                return line, offer.step, offer
            line = line_of(listing)
            if offer is not None:
                self._say(f"everstep: the shadow (pid {offer.pid}) holds step {offer.step}; taking the state from disk")
                offer.release()
            if latest:
                return line, line.latest(), None
            line.plans(step)  # type: ignore[arg-type]
            return line, step, None  # type: ignore[return-value]
        except NothingToRestoreError:
            if step in ("latest", 0):
                return None, None, None
            raise StepNotFoundError(f"step {step} cannot be restored: {self.path} has no steps yet") from None

    def _restore_and_begin(
        self, listing: Listing, line: Line, at: int, asked: Step, offer: recover.Offer | None
    ) -> int:
        begun = time.perf_counter()
        if offer is not None:
            self._shares = offer.shares
            live = take_inventory(self._models, self._optimizers, self._declared).tensors
            if _has_finished_passes(cursors.decode(offer.cursor)):
                live = {}  # what is run again between them is undone from the state, which then is not the live one
            restored = Restored(offer.fetch(live), None, offer.proven, dict(offer.fingerprint))
        else:
            self._say(f"everstep: restoring step {at} of {self.path} …")
            check_before_replay(line, at, self._models, self._optimizers, self._declared)
            restored = restore(line, at, live=self._optimizers)
            if restored.plan is not None:
                self._replayed = time.perf_counter() - begun, at - restored.plan.base.step
        self._fetch_s += time.perf_counter() - begun
        check_fits(restored.state, self._models, self._optimizers, self._declared)
        cursor = cursors.decode(restored.state.cursor)
        cursors.check_same_extras(self._extras, cursor["extras"])
        check_same_compressor(self._compress, cursor)
        warn_if_inexact(restored)
        self._path.sync(line_files(line, restored.plan))
        if not os.path.exists(os.path.join(self._path.timeline(line.timelines[0]), "timeline.json")):
            raise CorruptionError(
                f"timeline.json of timeline {line.timelines[0]} in {self.path} is missing: put it back from a copy, or go "
                "on under another path by everstep.open(run).restore(...)"
            )
        begun = time.perf_counter()
        self._apply(restored, cursor)
        self._fetch_s += time.perf_counter() - begun
        if at and self._compress is not None:
            self._warm(cursor)
        in_memory = restored.plan is None or line.needs_memory(restored.plan)
        self._dismiss_later = in_memory and self._mode != "shadow"
        in_pool = restored.plan is not None and restored.plan.base.in_pool
        fork = offer is None and asked != "latest" and not _is_newest(line, at)
        timeline = line.timelines[0]
        if fork:
            timeline = max(listing.timelines) + 1
            self._path.create_timeline(
                TimelineDocument(timeline, line.timelines[0], line.newest.generation, at)
            )
        self._begin(listing, timeline, line.newest.generation, at, asked_step=None if asked == "latest" else asked)
        self._saved_position, self._resume_cursor = cursor["data"], cursor
        self._restored = restored
        self._proven = restored.proven
        self._source = "shadow" if offer is not None else "pool" if in_pool else "disk"
        self._last_cursor = {**cursor, "rng": rng.capture()}
        if self._leaves_pool(in_pool) and not fork:
            self._old_pools = self._pools_before
        if fork or self._dismiss_later or self._leaves_pool(in_pool) or _computes_differently(restored.fingerprint):
            self._take_base()
        else:
            self._base_ready = True
            self._durable = at
        if restored.plan is not None:
            kind = "the pool's step" if in_pool else "base"
            source = f"{kind} {restored.plan.base.step} + {at - restored.plan.base.step} steps"
        else:
            assert offer is not None
            source = f"from the memory of its shadow, pid {offer.pid}"
            if self._options.shadow:
                source = f"from the memory of shadows at {offer.where}"
        self._say(
            f"everstep: resumed {self.path} at step {at} ({source}{f', new timeline {timeline}' if fork else ''}; "
            f"{'every bit' if restored.proven else 'every bit of the parameters'} proven)"
        )
        return at

    def _leaves_pool(self, in_pool: bool) -> bool:
        """Whether the state comes from a pool that this generation does not go on with: it is on no disk then."""
        return in_pool and self._mode != "snapshot"

    def _resume_parts(self, step: Step) -> int:
        """Several ranks, now or when the run was written: all agree on a step, and each takes what it has of it."""
        ranks = self._ranks
        full = take_inventory(self._models, self._optimizers, self._declared)
        told = ranks.gather("tell what they hold", holdings(full))
        held = [msgspec.convert(each, list[Holding]) for each in told]
        stored = assign(held)
        self._stored, self._known, self._aliases = stored[ranks.rank], set(full.tensors), aliases_of(held)
        holding = holding_id(held, stored)
        begun = time.perf_counter()
        found = Together(
            path=self._path, run=self._document.run, ranks=ranks, models=self._models, optimizers=self._optimizers,
            declared=self._declared, extras=self._extras, compress=self._compress, options=self._options,
            launch=self._launch, say=self._say,
        ).find(step, full, held, holding)  # fmt: skip
        at, from_memory, joint, restored = found.at, found.from_memory, found.joint, found.restored
        self._fetch_s = time.perf_counter() - begun
        in_memory = from_memory or (joint is not None and at is not None and joint.find(at).needs_memory(at))
        self._dismiss_later = in_memory and self._mode != "shadow"
        timeline, generation, is_new = ranks.first(
            "open a generation", lambda: self._agree(joint, at, step, holding, from_memory=from_memory)
        )
        cursor: dict[str, Any] = {}
        was, in_pool = 0, False
        if at is not None:
            assert joint is not None and restored is not None
            was = (joint.eras[0] if from_memory else joint.find(at)).world_size
            in_pool = not from_memory and joint.find(at).is_in_pool(at)
            cursor = self._part_cursor(restored, was, at)
            self._apply(restored, cursor)
            if at and ranks.size > 1 and not self._resized_from:
                self._warm(cursor)
        if ranks.size > 1:
            self._look_at_buckets()

        def start() -> None:
            self._path.make_part(timeline)
            self._path.remove_after(timeline, at or 0)
            if ranks.rank:
                self._path.clean(timeline)
                self._path.write_layout(timeline, self._inventory().layout)
            self._start(shared.shared_folder(self._document.run, self.path), timeline, generation, at or 0)

        if at is None:
            ranks.first("compare their parameters", partial(check_replicas, held, ranks.gather("hash", hashes_of(full))))
        ranks.all("start", start)
        if at is None or restored is None:
            self._cursor()
            self._take_base()
            return 0
        self._saved_position, self._resume_cursor = cursor["data"], cursor
        self._restored = restored
        self._proven = restored.proven
        self._source = "shadow" if from_memory else "pool" if in_pool else "disk"
        self._last_cursor = {**cursor, "rng": rng.capture()}
        if ranks.rank == 0:
            for rank in range(ranks.size, was):  # nobody goes on with these
                recover.dismiss(self._path.part(rank), self._document.run, generation, wait_s=0.0)
        if self._leaves_pool(in_pool) and not is_new:
            self._old_pools = self._pools_before
        if is_new or self._dismiss_later or self._leaves_pool(in_pool) or _computes_differently(restored.fingerprint):
            self._take_base()
        else:
            self._base_ready = True
            self._durable = at
        self._say(
            f"everstep: resumed {self.path} at step {at} on {ranks.size} rank{'s' if ranks.size > 1 else ''}"
            f"{' from the memory of all ranks’ shadows' if from_memory else ''}"
            f"{f' (written by {was}: random numbers begin anew)' if was != ranks.size else ''}"
            f"{f', new timeline {timeline}' if is_new else ''}"
        )
        return at

    def _warm(self, cursor: dict[str, Any]) -> None:
        for said in buckets.warm(self._models, cursor.get("buckets", {})):
            warnings.warn(said, InexactWarning, stacklevel=4)

    def _look_at_buckets(self) -> None:
        """Their order is state: it decides in which order ranks are added up, and what hooks keep by bucket."""
        self._orders = buckets.BucketOrders(self._models)
        self._bucket_orders = {name: list(orders) for name, orders in self._orders.value.items()}

    def _agree(
        self, joint: Joint | None, at: int | None, asked: Step, holding: str, *, from_memory: bool
    ) -> list[Any]:
        """By one process: where this generation writes. [timeline, generation, whether it needs bases first]"""
        listing = joint.listing if joint is not None else read_listing(self._path)
        self._path.require(RANKS)
        generation = max(listing.generations(), default=0) + 1
        asked_step = None if asked == "latest" else asked
        if joint is None or at is None:
            timeline = max(listing.timelines, default=0)
            if not timeline:
                timeline = 1
                self._path.create_timeline(TimelineDocument(1))
            self._open_generation(timeline, generation, None, 0, None, holding)
            return [timeline, generation, True]
        newest = joint.eras[0].newest
        same = newest.holding == holding and newest.world_size == self._ranks.size
        fork = not same or (at < latest_of(joint) if from_memory else at != joint.latest())
        timeline = joint.eras[0].lines[0].timelines[0]
        source = joint.eras[0] if from_memory else joint.find(at)
        if fork:
            timeline = max(listing.timelines) + 1
            self._path.create_timeline(
                TimelineDocument(timeline, source.newest.timeline, source.newest.generation, at, own_bases=not same)
            )
        for line in source.lines:
            self._path.sync(line_files(line, None))
        parent = source.newest.generation if fork else newest.generation
        self._open_generation(timeline, generation, parent, at, asked_step, holding)
        return [timeline, generation, fork or source is not joint.eras[0]]

    def _part_cursor(self, restored: Restored, was: int, at: int) -> dict[str, Any]:
        """The cursor for this rank: its own where the number of ranks is the same."""
        cursor = cursors.decode(restored.state.cursor)
        if was == self._ranks.size:
            return cursor
        self._resized_from = was
        return {
            **cursor,
            "rng": rng.derived(rng.seed_in(cursor["rng"]), at, self._ranks.rank),
            "data": loaders.resized_position(cursor["data"]),
        }

    def _apply(self, restored: Restored, cursor: dict[str, Any]) -> None:
        restored.state.need_all()  # nothing live has been touched when damage is found
        restored.state.close()
        # Extras first: loading a scheduler may touch the optimizer's groups, and what was recorded has the last word.
        cursors.load_extras(self._extras, cursor["extras"])
        if self._compress is not None and "compress" in cursor:
            self._compress.set_position(cursor["compress"]["at"])
        apply(restored.state, self._models, self._optimizers, self._declared)
        rng.install(cursor["rng"])

    def _begin_new(self, listing: Listing) -> None:
        timeline = max(listing.timelines, default=0)
        if not timeline:
            timeline = 1
            self._path.create_timeline(TimelineDocument(1))
        self._begin(listing, timeline, None, 0, asked_step=None)
        self._cursor()
        self._take_base()

    def _begin(
        self, listing: Listing, timeline: int, parent: int | None, step: int, *, asked_step: int | None
    ) -> None:
        """Open the next generation and start watching."""
        generation = max(listing.generations(), default=0) + 1
        if self._compress is not None:
            self._look_at_buckets()
        self._open_generation(timeline, generation, parent, step, asked_step)
        self._path.remove_after(timeline, step)
        self._start(listing.shared, timeline, generation, step)

    def _open_generation(
        self, timeline: int, generation: int, parent: int | None, step: int, asked_step: int | None, holding: str = ""
    ) -> None:
        """By one process: from here on older generations write nothing that counts."""
        assert self._lock is not None
        self._lock.used = True
        self._path.clean(timeline)
        self._path.sync([os.path.join(self._path.timeline(timeline), "timeline.json")])
        layout = self._inventory().layout
        if any(atom.boxes for atom in layout.atoms):
            self._path.require(RANKS)
        self._path.write_layout(timeline, layout)
        self._path.write_generation(
            GenerationDocument(
                generation, timeline, parent, step, self._ranks.size, layout.id, self._launch, describe_writer(),
                fingerprint(), asked_step, LOGS[self._mode], holding, self._pool_folder(),
            )
        )  # fmt: skip

    def _inventory(self) -> Inventory:
        """The live objects, as far as this rank stores them."""
        found = take_inventory(self._models, self._optimizers, self._declared)
        if self._ranks.size == 1:
            return found
        new = [a.label() for a in found.layout.atoms if self._known and a.uid not in self._known]
        if new:
            raise UsageError(
                f"{', '.join(new[:5])} was added in mid-run: with several ranks that is not supported. Close the run, and "
                "attach and resume again with the new model"
            )
        return found.part(self._stored, self._ranks.rank, self._ranks.size, self._aliases)

    def _start(self, shared_folder: str, timeline: int, generation: int, step: int) -> None:
        """Start watching."""
        assert self._lock is not None
        self._lock.used = True
        own = fingerprint()
        options = self._options
        folder = self._path.log(timeline)
        direct = files.supports_direct(folder) if options.direct_io is None else options.direct_io
        destination = Destination(
            self._document.run, timeline, generation, self._path.bases(timeline), direct, own, self._ranks.rank,
            self._ranks.size > 1,
        )  # fmt: skip
        if self._mode == "snapshot":
            self._start_states(destination, step)
            return
        disk = DiskPlace(folder, direct=direct, segment_bytes=options.segment_bytes)
        memory = None
        if self._mode == "shadow":
            memory = shared.MemoryPlace(shared.log_folder(shared_folder, timeline, self._ranks.rank))
        self._log = LogWriter(
            memory or disk, run=self._document.run, timeline=timeline, generation=generation, rank=self._ranks.rank,
            fingerprint=own,
            chained=memory is None, on_begun=lambda: self._path.log_has_begun(timeline, generation),
        )  # fmt: skip
        capture = self._capture = Capture(
            self._inventory, self._optimizers, step, self._log, lambda layout: self._path.write_layout(timeline, layout),
            destination, full_audit=options.audit == "full",
            durability="step" if memory is not None else options.durability,
            batch_steps=options.batch_steps, max_inflight_steps=options.max_inflight_steps,
            max_inflight_bytes=options.max_inflight_bytes, early=options.early,
            residual_interval=options.base_interval if getattr(self._compress, "residual", "log") == "base" else 1,
        )  # fmt: skip
        # What survives only the process must not be called durable in the log: after a crash of the host it may be gone.
        os_only = options.durability == "os" or memory is not None
        capture.offload.claim = lambda: -1 if os_only else self._durable
        capture.offload.on_durable = self._on_durable
        capture.may_finish_base = self._may_finish_base
        if memory is None:
            self._keeper = Keeper(
                self._path, timeline, generation, step, options.retention, options.base_interval,
                follower=options.follower, optimizers=self._optimizers, say=self._say, world_size=self._ranks.size,
            )  # fmt: skip
            self._tune(generation)
            if not self._dismiss_later:
                recover.dismiss(self._path, self._document.run, generation)
            return
        settings: dict[str, Any] = {
            "run": self._document.run, "log": self._log, "memory": memory, "disk": disk, "optimizers": self._optimizers,
            "on_lag": options.on_lag, "max_lag_bytes": options.max_lag_bytes, "keep_log": options.log == "disk",
            "idle_s": options.shadow_idle_s, "say": self._say,
        }  # fmt: skip
        where = (self._path, timeline, generation, step, options.retention, options.base_interval)
        shadows = options.shadows
        partition = None
        if len(shadows) > 1:
            if len(self._shares) != len(shadows):
                inventory = self._inventory()
                self._shares = share_out(inventory.layout, len(shadows), coupled(inventory.layout, inventory.groups))
            partition = Partition(self._shares, lambda i: self._path.read_layout(i, [timeline]))
        elsewhere = [
            partial(
                RemoteShadow, address=address, token=options.token, tls=options.tls, partition=partition, index=index,
                interval=options.base_interval, max_staged_bytes=min(options.max_lag_bytes or STAGE_BYTES, STAGE_BYTES),
            )
            for index, address in enumerate(shadows)
        ]  # fmt: skip
        keeper = self._keeper = ShadowKeeper(*where, **settings, elsewhere=elsewhere, ranks=self._ranks)
        capture.offload.on_part = keeper.part_written
        self._tune(generation)

    def _pool_folder(self) -> str:
        """Of the pools that this run writes, as a generation says it; empty: it writes none."""
        return self._path.pool_name(self._document.run, self._options.pool) if self._mode == "snapshot" else ""

    def _num_slots(self) -> int:
        return self._options.pool_slots or (3 if self._ranks.size == 1 else 4)

    def _start_states(self, destination: Destination, step: int) -> None:
        """Start watching in snapshot mode."""
        options, ranks = self._options, self._ranks
        folder = self._path.pool(self._pool_folder())
        files.make_dirs(folder)
        if options.pool:
            os.chmod(folder, 0o700)  # others use this place, too
        medium = medium_for(folder, options.pool_mode)
        throttle = None if options.max_bandwidth is None else Throttle(options.max_bandwidth)
        pace = None if throttle is None else _pace(throttle)
        if medium is Synced and pace is not None:  # it takes states in at once, and then writes them
            medium, pace = partial(Synced, pace=pace), None
        pools = Pools(
            folder, run=self._document.run, rank=ranks.rank, generation=destination.generation, world_size=ranks.size,
            num_slots=self._num_slots(),
            medium=medium, before=self._pools_before,
            on_begun=lambda: self._path.pool_has_begun(destination.timeline, destination.generation),
        )  # fmt: skip
        states = self._capture = States(
            self._inventory, self._optimizers, step, pools, destination,
            lambda layout: self._path.write_layout(destination.timeline, layout),
            Settings(
                interval=options.snapshot_interval or (None if ranks.size == 1 else 1), staged=options.pool_mode != "direct",
                copy_first=options.pool_mode == "staged", memory_bytes=options.pool_memory,
                max_bandwidth=options.max_bandwidth, layerwise=options.layerwise,
                pace=pace,
            ),
            self._models,
        )  # fmt: skip
        states.on_durable = self._on_durable
        states.may_finish_base = self._may_finish_base
        self._keeper = Keeper(
            self._path, destination.timeline, destination.generation, step, options.retention, options.base_interval,
            follower=False, optimizers=self._optimizers, say=self._say, world_size=ranks.size, has_log=False,
        )  # fmt: skip
        if not self._dismiss_later:
            recover.dismiss(self._path, self._document.run, destination.generation)

    def _tune(self, generation: int) -> None:
        """Hand base interval, batch size and retention to the tuner, if it may have them."""
        capture, keeper, options = self._capture, self._keeper, self._options
        assert isinstance(capture, Capture) and keeper is not None
        if not options.tune:
            return

        def counters() -> Counters:
            return Counters(
                step=capture.step, trained_s=capture.trained_s, waited_s=capture.offload.waited_s,
                hook_s=capture.thread_s + capture.hook_s + capture.stall_s - capture.offload.waited_s,
                log_bytes=capture.stored_bytes, write_s=capture.offload.busy_s, sync_s=capture.offload.sync_s,
                background_s=capture.background_cpu_s(),
            )  # fmt: skip

        def apply(setting: Setting) -> None:
            keeper.keep(setting.base_interval, options.kept_by(setting))
            capture.offload.set_batch(setting.batch_steps)

        keeper.tuned = Tuned(
            self._path, generation, replace(options.setting, mode=self._mode), options.ground,
            max_batch=MAX_BATCH if options.durability == "batch" else 1, counters=counters, apply=apply, mode=self._auto,
        )  # fmt: skip
        if self._replayed:
            keeper.tuned.recovered(*self._replayed)

    # -- data ---------------------------------------------------------------------------------------------------------

    def _open_pass(self, loader: Any) -> loaders.Pass:
        saved, self._saved_position = self._saved_position, None
        if saved is None:
            return loaders.open_pass(loader, epoch=self._pass_index, state=None)
        assert self._restored is not None
        restored, self._restored = self._restored, None
        cursor = self._resume_cursor
        if self._skipped_passes and not self._commits:
            # Code between the finished passes has run again (schedulers, validation): undo what it did.
            self._apply_again(restored, cursor)
        if self._resized_from and saved["state"] is not None:
            rng.install(cursor["rng"])
            return self._open_resized(loader, saved["state"])
        if saved["state"] is None:
            # The pass has not begun: what it draws when it begins comes from the generators as they were.
            if saved["generators"]:
                loaders.set_generator_states(loader, saved["generators"])
            rng.install(cursor["rng"])
            return loaders.open_pass(loader, epoch=self._pass_index, state=None)
        current = loaders.open_pass(loader, epoch=self._pass_index, state=saved["state"])
        rng.install(cursor["rng"])
        return current

    def _open_resized(self, loader: Any, state: Any) -> loaders.Pass:
        """A pass that another number of ranks had begun."""
        if self._options.cursor == "drop":
            return loaders.open_pass(loader, epoch=self._pass_index, state=None)
        loaders.check_resizable(state, loader, self._resized_from, self._ranks.size)
        return loaders.open_resized_pass(loader, epoch=self._pass_index, state=state)

    def _apply_again(self, restored: Restored, cursor: dict[str, Any]) -> None:
        self._apply(restored, cursor)
        self._live().forget_changes()

    def _settle_pass(self) -> None:
        """Another pass begins: commit what was done after the last batch of one that was left early, which ends it."""
        if self._pass is not None:
            self._pass = None
            if self._live().pending():
                self._pass_index += 1
                try:
                    self.commit()
                finally:
                    self._pass_index -= 1

    def _position(self) -> dict[str, Any]:
        current = self._pass
        if current is not None:
            return {"pass": self._pass_index, "state": current.state(), "generators": []}
        if self._saved_position is not None:
            return self._saved_position
        generators = [] if self._loader is None else loaders.generator_states(self._loader)
        return {"pass": max(self._pass_index, 0), "state": None, "generators": generators}

    def _cursor(self) -> dict[str, Any]:
        """The cursor of the step that is being committed."""
        self._last_cursor = {
            "rng": rng.capture(),
            "data": self._position(),
            "extras": cursors.capture_extras(self._extras) if self._extras else {},
        }
        if self._compress is not None:
            self._last_cursor["compress"] = {"by": self._compress.describe(), "at": self._compress.position()}
        if self._orders is not None:
            if self._orders.look():  # a cursor of an earlier step may still be on its way: it gets no part in this
                self._bucket_orders = {name: list(orders) for name, orders in self._orders.value.items()}
            self._last_cursor["buckets"] = self._bucket_orders
        return self._last_cursor

    # -- after a commit -----------------------------------------------------------------------------------------------

    def _after_commit(self, capture: Capture | States) -> None:
        keeper = self._keeper
        assert keeper is not None
        self._restored = None if self._saved_position is None else self._restored
        if self._commits == PACE_AFTER:
            self._say(self._pace_line(capture))
        if self._rebase:
            self._rebase = False
            self._take_base()
            return
        if self._unprotected_since is not None:
            return
        base = capture.snapshot
        if not self._base_ready and base and capture.step - base.step >= self._options.max_inflight_steps:
            # Nothing is durable before the first base is: no more steps than usual may hang on it.
            begun = time.perf_counter()
            capture.settle()
            base.wait()
            capture.stall_s += time.perf_counter() - begun
        wanted = capture.wants_base or keeper.wants_base(capture.step, self._durable, capture.stored_bytes)
        busy = capture.snapshot is not None and not capture.snapshot.done.is_set()
        if wanted and not busy:
            self._take_base()

    def _take_base(self) -> None:
        copy, self._torn = self._torn, False
        self._live().take_base(self._last_cursor, self._on_base, copy=copy)

    def _on_base(self, snapshot: Snapshot) -> None:
        """In the base thread."""
        capture = self._capture
        if snapshot.torn and capture is not None:
            capture.wants_base = "the last one was disturbed by an edit"
            self._torn = True
        if snapshot.manifest is None or capture is None or self._keeper is None:
            return
        first = not self._base_ready
        self._base_ready = True
        if first:
            self._durable = max(self._durable, capture.synced_step)
        if first or isinstance(capture, States):  # elsewhere the log has told of this step before
            self._durable = max(self._durable, snapshot.step)
            files.note(f"durable {self._durable}")
        self._keeper.base_done(snapshot.step, capture.stored_bytes)
        self._drop_pools(capture, snapshot.step)
        if self._dismiss_later:
            self._dismiss_later = False
            recover.dismiss(self._path, self._document.run, capture.generation)
            shared.remove(shared.shared_folder(self._document.run, self.path), [self._ranks.rank])  # if none is there

    def _may_finish_base(self, step: int) -> bool:
        """In the base thread: the first base (also after a failure) stands alone, later ones on the log before them."""
        capture = self._capture
        if not self._base_ready or not isinstance(capture, Capture) or capture.offload.error is not None:
            return True  # a base of a run without a log stands on nothing
        if self._durable >= step and self._options.durability == "os":
            capture.offload.flush(hard=True)
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
        if self._unprotected_since is None:
            self._unprotected_since = capture.step
            self._next_retry = time.monotonic() + 1.0
            warnings.warn(
                f"{self.path}: storage failed, training goes on UNPROTECTED from step {self.durable_step + 1} on: {error}",
                UnprotectedWarning,
                stacklevel=3,
            )
        elif time.monotonic() >= self._next_retry:
            self._next_retry = time.monotonic() + 1.0
            capture.restart()
            self._base_ready = False
            self._rebase = True
            if self._keeper is not None and self._durable >= 0:
                try:
                    self._keeper.never_stored(self._durable + 1, capture.step)
                except StorageError:
                    self._rebase = False  # still not back

    def _come_back(self, capture: Capture | States) -> None:
        if self._unprotected_since is not None and self._base_ready:
            self._say(f"everstep: {self.path}: storage is back; protected again from step {capture.step} on")
            self._unprotected_since = None

    # -- the end ------------------------------------------------------------------------------------------------------

    def _close(self, *, finish: bool) -> None:
        if self._closed or os.getpid() != self._pid:
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
            if self._lock is not None:
                self._lock.release()

    def _stop(self, capture: Capture | States, finish: bool) -> None:
        if self._keeper is not None:
            self._keeper.let_go()
        capture.flush(None if finish else self._last_cursor)  # who finishes takes a base
        keeper = self._keeper
        healthy = not capture.errors()
        if finish and healthy and isinstance(keeper, ShadowKeeper):
            keeper.store_log()
        if finish and healthy and keeper is not None and keeper.base_step != capture.step and capture.is_as_committed():
            capture.take_base(self._last_cursor, self._on_base)
        capture.close(finish=healthy)
        if finish and healthy:
            self._leave_pools(keeper)
        if self._base_ready and healthy and isinstance(capture, Capture):
            self._durable = max(self._durable, capture.step if not capture.errors() else self._durable)
        errors = capture.errors()
        if not errors:
            self._warn_if_not_stored(capture)
        if errors and finish:
            raise StorageError(
                f"{self.path}: steps after {self._durable} could not be stored: {errors[0]}"
            ) from errors[0]

    def _warn_if_not_stored(self, capture: Capture | States) -> None:
        if isinstance(capture, States) and self._durable < capture.step:
            warnings.warn(
                f"{self.path}: step {capture.step} is not stored: it was not due, and the state has changed since it was "
                f"committed. Step {self._durable} is. Flush or close right after a commit, or use snapshot_interval=1",
                UnprotectedWarning,
                stacklevel=4,
            )

    def _leave_pools(self, keeper: Keeper | None) -> None:
        """Pools outside the run's folder are not left behind when the last step is on disk."""
        capture = self._capture
        if isinstance(capture, States) and self._options.pool and keeper is not None and keeper.base_step == capture.step:
            self._old_pools = [self._path.pool(self._pool_folder())]
            self._drop_pools(capture, capture.step)

    def _drop_pools(self, capture: Capture | States, step: int) -> None:
        """A base of this step is stored. If every rank has it, pools that are not needed any more go, by whoever is last."""
        folders, ranks = self._old_pools, range(self._ranks.size)
        if not folders or common_base(self._path, capture.timeline, len(ranks)) < step:
            return
        self._old_pools = []
        for rank in ranks:
            if self._mode == "snapshot":
                self._path.part(rank).pool_is_not_needed(capture.timeline, capture.generation)
            for folder in folders:
                remove_pools(folder, rank)

    def _at_exit(self) -> None:
        self.close()

    def _live(self) -> Capture | States:
        if self._closed:
            raise UsageError("this Run is closed")
        if os.getpid() != self._pid:
            raise UsageError("this Run belongs to the parent process: attach in the process that trains")
        return self._resumed_capture()

    def _resumed_capture(self) -> Capture | States:
        if self._capture is None:
            raise UsageError("call run.resume() first, or iterate over run.steps(loader)")
        return self._capture

    def _say(self, text: str) -> None:
        if not self._options.quiet:
            print(text, file=sys.stderr, flush=True)

    def _pace_line(self, capture: Capture | States) -> str:
        a_step = capture.stored_bytes / self._commits
        a_day = a_step * 86400 / max(capture.step_s, 1e-6)
        hours = self._free_bytes() / max(a_day, 1.0) * 24
        return (
            f"everstep: {self.path} · {a_step / 1e6:.2f} MB a step, {capture.step_s * 1e3:.1f} ms a step: "
            f"{a_day / 1e9:.1f} GB a day before retention, disk full in {hours:.1f} h without it"
        )

    def _free_bytes(self) -> int:
        try:
            return shutil.disk_usage(self._path.path).free
        except OSError:  # the folder is gone: the writer will tell
            return 0

    def _attach_line(self, inventory: Any) -> str:
        step_bytes = sum(
            t.numel() * t.element_size() for t in inventory.params().values() if t.requires_grad
        )
        free = self._free_bytes()
        if self._mode == "snapshot":
            place = self._path.pool(self._pool_folder())
            return (
                f"everstep: {self.path} · mode snapshot · the last {self._num_slots()} states in {place} "
                f"· {free / 1e9:.0f} GB free · a base every "
                f"{self._options.base_interval} steps, keeps {self._options.retention}"
            )
        return (
            f"everstep: {self.path} · mode {self._mode} · about {step_bytes / 1e6:.2f} MB a step · "
            f"{free / 1e9:.0f} GB free ({free // max(step_bytes, 1):,} steps without retention) · "
            f"keeps {self._options.retention}"
        )


def _pace(throttle: Throttle) -> Callable[[int], float]:
    return lambda num_bytes: throttle.delay(time.monotonic(), num_bytes)


def _note_on(optimizer: Optimizer) -> str:
    """What is special about storing this optimizer; empty for most."""
    name = class_name(type(optimizer))
    if name in NEVER_REPLAYED:
        return f"{name} cannot be replayed from gradients: its results are stored at every step, which costs more bytes"
    if name.startswith("torch.optim."):
        return ""
    try:
        find_class(name)
    except ReplayError:
        return (
            f"{name} is not torch's: bases come from the trainer, and restoring needs the live optimizer. "
            "everstep.register(YourOptimizer) lets followers and everstep.open() replay it"
        )
    return ""


def _has_finished_passes(cursor: dict[str, Any]) -> bool:
    return cursor["data"] is not None and cursor["data"]["pass"] > 0


def _is_where_it_began(offer: recover.Offer, line: Line) -> bool:
    """Whether a shadow that the newest generation never reached holds the state from which that one began."""
    return offer.generation == line.newest.parent and offer.step == line.newest.resume_step


def _is_newest(line: Line, at: int) -> bool:
    """False also when newer steps were lost: going on from here is a fork."""
    try:
        return at == line.latest()
    except CorruptionError:
        return False


def _computes_differently(recorded: dict[str, Any]) -> bool:
    """Whether frames written before must not be replayed together with those to come."""
    now = fingerprint()
    return any(recorded.get(k) != now[k] for k in ("torch", "device", "capability", "deterministic"))


def launch_id() -> str:
    """Equal for all restarts of one launch by torchrun, else unique to this attach."""
    elastic = os.environ.get("TORCHELASTIC_RUN_ID")
    if elastic and elastic != "none":
        return f"torchelastic:{elastic}"
    if elastic:
        return f"torchelastic:{os.getppid()}:{_started(os.getppid())}"
    return f"attach:{uuid.uuid4().hex}"


def _started(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return "unknown"

