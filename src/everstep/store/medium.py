"""Where a pool is: its file as memory, and what makes that durable.

    Mapped    the file mapped; msync. In memory (tmpfs) nothing survives the host, and is_durable says so
    Pmem      persistent memory, mapped and flushed by libpmem
    Synced    an ordinary disk: memory of our own, written in few large requests, fdatasync
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from everstep.errors import UsageError
from everstep.format.pool import BLOCK, Geometry, blocks
from everstep.memory import Bytes, new_pages
from everstep.store import files


class Medium(ABC):
    """The new file of a pool, with a temporary name until publish(). One thread at a time."""

    is_durable: bool
    """Whether what was persisted survives the host."""

    @abstractmethod
    def memory(self, offset: int, num_bytes: int) -> Bytes:
        """Memory for these bytes of the file (of one slot, or before all slots), to be filled and then told by wrote()."""

    @abstractmethod
    def wrote(self, offset: int, num_bytes: int) -> None:
        """These bytes have been filled. They may reach the file from now on, in any order, or before."""

    @abstractmethod
    def persist(self, offset: int, num_bytes: int) -> None:
        """Return when these bytes, as they are in memory(), are on stable storage; StorageError if they may not be."""

    @abstractmethod
    def publish(self) -> None:
        """What was persisted stays; then the file's own name, durable on return."""

    @abstractmethod
    def check_still_there(self) -> None:
        """StorageError if the file's own name no longer leads to it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file; one that was not published is removed."""


_PACED_BYTES = 4 << 20
MakeMedium: TypeAlias = Callable[[str, Geometry], Medium]
"""(path, geometry) -> medium: the classes below are such."""


class Mapped(Medium):
    """Written straight into the file's pages."""

    def __init__(self, path: str, geometry: Geometry) -> None:
        self.is_durable = not files.is_in_memory(os.path.dirname(path))
        self._file = self._make(path, geometry.num_bytes)
        if not self.is_durable:
            self._file.populate()

    def _make(self, path: str, num_bytes: int) -> files.MappedFile:
        return files.MappedFile(path, num_bytes)

    def memory(self, offset: int, num_bytes: int) -> Bytes:
        return self._file.memory[offset : offset + num_bytes]

    def wrote(self, offset: int, num_bytes: int) -> None:
        self._file.wrote(offset, num_bytes)

    def persist(self, offset: int, num_bytes: int) -> None:
        """On a medium that is not durable this asks the system to, which does nothing."""
        self._file.sync_range(offset, num_bytes)

    def publish(self) -> None:
        self._file.publish()

    def check_still_there(self) -> None:
        self._file.check_still_there()

    def close(self) -> None:
        self._file.close()


class Synced(Medium):
    """Memory for the slot that is being written, and for all that is not a slot; persist() writes it to the disk."""

    def __init__(self, path: str, geometry: Geometry, *, pace: Callable[[int], float] | None = None) -> None:
        """`pace`: so many bytes have been written: how many seconds to wait before more are."""
        self.is_durable = not files.is_in_memory(os.path.dirname(path))
        self._geometry = geometry
        self._pace = pace
        self._file = files.Preallocated(path, geometry.num_bytes, direct=files.supports_direct(os.path.dirname(path)))
        self._head: Bytes = new_pages(geometry.data_offset)
        self._slot: Bytes = new_pages(geometry.slot_bytes)

    def memory(self, offset: int, num_bytes: int) -> Bytes:
        """One slot's at a time: another slot's overwrites it."""
        if offset < self._geometry.data_offset:
            return self._head[offset : offset + num_bytes]
        first = (offset - self._geometry.data_offset) % self._geometry.slot_bytes
        return self._slot[first : first + num_bytes]

    def wrote(self, offset: int, num_bytes: int) -> None: ...

    def persist(self, offset: int, num_bytes: int) -> None:
        first = offset // BLOCK * BLOCK
        data = self.memory(first, blocks(offset + num_bytes) - first)
        step = len(data) if self._pace is None else _PACED_BYTES
        for done in range(0, len(data), step):
            part = data[done : done + step]
            self._file.write(first + done, part)
            if self._pace is not None:
                time.sleep(self._pace(len(part)))
        self._file.sync()

    def publish(self) -> None:
        self._file.publish()

    def check_still_there(self) -> None:
        self._file.check_still_there()

    def close(self) -> None:
        self._file.close()
        self._head = self._slot = np.empty(0, np.uint8)


