"""A state that follows the log: Held folds frames, checks their audits and writes bases; Compactor finds them on a disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from everstep import tree
from everstep.atoms import state_uid
from everstep.errors import AuditError, CorruptionError, StorageError
from everstep.fold import Folder, State
from everstep.format.documents import FOLDED, IN_PART, LOST, Manifest, StoredOptimizer
from everstep.format.parts import Part
from everstep.format.segment import parse_name
from everstep.memory import strides_of
from everstep.restore.execute import audit, load_base, open_frames
from everstep.restore.plan import Line, Plan, line_of
from everstep.store import files
from everstep.store.bases import BaseWriter, Slot, base_folder, check_base, read_manifest
from everstep.store.runs import RunPath, read_listing
from everstep.store.segments import FrameEntry, Segment, StoredFrame


class Held:
    """S(n) of a run that another process writes. One thread."""

    def __init__(self, path: RunPath, timeline: int, generation: int, *, num_workers: int = 1) -> None:
        self._path = path
        self.timeline, self.generation = timeline, generation
        self._num_workers = num_workers
        self._line: Line | None = None
        self._state: State | None = None
        self._base: Manifest | None = None
        self._fingerprint: dict[str, Any] = {}
        self.part: Part | None = None
        """Which part of the state this is; None: all of it."""
        self.complete = False
        """Whether the audit of the step held covers the whole state."""

    @property
    def step(self) -> int | None:
        """The step of the state held; None before the first."""
        return None if self._state is None else self._state.step

    @property
    def state(self) -> State:
        """The state held. It changes with the next fold."""
        assert self._state is not None
        return self._state

    def forget(self) -> None:
        """Start from a base again."""
        self._state = self._line = None

    def load(self, line: Line, base: int) -> None:
        """Hold the state of a base."""
        self._line = line
        self._base = line.bases[base][0]
        self._state = load_base(self._plan(base, ()), self._num_workers)
        self.complete = self._base.is_proven

    def take(self, state: State, fingerprint: dict[str, Any]) -> None:
        """Hold what somebody else has made."""
        self._state, self._fingerprint = state, fingerprint

    def go_on(self, timeline: int, generation: int) -> None:
        """What is held is where this generation begins."""
        self.timeline, self.generation = timeline, generation
        self._line = None

    def _plan(self, step: int, frames: tuple[Any, ...]) -> Plan:
        assert self._base is not None
        folder = base_folder(self._path.bases(self._base.timeline), self._base.step)
        return Plan(step, self.timeline, self.generation, self._base, folder, frames)

    def fold(self, frames: Sequence[StoredFrame], fingerprint: dict[str, Any]) -> list[str]:
        """Apply the frames that follow; what differs from the trainer's hashes after the last of them."""
        state = self.state
        self._fingerprint = fingerprint
        self._folder().fold(state, frames)
        state.cursor = frames[-1].cursor()
        self.complete = frames[-1].footer.audit_complete
        return audit(state, frames[-1].footer, is_part=state.is_part)

    def _folder(self) -> Folder:
        return Folder(
            find_layout=lambda i: self._path.read_layout(i, [self.timeline]),
            num_threads=int(self._fingerprint.get("num_threads", 1)), num_workers=self._num_workers,
        )  # fmt: skip

    def write_base(self, *, direct: bool) -> Manifest:
        """A base of the state held, read back and compared before this returns."""
        state = self.state
        if self._base is not None and self._base.step == state.step:
            return self._base  # the trainer has taken one of this step itself
        newest = max(
            (
                int(name.removesuffix(".json"))
                for timeline in files.listing(self._path.timelines())
                for name in files.listing(os.path.join(self._path.timelines(), timeline, "generations"))
                if name.removesuffix(".json").isdigit()
            ),
            default=0,
        )
        if newest > self.generation:
            raise CorruptionError(f"generation {self.generation} has been superseded by {newest}: nothing was written")
        slots, tensors, fields = describe(state)
        writer = BaseWriter(
            self._path.bases(self.timeline), state.step, slots, direct=direct, rank=self._path.rank, part=self.part,
            fine=state.layout.fine,
        )
        try:
            for index in writer.order:
                writer.add(tensors[index])
            self._sync_log()
            manifest = writer.finish(
                run=self._path.read_run().run, timeline=self.timeline, generation=self.generation, step=state.step,
                layout=state.layout, cursor=state.cursor, audit=FOLDED if self.complete else IN_PART,
                fingerprint=self._fingerprint, **fields,
            )  # fmt: skip
        except BaseException:
            with contextlib.suppress(StorageError):  # the first error is the one to report
                writer.abandon()
            raise
        manifest = checked_base(base_folder(self._path.bases(self.timeline), state.step), manifest)
        self._base = manifest
        return manifest

    def _sync_log(self) -> None:
        """What must be on stable storage before a base of it is."""


