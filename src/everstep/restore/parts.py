"""A base and frames as if there were only some of their atoms: what a restore reads when it does not need all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import structs

from everstep.atoms import PIECE_ELEMENTS, Layout
from everstep.fold import Ranges, State
from everstep.frame import Carry, Footer, Op, SetGrad, SetGroups, SetState, SetTensor, TensorRef, Update, Wanted
from everstep.memory import Scratch
from everstep.store.segments import FrameEntry, StoredFrame

BLOCK_ELEMENTS = 64


def part_of_layout(layout: Layout, uids: Set[int]) -> Layout:
    return structs.replace(layout, atoms=tuple(a for a in layout.atoms if a.uid in uids))


def part_finder(find: Callable[[str], Layout], uids: Set[int]) -> Callable[[str], Layout]:
    return lambda layout: part_of_layout(find(layout), uids)


def keep(state: State, uids: Set[int]) -> None:
    """Leave only these in a state, with what optimizers know of them."""
    state.layout = part_of_layout(state.layout, uids)
    state.tensors = {u: t for u, t in state.tensors.items() if u in uids}
    state.carried = {u: t for u, t in state.carried.items() if u in uids}
    state.lost &= uids
    for optimizer in state.optimizers.values():
        optimizer.params = [tuple(u for u in group if u in uids) for group in optimizer.params]
        optimizer.state = {u: v for u, v in optimizer.state.items() if u in uids or u == 0}


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a state, or in a part of one."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, State):
        yield from tensors_of([value.tensors, value.carried, [o.state for o in value.optimizers.values()]])
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_of(each)


@dataclass
class PartFrame:
    """A stored frame of which only some atoms are told (a FrameData)."""

    frame: StoredFrame
    uids: Set[int]

    def __post_init__(self) -> None:
        self.step = self.frame.step
        self.ops: tuple[Op, ...] = tuple(op for whole in self.frame.ops for op in part_of_op(whole, self.uids))

    @property
    def entry(self) -> FrameEntry:
        return self.frame.entry

    @property
    def footer(self) -> Footer:
        return self.frame.footer

    def cursor(self) -> bytes:
        return self.frame.cursor()

    def read(
        self, wanted: Sequence[Wanted], scratch: Scratch | None = None, *, sparse: bool = False
    ) -> list[torch.Tensor]:
        return self.frame.read(wanted, scratch, sparse=sparse)

    def begin(
        self, wanted: Sequence[Wanted], scratch: Scratch, *, sparse: bool = False
    ) -> Callable[[], list[torch.Tensor]]:
        return self.frame.begin(wanted, scratch, sparse=sparse)

    def piece_elements(self, ref: TensorRef) -> int:
        return self.frame.piece_elements(ref)


def blocks(ranges: Ranges, numel: int, pieces: Set[int] = frozenset(), size: int = PIECE_ELEMENTS) -> Ranges:
    """What of a parameter of `numel` elements is replayed so that those in `ranges` are right: in order, each once.

    Cuts are at multiples of 64, where every bit stays as it is in the whole. Of `pieces` that have any of it, all.
    Something in any case: optimizers count their steps along with it.
    """
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges) or [(0, min(1, numel))]:
        start, stop = first // BLOCK_ELEMENTS * BLOCK_ELEMENTS, -(-end // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
        if start // size in pieces:
            start = start // size * size
        if (stop - 1) // size in pieces:
            stop = -(-stop // size) * size
        if found and start <= found[-1][1]:
            start, stop = found[-1][0], max(found.pop()[1], stop)
        found.append((start, min(stop, numel)))
    return found


def has_piece(ranges: Ranges, piece: int, numel: int, size: int = PIECE_ELEMENTS) -> bool:
    """Whether all of this piece is in the ranges."""
    first, end = piece * size, min((piece + 1) * size, numel)
    return any(start <= first and end <= stop for start, stop in ranges)


def has_lot(ranges: Ranges, uid: int, piece: int, numel: int, size: int = PIECE_ELEMENTS) -> bool:
    """Whether the one element that decides who checks this piece is in the ranges."""
    first, end = piece * size, min((piece + 1) * size, numel)
    lot = first + (uid + piece) % max(1, end - first)
    return any(start <= lot < stop for start, stop in ranges)


def part_of_op(op: Op, uids: Set[int]) -> list[Op]:
    """What an operation does to these atoms: itself, less of it, or nothing."""
    if isinstance(op, Update):
        return [structs.replace(op, grads=tuple(g for g in op.grads if g.uid in uids))]
    if isinstance(op, SetGroups):
        return [structs.replace(op, params=tuple(tuple(u for u in group if u in uids) for group in op.params))]
    if isinstance(op, Carry):
        kept = tuple(u for u in op.uids if u in uids)
        return [structs.replace(op, uids=kept)] if kept else []
    if isinstance(op, SetState):
        return [op] if op.uid in uids or op.uid == 0 else []
    if isinstance(op, (SetTensor, SetGrad)):
        return [op] if op.uid in uids else []
    return [op]
