"""The one place that touches the disk: every durable byte, name and removal goes through here.

Tests watch it (`observe`) to build all crash images of a run. Errors come out as StorageError with the operation,
the path and a hint. Reads are here too, so that short reads are handled once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from everstep.errors import StorageError, UnreadableError
from everstep.memory import Bytes, new_pages
from everstep.store import aio

BLOCK = 4096
_STAGING_BYTES = 8 << 20
_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)
_MADV_POPULATE_WRITE = 23
_MS_SYNC = 4
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_MEMORY_FILE_SYSTEMS = frozenset((0x01021994, 0x858458F6))
"""What statfs calls tmpfs and ramfs."""


class Event(NamedTuple):
    """One durable operation, in the order it was issued."""

    op: str
    """mkdir, create, write, truncate, sync, syncdir, rename, exchange, unlink, rmdir, note"""
    path: str
    offset: int = 0
    data: bytes = b""
    target: str = ""
    num_bytes: int = 0
    """Of a sync: so many bytes from `offset` on; 0: the whole file."""


_observer: Callable[[Event], None] | None = None
_fault: Callable[[str, str], None] | None = None


@contextlib.contextmanager
def observe(
    observer: Callable[[Event], None] | None = None, fault: Callable[[str, str], None] | None = None
) -> Iterator[None]:
    """For tests: every operation is told to `observer`; `fault(op, path)` runs before it and may raise OSError. (Reading is
    an operation for `fault` alone.)"""
    global _observer, _fault
    before = _observer, _fault
    _observer, _fault = observer, fault
    try:
        yield
    finally:
        _observer, _fault = before


def note(text: str) -> None:
    """A mark among the observed events, such as `durable 17`."""
    if _observer is not None:
        _observer(Event("note", text))


def _done(op: str, path: str, offset: int = 0, data: object = None, target: str = "", num_bytes: int = 0) -> None:
    if _observer is not None:
        _observer(Event(op, path, offset, b"" if data is None else bytes(data), target, num_bytes))  # type: ignore[call-overload]


_HINTS = {
    errno.ENOSPC: "the disk is full: free space, lower retention, or move the run",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied: check the owner and mode of the run folder",
    errno.ENOENT: "the file or folder is gone: was the run folder moved or deleted?",
    errno.EIO: "the device reports an I/O error: the disk may be failing",
}


_LOST = frozenset((errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ, errno.EACCES))
"""Reading this file fails with one of these while others can be read: the same as if its bytes were damaged."""


def _not_read(op: str, path: str, e: OSError) -> StorageError:
    """What to raise when this reading failed."""
    hint = _HINTS.get(e.errno or 0)
    kind = UnreadableError if e.errno in _LOST else StorageError
    return kind(f"{op} {path}: {e.strerror or e}{f' ({hint})' if hint else ''}")


def _may_fail(path: str) -> None:
    """For tests: reading it fails here, if it is to."""
    if _fault is not None:
        _fault("read", path)


@contextlib.contextmanager
def _reported(op: str, path: str) -> Iterator[None]:
    try:
        if _fault is not None:
            _fault(op, path)
        yield
    except OSError as e:
        hint = _HINTS.get(e.errno or 0, "see the system's message")
        raise StorageError(f"{op} {path}: {e.strerror or e} ({hint})") from e


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o666)


def supports_direct(folder: str) -> bool:
    """Whether files in this folder can be written with O_DIRECT. Leaves nothing behind."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag or not hasattr(os, "O_TMPFILE"):
        return False
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flag, 0o600)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, BLOCK) as page:
            return os.pwrite(fd, page, 0) == BLOCK
    except OSError:
        return False
    finally:
        os.close(fd)


def _check_still_there(path: str, inode: int) -> None:
    with _reported("stat", path):
        if os.stat(path).st_ino != inode:
            raise OSError(errno.ENOENT, "the file was replaced")


