"""A state in shared memory, so that another process of this host can map it and take what it wants."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from everstep.errors import CorruptionError, StorageError
from everstep.fold import State
from everstep.format.documents import Manifest, StoredTensor
from everstep.memory import Bytes, dtype_name, dtype_named, plain, typed, view_bytes, with_strides
from everstep.store.bases import Slot, piece_sums

_ALIGN = 4096
_SPARE_BYTES = 64 << 20
_numbers = itertools.count()


class Arena:
    """One file in memory, filled from its beginning. What lies in it keeps its place until the arena goes."""

    def __init__(self, folder: str, num_bytes: int) -> None:
        self.path = os.path.join(folder, f"state-{os.getpid()}-{next(_numbers)}")
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.size = -(-(num_bytes + _SPARE_BYTES) // _ALIGN) * _ALIGN
        os.ftruncate(self._fd, self.size)  # takes no memory before it is used
        self.memory: Bytes = np.frombuffer(mmap.mmap(self._fd, self.size), np.uint8)
        self._start = self.memory.ctypes.data
        self.used = 0

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where a contiguous tensor lies in the file; None if it does not."""
        offset = tensor.data_ptr() - self._start
        return offset if tensor.is_contiguous() and 0 <= offset < self.size else None

    def put(self, data: Bytes) -> tuple[int, Bytes] | None:
        """Copy these bytes in; where, and the memory. None if there is no room."""
        first = -(-self.used // 64) * 64
        if first + len(data) > self.size:
            return None
        try:
            os.posix_fallocate(self._fd, first, max(len(data), 1))  # a page that is not there would kill the process later
        except OSError as e:
            raise StorageError(f"{self.path}: no shared memory left for the state: {e.strerror}") from e
        region = self.memory[first : first + len(data)]
        np.copyto(region, data)
        self.used = first + len(data)
        return first, region

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Home:
    """Keeps the tensors of a state in an arena, whatever folding makes of them."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._arena: Arena | None = None

    def settle(self, state: State) -> None:
        """Move what lies elsewhere into the arena; into a new one, if this one is full."""
        strays = [(holder, key, t) for holder, key, t in _places(state) if self._is_stray(t)]
        if not strays:
            return
        if self._arena is not None and all(self._move(*stray) for stray in strays):
            return
        old = self._arena
        everything = list(_places(state))
        # Moments that the first update will make come to some three times the parameters.
        self._arena = Arena(self._folder, 4 * sum(t.numel() * t.element_size() for _, _, t in everything))
        for place in everything:
            if not self._move(*place):
                raise AssertionError("an arena is too small for what it was made for")
        if old is not None:
            old.close()

    def _is_stray(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0 and tensor.is_contiguous() and (self._arena is None or self._arena.offset_of(tensor) is None)

    def _move(self, holder: dict[object, torch.Tensor], key: object, tensor: torch.Tensor) -> bool:
        assert self._arena is not None
        if tensor.dim() == 0 or not tensor.is_contiguous():
            return True  # handed out as a copy
        found = self._arena.put(view_bytes(tensor.detach()))
        if found is None:
            return False
        holder[key] = typed(found[1], tensor.dtype).view(tensor.shape)
        return True

    def hand_out(self, slots: list[Slot], tensors: list[torch.Tensor]) -> tuple[str, int, tuple[StoredTensor, ...]]:
        """The arena's file, its length, and where in it everything is, with its hashes."""
        arena = self._arena
        if arena is None:
            arena = self._arena = Arena(self._folder, sum(s.num_bytes for s in slots))
        mark = arena.used
        offsets = []
        for tensor in tensors:
            offset = arena.offset_of(tensor)
            if offset is None:
                found = arena.put(view_bytes(plain(tensor)))
                if found is None:
                    raise StorageError(f"{arena.path} is full")
                offset = found[0]
            offsets.append(offset)

        def stored(index: int) -> StoredTensor:
            slot = slots[index]
            data = arena.memory[offsets[index] : offsets[index] + slot.num_bytes]
            sums = piece_sums(data, slot.uid, slot.dtype.itemsize)
            return StoredTensor(
                slot.uid, slot.role, slot.key, dtype_name(slot.dtype), slot.shape, offsets[index], slot.num_bytes, sums,
                slot.strides,
            )  # fmt: skip

        with ThreadPoolExecutor(os.cpu_count() or 1, "everstep-sum") as pool:
            found_all = tuple(pool.map(stored, range(len(slots))))
        arena.used = mark  # the copies may be overwritten at the next handing out
        return arena.path, arena.size, found_all

    def bytes_of(self, stored: StoredTensor) -> Bytes:
        """Where a tensor that was handed out lies."""
        assert self._arena is not None
        return self._arena.memory[stored.offset : stored.offset + stored.num_bytes]

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
        self._arena = None


def _places(state: State) -> Iterator[tuple[dict[object, torch.Tensor], object, torch.Tensor]]:
    """Every dense tensor of a state and the dict that holds it."""
    holders: list[dict[object, torch.Tensor]] = [state.tensors, state.carried]  # type: ignore[list-item]
    for optimizer in state.optimizers.values():
        holders += optimizer.state.values()  # type: ignore[arg-type]
    for holder in holders:
        for key, value in list(holder.items()):
            if isinstance(value, torch.Tensor) and not value.is_sparse:
                yield holder, key, value


def take(manifest: Manifest, memory: Bytes, *, is_mine: bool) -> list[torch.Tensor]:
    """The tensors of a state that was handed out, every piece verified.

    Where the memory is not this process's own, all but parameters (which are copied into the model's) are copied out of it.
    """

    def check(stored: StoredTensor) -> torch.Tensor:
        data = memory[stored.offset : stored.offset + stored.num_bytes]
        dtype = dtype_named(stored.dtype)
        if len(data) != stored.num_bytes or piece_sums(data, stored.uid, dtype.itemsize) != stored.sums:
            raise CorruptionError(f"step {manifest.step}: {stored.key}, as the shadow handed it out, has another checksum")
        flat = typed(data, dtype)
        return with_strides(flat if is_mine or stored.role == "param" else flat.clone(), stored.shape, stored.strides)

    with ThreadPoolExecutor(os.cpu_count() or 1, "everstep-take") as pool:
        return list(pool.map(check, manifest.tensors))