def checked_base(folder: str, manifest: Manifest) -> Manifest:
    """Read a base back. The trainer may have put its own in its place meanwhile: then that is the one there is."""
    try:
        check_base(folder, manifest)
    except CorruptionError:
        now = read_manifest(folder, manifest.part)
        if now is None or now.audit == manifest.audit:
            raise
        return now
    return manifest


class Compactor(Held):
    """The lazy follower: brings the state forward when it is told to, from the log on disk."""

    _chunk_bytes = 1 << 30
    proven = -1
    """The last step of which every bit was compared with the trainer's."""
    _past = -1
    """Segments up to the one of this first step are folded and forgotten, though their files may be there for long."""

    def advance(self, step: int) -> None:
        """Fold up to this durable step and check its audit. AuditError names the first step that differs."""
        if self._state is None or self._state.step > step:
            self._load(step)
        assert self._state is not None and self._line is not None
        while self._state.step < step:
            self._refresh(step)
            self._fold(step)

    def _load(self, step: int) -> None:
        line = line_of(read_listing(self._path))
        if line.newest.generation != self.generation:
            raise CorruptionError(f"generation {self.generation} has been superseded by {line.newest.generation}")
        base = max((b for b in line.bases if b <= step), default=None)
        if base is None:
            raise CorruptionError(f"{self._path.path}: no base at or before step {step}")
        self.load(line, base)
        self._past = -1

    def _refresh(self, step: int) -> None:
        """Learn of frames that have been written since the last look."""
        state, line = self._state, self._line
        assert state is not None and line is not None
        if step in line.frames:
            return
        folder = self._path.log(self.timeline)
        for name in files.listing(folder):
            parsed = parse_name(name)
            if parsed is None or parsed[0] != self.generation:
                continue
            file = os.path.join(folder, name)
            segment = line.segments.get(file)
            if segment is None:
                if parsed[1] <= self._past:
                    continue
                segment = line.segments[file] = Segment(file, line.listing.run.run, self._path.rank, *parsed)
            if segment.end is None:
                segment.scan()
                for frame in segment.frames:
                    if frame.step > state.step:
                        line.frames.setdefault(frame.step, frame)

    def _forget_folded(self) -> None:
        """What is known of frames and whole segments up to the step held: a run has ever more of them."""
        state, line = self._state, self._line
        assert state is not None and line is not None
        for step in [n for n in line.frames if n <= state.step]:
            del line.frames[step]
        for file, segment in list(line.segments.items()):
            is_whole = segment.end is not None and segment.generation == self.generation
            if is_whole and all(frame.step <= state.step for frame in segment.frames):
                self._past = max(self._past, segment.first_step)
                del line.segments[file]

    def _fold(self, step: int) -> None:
        state, line = self._state, self._line
        assert state is not None and line is not None
        entries: list[FrameEntry] = []
        size = 0
        while state.step + len(entries) < step and size < self._chunk_bytes:
            entry = line.frames.get(state.step + len(entries) + 1)
            if entry is None:
                raise CorruptionError(f"{self._path.path}: step {state.step + len(entries) + 1} is not in the log")
            entries.append(entry)
            size += entry.end_offset - entry.offset
        plan = self._plan(entries[-1].step, tuple(entries))
        frames, readers = open_frames(line, plan)
        # Hashes of all of the state are not in every frame: the last that has them is compared on the way.
        whole = max((i for i, frame in enumerate(frames, 1) if frame.footer.audit_complete), default=0)
        try:
            header = line.segments[entries[-1].path].header
            for part in (frames[:whole], frames[whole:]):
                bad = self.fold(part, header.fingerprint if header is not None else {}) if part else []
                if bad:
                    raise self._first_difference(bad, part[-1].entry.step)
                if part and self.complete:
                    self.proven = part[-1].entry.step
        finally:
            for reader in readers:
                reader.close()
        self._forget_folded()

    def _first_difference(self, bad: list[str], last: int) -> AuditError:
        """Replay step by step from the newest base to name the step."""
        self.forget()
        self._load(last)
        state, line = self._state, self._line
        assert state is not None and line is not None
        for step in range(state.step + 1, last + 1):
            frames, readers = open_frames(line, self._plan(step, (line.frames[step],)))
            try:
                self._folder().fold(state, frames)
                found = audit(state, frames[0].footer)
            finally:
                for reader in readers:
                    reader.close()
            if found:
                bad, last = found, step
                break
        self.forget()
        return AuditError(
            f"step {last}: the state that the log leads to differs from the trainer's in {', '.join(bad[:5])}",
            step=last,
        )

    def _sync_log(self) -> None:
        """With durability="os" the log may be in memory only: a base must not outlive the steps before it."""
        assert self._line is not None
        for segment in self._line.segments.values():
            if segment.generation == self.generation and segment.end is None and os.path.exists(segment.path):
                files.sync_file(segment.path)
        files.sync_dir(self._path.log(self.timeline))


