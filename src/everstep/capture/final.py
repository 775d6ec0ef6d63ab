"""Which gradients are final, among those that hooks have taken hold of during backward. Runs on the writer thread.

After how many accumulations a gradient is final (more than one with gradient accumulation, or in a GAN) is learned from the
update before. That is a guess, and being wrong costs bytes only.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from everstep.capture.sent import Ledger

MAX_TURNS = 4
"""So many backward passes without an update may send their gradients (a GradScaler skips some steps)."""
_NEVER = 1 << 40
_STEP = -1


def _nothing() -> None:
    return None


class _Step(NamedTuple):
    number: int
    taken_back: list[int]
    """Parameters whose notes the writer had not read."""


class Final:
    """The parameters of one optimizer, by number."""

    def __init__(self, uids: Sequence[int], ledger: Ledger) -> None:
        self.uids = uids
        self._ledger = ledger
        self.notes: deque[tuple[int, torch.Tensor | _Step | None]] = deque()
        """Of other threads: (parameter, its gradient as it has just been accumulated), and (_STEP, what that found)."""
        self.num_steps = 0
        """That have begun."""
        self.busy = False
        """Whether the writer has a gradient in hand."""
        num = len(uids)
        self._calls = [0] * num
        """Since the last update."""
        self._calls_before = [0] * num
        self._due = [_NEVER] * num
        """Calls after which a gradient is final."""
        self._sent_at = [0] * num
        """At which call it was handed over, since the last update."""
        self._sent: list[Callable[[], torch.Tensor | None]] = [_nothing] * num
        """Weak references: a gradient that is gone may have lent its id to the next."""

    # -- training thread ----------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Take back what the writer has not read: somebody may be about to write to it, or to let go of it."""
        self.num_steps += 1
        left: list[int] = []
        try:
            while True:
                i = self.notes.popleft()[0]
                if i == _STEP:  # it has not even read of the step before, of which no more than that is kept
                    left = []
                left.append(i)
        except IndexError:
            self.notes.append((_STEP, _Step(self.num_steps, left)))

    # -- writer thread ------------------------------------------------------------------------------------------------

    def take(self, num_steps: int) -> tuple[int, torch.Tensor] | None:
        """The next gradient that seems final after so many steps, and its uid; None: no more. In either case put_down()."""
        self.busy = True  # before one is taken: whoever takes them back looks after that
        while self.notes:
            try:
                i, noted = self.notes.popleft()
            except IndexError:  # they have just been taken back
                break
            if isinstance(noted, _Step):
                if noted.number > num_steps:  # what comes next belongs to a later frame than the one that is open
                    self.notes.appendleft((i, noted))
                    break
                self._step_began(noted.taken_back)
                continue
            self._calls[i] += 1
            if noted is not None and self._is_due(i, noted):
                self._sent[i], self._sent_at[i] = weakref.ref(noted), self._calls[i]
                return self.uids[i], noted
        return None

    def put_down(self) -> None:
        """Call it with no reference left to what was taken."""
        self.busy = False

    def _is_due(self, i: int, grad: torch.Tensor) -> bool:
        calls, due = self._calls[i], self._due[i]
        # The same again has been added to, and was not final the first time: the update will tell.
        is_new = self._sent[i]() is not grad
        return calls % due == 0 and calls <= MAX_TURNS * due and is_new and self.uids[i] not in self._ledger.hopeless

    def _step_began(self, taken_back: list[int]) -> None:
        """Learn for the next."""
        num = len(self.uids)
        for i in taken_back:
            if i == _STEP:
                self._calls = [0] * num
            else:
                self._calls[i] += 1
        # More calls than were due, with the last one sent, is a step that was skipped; the same twice is a habit.
        self._due = [
            n if n and (n != at or n == before) else due
            for n, at, before, due in zip(self._calls, self._sent_at, self._calls_before, self._due, strict=True)
        ]
        self._calls_before, self._calls = self._calls, [0] * num
        self._sent_at, self._sent = [0] * num, [_nothing] * num
