"""Pools to test with: every element of a slot is its step, so that a mixture of two is seen."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from everstep.atoms import PIECE_ELEMENTS, Atom, Layout
from everstep.format.documents import Manifest, StoredOptimizer
from everstep.format.pool import HEADER_BYTES, SUPERBLOCK_BYTES, unpack_header, unpack_superblock
from everstep.memory import Bytes
from everstep.store.bases import BaseReader, Slot
from everstep.store.medium import MakeMedium, Mapped
from everstep.store.pool import Pool, SlotWriter, read_pool

RUN = "0123456789abcdef" * 2
LAYOUT = Layout((Atom(1, "param", "model", "w", (3,), "float32"),), (), ("model",))
SMALL = (
    Slot(1, "param", "model.w", torch.float32, (700,)),
    Slot(2, "buffer", "model.seen", torch.int64, ()),
    Slot(3, "state", "optimizer.w.empty", torch.float32, (0, 4)),
    Slot(4, "state", "optimizer.w.half", torch.bfloat16, (33, 70), (1, 33)),
)
LARGE = (
    Slot(1, "param", "model.w", torch.float32, (2 * PIECE_ELEMENTS + 77,)),
    *SMALL[1:],
    Slot(5, "state", "optimizer.w.exp_avg", torch.float32, (PIECE_ELEMENTS,)),
)
WRITTEN = (
    Slot(1, "param", "model.w", torch.float32, (200_000,)),
    Slot(2, "state", "optimizer.w.half", torch.bfloat16, (70_001,)),
    Slot(3, "buffer", "model.seen", torch.int64, (30_000,)),
)


def create(
    folder: str, name: str = "pool", *, run: str = RUN, layout: Layout = LAYOUT, slots: Sequence[Slot] = SMALL,
    num_slots: int = 3, medium: MakeMedium = Mapped, spare_bytes: int | None = 2000,
) -> Pool:  # fmt: skip
    return Pool.create(
        folder, name, run=run, rank=0, layout=layout, slots=slots, num_slots=num_slots, medium=medium,
        spare_bytes=spare_bytes,
    )  # fmt: skip


def of_step(slot: Slot, step: int) -> torch.Tensor:
    return torch.full(slot.shape, step, dtype=slot.dtype)


def bytes_of_step(slot: Slot, step: int) -> bytes:
    return of_step(slot, step).view(-1).view(torch.uint8).numpy().tobytes() if slot.num_bytes else b""


def fields(step: int, **others: Any) -> dict[str, Any]:
    return {
        "run": RUN, "timeline": 1, "generation": 1, "step": step, "layout": LAYOUT,
        "optimizers": (StoredOptimizer("optimizer", ((1,),), "hyper", "state"),), "cursor": b"cursor %d" % step,
        "carried": ((1, -1),), "audit": "trainer", "fingerprint": {"torch": "2"}, **others,
    }  # fmt: skip


def fill(writer: SlotWriter, slots: Sequence[Slot], step: int) -> None:
    for index in writer.order:
        writer.add(of_step(slots[index], step))


def commit(pool: Pool, step: int, slots: Sequence[Slot] = SMALL, **others: Any) -> Manifest:
    """The slot as it is read back."""
    writer = pool.begin(step)
    try:
        fill(writer, slots, step)
        writer.finish(**fields(step, **others))
    except BaseException:
        writer.abandon()
        raise
    return next(m for m in read_pool(pool.path, RUN) if m.step == step)


def read_back(folder: str, manifest: Manifest) -> list[Bytes]:
    """The bytes of every tensor of a slot, each piece verified."""
    reader = BaseReader(folder, manifest)
    try:
        reader.check()
        loading = reader.load()
        loading.need_all(2, {index: [(0, None)] for index in range(len(manifest.tensors))})
        return [t.view(torch.uint8).numpy() if t.numel() else np.empty(0, np.uint8) for t in loading.tensors]
    finally:
        reader.close()


def is_of_its_step(folder: str, manifest: Manifest, slots: Sequence[Slot] = SMALL) -> bool:
    """Whether every tensor of a slot is what was written at its step."""
    found = read_back(folder, manifest)
    return all(raw.tobytes() == bytes_of_step(slot, manifest.step) for raw, slot in zip(found, slots, strict=True))


class FakePmem:
    """What libpmem does, on ordinary files: maps, and remembers what was persisted."""

    def __init__(self, is_pmem: bool = True) -> None:
        self.is_pmem = is_pmem
        self.persisted: list[tuple[int, int]] = []
        self.maps: dict[int, tuple[Any, int]] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def pmem_map_file(self, path: bytes, num_bytes: int, flags: int, mode: int, mapped: Any, is_pmem: Any) -> int:
        fd = os.open(path, os.O_RDWR | (os.O_TMPFILE if flags else 0), mode)
        try:
            if flags:
                os.posix_fallocate(fd, 0, num_bytes)
            size = os.fstat(fd).st_size
            address = self._libc.mmap(None, size, 3, 1, fd, 0)
        finally:
            os.close(fd)
        mapped._obj.value, is_pmem._obj.value = size, self.is_pmem
        self.maps[address] = None, size
        return int(address)

    def pmem_is_pmem(self, address: int, num_bytes: int) -> int:
        return int(self.is_pmem and address in self.maps)

    def pmem_persist(self, address: int, num_bytes: int) -> None:
        assert any(first <= address and address + num_bytes <= first + size for first, (_, size) in self.maps.items())
        self.persisted.append((address, num_bytes))

    def pmem_unmap(self, address: int, num_bytes: int) -> int:
        assert self.maps.pop(address)[1] == num_bytes
        return int(self._libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)))


def wipe_headers(file: str | os.PathLike[str], keep: Collection[int] = ()) -> None:
    """Damage the headers of all slots of a pool but for those that hold these steps."""
    with open(file, "r+b") as f:
        g = unpack_superblock(f.read(SUPERBLOCK_BYTES), str(file))
        for slot in range(g.num_slots):
            f.seek(g.header_at(slot))
            header = unpack_header(g, slot, f.read(g.header_bytes), str(file))
            if header is not None and header.step not in keep:
                f.seek(g.header_at(slot))
                f.write(bytes(HEADER_BYTES))
