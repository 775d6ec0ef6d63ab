"""A run that many ranks wrote, as one: which steps all of them have, and their parts cut and joined into whole tensors.

Each rank's log and bases are a line of their own (plan.py). Frames are replayed on the boxes that the ranks had, so that
every bit is as it was; the results are then cut and joined into the boxes that are wanted, whatever the layout of those.

A timeline has one layout. Where a run went on under another, a timeline begins that stands on bases of its own: an *era*.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import structs

from everstep.atoms import Atom, Box, Layout, inside, overlap
from everstep.errors import CorruptionError, MismatchError, NothingToRestoreError, StepNotFoundError
from everstep.fold import Live, OptimizerState, State
from everstep.format.documents import GenerationDocument
from everstep.frame import SetLayout
from everstep.memory import same_bits
from everstep.naming import Inventory
from everstep.restore.apply import same_packed
from everstep.restore.execute import Restored, layout_finder, open_frames, restore
from everstep.restore.parts import part_of_layout
from everstep.restore.plan import Line, describe_steps, line_of, line_to
from everstep.store.runs import Listing, RunPath, read_listing

BATCH_BYTES = 256 << 20
"""So much of the source's state is in memory at a time where it must be cut."""


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

    def latest(self) -> int | None:
        """None if no step has been finished by all. CorruptionError if a rank has lost what it had made durable."""
        for line in self.lines:
            if self.high is None:
                try:
                    line.latest()
                except NothingToRestoreError:
                    return None
        steps = self.steps()
        if not steps:
            return None
        return steps[-1]


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

    era: Era
    step: int
    layouts: list[Layout] = field(default_factory=list)
    atoms: dict[int, Atom] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layouts = [layout_at(line, self.step) for line in self.era.lines]
        found = {atom.uid: atom for layout in self.layouts for atom in layout.atoms}
        order = _merged([layout.order or tuple(a.uid for a in layout.atoms) for layout in self.layouts])
        if self.era.world_size == 1:
            self.atoms = found
            return
        self.atoms = {
            uid: structs.replace(found[uid], boxes=(), placement="replicated", strides=None) for uid in order if uid in found
        }

    @property
    def layout(self) -> Layout:
        """As one process would have it."""
        return Layout(tuple(self.atoms.values()), self.layouts[0].optimizers, self.layouts[0].models)

    def parameter_order(self, optimizer: str) -> list[int]:
        """Parameters of an optimizer's groups, as far as ranks have told how they are ordered."""
        return _merged([
            group for layout in self.layouts for name, groups in layout.groups if name == optimizer for group in groups
        ])  # fmt: skip

    def whole(self) -> dict[int, Box]:
        """Every atom in full."""
        return {uid: atom.box for uid, atom in self.atoms.items()}


def fetch(
    source: Source, wanted: Mapping[int, Box], *, rank: int = 0, live: Live | None = None, stateful: Set[int] | None = None
) -> Restored:
    """S(step) with these boxes of these atoms, and what optimizers know of them; cursor of `rank`.

    `stateful`: of these parameters only (None: of all). Buffers that each rank had for itself come from `rank` too, where
    it had them, else from the lowest that did.
    """
    era = source.era
    if era.world_size == 1 and dict(wanted) == source.whole():
        return restore(era.lines[0], source.step, live=live)
    joiner = _Joiner(source, wanted, stateful)
    proven, fingerprint = True, {}
    order = sorted(range(era.world_size), key=lambda r: (r != rank % era.world_size, r))
    for r in order:
        needed = any(joiner.needs(atom.uid, atom.box) for atom in source.layouts[r].atoms)
        if not needed and r != order[0]:
            continue
        boxes = {atom.uid: atom.box for atom in source.layouts[r].atoms}
        for batch in _batches(joiner, source.layouts[r], boxes):
            part = restore(era.lines[r], source.step, live=live, only=batch)
            joiner.add(part.state, boxes)
            proven = proven and part.proven
            fingerprint = part.fingerprint
            if r == order[0] and not joiner.cursor:
                joiner.cursor = part.state.cursor
    return Restored(joiner.finish(), None, proven, fingerprint)


def _batches(joiner: _Joiner, layout: Layout, boxes: Mapping[int, Box]) -> Iterator[Set[int]]:
    """Atoms of one rank that are needed; in portions where their memory is not kept as it is. At least one, for the rest."""
    needed = [a for a in layout.atoms if joiner.needs(a.uid, boxes[a.uid])]
    batch: set[int] = set()
    size = 0
    for atom in needed:
        if size > BATCH_BYTES:
            yield batch
            batch, size = set(), 0
        batch.add(atom.uid)
        if not joiner.takes_as_it_is(atom.uid, boxes[atom.uid]):
            numel = 1
            for n in boxes[atom.uid].size:
                numel *= n
            size += numel * 16
    yield batch


