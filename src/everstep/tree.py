"""Nested state of schedulers, samplers and optimizers <-> plain values that MessagePack can hold. No pickle.

`pack` makes plain values, `unpack` brings the originals back with their types and bits, `freeze` copies a
state so that another thread may pack it later. What they know is listed here; all else is refused, by path.

Plain are None, bool, float, str, bytes, int of 64 bits, list and dict with str keys: each stands for itself.
Everything else is a dict with the key "$", which says what it is; a user's own dict with such a key is
written as pairs. Shapes and strides are lists of int, in elements; numbers are little-endian.

    {"$": "int", "v": bytes}                        int beyond 64 bits, two's complement
    {"$": "str", "v": bytes}                        str with lone surrogates, as UTF-8 would write them
    {"$": "complex", "v": [real, imag]}
    {"$": "tuple" | "size", "v": [item, ...]}
    {"$": "dict" | "counter" | "ordered", "v": [key, value, key, value, ...]}
    {"$": "default", "v": [key, value, ...], "f": name of the default factory, or None}
    {"$": "dtype" | "device", "v": name}            of torch
    {"$": "tensor", "t": dtype, "s": shape, "b": bytes in the order of memory}
                                                    and "st": strides, unless they are those of C
    {"$": "ref", "v": anything}                     a tensor that is stored elsewhere, by what `put` returned
    {"$": "coo", "s": shape, "c": is_coalesced, "i": tensor, "v": tensor}
    {"$": "array", "t": numpy dtype, "s": shape, "b": bytes, "o": "C" | "F"}
    {"$": "scalar", "t": numpy type, "b": bytes}    str_ and bytes_ have "v": str or bytes instead of "b"

Tensors come back on the CPU, as plain tensors that need no gradient. A view with gaps or overlaps comes back
dense, as clone() would make it. Objects that were shared come back apart.
"""

from __future__ import annotations

import base64
import collections
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

import msgspec
import numpy as np
import torch

from everstep.errors import CorruptionError, UnsupportedValueError

__all__ = ["freeze", "from_text", "pack", "plain_from_text", "plain_to_text", "to_text", "unpack"]

_Where: TypeAlias = "tuple[_Where, str | int] | None"
"""The keys down to a value, innermost first; made into text only when something is refused."""

_TAG = "$"
_MAX_DEPTH = 64
_MAX_AXES = 64
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1

_DTYPES = {
    str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if type(kind) is torch.dtype
}
_TENSOR_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|float(8_\w+|16|32|64)|bfloat16|complex(32|64|128)")
_TENSOR_DTYPES = {name: kind for name, kind in _DTYPES.items() if _TENSOR_DTYPE.fullmatch(name)}
_TENSOR_DTYPE_NAMES = {kind: name for name, kind in _TENSOR_DTYPES.items()}

