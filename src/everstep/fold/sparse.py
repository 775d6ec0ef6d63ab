"""SGD on the elements that have a gradient.

Without momentum and weight decay an element whose gradient is 0.0 stays as it is: p + (-lr x 0.0) = p + -0.0 is p in every
bit, -0.0 included. So a gradient of which a frame keeps few elements need not be made dense: those are taken out, updated
by the same operation that the optimizer uses (in its loop and foreach variants, which give the same bits wherever a tensor
is cut), and put back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from everstep.frame import Gradient, coefficient_of

_DTYPES = (torch.float32, torch.float64)


def is_plain_sgd(group: Mapping[str, Any]) -> bool:
    """Whether this group of SGD does p.add_(grad, alpha=-lr) and nothing else."""
    lr = group["lr"]
    odd = any(group.get(key) for key in ("momentum", "weight_decay", "maximize", "fused", "differentiable"))
    return not odd and isinstance(lr, (int, float)) and lr > 0 and _is_harmless(lr)


def step_sparse(p: torch.Tensor, grad: torch.Tensor, gradient: Gradient, group: Mapping[str, Any]) -> bool:
    """One step of plain SGD on a flat tile, with a coalesced sparse gradient as it is in the log; False: nothing is done."""
    coefficient = coefficient_of(gradient)
    if p.dtype not in _DTYPES or grad.dtype != p.dtype or not _is_harmless(1.0 if coefficient is None else coefficient):
        return False
    indices, values = grad._indices()[0], grad._values()
    if coefficient is not None:
        values = torch.mul(values, coefficient)
    p[indices] = p[indices].add_(values, alpha=-group["lr"])
    return True


def _is_harmless(factor: float) -> bool:
    """Whether 0.0 times this is 0.0."""
    return math.isfinite(factor) and math.copysign(1.0, factor) > 0
