"""Tiles taken through all frames by several workers."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from everstep import tree
from everstep.fold.apply import consumed_from, run_update, sparse_tensor
from everstep.fold.cut import Tile, TilePlan
from everstep.fold.fused import FusedAdam, fused_adam
from everstep.fold.sparse import is_plain_sgd, step_sparse
from everstep.fold.state import State
from everstep.frame import FrameData, Op, SetTensor, Update, Wanted
from everstep.memory import Scratch, with_strides

READ_AHEAD = 4
"""So many frames' parts are on their way while one is applied."""
_Read = tuple[int, list[Wanted], bool]
"""(frame, what of it, whether it may be sparse)"""


class Source:
    """What a row of units will read, in their order; with `ahead`, that many reads are under way before they are asked for.

    What next() returns is overwritten by a later one, unless `fresh`.
    """

    def __init__(self, frames: Sequence[FrameData], reads: Iterator[_Read], *, ahead: int = 0, fresh: bool = False) -> None:
        self._frames = frames
        self._reads = reads
        self._ahead = ahead
        self._pending: deque[Callable[[], list[torch.Tensor]]] = deque()
        self._memory = None if fresh else itertools.cycle([Scratch() for _ in range(ahead + 1)])

    def more(self) -> bool:
        """Whether anything is left to read."""
        while len(self._pending) < max(self._ahead, 1):
            read = next(self._reads, None)
            if read is None:
                break
            self._pending.append(self._begin(*read))
        return bool(self._pending)

    def next(self) -> list[torch.Tensor]:
        """The next of the reads."""
        self.more()
        found = self._pending.popleft()()
        if self._ahead:
            self.more()
        return found

    def _begin(self, frame: int, wanted: list[Wanted], sparse: bool) -> Callable[[], list[torch.Tensor]]:
        if not wanted:
            return list
        if self._ahead:
            return self._frames[frame].begin(wanted, self._scratch() or Scratch(), sparse=sparse)
        return lambda: self._frames[frame].read(wanted, self._scratch(), sparse=sparse)

    def _scratch(self) -> Scratch | None:
        if self._memory is None:
            return None
        scratch = next(self._memory)
        scratch.reset()
        return scratch


