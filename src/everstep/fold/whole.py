"""Frames applied operation by operation to whole tensors: the plain meaning of a frame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from everstep import tree
from everstep.atoms import Layout
from everstep.fold.apply import assign, consumed_from, run_update, set_carried, sparse_tensor, whole
from everstep.fold.state import OptimizerState, State, optimizer_of
from everstep.frame import (
    FrameData,
    Gradient,
    SetGrad,
    SetGroups,
    SetLayout,
    SetState,
    SetTensor,
    TensorRef,
    Update,
)
from everstep.memory import with_strides


class Whole:
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
                state.tensors[op.uid] = assign(state.tensors.get(op.uid), whole(frame, op.ref), op.ref)
            elif isinstance(op, SetState):
                self._set_state(frame, op)
            elif isinstance(op, SetGroups):
                optimizer = optimizer_of(state, op.optimizer)
                optimizer.hyper, optimizer.params = list(op.hyper), [tuple(p) for p in op.params]
            elif isinstance(op, SetLayout):
                self._set_layout(op)
            elif isinstance(op, SetGrad):
                set_carried(state, frame, op.uid, "given", op.ref, None)
            else:
                for uid in op.uids:
                    set_carried(state, frame, uid, op.kind, None, consumed.get(uid))

    def _set_state(self, frame: FrameData, op: SetState) -> None:
        optimizer = optimizer_of(self._state, op.optimizer)
        if op.state is None:
            optimizer.state.pop(op.uid, None)
            return

        def get(plain: Any) -> torch.Tensor:
            ref = TensorRef(*plain[:2], *plain[2:])
            ref = TensorRef(
                ref.dtype, tuple(ref.shape), ref.first, ref.num_pieces, ref.offset,
                None if ref.strides is None else tuple(ref.strides),
            )  # fmt: skip
            return with_strides(whole(frame, ref), ref.shape, ref.strides)

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
        optimizer_state = optimizer_of(state, op.optimizer)
        grads = {g.uid: g for g in op.grads}
        groups = []
        params: dict[int, torch.Tensor] = {}
        for hyper, all_uids in zip(optimizer_state.hyper, optimizer_state.params, strict=True):
            uids = state.here(all_uids)
            for uid in uids:
                p = params[uid] = state.tensors[uid].detach()
                gradient = grads.get(uid)
                p.grad = None
                if gradient is None:
                    continue
                if op.skipped and (gradient.dense or gradient.sparse):
                    p.grad = torch.zeros_like(p)
                elif gradient.dense is not None:
                    values = consumed_from(whole(frame, gradient.dense), gradient)
                    p.grad = with_strides(values, tuple(p.shape), gradient.dense.strides)
                elif gradient.sparse is not None:
                    p.grad = sparse_tensor(frame, gradient.sparse)
            groups.append({**tree.unpack(hyper), "params": [params[u] for u in uids]})
        live_state = {params[u]: s for u, s in optimizer_state.state.items() if u in params}
        optimizer = self._build(optimizer_state.spec, groups, live_state)
        run_update(optimizer, op)
        for uid, p in params.items():
            if p in optimizer.state:
                optimizer_state.state[uid] = optimizer.state[p]
