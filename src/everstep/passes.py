"""Where in the data a run is: which pass over which loader, and what its program does again after a resume.

A program that was killed starts from its top. Passes that were finished before yield nothing, and what the program does
between them (an evaluation, a commit by hand) runs again: all that is undone when the pass that was interrupted begins.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from everstep import rng
from everstep.capture import loader as loaders
from everstep.errors import UsageError
from everstep.generation import Resumed
from everstep.restore.execute import Restored


class Passes:
    """The passes of one Run, in the order of its calls of steps(). Training thread."""

    def __init__(self, *, may_drop: bool, world_size: int, set_back: Callable[[Restored], None]) -> None:
        """`may_drop`: a position that cannot be divided among so many ranks begins anew. `set_back` brings the live objects
        to what was resumed, unless a step has been committed since."""
        self._may_drop, self._world_size = may_drop, world_size
        self._set_back = set_back
        self._index = -1
        self._current: loaders.Pass | None = None
        self._loader: Any = None
        self._saved: dict[str, Any] | None = None
        """The position that was resumed, until its pass begins."""
        self._found: Resumed | None = None
        self._restored: Restored | None = None
        """What was resumed, while it may be needed to set back to."""
        self._has_skipped = False
        self._between: int | None = None
        """Since the last pass has ended, so many commits were asked for; None: a pass is under way, or none has begun."""
        self._made = 0
        """So many commits after the pass that was resumed had been made before: what leads to them is undone."""
        self._loaders: list[weakref.ref[Any]] = []
        """In the order in which they were first used."""
        self._others: dict[int, list[Any]] = {}
        """Generators of those that are not in use."""
        self._counted: dict[int, list[Any]] = {}
        """What their samplers count."""

    @property
    def epoch(self) -> int:
        """Which pass the latest one is, counted from 0."""
        return max(self._index, 0)

    def resumed(self, found: Resumed, restored: Restored) -> None:
        """The run goes on from here."""
        self._found, self._restored = found, restored
        self._saved = found.cursor["data"]

    def next(self, loader: Any) -> loaders.Pass | None:
        """The next pass, over this loader, from where it stopped; None: it was finished before."""
        self._index += 1
        number = self._number_of(loader)
        if self._saved is not None and self._index < self._saved["pass"]:
            self._skip()
            return None
        self._loader = loader
        self._current = current = self._open(loader)
        self._others = self._of_others(number, loaders.generator_states)
        self._counted = self._of_others(number, loaders.sampler_states)
        return current

    def check_goes_on(self, current: loaders.Pass) -> None:
        """UsageError if another pass has begun since, which ended this one: a run has one position in its data."""
        if self._current is not current:
            raise UsageError(
                "a loop over run.steps() goes on after another one has begun (inside of it, or beside it by zip?), and the "
                "data of a run are at one position at a time. Iterate over the other loader itself (for batch in loader), "
                "or leave this loop first"
            )

    def ended(self, current: loaders.Pass) -> None:
        """All of its batches were delivered."""
        self._current, self._between = current, 0

    def left(self) -> bool:
        """Another pass begins. Returns whether there was one before, which may have been left early: this ends it."""
        was_there = self._current is not None
        if was_there:
            self._current = self._between = None
        return was_there

    @contextmanager
    def at_next(self) -> Iterator[None]:
        """Meanwhile the position is the beginning of the next pass."""
        self._index += 1
        try:
            yield
        finally:
            self._index -= 1

    def was_made_before(self) -> bool:
        """Whether a commit that is asked for now, in code that runs again after a resume, is part of the state already."""
        if self._between is None:
            return False
        self._between += 1
        if self._saved is not None:
            return self._has_skipped
        if self._between > self._made:
            return False
        if self._between == self._made:
            self._undo()
        return True

    def committed(self) -> None:
        """There is a step after what was resumed: unless passes are yet to be skipped, nothing is set back to that."""
        if self._saved is None:
            self._restored = None

    def position(self) -> dict[str, Any]:
        """For the cursor of the step that is being committed."""
        current = self._current
        others: dict[str, Any] = {"others": self._others} if self._others else {}
        if self._counted:
            others["counted"] = self._counted
        if current is not None:
            made = {"commits": self._between} if self._between else {}
            return {"pass": self._index, "state": current.state(), "generators": [], **others, **made}
        if self._saved is not None:
            return self._saved
        generators = [] if self._loader is None else loaders.generator_states(self._loader)
        number = self._number_of(self._loader) if generators and len(self._loaders) > 1 else None
        if number is not None:
            others["loader"] = number
        return {"pass": max(self._index, 0), "state": None, "generators": generators, **others}

    # -- loaders ------------------------------------------------------------------------------------------------------

    def _number_of(self, loader: Any) -> int | None:
        """Which one it is, in the order of first use; None if that cannot be told."""
        for number, known in enumerate(self._loaders):
            if known() is loader:
                return number
        try:
            self._loaders.append(weakref.ref(loader))
        except TypeError:
            return None
        if self._found is not None:
            loaders.as_in_a_new_process(loader)
        return len(self._loaders) - 1

    def _of_others(self, number: int | None, states_of: Callable[[Any], list[Any]]) -> dict[int, list[Any]]:
        """What decides on the next passes of the loaders that are not in use."""
        alive = {n: known() for n, known in enumerate(self._loaders) if n != number}
        found = {n: states_of(each) for n, each in alive.items() if each is not None}
        return {n: states for n, states in found.items() if states}

    def _give(self, saved: Mapping[int, list[Any]], set_states_of: Callable[[Any, list[Any]], None]) -> None:
        """To loaders that the program has used so far; it may be another program than the one that was killed."""
        for number, states in saved.items():
            loader = self._loaders[number]() if number < len(self._loaders) else None
            if loader is not None:
                set_states_of(loader, states)

    # -- what a program does again ------------------------------------------------------------------------------------

    def _skip(self) -> None:
        """It was finished before. What comes after it in the user's code runs again, and is undone later."""
        if not self._has_skipped:
            self._keep_apart()
        self._has_skipped = True
        self._between = 0

    def _keep_apart(self) -> None:
        """The live optimizers have taken over the tensors of the restored state: from now on it has its own."""
        assert self._restored is not None
        for optimizer in self._restored.state.optimizers.values():
            optimizer.state = copy.deepcopy(optimizer.state)

    def _undo(self) -> None:
        """What has been done since the resume, without a commit: all is as it was then."""
        restored, self._restored, self._made = self._restored, None, 0
        if restored is not None:
            self._set_back(restored)

    def _open(self, loader: Any) -> loaders.Pass:
        if self._made:
            self._undo()
        self._between = None
        saved, self._saved = self._saved, None
        if saved is None:
            return loaders.open_pass(loader, epoch=self._index, state=None)
        assert self._restored is not None and self._found is not None
        restored = self._restored
        cursor, resized_from = self._found.cursor, self._found.resized_from
        if self._has_skipped:
            self._undo()
        self._made = 0 if resized_from else saved.get("commits", 0)
        self._restored = restored if self._made else None
        if self._made:
            self._keep_apart()
        if not resized_from:
            self._give(saved.get("others", {}), loaders.set_generator_states)
            self._give(saved.get("counted", {}), loaders.set_sampler_states)
        if resized_from and saved["state"] is not None:
            rng.install(cursor["rng"])
            return self._open_resized(loader, saved["state"], resized_from)
        if saved["state"] is None:
            # The pass has not begun: what it draws when it begins comes from the generators as they were.
            if saved["generators"]:
                if "loader" in saved:
                    self._give({saved["loader"]: saved["generators"]}, loaders.set_generator_states)
                else:
                    loaders.set_generator_states(loader, saved["generators"])
            rng.install(cursor["rng"])
            return loaders.open_pass(loader, epoch=self._index, state=None)
        current = loaders.open_pass(loader, epoch=self._index, state=saved["state"])
        rng.install(cursor["rng"])
        return current

    def _open_resized(self, loader: Any, state: Any, resized_from: int) -> loaders.Pass:
        """A pass that another number of ranks had begun."""
        if self._may_drop:
            return loaders.open_pass(loader, epoch=self._index, state=None)
        loaders.check_resizable(state, loader, resized_from, self._world_size)
        return loaders.open_resized_pass(loader, epoch=self._index, state=state)
