"""Early hand-over: gradients leave during backward, each when it has become final. Runs on the training thread.

A hook on every larger parameter is called when its gradient has been accumulated. After how many calls it is final (more
than one with gradient accumulation, or in a GAN) is learned from the update before. What is handed over is a reference, and
a guess: the writer proves at the step whether it is what the optimizer consumed (sent.py), and writes the consumed gradient
where it is not. So nothing here has to be right; what is wrong costs bytes.

Where gradients are reduced between processes they are final only when backward has ended (DistributedDataParallel reduces
them after these hooks, bucket by bucket, and says so to nobody but the one communication hook that is the user's to set):
then they are handed over there.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from everstep.atoms import PACK_BELOW_BYTES
from everstep.capture.pending import Item, PendingEarly, Reading
from everstep.capture.sent import Ledger

BATCH_BYTES = 8 << 20
"""Gradients are handed over together up to about this size: waking the writer takes the training thread some time."""
MIN_BYTES = PACK_BELOW_BYTES
"""Smaller gradients share a record, and leave at the step."""
MAX_TURNS = 4
"""So many backward passes without an update may send their gradients (a GradScaler skips some steps)."""
_NEVER = 1 << 40
_on_accumulated: Callable[..., Any] = torch.Tensor.register_post_accumulate_grad_hook
_queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def _nothing() -> None:
    return None


class Early:
    """The parameters of one optimizer."""

    def __init__(self, put: Callable[[Item], None], ledger: Ledger) -> None:
        self._put = put
        self._ledger = ledger
        self._pid = os.getpid()
        self._handles: list[Any] = []
        self._reading = Reading()
        self._seconds = 0.0

    def install(self, params: Sequence[torch.Tensor], uids: Sequence[int]) -> None:
        """Watch these parameters in place of those before."""
        self.remove()
        chosen = [
            (p, uid) for p, uid in zip(params, uids, strict=True)
            if type(p) in (torch.nn.Parameter, torch.Tensor) and p.requires_grad and p.device.type == "cpu"
            and p.numel() * p.element_size() >= MIN_BYTES
        ]  # fmt: skip
        self._params = [p for p, _ in chosen]
        self._uids = [uid for _, uid in chosen]
        self._calls = [0] * len(chosen)
        """Since the last update."""
        self._calls_before = list(self._calls)
        self._due = [_NEVER] * len(chosen)
        """Calls after which a gradient is final."""
        self._sent_at = [0] * len(chosen)
        """At which call it was handed over, since the last update."""
        self._sent: list[Callable[[], torch.Tensor | None]] = [_nothing] * len(chosen)
        """Weak references: a gradient that is gone may have lent its id to the next."""
        self._final: list[int] = []
        """Gradients that are to be handed over."""
        self._final_bytes = 0
        self._hopeless: set[int] = set()
        self._outstanding: list[PendingEarly] = []
        self._is_called_back = False
        self._waits = _is_distributed()
        self._handles = [_on_accumulated(p, self._hook(i)) for i, p in enumerate(self._params)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- during backward ----------------------------------------------------------------------------------------------

    def _hook(self, i: int) -> Callable[[torch.Tensor], None]:
        """Touches no tensor: there are many of these, and after backward they are in no cache."""
        calls, due, final = self._calls, self._due, self._final
        size = self._params[i].numel() * self._params[i].element_size()

        def accumulated(p: torch.Tensor) -> None:
            calls[i] += 1
            if calls[i] % due[i]:
                return
            final.append(i)
            self._final_bytes += size
            if not self._is_called_back:
                self._is_called_back = True
                _queue_callback(self._backward_ends)
            if self._final_bytes >= BATCH_BYTES and not self._waits:
                self._send()

        return accumulated

    def _send(self) -> None:
        """Hand over what has become final."""
        begun = time.perf_counter()
        uids: list[int] = []
        grads: list[torch.Tensor | None] = []
        for i in self._final:
            grad, n = self._params[i].grad, self._calls[i]
            # The same again has been added to, and was not final the first time: the update will tell.
            if grad is not None and self._sent[i]() is not grad and n <= MAX_TURNS * self._due[i]:
                self._sent[i], self._sent_at[i] = weakref.ref(grad), n
                uids.append(self._uids[i])
                grads.append(grad)
        self._final.clear()
        self._final_bytes = 0
        if uids and os.getpid() == self._pid:  # a forked child trains for itself
            item = PendingEarly(uids, grads, self._reading)
            self._outstanding.append(item)
            self._put(item)
        self._seconds += time.perf_counter() - begun

    def _backward_ends(self) -> None:
        if self._waits:
            # Whoever reduces gradients has asked to be called at the end too, perhaps after this was.
            _queue_callback(self._backward_ended)
        else:
            self._backward_ended()

    def _backward_ended(self) -> None:
        self._is_called_back = False
        self._send()

    # -- at the step --------------------------------------------------------------------------------------------------

    def step_begins(self) -> float:
        """What the writer has not read by now goes with the update. Learn for the next.

        Returns the seconds that hooks have taken since the last.
        """
        for item in self._outstanding:
            item.grads[:] = [None] * len(item.grads)
        self._outstanding.clear()
        self._final.clear()
        self._final_bytes = 0
        self._is_called_back = False  # a backward pass that raised has not called back
        if self._calls != self._due:
            # More calls than were due, with the last one sent, is a step that was skipped; the same twice is a habit.
            self._due[:] = [
                n if n and (n != at or n == before) else due
                for n, at, before, due in zip(self._calls, self._sent_at, self._calls_before, self._due, strict=True)
            ]
        self._calls_before = list(self._calls)
        if len(self._hopeless) != len(self._ledger.hopeless):
            self._hopeless = set(self._ledger.hopeless)
            for uid, handle in zip(self._uids, self._handles, strict=True):
                if uid in self._hopeless:
                    handle.remove()
        num = len(self._calls)
        self._calls[:], self._sent_at[:], self._sent[:] = [0] * num, [0] * num, [_nothing] * num
        self._waits = _is_distributed()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def is_read(self) -> bool:
        """Whether the writer has one of these gradients in hand (never after step_begins() and before the next backward,
        once it has put down the one it had)."""
        return self._reading.busy


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
