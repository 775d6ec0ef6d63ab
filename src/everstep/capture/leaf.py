"""A parameter that is updated in backward, and whether step() finds it and its gradient as they were then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from everstep.memory import same_bits

SAMPLE_ELEMENTS = 64


@dataclass(slots=True)
class Taken:
    """A parameter and its gradient, as they were when that was final; the parameter also as it was after its update."""

    grad: torch.Tensor | None
    """What must be on the parameter at step(); None: DDP puts it there when backward ends."""
    grad_version: int
    param_version: int
    address: int
    is_updated: bool = False
    grad_bits: torch.Tensor | None = None
    """All of a gradient that is watched, a sample of some others."""
    param_bits: torch.Tensor | None = None


class Leaf:
    """A parameter, and what is known of it."""

    def __init__(self, param: torch.Tensor, name: str) -> None:
        self.param = param
        self.name = name
        self.num_bytes = param.numel() * param.element_size()
        self.group = -1
        """Index of its group; negative: the optimizer does not have it any more."""
        self.handle: Any = None
        self.num_watched = 0
        self.by_bucket = False
        self.calls = 0
        """How often its gradient was accumulated since the last step."""
        self.taken: Taken | None = None

    def take(self, grad: torch.Tensor, *, is_watched: bool = False) -> None:
        p = self.param
        self.taken = Taken(None if self.by_bucket else grad, grad._version, p._version, p.data_ptr())
        if is_watched:
            self.taken.grad_bits, self.taken.param_bits = grad.detach().clone(), sample_of(p)

    def has_old_version(self) -> bool:
        """Whether an update has not moved the parameter's version counter."""
        return self.taken is not None and self.param._version == self.taken.param_version

    def updated(self, sampled: torch.Tensor | None) -> None:
        """The parameter has been updated; `sampled` is the gradient of one of which a sample is kept."""
        t = self.taken
        assert t is not None
        t.is_updated, t.param_version = True, self.param._version
        if sampled is not None:
            t.grad_bits, t.param_bits = sample_of(sampled), sample_of(self.param)

    def difference(self) -> str:
        """What happened to the gradient or the parameter since it was taken; empty: nothing."""
        t, p = self.taken, self.param
        assert t is not None
        if self.calls > 1:
            return (
                f"the gradient of {self.name} was added to {self.calls} times before step(): gradients are accumulated over "
                "several backward passes, or step() does not follow on each of them"
            )
        grad = p.grad
        if grad is None or grad is not t.grad:
            return f"the gradient of {self.name} was replaced or dropped between backward() and step()"
        if grad._version != t.grad_version:
            return (
                f"the gradient of {self.name} was changed between backward() and step(): clipping, and whatever else needs "
                "all gradients first, comes too late for updates in backward"
            )
        if t.grad_bits is not None and not same_bits(t.grad_bits, grad if not t.is_updated else sample_of(grad)):
            return (
                f"the gradient of {self.name} was changed between backward() and step() without moving its version counter, "
                "as torch's GradScaler does, and writing to .data"
            )
        if (
            p._version != t.param_version or p.data_ptr() != t.address
            or (t.param_bits is not None and not same_bits(t.param_bits, sample_of(p)))
        ):  # fmt: skip
            return f"{self.name} itself was changed between backward() and step()"
        return ""


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of some elements from all over a tensor."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[..., :1].reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE_ELEMENTS)][: 2 * SAMPLE_ELEMENTS].clone()
