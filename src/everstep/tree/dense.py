"""Dense tensors as bytes in the order of their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def memory(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a dense tensor on the CPU, in the order of its memory, which they share."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def c_strides(shape: list[int]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(shape[axis], 1)
    return strides


def is_dense(shape: list[int], strides: list[int]) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps."""
    if 0 in shape:
        return True
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
