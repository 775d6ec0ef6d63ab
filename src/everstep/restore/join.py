"""A run that many ranks wrote, as one: which steps all of them have, and their parts cut and joined into whole tensors.

Each rank's log and bases are a line of their own (plan.py). Frames are replayed on the boxes that the ranks had, so that
every bit is as it was; the results are then cut and joined into the boxes that are wanted, whatever the layout of those.

A timeline has one layout. Where a run went on under another, a timeline begins that stands on bases of its own: an *era*.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from msgspec import structs

from everstep.atoms import Atom, Layout, piece_elements
from everstep.boxes import Share, filled, slices, span, whole
from everstep.errors import CorruptionError, MismatchError, NothingToRestoreError, SetBackWarning, StepNotFoundError
from everstep.fold import ELEMENTWISE, Live, OptimizerState, Ranges, State, Window
from everstep.format.documents import GenerationDocument
from everstep.frame import SetLayout
from everstep.memory import ALIGNMENT, NewMemory, copy_all, dtype_named, own_storage, same_bits
from everstep.naming import Inventory
from everstep.restore.apply import same_packed
from everstep.restore.execute import GRADIENT, VALUE, Place, Restored, Slot, layout_finder, open_frames, restore
from everstep.restore.parts import part_of_layout
from everstep.restore.plan import Line, describe_steps, line_of, line_to
from everstep.restore.reshard import Reader, Reading, plan_atom
from everstep.store.bases import ALONE_BYTES, cursor_of
from everstep.store.pools import read_pools
from everstep.store.runs import Listing, RunPath, read_listing

BATCH_BYTES = 512 << 20
"""So much of the source's state (or one atom of each rank that is read at once, if that is more) is in memory at a time
where it must be cut."""
MOST_AT_ONCE = 4
"""So many portions are read side by side: more would each be small."""


@dataclass
class Era:
    """Steps that were written under one layout: a line of each rank."""

    lines: list[Line]
    high: int | None = None
    """Later steps belong to the era after it."""

    @property
    def newest(self) -> GenerationDocument:
        return self.lines[0].newest

    @property
    def world_size(self) -> int:
        return len(self.lines)

    def steps(self) -> list[int]:
        """Those that every rank has."""
        common = set.intersection(*(set(line.steps()) for line in self.lines))
        return sorted(n for n in common if self.high is None or n <= self.high)

    def needs_memory(self, step: int) -> bool:
        """Whether what this step is made of is on this host's disk only in part: see Line.needs_memory."""
        return any(line.needs_memory(line.plans(step)[0]) for line in self.lines)

    def is_in_pool(self, step: int) -> bool:
        """Whether a rank has this step in a pool."""
        return any(step in line.bases and line.bases[step][0].in_pool for line in self.lines)

    def latest(self) -> int | None:
        """None if no step has been finished by all. CorruptionError if a rank has lost what it had made durable."""
        for line in self.lines:
            if self.high is None:
                try:
                    line.latest()
                except NothingToRestoreError:
                    return None
        steps = self.steps()
        newest = steps[-1] if steps else None
        if self.high is not None and newest != self.high:
            for line in self.lines:
                if line.newest.log == "disk" and self.high not in line.steps():  # the era after it began there
                    raise line.lost(self.high)
        return newest


@dataclass
class Joint:
    """All eras of a line of steps, newest first."""

    listing: Listing
    eras: list[Era]

    @property
    def is_simple(self) -> bool:
        """Written by one process from the beginning."""
        return len(self.eras) == 1 and self.eras[0].world_size == 1

    def steps(self) -> list[int]:
        return sorted({n for era in self.eras for n in era.steps()})

    def latest(self) -> int:
        for era in self.eras:
            found = era.latest()
            if found is not None:
                return found
        self.eras[0].lines[0].latest()  # says why, if one process wrote it
        raise NothingToRestoreError(
            f"{self.listing.path.path} holds no restorable step yet: no step was finished by all ranks"
        )

    def find(self, step: int) -> Era:
        """The era that has this step. The errors of Line.plans if none has."""
        for era in self.eras:
            if step in era.steps():
                return era
        for era in self.eras:
            for line in era.lines:
                if era.high is None or step <= era.high:
                    line.plans(step)  # raises, if it is a rank's fault
        raise StepNotFoundError(
            f"step {step} cannot be restored from {self.listing.path.path}. Restorable steps: "
            f"{describe_steps(self.steps()) or 'none'}"
        )


