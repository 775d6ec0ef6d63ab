"""The log in memory: segments in a tmpfs folder of this host that outlive the trainer, not the host.

Files are mapped: what is written goes straight into them, and who reads sees it in place. A file whose frames are no longer
needed gets the name of the next segment (its old content never looks valid there), so that nothing is allocated in the
long run.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import mmap
import os
import shutil
import stat
from collections.abc import Callable, Collection

import numpy as np

from everstep.errors import StorageError, UsageError
from everstep.memory import Bytes

_GROW_BYTES = 1 << 20
_MAX_PATH_BYTES = 90
"""With the name of a socket in it, what the system takes."""
_SPARE_BYTES = 64 << 20
"""Files that were given back are kept for the next segments up to this size in all; two are kept in any case."""
SEGMENT_BYTES = 4 << 20
"""A new segment after so much: large frames have one each, and are recycled one by one."""


def shared_folder(run: str, path: str) -> str:
    """The folder in memory of the run with this id at this path (a copy of a run is another run)."""
    place = hashlib.blake2b(os.path.realpath(path).encode(), digest_size=4).hexdigest()
    return os.path.join(os.environ.get("EVERSTEP_SHARED", "/dev/shm"), f"everstep-{os.getuid()}", f"{run}-{place}")


def make_private(folder: str) -> None:
    """Make a folder that only this user can look into; UsageError if somebody else's is in the way."""
    if len(folder) > _MAX_PATH_BYTES:
        raise UsageError(f"{folder} is too long a name for the shadow's socket: set EVERSTEP_SHARED to a shorter one")
    top = os.path.dirname(os.path.dirname(folder))
    if not os.path.isdir(top):
        raise UsageError(f"mode='shadow' keeps the log in memory, and there is no {top}: set EVERSTEP_SHARED to a tmpfs")
    for each in (os.path.dirname(folder), folder):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each, 0o700)
        found = os.lstat(each)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UsageError(f"{each} is not a folder that only this user can open: remove it, or set EVERSTEP_SHARED")


def log_folder(shared: str, timeline: int, rank: int = 0) -> str:
    """Where segments of a timeline are, below a run's folder in memory."""
    return os.path.join(shared, f"log-{timeline:04d}-{rank:05d}")


def log_folders(shared: str, rank: int = 0) -> list[str]:
    """Those of one rank, of all timelines."""
    found = os.listdir(shared) if os.path.isdir(shared) else []
    return [os.path.join(shared, name) for name in found if name.startswith("log-") and name.endswith(f"-{rank:05d}")]


def remove(shared: str, ranks: Collection[int], *, everything: bool = False) -> None:
    """The logs of these ranks; and where no other is left, the run's folder."""
    for rank in ranks:
        for folder in log_folders(shared, rank):
            shutil.rmtree(folder, ignore_errors=True)
    others = [name for name in os.listdir(shared) if name.startswith("log-")] if os.path.isdir(shared) else []
    if everything or not others:
        shutil.rmtree(shared, ignore_errors=True)


def _error(op: str, path: str, e: OSError) -> StorageError:
    hint = "shared memory is full" if e.errno in (errno.ENOSPC, errno.ENOMEM) else "see the system's message"
    return StorageError(f"{op} {path}: {e.strerror or e} ({hint})")


