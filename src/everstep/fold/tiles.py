"""Tiles taken through all frames by several workers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from everstep import tree
from everstep.fold.apply import run_update, sparse_tensor
from everstep.fold.cut import Tile, TilePlan
from everstep.fold.state import State
from everstep.frame import FrameData, Op, SetTensor, Update, Wanted
from everstep.memory import Scratch, with_strides


class Source:
    """Reads for one unit at a time; with `scratch`, into memory that is used again at the next read."""

    def __init__(self, frames: Sequence[FrameData], scratch: Scratch | None = None) -> None:
        self._frames = frames
        self._scratch = scratch

    def get(self, frame: int, wanted: list[Wanted]) -> list[torch.Tensor]:
        if self._scratch is not None:
            self._scratch.reset()
        return self._frames[frame].read(wanted, self._scratch)


class Unit:
    """Some tiles of one optimizer's parameters, and an optimizer that holds just these."""

    def __init__(self, state: State, name: str, tiles: list[Tile], build: Callable[..., Any]) -> None:
        self._state = state
        self.name = name
        self.tiles = tiles
        self._build = build
        self._optimizer: torch.optim.Optimizer | None = None
        self._params: list[torch.Tensor] = []
        self._by_uid = {t.uid: i for i, t in enumerate(tiles)}
        self.num_elements = sum(t.stop - t.start for t in tiles)

    def _wanted(self, plan: TilePlan, event: int, op: Op) -> list[Wanted]:
        if isinstance(op, Update):
            if op.optimizer != self.name or op.skipped:
                return []
            grads = plan.grads[event]
            wanted = []
            for tile in self.tiles:
                gradient = grads.get(tile.uid)
                if gradient is not None and gradient.dense is not None:
                    wanted.append((gradient.dense, tile.start, tile.stop))
            return wanted
        if isinstance(op, SetTensor) and op.uid in self._by_uid:
            return [(op.ref, t.start, t.stop) for t in self.tiles if t.uid == op.uid]
        return []

    def run(self, plan: TilePlan, source: Source) -> None:
        self._start()
        applied: list[dict[str, Any]] | None = None
        for event, (frame, op) in enumerate(plan.events):
            if isinstance(op, Update):
                if op.optimizer != self.name:
                    continue
                hyper = plan.hyper[event]
                if hyper is not applied:
                    self._set_hyper(hyper)
                    applied = hyper
                self._update(plan, event, frame, op, source)
            elif isinstance(op, SetTensor) and op.uid in self._by_uid:
                wanted = self._wanted(plan, event, op)
                for tile, part in zip(
                    (t for t in self.tiles if t.uid == op.uid), source.get(frame, wanted), strict=True
                ):
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
            tensor = self._state.tensors[tile.uid]
            self._state.need(tensor)
            tensor = tensor.detach()
            p = tensor if tile.whole else tensor.view(-1)[tile.start : tile.stop]
            views: dict[str, Any] = {}
            old = optimizer_state.state.get(tile.uid)
            if old is not None:
                for key, value in old.items():
                    self._state.need(value)
                    if tile.whole:
                        views[key] = value
                    elif value.dim() == 0:
                        views[key] = value.clone()
                    else:
                        views[key] = value.view(-1)[tile.start : tile.stop]
                state[p] = dict(views)
            self._views.append(views)
            self._params.append(p)
            groups[tile.group]["params"].append(p)
        self._groups = groups
        self._optimizer = self._build(optimizer_state.spec, groups, state)

    def _set_hyper(self, hyper: list[dict[str, Any]]) -> None:
        for group, values in zip(self._groups, hyper, strict=True):
            params = group["params"]
            group.clear()
            group.update(values)
            group["params"] = params

    def _update(self, plan: TilePlan, event: int, frame: int, op: Update, source: Source) -> None:
        assert self._optimizer is not None
        grads = plan.grads[event]
        wanted = self._wanted(plan, event, op)
        parts = iter(source.get(frame, wanted) if wanted else ())
        for tile, p in zip(self.tiles, self._params, strict=True):
            gradient = grads.get(tile.uid)
            if gradient is None or (gradient.dense is None and gradient.sparse is None):
                p.grad = None
            elif op.skipped:
                p.grad = torch.zeros_like(p)
            elif gradient.dense is not None:
                part = next(parts)
                p.grad = with_strides(part, tuple(p.shape), gradient.dense.strides) if tile.whole else part
            else:
                assert gradient.sparse is not None
                p.grad = sparse_tensor(plan.frames[frame], gradient.sparse)
        run_update(self._optimizer, op)

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
                    whole[key].view(-1)[tile.start : tile.stop].copy_(value)
            for key in [k for k in whole if k not in new]:
                del whole[key]


def run_units(
    units: list[Unit], plan: TilePlan, frames: Sequence[FrameData], num_workers: int,
    progress: Callable[[int, int], None] | None,
) -> None:  # fmt: skip
    """Take every unit through all frames, on `num_workers` cores.

    There are more threads than cores: each reads for itself, and while some wait for the disk others compute.
    """
    todo = deque(sorted(units, key=lambda u: -u.num_elements))  # the last one to finish then has little left to do
    failures: list[BaseException] = []
    lock = threading.Lock()

    def work() -> None:
        torch.set_num_threads(1)
        source = Source(frames, Scratch())
        try:
            while not failures:
                with lock:
                    if not todo:
                        return
                    unit = todo.popleft()
                    if progress is not None:
                        progress(len(units) - len(todo) - 1, len(units))
                unit.run(plan, source)
        except BaseException as e:
            failures.append(e)

    before = torch.get_num_threads()
    num_threads = min(1 if num_workers == 1 else 2 * num_workers + 1, len(units))
    workers = [threading.Thread(target=work, name=f"everstep-fold-{i}") for i in range(num_threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.set_num_threads(before)
    if failures:
        raise failures[0]
    if progress is not None and units:
        progress(len(units), len(units))
