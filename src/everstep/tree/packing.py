"""Nested values to plain ones."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from everstep.tree.dense import c_strides, is_dense, memory
from everstep.tree.kinds import (
    MAPPING_TAGS,
    MAX_INT,
    MIN_INT,
    SCALAR_NAMES,
    SELF_EVIDENT,
    TAG,
    TENSOR_DTYPE_NAMES,
    TENSORS,
)
from everstep.tree.walker import Walker, Where


def pack(value: Any, put: Callable[[torch.Tensor], Any] | None = None, *, path: str = "") -> Any:
    """Return `value` as plain values, which msgspec.msgpack encodes and `unpack` turns back.

    `put` is offered each dense tensor, the original object, and may store it elsewhere and return a plain
    value that stands for it; None has the tensor inlined. Raises UnsupportedValueError that names the path,
    below `path`, and the type of what cannot be stored. The result shares no memory that can change.
    """
    return _Packer(path, put).walk(value, None, 0)


class _Packer(Walker):
    def __init__(self, path: str, put: Callable[[torch.Tensor], Any] | None) -> None:
        super().__init__(path)
        self.put = put

    def walk(self, value: Any, where: Where, depth: int) -> Any:
        kind = type(value)
        if kind in SELF_EVIDENT:
            return value
        if kind is int:
            return value if MIN_INT <= value <= MAX_INT else {TAG: "int", "v": _int_to_bytes(value)}
        if kind is str:
            return value if _is_utf8(value) else {TAG: "str", "v": value.encode("utf-8", "surrogatepass")}
        if kind in TENSORS:
            return self.tensor(value, where)
        if kind is list or kind is tuple:
            return self.sequence(value, where, depth)
        if kind in MAPPING_TAGS:
            return self.mapping(value, where, depth)
        if kind is np.ndarray:
            return self.array(value, where)
        if kind in SCALAR_NAMES:
            return self.scalar(value)
        if kind is complex:
            return {TAG: "complex", "v": [value.real, value.imag]}
        if kind is torch.Size:
            return {TAG: "size", "v": list(value)}
        if kind is torch.dtype:
            return {TAG: "dtype", "v": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {TAG: "device", "v": str(value)}
        self.refuse(value, where)

    def sequence(self, value: Any, where: Where, depth: int) -> Any:
        self.enter(value, where, depth)
        items = self.items(value, where, depth)
        self.leave(value)
        return items if type(value) is list else {TAG: "tuple", "v": items}

    def mapping(self, value: Any, where: Where, depth: int) -> Any:
        self.enter(value, where, depth)
        walk, below = self.walk, depth + 1
        if type(value) is dict and _can_be_map(value):
            plain = {
                key: item if type(item) in SELF_EVIDENT else walk(item, (where, key), below)
                for key, item in value.items()
            }
        else:
            self.check_keys(value, where)
            pairs: list[Any] = []
            for key, item in value.items():
                pairs += (walk(key, where, below), walk(item, (where, key), below))
            plain = {TAG: MAPPING_TAGS[type(value)], "v": pairs}
            if type(value) is collections.defaultdict:
                plain["f"] = self.factory_name(value, where)
        self.leave(value)
        return plain

    def tensor(self, tensor: torch.Tensor, where: Where) -> Any:
        self.check_tensor(tensor, where)
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.detach()
            return {
                TAG: "coo",
                "s": list(tensor.shape),
                "c": tensor.is_coalesced(),
                "i": _inline(tensor._indices()),
                "v": _inline(tensor._values()),
            }
        stand_in = self.put(tensor) if self.put is not None else None
        return _inline(tensor.detach()) if stand_in is None else {TAG: "ref", "v": stand_in}

    def array(self, array: np.ndarray[Any, Any], where: Where) -> Any:
        self.check_array(array, where)
        order: Any = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        return {
            TAG: "array",
            "t": array.dtype.str,
            "s": list(array.shape),
            "b": array.tobytes(order),
            "o": order,
        }

    def scalar(self, value: np.generic) -> Any:
        name = SCALAR_NAMES[type(value)]
        if isinstance(value, np.str_):
            text = str.__str__(value)  # str(value) would cut zeros off its end
            return {TAG: "scalar", "t": name, "v": self.walk(text, None, 0)}
        if isinstance(value, np.bytes_):
            return {TAG: "scalar", "t": name, "v": bytes(value)}
        return {TAG: "scalar", "t": name, "b": value.tobytes()}


def _inline(tensor: torch.Tensor) -> dict[str, Any]:
    """Return a dense tensor with its bytes."""
    tensor = tensor.resolve_conj().resolve_neg().cpu()
    shape, strides = list(tensor.shape), list(tensor.stride())
    if not is_dense(shape, strides):
        tensor = tensor.clone()
        strides = list(tensor.stride())
    content = memory(tensor).tobytes() if tensor.numel() else b""
    plain = {TAG: "tensor", "t": TENSOR_DTYPE_NAMES[tensor.dtype], "s": shape, "b": content}
    if strides != c_strides(shape):
        plain["st"] = strides
    return plain


def _can_be_map(value: dict[Any, Any]) -> bool:
    for key in value:
        if type(key) is not str or not (key.isascii() or _is_utf8(key)):
            return False
    return TAG not in value


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _int_to_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
