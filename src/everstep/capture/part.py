"""Some of an optimizer's parameters updated by themselves: by its own code, with its own state, and with every bit the same.

An optimizer of the same class is given just these parameters and the state that belongs to them, so whatever step() does
(loop, foreach, fused; state that appears with the first gradient) it does here. That is right where the update of one
parameter depends on no other: `refusal` says where it does, or where nobody knows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch.optim import Optimizer

from everstep.capture.tap import is_broken_in_torch
from everstep.fold import class_name, unhooked_step
from everstep.fold.cut import ELEMENTWISE
from everstep.memory import plain, view_bytes

Outcome = dict[str, Any]
"""Hashes of a parameter and of its state."""


class Due(NamedTuple):
    """A parameter to be updated, the group that it is in, and the gradient."""

    param: torch.Tensor
    group: int
    grad: torch.Tensor


class Part:
    """An optimizer that updates what it is given."""

    def __init__(self, optimizer: Optimizer) -> None:
        cls = type(optimizer)
        self._whole = optimizer
        self._part = cls.__new__(cls)
        self._part.__setstate__({"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": []})

    def update(self, due: Sequence[Due]) -> None:
        """What step() would do if these were all that have a gradient, without anybody's hooks.

        Works on other tensors of the same memory: a gradient need not be on its parameter (DDP puts it there when backward
        ends).
        """
        state = self._whole.state
        here = []
        for param, _, grad in due:
            q = param.detach()
            q.grad = grad
            here.append(q)
        known = {q: state[d.param] for q, d in zip(here, due, strict=True) if d.param in state}  # absent is not empty
        self._step(here, [d.group for d in due], known)
        for q, d in zip(here, due, strict=True):
            if q in self._part.state:
                state[d.param] = self._part.state[q]

    def predict(self, due: Due) -> Outcome:
        """What update() would make of one of them, by itself; on copies."""
        q = due.param.detach().clone()
        q.grad = due.grad
        state = self._whole.state.get(due.param)
        copied = {} if state is None else {q: {k: v.clone() if _is_tensor(v) else v for k, v in state.items()}}
        self._step([q], [due.group], copied)
        return outcome(q, self._part.state.get(q))

    def outcome(self, param: torch.Tensor) -> Outcome:
        """What there is of it now."""
        return outcome(param, self._whole.state.get(param))

    def _step(self, params: list[torch.Tensor], groups: list[int], state: dict[torch.Tensor, Any]) -> None:
        in_group: dict[int, list[torch.Tensor]] = {}
        for p, group in zip(params, groups, strict=True):
            in_group.setdefault(group, []).append(p)
        self._part.param_groups = [{**self._whole.param_groups[i], "params": group} for i, group in in_group.items()]
        self._part.state = defaultdict(dict, state)
        unhooked_step(self._part)


def outcome(param: torch.Tensor, state: Mapping[str, Any] | None) -> Outcome:
    values = {"": param, **(state or {})}
    return {k: xxhash.xxh3_64_intdigest(view_bytes(plain(v))) if _is_tensor(v) else v for k, v in values.items()}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def refusal(optimizer: Optimizer) -> str:
    """Why parameters of this optimizer must not be updated one by one; empty: they may be."""
    name = class_name(type(optimizer))
    if name not in ELEMENTWISE:
        return f"{name} is not known to update each element by itself. Known are {', '.join(sorted(ELEMENTWISE))}"
    if is_broken_in_torch(optimizer):
        return "fused SGD with 16-bit parameters does not give the same bits twice (pytorch #191763)"
    for i, group in enumerate(optimizer.param_groups):
        reason = _group_refusal(group)
        if reason:
            return f"{reason} (group {i} of {name})"
    return ""


def _group_refusal(group: Mapping[str, Any]) -> str:
    for p in group["params"]:
        if type(p) not in (torch.nn.Parameter, torch.Tensor):
            return f"a parameter is a {type(p).__name__}, and only plain tensors are updated in backward"
        if p.device.type != "cpu":
            return f"a parameter is on {p.device}, and only those in CPU memory are updated in backward"
    for option in ("capturable", "differentiable"):
        if group.get(option):
            return f"with {option}=True steps are part of a graph"
    if group.get("nesterov") and group.get("foreach") and not group.get("weight_decay"):
        return "nesterov with foreach=True and without weight_decay writes into the gradients: set foreach=False"
    return ""