class _PmemFile(files.MappedFile):
    def __init__(self, path: str, num_bytes: int, library: Any) -> None:
        self._library = library
        super().__init__(path, num_bytes)

    def _map(self) -> Bytes:
        return _map_pmem(self._library, self.path, self.num_bytes, 0)

    def _flush(self, first: int, num_bytes: int) -> None:
        self._library.pmem_persist(self.memory.ctypes.data + first, num_bytes)


class Pmem(Mapped):
    """Persistent memory (a file system with DAX): stores, and libpmem to flush them out of the processor's caches."""

    def __init__(self, path: str, geometry: Geometry, *, library: Any) -> None:
        self._library = library
        super().__init__(path, geometry)
        self.is_durable = True

    def _make(self, path: str, num_bytes: int) -> files.MappedFile:
        return _PmemFile(path, num_bytes, self._library)


_FILE_CREATE, _FILE_TMPFILE = 1, 8


def _map_pmem(library: Any, path: str, num_bytes: int, flags: int) -> Bytes:
    """A file mapped by libpmem, which only believes in mappings of its own; OSError if it is not persistent memory."""
    mapped_bytes, is_pmem = ctypes.c_size_t(), ctypes.c_int()
    address = library.pmem_map_file(
        os.fsencode(path), num_bytes if flags else 0, flags, 0o600, ctypes.byref(mapped_bytes), ctypes.byref(is_pmem)
    )
    if not address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    pages = (ctypes.c_char * mapped_bytes.value).from_address(address)
    # When the last view is gone; not at exit, when threads may still look at it.
    weakref.finalize(pages, library.pmem_unmap, address, mapped_bytes.value).atexit = False
    if mapped_bytes.value != num_bytes or not library.pmem_is_pmem(address, num_bytes):
        raise OSError(errno.ENODEV, "not persistent memory")
    return np.frombuffer(pages, np.uint8)


@functools.cache
def load_pmem() -> Any:
    """libpmem (of PMDK), None if this system has none."""
    try:
        library = ctypes.CDLL("libpmem.so.1", use_errno=True)
    except OSError:
        return None
    size, address = ctypes.c_size_t, ctypes.c_void_p
    library.pmem_map_file.restype = address
    library.pmem_map_file.argtypes = [ctypes.c_char_p, size, ctypes.c_int, ctypes.c_uint, address, address]
    library.pmem_persist.restype = None
    for function in (library.pmem_persist, library.pmem_unmap, library.pmem_is_pmem):
        function.argtypes = [address, size]
    return library


def is_pmem(folder: str, library: Any) -> bool:
    """Whether files in this folder are in persistent memory, as libpmem says. Leaves nothing behind."""
    try:
        _map_pmem(library, folder, BLOCK, _FILE_CREATE | _FILE_TMPFILE)
    except OSError:
        return False
    return True


def medium_for(folder: str, mode: str | None = None) -> MakeMedium:
    """What fits a pool in this folder. `direct` and `staged` are written in place, `disk` from memory of our own.

    Without a mode: in place where that is memory, persistent or not; else `disk`.
    """
    if mode not in (None, "direct", "staged", "disk"):
        raise UsageError(f'pool_mode is "direct", "staged" or "disk", not {mode!r}')
    if mode == "disk":
        return Synced
    library = load_pmem()
    if library is not None and is_pmem(folder, library):
        return functools.partial(Pmem, library=library)
    return Synced if mode is None and not files.is_in_memory(folder) else Mapped
