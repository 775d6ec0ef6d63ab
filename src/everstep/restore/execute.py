"""Read, verify, replay: from a plan to S(step) in memory."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from everstep import tree
from everstep.atoms import Layout, piece_elements, state_uid
from everstep.errors import AuditError, CorruptionError, MismatchError, UnprovenWarning
from everstep.fingerprint import differences, fingerprint
from everstep.fold import Folder, Live, OptimizerState, Ranges, State, Window
from everstep.format.documents import LOST, Manifest, StoredTensor
from everstep.frame import Footer, SetGroups, SetLayout, audit_entries
from everstep.memory import dtype_named, plain, view_bytes, with_strides
from everstep.naming import UNDECLARED, Declared
from everstep.restore import parts
from everstep.restore.apply import check_fits
from everstep.restore.parts import PartFrame
from everstep.restore.plan import Line, Plan, describe_steps
from everstep.store import bases, files
from everstep.store.segments import StoredFrame

Progress = Callable[[str, int, int], None]
Slot = tuple[str | None, str]
"""What of an atom: its value, its carried gradient, or (optimizer, key)."""
VALUE: Slot = (None, "value")
GRADIENT: Slot = (None, "gradient")
Place = Callable[[int, Slot, torch.dtype, int, int], torch.Tensor | None]
"""Where elements [start, stop) of an atom, or of what an optimizer has of it, are to lie, flat; None: anywhere."""
_beginning = threading.Lock()
"""Of restores side by side one begins at a time, so that the first of them reads while the next begins."""


@dataclass
class Restored:
    """A state in memory, and how far it is proven."""

    state: State
    plan: Plan | None
    """None: it comes from a shadow's memory."""
    proven: bool
    """Every piece of S(step) has the hash that the trainer recorded (or comes from a base that was proven so)."""
    fingerprint: dict[str, Any]
    unproven: list[str] = field(default_factory=list)
    """Labels of the tensors that the audit of the step does not have, where that is known."""
    whole_steps: Set[int] = frozenset()
    """Steps on the way to it whose audits cover everything: they can be proven whole."""


def restore(
    line: Line, step: int, *, live: Live | None = None, num_workers: int | None = None,
    progress: Progress | None = None, only: Mapping[int, Ranges] | None = None, flat: Set[int] = frozenset(),
    place: Place | None = None,
) -> Restored:  # fmt: skip
    """S(step), every bit verified, from the cheapest plan that is not damaged.

    `only`: of parameters and buffers these alone, with what optimizers know of them; nothing else is read. Of each of them
    only these elements are wanted: others may have any value. Those in `flat` may come as State.windows, in memory that
    `place` gives.
    """
    failures: list[CorruptionError] = []
    for plan in line.plans(step):
        try:
            with no_gc():
                return _execute(line, plan, live, num_workers or os.cpu_count() or 1, progress, only, flat, place)
        except CorruptionError as e:
            failures.append(e)
    raise _with_alternatives(line, failures[0])


_gc_lock = threading.Lock()
_num_without_gc = 0
_had_gc = False


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """Without the cycle collector: many small objects are made and none of them are in cycles. Any thread."""
    global _num_without_gc, _had_gc
    with _gc_lock:
        if not _num_without_gc:
            _had_gc = gc.isenabled()
            gc.disable()
        _num_without_gc += 1
    try:
        yield
    finally:
        with _gc_lock:
            _num_without_gc -= 1
            if not _num_without_gc and _had_gc:
                gc.enable()


def _with_alternatives(line: Line, error: CorruptionError) -> CorruptionError:
    """The same error, with the steps that do not need what is damaged."""
    if error.step is None:
        return error
    rest = replace(line, frames={n: f for n, f in line.frames.items() if n != error.step})
    if error.in_base:
        rest = replace(line, bases={n: b for n, b in line.bases.items() if n != error.step})
    told = CorruptionError(f"{error} Steps that do not need it: {describe_steps(rest.steps()) or 'none'}")
    told.step, told.in_base = error.step, error.in_base
    return told


