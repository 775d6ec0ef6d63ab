"""The way through a nested value, and the refusal of what cannot be stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

from everstep.errors import UnsupportedValueError
from everstep.tree.kinds import (
    ARRAY_KINDS,
    FACTORIES,
    MAX_AXES,
    MAX_DEPTH,
    MAX_INT,
    MIN_INT,
    SELF_EVIDENT,
    TENSOR_DTYPE_NAMES,
    type_name,
)

Where: TypeAlias = "tuple[Where, str | int] | None"
"""The keys down to a value, innermost first; made into text only when something is refused."""

_ADVICE = (
    "Give it as tensors, numpy arrays, numbers, strings, bytes, None, lists, tuples, or dicts with str or "
    "int keys, or leave it out of the state"
)


class Walker:
    """Goes through a nested value, knows where it is, and refuses what cannot be stored."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.open_ids: set[int] = set()

    def walk(self, value: Any, where: Where, depth: int) -> Any:
        raise NotImplementedError

    def enter(self, value: Any, where: Where, depth: int) -> None:
        """Note that a container is open; refuse it when it is within itself or too deep."""
        if id(value) in self.open_ids:
            self.refuse(value, where, "it contains itself")
        if depth > MAX_DEPTH:
            self.refuse(value, where, f"it is nested more than {MAX_DEPTH} levels deep")
        self.open_ids.add(id(value))

    def leave(self, value: Any) -> None:
        self.open_ids.discard(id(value))

    def items(self, value: Iterable[Any], where: Where, depth: int) -> list[Any]:
        """Return what becomes of the items of an open sequence."""
        walk, below = self.walk, depth + 1
        return [
            item if type(item) in SELF_EVIDENT else walk(item, (where, index), below)
            for index, item in enumerate(value)
        ]

    def check_keys(self, value: Mapping[Any, Any], where: Where) -> None:
        for key in value:
            if type(key) is not str and type(key) is not int:
                self.refuse(value, where, f"one of its keys is a {type_name(key)}, not a str or an int")

    def factory_name(self, value: Any, where: Where) -> str | None:
        """Return the name of a defaultdict's factory; None for none."""
        if value.default_factory is None:
            return None
        for name, factory in FACTORIES.items():
            if value.default_factory is factory:
                return name
        self.refuse(value, where, f"its default_factory is not one of {', '.join(FACTORIES)}")

    def check_tensor(self, tensor: torch.Tensor, where: Where) -> None:
        if tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo):
            self.refuse(tensor, where, f"it is {'nested' if tensor.is_nested else tensor.layout}")
        if tensor.dtype not in TENSOR_DTYPE_NAMES:
            self.refuse(tensor, where, f"its dtype is {tensor.dtype}")
        if tensor.is_meta:
            self.refuse(tensor, where, "it is on the meta device and has no values")
        if any(getattr(tensor, "names", ())):  # newer versions of torch have none
            self.refuse(tensor, where, "its dimensions are named")
        if tensor.dim() > MAX_AXES:
            self.refuse(tensor, where, f"it has more than {MAX_AXES} dimensions")

    def check_array(self, array: np.ndarray[Any, Any], where: Where) -> None:
        if array.dtype.kind not in ARRAY_KINDS or array.dtype.itemsize == 0:
            self.refuse(array, where, f"its dtype is {array.dtype}")

    def refuse(self, value: Any, where: Where, why: str = "") -> NoReturn:
        steps: list[str] = []
        while where is not None:
            where, key = where
            if isinstance(key, str):
                steps.append(f".{key}" if key.isidentifier() else f"[{key!r:.60}]")
            else:
                steps.append(f"[{key}]" if MIN_INT <= key <= MAX_INT else "[a long int]")
        path = (self.path + "".join(reversed(steps))).removeprefix(".") or "the state itself"
        reason = f" because {why}" if why else ""
        raise UnsupportedValueError(f"{path}: cannot store this {type_name(value)}{reason}. {_ADVICE}.")
