"""Fused Adam and AdamW by the kernel itself.

On a tile the Python of `optimizer.step()` takes a good part of the kernel's own time, and while one worker runs it the
others wait for the interpreter. What it comes to is one call, the same each time. Anything out of the ordinary is left
to step().
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_CLASSES = (torch.optim.Adam, torch.optim.AdamW)
_STATE = ("exp_avg", "exp_avg_sq", "step")
_COUNTS = (torch.float32, torch.float64)


class FusedAdam:
    """The parameters of an optimizer, each group in lists as the kernel wants them."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> None:
        """`optimizer` holds just these, all of one dtype, with their state."""
        self._decoupled = isinstance(optimizer, torch.optim.AdamW)
        index = {id(p): i for i, p in enumerate(params)}
        self._groups = [
            (
                group,
                group["params"],
                [[optimizer.state[p][key] for p in group["params"]] for key in _STATE],
                [memoryview(optimizer.state[p]["step"].numpy()) for p in group["params"]],
                [index[id(p)] for p in group["params"]],
            )
            for group in optimizer.param_groups
            if group["params"]
        ]

    def step(self, grads: Sequence[torch.Tensor]) -> bool:
        """One step with a gradient for each parameter; False if it was not done, since step() would do something else."""
        if not all(_is_plain(group) for group, *_ in self._groups):
            return False
        for group, params, (exp_avgs, exp_avg_sqs, steps), counts, indices in self._groups:
            decoupled = self._decoupled or group.get("decoupled_weight_decay", False)
            kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
            beta1, beta2 = group["betas"]
            for count in counts:  # not by torch: a call that finds the caches full of tensors takes 80 µs
                count[()] += 1
            kernel(
                params, [grads[i] for i in indices], exp_avgs, exp_avg_sqs, [], steps, amsgrad=False, lr=group["lr"],
                beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
                maximize=group["maximize"], grad_scale=None, found_inf=None,
            )  # fmt: skip
        return True


def fused_adam(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> FusedAdam | None:
    """For an optimizer that is one and has all of its state."""
    if type(optimizer) not in _CLASSES or len({p.dtype for p in params}) != 1:
        return None
    if not all(group.get("fused") for group in optimizer.param_groups):
        return None
    for p in params:
        state = optimizer.state.get(p, {})
        if set(state) != set(_STATE) or state["step"].dim() or state["step"].dtype not in _COUNTS:
            return None
    return FusedAdam(optimizer, params)


def _is_plain(group: dict[str, Any]) -> bool:
    numbers = (group["lr"], *group["betas"], group["weight_decay"], group["eps"])
    odd = group["amsgrad"] or group["capturable"] or group["differentiable"]
    return bool(group["fused"]) and not odd and not any(isinstance(n, torch.Tensor) for n in numbers)