def check_before_replay(
    line: Line, step: int, models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer],
    declared: Declared = UNDECLARED,
) -> None:  # fmt: skip
    """MismatchError before anything is read, if the objects do not fit and no frame on the way changes the layout."""
    plan = line.plans(step)[0]
    specs = {spec.name: spec for spec in plan.base.layout.optimizers}
    shell = State(
        step, plan.base.layout, {},
        {o.name: OptimizerState(specs[o.name], [], [tuple(p) for p in o.params]) for o in plan.base.optimizers},
    )  # fmt: skip
    try:
        check_fits(shell, models, optimizers, declared)
    except MismatchError:
        frames, readers = open_frames(line, plan)
        for reader in readers:
            reader.close()
        if not any(isinstance(op, (SetLayout, SetGroups)) for frame in frames for op in frame.ops):
            raise


def _execute(
    line: Line, plan: Plan, live: Live | None, num_workers: int, progress: Progress | None,
    only: Mapping[int, Ranges] | None, flat: Set[int], place: Place | None,
) -> Restored:  # fmt: skip
    is_small = plan.num_bytes <= bases.ALONE_BYTES
    if is_small:
        num_workers = 1
    stored, readers = open_frames(line, plan)
    frames: Sequence[StoredFrame | PartFrame] = stored
    find_layout = layout_finder(line)
    if only is not None:
        frames = [PartFrame(f, only.keys()) for f in stored]
        find_layout = parts.part_finder(find_layout, only.keys())
    state: State | None = None
    try:
        told = None if progress is None else (lambda done, total: progress("replay", done, total))
        with _beginning:
            rows = [
                (
                    Folder(
                        find_layout=find_layout, live=live, num_threads=n, num_workers=num_workers, read_ahead=not is_small,
                        progress=told,
                    ),
                    list(row),
                )
                for n, row in groupby(frames, lambda f: num_threads(line, f))
            ]  # fmt: skip
            if only is None:
                state = begin_base(plan, num_workers)
            else:
                state = _begin_part(plan, num_workers, rows, only, flat, place)
        for folder, row in rows:
            folder.fold(state, row)
        state.need_all()
        if frames:
            state.cursor = frames[-1].cursor()
            bad = audit(state, frames[-1].footer, num_workers, is_part=only is not None)
            if bad:
                raise _audit_error(line, plan, live, bad)
        recorded = _fingerprint(line, plan) or plan.base.fingerprint
        unproven = not_audited(state, frames[-1].footer) if frames else []
        proven = not unproven if frames else plan.base.is_proven
        return Restored(state, plan, proven, recorded, unproven, _whole_steps(plan, stored))
    finally:
        if state is not None:
            state.close()
        for reader in readers:
            reader.close()


_Rows = Sequence[tuple[Folder, list[StoredFrame | PartFrame]]]


