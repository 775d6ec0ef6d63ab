"""A pass over a loader: what all kinds have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from everstep.capture.loader.generators import State, own_generators, states_of
from everstep.errors import CursorError

AS_IT_WAS = "give it the data and options that it had when the step was committed"
END = object()


class Pass:
    """One pass over a loader whose position can be recorded at any batch boundary and resumed exactly.

    Iterated once, on the training thread. The position counts batches handed out by `next`, never those that
    workers have prefetched.
    """

    kind: str

    def __init__(self, loader: Any, constant: State) -> None:
        self._own = own_generators(loader)
        self._constant = constant
        self._delivered = 0
        self._ended = False
        self._batches: Iterator[Any] = iter(())

    @classmethod
    def open(cls, loader: Any, shape: State, state: State | None) -> Pass:
        """See `open_pass`. The shape is what a position of the pass is compared with when it is resumed."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._end()
            raise
        self._delivered += 1
        return batch

    @property
    def delivered(self) -> int:
        """How many batches of this pass have been handed out, those before a resume included."""
        return self._delivered

    def state(self) -> State:
        """The position after the last delivered batch; to be asked before another pass over the loader opens.

        Nothing in the dict is written to again. What does not change within the pass is the same object under
        "pass" each time, so that an encoder may know it by identity. Taken after the end of the pass, it resumes
        to one that yields nothing.
        """
        return {
            "kind": self.kind,
            "delivered": self._delivered,
            "ended": self._ended,
            "generators": states_of(self._own),
            "pass": self._constant,
        }

    def _end(self) -> None:
        self._ended = True
        self._batches = iter(())  # lets go of the workers

    def _expect_end(self) -> None:
        if next(self._batches, END) is not END:
            raise CursorError(f"the pass had ended at the recorded position, but its loader goes on now; {AS_IT_WAS}")
        self._end()
