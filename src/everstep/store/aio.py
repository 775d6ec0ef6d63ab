"""Reads that go on while the thread that asked for them computes: Linux's own asynchronous I/O, for O_DIRECT files.

One queue a thread, whose reads any thread may wait for. Where the system has no such thing (or forbids it) there is no
queue, and reads are waited for.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import os
import platform
import sys
import threading
from collections.abc import Callable

from everstep.memory import Bytes

_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""The numbers of io_setup, io_destroy, io_getevents and io_submit."""
_DEPTH = 64
_PREAD = 0


class _Request(ctypes.Structure):  # struct iocb of linux/aio_abi.h, little-endian
    _fields_ = [
        ("data", ctypes.c_uint64), ("key", ctypes.c_uint32), ("rw_flags", ctypes.c_uint32),
        ("opcode", ctypes.c_uint16), ("priority", ctypes.c_int16), ("fd", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64), ("num_bytes", ctypes.c_uint64), ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("result_fd", ctypes.c_uint32),
    ]  # fmt: skip


class _Completion(ctypes.Structure):  # struct io_event
    _fields_ = [
        ("data", ctypes.c_uint64), ("request", ctypes.c_uint64), ("result", ctypes.c_int64), ("result2", ctypes.c_int64),
    ]  # fmt: skip


def _end(call: Callable[..., int], number: int, context: ctypes.c_ulong, held: dict[int, tuple[_Request, Bytes]]) -> None:
    """Waits for reads that are under way; only then do the buffers go."""
    call(number, context)
    held.clear()


class Queue:
    """Reads under way. A buffer is held here until the system no longer writes into it.

    One thread submits, any may wait: of several that do, one asks the system and tells the others.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._context = ctypes.c_ulong(0)
        self._held: dict[int, tuple[_Request, Bytes]] = {}
        self._results: dict[int, int] = {}
        self._next = 0
        self._told = threading.Condition()
        self._is_asking = False
        self._completions = (_Completion * _DEPTH)()
        if platform.machine() not in _CALLS or sys.platform != "linux":
            raise OSError("no asynchronous reads on this system")
        self._setup, self._destroy, self._getevents, self._submit = _CALLS[platform.machine()]
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        if self._call(self._setup, ctypes.c_uint(_DEPTH), ctypes.byref(self._context)) != 0:
            raise OSError(ctypes.get_errno(), "io_setup")

    def submit(self, fd: int, buffer: Bytes, offset: int) -> int | None:
        """Begin to fill the buffer; a ticket to wait for, or None if the system would not take it."""
        if len(self._held) == _DEPTH:
            return None
        self._next += 1
        request = _Request(
            data=self._next, opcode=_PREAD, fd=fd, buffer=buffer.ctypes.data, num_bytes=len(buffer), offset=offset
        )
        pointers = (ctypes.POINTER(_Request) * 1)(ctypes.pointer(request))
        self._held[self._next] = (request, buffer)  # before it is on its way: another thread may see its end first
        if self._call(self._submit, self._context, ctypes.c_long(1), pointers) != 1:
            del self._held[self._next]
            return None
        return self._next

    def wait(self, ticket: int) -> int:
        """How many bytes were read, or a negative error number. Any thread; once for each ticket."""
        with self._told:
            while ticket not in self._results:
                if self._is_asking:
                    self._told.wait()
                else:
                    self._ask()
            return self._results.pop(ticket)

    def _ask(self) -> None:
        """Wait for the end of at least one read, without the lock."""
        self._is_asking = True
        self._told.release()
        try:
            found = self._call(
                self._getevents, self._context, ctypes.c_long(1), ctypes.c_long(_DEPTH), self._completions, None
            )
            failure = ctypes.get_errno() if found < 0 else 0
        finally:
            self._told.acquire()
            self._is_asking = False
            self._told.notify_all()
        if failure and failure != errno.EINTR:
            raise OSError(failure, "io_getevents")
        for completion in self._completions[: max(found, 0)]:
            del self._held[completion.data]
            self._results[completion.data] = completion.result

    def __del__(
        self, getpid: Callable[[], int] = os.getpid, start: Callable[..., int] = _thread.start_new_thread,
        end: Callable[..., None] = _end,
    ) -> None:  # fmt: skip
        """All that is called is given: when the interpreter ends, this module's names may be gone."""
        if not self._context.value or self.pid != getpid():  # a forked child does not have it
            return
        # The system takes 30 ms and more for it, also where nothing is under way: whoever ends its thread does not wait.
        try:
            start(end, (self._call, self._destroy, self._context, self._held))
        except RuntimeError:  # no more threads, since the interpreter is about to end
            end(self._call, self._destroy, self._context, self._held)


class _Mine(threading.local):
    queue: Queue | None = None
    pid = 0


_mine = _Mine()


def queue() -> Queue | None:
    """This thread's queue; None if there are no asynchronous reads here."""
    if _mine.pid != os.getpid():
        _mine.pid, _mine.queue = os.getpid(), None
        with contextlib.suppress(OSError):
            _mine.queue = Queue()
    return _mine.queue
