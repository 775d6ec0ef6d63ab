"""Copies of nested values that nobody else changes."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import torch

from everstep.tree.kinds import MAPPING_TAGS, SCALAR_NAMES, SELF_EVIDENT, TENSORS
from everstep.tree.walker import Walker, Where

_UNCHANGING = frozenset(
    {*SELF_EVIDENT, int, complex, str, *SCALAR_NAMES, torch.dtype, torch.device, torch.Size}
)


def freeze(value: Any, *, path: str = "") -> Any:
    """Return a deep copy that nobody else changes: tensors and arrays cloned, containers copied.

    Refuses what `pack` refuses. Parameters become plain tensors; tensors stay on their device.
    """
    return _Freezer(path).walk(value, None, 0)


class _Freezer(Walker):
    def walk(self, value: Any, where: Where, depth: int) -> Any:
        kind = type(value)
        if kind in _UNCHANGING:
            return value
        if kind in TENSORS:
            self.check_tensor(value, where)
            return value.detach().clone()
        if kind is np.ndarray:
            self.check_array(value, where)
            return value.copy(order="K")
        if kind is list or kind is tuple or kind in MAPPING_TAGS:
            self.enter(value, where, depth)
            copy = self.container(value, where, depth)
            self.leave(value)
            return copy
        self.refuse(value, where)

    def container(self, value: Any, where: Where, depth: int) -> Any:
        kind = type(value)
        if kind is list:
            return self.items(value, where, depth)
        if kind is tuple:
            return tuple(self.items(value, where, depth))
        self.check_keys(value, where)
        copy = kind()
        if kind is collections.defaultdict:
            self.factory_name(value, where)
            copy.default_factory = value.default_factory
        for key, item in value.items():
            copy[key] = item if type(item) in _UNCHANGING else self.walk(item, (where, key), depth + 1)
        return copy
