"""Tiles taken through all frames by several workers, with reads ahead of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from everstep import tree
from everstep.fold.apply import run_update, sparse_tensor
from everstep.fold.cut import Tile, TilePlan
from everstep.fold.state import State
from everstep.frame import FrameData, Op, SetTensor, TensorRef, Update
from everstep.memory import Scratch, with_strides

READ_AHEAD = 6
"""Reads that a worker has under way."""


class _Source:
    """Where a unit gets the tensors of an event from; asked in order."""

    def get(self, event: int, frame: int, wanted: list[tuple[TensorRef, int, int]]) -> list[torch.Tensor]:
        raise NotImplementedError


class Direct(_Source):
    def __init__(self, frames: Sequence[FrameData]) -> None:
        self._frames = frames

    def get(self, event: int, frame: int, wanted: list[tuple[TensorRef, int, int]]) -> list[torch.Tensor]:
        return self._frames[frame].read(wanted)


class _Readers:
    """A few threads that read for all workers."""

    def __init__(self, num_threads: int) -> None:
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"everstep-read-{i}") for i in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._todo.put(work)

    def close(self) -> None:
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            work = self._todo.get()
            if work is None:
                return
            work()


class _Read:
    """One request on its way."""

    __slots__ = ("_done", "error", "parts")

    def __init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()
        self.parts: list[torch.Tensor] = []
        self.error: BaseException | None = None

    def run(self, frame: FrameData, wanted: list[tuple[TensorRef, int, int]], scratch: Scratch) -> None:
        try:
            self.parts = frame.read(wanted, scratch)
        except BaseException as e:
            self.error = e
        finally:
            self._done.release()

    def result(self) -> list[torch.Tensor]:
        self._done.acquire()
        if self.error is not None:
            raise self.error
        return self.parts


class _Ahead(_Source):
    """Reads a few events ahead in other threads, past the end of one unit into the next."""

    def __init__(self, units: deque[Unit], plan: TilePlan, frames: Sequence[FrameData], readers: _Readers) -> None:
        self._units = units
        self._plan = plan
        self._frames = frames
        self._readers = readers
        self._taken: deque[Unit] = deque()
        self._todo: Iterator[tuple[int, list[tuple[TensorRef, int, int]]]] = iter(())
        self._waiting: deque[_Read] = deque()
        # A read's memory is used again when the read after the next has been handed out: nobody looks at it by then.
        self._ring: deque[Scratch] = deque(Scratch() for _ in range(READ_AHEAD + 2))
        for _ in range(READ_AHEAD):
            self._issue()

    def next_unit(self) -> Unit | None:
        """The next unit to run; its first reads may already be under way."""
        if not self._taken:
            self._take()
        return self._taken.popleft() if self._taken else None

    def _take(self) -> bool:
        try:
            unit = self._units.popleft()
        except IndexError:
            return False
        self._taken.append(unit)
        self._todo = unit.requests(self._plan)
        return True

    def _issue(self) -> None:
        request = next(self._todo, None)
        while request is None:
            if not self._take():
                return
            request = next(self._todo, None)
        read, scratch = _Read(), self._ring.popleft()
        self._ring.append(scratch)
        scratch.reset()
        self._waiting.append(read)
        self._readers.submit(partial(read.run, self._frames[request[0]], request[1], scratch))

    def get(self, event: int, frame: int, wanted: list[tuple[TensorRef, int, int]]) -> list[torch.Tensor]:
        result = self._waiting.popleft().result()
        self._issue()
        return result


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

    def requests(self, plan: TilePlan) -> Iterator[tuple[int, list[tuple[TensorRef, int, int]]]]:
        """(frame, what to read) of each event that reads anything, in order."""
        for event, (frame, op) in enumerate(plan.events):
            wanted = self._wanted(plan, event, op)
            if wanted:
                yield frame, wanted

    def _wanted(self, plan: TilePlan, event: int, op: Op) -> list[tuple[TensorRef, int, int]]:
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

    def run(self, plan: TilePlan, source: _Source) -> None:
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
                    (t for t in self.tiles if t.uid == op.uid), source.get(event, frame, wanted), strict=True
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
            tensor = self._state.tensors[tile.uid].detach()
            p = tensor if tile.whole else tensor.view(-1)[tile.start : tile.stop]
            views: dict[str, Any] = {}
            old = optimizer_state.state.get(tile.uid)
            if old is not None:
                for key, value in old.items():
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

    def _update(self, plan: TilePlan, event: int, frame: int, op: Update, source: _Source) -> None:
        assert self._optimizer is not None
        grads = plan.grads[event]
        wanted = self._wanted(plan, event, op)
        parts = iter(source.get(event, frame, wanted) if wanted else ())
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
    if not units:
        return
    todo = deque(units)
    failures: list[BaseException] = []
    lock = threading.Lock()
    done = 0

    def work() -> None:
        nonlocal done
        torch.set_num_threads(1)
        try:
            source = _Ahead(todo, plan, frames, readers)
            while not failures:
                unit = source.next_unit()
                if unit is None:
                    return
                unit.run(plan, source)
                with lock:
                    done += 1
                    if progress is not None:
                        progress(done, len(units))
        except BaseException as e:
            failures.append(e)

    before = torch.get_num_threads()
    readers = _Readers(num_workers + 1)
    workers = [threading.Thread(target=work, name=f"everstep-fold-{i}") for i in range(min(num_workers, len(units)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    readers.close()
    torch.set_num_threads(before)
    if failures:
        raise failures[0]
