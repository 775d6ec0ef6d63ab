"""Any other iterable: it is started again, and what was delivered is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from everstep.capture.loader.anatomy import name_of, workers_persist, workers_run
from everstep.capture.loader.generators import State, all_rngs, set_all_rngs, set_states_of
from everstep.capture.loader.passes import AS_IT_WAS, END, Pass
from everstep.capture.loader.warn import started_anew, warn_of_slow_resume, warn_of_workers
from everstep.errors import CursorError


class ConsumedPass(Pass):
    """Counts what is taken. A bare iterator cannot start again: what earlier passes took from it counts as well."""

    kind = "consumed"
    _taken: list[int]

    def __next__(self) -> Any:
        batch = super().__next__()
        self._taken[0] += 1
        return batch

    @classmethod
    def open(cls, loader: Any, shape: State, state: State | None) -> Pass:
        opened = cls(loader, {"loader": shape})
        starts_again = not isinstance(loader, Iterator)
        taken = opened._taken = [0] if starts_again else _taken_from(loader)
        if state is None:
            opened._constant |= {
                "start": all_rngs(opened._own),
                "taken_before": taken[0],
                "workers_ran": workers_run(loader),
            }
            opened._batches = iter(loader)
            return opened

        recorded = opened._constant = state["pass"]
        opened._delivered = state["delivered"]
        target = recorded["taken_before"] + state["delivered"]
        if target < taken[0]:
            raise CursorError(
                f"{taken[0]} batches were taken from this {name_of(loader)} already, and the recorded position is after "
                f"{target}; an iterator cannot go back: give a new one"
            )
        if recorded["workers_ran"]:
            warn_of_workers(loader, started_anew(loader, 0))
        if state["ended"] and starts_again and not workers_persist(loader):
            opened._end()
        else:
            if target > taken[0] and not isinstance(loader, (list, tuple, range)):
                warn_of_slow_resume(loader, target - taken[0])
            set_all_rngs(recorded["start"], opened._own)
            opened._batches = iter(loader)
            opened._drop_until(target, loader)
            if state["ended"]:
                opened._expect_end()
        set_states_of(opened._own, state["generators"])
        return opened

    def _drop_until(self, target: int, loader: Any) -> None:
        taken = self._taken
        while taken[0] < target:
            if next(self._batches, END) is END:
                raise CursorError(
                    f"the recorded position is after {target} batches, but {name_of(loader)} now ends after {taken[0]}; "
                    + AS_IT_WAS
                )
            taken[0] += 1


_num_taken: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()


def _taken_from(iterator: Any) -> list[int]:
    """The count of what all passes took from an iterator; it is theirs to raise."""
    taken = [0]
    with suppress(TypeError):  # some kinds of iterator take no weak references
        taken = _num_taken.setdefault(iterator, taken)
    return taken