class _File:
    """An open file in memory and its mapping."""

    def __init__(self, path: str, fd: int, *, sparse: bool) -> None:
        self.path = path
        self.fd = fd
        self.inode = os.fstat(fd).st_ino
        self.memory: Bytes = np.empty(0, np.uint8)
        self._sparse = sparse
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """What it takes of the host's memory."""
        return self._used_bytes if self._sparse else len(self.memory)

    def region(self, start: int, stop: int) -> Bytes:
        """These bytes of the file. What is not there is asked for now: a fault later would kill the process."""
        if stop > len(self.memory):
            self._grow(max(stop, 2 * len(self.memory)) if self._sparse else stop)
        if self._sparse:
            try:
                os.posix_fallocate(self.fd, start, stop - start)
            except OSError as e:
                raise _error("grow", self.path, e) from e
            self._used_bytes += stop - start
        return self.memory[start:stop]

    def _grow(self, num_bytes: int) -> None:
        """At least this large; in a sparse file that takes no memory."""
        size = -(-num_bytes // _GROW_BYTES) * _GROW_BYTES
        try:
            if self._sparse:
                os.ftruncate(self.fd, size)
            else:
                os.posix_fallocate(self.fd, 0, size)
            self.memory = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        except OSError as e:
            raise _error("grow", self.path, e) from e

    def close(self) -> None:
        self.memory = np.empty(0, np.uint8)
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class MappedAppender:
    """What files.Appender is for a disk. Nothing of it is durable; everything in it survives the process."""

    direct = False

    def __init__(self, file: _File, done: Callable[[_File], None]) -> None:
        self.path = file.path
        self._file = file
        self._done = done
        self._is_done = False
        self.offset = 0

    def reserve(self, num_bytes: int) -> Bytes:
        """The next bytes of the file, for the caller to fill before its next call."""
        region = self._file.region(self.offset, self.offset + num_bytes)
        self.offset += num_bytes
        return region

    def view(self, offset: int, num_bytes: int) -> Bytes | None:
        """Bytes that were put there, where they are."""
        return self._file.memory[offset : offset + num_bytes]

    @property
    def used_bytes(self) -> int:
        return self._file.used_bytes

    def pad(self, multiple: int) -> None:
        rest = -self.offset % multiple
        if rest:
            self.reserve(rest)[:] = 0

    def write_out(self) -> None: ...

    def sync(self) -> None: ...

    def check_still_there(self) -> None:
        """StorageError if the path no longer leads to this file."""
        try:
            same = os.stat(self.path).st_ino == self._file.inode
        except OSError as e:
            raise _error("stat", self.path, e) from e
        if not same:
            raise StorageError(f"{self.path} was replaced by another file")

    def truncate(self, offset: int) -> None:
        """Go on at `offset`. (Frames in memory are valid by their footers: nothing has to be cleared.)"""
        self.offset = offset

    def close(self, *, sync: bool = True) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Nothing more will be written."""
        if not self._is_done:
            self._is_done = True
            self._done(self._file)


class MemoryPlace:
    """Where segments of one generation are made, and given back when nobody needs their steps any more. One thread."""

    segment_bytes = SEGMENT_BYTES
    in_memory = True

    def __init__(self, folder: str, *, sparse: bool = False) -> None:
        """`sparse`: files have gaps, which take no memory. They are not used again: the next one's gaps are elsewhere."""
        self.folder = folder
        self._sparse = sparse
        make_private(os.path.dirname(folder))
        os.makedirs(folder, 0o700, exist_ok=True)
        self._full: list[_File] = []
        self._free: list[_File] = []
        self.reused = 0

    def create(self, path: str) -> MappedAppender:
        """A segment of this name: a file that was given back, or a new one."""
        if self._free:
            file = self._free.pop()
            try:
                os.rename(file.path, path)
            except OSError as e:
                file.close()
                raise _error("rename", path, e) from e
            file.path = path
            self.reused += 1
        else:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except OSError as e:
                raise _error("create", path, e) from e
            file = _File(path, fd, sparse=self._sparse)
        return MappedAppender(file, self._full.append)

    def sync_folder(self) -> None: ...

    def release(self, needed: Callable[[str], bool]) -> list[str]:
        """Take back full segments unless they are still needed; their names."""
        given_back = [file for file in self._full if not needed(file.path)]
        paths = [file.path for file in given_back]
        self._full[:] = [file for file in self._full if file not in given_back]
        self._free += given_back
        keep, spare = (0, 0) if self._sparse else (2, _SPARE_BYTES)
        while len(self._free) > keep and sum(len(file.memory) for file in self._free) > spare:
            file = self._free.pop(0)
            with contextlib.suppress(OSError):
                os.unlink(file.path)
            file.close()
        return paths

    def paths(self) -> list[str]:
        """Of the files that are here, full or given back."""
        return [file.path for file in (*self._full, *self._free)]

    def num_bytes(self) -> int:
        """Of segments that wait to be given back."""
        return sum(file.used_bytes for file in self._full)

    def close(self) -> None:
        """Let go of the mappings. Files that were given back go; full ones stay for whoever needs them."""
        for file in self._free:
            with contextlib.suppress(OSError):
                os.unlink(file.path)
        for file in (*self._free, *self._full):
            file.close()
        self._free, self._full[:] = [], []


class MappedReader:
    """What files.Reader is for a disk: bytes of a segment in memory, in place unless `copies`."""

    def __init__(self, path: str) -> None:
        self.path = path
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.inode = os.fstat(fd).st_ino
            self.num_bytes = os.fstat(fd).st_size
            # Private: whoever writes into what it was given gets a page of its own.
            self._memory: Bytes = np.frombuffer(
                mmap.mmap(fd, self.num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE), np.uint8
            ) if self.num_bytes else np.empty(0, np.uint8)
        finally:
            os.close(fd)
        self.copies = False
        """For readers that may write into what they get."""

    def read(self, offset: int, num_bytes: int) -> bytes:
        return self._memory[offset : offset + num_bytes].tobytes()

    def view(self, offset: int, num_bytes: int) -> Bytes:
        """Bytes where they are, not to be written to."""
        return self._memory[offset : offset + num_bytes]

    def read_direct(self, buffer: Bytes, offset: int, num_bytes: int) -> Bytes:
        """num_bytes from offset: where they are, or in `buffer` if `copies`."""
        found = self._memory[offset : offset + num_bytes]
        if not self.copies:
            return found
        buffer[: len(found)] = found
        return buffer[: len(found)]

    def begin_direct(self, buffer: Bytes, offset: int, num_bytes: int) -> Callable[[], Bytes]:
        return lambda: self.read_direct(buffer, offset, num_bytes)

    def close(self) -> None:
        self._memory = np.empty(0, np.uint8)


def available_bytes() -> int:
    """Memory that can be had without swapping, by this host and by the control groups that this process is in."""
    found = 1 << 62
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    found = int(line.split()[1]) * 1024
                    break
    except (OSError, ValueError):
        pass
    return min([found, *map(_left_in, _limits())])


@functools.cache
def _limits(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> tuple[tuple[str, int], ...]:
    """Control groups (version 2) that limit this process's memory, and to how much: a container's, a batch job's."""
    try:
        with open(own) as f:
            name = next((line.rstrip("\n").split(":", 2)[2] for line in f if line.startswith("0::")), None)
    except OSError:
        return ()
    found = []
    parts = [] if name is None else [part for part in name.split("/") if part]
    for depth in range(len(parts) + 1):
        folder = os.path.join(root, *parts[:depth])
        with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, "memory.max")) as f:
            found.append((folder, int(f.read())))  # "max" is no number
    return tuple(found)


def _left_in(group: tuple[str, int]) -> int:
    """Of a control group's memory; what the kernel can drop of files counts as free."""
    folder, limit = group
    try:
        with open(os.path.join(folder, "memory.current")) as f:
            used = int(f.read())
        with open(os.path.join(folder, "memory.stat")) as f:
            files = next((int(line.split()[1]) for line in f if line.startswith("inactive_file ")), 0)
    except (OSError, ValueError):
        return 1 << 62
    return max(limit - used + files, 0)