def _begin_part(
    plan: Plan, num_workers: int, rows: _Rows, only: Mapping[int, Ranges], flat: Set[int], place: Place | None
) -> State:
    """S(base step) as far as these elements of these atoms stand on it; the caller closes it.

    Of those in `flat` only what is needed has memory, if they are replayed by tiles alone.
    """
    tensors = [_without_memory(t) for t in plan.base.tensors]
    shell = state_of(plan.base, tensors)
    parts.keep(shell, only.keys())
    index_of = {id(t): i for i, t in enumerate(tensors)}
    spans = {index_of[id(t)]: (0, t.numel()) for t in parts.tensors_of(shell) if id(t) in index_of}
    needed: dict[int, Ranges] = {}
    windows: dict[int, list[int]] = {}
    places: dict[int, torch.Tensor] = {}
    if len(rows) <= 1 and all(folder.is_one_row(shell, row) for folder, row in rows):
        can_cut = rows[0][0].cut(shell, rows[0][1]) if rows else shell.tensors.keys()
        needed = _needed(shell, {u: r for u, r in only.items() if u in can_cut}, rows[0][1][-1].footer if rows else None)
        for uid in (flat & needed.keys()) - shell.carried.keys():
            cut = _cut_with(shell, uid)
            if not all(t.is_contiguous() for t in cut.values()):
                continue
            there = {slot: index_of[id(t)] for slot, t in cut.items() if id(t) in index_of}
            first, end = needed[uid][0][0], needed[uid][-1][1]
            windows[uid] = list(there.values())
            for slot, index in there.items():
                spans[index] = first, end
                numel, dtype = tensors[index].numel(), tensors[index].dtype
                piece = piece_elements(numel, fine=plan.base.tensors[index].fine)
                held = first // piece * piece, min(-(-end // piece) * piece, numel)
                memory = None if place is None else place(uid, slot, dtype, *held)
                if memory is not None:
                    places[index] = memory
    state = begin_base(plan, num_workers, spans, {index for indices in windows.values() for index in indices}, places)
    parts.keep(state, only.keys())
    state.needed = needed
    assert isinstance(state.loading, _Loading)
    state.windows = {
        uid: Window(state.loading.origin(state.tensors[uid]), shell.tensors[uid].numel()) for uid in windows
    }
    return state


def _without_memory(stored: StoredTensor) -> torch.Tensor:
    strides = stored.strides or torch.empty(stored.shape, device="meta").stride()
    return torch.empty_strided(stored.shape, strides, dtype=dtype_named(stored.dtype), device="meta")