class Unit:
    """Some tiles of one optimizer's parameters, and an optimizer that holds just these."""

    def __init__(self, state: State, name: str, tiles: list[Tile], build: Callable[..., Any]) -> None:
        self._state = state
        self.name = name
        self.tiles = tiles
        self._build = build
        self._optimizer: torch.optim.Optimizer | None = None
        self._params: list[torch.Tensor] = []
        self._fused: FusedAdam | None = None
        self._uids = {t.uid for t in tiles}
        self._events: list[tuple[int, int, Op]] | None = None
        self.num_elements = sum(t.stop - t.start for t in tiles)

    def _concerning(self, plan: TilePlan) -> list[tuple[int, int, Op]]:
        """(event, frame, operation) of those that concern this unit."""
        if self._events is None:
            self._events = [
                (event, frame, op)
                for event, (frame, op) in enumerate(plan.events)
                if (isinstance(op, SetTensor) and op.uid in self._uids)
                or (isinstance(op, Update) and op.optimizer == self.name)
            ]
        return self._events

    def reads(self, plan: TilePlan) -> Iterator[_Read]:
        """For each operation that concerns this unit."""
        for event, frame, op in self._concerning(plan):
            if isinstance(op, SetTensor):
                yield frame, [(op.ref, t.start, t.stop) for t in self.tiles if t.uid == op.uid], False
                continue
            assert isinstance(op, Update)
            grads = plan.grads[event]
            wanted = []
            for tile in () if op.skipped else self.tiles:
                gradient = grads.get(tile.uid)
                if gradient is not None and gradient.dense is not None:
                    wanted.append((gradient.dense, tile.start, tile.stop))
            yield frame, wanted, self._may_be_sparse(op, plan.hyper[event])

    def _may_be_sparse(self, op: Update, hyper: list[dict[str, Any]]) -> bool:
        """Whether elements without a gradient stay as they are, in every bit."""
        is_sgd = self._state.optimizers[self.name].spec.cls == "torch.optim.SGD" and not self.tiles[0].whole
        return is_sgd and op.grad_scale is None and all(map(is_plain_sgd, hyper))

    def begin(self) -> None:
        """Ask for the values that run() begins with."""
        for tile in () if self._state.loading is None else self.tiles:
            for tensor in self._tensors(tile):
                self._state.begin(tensor, *_part(tile, tensor))

    def _tensors(self, tile: Tile) -> Iterator[torch.Tensor]:
        yield self._state.tensors[tile.uid]
        for value in self._state.optimizers[self.name].state.get(tile.uid, {}).values():
            if isinstance(value, torch.Tensor):
                yield value

    def _in_memory(self, tile: Tile) -> slice:
        first = self._state.first(tile.uid)
        return slice(tile.start - first, tile.stop - first)

    def run(self, plan: TilePlan, source: Source) -> None:
        """`source` gives what reads() asks for."""
        self._start()
        applied: list[dict[str, Any]] | None = None
        for event, frame, op in self._concerning(plan):
            parts = source.next()
            if isinstance(op, Update):
                hyper = plan.hyper[event]
                if hyper is not applied:
                    self._set_hyper(hyper)
                    applied = hyper
                self._update(plan, event, frame, op, parts)
            elif isinstance(op, SetTensor):
                for tile, part in zip((t for t in self.tiles if t.uid == op.uid), parts, strict=True):
                    target = self._params[self._index(tile)]
                    target.copy_(part.reshape(target.shape))

    def _index(self, tile: Tile) -> int:
        return self.tiles.index(tile)

    def _start(self) -> None:
        optimizer_state = self._state.optimizers[self.name]
        groups = [{**tree.unpack(h), "params": []} for h in optimizer_state.hyper]
        state: dict[torch.Tensor, dict[str, Any]] = {}
        self._views: list[dict[str, Any]] = []
        for tile in self.tiles:
            for tensor in () if self._state.loading is None else self._tensors(tile):
                self._state.need(tensor, *_part(tile, tensor))
            tensor = self._state.tensors[tile.uid].detach()
            here = self._in_memory(tile)
            p = tensor if tile.whole else tensor.view(-1)[here]
            views: dict[str, Any] = {}
            old = optimizer_state.state.get(tile.uid)
            if old is not None:
                for key, value in old.items():
                    if tile.whole:
                        views[key] = value
                    elif value.dim() == 0:
                        views[key] = value.clone()
                    else:
                        views[key] = value.view(-1)[here]
                state[p] = dict(views)
            self._views.append(views)
            self._params.append(p)
            groups[tile.group]["params"].append(p)
        self._groups = groups
        self._optimizer = self._build(optimizer_state.spec, groups, state)
        self._fused = None if self.tiles[0].whole else fused_adam(self._optimizer, self._params)

    def _set_hyper(self, hyper: list[dict[str, Any]]) -> None:
        for group, values in zip(self._groups, hyper, strict=True):
            params = group["params"]
            group.clear()
            group.update(values)
            group["params"] = params

    def _update(self, plan: TilePlan, event: int, frame: int, op: Update, parts: list[torch.Tensor]) -> None:
        assert self._optimizer is not None
        plain = type(op) is Update and not op.skipped and op.grad_scale is None and len(parts) == len(self.tiles)
        if plain and self._fused is not None and self._fused.step(parts):
            return
        grads = plan.grads[event]
        left = iter(parts)
        num_left = len(self.tiles)
        for tile, p in zip(self.tiles, self._params, strict=True):
            gradient = grads.get(tile.uid)
            if gradient is None or (gradient.dense is None and gradient.sparse is None):
                p.grad = None
            elif op.skipped:
                p.grad = torch.zeros_like(p)
            elif gradient.dense is not None:
                part = next(left)
                if part.is_sparse and step_sparse(p, part, gradient, plan.hyper[event][tile.group]):
                    p.grad = None
                    num_left -= 1
                    continue
                part = consumed_from(part.to_dense() if part.is_sparse else part, gradient)
                p.grad = with_strides(part, tuple(p.shape), gradient.dense.strides) if tile.whole else part
            else:
                assert gradient.sparse is not None
                p.grad = sparse_tensor(plan.frames[frame], gradient.sparse)
        if num_left:
            run_update(self._optimizer, op)
        self._fused = None if self.tiles[0].whole else fused_adam(self._optimizer, self._params)

    def join_state(self) -> None:
        """Bring per-tile state back into the whole state."""
        assert self._optimizer is not None
        target = self._state.optimizers[self.name].state
        for tile, p, views in zip(self.tiles, self._params, self._views, strict=True):
            p.grad = None
            if p not in self._optimizer.state:
                continue
            new = self._optimizer.state[p]
            if tile.whole:
                target[tile.uid] = new
                continue
            tensor = self._state.tensors[tile.uid]
            whole = target.setdefault(tile.uid, {})
            for key, value in new.items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    whole[key] = value
                elif value is not views.get(key):
                    if key not in whole:
                        whole[key] = torch.empty(tensor.shape, dtype=value.dtype)
                    whole[key].view(-1)[self._in_memory(tile)].copy_(value)
            for key in [k for k in whole if k not in new]:
                del whole[key]


def _part(tile: Tile, tensor: torch.Tensor) -> tuple[int, int | None]:
    """What of a tensor of the state a tile stands on."""
    return (0, None) if tile.whole or tensor.dim() == 0 else (tile.start, tile.stop)


def run_units(
    units: list[Unit], plan: TilePlan, frames: Sequence[FrameData], num_workers: int, ahead: int,
    progress: Callable[[int, int], None] | None,
) -> None:  # fmt: skip
    """Take every unit through all frames, on `num_workers` cores.

    Each has so many reads `ahead` under way, over the end of a unit into the next.
    """
    todo = deque(sorted(units, key=lambda u: -u.num_elements))  # the last one to finish then has little left to do
    failures: list[BaseException] = []
    lock = threading.Lock()

    def work() -> None:
        torch.set_num_threads(1)
        mine: deque[Unit] = deque()

        def reads() -> Iterator[_Read]:
            while not failures:
                with lock:
                    if not todo:
                        return
                    mine.append(todo.popleft())
                    following = todo[0] if todo else None
                    if progress is not None:
                        progress(len(units) - len(todo) - 1, len(units))
                mine[-1].begin()
                reads = mine[-1].reads(plan)
                yield from itertools.islice(reads, READ_AHEAD)
                if following is not None:
                    following.begin()  # for whoever takes it: these reads come before those of its frames
                yield from reads

        try:
            source = Source(frames, reads(), ahead=ahead)
            while source.more():
                mine.popleft().run(plan, source)
        except BaseException as e:
            failures.append(e)

    before = torch.get_num_threads()
    if num_workers == 1:
        work()
    else:
        workers = [threading.Thread(target=work, name=f"everstep-fold-{i}") for i in range(min(num_workers, len(units)))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    torch.set_num_threads(before)
    if failures:
        raise failures[0]
    if progress is not None and units:
        progress(len(units), len(units))
