"""What attach opens: the live objects by their names, the mode, the run's folder and the right to write to it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everstep import cursor as cursors
from everstep import rng
from everstep.atoms import RESIDUALS
from everstep.capture import buckets, layerwise
from everstep.capture.tap import NEVER_REPLAYED
from everstep.compress import Compressor
from everstep.compress.agree import check_same, check_same_compressor
from everstep.errors import FormatError, InexactWarning, ReplayError, UsageError
from everstep.fold import class_name, find_class
from everstep.follow.tuned import choose_mode
from everstep.format.documents import RunDocument
from everstep.module_states import ModuleStates
from everstep.naming import Declared, Inventory, named, take_inventory
from everstep.options import Options
from everstep.ranks import Ranks
from everstep.restore.apply import apply, check_fits
from everstep.restore.execute import Restored, warn_if_unproven
from everstep.store import files, shared
from everstep.store.runs import RunPath, WriterLock
from everstep.tune.choice import Decision

FRAME_BYTES = 20 << 10
"""What a step takes beside its gradients, about: states of generators, footer, blocks that are filled up."""
MIN_SLOTS_OF_RANKS = 3
"""Of each rank's pool: while one is being written, the step before the newest stays, for ranks that have come no further."""


class Training:
    """What is trained in this process, by name; and which of it this rank stores."""

    def __init__(self, model: Any, optimizer: Any, extras: dict[str, Any], options: Options) -> None:
        self.models: dict[str, nn.Module] = named(model, nn.Module, "model")
        self.optimizers: dict[str, Optimizer] = named(optimizer, Optimizer, "optimizer")
        self.extras = extras
        self.compress = options.compress
        self.declared = Declared(options.rename, tuple(options.layout))
        self.stored: set[int] = set()
        """With several ranks: the atoms that this one stores."""
        self._known: set[int] = set()
        self._aliases: Mapping[int, tuple[str, ...]] = {}
        self.modules = ModuleStates(self.models)
        self._bind_residuals()

    def _bind_residuals(self) -> None:
        """The residuals of error feedback are buffers of the run, by the names of their parameters."""
        if RESIDUALS in (*self.models, *self.optimizers):
            raise UsageError(f"neither model nor optimizer can be called {RESIDUALS!r}: that is for those of compression")
        if isinstance(self.compress, Compressor):
            found = self.inventory()
            names = {a.uid: f"{a.owner}/{a.name}" for a in found.layout.atoms}
            self.compress.bind({names[uid]: p for uid, p in found.params().items() if p.requires_grad})
            if self.compress.error_feedback:
                self.models[RESIDUALS] = self.compress.residuals

    def inventory(self) -> Inventory:
        """All live objects as they are now."""
        return take_inventory(self.models, self.optimizers, self.declared)

    def store_part(self, known: set[int], stored: set[int], aliases: Mapping[int, tuple[str, ...]]) -> None:
        """Of these atoms that this rank has, it stores some. Others, if there will be any, cannot be stored."""
        self._known, self.stored, self._aliases = known, stored, aliases

    def stored_inventory(self, ranks: Ranks) -> Inventory:
        """The live objects, as far as this rank stores them. UsageError if there are new ones, with several ranks."""
        found = self.inventory()
        if ranks.size == 1:
            return found
        new = [a.label() for a in found.layout.atoms if self._known and a.uid not in self._known]
        if new:
            raise UsageError(
                f"{', '.join(new[:5])} was added in mid-run: with several ranks that is not supported. Close the run, and "
                "attach and resume again with the new model"
            )
        return found.part(self.stored, ranks.rank, ranks.size, self._aliases)

    def check(self, restored: Restored) -> dict[str, Any]:
        """The cursor of a state that these objects can take; MismatchError if they cannot. Warns of what is inexact."""
        check_fits(restored.state, self.models, self.optimizers, self.declared)
        cursor = cursors.decode(restored.state.cursor)
        cursors.check_same_extras(self.extras, cursor["extras"])
        check_same_compressor(self.compress, cursor)
        _warn_if_inexact(restored)
        return cursor

    def apply(self, restored: Restored, cursor: dict[str, Any]) -> None:
        """Put a state that was checked into the live objects."""
        restored.state.need_all()  # nothing live has been touched when damage is found
        restored.state.close()
        # Extras first: loading a scheduler may touch the optimizer's groups, and what was recorded has the last word.
        cursors.load_extras(self.extras, cursor["extras"])
        if self.compress is not None and "compress" in cursor:
            self.compress.set_position(cursor["compress"]["at"])
        apply(restored.state, self.models, self.optimizers, self.declared)
        self.modules.load(cursor.get("modules", {}))
        rng.install(cursor["rng"])

    def warm(self, cursor: dict[str, Any]) -> None:
        """Bring DDP's buckets to where they were."""
        for said in buckets.warm(self.models, cursor.get("buckets", {})):
            warnings.warn(said, InexactWarning, stacklevel=4)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A run that this process, or each of several ranks, may write."""

    path: RunPath
    run: str
    """Its identity."""
    ranks: Ranks
    training: Training
    options: Options
    mode: str
    decision: Decision | None
    """What chose the mode, if the user did not."""
    lock: WriterLock
    launch: str

    def inventory(self) -> Inventory:
        """The live objects, as far as this rank stores them."""
        return self.training.stored_inventory(self.ranks)

    @property
    def pool_folder(self) -> str:
        """Of the pools that this run writes, as a generation says it; empty: it writes none."""
        return self.path.pool_name(self.run, self.options.pool) if self.mode == "snapshot" else ""

    @property
    def num_slots(self) -> int:
        """Of a pool."""
        return self.options.pool_slots or (3 if self.ranks.size == 1 else 4)

    @property
    def free_bytes(self) -> int:
        try:
            return shutil.disk_usage(self.path.path).free
        except OSError:  # the folder is gone: the writer will tell
            return 0

    def say(self, text: str) -> None:
        """To the user, unless asked to be quiet."""
        _say(self.options, text)


def open_run(model: Any, optimizer: Any, run: Any, extras: dict[str, Any], options: Options, mode: str) -> Opened:
    """By all ranks: agree on what cannot differ, and lock the run, which rank 0 makes if there is none."""
    training = Training(model, optimizer, extras, options)
    inventory = training.inventory()
    cursors.capture_extras(extras)
    ranks = Ranks.current()
    described = None
    if training.compress is not None:
        described = training.compress.describe()
        training.compress.position()  # what cannot be stored is told of now
    check_same([msgspec.json.encode(d).decode() for d in ranks.gather("tell how they compress", described)])
    training.declared.check(ranks.gather("match their layouts", sorted(inventory.matched)))
    decision = None
    if mode == "auto":
        decision = None if ranks.size > 1 else _decide(RunPath(run), options)
        mode = "delta" if decision is None else decision.setting.mode
    modes = sorted(set(ranks.gather("say their mode", mode)))
    if len(modes) > 1:
        raise UsageError(f"all ranks must have one mode, not {' and '.join(modes)}")
    intervals = ranks.all("look at what is asked for", lambda: _refuse(training, options, mode, ranks))
    if any(each != intervals[0] for each in intervals):
        raise UsageError(
            f"with mode='snapshot' all ranks must have one base_interval and one snapshot_interval, not {intervals}: a step "
            "counts when all have it"
        )
    path = RunPath(run, ranks.rank)
    with contextlib.ExitStack() as undo:
        document, lock = _lock_together(path, ranks, undo)
        undo.pop_all()
    opened = Opened(
        path=path, run=document.run, ranks=ranks, training=training, options=options, mode=mode, decision=decision,
        lock=lock, launch=launch_id(),
    )  # fmt: skip
    opened.say(_describe(opened, inventory))
    for name, each in training.optimizers.items():
        note = _note_on(each)
        if note:
            opened.say(f"everstep: optimizer {name!r}: {note}")
    return opened


def _refuse(training: Training, options: Options, mode: str, ranks: Ranks) -> list[int | None]:
    """UsageError for what a mode cannot do with these objects, or with so many ranks. Nothing has been written.

    Returns what all ranks must be given alike.
    """
    if mode == "shadow" and options.tune and (options.shadows or ranks.size > 1):
        whose = "shadows on other hosts keep to the interval that they are given" if options.shadows else (
            "shadows of several ranks write bases of the same steps, at multiples of one interval"
        )  # fmt: skip
        raise UsageError(f"tune=True is for one rank and a shadow of its own host: {whose}. Leave it out")
    if mode != "snapshot":
        return []
    if options.layerwise:
        layerwise.refuse(training.optimizers.values(), list(training.models.values()))
    if ranks.size > 1 and options.pool_slots is not None and options.pool_slots < MIN_SLOTS_OF_RANKS:
        raise UsageError(
            f"pool_slots must be at least {MIN_SLOTS_OF_RANKS} with several ranks, not {options.pool_slots}: one of them "
            "may be a step ahead, and of two slots it would have none that the others have"
        )
    return [options.base_interval, options.snapshot_interval]


def _decide(path: RunPath, options: Options) -> Decision | None:
    """For mode="auto": by what this run has measured so far; None if that is nothing."""
    ground = replace(options.ground, memory_bytes=shared.available_bytes())
    found = choose_mode(path, ground, options.retention.bases)
    if found is not None:
        _say(options, f"everstep: {path.path}: {found.reason}")
    return found


def _lock_together(path: RunPath, ranks: Ranks, undo: contextlib.ExitStack) -> tuple[RunDocument, WriterLock]:
    """The run's document and this rank's right to write, which `undo` gives back; rank 0 makes the run if there is none."""
    locked: list[tuple[RunDocument, WriterLock]] = []

    def first() -> str:
        locked.append(_lock_first(path, undo))
        return locked[0][0].run

    found = ranks.first("open the run", first)

    def other() -> None:
        if ranks.rank:
            locked.append(_lock_other(path, found, undo))

    ranks.all("lock their parts", other)
    return locked[0]


def _lock_first(path: RunPath, undo: contextlib.ExitStack) -> tuple[RunDocument, WriterLock]:
    """By one process: read or make the run, and lock it."""
    existed = path.exists()
    document = path.read_run() if existed else None
    if document is not None and document.read_only:
        raise FormatError(
            f"{path.path} uses {', '.join(document.read_only)}, which this version of Everstep can read but not write. "
            "Upgrade Everstep to go on with this run"
        )
    if not existed:
        files.make_dirs(path.path)
    lock = WriterLock(path)
    undo.callback(lock.release)
    # Only the holder of the lock makes a run: many processes may start at once.
    if document is None and path.exists():
        document = path.read_run()
    if document is not None:
        path.sync([])  # a process that was killed while it made the run may not have
    return document if document is not None else path.create(), lock


def _lock_other(path: RunPath, run: str, undo: contextlib.ExitStack) -> tuple[RunDocument, WriterLock]:
    """By the other ranks: rank 0 has opened it."""
    if not os.path.isfile(path.run_file()) or path.read_run().run != run:
        raise UsageError(
            f"{path.path} on {socket.gethostname()} is not the folder that rank 0 has opened: all ranks must see the same "
            "folder, on storage that they share. Node-local disks cannot hold a run of several nodes"
        )
    lock = WriterLock(path)
    undo.callback(lock.release)
    return path.read_run(), lock


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


def _say(options: Options, text: str) -> None:
    if not options.quiet:
        print(text, file=sys.stderr, flush=True)


def _warn_if_inexact(restored: Restored) -> None:
    """Say what of a state is lost or not proven."""
    if restored.state.lost:
        warnings.warn(
            f"at step {restored.state.step} there were gradients left on parameters that could not be stored: they were "
            "added to before they were read, or are sparse. What clears them before the next backward goes on exactly; what "
            "adds to them does so from an earlier step at which none were left",
            InexactWarning,
            stacklevel=5,
        )
    warn_if_unproven(restored)


def _describe(opened: Opened, inventory: Inventory) -> str:
    """What attach says."""
    options, free = opened.options, opened.free_bytes
    if opened.mode == "snapshot":
        return (
            f"everstep: {opened.path.path} · mode snapshot · the last {opened.num_slots} states in "
            f"{opened.path.pool(opened.pool_folder)} · {free / 1e9:.0f} GB free · a base every "
            f"{options.base_interval} steps, keeps {options.retention}"
        )
    step_bytes = FRAME_BYTES + sum(t.numel() * t.element_size() for t in inventory.params().values() if t.requires_grad)
    return (
        f"everstep: {opened.path.path} · mode {opened.mode} · about {step_bytes / 1e6:.2f} MB a step · "
        f"{free / 1e9:.0f} GB free ({free // step_bytes:,} steps without retention) · "
        f"keeps {options.retention}"
    )


def warn_of_forgotten(optimizers: Mapping[str, Optimizer], scalers: Sequence[Any], extras: Mapping[str, Any]) -> None:
    """InexactWarning of what else has state and drives these optimizers, and is in no extra: it would begin anew."""
    if any(not type(extra).__module__.startswith("torch.") for extra in extras.values()):
        return  # an object of the user's own, which may hold it
    known = [getattr(extra, "optimizer", None) for extra in extras.values() if isinstance(extra, LRScheduler)]
    found = [
        f"a scheduler sets the learning rate of {name!r}"
        for name, optimizer in optimizers.items()
        if hasattr(optimizer.step, "_wrapped_by_lr_sched") and not any(optimizer is each for each in known)
    ]
    if any(scaler.is_enabled() and not any(scaler is extra for extra in extras.values()) for scaler in scalers):
        found.append("a GradScaler scales the gradients")
    if found:
        warnings.warn(
            f"{', and '.join(found)}, which Everstep was not given: what it counts is not stored, and begins anew when the "
            "run is resumed. Pass such objects to attach(), as in extras={'scheduler': scheduler, 'scaler': scaler}",
            InexactWarning,
            stacklevel=5,
        )


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
