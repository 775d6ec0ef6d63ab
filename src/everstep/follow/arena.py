"""A state in shared memory, so that another process of this host can map it and take what it wants."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import torch

from everstep.atoms import PIECE_ELEMENTS
from everstep.errors import CorruptionError, StorageError
from everstep.fold import State
from everstep.format.documents import Manifest, StoredTensor
from everstep.memory import (
    HUGE_BYTES,
    Bytes,
    dtype_name,
    dtype_named,
    make_huge,
    map_shared,
    new_pages,
    plain,
    typed,
    view_bytes,
    with_strides,
)
from everstep.store import shared
from everstep.store.bases import Slot, piece_sum, piece_sums

_ALIGN = 4096
_SPARE_BYTES = 64 << 20
_LARGE_BYTES = 1 << 20
_LEFT_FREE_BYTES = 1 << 30
_AT_ONCE_BYTES = 32 << 20
"""Whoever asks a shadow for something waits for no more than that to be put into huge pages."""
_TOUCH_BYTES = 4 << 20
_MAX_PARTS = 8
_numbers = itertools.count()


class Arena:
    """One file in memory, filled from its beginning. What lies in it keeps its place until the arena goes."""

    def __init__(self, folder: str, num_bytes: int) -> None:
        self.path = os.path.join(folder, f"state-{os.getpid()}-{next(_numbers)}")
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.size = -(-(num_bytes + _SPARE_BYTES) // _ALIGN) * _ALIGN
        os.ftruncate(self._fd, self.size)  # takes no memory before it is used
        self.memory = map_shared(self._fd, self.size)
        self._start = self.memory.ctypes.data
        self.used = 0
        self._huge = 0
        """Up to here, huge pages have been asked for."""

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where a contiguous tensor lies in the file; None if it does not."""
        offset = tensor.data_ptr() - self._start
        return offset if 0 <= offset < self.size and tensor.is_contiguous() else None

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

    @property
    def can_be_huge(self) -> bool:
        return self._huge + HUGE_BYTES <= self.used

    def make_huge(self) -> None:
        """Some more of what is there."""
        stop = min(self._huge + _AT_ONCE_BYTES, self.used // HUGE_BYTES * HUGE_BYTES)
        make_huge(self.memory[self._huge : stop])  # where that fails, pages stay as they are
        self._huge = stop

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
        self._outgrown: list[Arena] = []
        """Something of a state may still lie there: it was to be moved, and there was no memory."""

    def settle(self, state: State) -> bool:
        """Move what lies elsewhere into the arena; into a new one, if this one is full. Whether there was anything to move.
        A StorageError if there is no memory: everything is then where it was, or moved, and this can be tried again."""
        strays = [(holder, key, t) for holder, key, t in _places(state) if self._is_stray(t)]
        if strays and not (self._arena is not None and all(self._move(*stray) for stray in strays)):
            everything = list(_places(state))
            # Moments that the first update will make come to some three times the parameters.
            made = Arena(self._folder, 4 * sum(t.numel() * t.element_size() for _, _, t in everything))
            if self._arena is not None:
                self._outgrown.append(self._arena)
            self._arena = made
            for place in everything:
                if not self._move(*place):
                    raise AssertionError("an arena is too small for what it was made for")
        self._close_outgrown()
        return bool(strays)

    @property
    def can_be_huge(self) -> bool:
        """Whether there is something that could be read in less time if it were in huge pages."""
        return self._arena is not None and self._arena.can_be_huge

    def make_huge(self) -> None:
        """Put some more of it into huge pages, where the system can."""
        assert self._arena is not None
        self._arena.make_huge()

    def _close_outgrown(self) -> None:
        while self._outgrown:
            self._outgrown.pop().close()

    def _is_stray(self, tensor: torch.Tensor) -> bool:
        is_here = self._arena is not None and self._arena.offset_of(tensor) is not None
        return not is_here and tensor.dim() > 0 and tensor.is_contiguous()

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

    def has(self, stored: StoredTensor) -> bool:
        """Whether a tensor that was handed out is still what it was described as."""
        return piece_sums(self.bytes_of(stored), stored.uid, dtype_named(stored.dtype).itemsize) == stored.sums

    def close(self) -> None:
        self._close_outgrown()
        if self._arena is not None:
            self._arena.close()
        self._arena = None


class AtHand:
    """Memory that the next trainer of this host will take for its optimizer state, touched and held until it comes.

    It was the last trainer's. Left free, a hypervisor takes it back within seconds, and to touch it again takes several
    times as long as to copy into it. It is given back when somebody asks, and not held where memory is scarce. Any thread.

    What a processor gives back it has first when something is taken on it, and others go without: so each gives back a part.
    """

    def __init__(self) -> None:
        self._memory: list[Bytes] = []
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return sum(len(part) for part in self._memory)

    def hold(self, stored: Sequence[StoredTensor]) -> None:
        """As much as these come to: more than a trainer needs, since others take some of what is free, too."""
        self.give_back()
        num_bytes = sum(t.num_bytes for t in stored)
        if shared.available_bytes() <= 2 * num_bytes + _LEFT_FREE_BYTES:
            return
        part_bytes = -(-num_bytes // len(_processors()))
        try:
            memory = self._memory = [new_pages(part_bytes) for _ in _processors()]
        except (OSError, MemoryError):
            return  # then there is none, and the state is what matters
        for part in memory:
            for start in range(0, part_bytes, _TOUCH_BYTES):
                if self._memory is not memory:
                    return  # somebody has come
                part[start : start + _TOUCH_BYTES : mmap.PAGESIZE] = 0

    def give_back(self) -> None:
        with self._lock:
            memory, self._memory = self._memory, []
        for processor in _processors()[: len(memory)]:
            threading.Thread(target=_drop_on, args=(processor, memory), daemon=True).start()  # needs a millisecond


def _processors() -> list[int]:
    """Some that this process may use; any one where it cannot choose."""
    return sorted(os.sched_getaffinity(0))[:_MAX_PARTS] if hasattr(os, "sched_getaffinity") else [0]


def _drop_on(processor: int, memory: list[Bytes]) -> None:
    """Let go of one of these on this processor."""
    with contextlib.suppress(OSError, AttributeError):  # then on another
        os.sched_setaffinity(0, {processor})  # of this thread alone
    memory.pop()


def _places(state: State) -> Iterator[tuple[dict[object, torch.Tensor], object, torch.Tensor]]:
    """Every dense tensor of a state and the dict that holds it."""
    holders: list[dict[object, torch.Tensor]] = [state.tensors, state.carried]  # type: ignore[list-item]
    for optimizer in state.optimizers.values():
        holders += optimizer.state.values()  # type: ignore[arg-type]
    for holder in holders:
        for key, value in list(holder.items()):
            if isinstance(value, torch.Tensor) and not value.is_sparse:
                yield holder, key, value


def take(manifest: Manifest, memory: Bytes) -> list[torch.Tensor]:
    """The tensors of a state that lies in memory of this process's own, every piece verified."""

    def check(stored: StoredTensor) -> torch.Tensor:
        data = memory[stored.offset : stored.offset + stored.num_bytes]
        dtype = dtype_named(stored.dtype)
        if len(data) != stored.num_bytes or piece_sums(data, stored.uid, dtype.itemsize) != stored.sums:
            raise _damaged(manifest, stored)
        return with_strides(typed(data, dtype), stored.shape, stored.strides)

    with ThreadPoolExecutor(os.cpu_count() or 1, "everstep-take") as pool:
        return list(pool.map(check, manifest.tensors))


class DamagedStateError(CorruptionError):
    """What a shadow has handed out is not what it said it would be."""


def _damaged(manifest: Manifest, stored: StoredTensor) -> DamagedStateError:
    return DamagedStateError(f"step {manifest.step}: {stored.key}, as the shadow handed it out, has another checksum")


_Run: TypeAlias = tuple[int, Bytes, list[tuple[int, int]]]
"""Bytes of a file that are read at once: from where, to where, and the (tensor, piece)s in them."""


class Copying:
    """A state in another process's arena on its way into this one's memory (a fold.Loading).

    `tensors` have their memory at once: parameters and buffers that of the live ones where it fits, all others new memory.
    Each piece is read into its place and verified there, while it is in the cache, on all cores: into new memory from now
    on, into live tensors only in need_all(). If that fails, live ones may have been written to.
    """

    def __init__(self, manifest: Manifest, file: str, live: Mapping[int, torch.Tensor]) -> None:
        self._manifest = manifest
        self._itemsizes = [dtype_named(stored.dtype).itemsize for stored in manifest.tensors]
        self._places: list[Bytes] = [np.empty(0, np.uint8)] * len(manifest.tensors)
        self._strided: list[tuple[torch.Tensor, torch.Tensor]] = []
        """To be copied when all is there: (into, from)."""
        self._runs: list[_Run] = []
        """To be read later."""
        self._todo: list[list[_Run]] = []
        """Being read."""
        for stored, itemsize in zip(manifest.tensors, self._itemsizes, strict=True):
            if len(stored.sums) != max(1, -(-stored.num_bytes // (PIECE_ELEMENTS * itemsize))):
                raise _damaged(manifest, stored)
        self._live = {index for index, stored in enumerate(manifest.tensors) if _fits(stored, live.get(stored.uid))}
        others = sorted(
            set(range(len(self._places))) - self._live,
            key=lambda i: (manifest.tensors[i].of_model, manifest.tensors[i].offset),
        )
        # Parameters and optimizer state in memory of their own: whoever keeps only the ones does not hold the others.
        for _, group in itertools.groupby(others, lambda i: manifest.tensors[i].of_model):
            self._place(list(group))
        self.tensors = [
            live[t.uid].detach() if i in self._live else self._tensor(i) for i, t in enumerate(manifest.tensors)
        ]
        first, self._runs = self._runs, []
        for index in self._live:
            self._places[index] = view_bytes(self.tensors[index])
            self._add_pieces(index)
        try:
            self._file = open(file, "rb", buffering=0)  # noqa: SIM115  # until all is read: see close()
        except OSError as e:
            raise DamagedStateError(f"the shadow's memory {file} cannot be opened: {e.strerror}") from e
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, "everstep-take")
        self._under_way: list[Future[None]] = []
        self._complete = False
        self._read(first)  # from here on, this thread has no processor to itself

    def _tensor(self, index: int) -> torch.Tensor:
        stored = self._manifest.tensors[index]
        flat = typed(self._places[index], dtype_named(stored.dtype))
        if stored.strides is None:
            return flat.view(stored.shape)
        strided = torch.empty_strided(stored.shape, stored.strides, dtype=flat.dtype)
        self._strided.append((strided, flat.view(stored.shape)))
        return strided

    def _place(self, indices: list[int]) -> None:
        """Memory for tensors that follow each other in the file. Small ones are read together."""
        tensors = self._manifest.tensors
        size = sum(-(-tensors[i].num_bytes // 64) * 64 for i in indices)
        memory = new_pages(max(size, 1))
        at = 0
        together: list[int] = []
        for i in indices:
            self._places[i] = memory[at : at + tensors[i].num_bytes]
            at += -(-tensors[i].num_bytes // 64) * 64
            if tensors[i].num_bytes >= _LARGE_BYTES:
                self._add_pieces(i)
                continue
            follows = together and tensors[i].offset == -(-_end(tensors[together[-1]]) // 64) * 64
            if together and (not follows or tensors[i].offset - tensors[together[0]].offset >= _LARGE_BYTES):
                self._add_run(memory, together)
                together = []
            together.append(i)
        if together:
            self._add_run(memory, together)

    def _add_run(self, memory: Bytes, indices: list[int]) -> None:
        tensors = self._manifest.tensors
        first = tensors[indices[0]].offset
        start = self._places[indices[0]].ctypes.data - memory.ctypes.data
        target = memory[start : start + _end(tensors[indices[-1]]) - first]
        self._runs.append((first, target, [(i, 0) for i in indices]))

    def _add_pieces(self, index: int) -> None:
        stored, place = self._manifest.tensors[index], self._places[index]
        step = PIECE_ELEMENTS * self._itemsizes[index]
        for piece, start in enumerate(range(0, max(len(place), 1), step)):
            self._runs.append((stored.offset + start, place[start : start + step], [(index, piece)]))

    def begin(self, tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> None:
        """All comes at once."""

    def need(self, tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> None:
        self.need_all()

    def need_all(self) -> None:
        if self._complete:
            return
        if self._file.closed and not any(done.exception() for done in self._under_way):
            raise RuntimeError("a state that was given up is asked for its values")
        try:
            if not self._file.closed:
                self._read(self._runs)
            for done in self._under_way:
                done.result()
        finally:
            self.close()
        for into, dense in self._strided:
            into.copy_(dense)
        for index in self._live:
            torch.autograd.graph.increment_version(self.tensors[index])
        self._complete = True

    def _read(self, runs: list[_Run]) -> None:
        """Begin to read these, the largest first."""
        runs.sort(key=lambda run: -len(run[1]))
        self._todo.append(runs)
        todo = iter(runs)
        self._under_way += [self._pool.submit(self._work, todo) for _ in range(os.cpu_count() or 1)]

    def _work(self, todo: Iterator[_Run]) -> None:
        for first, target, pieces in todo:
            if os.preadv(self._file.fileno(), [target], first) != len(target):
                raise _damaged(self._manifest, self._manifest.tensors[pieces[0][0]])
            for index, piece in pieces:
                stored, place = self._manifest.tensors[index], self._places[index]
                step = PIECE_ELEMENTS * self._itemsizes[index]
                part = place[piece * step : (piece + 1) * step]
                if piece_sum(part, stored.uid, piece * PIECE_ELEMENTS) != stored.sums[piece]:
                    raise _damaged(self._manifest, stored)

    def close(self) -> None:
        """Return when nothing is read any more. What has not been read by now will not be."""
        for runs in self._todo:
            runs.clear()
        self._pool.shutdown()
        self._file.close()


def _end(stored: StoredTensor) -> int:
    return stored.offset + stored.num_bytes


def _fits(stored: StoredTensor, live: torch.Tensor | None) -> bool:
    """Whether the bytes of a stored tensor are those that this one would have."""
    if live is None or not stored.of_model or stored.strides is not None:
        return False
    plain_cpu = type(live) in (torch.Tensor, torch.nn.Parameter) and live.device.type == "cpu" and live.is_contiguous()
    if not plain_cpu or live.is_conj() or live.is_neg():
        return False
    return tuple(live.shape) == tuple(stored.shape) and dtype_name(live.dtype) == stored.dtype