def joint_of(path: RunPath, *, timeline: int | None = None) -> Joint:
    """The newest line of steps of a run, or that of one timeline, whoever wrote it."""
    listing = read_listing(path.part(0))
    first = line_of(listing, timeline=timeline)
    eras = [_era(path, first, None)]
    while True:
        line = eras[-1].lines[0]
        root = listing.timelines[line.spans[-1].timeline].document
        if not root.own_bases or root.parent_generation is None:
            return Joint(listing, eras)
        eras.append(_era(path, line_to(listing, root.parent_generation), root.fork_step))


def _era(path: RunPath, first: Line, high: int | None) -> Era:
    lines = [first]
    for rank in range(1, first.newest.world_size):
        lines.append(line_to(read_listing(path.part(rank)), first.newest.generation))
    return Era(lines, high)


def still_has(line: Line, step: int) -> bool:
    """Whether a base is still there; a slot of a pool that is being written may have been overwritten meanwhile."""
    manifest, folder = line.bases[step]
    if not manifest.in_pool:
        return True
    listing = line.listing
    slots, _ = read_pools(folder, listing.run.run, listing.path.rank)
    return any((m.generation, m.step) == (manifest.generation, step) for m in slots)


def set_back(path: RunPath, era: Era, step: int, error: CorruptionError) -> bool:
    """Whether what is damaged is a slot of a pool: it does not count from now on, on any rank, and a warning says so."""
    if not era.is_in_pool(step) or not error.in_base or error.step != step:
        return False
    path.bad_slots.update((line.bases[step][0].generation, step) for line in era.lines if step in line.bases)
    warnings.warn(
        f"{path.path}: the newest state in the pool, step {step}, is not used: {error}. The one before it is tried",
        SetBackWarning,
        stacklevel=4,
    )
    return True


def warn_if_set_back(path: RunPath, era: Era, step: int) -> None:
    """Say what of a run without a log is damaged or gone, and may have held newer steps than this, its newest."""
    said = []
    for line in era.lines:
        found = line.bases.get(step)
        if line.newest.log != "pool" or found is None:
            continue
        said += [text for generation, text in line.listing.pool_problems if generation >= found[0].generation]
        if found[0].in_pool:
            said += line.damaged(step, era.high)
        else:
            said += line.listing.timelines[line.newest.timeline].problems
    newest = [max(n for n in line.steps() if era.high is None or n <= era.high) for line in era.lines]
    if era.newest.log == "pool" and min(newest) > step:
        each = ", ".join(f"step {n} on rank {rank}" for rank, n in enumerate(newest))
        said.append(f"every rank has stored newer states, and none that all have: the last are {each}")
    if said:
        warnings.warn(
            f"{path.path}: step {step} is the newest that can be restored, and there may have been newer ones: "
            f"{'; '.join(said)}",
            SetBackWarning,
            stacklevel=4,
        )


# -- what a step holds ------------------------------------------------------------------------------------------------


def layout_at(line: Line, step: int) -> Layout:
    """The layout that a rank had at this step."""
    plan = line.plans(step)[0]
    frames, readers = open_frames(line, plan)
    try:
        last = [op.layout for frame in frames for op in frame.ops if isinstance(op, SetLayout)]
    finally:
        for reader in readers:
            reader.close()
    return layout_finder(line)(last[-1]) if last else plan.base.layout


