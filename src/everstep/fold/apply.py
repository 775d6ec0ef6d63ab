"""What one operation means: shared by whole and tiled folding."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from everstep import tree
from everstep.errors import CorruptionError, EverstepError, ReplayError
from everstep.fold.state import State, class_name
from everstep.frame import FrameData, Gradient, SparseRef, TensorRef, Update, coefficient_of
from everstep.memory import dtype_of, with_strides


def set_carried(
    state: State, frame: FrameData, uid: int, kind: str, ref: TensorRef | None, consumed: Gradient | None
) -> None:
    """What is left on a parameter at the commit for the next backward to add to.

    `consumed`: what this frame's last update of the parameter consumed, if there was one.
    """
    state.lost.discard(uid)
    if kind in ("none", "lost"):
        state.carried.pop(uid, None)
        if kind == "lost":
            state.lost.add(uid)
    elif kind == "zero":
        state.carried[uid] = torch.zeros_like(state.tensors[uid])
    elif kind == "given" and ref is not None:
        state.carried[uid] = _placed(whole(frame, ref), ref)
    elif kind == "consumed":
        if consumed is None or consumed.dense is None:
            raise CorruptionError(f"step {frame.step} carries a gradient that it does not hold")
        values = consumed_from(whole(frame, consumed.dense), consumed)
        state.carried[uid] = _placed(values, consumed.dense)
    else:
        raise CorruptionError(f"step {frame.step} carries a gradient of unknown kind {kind!r}")


def whole(frame: FrameData, ref: TensorRef) -> torch.Tensor:
    return frame.read([(ref, 0, ref.numel)])[0]


def consumed_from(elements: torch.Tensor, gradient: Gradient) -> torch.Tensor:
    """What the optimizer consumed, from elements of a dense gradient as they are in the log.

    New memory if there is a coefficient: those of a log in memory must not be written to.
    """
    coefficient = coefficient_of(gradient)
    return elements if coefficient is None else torch.mul(elements, coefficient)


def assign(old: torch.Tensor | None, flat: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """New values for a tensor: into its memory if it fits (others may view it), else as a new one."""
    if old is not None and tuple(old.shape) == tuple(ref.shape) and old.dtype == dtype_of(ref.dtype):
        old.copy_(flat.reshape(ref.shape))
        return old
    return _placed(flat, ref)


def _placed(flat: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """As a tensor of the state. A single number is copied: whoever moves a state out of a log's memory leaves those."""
    return with_strides(flat if ref.shape else flat.clone(), ref.shape, ref.strides)


def sparse_tensor(frame: FrameData, ref: SparseRef) -> torch.Tensor:
    indices = with_strides(whole(frame, ref.indices), ref.indices.shape, ref.indices.strides)
    values = with_strides(whole(frame, ref.values), ref.values.shape, ref.values.strides)
    return torch.sparse_coo_tensor(
        indices, values, ref.shape, is_coalesced=ref.is_coalesced, check_invariants=False
    )


def unhooked_step(optimizer: torch.optim.Optimizer) -> None:
    """optimizer.step() without anybody's hooks.

    For torch's own classes also without the wrapper that sets the gradient mode: it imports torch._dynamo, which takes
    seconds, and what it does is done here.
    """
    step: Any = type(optimizer).step
    if class_name(type(optimizer)).startswith("torch.optim.") and not any(
        group.get("differentiable") for group in optimizer.param_groups
    ):
        with torch.no_grad():
            inspect.unwrap(step)(optimizer)
        return
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    step(optimizer)


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