class Appender:
    """A new file that grows at its end, through memory that is reused.

    Nothing is durable before sync() returns. One thread at a time. After an error the file must be abandoned.
    """

    def __init__(self, path: str, *, direct: bool, staging_bytes: int = _STAGING_BYTES) -> None:
        self.path = path
        self.direct = direct
        with _reported("create", path):
            self._fd = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0))
        _done("create", path)
        self._inode = os.fstat(self._fd).st_ino
        self._stage(staging_bytes)
        self._filled = 0
        self._written = 0

    def _stage(self, num_bytes: int) -> None:
        self._staging: Bytes = new_pages(num_bytes)

    @property
    def offset(self) -> int:
        """Where the next byte goes."""
        return self._written + self._filled

    def reserve(self, num_bytes: int) -> Bytes:
        """The next bytes of the file, for the caller to fill before its next call."""
        if num_bytes > len(self._staging) - self._filled:
            self.flush()
            if num_bytes > len(self._staging) - self._filled:
                old = self._staging[: self._filled].copy()
                self._stage((len(old) + num_bytes + BLOCK - 1) // BLOCK * BLOCK)
                self._staging[: len(old)] = old
        region = self._staging[self._filled : self._filled + num_bytes]
        self._filled += num_bytes
        return region

    def view(self, offset: int, num_bytes: int) -> Bytes | None:
        """Bytes that were put there, if they have not left this memory; until the next call."""
        first = offset - self._written
        return self._staging[first : first + num_bytes] if first >= 0 else None

    def put(self, data: Bytes) -> None:
        """Copy data to the end of the file."""
        done = 0
        while done < len(data):
            if self._filled == len(self._staging):
                self.flush()
            part = min(len(data) - done, len(self._staging) - self._filled)
            np.copyto(self.reserve(part), data[done : done + part])
            done += part

    def pad(self, multiple: int) -> None:
        """Zeros up to a multiple of `multiple`."""
        rest = -self.offset % multiple
        if rest:
            self.reserve(rest)[:] = 0

    def flush(self) -> None:
        """Hand all whole blocks (with O_DIRECT) or all bytes to the operating system."""
        ready = self._filled // BLOCK * BLOCK if self.direct else self._filled
        if ready:
            self._pwrite(ready)

    def write_out(self) -> None:
        """Hand the same to the operating system without waiting for the device: through the page cache, past O_DIRECT."""
        with self._cached():
            self.flush()

    @contextlib.contextmanager
    def _cached(self) -> Iterator[None]:
        """Writes go to the page cache meanwhile."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        if self.direct:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        try:
            yield
        finally:
            if self.direct:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)

    def _pwrite(self, num_bytes: int) -> None:
        view = memoryview(self._staging)[:num_bytes]
        with _reported("write", self.path):
            done = 0
            while done < num_bytes:
                done += os.pwrite(self._fd, view[done:], self._written + done)
        _done("write", self.path, self._written, view)
        rest = self._filled - num_bytes
        if rest:
            self._staging[:rest] = self._staging[num_bytes : self._filled].copy()
        self._written += num_bytes
        self._filled = rest

    def sync(self) -> None:
        """Return when all bytes so far are on stable storage (with O_DIRECT: up to the last block boundary)."""
        self.flush()
        with _reported("sync", self.path):
            os.fdatasync(self._fd)
        _done("sync", self.path)

    def check_still_there(self) -> None:
        """StorageError if the path no longer leads to this file."""
        _check_still_there(self.path, self._inode)

    def truncate(self, offset: int) -> None:
        """Drop everything from `offset` (block-aligned) on."""
        if offset >= self._written:
            self._filled = offset - self._written
            return
        with _reported("truncate", self.path):
            os.ftruncate(self._fd, offset)
        _done("truncate", self.path, offset)
        self._written, self._filled = offset, 0

    def close(self, *, sync: bool = True) -> None:
        """Write out the rest (an unaligned end is fine here), sync if asked, close."""
        if self._fd < 0:
            return
        try:
            if self._filled:
                self.flush()
            if self._filled:
                with self._cached():
                    self._pwrite(self._filled)
            if sync:
                with _reported("sync", self.path):
                    os.fsync(self._fd)
                _done("sync", self.path)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without writing anything more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._staging = np.empty(0, np.uint8)
        self._filled = 0


class Preallocated:
    """A new file of a fixed size whose every block is there, so that writing to it does not find the disk full.

    It has a temporary name until publish(). Nothing is durable before sync() or publish() returns. One thread at a time.
    """

    def __init__(self, path: str, num_bytes: int, *, direct: bool = False) -> None:
        """`direct`: offsets, lengths and memory that write() is given are multiples of a block."""
        self._target = path
        self.path = f"{path}.{os.getpid()}-{next(_numbers)}.tmp"
        self.num_bytes = num_bytes
        with _reported("create", self.path):
            self._fd = _open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0))
        _done("create", self.path)
        self._inode = os.fstat(self._fd).st_ino
        try:
            with _reported("allocate", self.path):
                os.posix_fallocate(self._fd, 0, num_bytes)
            if _observer is not None:
                _done("write", self.path, 0, bytes(num_bytes))
        except StorageError:
            self.close()
            raise

    def write(self, offset: int, data: Bytes) -> None:
        """Hand these bytes to the operating system, in few requests."""
        with _reported("write", self.path):
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, memoryview(data)[done : done + _STAGING_BYTES], offset + done)
        _done("write", self.path, offset, data)

    def sync(self) -> None:
        """Return when all that was written is on stable storage."""
        with _reported("sync", self.path):
            os.fdatasync(self._fd)
        _done("sync", self.path)

    def publish(self) -> None:
        """Everything durable, then the name that was asked for; durable on return."""
        with _reported("sync", self.path):
            os.fsync(self._fd)
        _done("sync", self.path)
        rename(self.path, self._target)
        self.path = self._target

    def check_still_there(self) -> None:
        """StorageError if the path no longer leads to this file."""
        _check_still_there(self.path, self._inode)

    def close(self) -> None:
        """Let go of it. One that was not published is removed."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        if self.path != self._target:
            remove(self.path)


class MappedFile(Preallocated):
    """The same in memory: what is stored there is in the file, at the latest when sync_range() returns.

    Whoever has stored something says so by wrote(), for observers; in between the system may write any page at any time.
    """

    def __init__(self, path: str, num_bytes: int) -> None:
        super().__init__(path, num_bytes)
        try:
            with _reported("map", self.path):
                self.memory: Bytes = self._map()
        except StorageError:
            self.close()
            raise

    def _map(self) -> Bytes:
        return np.frombuffer(mmap.mmap(self._fd, self.num_bytes), np.uint8)

    def _flush(self, first: int, num_bytes: int) -> None:
        """OSError if these bytes cannot be made durable. Other threads run meanwhile (mmap.flush does not let them)."""
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        address = ctypes.c_void_p(self.memory.ctypes.data + start)
        if _libc.msync(address, ctypes.c_size_t(first + num_bytes - start), _MS_SYNC):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def wrote(self, offset: int, num_bytes: int) -> None:
        """These bytes have been stored."""
        if _observer is not None:
            _done("write", self.path, offset, self.memory[offset : offset + num_bytes])

    def sync_range(self, offset: int, num_bytes: int) -> None:
        """Return when these bytes are on stable storage, if the file is on any."""
        with _reported("sync", self.path):
            self._flush(offset, num_bytes)
        _done("sync", self.path, offset, num_bytes=num_bytes)

    def populate(self) -> None:
        """Have all pages mapped now, as far as the system can: in memory, where that takes nothing from a disk."""
        _libc.madvise(ctypes.c_void_p(self.memory.ctypes.data), ctypes.c_size_t(self.num_bytes), _MADV_POPULATE_WRITE)

    def close(self) -> None:
        self.memory = np.empty(0, np.uint8)  # the mapping goes when the last view does
        super().close()


def is_in_memory(folder: str) -> bool:
    """Whether files in this folder are in memory only (tmpfs, ramfs), and nothing of them survives the host."""
    told = ctypes.create_string_buffer(1024)
    return _libc.statfs(os.fsencode(folder), told) == 0 and int.from_bytes(told.raw[:4], "little") in _MEMORY_FILE_SYSTEMS


def make_dir(path: str) -> None:
    """Make one folder whose name is durable on return; fine if it is there."""
    if not os.path.isdir(path):
        with _reported("mkdir", path), contextlib.suppress(FileExistsError):
            os.mkdir(path)
            _done("mkdir", path)
    sync_dir(os.path.dirname(path))


def make_dirs(path: str) -> None:
    """Make a folder and all that are missing above it, each durable."""
    missing = [path]
    while not os.path.isdir(os.path.dirname(path)):
        path = os.path.dirname(path)
        missing.append(path)
    for folder in reversed(missing):
        make_dir(folder)
    # Folders above may be as young, made by a process that was killed before it could sync them.
    while os.path.dirname(path) != path:
        path = os.path.dirname(path)
        with contextlib.suppress(StorageError):  # not ours: it may not be ours to open
            sync_dir(path)


def sync_dir(path: str) -> None:
    """Return when the names in this folder are on stable storage."""
    with _reported("sync", path):
        fd = _open(path or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    _done("syncdir", path)


def sync_file(path: str) -> None:
    """Return when what another process may have left in the page cache of this file is on stable storage."""
    with _reported("sync", path):
        fd = _open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    _done("sync", path)


def write_whole(path: str, data: bytes) -> None:
    """Replace a small file: temporary name, fsync, rename, fsync of the folder. Durable on return."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with _reported("create", temporary):
        fd = _open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    _done("create", temporary)
    try:
        with _reported("write", temporary):
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        _done("write", temporary, 0, data)
        with _reported("sync", temporary):
            os.fsync(fd)
        _done("sync", temporary)
    except StorageError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)
    rename(temporary, path)


def rename(source: str, target: str) -> None:
    """Rename within one folder; durable on return."""
    with _reported("rename", target):
        os.rename(source, target)
    _done("rename", source, target=target)
    sync_dir(os.path.dirname(target))


def exchange(one: str, other: str) -> bool:
    """Two names of one folder change places at once; durable on return. False where the file system cannot do that."""
    with _reported("exchange", other):
        call = getattr(_libc, "renameat2", None)
        if call is None:
            return False
        if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
            code = ctypes.get_errno()
            if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                return False
            raise OSError(code, os.strerror(code))
    _done("exchange", one, target=other)
    sync_dir(os.path.dirname(other))
    return True


def remove(path: str) -> None:
    """Remove a file; fine if it is gone. Not durable before the folder is synced."""
    with _reported("unlink", path):
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
    _done("unlink", path)


def remove_dir(path: str) -> None:
    """Remove a flat folder with its files; fine if it is gone."""
    for name in listing(path):
        remove(os.path.join(path, name))
    with _reported("rmdir", path):
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return
    _done("rmdir", path)


def listing(path: str) -> list[str]:
    """Sorted names in a folder; empty if there is no such folder."""
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as e:
        raise StorageError(f"list {path}: {e.strerror}") from e


def size(path: str) -> int:
    """Bytes of a file; 0 if it is gone."""
    try:
        return os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as e:
        raise StorageError(f"stat {path}: {e.strerror}") from e


def read_whole(path: str) -> bytes:
    """All bytes of a small file. FileNotFoundError if it is not there."""
    try:
        _may_fail(path)
        with open(path, "rb") as f:
            return f.read()
    except (FileNotFoundError, NotADirectoryError) as e:
        raise FileNotFoundError(path) from e
    except OSError as e:
        raise _not_read("read", path, e) from e


def open_lock(path: str) -> int:
    """A descriptor of a small file that is made if it is not there."""
    with _reported("open", path):
        return _open(path, os.O_RDWR | os.O_CREAT)


class Reader:
    """An open file to read at any place, by any thread. Removal of the name does not pull it away."""

    def __init__(self, path: str, *, direct: bool = False) -> None:
        self.path = path
        self._direct_fd = -1
        try:
            self._fd = _open(path, os.O_RDONLY)
            if direct:
                with contextlib.suppress(OSError):
                    self._direct_fd = _open(path, os.O_RDONLY | os.O_DIRECT)
        except FileNotFoundError:
            raise
        except OSError as e:
            raise _not_read("open", path, e) from e
        self.num_bytes = os.fstat(self._fd).st_size

    def refresh(self) -> int:
        """The file's size now."""
        self.num_bytes = os.fstat(self._fd).st_size
        return self.num_bytes

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Up to num_bytes; fewer only at the end of the file."""
        parts = []
        try:
            _may_fail(self.path)
            while num_bytes > 0:
                part = os.pread(self._fd, num_bytes, offset)
                if not part:
                    break
                parts.append(part)
                offset += len(part)
                num_bytes -= len(part)
        except OSError as e:
            raise _not_read("read", self.path, e) from e
        return b"".join(parts)

    def read_into(self, buffer: Any, offset: int) -> int:
        """Fill buffer from offset; returns how much there was."""
        view = memoryview(buffer)
        done = 0
        try:
            _may_fail(self.path)
            while done < len(view):
                n = os.preadv(self._fd, [view[done:]], offset + done)
                if n == 0:
                    break
                done += n
        except OSError as e:
            raise _not_read("read", self.path, e) from e
        return done

    def read_direct(self, buffer: Bytes, offset: int, num_bytes: int) -> Bytes:
        """num_bytes from offset, past the page cache where possible.

        `buffer` is page-aligned and at least num_bytes + 2 * 4096 long; the result is a view of it, shorter at the
        end of the file.
        """
        if self._direct_fd < 0:
            return buffer[: self.read_into(buffer[:num_bytes], offset)]
        first = offset // BLOCK * BLOCK
        last = -(-(offset + num_bytes) // BLOCK) * BLOCK
        view = memoryview(buffer)[: last - first]
        try:
            _may_fail(self.path)
            done = 0
            while done < len(view):
                n = os.preadv(self._direct_fd, [view[done:]], first + done)
                done += n
                if n == 0 or done % BLOCK:
                    break
        except OSError as e:
            if e.errno == errno.EINVAL:
                return buffer[: self.read_into(buffer[:num_bytes], offset)]
            raise _not_read("read", self.path, e) from e
        return buffer[offset - first : min(done, offset - first + num_bytes)]

    def begin_direct(self, buffer: Bytes, offset: int, num_bytes: int) -> Callable[[], Bytes]:
        """read_direct() that goes on in the background; any thread calls the result, once, to get the bytes."""
        queue = aio.queue() if self._direct_fd >= 0 else None
        first = offset // BLOCK * BLOCK
        last = -(-(offset + num_bytes) // BLOCK) * BLOCK
        ticket = None if queue is None else queue.submit(self._direct_fd, buffer[: last - first], first)

        def get() -> Bytes:
            done = -1 if queue is None or ticket is None else queue.wait(ticket)
            if done >= offset - first + num_bytes and _fault is None:
                return buffer[offset - first : offset - first + num_bytes]
            return self.read_direct(buffer, offset, num_bytes)  # it would not, or fell short: errors are told there

        return get

    def drop_cache(self, offset: int, num_bytes: int) -> None:
        """Tell the system that these bytes are not needed again soon."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct_fd = -1

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
