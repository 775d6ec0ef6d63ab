"""What can be stored: the kinds of values, their names, and how large and deep they may be."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

TAG = "$"
MAX_DEPTH = 64
MAX_AXES = 64
MIN_INT, MAX_INT = -(2**63), 2**64 - 1

DTYPES = {
    str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if type(kind) is torch.dtype
}
_TENSOR_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|float(8_\w+|16|32|64)|bfloat16|complex(32|64|128)")
TENSOR_DTYPES = {name: kind for name, kind in DTYPES.items() if _TENSOR_DTYPE.fullmatch(name)}
TENSOR_DTYPE_NAMES = {kind: name for name, kind in TENSOR_DTYPES.items()}

# numpy has types of the same size that are not the same type (int64 and longlong): names tell them apart.
SCALARS: dict[str, type[np.generic]] = {
    **{f"{sign}int{bits}": getattr(np, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{name: getattr(np, name) for name in ("intc", "uintc", "longlong", "ulonglong", "bool_", "float16")},
    **{name: getattr(np, name) for name in ("float32", "float64", "longdouble", "complex64", "complex128")},
    **{name: getattr(np, name) for name in ("clongdouble", "str_", "bytes_")},
}
SCALAR_NAMES = {kind: name for name, kind in reversed(SCALARS.items())}
ARRAY_KINDS = "biufcSU"
ARRAY_DTYPE = re.compile(rf"[<>|][{ARRAY_KINDS}][1-9][0-9]{{0,8}}")

FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (int, float, str, list, dict, tuple, bool, bytes)
}
MAPPING_TAGS: dict[type, str] = {
    dict: "dict",
    collections.Counter: "counter",
    collections.OrderedDict: "ordered",
    collections.defaultdict: "default",
}
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
SELF_EVIDENT = frozenset({type(None), bool, float, bytes})


def type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