@dataclass
class Source:
    """One step of an era: the ranks' layouts at it, and all atoms in their global shapes."""

    reads_at_once: ClassVar[bool] = True
    """Whether parts may be read by several threads."""
    era: Era
    step: int
    layouts: list[Layout] = field(default_factory=list)
    """Of the ranks that wrote it."""
    atoms: dict[int, Atom] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layouts = self.read_layouts()
        found = {atom.uid: atom for layout in reversed(self.layouts) for atom in layout.atoms}
        order = _merged([layout.order or tuple(a.uid for a in layout.atoms) for layout in self.layouts])
        alone = self.world_size == 1
        self.atoms = {uid: _as_whole(found[uid], keep_strides=alone) for uid in order if uid in found}

    @property
    def world_size(self) -> int:
        return len(self.layouts)

    def read_layouts(self) -> list[Layout]:
        return [layout_at(line, self.step) for line in self.era.lines]

    def part(
        self, rank: int, only: Mapping[int, Ranges] | None, live: Live | None, *, flat: Set[int] = frozenset(),
        num_workers: int | None = None, place: Place | None = None,
    ) -> Restored:  # fmt: skip
        """What one rank had; all but `rank` as for restore()."""
        line = self.era.lines[rank]
        return restore(line, self.step, live=live, only=only, flat=flat, num_workers=num_workers, place=place)

    def is_fine(self, rank: int) -> bool | None:
        """Whether a rank's part is read in fine pieces; None: not in pieces at all."""
        return any(t.fine for t in self.era.lines[rank].plans(self.step)[0].base.tensors)

    def cursor(self, rank: int) -> bytes:
        """The encoded cursor that a rank had."""
        line = self.era.lines[rank]
        plan = line.plans(self.step)[0]
        if not plan.frames:
            return cursor_of(plan.base)
        (frame,), readers = open_frames(line, replace(plan, frames=plan.frames[-1:]))
        try:
            return frame.cursor()
        finally:
            for reader in readers:
                reader.close()

    @property
    def layout(self) -> Layout:
        """As one process would have it."""
        return Layout(tuple(self.atoms.values()), self.layouts[0].optimizers, self.layouts[0].models)

    def order_of(self, optimizer: str) -> list[int]:
        """Parameters of an optimizer, as far as ranks have told how they are ordered."""
        return _merged([
            [uid for group in groups for uid in group]
            for layout in self.layouts
            for name, groups in layout.groups
            if name == optimizer
        ])  # fmt: skip


def _as_whole(atom: Atom, *, keep_strides: bool) -> Atom:
    if not atom.boxes and keep_strides:
        return atom
    placement = "replicated" if atom.placement == "sharded" else atom.placement
    return structs.replace(atom, boxes=(), at=(), held=(), placement=placement, strides=None)


def fetch(
    source: Source, wanted: Mapping[int, Atom], *, rank: int | None = None, world_size: int = 1, live: Live | None = None,
    stateful: Set[int] | None = None,
) -> Restored:  # fmt: skip
    """S(step) with the shares that `wanted` are of the run's atoms, and what optimizers know of them.

    `rank`, of `world_size`: whom it is for, which decides whose cursor it gets and what of that which ranks have each for
    themselves; None: somebody outside. What cannot be had (rank-local, and not of this rank) is not in the state.
    `stateful`: the parameters whose optimizer state is wanted (None: all).
    """
    shares = {atom.uid: atom.share for atom in source.layouts[0].atoms}
    if source.world_size == 1 and {uid: atom.share for uid, atom in wanted.items()} == shares:
        return source.part(0, None, live)
    joiner = _Joiner(source, wanted, Reader(rank, world_size), stateful)
    near = 0 if rank is None else rank % source.world_size
    proven, fingerprint = True, {}
    unproven: list[str] = []
    whole: list[Set[int]] = []

    def read(r: int, batch: Set[int], num_workers: int | None = None) -> Restored:
        only = {uid: joiner.ranges(uid, r) for uid in batch}
        flat = {uid for uid in batch if joiner.is_contiguous(uid, r)}
        return source.part(r, only, live, flat=flat, num_workers=num_workers, place=partial(joiner.place, r))

    for r, part in joiner.parts(near, read):
        joiner.add(r, part.state)
        proven = proven and part.proven
        fingerprint = part.fingerprint
        unproven += part.unproven
        whole.append(part.whole_steps)
        if r == near:
            joiner.state.cursor = part.state.cursor
        del part  # before the next one is restored
    joiner.state.cursor = joiner.state.cursor or source.cursor(near)
    return Restored(joiner.finish(), None, proven, fingerprint, unproven, frozenset.intersection(*map(frozenset, whole)))


