"""Plain values back to nested ones, after a check of all that they hold."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from everstep.errors import CorruptionError
from everstep.tree.dense import c_strides, is_dense, memory
from everstep.tree.kinds import (
    ARRAY_DTYPE,
    DTYPES,
    FACTORIES,
    MAPPING_TAGS,
    MAX_AXES,
    MAX_DEPTH,
    SCALARS,
    SELF_EVIDENT,
    TAG,
    TENSOR_DTYPES,
    type_name,
)

_MAPPINGS_BY_TAG = {tag: kind for kind, tag in MAPPING_TAGS.items()}
_MAKERS = dict.fromkeys(_MAPPINGS_BY_TAG, "mapping")
_V: frozenset[str] = frozenset("v")
_NONE: frozenset[str] = frozenset()
_FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    **dict.fromkeys(("int", "str", "complex", "tuple", "size"), (_V, _NONE)),
    **dict.fromkeys(("dict", "counter", "ordered", "dtype", "device", "ref"), (_V, _NONE)),
    "default": (frozenset("vf"), _NONE),
    "tensor": (frozenset("tsb"), frozenset({"st"})),
    "coo": (frozenset("sciv"), _NONE),
    "array": (frozenset("tsbo"), _NONE),
    "scalar": (frozenset("t"), frozenset("bv")),
}
"""The fields that each tag has besides its own: those it must have, and those it may have."""


def unpack(plain: Any, get: Callable[[Any], torch.Tensor] | None = None) -> Any:
    """Return what `pack` was given. `get` is handed what `put` returned, and returns the tensor.

    Raises CorruptionError for what `pack` does not write; allocates no more than `plain` has bytes for.
    """
    return _Unpacker(get).walk(plain, 0)


class _Unpacker:
    """Goes through plain values. Each tag has a method `make_<tag>` that takes the rest of its dict."""

    def __init__(self, get: Callable[[Any], torch.Tensor] | None) -> None:
        self.get = get

    def walk(self, plain: Any, depth: int) -> Any:
        kind = type(plain)
        if kind in SELF_EVIDENT or kind is int or kind is str:
            return plain
        if depth > MAX_DEPTH + 2:  # what is in the innermost container may have parts that are tagged
            _corrupt(f"is nested more than {MAX_DEPTH} levels deep")
        if kind is list:
            return [self.walk(item, depth + 1) for item in plain]
        if kind is not dict:
            _corrupt(f"holds a {type_name(plain)}")
        if TAG in plain:
            return self.tagged(plain, depth)
        for key in plain:
            if type(key) is not str:
                _corrupt(f"holds a dict with a key of type {type_name(key)}")
        return {key: self.walk(item, depth + 1) for key, item in plain.items()}

    def tagged(self, plain: dict[Any, Any], depth: int) -> Any:
        fields = dict(plain)
        tag = _expect(fields.pop(TAG), str)
        if tag not in _FIELDS:
            _corrupt(f"holds the tag {tag!r:.60}, which this version of Everstep does not know")
        needed, optional = _FIELDS[tag]
        if not needed <= fields.keys() <= needed | optional:
            _corrupt(f"holds a {tag} with other fields than it has")
        return getattr(self, f"make_{_MAKERS.get(tag, tag)}")(tag, fields, depth)

    def items(self, plain: Any, depth: int) -> list[Any]:
        return [self.walk(item, depth + 1) for item in _expect(plain, list)]

    def make_int(self, tag: str, fields: dict[str, Any], depth: int) -> Any:
        return int.from_bytes(_expect(fields["v"], bytes), "little", signed=True)

    def make_str(self, tag: str, fields: dict[str, Any], depth: int) -> Any:
        try:
            return _expect(fields["v"], bytes).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            _corrupt("holds a str that is not UTF-8")

    def make_complex(self, tag: str, fields: dict[str, Any], depth: int) -> Any:
        parts = _expect(fields["v"], list)
        if len(parts) != 2:
            _corrupt(f"holds a complex number of {len(parts)} parts")
        return complex(_expect(parts[0], float), _expect(parts[1], float))

    def make_tuple(self, tag: str, fields: dict[str, Any], depth: int) -> Any:
        return tuple(self.items(fields["v"], depth))

    def make_size(self, tag: str, fields: dict[str, Any], depth: int) -> Any:
        return torch.Size(_int64s(fields["v"], least=-(2**63)))

    def make_mapping(self, tag: str, fields: dict[str, Any], depth: int) -> Any:
        made: dict[Any, Any] = _MAPPINGS_BY_TAG[tag]()
        if isinstance(made, collections.defaultdict) and fields["f"] is not None:
            factory = FACTORIES.get(_expect(fields["f"], str))
            if factory is None:
                _corrupt(f"holds a defaultdict of {fields['f']!r:.60}")
            made.default_factory = factory
        items = self.items(fields["v"], depth)
        keys, values = items[::2], items[1::2]
        if len(keys) != len(values) or not all(type(key) is str or type(key) is int for key in keys):
            _corrupt(f"holds a {tag} whose keys are not all str or int")
        for key, value in zip(keys, values, strict=True):
            made[key] = value
        if len(made) != len(keys):
            _corrupt(f"holds a {tag} with equal keys")
        return made

    def make_dtype(self, tag: str, fields: dict[str, Any], depth: int) -> Any:
        dtype = DTYPES.get(_expect(fields["v"], str))
        if dtype is None:
            _corrupt(f"holds the dtype {fields['v']!r:.60}, which this version of torch does not know")
        return dtype

    def make_device(self, tag: str, fields: dict[str, Any], depth: int) -> Any:
        name = _expect(fields["v"], str)
        try:
            return torch.device(name)
        except (RuntimeError, ValueError, OverflowError, TypeError):
            _corrupt(f"holds the device {name!r:.60}, which this version of torch does not know")

    def make_tensor(self, tag: str, fields: dict[str, Any], depth: int) -> Any:
        dtype = TENSOR_DTYPES.get(_expect(fields["t"], str))
        if dtype is None:
            _corrupt(f"holds a tensor of {fields['t']!r:.60}, which this version of torch does not know")
        shape, content = _axes(fields["s"]), _expect(fields["b"], bytes)
        strides = _axes(fields["st"]) if "st" in fields else c_strides(shape)
        if len(shape) != len(strides) or not is_dense(shape, strides):
            _corrupt("holds a tensor whose strides do not fit its shape")
        _check_length(content, shape, dtype.itemsize)
        try:
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        except (RuntimeError, ValueError, OverflowError, TypeError):
            _corrupt(f"holds a tensor of a shape that torch cannot make, {shape!r:.60}")
        if content:
            memory(tensor)[:] = np.frombuffer(content, np.uint8)
        return tensor

    def make_ref(self, tag: str, fields: dict[str, Any], depth: int) -> Any:
        if self.get is None:
            _corrupt("refers to a tensor stored elsewhere, where none were stored")
        return self.get(fields["v"])

    def make_coo(self, tag: str, fields: dict[str, Any], depth: int) -> Any:
        indices, values = (_expect(self.walk(fields[part], depth + 1), torch.Tensor) for part in "iv")
        shape, is_coalesced = _axes(fields["s"]), _expect(fields["c"], bool)
        try:
            tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
        except (RuntimeError, ValueError, OverflowError, TypeError, IndexError):
            _corrupt("holds a sparse tensor whose indices, values and shape do not fit together")
        return tensor._coalesced_(is_coalesced)

    def make_array(self, tag: str, fields: dict[str, Any], depth: int) -> Any:
        name, order = _expect(fields["t"], str), fields["o"]
        if not ARRAY_DTYPE.fullmatch(name) or order not in ("C", "F"):
            _corrupt(f"holds a numpy array of {name!r:.60}")
        shape, content = _axes(fields["s"]), _expect(fields["b"], bytes)
        try:
            dtype = np.dtype(name)
            _check_length(content, shape, dtype.itemsize)
            array = np.empty(shape, dtype, order)
        except (ValueError, TypeError, OverflowError, MemoryError):
            _corrupt(f"holds a numpy array of {name!r:.60} of a shape that numpy cannot make, {shape!r:.60}")
        if content:
            if dtype.kind == "U" and np.frombuffer(content, f"{name[0]}u4").max() > 0x10FFFF:
                _corrupt("holds a numpy array of str with characters that do not exist")
            array.reshape(-1, order=order).view(np.uint8)[:] = np.frombuffer(content, np.uint8)
        return array

    def make_scalar(self, tag: str, fields: dict[str, Any], depth: int) -> Any:
        name = _expect(fields["t"], str)
        kind = SCALARS.get(name)
        if kind is None or ("v" in fields) != (name in ("str_", "bytes_")) or len(fields) != 2:
            _corrupt(f"holds a numpy scalar of {name!r:.60}")
        if name == "str_":
            return np.str_(_expect(self.walk(fields["v"], depth + 1), str))
        if name == "bytes_":
            return np.bytes_(_expect(fields["v"], bytes))
        content = _expect(fields["b"], bytes)
        _check_length(content, [], np.dtype(kind).itemsize)
        return np.frombuffer(content, kind)[0]


def _corrupt(what: str) -> NoReturn:
    raise CorruptionError(f"stored state {what}: it was damaged, or written by a newer version of Everstep")


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        _corrupt(f"holds a {type_name(value)} in place of a {kind.__name__}")
    return value


def _int64s(plain: Any, least: int = 0) -> list[int]:
    """Return a list of int, such as a shape, after a check that torch can hold them."""
    numbers: list[int] = _expect(plain, list)
    if not all(type(number) is int and least <= number < 2**63 for number in numbers):
        _corrupt("holds a shape that is none")
    return numbers


def _axes(plain: Any) -> list[int]:
    """Return a shape or strides."""
    if len(_expect(plain, list)) > MAX_AXES:
        _corrupt(f"holds a tensor or array of more than {MAX_AXES} dimensions")
    return _int64s(plain)


def _check_length(content: bytes, shape: list[int], itemsize: int) -> None:
    expected = itemsize
    for size in shape:
        expected *= size
    if expected != len(content):
        _corrupt(f"holds {len(content)} bytes for a tensor or array of another size")
