"""A base taken from live state, in the background (see leaving.py)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from everstep import background
from everstep.capture.leaving import Leaving, Room
from everstep.capture.live import Described
from everstep.capture.pending import Audit
from everstep.errors import StorageError
from everstep.format.documents import Manifest
from everstep.store.bases import BaseWriter

COPY_AT_ONCE_BYTES = 64 << 20
"""A base up to this size is copied on the training thread: quicker than to find out that it was disturbed."""


class Snapshot:
    """One base on its way to disk."""

    def __init__(
        self, bases: str, step: int, live: Described, fields: Callable[[], dict[str, Any]], *, direct: bool, rank: int = 0,
        audit: Audit | None = None, on_done: Callable[[Snapshot], None], may_finish: Callable[[int], bool],
        look_twice: bool = False, fine: bool = False,
    ) -> None:  # fmt: skip
        """`look_twice`: no audit will tell whether what was copied is what was committed. `fine`: its pieces are."""
        self.step = step
        self.error: BaseException | None = None
        self.manifest: Manifest | None = None
        self._leaving = Leaving(live, Room())
        self._args = (bases, step, live.slots)
        self._direct, self._rank, self._fine = direct, rank, fine
        self._fields = fields
        self._audit = audit
        self._look_twice = look_twice
        self._on_done = on_done
        self._may_finish = partial(may_finish, step)
        self.done = threading.Event()
        self._thread = background.start(self._run, "everstep-base")

    @property
    def torn(self) -> bool:
        """Something changed the state while it was being copied: this base was discarded."""
        return self._leaving.torn

    def guard(self) -> None:
        """The state is about to change: return when this base no longer looks at it. Waits for no disk."""
        self._leaving.guard()

    def wait(self) -> None:
        self.done.wait()

    def _run(self) -> None:
        writer: BaseWriter | None = None
        try:
            writer = BaseWriter(*self._args, direct=self._direct, rank=self._rank, fine=self._fine)
            self._leaving.carry(writer)
            if self._look_twice and not self.torn:
                self._leaving.second_look(writer.sums(), self.step)
            if self.torn:
                writer.abandon()
            else:
                self._finish(writer)
        except BaseException as e:
            self.error = e
            if writer is not None:
                with contextlib.suppress(StorageError):  # the first error is the one to report
                    writer.abandon()
        finally:
            self._leaving.forget()
            try:
                self._on_done(self)
            finally:
                self.done.set()  # whoever waits for it finds all told

    def _finish(self, writer: BaseWriter) -> None:
        if self._audit is not None:
            self._audit.done.wait()
        while not self._may_finish():  # the steps before it must be durable first, or a crash would leave a hole
            time.sleep(0.002)
        fields = self._fields()
        if self._audit is not None and not self._agrees(writer):
            self._leaving.torn = True
            writer.abandon()
            return
        self.manifest = writer.finish(step=self.step, **fields)

    def _agrees(self, writer: BaseWriter) -> bool:
        """Whether the base has the hashes that the audit of the same step found."""
        assert self._audit is not None
        expected = {
            (u, p): h
            for u, p, h in zip(self._audit.uids, self._audit.pieces, self._audit.hashes, strict=True)
        }
        return all(
            expected.get((stored.uid, piece), value) == value
            for stored in writer.stored()
            if stored.role != "grad"
            for piece, value in enumerate(stored.sums)
        )
