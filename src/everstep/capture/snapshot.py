"""A base taken from live state, in the background, tensor by tensor.

Between two updates the state is read-only, so tensors are written straight from where they are. Before the next update
the training thread calls guard(): what has not been written yet is then copied in memory first, and only that is waited
for.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from everstep import background
from everstep.capture.pending import Audit
from everstep.errors import StorageError
from everstep.format.documents import Manifest
from everstep.memory import Bytes, plain, view_bytes
from everstep.store.bases import BaseWriter, Slot


class Snapshot:
    """One base on its way to disk. `tensors[i]` belongs to `slots[i]`; `settled[i]` tells that it is a copy already."""

    def __init__(
        self, bases: str, step: int, slots: Sequence[Slot], tensors: list[torch.Tensor], settled: Sequence[bool],
        fields: Callable[[], dict[str, Any]], *, direct: bool, rank: int = 0, audit: Audit | None = None,
        on_done: Callable[[Snapshot], None], may_finish: Callable[[int], bool],
    ) -> None:  # fmt: skip
        self.step = step
        self.error: BaseException | None = None
        self.manifest: Manifest | None = None
        self.torn = False
        """Something changed the state while it was being copied: this base was discarded."""
        self._args = (bases, step, slots)
        self._direct, self._rank = direct, rank
        self._tensors = tensors
        self._settled = list(settled)
        self._versions = [t._version for t in tensors]
        self._fields = fields
        self._audit = audit
        self._on_done = on_done
        self._may_finish = partial(may_finish, step)
        self._lock = threading.Lock()
        self._copied = False
        self.done = threading.Event()
        self._thread = background.start(self._run, "everstep-base")

    def guard(self) -> None:
        """The state is about to change: return when this base no longer looks at it. Waits for no disk."""
        if self._copied:
            return
        with self._lock:
            for index in range(len(self._tensors)):
                if not self._settled[index]:
                    copy = plain(self._tensors[index]).clone()
                    self._settle(index)
                    self._tensors[index] = copy
            self._copied = True

    def wait(self) -> None:
        self.done.wait()

    def _settle(self, index: int) -> None:
        """This tensor has been copied: was it left alone until now?"""
        self.torn = self.torn or self._tensors[index]._version != self._versions[index]
        self._settled[index] = True

    def _run(self) -> None:
        writer: BaseWriter | None = None
        try:
            writer = BaseWriter(*self._args, direct=self._direct, rank=self._rank)
            for index in writer.order:
                writer.add_pieces(partial(self._fill, index))
                with self._lock:
                    if not self._settled[index]:
                        self._settle(index)
            self._copied = True
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
            with self._lock:
                self._copied = True
                self._tensors, self._settled = [], []
            self.done.set()
            self._on_done(self)

    def _fill(self, index: int, region: Bytes, start: int) -> None:
        with self._lock:  # guard() may put a copy in the tensor's place between two pieces
            np.copyto(region, view_bytes(plain(self._tensors[index]))[start : start + len(region)])

    def _finish(self, writer: BaseWriter) -> None:
        if self._audit is not None:
            self._audit.done.wait()
        while not self._may_finish():  # the steps before it must be durable first, or a crash would leave a hole
            time.sleep(0.002)
        fields = self._fields()
        if self._audit is not None and not self._agrees(writer):
            self.torn = True
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