class _Joiner:
    """Puts parts of states together into the boxes that are wanted."""

    def __init__(self, source: Source, wanted: Mapping[int, Box], stateful: Set[int] | None) -> None:
        self._source = source
        self._stateful = stateful
        self._wanted = {uid: box for uid, box in wanted.items() if uid in source.atoms}
        self._missing = {uid: _count(box) for uid, box in self._wanted.items()}
        self._touched: set[int] = set()
        self.cursor = b""
        self.state = State(source.step, part_of_layout(source.layout, self._wanted.keys()), {}, {})

    def needs(self, uid: int, box: Box) -> bool:
        wanted = self._wanted.get(uid)
        if wanted is None:
            return False
        if not _count(wanted):
            return uid not in self._touched
        return self._missing[uid] > 0 and overlap(wanted, box) is not None

    def takes_as_it_is(self, uid: int, box: Box) -> bool:
        return self._wanted[uid] == box

    def add(self, part: State, boxes: Mapping[int, Box]) -> None:
        """What one rank had, restored."""
        for uid, tensor in part.tensors.items():
            box = boxes[uid]
            if not self.needs(uid, box):
                continue
            self.state.tensors[uid] = self._put(uid, self.state.tensors.get(uid), tensor, box)
            if uid in part.carried:
                self.state.carried[uid] = self._put(uid, self.state.carried.get(uid), part.carried[uid], box)
        self.state.lost |= part.lost & self._wanted.keys()
        for name, optimizer in part.optimizers.items():
            self._add_optimizer(name, optimizer, part, boxes)
        for uid in part.tensors:
            if uid in self._wanted:
                common = overlap(self._wanted[uid], boxes[uid])
                self._missing[uid] -= 0 if common is None else _count(common)
                self._touched.add(uid)

    def _add_optimizer(self, name: str, theirs: OptimizerState, part: State, boxes: Mapping[int, Box]) -> None:
        ours = self.state.optimizers.get(name)
        if ours is None:
            ours = self.state.optimizers[name] = OptimizerState(theirs.spec, list(theirs.hyper), [() for _ in theirs.params])
        for i, (group, hyper) in enumerate(zip(theirs.params, theirs.hyper, strict=True)):
            self._add_group(name, ours, i, [u for u in group if u in self._wanted], hyper)
        for uid, values in theirs.state.items():
            if uid == 0:
                ours.state.setdefault(0, values)
            elif self._stateful is not None and uid not in self._stateful:
                continue
            elif uid in part.tensors and self.needs(uid, boxes[uid]):
                ours.state[uid] = self._join_state(uid, ours.state.get(uid), values, part.tensors[uid], boxes[uid])

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
        self, uid: int, before: dict[str, Any] | None, values: dict[str, Any], param: torch.Tensor, box: Box
    ) -> dict[str, Any]:
        if self.takes_as_it_is(uid, box):
            return values
        out = dict(before or {})
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == param.shape:
                out[key] = self._put(uid, out.get(key), value, box)
            elif isinstance(value, torch.Tensor) and value.numel() > 1:
                raise MismatchError(
                    f"{self._source.atoms[uid].label()}: its optimizer state {key!r}, {tuple(value.shape)}, "
                    "cannot be cut with it: restore under the layout that the run was written with"
                )
            else:
                if key in out and not _same(out[key], value):
                    raise CorruptionError(
                        f"{self._source.atoms[uid].label()}: at step {self._source.step} ranks differ in its optimizer "
                        f"state {key!r} ({out[key]} and {value}), which should be equal on all"
                    )
                out[key] = value
        return out

    def _put(self, uid: int, into: torch.Tensor | None, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        wanted = self._wanted[uid]
        if wanted == box:
            return tensor
        if into is None:
            into = torch.zeros(wanted.size, dtype=tensor.dtype)
        common = overlap(wanted, box)
        if common is not None:
            into[inside(wanted, common)] = tensor[inside(box, common)]
        return into

    def finish(self) -> State:
        lacking = [self._source.atoms[uid].label() for uid, n in self._missing.items() if n > 0]
        if lacking:
            raise CorruptionError(
                f"step {self._source.step}: no rank has stored all of {', '.join(lacking[:5])}: a part of it is missing"
            )
        self.state.cursor = self.cursor
        for name, optimizer in self.state.optimizers.items():
            at = {uid: n for n, uid in enumerate(self._source.parameter_order(name))}
            optimizer.params = [tuple(sorted(params, key=lambda u: at.get(u, len(at)))) for params in optimizer.params]
        return self.state


def order_like(state: State, live: Inventory) -> None:
    """Parameters of each group in the order in which the live optimizer has them."""
    for name, optimizer in state.optimizers.items():
        groups = live.groups.get(name, [])
        if [sorted(g) for g in groups] == [sorted(g) for g in optimizer.params]:
            optimizer.params = [tuple(g) for g in groups]


def _merged(orders: Sequence[Sequence[int]]) -> list[int]:
    """All uids: in the order of the first, then what others have beside it."""
    return list(dict.fromkeys(uid for order in orders for uid in order))


def _count(box: Box) -> int:
    n = 1
    for size in box.size:
        n *= size
    return n


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    return bool(a == b) or (a != a and b != b)
