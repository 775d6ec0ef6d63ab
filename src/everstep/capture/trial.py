"""A trial replay: proof, on this machine and for this optimizer, that fold gives the bits that step() gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from everstep import rng, sharding, tree
from everstep.atoms import PIECE_ELEMENTS, Layout, OptimizerSpec
from everstep.capture.pending import PendingUpdate
from everstep.fold import Folder, OptimizerState, State, class_name
from everstep.frame import Gradient, Op, SparseRef, TensorRef, Update, Wanted
from everstep.memory import CODE_BY_DTYPE, Scratch, same_bits, strides_of


class _MemoryFrame:
    """A frame whose tensors are in memory (a FrameData)."""

    def __init__(self, update: PendingUpdate) -> None:
        self.step = 1
        self._tensors: list[torch.Tensor] = []
        grads = []
        for uid, g in zip(update.uids, update.grads, strict=True):
            if g is None:
                grads.append(Gradient(uid))
            elif g.is_sparse:
                sparse = SparseRef(self._ref(g._indices()), self._ref(g._values()), tuple(g.shape), g.is_coalesced())
                grads.append(Gradient(uid, None, sparse))
            else:
                grads.append(Gradient(uid, self._ref(g)))
        scale = None if update.grad_scale is None else tree.pack(update.grad_scale)
        self.ops: tuple[Op, ...] = (Update(update.optimizer, tuple(grads), scale, update.skipped),)

    def _ref(self, t: torch.Tensor) -> TensorRef:
        self._tensors.append(t)
        return TensorRef(CODE_BY_DTYPE[t.dtype], tuple(t.shape), len(self._tensors) - 1, 1, 0, strides_of(t))

    def read(
        self, wanted: Sequence[Wanted], scratch: Scratch | None = None, *, sparse: bool = False
    ) -> list[torch.Tensor]:
        return [self._tensors[r.first].detach().reshape(-1)[start:stop].clone() for r, start, stop in wanted]

    def begin(
        self, wanted: Sequence[Wanted], scratch: Scratch, *, sparse: bool = False
    ) -> Callable[[], list[torch.Tensor]]:
        return lambda: self.read(wanted, scratch)

    def piece_elements(self, ref: TensorRef) -> int:
        return PIECE_ELEMENTS


class Trial:
    """The state before an update, copied, to be replayed and compared after it."""

    def __init__(
        self, name: str, optimizer: Optimizer, params: list[torch.Tensor], uids: list[int], groups: list[tuple[int, ...]]
    ) -> None:
        self._name, self._optimizer, self._uids, self._groups = name, optimizer, uids, groups
        self._params = params
        self._numbers = _numbers_of(optimizer)
        self._hyper = [tree.pack({k: v for k, v in g.items() if k != "params"}, path=name) for g in optimizer.param_groups]
        self._before = {u: _copy(sharding.local(p)) for u, p in zip(uids, params, strict=True)}
        self._state: dict[int, Any] = {}
        for u, p in zip(uids, params, strict=True):
            if p in optimizer.state:
                self._state[u] = tree.freeze(sharding.local_values(optimizer.state[p]), path=name)

    def differs(self, update: PendingUpdate) -> str:
        """In words, how a replay differs from what the live optimizer just did; empty if every bit is equal."""
        if any(p.device.type != "cpu" for p in self._params):
            return "its parameters are on an accelerator, and folding runs on the CPU"
        spec = OptimizerSpec(self._name, class_name(type(self._optimizer)))
        state = State(
            0, Layout((), (spec,), ()), self._before,
            {self._name: OptimizerState(spec, list(self._hyper), list(self._groups), self._state)},
        )  # fmt: skip
        generators = rng.to_plain(rng.capture())  # a replay that draws numbers must take none from training
        try:
            Folder(
                find_layout=lambda _: state.layout, live={self._name: self._optimizer},
                num_threads=torch.get_num_threads(),
            ).fold(state, [_MemoryFrame(update)])  # fmt: skip
        except Exception as e:  # any failure of a user's class means the same: it cannot be replayed
            return f"replaying it fails ({type(e).__name__}: {e})"
        finally:
            rng.install(generators)
        return self._compare(state)

    def unkept(self) -> list[str]:
        """Attributes that the update counted up: what an optimizer keeps in neither state nor groups is not stored."""
        return [name for name, value in _numbers_of(self._optimizer).items() if self._numbers.get(name, value) != value]

    def _compare(self, state: State) -> str:
        folded = state.optimizers[self._name].state
        for uid, p in zip(self._uids, self._params, strict=True):
            if not same_bits(sharding.local(p).detach(), state.tensors[uid]):
                return "the replayed parameters differ"
            live = sharding.local_values(self._optimizer.state[p]) if p in self._optimizer.state else None
            mine = folded.get(uid)
            if (live is None) != (mine is None):
                return "the replayed state has other entries"
            if live is not None and mine is not None and not _same_state(live, mine):
                return "the replayed state differs"
        others = [key for key in self._optimizer.state if not isinstance(key, torch.Tensor)]
        return f"it keeps state of its own ({others[0]!r}) beside that of its parameters" if others else ""


def _numbers_of(optimizer: Optimizer) -> dict[str, int | float]:
    return {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}


def _copy(p: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    strides = strides_of(p)
    if strides is None:
        return p.detach().clone()
    out = torch.empty_strided(p.shape, strides, dtype=p.dtype)
    out.copy_(p.detach())
    return out


def _same_state(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.layout != b.layout:
            return False
        if a.is_sparse:
            return same_bits(a._indices(), b._indices()) and same_bits(a._values(), b._values())
        return same_bits(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same_state(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same_state, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))