class _Joiner:
    """Puts parts of states together into the shares that are wanted."""

    def __init__(
        self, source: Source, wanted: Mapping[int, Atom], reader: Reader, stateful: Set[int] | None
    ) -> None:
        self._source = source
        self._stateful = stateful
        self._held: dict[int, dict[int, Share]] = {}
        """By atom and rank."""
        for r, layout in enumerate(source.layouts):
            for atom in layout.atoms:
                self._held.setdefault(atom.uid, {})[r] = atom.share
        known = {uid: atom for uid, atom in wanted.items() if uid in source.atoms}
        own = {} if reader.rank is None else source.layouts[reader.rank % source.world_size].by_uid()
        self._readings: dict[int, Reading] = {}
        for uid, atom in known.items():
            share = _share_of(atom, source.atoms[uid], own.get(uid))
            if share is not None:
                self._readings[uid] = plan_atom(
                    share, self._held[uid], source.world_size, source.atoms[uid].placement, reader
                )
        lacking = [source.atoms[uid].label() for uid, reading in self._readings.items() if reading.missing]
        if lacking:
            raise CorruptionError(
                f"step {source.step}: no rank has stored all of {', '.join(lacking[:5])}: a part of it is missing"
            )
        unread = {uid for uid, reading in self._readings.items() if not reading.cuts}
        self.state = State(source.step, part_of_layout(source.layout, known.keys() - unread), {}, {})
        self._known_spans: dict[tuple[int, int], Ranges] = {}
        self._tight: dict[int, bool] = {}
        """By rank."""
        self._windows: Mapping[int, Window] = {}
        """Of the part at hand."""
        self._keeps = False
        """Whether that part's memory is taken over."""
        self._at_once = self._num_at_once()
        """So many portions are in memory at a time."""
        self._rooms = (NewMemory(), NewMemory())
        """For parameters and buffers, and for what optimizers have: who keeps only the ones does not hold the others."""
        self._lock = threading.Lock()
        self._joined: dict[tuple[int, Slot], torch.Tensor] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Of the part at hand: where to, and what."""
        self._givers: dict[tuple[str, int, str], set[int]] = {}
        """Whose parts of optimizer state have been joined: by optimizer, parameter and key."""

    def parts(self, first: int, read: Callable[..., Restored]) -> Iterator[tuple[int, Restored]]:
        """Ranks, the `first` one first, and what is needed of each, in portions where memory is not taken over.

        Several are read side by side. What is averaged is read of all its ranks one after the other, in portions that are
        settled before the next.
        """
        portions = [] if self.reads_any else [(first, set[int]())]
        for r in sorted(range(self._source.world_size), key=lambda r: (r != first, r)):
            uids = [uid for uid, reading in self._readings.items() if r in reading.cuts and not reading.is_mean]
            portions += ((r, batch) for batch in ([set(uids)] if uids and self._is_tight(r) else self._portions(uids)))
        yield from self._side_by_side(portions, read)
        for batch in self._portions(uid for uid, reading in self._readings.items() if reading.is_mean):
            for r in range(self._source.world_size):
                of_rank = {uid for uid in batch if r in self._readings[uid].cuts}
                if of_rank:
                    yield r, read(r, of_rank)
            self._settle(batch)

    def _side_by_side(
        self, portions: Sequence[tuple[int, set[int]]], read: Callable[..., Restored]
    ) -> Iterator[tuple[int, Restored]]:
        """In their order, so many at once that each has a core: then none waits for another's beginning and end."""
        num_cores, at_once = os.cpu_count() or 1, min(self._at_once, len(portions))
        if at_once <= 1:
            yield from ((r, read(r, batch)) for r, batch in portions)
            return
        num_threads = torch.get_num_threads()
        under_way: deque[tuple[int, Future[Restored]]] = deque()
        try:
            with ThreadPoolExecutor(at_once, "everstep-part") as pool:
                for i, (r, batch) in enumerate(portions):
                    under_way.append((r, pool.submit(read, r, batch, max(1, num_cores // at_once))))
                    while len(under_way) == at_once or (under_way and i + 1 == len(portions)):
                        r, found = under_way.popleft()
                        yield r, found.result()
        finally:
            torch.set_num_threads(num_threads)  # threads that replay set it, for those that come after them too

    def _num_at_once(self) -> int:
        """As many as ranks are read and cores are there; one where little is wanted, or where replaying sets threads."""
        ranks = {r for reading in self._readings.values() if not reading.is_mean for r in reading.cuts}
        atoms = self._source.atoms
        num_bytes = sum(prod(r.size) * dtype_named(atoms[uid].dtype).itemsize for uid, r in self._readings.items())
        specs = [spec for layout in self._source.layouts for spec in layout.optimizers]
        if num_bytes <= ALONE_BYTES or not self._source.reads_at_once or any(s.cls not in ELEMENTWISE for s in specs):
            return 1
        return max(1, min(len(ranks), os.cpu_count() or 1, MOST_AT_ONCE))

    @property
    def reads_any(self) -> bool:
        """Whether there is anything to be read."""
        return any(reading.cuts for reading in self._readings.values())

    def _is_tight(self, rank: int) -> bool:
        """Whether hardly more of a rank's memory is read than is wanted, and as it lies there: then it is taken over.

        Optimizers that replay whole parameters have all of those in memory.
        """
        if rank not in self._tight:
            fine, specs = self._source.is_fine(rank), self._source.layouts[rank].optimizers
            read = taken = 0
            for uid, reading in self._readings.items():
                if reading.is_mean or rank not in reading.cuts:
                    continue
                numel, itemsize = prod(self._held[uid][rank].size), dtype_named(self._source.atoms[uid].dtype).itemsize
                piece = max(1, numel) if fine is None else piece_elements(numel, fine=fine)
                for first, end in self.ranges(uid, rank):
                    read += (min(-(-end // piece) * piece, numel) - first // piece * piece) * itemsize
                if reading.as_it_is or self._fills(reading, rank):
                    taken += prod(reading.size) * itemsize
            self._tight[rank] = read - taken <= min(taken, BATCH_BYTES) // 4 and all(s.cls in ELEMENTWISE for s in specs)
        return self._tight[rank]

    def _fills(self, reading: Reading, rank: int) -> bool:
        """Whether all that is wanted is one cut of this rank."""
        cuts = reading.cuts[rank]
        return len(reading.cuts) == len(cuts) == 1 and cuts[0].target.numel == prod(reading.size) and not reading.is_mean

    def is_contiguous(self, uid: int, rank: int) -> bool:
        """Whether the cuts of a rank's memory of an atom can be had from flat memory."""
        reading, spans = self._readings[uid], self._spans(uid, rank)
        cuts = zip(spans, reading.cuts[rank], strict=True)
        return bool(spans) and not reading.is_mean and all(end - first == cut.source.numel for (first, end), cut in cuts)

    def _spans(self, uid: int, rank: int) -> Ranges:
        """Of each cut of a rank's memory of an atom the first element and the one after the last."""
        known = self._known_spans.get((uid, rank))
        if known is not None:
            return known
        found = [span(cut.source, self._held[uid][rank].size) for cut in self._readings[uid].cuts[rank]]
        self._known_spans[uid, rank] = found
        return found

    def ranges(self, uid: int, rank: int) -> Ranges:
        """Elements of a rank's memory of an atom that are wanted: of each cut the first to the last.

        All of it where elements are padding, or on several ranks: else it might be that nobody wants those that decide who
        checks a piece (parts.has_lot).
        """
        reading, size = self._readings[uid], self._held[uid][rank].size
        num_held = sum(prod(share.size) for share in self._held[uid].values())
        if reading.as_it_is or num_held != self._source.atoms[uid].numel:
            return [(0, prod(size))]
        return self._spans(uid, rank)

    def _portions(self, uids: Iterable[int]) -> Iterator[set[int]]:
        """So that no more than BATCH_BYTES, or an atom of each rank, is in memory beside what is wanted."""
        uids = list(uids)
        is_cut = any(not self._readings[uid].as_it_is for uid in uids)
        batch: set[int] = set()
        size = 0
        for uid in uids:
            num_bytes = self._beside(uid) if is_cut else 0
            if batch and num_bytes and size + num_bytes > BATCH_BYTES // self._at_once:
                yield batch
                batch, size = set(), 0
            batch.add(uid)
            size += num_bytes
        if batch:
            yield batch

    def _beside(self, uid: int) -> int:
        """Memory that joining this atom takes beside what is wanted: its source with two moments and a gradient; sums."""
        reading = self._readings[uid]
        source = max(prod(self._held[uid][r].size) for r in reading.cuts)
        sums = 8 * prod(reading.size) if reading.is_mean else 0
        return 4 * (source * dtype_named(self._source.atoms[uid].dtype).itemsize + sums)

    def place(self, rank: int, uid: int, slot: Slot, dtype: torch.dtype, first: int, end: int) -> torch.Tensor | None:
        """Where elements [first, end) of a rank's memory lie in what is joined, if just these are wanted and follow each
        other there, where torch would let a tensor begin. Any thread."""
        reading, spans = self._readings[uid], self._spans(uid, rank)
        if self._is_tight(rank) or reading.as_it_is or list(spans) != [(first, end)] or not self.is_contiguous(uid, rank):
            return None
        if slot[0] is not None and self._stateful is not None and uid not in self._stateful:
            return None
        start, stop = span(reading.cuts[rank][0].target, reading.size)
        if stop - start != end - first or start * dtype.itemsize % ALIGNMENT:
            return None
        joint = self._joint(uid, slot, dtype)
        return joint.view(-1)[start:stop] if joint.dtype == dtype else None

    def _joint(self, uid: int, slot: Slot, dtype: torch.dtype) -> torch.Tensor:
        """Where the parts of an atom, or of what an optimizer has of it, are joined."""
        with self._lock:
            found = self._joined.get((uid, slot))
            if found is None:
                room = self._rooms[slot[0] is not None]
                found = self._joined[uid, slot] = room.zeros(self._readings[uid].size, dtype)
            return found

    def add(self, rank: int, part: State) -> None:
        """What one rank had, restored.

        What is wanted as it is, is taken over; not from among what is cut, whose memory it would keep.
        """
        self._windows = part.windows
        self._keeps = self._is_tight(rank) or all(self._readings[uid].as_it_is for uid in part.tensors)
        for uid, tensor in part.tensors.items():
            self.state.tensors[uid] = self._put(uid, self.state.tensors.get(uid), tensor, rank, VALUE)
            if uid in part.carried:  # a rank may have none: zeros there
                self.state.carried[uid] = self._put(uid, self.state.carried.get(uid), part.carried[uid], rank, GRADIENT)
        self.state.lost |= part.lost
        for name, optimizer in part.optimizers.items():
            self._add_optimizer(name, optimizer, part, rank)
        copies, self._copies = self._copies, []
        copy_all(copies, os.cpu_count() or 1)

    def _add_optimizer(self, name: str, theirs: OptimizerState, part: State, rank: int) -> None:
        ours = self.state.optimizers.get(name)
        if ours is None:
            ours = self.state.optimizers[name] = OptimizerState(theirs.spec, list(theirs.hyper), [() for _ in theirs.params])
        for i, (group, hyper) in enumerate(zip(theirs.params, theirs.hyper, strict=True)):
            self._add_group(name, ours, i, group, hyper)
        for uid, values in theirs.state.items():
            if uid == 0:
                ours.state.setdefault(0, values)
            elif self._stateful is not None and uid not in self._stateful:
                continue
            elif self._readings[uid].as_it_is:
                ours.state[uid] = {key: self._taken(value) for key, value in values.items()}
            else:
                ours.state[uid] = self._join_state(uid, name, ours.state.get(uid, {}), values, part.tensors[uid], rank)
                for key in values:
                    self._givers.setdefault((name, uid, key), set()).add(rank)

    def _add_group(self, name: str, ours: OptimizerState, index: int, params: Sequence[int], hyper: Any) -> None:
        """A rank's group: to the one that has its parameters, or stands in its place with the same hyperparameters.

        Ranks may have groups of their own (stages of a pipeline with a learning rate for each layer): then it is one more.
        """
        if not params:
            return
        shared = next((i for i, group in enumerate(ours.params) if not set(group).isdisjoint(params)), None)
        at = index if shared is None else shared
        if at >= len(ours.params) or not same_packed(ours.hyper[at], hyper):
            if shared is not None:
                uid = next(u for u in params if u in ours.params[shared])
                raise MismatchError(
                    f"{self._source.atoms[uid].label()}: at step {self._source.step} ranks had different hyperparameters "
                    f"for it (optimizer {name!r}): only the layout that the run was written with can go on from there"
                )
            at = len(ours.params)
            ours.params.append(())
            ours.hyper.append(hyper)
        ours.params[at] = (*ours.params[at], *(u for u in params if u not in ours.params[at]))

    def _join_state(
        self, uid: int, name: str, before: dict[str, Any], values: dict[str, Any], param: torch.Tensor, rank: int
    ) -> dict[str, Any]:
        out = dict(before)
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == param.shape:
                out[key] = self._put(uid, out.get(key), value, rank, (name, key))
            elif isinstance(value, torch.Tensor) and value.numel() > 1:
                raise MismatchError(
                    f"{self._source.atoms[uid].label()}: its optimizer state {key!r}, {tuple(value.shape)}, "
                    "cannot be cut with it: restore under the layout that the run was written with"
                )
            else:
                if key in out and not _same(out[key], value):
                    raise MismatchError(
                        f"{self._source.atoms[uid].label()}: at step {self._source.step} ranks differ in its optimizer "
                        f"state {key!r} ({out[key]} and {value}): only the layout that the run was written with can go on "
                        "from there"
                    )
                out[key] = self._taken(value)
        return out

    def _put(self, uid: int, into: Any, tensor: torch.Tensor, rank: int, slot: Slot) -> Any:
        """What a tensor of this part becomes, or becomes a part of (`into`, if there has been another)."""
        reading = self._readings[uid]
        if reading.as_it_is:
            return self._taken(tensor)
        if reading.is_mean:
            wide = torch.promote_types(tensor.dtype, torch.float64)
            into = into or _Sum(torch.zeros(reading.size, dtype=wide), tensor.dtype)
            for cut in reading.cuts[rank]:
                into.total[slices(cut.target)] += tensor[slices(cut.source)]
            return into
        if self._keeps and uid in self._windows and self._fills(reading, rank):
            return own_storage(self._sources(uid, tensor, rank)[0].view(reading.size))
        into = self._joint(uid, slot, tensor.dtype)
        for cut, source in zip(reading.cuts[rank], self._sources(uid, tensor, rank), strict=True):
            target = into[slices(cut.target)]
            if target.data_ptr() != source.data_ptr():  # else it was read into its place
                self._copies.append((target, source))
        return into

    def _sources(self, uid: int, tensor: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """What each cut is taken from."""
        cuts, window = self._readings[uid].cuts[rank], self._windows.get(uid)
        if window is None:
            return [tensor[slices(cut.source)] for cut in cuts]
        spans = [(first - window.start, end - window.start) for first, end in self._spans(uid, rank)]
        return [tensor[first:end].view(cut.source.size) for (first, end), cut in zip(spans, cuts, strict=True)]

    def _taken(self, value: Any) -> Any:
        """As it is; a copy if there is more in its memory that is not wanted."""
        return value.clone() if not self._keeps and isinstance(value, torch.Tensor) else value

    def _settle(self, uids: Iterable[int]) -> None:
        """Sums that are complete become means."""
        for uid in uids:
            reading = self._readings[uid]
            count = torch.zeros(reading.size, dtype=torch.float64)
            for cut in (cut for parts in reading.cuts.values() for cut in parts):
                count[slices(cut.target)] += 1
            count.clamp_(min=1)  # padding
            for values in (self.state.tensors, self.state.carried):
                if uid in values:
                    values[uid] = _mean(values[uid], count)
            for optimizer in self.state.optimizers.values():
                if uid in optimizer.state:
                    optimizer.state[uid] = {k: _mean(v, count) for k, v in optimizer.state[uid].items()}

    def _check_givers(self) -> None:
        """MismatchError if some ranks had no optimizer state yet for their part of a parameter, and others had."""
        for (name, uid, key), ranks in self._givers.items():
            without = sorted(r for r, cuts in self._readings[uid].cuts.items() if cuts and r not in ranks)
            if without:
                raise MismatchError(
                    f"{self._source.atoms[uid].label()}: at step {self._source.step} rank {without[0]} had no {key!r} for "
                    f"its part of it (optimizer {name!r}), and others had: only the layout that the run was written with "
                    "can go on from there"
                )

    def finish(self) -> State:
        self._check_givers()
        for name, optimizer in self.state.optimizers.items():
            at = {uid: n for n, uid in enumerate(self._source.order_of(name))}
            optimizer.params = [tuple(sorted(group, key=lambda u: at.get(u, len(at)))) for group in optimizer.params]
        return self.state


@dataclass
class _Sum:
    """Of what several ranks had."""

    total: torch.Tensor
    dtype: torch.dtype


def _mean(value: Any, count: torch.Tensor) -> Any:
    if not isinstance(value, _Sum):
        return value
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return (value.total / count).round().to(value.dtype)
    return (value.total / count).to(value.dtype)


def _share_of(wanted: Atom, stored: Atom, own: Atom | None) -> Share | None:
    """None where shapes differ, which is for check_fits to tell. A buffer of another shape is wanted as it was.

    `own`: what the rank had that the reader goes on for; shapes of buffers may differ from rank to rank.
    """
    if own is not None and own.role == "buffer" and not own.boxes and not wanted.boxes:
        stored = own
    if wanted.shape == stored.shape or stored.placement == "rank-local":
        return wanted.share
    return filled(whole(stored.shape)) if wanted.role == "buffer" and not wanted.boxes else None


def order_like(state: State, live: Inventory) -> None:
    """Parameters of each group in the order in which the live optimizer has them."""
    for name, optimizer in state.optimizers.items():
        groups = live.groups.get(name, [])
        if [sorted(g) for g in groups] == [sorted(g) for g in optimizer.params]:
            optimizer.params = [tuple(g) for g in groups]


def _merged(orders: Sequence[Sequence[int]]) -> list[int]:
    """All uids: in the order of the first, then what others have beside it."""
    return list(dict.fromkeys(uid for order in orders for uid in order))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    return bool(a == b) or (a != a and b != b)


def is_newest(line: Line | Joint, step: int) -> bool:
    """False also when newer steps were lost: going on from here is a fork."""
    try:
        return step == line.latest()
    except CorruptionError:
        return False


def latest_of(line: Line | Joint) -> int:
    """The newest step in files; damage there does not matter where a shadow has the state."""
    try:
        return line.latest()
    except (CorruptionError, NothingToRestoreError):
        return -1
