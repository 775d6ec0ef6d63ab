"""Which parameters are cut into tiles and which are not, for a row of frames.

Cuts are at multiples of 64 elements: then every bit is the same as in the whole tensor. Not cut are 16-bit parameters in
loop and foreach variants, optimizers that are not element-wise, sparse gradients, odd strides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from everstep import tree
from everstep.atoms import PACK_BELOW_BYTES, PIECE_ELEMENTS
from everstep.fold.apply import assign, set_carried
from everstep.fold.state import OptimizerState, State, optimizer_of
from everstep.frame import Carry, FrameData, Gradient, Op, SetGrad, SetGroups, SetTensor, TensorRef, Update

ELEMENTWISE = frozenset(
    f"torch.optim.{name}"
    for name in (
        "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    )
)  # fmt: skip
UNIT_ELEMENTS = 1 << 19
"""Tiles are taken together up to about this many elements: they follow each other in a frame and are read at once, and what
a step reads and writes of them stays in the cache."""
_TILED_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Tile:
    """Elements [start, stop) of a parameter; `whole` keeps its shape and strides."""

    uid: int
    start: int
    stop: int
    group: int
    whole: bool


class TilePlan:
    """Which parameters are cut and which are not, and the hyperparameters at each update of a row of frames."""

    def __init__(self, state: State, frames: Sequence[FrameData]) -> None:
        self.frames = frames
        self.events: list[tuple[int, Op]] = []
        self.grads: dict[int, dict[int, Gradient]] = {}
        """By event index: the gradients of that update."""
        self.hyper: dict[int, list[dict[str, Any]]] = {}
        """By event index: the unpacked groups that update used."""
        self._last_tensor: dict[int, tuple[int, TensorRef]] = {}
        self._last_carry: dict[int, tuple[int, str, TensorRef | None, Gradient | None]] = {}
        self._read_events(state)
        self._cut(state)

    def _read_events(self, state: State) -> None:
        unpacked = {name: [tree.unpack(h) for h in o.hyper] for name, o in state.optimizers.items()}
        variants: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
        self._not_tileable: set[int] = set()
        self._piece: dict[int, int] = {}
        """By parameter: a tile should not have a part of a record."""
        for index, frame in enumerate(self.frames):
            consumed: dict[int, Gradient] = {}
            for op in frame.ops:
                if isinstance(op, SetGroups):
                    optimizer = optimizer_of(state, op.optimizer)
                    optimizer.hyper = list(op.hyper)
                    unpacked[op.optimizer] = [tree.unpack(h) for h in op.hyper]
                    continue
                event = len(self.events)
                self.events.append((index, op))
                if isinstance(op, Update):
                    optimizer_of(state, op.optimizer)
                    self.hyper[event] = unpacked[op.optimizer]
                    self.grads[event] = {g.uid: g for g in op.grads}
                    for group in unpacked[op.optimizer]:
                        variants[op.optimizer].add((bool(group.get("fused")), _exotic(group)))
                    consumed.update(self.grads[event])
                    for g in op.grads:
                        if g.sparse is not None or (g.dense is not None and g.dense.strides is not None):
                            self._not_tileable.add(g.uid)
                        elif g.dense is not None and g.uid not in self._piece:
                            self._piece[g.uid] = frame.piece_elements(g.dense)
                elif isinstance(op, SetTensor):
                    self._last_tensor[op.uid] = (index, op.ref)
                elif isinstance(op, SetGrad):
                    self._last_carry[op.uid] = (index, "given", op.ref, None)
                elif isinstance(op, Carry):
                    for uid in op.uids:
                        self._last_carry[uid] = (index, op.kind, None, consumed.get(uid))
        self._fused_only = {n for n, v in variants.items() if all(fused and not odd for fused, odd in v)}
        self._exotic = {n for n, v in variants.items() if any(odd for _, odd in v)}

    def _cut(self, state: State) -> None:
        self.whole: dict[str, list[Tile]] = {}
        self.tiled: list[tuple[str, list[Tile]]] = []
        self.in_units: set[int] = set()
        updated = {op.optimizer for _, op in self.events if isinstance(op, Update)}
        for name, optimizer in state.optimizers.items():
            if name not in updated:
                continue
            self.in_units.update(uid for params in optimizer.params for uid in params)
            for tiles in self._tiles(state, name, optimizer):
                self.tiled += [(name, unit) for unit in _units(tiles, UNIT_ELEMENTS)]

    def _tiles(self, state: State, name: str, optimizer: OptimizerState) -> tuple[list[Tile], list[Tile]]:
        """Those in records of their own, and the small ones that share a record; what cannot be cut goes to `whole`."""
        found: tuple[list[Tile], list[Tile]] = ([], [])
        for index, params in enumerate(optimizer.params):
            for uid in state.here(params):
                tensor = state.tensors[uid]
                if not self._tileable(name, optimizer, uid, tensor):
                    self.whole.setdefault(name, []).append(Tile(uid, 0, tensor.numel(), index, True))
                    continue
                tiles = found[tensor.numel() * tensor.element_size() < PACK_BELOW_BYTES]
                piece = self._piece.get(uid, PIECE_ELEMENTS)
                for first, end in state.needed.get(uid, ((0, tensor.numel()),)):
                    starts = [first, *range((first // piece + 1) * piece, end, piece)]
                    for start, stop in zip(starts, [*starts[1:], end], strict=True):
                        tiles.append(Tile(uid, start, stop, index, False))
        return found

    def _tileable(self, name: str, optimizer: OptimizerState, uid: int, tensor: torch.Tensor) -> bool:
        if optimizer.spec.cls not in ELEMENTWISE or name in self._exotic or uid in self._not_tileable:
            return False
        if not tensor.is_contiguous() or tensor.numel() == 0 or tensor.dim() == 0:
            return False
        if tensor.dtype not in _TILED_DTYPES and not (name in self._fused_only and tensor.is_floating_point()):
            return False
        for value in optimizer.state.get(uid, {}).values():
            if not isinstance(value, torch.Tensor) or value.is_sparse:
                return False
            if value.dim() and (value.shape != tensor.shape or not value.is_contiguous()):
                return False
        return True

    def cut(self, uids: Set[int]) -> Set[int]:
        """Those of these atoms that are changed by tiles alone, or not at all."""
        whole = {tile.uid for tiles in self.whole.values() for tile in tiles}
        carried = {uid for uid, (_, kind, _, _) in self._last_carry.items() if kind not in ("none", "lost")}
        return uids - whole - carried - (self._last_tensor.keys() - self.in_units)

    def finish(self, state: State) -> None:
        """Tensors that no update touched: only their last value counts. Then carried gradients."""
        sharing: dict[tuple[int, int], list[tuple[int, TensorRef]]] = defaultdict(list)
        """By frame and record, which small tensors share: it is read once for all of them."""
        for uid, (index, ref) in self._last_tensor.items():
            if uid not in self.in_units:
                sharing[index, ref.first].append((uid, ref))
        for (index, _), found in sharing.items():
            values = self.frames[index].read([(ref, 0, ref.numel) for _, ref in found])
            for (uid, ref), value in zip(found, values, strict=True):
                state.tensors[uid] = assign(state.tensors.get(uid), value, ref)
        for uid, (index, kind, carried, consumed) in self._last_carry.items():
            set_carried(state, self.frames[index], uid, kind, carried, consumed)


def _units(tiles: list[Tile], num_elements: int) -> Iterator[list[Tile]]:
    unit: list[Tile] = []
    size = 0
    for tile in tiles:
        unit.append(tile)
        size += tile.stop - tile.start
        if size >= num_elements:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


def _exotic(group: Mapping[str, Any]) -> bool:
    return bool(group.get("capturable") or group.get("differentiable"))


