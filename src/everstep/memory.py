"""Tensors as bytes and back, without copies where memory allows it.

All bytes that Everstep stores are little-endian and in *logical row-major order*, whatever the strides of the
tensor they came from; strides are kept beside them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from everstep.errors import CorruptionError

Bytes = npt.NDArray[np.uint8]
_PAGE = 4096
ALIGNMENT = 64

if sys.byteorder != "little":  # pragma: no cover - no such machine is supported by torch wheels
    raise ImportError("everstep stores little-endian bytes and runs on little-endian machines only")

# Numbers on disk: never renumber, only append.
_DTYPES: dict[int, str] = {
    1: "float32",
    2: "float64",
    3: "float16",
    4: "bfloat16",
    5: "int8",
    6: "uint8",
    7: "int16",
    8: "int32",
    9: "int64",
    10: "bool",
    11: "complex64",
    12: "complex128",
    13: "uint16",
    14: "uint32",
    15: "uint64",
    16: "float8_e4m3fn",
    17: "float8_e5m2",
    18: "complex32",
    19: "float8_e4m3fnuz",
    20: "float8_e5m2fnuz",
    21: "float8_e8m0fnu",
}
DTYPE_BY_CODE: dict[int, torch.dtype] = {c: getattr(torch, n) for c, n in _DTYPES.items() if hasattr(torch, n)}
CODE_BY_DTYPE: dict[torch.dtype, int] = {d: c for c, d in DTYPE_BY_CODE.items()}

_DTYPE_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in CODE_BY_DTYPE}


def dtype_of(code: int) -> torch.dtype:
    """The torch dtype with this number on disk."""
    try:
        return DTYPE_BY_CODE[code]
    except KeyError:
        raise CorruptionError(f"unknown dtype number {code}; written by a newer version?") from None


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The inverse of dtype_name, for known dtypes only."""
    try:
        return _DTYPE_BY_NAME[name]
    except KeyError:
        raise CorruptionError(f"unknown dtype {name!r}; written by a newer version?") from None


def view_bytes(tensor: torch.Tensor, *, keep_alive: bool = True) -> Bytes:
    """The memory of a contiguous CPU tensor as bytes, uncopied. The view keeps the tensor alive, if asked."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return np.empty(0, np.uint8)
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise AssertionError("view_bytes wants a contiguous CPU tensor")
    memory: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
    if keep_alive:
        memory.owner = tensor
    return np.frombuffer(memory, np.uint8)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes can be looked at where they are: it is a dense CPU tensor, contiguous, of ordinary bits."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_neg():
        return False
    return not (tensor.dtype.is_complex and tensor.is_conj())  # each of these calls lets go of the interpreter


def is_aligned(raw: Bytes) -> bool:
    """Whether these bytes begin where torch would have put them: some kernels give other bits elsewhere."""
    return bool(raw.ctypes.data % ALIGNMENT == 0)


def typed(raw: Bytes, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as a 1-D tensor; uncopied if they are aligned."""
    if not len(raw):
        return torch.empty(0, dtype=dtype)  # numpy's strides of nothing are no tensor's
    tensor = torch.from_numpy(raw)
    return (tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()).view(dtype)


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements of a contiguous tensor in a storage that has no others (uncopied if they are aligned): what is saved
    of a tensor is its storage."""
    return typed(view_bytes(tensor), tensor.dtype).view(tensor.shape)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is a contiguous dense CPU tensor with ordinary bits, else such a copy."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def empty_bytes(num_bytes: int) -> tuple[torch.Tensor, Bytes]:
    """New memory, 64-byte aligned, as a uint8 tensor and as its numpy view."""
    tensor = torch.empty(num_bytes, dtype=torch.uint8)
    return tensor, tensor.numpy()


HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def new_pages(num_bytes: int) -> Bytes:
    """New zeroed memory that starts at a page, as O_DIRECT wants; in huge pages where it is large and the system can.

    (Then it costs few page faults, and the disk is asked for it in few large requests.) It goes when the last view does.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if num_bytes < HUGE_BYTES:
        return np.frombuffer(mmap.mmap(-1, max(num_bytes, 1), flags=flags), np.uint8)[:num_bytes]
    pages = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    first = -memory.ctypes.data % HUGE_BYTES
    return memory[first : first + num_bytes]


