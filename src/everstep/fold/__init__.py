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
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch

from everstep import tree
from everstep.atoms import Layout, OptimizerSpec
from everstep.fold.apply import unhooked_step
from everstep.fold.cut import ELEMENTWISE, TilePlan
from everstep.fold.state import Live, OptimizerState, Ranges, State, Window, class_name, find_class, register
from everstep.fold.tiles import READ_AHEAD, Source, Unit, run_units
from everstep.fold.whole import Whole
from everstep.frame import FrameData, Op, SetGroups, SetLayout, SetState, SetTensor

__all__ = [
    "ELEMENTWISE", "Folder", "Live", "OptimizerState", "Ranges", "State", "Window",
    "class_name", "find_class", "register", "unhooked_step",
]  # fmt: skip

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
        read_ahead: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`num_threads` is that of the recorded run (for what must be replayed whole); `num_workers` that of this
        host; several of them read ahead, one if it is told to. `live` optimizers lend their class and attributes where
        the class cannot be found by name."""
        self._find_layout = find_layout
        self._live = live or {}
        self._num_threads = num_threads
        self._num_workers = num_workers
        self._ahead = READ_AHEAD if read_ahead or num_workers > 1 else 0
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
                state.need_all()
                with _threads(self._num_threads):
                    Whole(state, self._build, self._find_layout).apply(frames[i])
            state.step = frames[j - 1].step
            i = j

    def is_one_row(self, state: State, frames: Sequence[FrameData]) -> bool:
        """Whether all of these are folded at once: only then may some elements of a parameter be left out."""
        return not _shares_params(state) and all(_is_simple(state, frame.ops) for frame in frames)

    def cut(self, state: State, frames: Sequence[FrameData]) -> Set[int]:
        """Atoms that these frames, if they are one row, change by tiles alone: of others every element counts.

        The state need not have its values, and its groups are not good for anything else afterwards.
        """
        return TilePlan(state, frames).cut(state.tensors.keys())

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
        plan = TilePlan(state, frames)
        for name, tiles in plan.whole.items():
            state.need_all()
            with _threads(self._num_threads):
                unit = Unit(state, name, tiles, self._build)
                # New memory for each: an optimizer of the user's may keep it.
                unit.run(plan, Source(frames, unit.reads(plan), fresh=True))
                unit.join_state()
        units = [Unit(state, name, tiles, self._build) for name, tiles in plan.tiled]
        run_units(units, plan, frames, self._num_workers, self._ahead, self._progress)
        for unit in units:
            unit.join_state()
        state.need_all()
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
