"""S(t) = fold(S(t-1), frame(t)): the one place where frames are applied to a state.

Used by followers, by restore, and by the trainer to prove once that its optimizer can be replayed at all.

Frames whose operations are plain updates are replayed *by tiles*: parameters are cut at multiples of 64 elements (then
every bit is the same as in the whole tensor), each worker takes a tile through all frames before the next tile, so that
the tile stays in the cache. What must not be cut is replayed whole, with the thread count of the run that was recorded:
16-bit parameters in loop and foreach variants, optimizers that are not element-wise, sparse gradients, odd strides.
Frames that change the structure (layout, optimizer state set by hand) are applied one by one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from everstep import tree
from everstep.atoms import PIECE_ELEMENTS, Layout, OptimizerSpec
from everstep.errors import CorruptionError, EverstepError, ReplayError
from everstep.frame import (
    Carry,
    FrameData,
    Gradient,
    Op,
    SetGrad,
    SetGroups,
    SetLayout,
    SetState,
    SetTensor,
    SparseRef,
    TensorRef,
    Update,
)
from everstep.memory import Scratch, dtype_of, with_strides

ELEMENTWISE = frozenset(
    f"torch.optim.{name}"
    for name in (
        "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    )
)  # fmt: skip
_TILED_DTYPES = (torch.float32, torch.float64)

_registered: dict[str, type[torch.optim.Optimizer]] = {}


def class_name(cls: type) -> str:
    """`torch.optim.AdamW` for torch's own, `module:Qualname` for others."""
    if getattr(torch.optim, cls.__name__, None) is cls:
        return f"torch.optim.{cls.__name__}"
    return f"{cls.__module__}:{cls.__qualname__}"