# numpy has types of the same size that are not the same type (int64 and longlong): names tell them apart.
_SCALARS: dict[str, type[np.generic]] = {
    **{f"{sign}int{bits}": getattr(np, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{name: getattr(np, name) for name in ("intc", "uintc", "longlong", "ulonglong", "bool_", "float16")},
    **{name: getattr(np, name) for name in ("float32", "float64", "longdouble", "complex64", "complex128")},
    **{name: getattr(np, name) for name in ("clongdouble", "str_", "bytes_")},
}
_SCALAR_NAMES = {kind: name for name, kind in reversed(_SCALARS.items())}
_ARRAY_KINDS = "biufcSU"
_ARRAY_DTYPE = re.compile(rf"[<>|][{_ARRAY_KINDS}][1-9][0-9]{{0,8}}")

_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (int, float, str, list, dict, tuple, bool, bytes)
}
_MAPPING_TAGS: dict[type, str] = {
    dict: "dict",
    collections.Counter: "counter",
    collections.OrderedDict: "ordered",
    collections.defaultdict: "default",
}
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_SELF_EVIDENT = frozenset({type(None), bool, float, bytes})
_UNCHANGING = frozenset(
    {*_SELF_EVIDENT, int, complex, str, *_SCALAR_NAMES, torch.dtype, torch.device, torch.Size}
)

_ADVICE = (
    "Give it as tensors, numpy arrays, numbers, strings, bytes, None, lists, tuples, or dicts with str or "
    "int keys, or leave it out of the state"
)


def pack(value: Any, put: Callable[[torch.Tensor], Any] | None = None, *, path: str = "") -> Any:
    """Return `value` as plain values, which msgspec.msgpack encodes and `unpack` turns back.

    `put` is offered each dense tensor, the original object, and may store it elsewhere and return a plain
    value that stands for it; None has the tensor inlined. Raises UnsupportedValueError that names the path,
    below `path`, and the type of what cannot be stored. The result shares no memory that can change.
    """
    return _Packer(path, put).walk(value, None, 0)


def unpack(plain: Any, get: Callable[[Any], torch.Tensor] | None = None) -> Any:
    """Return what `pack` was given. `get` is handed what `put` returned, and returns the tensor.

    Raises CorruptionError for what `pack` does not write; allocates no more than `plain` has bytes for.
    """
    return _Unpacker(get).walk(plain, 0)


def freeze(value: Any, *, path: str = "") -> Any:
    """Return a deep copy that nobody else changes: tensors and arrays cloned, containers copied.

    Refuses what `pack` refuses. Parameters become plain tensors; tensors stay on their device.
    """
    return _Freezer(path).walk(value, None, 0)


def to_text(value: Any, *, path: str = "") -> str:
    """pack as text for JSON documents: base64 of MessagePack."""
    return base64.b64encode(msgspec.msgpack.encode(pack(value, path=path))).decode()


def from_text(text: str) -> Any:
    """The inverse of to_text."""
    return unpack(plain_from_text(text))


def plain_to_text(plain: Any) -> str:
    """Packed values as text."""
    return base64.b64encode(msgspec.msgpack.encode(plain)).decode()


def plain_from_text(text: str) -> Any:
    """The packed values in a text."""
    try:
        return msgspec.msgpack.decode(base64.b64decode(text, validate=True))
    except (ValueError, msgspec.MsgspecError) as e:
        raise CorruptionError(f"packed values cannot be decoded: {e}") from e


class _Walker:
    """Goes through a nested value, knows where it is, and refuses what cannot be stored."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.open_ids: set[int] = set()

    def walk(self, value: Any, where: _Where, depth: int) -> Any:
        raise NotImplementedError

    def enter(self, value: Any, where: _Where, depth: int) -> None:
        """Note that a container is open; refuse it when it is within itself or too deep."""
        if id(value) in self.open_ids:
            self.refuse(value, where, "it contains itself")
        if depth > _MAX_DEPTH:
            self.refuse(value, where, f"it is nested more than {_MAX_DEPTH} levels deep")
        self.open_ids.add(id(value))

    def leave(self, value: Any) -> None:
        self.open_ids.discard(id(value))

    def items(self, value: Iterable[Any], where: _Where, depth: int) -> list[Any]:
        """Return what becomes of the items of an open sequence."""
        walk, below = self.walk, depth + 1
        return [
            item if type(item) in _SELF_EVIDENT else walk(item, (where, index), below)
            for index, item in enumerate(value)
        ]

    def check_keys(self, value: Mapping[Any, Any], where: _Where) -> None:
        for key in value:
            if type(key) is not str and type(key) is not int:
                self.refuse(value, where, f"one of its keys is a {_type_name(key)}, not a str or an int")

    def factory_name(self, value: Any, where: _Where) -> str | None:
        """Return the name of a defaultdict's factory; None for none."""
        if value.default_factory is None:
            return None
        for name, factory in _FACTORIES.items():
            if value.default_factory is factory:
                return name
        self.refuse(value, where, f"its default_factory is not one of {', '.join(_FACTORIES)}")

    def check_tensor(self, tensor: torch.Tensor, where: _Where) -> None:
        if tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo):
            self.refuse(tensor, where, f"it is {'nested' if tensor.is_nested else tensor.layout}")
        if tensor.dtype not in _TENSOR_DTYPE_NAMES:
            self.refuse(tensor, where, f"its dtype is {tensor.dtype}")
        if tensor.is_meta:
            self.refuse(tensor, where, "it is on the meta device and has no values")
        if any(getattr(tensor, "names", ())):  # newer versions of torch have none
            self.refuse(tensor, where, "its dimensions are named")
        if tensor.dim() > _MAX_AXES:
            self.refuse(tensor, where, f"it has more than {_MAX_AXES} dimensions")

    def check_array(self, array: np.ndarray[Any, Any], where: _Where) -> None:
        if array.dtype.kind not in _ARRAY_KINDS or array.dtype.itemsize == 0:
            self.refuse(array, where, f"its dtype is {array.dtype}")

    def refuse(self, value: Any, where: _Where, why: str = "") -> NoReturn:
        steps: list[str] = []
        while where is not None:
            where, key = where
            if isinstance(key, str):
                steps.append(f".{key}" if key.isidentifier() else f"[{key!r:.60}]")
            else:
                steps.append(f"[{key}]" if _MIN_INT <= key <= _MAX_INT else "[a long int]")
        path = (self.path + "".join(reversed(steps))).removeprefix(".") or "the state itself"
        reason = f" because {why}" if why else ""
        raise UnsupportedValueError(f"{path}: cannot store this {_type_name(value)}{reason}. {_ADVICE}.")