def describe(state: State) -> tuple[list[Slot], list[torch.Tensor], dict[str, Any]]:
    """A state as what BaseWriter wants: slots, tensors, and the manifest's fields that depend on them."""
    slots: list[Slot] = []
    tensors: list[torch.Tensor] = []
    keys: set[str] = set()
    names = {a.uid: a.name for a in state.layout.atoms}

    def add(uid: int, role: str, key: str, tensor: torch.Tensor) -> int:
        while key in keys:
            key += "'"
        keys.add(key)
        slots.append(Slot(uid, role, key, tensor.dtype, tuple(tensor.shape), strides_of(tensor)))
        tensors.append(tensor)
        return len(slots) - 1

    for atom in state.layout.atoms:
        if state.is_part and atom.uid not in state.tensors:
            continue
        add(atom.uid, atom.role, f"{atom.owner}.{atom.name}", state.tensors[atom.uid])
    optimizers = []
    for name, optimizer in state.optimizers.items():
        entries = []
        for uid, values in optimizer.state.items():
            entries.append((uid, tree.pack(values, _putter(add, name, uid, names.get(uid, ""), values))))
        optimizers.append(
            StoredOptimizer(
                name, tuple(tuple(p) for p in optimizer.params), tree.plain_to_text(list(optimizer.hyper)),
                tree.plain_to_text(entries),
            )
        )
    carried = tuple(
        (uid, add(uid, "grad", f"grad.{uid:016x}", tensor)) for uid, tensor in state.carried.items()
    )
    carried += tuple((uid, LOST) for uid in sorted(state.lost))
    return slots, tensors, {"optimizers": tuple(optimizers), "carried": carried}


def _putter(
    add: Callable[[int, str, str, torch.Tensor], int], optimizer: str, uid: int, param: str, values: dict[str, Any]
) -> Callable[[torch.Tensor], int]:
    name_of = {id(v): str(k) for k, v in values.items()}

    def put(tensor: torch.Tensor) -> int:
        name = name_of.get(id(tensor), f"#{id(tensor)}")
        return add(state_uid(optimizer, uid, name), "state", f"{optimizer}.{param}.{name}", tensor)

    return put