def register(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Let this optimizer class be replayed without a live optimizer: by History, the command line and followers.

    Its update must depend on nothing but `param_groups`, `state` and the gradients. Usable as a decorator.
    """
    _registered[class_name(cls)] = cls
    return cls


def find_class(name: str) -> type[torch.optim.Optimizer]:
    """The class a layout names. Nothing is imported because a file says so."""
    if name in _registered:
        return _registered[name]
    if name.startswith("torch.optim.") and name != "torch.optim.LBFGS":
        cls = getattr(torch.optim, name.removeprefix("torch.optim."), None)
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
            return cls
    raise ReplayError(
        f"the optimizer class {name} cannot be built here. Call everstep.register(YourOptimizer) first, or resume with "
        "the live optimizer"
    )


@dataclass
class OptimizerState:
    """One optimizer: its groups and the state of each parameter, by uid."""

    spec: OptimizerSpec
    hyper: list[Any] = field(default_factory=list)
    """tree.pack of each group without its parameters."""
    params: list[tuple[int, ...]] = field(default_factory=list)
    state: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass
class State:
    """S(step): everything but what only the live objects know."""

    step: int
    layout: Layout
    tensors: dict[int, torch.Tensor]
    optimizers: dict[str, OptimizerState]
    carried: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients that the next backward adds to."""
    lost: set[int] = field(default_factory=set)
    """Parameters whose carried gradient could not be stored."""
    cursor: bytes = b""


Live = Mapping[str, torch.optim.Optimizer]
_NOT_COPIED = frozenset(
    ("state", "param_groups", "step", "zero_grad", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
)


class Folder:
    """Folds frames into a state, in place."""

    def __init__(
        self,
        *,
        find_layout: Callable[[str], Layout],
        live: Live | None = None,
        num_threads: int = 1,
        num_workers: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`num_threads` is that of the recorded run (for what must be replayed whole); `num_workers` that of this
        host. `live` optimizers lend their class and attributes where the class cannot be found by name."""
        self._find_layout = find_layout
        self._live = live or {}
        self._num_threads = num_threads
        self._num_workers = num_workers
        self._progress = progress

    def fold(self, state: State, frames: Sequence[FrameData]) -> None:
        """Apply frames in order. On an error the state is undefined."""
        i = 0
        while i < len(frames):
            j = i
            while j < len(frames) and _is_simple(state, frames[j].ops) and not _shares_params(state):
                j += 1
            if j > i:
                self._fold_tiled(state, frames[i:j])
            else:
                j = i + 1
                with _threads(self._num_threads):
                    _Whole(state, self._build, self._find_layout).apply(frames[i])
            state.step = frames[j - 1].step
            i = j

    def _build(
        self, spec: OptimizerSpec, groups: list[dict[str, Any]], state: dict[torch.Tensor, dict[str, Any]]
    ) -> torch.optim.Optimizer:
        live = self._live.get(spec.name)
        if live is not None and class_name(type(live)) != spec.cls:
            live = None
        cls = type(live) if live is not None else find_class(spec.cls)
        optimizer = cls.__new__(cls)
        if live is not None and not spec.cls.startswith("torch.optim."):
            optimizer.__dict__.update({k: v for k, v in live.__dict__.items() if k not in _NOT_COPIED})
        if live is not None:
            defaults = dict(live.defaults)
        else:
            defaults = tree.from_text(spec.defaults) if spec.defaults else {}
        optimizer.__setstate__({"defaults": defaults, "state": defaultdict(dict), "param_groups": groups})
        optimizer.state.update(state)
        return optimizer

    def _fold_tiled(self, state: State, frames: Sequence[FrameData]) -> None:
        """All of `frames` hold only updates, tensors, groups and carried gradients."""
        plan = _Plan(state, frames)
        for name, tiles in plan.whole.items():
            with _threads(self._num_threads):
                unit = _Unit(state, name, tiles, self._build)
                unit.run(plan, _Direct(frames))
                unit.join_state()
        units = [_Unit(state, name, tiles, self._build) for name, tiles in plan.tiled]
        _run_units(units, plan, frames, self._num_workers, self._progress)
        for unit in units:
            unit.join_state()
        plan.finish(state)


def _is_simple(state: State, ops: Sequence[Op]) -> bool:
    """Whether these operations leave the structure alone: no layout, no regrouping, no state set by hand."""
    for op in ops:
        if isinstance(op, SetGroups):
            optimizer = state.optimizers.get(op.optimizer)
            if optimizer is None or [tuple(p) for p in op.params] != [tuple(p) for p in optimizer.params]:
                return False
        elif isinstance(op, (SetLayout, SetState)) or (isinstance(op, SetTensor) and op.uid not in state.tensors):
            return False
    return True


def _param_uids(state: State) -> list[int]:
    return [uid for o in state.optimizers.values() for params in o.params for uid in params]


def _shares_params(state: State) -> bool:
    """Whether one parameter is in two optimizers: then updates of different optimizers must not be reordered."""
    uids = _param_uids(state)
    return len(uids) != len(set(uids))


@contextlib.contextmanager
def _threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before == n:
        yield
        return
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def unhooked_step(optimizer: torch.optim.Optimizer) -> None:
    """optimizer.step() without anybody's hooks."""
    step = type(optimizer).step
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    step(optimizer)


@dataclass(frozen=True)
class _Tile:
    """Elements [start, stop) of a parameter; `whole` keeps its shape and strides."""

    uid: int
    start: int
    stop: int
    group: int
    whole: bool


class _Plan:
    """Which parameters are cut and which are not, and the hyperparameters at each update of a row of frames."""

    def __init__(self, state: State, frames: Sequence[FrameData]) -> None:
        self.frames = frames
        self.events: list[tuple[int, Op]] = []
        self.grads: dict[int, dict[int, Gradient]] = {}
        """By event index: the gradients of that update."""
        self.hyper: dict[int, list[dict[str, Any]]] = {}
        """By event index: the unpacked groups that update used."""
        self._last_tensor: dict[int, tuple[int, TensorRef]] = {}
        self._last_carry: dict[int, tuple[int, str, TensorRef | None]] = {}
        self._consumed: dict[int, tuple[int, Gradient]] = {}
        self._read_events(state)
        self._cut(state)

    def _read_events(self, state: State) -> None:
        unpacked = {name: [tree.unpack(h) for h in o.hyper] for name, o in state.optimizers.items()}
        variants: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
        self._not_tileable: set[int] = set()
        for index, frame in enumerate(self.frames):
            for op in frame.ops:
                if isinstance(op, SetGroups):
                    optimizer = _optimizer(state, op.optimizer)
                    optimizer.hyper = list(op.hyper)
                    unpacked[op.optimizer] = [tree.unpack(h) for h in op.hyper]
                    continue
                event = len(self.events)
                self.events.append((index, op))
                if isinstance(op, Update):
                    _optimizer(state, op.optimizer)
                    self.hyper[event] = unpacked[op.optimizer]
                    self.grads[event] = {g.uid: g for g in op.grads}
                    for group in unpacked[op.optimizer]:
                        variants[op.optimizer].add((bool(group.get("fused")), _exotic(group)))
                    for g in op.grads:
                        self._consumed[g.uid] = (index, g)
                        if g.sparse is not None or (g.dense is not None and g.dense.strides is not None):
                            self._not_tileable.add(g.uid)
                elif isinstance(op, SetTensor):
                    self._last_tensor[op.uid] = (index, op.ref)
                elif isinstance(op, SetGrad):
                    self._last_carry[op.uid] = (index, "given", op.ref)
                elif isinstance(op, Carry):
                    for uid in op.uids:
                        self._last_carry[uid] = (index, op.kind, None)
        self._fused_only = {n for n, v in variants.items() if all(fused and not odd for fused, odd in v)}
        self._exotic = {n for n, v in variants.items() if any(odd for _, odd in v)}

    def _cut(self, state: State) -> None:
        self.whole: dict[str, list[_Tile]] = {}
        self.tiled: list[tuple[str, list[_Tile]]] = []
        self.in_units: set[int] = set()
        updated = {op.optimizer for _, op in self.events if isinstance(op, Update)}
        for name, optimizer in state.optimizers.items():
            if name not in updated:
                continue
            self.in_units.update(uid for params in optimizer.params for uid in params)
            pending: list[_Tile] = []
            size = 0
            for index, params in enumerate(optimizer.params):
                for uid in params:
                    tensor = state.tensors[uid]
                    if not self._tileable(name, optimizer, uid, tensor):
                        self.whole.setdefault(name, []).append(_Tile(uid, 0, tensor.numel(), index, True))
                        continue
                    for start in range(0, tensor.numel(), PIECE_ELEMENTS):
                        stop = min(start + PIECE_ELEMENTS, tensor.numel())
                        if stop - start == PIECE_ELEMENTS:
                            self.tiled.append((name, [_Tile(uid, start, stop, index, False)]))
                            continue
                        pending.append(_Tile(uid, start, stop, index, False))
                        size += stop - start
                        if size >= PIECE_ELEMENTS:
                            self.tiled.append((name, pending))
                            pending, size = [], 0
            if pending:
                self.tiled.append((name, pending))
        # Longest first: the last worker to finish then has little left to do.
        self.tiled.sort(key=lambda unit: -sum(t.stop - t.start for t in unit[1]))

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

    def finish(self, state: State) -> None:
        """Tensors that no update touched: only their last value counts. Then carried gradients."""
        for uid, (index, ref) in self._last_tensor.items():
            if uid not in self.in_units:
                state.tensors[uid] = _assign(state.tensors.get(uid), _whole(self.frames[index], ref), ref)
        for uid, (index, kind, carried) in self._last_carry.items():
            set_carried(state, self.frames[index], uid, kind, carried, self._consumed)


def _optimizer(state: State, name: str) -> OptimizerState:
    try:
        return state.optimizers[name]
    except KeyError:
        raise CorruptionError(f"a frame updates the optimizer {name!r}, which the layout does not have") from None


def _exotic(group: Mapping[str, Any]) -> bool:
    return bool(group.get("capturable") or group.get("differentiable"))


def set_carried(
    state: State, frame: FrameData, uid: int, kind: str, ref: TensorRef | None,
    consumed: Mapping[int, tuple[int, Gradient]] | Mapping[int, Gradient],
) -> None:  # fmt: skip
    """What is left on a parameter at the commit for the next backward to add to."""
    state.lost.discard(uid)
    if kind in ("none", "lost"):
        state.carried.pop(uid, None)
        if kind == "lost":
            state.lost.add(uid)
    elif kind == "zero":
        state.carried[uid] = torch.zeros_like(state.tensors[uid])
    elif kind == "given" and ref is not None:
        state.carried[uid] = with_strides(_whole(frame, ref), ref.shape, ref.strides)
    elif kind == "consumed" and uid in consumed:
        found = consumed[uid]
        gradient = found[1] if not isinstance(found, Gradient) else found
        if gradient.dense is None:
            raise CorruptionError(f"step {frame.step} carries a gradient that it does not hold")
        state.carried[uid] = with_strides(
            _whole(frame, gradient.dense), gradient.dense.shape, gradient.dense.strides
        )
    else:
        raise CorruptionError(f"step {frame.step} carries a gradient of unknown kind {kind!r}")


def _whole(frame: FrameData, ref: TensorRef) -> torch.Tensor:
    return frame.read([(ref, 0, ref.numel)])[0]


def _assign(old: torch.Tensor | None, flat: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """New values for a tensor: into its memory if it fits (others may view it), else as a new one."""
    if old is not None and tuple(old.shape) == tuple(ref.shape) and old.dtype == dtype_of(ref.dtype):
        old.copy_(flat.reshape(ref.shape))
        return old
    return with_strides(flat, ref.shape, ref.strides)


def sparse_tensor(frame: FrameData, ref: SparseRef) -> torch.Tensor:
    indices = with_strides(_whole(frame, ref.indices), ref.indices.shape, ref.indices.strides)
    values = with_strides(_whole(frame, ref.values), ref.values.shape, ref.values.strides)
    return torch.sparse_coo_tensor(
        indices, values, ref.shape, is_coalesced=ref.is_coalesced, check_invariants=False
    )


class _Source:
    """Where a unit gets the tensors of an event from; asked in order."""

    def get(self, event: int, frame: int, wanted: list[tuple[TensorRef, int, int]]) -> list[torch.Tensor]:
        raise NotImplementedError


class _Direct(_Source):
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

    def __init__(self, units: deque[_Unit], plan: _Plan, frames: Sequence[FrameData], readers: _Readers) -> None:
        self._units = units
        self._plan = plan
        self._frames = frames
        self._readers = readers
        self._taken: deque[_Unit] = deque()
        self._todo: Iterator[tuple[int, list[tuple[TensorRef, int, int]]]] = iter(())
        self._waiting: deque[_Read] = deque()
        # A read's memory is used again when the read after the next has been handed out: nobody looks at it by then.
        self._ring: deque[Scratch] = deque(Scratch() for _ in range(READ_AHEAD + 2))
        for _ in range(READ_AHEAD):
            self._issue()

    def next_unit(self) -> _Unit | None:
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


READ_AHEAD = 6


class _Unit:
    """Some tiles of one optimizer's parameters, and an optimizer that holds just these."""

    def __init__(self, state: State, name: str, tiles: list[_Tile], build: Callable[..., Any]) -> None:
        self._state = state
        self.name = name
        self.tiles = tiles
        self._build = build
        self._optimizer: torch.optim.Optimizer | None = None
        self._params: list[torch.Tensor] = []
        self._by_uid = {t.uid: i for i, t in enumerate(tiles)}

    def requests(self, plan: _Plan) -> Iterator[tuple[int, list[tuple[TensorRef, int, int]]]]:
        """(frame, what to read) of each event that reads anything, in order."""
        for event, (frame, op) in enumerate(plan.events):
            wanted = self._wanted(plan, event, op)
            if wanted:
                yield frame, wanted

    def _wanted(self, plan: _Plan, event: int, op: Op) -> list[tuple[TensorRef, int, int]]:
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

    def run(self, plan: _Plan, source: _Source) -> None:
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

    def _index(self, tile: _Tile) -> int:
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

    def _update(self, plan: _Plan, event: int, frame: int, op: Update, source: _Source) -> None:
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


def run_update(optimizer: torch.optim.Optimizer, op: Update) -> None:
    """One step with the gradients already in place, with or without a scaler's flags."""
    scaled: Any = optimizer
    if op.skipped or op.grad_scale is not None:
        scaled.found_inf = torch.full((), 1.0 if op.skipped else 0.0)
        scaled.grad_scale = None if op.grad_scale is None else tree.unpack(op.grad_scale)
    try:
        unhooked_step(optimizer)
    except EverstepError:
        raise
    except Exception as e:
        name = class_name(type(optimizer))
        raise ReplayError(f"replaying {name} failed ({type(e).__name__}: {e}). Resume with the live optimizer") from e
    finally:
        for flag in ("found_inf", "grad_scale"):
            scaled.__dict__.pop(flag, None)


def _run_units(
    units: list[_Unit], plan: _Plan, frames: Sequence[FrameData], num_workers: int,
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


class _Whole:
    """Applies one frame operation by operation to whole tensors: the plain meaning of a frame."""

    def __init__(self, state: State, build: Callable[..., Any], find_layout: Callable[[str], Layout]) -> None:
        self._state = state
        self._build = build
        self._find_layout = find_layout

    def apply(self, frame: FrameData) -> None:
        state = self._state
        consumed: dict[int, Gradient] = {}
        for op in frame.ops:
            if isinstance(op, Update):
                self._update(frame, op)
                consumed.update({g.uid: g for g in op.grads})
            elif isinstance(op, SetTensor):
                state.tensors[op.uid] = _assign(state.tensors.get(op.uid), _whole(frame, op.ref), op.ref)
            elif isinstance(op, SetState):
                self._set_state(frame, op)
            elif isinstance(op, SetGroups):
                optimizer = _optimizer(state, op.optimizer)
                optimizer.hyper, optimizer.params = list(op.hyper), [tuple(p) for p in op.params]
            elif isinstance(op, SetLayout):
                self._set_layout(op)
            elif isinstance(op, SetGrad):
                set_carried(state, frame, op.uid, "given", op.ref, consumed)
            else:
                for uid in op.uids:
                    set_carried(state, frame, uid, op.kind, None, consumed)

    def _set_state(self, frame: FrameData, op: SetState) -> None:
        optimizer = _optimizer(self._state, op.optimizer)
        if op.state is None:
            optimizer.state.pop(op.uid, None)
            return

        def get(plain: Any) -> torch.Tensor:
            ref = TensorRef(*plain[:2], *plain[2:])
            ref = TensorRef(
                ref.dtype, tuple(ref.shape), ref.first, ref.num_pieces, ref.offset,
                None if ref.strides is None else tuple(ref.strides),
            )  # fmt: skip
            return with_strides(_whole(frame, ref), ref.shape, ref.strides)

        optimizer.state[op.uid] = tree.unpack(op.state, get)

    def _set_layout(self, op: SetLayout) -> None:
        state = self._state
        layout = self._find_layout(op.layout)
        uids = {atom.uid for atom in layout.atoms}
        for uid in [u for u in state.tensors if u not in uids]:
            del state.tensors[uid]
            state.carried.pop(uid, None)
        specs = {spec.name: spec for spec in layout.optimizers}
        for name in [n for n in state.optimizers if n not in specs]:
            del state.optimizers[name]
        for name, spec in specs.items():
            old = state.optimizers.get(name)
            state.optimizers[name] = (
                OptimizerState(spec)
                if old is None
                else OptimizerState(spec, old.hyper, old.params, {u: s for u, s in old.state.items() if u in uids})
            )
        state.layout = layout

    def _update(self, frame: FrameData, op: Update) -> None:
        state = self._state
        optimizer_state = _optimizer(state, op.optimizer)
        grads = {g.uid: g for g in op.grads}
        groups = []
        params: dict[int, torch.Tensor] = {}
        for hyper, uids in zip(optimizer_state.hyper, optimizer_state.params, strict=True):
            for uid in uids:
                p = params[uid] = state.tensors[uid].detach()
                gradient = grads.get(uid)
                p.grad = None
                if gradient is None:
                    continue
                if op.skipped and (gradient.dense or gradient.sparse):
                    p.grad = torch.zeros_like(p)
                elif gradient.dense is not None:
                    p.grad = with_strides(_whole(frame, gradient.dense), tuple(p.shape), gradient.dense.strides)
                elif gradient.sparse is not None:
                    p.grad = sparse_tensor(frame, gradient.sparse)
            groups.append({**tree.unpack(hyper), "params": [params[u] for u in uids]})
        live_state = {params[u]: s for u, s in optimizer_state.state.items() if u in params}
        optimizer = self._build(optimizer_state.spec, groups, live_state)
        run_update(optimizer, op)
        for uid, p in params.items():
            if p in optimizer.state:
                optimizer_state.state[uid] = optimizer.state[p]