def _cut_with(state: State, uid: int) -> dict[Slot, torch.Tensor]:
    """A parameter and what of its optimizer state is cut as it is."""
    tensor = state.tensors[uid]
    found = {VALUE: tensor}
    for name, optimizer in state.optimizers.items():
        for key, value in optimizer.state.get(uid, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == tensor.shape:
                found[name, key] = value
    return found


def _needed(state: State, only: Mapping[int, Ranges], footer: Footer | None) -> dict[int, Ranges]:
    """What must be replayed for the elements that are wanted: blocks that can be cut out, and all of some pieces.

    A piece can be checked against its hash only as a whole. Where several want parts of it, one does: who wants a certain
    element of it, which is another one in every piece.
    """
    hashed: dict[int, set[int]] = {}
    if footer is not None:
        entries = audit_entries(footer)
        for uid, piece in zip(entries["uid"].tolist(), entries["piece"].tolist(), strict=True):
            hashed.setdefault(uid, set()).add(piece)
    keys = {name: {key for values in o.state.values() for key in values} for name, o in state.optimizers.items()}
    found: dict[int, Ranges] = {}
    for uid, ranges in only.items():
        tensor = state.tensors.get(uid)
        if tensor is None:
            continue
        numel = tensor.numel()
        size = piece_elements(numel, fine=footer is not None and footer.fine)
        pieces = set(hashed.get(uid, ()))
        for name in state.optimizers:
            pieces.update(*(hashed.get(state_uid(name, uid, key), ()) for key in keys[name]))
            if not keys[name] and footer is not None:  # what it will have after the first update is not known yet
                pieces.update(range(-(-numel // size)))
        mine = {piece for piece in pieces if parts.has_lot(ranges, uid, piece, numel, size)}
        found[uid] = parts.blocks(ranges, numel, mine, size)
    return found


def _fingerprint(line: Line, plan: Plan) -> dict[str, Any]:
    for entry in reversed(plan.frames):
        header = line.segments[entry.path].header
        if header is not None:
            return header.fingerprint
    return {}


def num_threads(line: Line, frame: StoredFrame | PartFrame) -> int:
    """Of the process that wrote this frame."""
    header = line.segments[frame.entry.path].header
    return 1 if header is None else int(header.fingerprint.get("num_threads", 1))


def open_frames(line: Line, plan: Plan) -> tuple[list[StoredFrame], list[files.Reader]]:
    """All planned files are opened first, so that retention cannot pull them away. The caller closes the readers."""
    readers: dict[str, files.Reader] = {}
    try:
        for entry in plan.frames:
            if entry.path not in readers:
                readers[entry.path] = files.Reader(entry.path, direct=True)
        frames = [StoredFrame(e, readers[e.path], line.segments[e.path].seed) for e in plan.frames]
        check_chain(frames)
    except FileNotFoundError as e:
        _close(readers)
        raise CorruptionError(f"{e.filename or e} is gone: it was removed while a restore was planned") from e
    except BaseException:
        _close(readers)
        raise
    return frames, list(readers.values())


def _close(readers: dict[str, files.Reader]) -> None:
    for reader in readers.values():
        reader.close()


def check_chain(frames: Sequence[StoredFrame]) -> None:
    """Each footer names the one before it."""
    for before, frame in itertools.pairwise(frames):
        same = before.entry.generation == frame.entry.generation
        if frame.step != before.step + 1 or (same and frame.footer.previous not in (0, before.footer_sum)):
            raise CorruptionError(
                f"step {frame.step} in {frame.entry.path} does not go on from step {before.step} in {before.entry.path}"
            )


def load_base(plan: Plan, num_workers: int) -> State:
    """S(base step), read and verified by all workers."""
    state = begin_base(plan, num_workers)
    try:
        state.need_all()
    finally:
        state.close()
    return state


def begin_base(
    plan: Plan, num_workers: int, spans: Mapping[int, tuple[int, int]] | None = None, flat: Set[int] = frozenset(),
    places: Mapping[int, torch.Tensor] | None = None,
) -> State:  # fmt: skip
    """S(base step) whose tensors get their values when they are needed. The caller closes it.

    `spans`: of tensors, by their number, elements that may be needed; others have no memory. None: all of all. Those in
    `flat` are flat, and begin where their memory does: in one of `places`, or anywhere.
    """
    reader = bases.BaseReader(plan.base_folder, plan.base)
    tensors: list[torch.Tensor] = []
    try:
        loading = reader.load(spans, places)
        for index, (stored, found) in enumerate(zip(plan.base.tensors, loading.tensors, strict=True)):
            if spans is not None and index not in spans:
                tensors.append(_without_memory(stored))
            elif index in flat:
                tensors.append(found)
            else:
                if stored.strides is not None:
                    loading.need(index)  # it is copied here
                tensors.append(with_strides(found, stored.shape, stored.strides))
        state = state_of(plan.base, tensors)
    except BaseException:
        reader.close()
        raise
    index_of = {id(t): i for i, t in enumerate(tensors) if spans is None or i in spans}
    state.loading = _Loading(reader, loading, index_of, num_workers, state)
    return state


class _Loading:
    """A base's values on their way into a state (a fold.Loading)."""

    def __init__(
        self, reader: bases.BaseReader, loading: bases.Loading, index_of: dict[int, int], num_workers: int, state: State
    ) -> None:
        self._reader = reader
        self._loading = loading
        self._index_of = index_of
        self._num_workers = num_workers
        self._state = state
        self._uid_of: dict[int, int] = {}
        """Of the parameter that a tensor is, or is cut with."""
        for uid in state.tensors:
            for each in _cut_with(state, uid).values():
                if id(each) in index_of:
                    self._uid_of[index_of[id(each)]] = uid

    def origin(self, tensor: torch.Tensor) -> int:
        """Which element of it a tensor's memory begins with."""
        return self._loading.origin(self._index_of[id(tensor)])

    def begin(self, tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> None:
        index = self._index_of.get(id(tensor))
        if index is not None:
            self._loading.begin(index, start, stop)

    def need(self, tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> None:
        index = self._index_of.get(id(tensor))
        if index is not None:
            self._loading.need(index, start, stop)

    def need_all(self) -> None:
        needed, everything = self._state.needed, ((0, None),)
        self._loading.need_all(
            self._num_workers,
            {index: needed.get(self._uid_of.get(index, 0), everything) for index in self._index_of.values()},
        )

    def close(self) -> None:
        self._reader.close()


def state_of(manifest: Manifest, tensors: list[torch.Tensor]) -> State:
    specs = {spec.name: spec for spec in manifest.layout.optimizers}
    optimizers = {}
    for stored in manifest.optimizers:
        optimizers[stored.name] = OptimizerState(
            specs[stored.name], tree.plain_from_text(stored.hyper), [tuple(p) for p in stored.params],
            {uid: tree.unpack(s, lambda i: tensors[i]) for uid, s in tree.plain_from_text(stored.state)},
        )  # fmt: skip
    atoms = {
        t.uid: tensor for t, tensor in zip(manifest.tensors, tensors, strict=True) if t.of_model
    }
    carried = {
        uid: torch.zeros_like(atoms[uid]) if index == -1 else tensors[index]
        for uid, index in manifest.carried
        if index >= -1
    }
    lost = {uid for uid, index in manifest.carried if index == LOST}
    return State(
        manifest.step, manifest.layout, atoms, optimizers, carried, lost, bases.cursor_of(manifest),
        is_part=manifest.part is not None,
    )  # fmt: skip


class Audited(NamedTuple):
    """A dense tensor of a state that frames may carry hashes of."""

    label: str
    tensor: torch.Tensor
    known: Ranges | None
    """What of it has its values; None: all."""
    window: Window


def audited_tensors(state: State) -> dict[int, Audited]:
    """By uid, all that there are."""
    found: dict[int, Audited] = {}

    def add(uid: int, label: str, tensor: torch.Tensor, param: int | None) -> None:
        known = None if param is None else state.needed.get(param)
        window = Window(0, tensor.numel()) if param is None else state.windows.get(param, Window(0, tensor.numel()))
        found[uid] = Audited(label, tensor, known, window)

    for atom in state.layout.atoms:
        if atom.uid in state.tensors:
            add(atom.uid, atom.label(), state.tensors[atom.uid], atom.uid)
    names = {atom.uid: atom.name for atom in state.layout.atoms}
    for name, optimizer in state.optimizers.items():
        for uid, values in optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and not value.is_sparse:
                    is_cut = uid in state.tensors and value.shape == state.tensors[uid].shape
                    label = f"{name}: {key} of {names.get(uid, uid)}"
                    add(state_uid(name, uid, key), label, value, uid if is_cut else None)
    return found


def audit(state: State, footer: Footer, num_workers: int = 1, *, is_part: bool = False) -> list[str]:
    """Labels of the tensors whose hashes differ from those in the frame that made this state.

    `is_part`: the frame tells of more than the state has.
    """
    entries = audit_entries(footer)
    known = audited_tensors(state)
    if is_part:
        entries = entries[np.isin(entries["uid"], np.array(list(known), np.uint64))]
    by_uid: dict[int, list[tuple[int, int]]] = {}
    for uid, piece, expected in zip(
        entries["uid"].tolist(), entries["piece"].tolist(), entries["hash"].tolist(), strict=True
    ):
        by_uid.setdefault(uid, []).append((piece, expected))

    def check(uid: int) -> str | None:
        if uid not in known:
            return f"(tensor {uid:016x}, which the replayed state does not have)"
        label, tensor, ranges, window = known[uid]
        dense = plain(tensor)
        data, itemsize = view_bytes(dense), dense.element_size()
        size = piece_elements(window.numel, fine=footer.fine)
        for piece, expected in by_uid[uid]:
            if ranges is not None and not parts.has_piece(ranges, piece, window.numel, size):
                continue
            first = piece * size
            part = data[(first - window.start) * itemsize : (first + size - window.start) * itemsize]
            if bases.piece_sum(part, uid, first) != expected:
                return label
        return None

    if num_workers == 1:
        return [label for label in map(check, by_uid) if label is not None]
    with ThreadPoolExecutor(num_workers, "everstep-audit") as pool:
        return [label for label in pool.map(check, by_uid) if label is not None]


def not_audited(state: State, footer: Footer) -> list[str]:
    """Labels of the tensors of a state that its frame has no hashes of."""
    if footer.audit_complete:
        return []
    there = set(audit_entries(footer)["uid"].tolist())
    known = audited_tensors(state)
    return [found.label for uid, found in known.items() if uid not in there and found.tensor.numel()]


def _whole_steps(plan: Plan, frames: Sequence[StoredFrame]) -> set[int]:
    """Steps of a plan whose audits cover everything."""
    base = {plan.base.step} if plan.base.is_proven else set()
    return base | {frame.step for frame in frames if frame.footer.audit_complete}


def warn_if_unproven(restored: Restored) -> None:
    """Say how far a state is proven, if not to its last bit."""
    if restored.proven:
        return
    step = restored.state.step
    replayed = restored.plan is None or restored.plan.frames
    changed = differences(restored.fingerprint, fingerprint()) if replayed else []
    what = "some of the optimizer state"
    if restored.unproven:
        more = len(restored.unproven) - 3
        what = ", ".join(restored.unproven[:3]) + (f" and {more} more" if more > 0 else "")
    if changed:
        why = f"this machine may compute differently ({'; '.join(changed)})"
    else:
        why = "an edit of it through .data or numpy right before the commit would not show"
    whole = max((n for n in restored.whole_steps if n < step), default=None)
    offer = "" if whole is None else f" The last step before it that is proven whole is {whole}."
    warnings.warn(
        f"step {step} is proven by its audit, but for {what}, which the trainer had no time to hash: {why}.{offer} "
        "attach(audit='full') hashes everything at every step, and training waits for it",
        UnprovenWarning,
        stacklevel=4,
    )


def first_bad_step(line: Line, plan: Plan, live: Live | None) -> tuple[int, list[str], int | None]:
    """Replay one step at a time and return the first whose hashes differ, the tensors, and the last that is proven whole.

    The step before need not be right: an edit of optimizer state shows first in the parameters of the next one.
    """
    frames, readers = open_frames(line, plan)
    proven = plan.base.step if plan.base.is_proven else None
    try:
        state = load_base(plan, 1)
        for frame in frames:
            Folder(find_layout=layout_finder(line), live=live, num_threads=num_threads(line, frame)).fold(state, [frame])
            bad = audit(state, frame.footer)
            if bad:
                return frame.step, bad, proven
            if not not_audited(state, frame.footer):
                proven = frame.step
    finally:
        for reader in readers:
            reader.close()
    return plan.step, [], proven


def _audit_error(line: Line, plan: Plan, live: Live | None, bad: list[str]) -> AuditError:
    step, first, proven = first_bad_step(line, plan, live)
    if proven is None:  # older bases may still lead to one
        proven = max((n for n, (base, _) in line.bases.items() if n < step and base.is_proven), default=None)
    offer = "No step before it is proven whole"
    if proven is not None:
        offer = f"The last proven step is {proven}: resume(step={proven}) goes on from there"
    return AuditError(
        f"step {plan.step} of {line.listing.path.path} is not what the trainer had: from step {step} on, replaying gives "
        f"other values for {', '.join((first or bad)[:5])}. Something changed them without a trace (an edit through .data "
        f"or numpy?), or this machine computes differently ({_difference(line, plan)}). {offer}",
        step=step,
        proven_step=proven,
    )


def _difference(line: Line, plan: Plan) -> str:
    found = differences(_fingerprint(line, plan), fingerprint())
    return "; ".join(found) if found else "same fingerprint"


def layout_finder(line: Line) -> Callable[[str], Layout]:
    return lambda i: line.listing.path.read_layout(i, line.timelines)
