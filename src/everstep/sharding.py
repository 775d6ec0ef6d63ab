"""What part of a global tensor a live one is: DTensors, and the plain ones that everybody has whole. No communication."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from everstep.boxes import Box, whole


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor (replicated ones are, too)."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def local(tensor: Any) -> Any:
    """The memory that this process has of it; the tensor itself if it is no DTensor."""
    found = getattr(tensor, "_local_tensor", tensor)
    wait = getattr(found, "wait", None)
    return wait() if wait is not None and hasattr(found, "elem") else found  # a result that is still on its way


def local_grad(param: Any) -> Any:
    """The gradient's memory, or None."""
    return local(param.grad)


def box_of(tensor: torch.Tensor) -> Box:
    """Which elements of the global tensor these are."""
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return whole(shape)
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    return _box(shape, tuple(mesh.shape), tensor.placements, mesh.get_coordinate())  # type: ignore[attr-defined]


def gathering(models: Iterable[nn.Module]) -> list[Any]:
    """Modules that gather whole parameters to compute with (FSDP2)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [m for model in models for m in model.modules() if isinstance(m, kind)]


def let_go(modules: Iterable[Any]) -> None:
    """Parameters that modules have gathered are put back: after a forward without backward the outermost still has them."""
    for module in modules:
        module.reshard()


def is_held(tensor: torch.Tensor) -> bool:
    """Whether this process is in the tensor's mesh at all."""
    return not is_sharded(tensor) or tensor.device_mesh.get_coordinate() is not None  # type: ignore[attr-defined]


def is_partial(tensor: Any) -> bool:
    """Whether the ranks' values have yet to be summed."""
    return is_sharded(tensor) and any(p.is_partial() for p in tensor.placements)


def like(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Local memory as a tensor of the kind of `param`: a DTensor with its mesh and placements where that is one."""
    if not is_sharded(param) or value.shape != local(param).shape or not value.dim():
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride(),  # type: ignore[attr-defined]
    )  # fmt: skip


def _box(shape: tuple[int, ...], mesh: tuple[int, ...], placements: Sequence[Any], coordinate: Sequence[int]) -> Box:
    """From the index sets that torch's chunking leaves on a rank: uneven FSDP shards of TP shards need no less."""
    offset, size = [], []
    for dim, length in enumerate(shape):
        on = [(m, p) for m, p in enumerate(placements) if getattr(p, "dim", None) == dim]
        plain = [m for m, p in on if not _is_strided(p)]
        strided = [m for m, p in on if _is_strided(p)]
        start, stop = 0, length
        for m in plain + strided[::-1]:
            chunk = -(-(stop - start) // mesh[m])
            low = min(start + coordinate[m] * chunk, stop)
            start, stop = low, min(low + chunk, stop)
        offset.append(start)
        size.append(stop - start)
    return Box(tuple(offset), tuple(size))


def _is_strided(placement: Any) -> bool:
    return hasattr(placement, "split_factor")


def local_values(values: Any) -> dict[Any, Any]:
    """One parameter's optimizer state, as far as this process has it."""
    return {k: local(v) for k, v in values.items()}