class _Packer(_Walker):
    def __init__(self, path: str, put: Callable[[torch.Tensor], Any] | None) -> None:
        super().__init__(path)
        self.put = put

    def walk(self, value: Any, where: _Where, depth: int) -> Any:
        kind = type(value)
        if kind in _SELF_EVIDENT:
            return value
        if kind is int:
            return value if _MIN_INT <= value <= _MAX_INT else {_TAG: "int", "v": _int_to_bytes(value)}
        if kind is str:
            return value if _is_utf8(value) else {_TAG: "str", "v": value.encode("utf-8", "surrogatepass")}
        if kind in _TENSORS:
            return self.tensor(value, where)
        if kind is list or kind is tuple:
            return self.sequence(value, where, depth)
        if kind in _MAPPING_TAGS:
            return self.mapping(value, where, depth)
        if kind is np.ndarray:
            return self.array(value, where)
        if kind in _SCALAR_NAMES:
            return self.scalar(value)
        if kind is complex:
            return {_TAG: "complex", "v": [value.real, value.imag]}
        if kind is torch.Size:
            return {_TAG: "size", "v": list(value)}
        if kind is torch.dtype:
            return {_TAG: "dtype", "v": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {_TAG: "device", "v": str(value)}
        self.refuse(value, where)

    def sequence(self, value: Any, where: _Where, depth: int) -> Any:
        self.enter(value, where, depth)
        items = self.items(value, where, depth)
        self.leave(value)
        return items if type(value) is list else {_TAG: "tuple", "v": items}

    def mapping(self, value: Any, where: _Where, depth: int) -> Any:
        self.enter(value, where, depth)
        walk, below = self.walk, depth + 1
        if type(value) is dict and _can_be_map(value):
            plain = {
                key: item if type(item) in _SELF_EVIDENT else walk(item, (where, key), below)
                for key, item in value.items()
            }
        else:
            self.check_keys(value, where)
            pairs: list[Any] = []
            for key, item in value.items():
                pairs += (walk(key, where, below), walk(item, (where, key), below))
            plain = {_TAG: _MAPPING_TAGS[type(value)], "v": pairs}
            if type(value) is collections.defaultdict:
                plain["f"] = self.factory_name(value, where)
        self.leave(value)
        return plain

    def tensor(self, tensor: torch.Tensor, where: _Where) -> Any:
        self.check_tensor(tensor, where)
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.detach()
            return {
                _TAG: "coo",
                "s": list(tensor.shape),
                "c": tensor.is_coalesced(),
                "i": _inline(tensor._indices()),
                "v": _inline(tensor._values()),
            }
        stand_in = self.put(tensor) if self.put is not None else None
        return _inline(tensor.detach()) if stand_in is None else {_TAG: "ref", "v": stand_in}

    def array(self, array: np.ndarray[Any, Any], where: _Where) -> Any:
        self.check_array(array, where)
        order: Any = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        return {
            _TAG: "array",
            "t": array.dtype.str,
            "s": list(array.shape),
            "b": array.tobytes(order),
            "o": order,
        }

    def scalar(self, value: np.generic) -> Any:
        name = _SCALAR_NAMES[type(value)]
        if isinstance(value, np.str_):
            text = str.__str__(value)  # str(value) would cut zeros off its end
            return {_TAG: "scalar", "t": name, "v": self.walk(text, None, 0)}
        if isinstance(value, np.bytes_):
            return {_TAG: "scalar", "t": name, "v": bytes(value)}
        return {_TAG: "scalar", "t": name, "b": value.tobytes()}


class _Freezer(_Walker):
    def walk(self, value: Any, where: _Where, depth: int) -> Any:
        kind = type(value)
        if kind in _UNCHANGING:
            return value
        if kind in _TENSORS:
            self.check_tensor(value, where)
            return value.detach().clone()
        if kind is np.ndarray:
            self.check_array(value, where)
            return value.copy(order="K")
        if kind is list or kind is tuple or kind in _MAPPING_TAGS:
            self.enter(value, where, depth)
            copy = self.container(value, where, depth)
            self.leave(value)
            return copy
        self.refuse(value, where)

    def container(self, value: Any, where: _Where, depth: int) -> Any:
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


class _Unpacker:
    """Goes through plain values. Each tag has a method `make_<tag>` that takes the rest of its dict."""

    def __init__(self, get: Callable[[Any], torch.Tensor] | None) -> None:
        self.get = get

    def walk(self, plain: Any, depth: int) -> Any:
        kind = type(plain)
        if kind in _SELF_EVIDENT or kind is int or kind is str:
            return plain
        if depth > _MAX_DEPTH + 2:  # what is in the innermost container may have parts that are tagged
            _corrupt(f"is nested more than {_MAX_DEPTH} levels deep")
        if kind is list:
            return [self.walk(item, depth + 1) for item in plain]
        if kind is not dict:
            _corrupt(f"holds a {_type_name(plain)}")
        if _TAG in plain:
            return self.tagged(plain, depth)
        for key in plain:
            if type(key) is not str:
                _corrupt(f"holds a dict with a key of type {_type_name(key)}")
        return {key: self.walk(item, depth + 1) for key, item in plain.items()}

    def tagged(self, plain: dict[Any, Any], depth: int) -> Any:
        fields = dict(plain)
        tag = _expect(fields.pop(_TAG), str)
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
            factory = _FACTORIES.get(_expect(fields["f"], str))
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
        dtype = _DTYPES.get(_expect(fields["v"], str))
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
        dtype = _TENSOR_DTYPES.get(_expect(fields["t"], str))
        if dtype is None:
            _corrupt(f"holds a tensor of {fields['t']!r:.60}, which this version of torch does not know")
        shape, content = _axes(fields["s"]), _expect(fields["b"], bytes)
        strides = _axes(fields["st"]) if "st" in fields else _c_strides(shape)
        if len(shape) != len(strides) or not _is_dense(shape, strides):
            _corrupt("holds a tensor whose strides do not fit its shape")
        _check_length(content, shape, dtype.itemsize)
        try:
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        except (RuntimeError, ValueError, OverflowError, TypeError):
            _corrupt(f"holds a tensor of a shape that torch cannot make, {shape!r:.60}")
        if content:
            _memory(tensor)[:] = np.frombuffer(content, np.uint8)
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
        if not _ARRAY_DTYPE.fullmatch(name) or order not in ("C", "F"):
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
        kind = _SCALARS.get(name)
        if kind is None or ("v" in fields) != (name in ("str_", "bytes_")) or len(fields) != 2:
            _corrupt(f"holds a numpy scalar of {name!r:.60}")
        if name == "str_":
            return np.str_(_expect(self.walk(fields["v"], depth + 1), str))
        if name == "bytes_":
            return np.bytes_(_expect(fields["v"], bytes))
        content = _expect(fields["b"], bytes)
        _check_length(content, [], np.dtype(kind).itemsize)
        return np.frombuffer(content, kind)[0]


_MAPPINGS_BY_TAG = {tag: kind for kind, tag in _MAPPING_TAGS.items()}
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


def _corrupt(what: str) -> NoReturn:
    raise CorruptionError(f"stored state {what}: it was damaged, or written by a newer version of Everstep")


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        _corrupt(f"holds a {_type_name(value)} in place of a {kind.__name__}")
    return value


def _int64s(plain: Any, least: int = 0) -> list[int]:
    """Return a list of int, such as a shape, after a check that torch can hold them."""
    numbers: list[int] = _expect(plain, list)
    if not all(type(number) is int and least <= number < 2**63 for number in numbers):
        _corrupt("holds a shape that is none")
    return numbers


def _axes(plain: Any) -> list[int]:
    """Return a shape or strides."""
    if len(_expect(plain, list)) > _MAX_AXES:
        _corrupt(f"holds a tensor or array of more than {_MAX_AXES} dimensions")
    return _int64s(plain)


def _check_length(content: bytes, shape: list[int], itemsize: int) -> None:
    expected = itemsize
    for size in shape:
        expected *= size
    if expected != len(content):
        _corrupt(f"holds {len(content)} bytes for a tensor or array of another size")


def _inline(tensor: torch.Tensor) -> dict[str, Any]:
    """Return a dense tensor with its bytes."""
    tensor = tensor.resolve_conj().resolve_neg().cpu()
    shape, strides = list(tensor.shape), list(tensor.stride())
    if not _is_dense(shape, strides):
        tensor = tensor.clone()
        strides = list(tensor.stride())
    content = _memory(tensor).tobytes() if tensor.numel() else b""
    plain = {_TAG: "tensor", "t": _TENSOR_DTYPE_NAMES[tensor.dtype], "s": shape, "b": content}
    if strides != _c_strides(shape):
        plain["st"] = strides
    return plain


def _memory(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a dense tensor on the CPU, in the order of its memory, which they share."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def _c_strides(shape: list[int]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(shape[axis], 1)
    return strides


def _is_dense(shape: list[int], strides: list[int]) -> bool:
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


def _can_be_map(value: dict[Any, Any]) -> bool:
    for key in value:
        if type(key) is not str or not (key.isascii() or _is_utf8(key)):
            return False
    return _TAG not in value


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


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