class _Mapping:
    """Memory of this process that goes with this object."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address, self.num_bytes = address, num_bytes

    def __del__(self, unmap: Any = _libc.munmap) -> None:  # when the interpreter ends, the module may be gone first
        unmap(self.address, self.num_bytes)


def map_shared(fd: int, num_bytes: int) -> Bytes:
    """A file in memory, where the system can have it in huge pages: mmap.mmap() does not say where. It goes when the last
    view does. An OSError if that cannot be had."""
    reserved = _libc.mmap(None, num_bytes + HUGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "memory cannot be mapped")
    whole = _Mapping(reserved, num_bytes + HUGE_BYTES)
    first = -(-reserved // HUGE_BYTES) * HUGE_BYTES
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(first, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "memory cannot be mapped")
    memory: Any = (ctypes.c_char * num_bytes).from_address(first)
    memory.owner = whole
    return np.frombuffer(memory, np.uint8)


def make_huge(memory: Bytes) -> bool:
    """Have the pages of a mapping put together to huge ones: who reads the file then takes half the time. This takes as long
    as copying them twice. False, and nothing has changed, where the system cannot do it, or not now."""
    address = ctypes.c_void_p(memory.ctypes.data)
    return bool(_libc.madvise(address, ctypes.c_size_t(len(memory)), _MADV_COLLAPSE) == 0)


class NewMemory:
    """New zeroed memory for tensors that live about as long as each other, in huge pages where the system has them.

    Each tensor has a storage of its own; memory goes when the last tensor in its block of 32 MB does.
    """

    _BLOCK_BYTES = 32 << 20

    def __init__(self) -> None:
        self._left: Bytes = np.empty(0, np.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes > self._BLOCK_BYTES:
            return typed(new_pages(num_bytes), dtype).view(shape)
        if num_bytes > len(self._left):
            self._left = new_pages(self._BLOCK_BYTES)  # what was left of the last one has never been touched
        raw, self._left = self._left[:num_bytes], self._left[-(-num_bytes // ALIGNMENT) * ALIGNMENT :]
        return typed(raw, dtype).view(shape)


_ALONE_BYTES = 1 << 20
_AT_ONCE_BYTES = 4 << 20


def copy_all(copies: Sequence[tuple[torch.Tensor, torch.Tensor]], num_workers: int) -> None:
    """Copy the second of each pair into the first, by so many threads: pages that are new are then theirs to touch."""
    if num_workers == 1 or sum(into.nbytes for into, _ in copies) <= _ALONE_BYTES:
        for into, value in copies:
            into.copy_(value)
        return
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for into, value in copies:
        count = -(-into.nbytes // _AT_ONCE_BYTES) if into.dim() else 1
        parts += zip(into.chunk(count), value.chunk(count), strict=True) if count > 1 else [(into, value)]
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(num_workers, "everstep-copy", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(lambda part: part[0].copy_(part[1]), parts))
    finally:
        torch.set_num_threads(before)


class Scratch:
    """Page-aligned memory that is handed out in parts and reused as a whole."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)
        self._used = 0
        self._wanted = 0

    def reset(self) -> None:
        """Everything handed out may be overwritten from now on."""
        if self._wanted > len(self._memory):
            # The old one lives on while anyone uses it.
            self._memory = new_pages(-(-self._wanted // HUGE_BYTES) * HUGE_BYTES)
        self._used = self._wanted = 0

    def take(self, num_bytes: int) -> Bytes:
        """num_bytes and two pages, aligned to a page; new memory if what is there does not suffice yet."""
        size = (num_bytes // _PAGE + 3) * _PAGE
        self._wanted += size
        if not len(self._memory):  # who takes much takes more of it
            self._memory = new_pages(size if size < HUGE_BYTES >> 3 else max(-(-size // HUGE_BYTES), 2) * HUGE_BYTES)
        if self._used + size > len(self._memory):
            return new_pages(size)
        part = self._memory[self._used : self._used + size]
        self._used += size
        return part


def strides_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """None for a contiguous tensor, and for one whose elements share memory (it comes back dense), else its strides."""
    if tensor.is_contiguous() or any(st == 0 and n > 1 for st, n in zip(tensor.stride(), tensor.shape, strict=True)):
        return None
    return tuple(tensor.stride())


def with_strides(flat: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> torch.Tensor:
    """The logical elements in `flat` as a tensor of this shape; a copy if it has strides of its own."""
    dense = flat.reshape(shape)
    if strides is None:
        return dense
    out = torch.empty_strided(shape, strides, dtype=flat.dtype)
    out.copy_(dense)
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors have the same dtype, shape and bits (NaNs equal by payload, -0.0 is not 0.0)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(torch.equal(view_as_bits(a), view_as_bits(b)))


def view_as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, as a flat one: its own memory where it is a plain one."""
    return torch.from_numpy(view_bytes(plain(tensor)))
