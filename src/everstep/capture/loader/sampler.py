"""A sampler runs again, with the random numbers that it had, up to an index."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from everstep import tree
from everstep.capture.loader.anatomy import sampler_name
from everstep.capture.loader.generators import (
    OwnGenerator,
    State,
    Watch,
    all_rngs,
    global_rng,
    set_all_rngs,
    set_global_rng,
    states_of,
)
from everstep.capture.loader.passes import AS_IT_WAS
from everstep.data import Sampler
from everstep.errors import CursorError, UnsupportedValueError

# These draw from the global generators before their first index, if at all, and never again in a pass.
_DRAW_AT_START: tuple[type, ...] = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    Sampler,
    list,
    tuple,
    range,
)
# Of a sampler that draws again and again. One that shuffles once a round needs the last; the others are spare.
MAX_PAST_DRAWS = 4


class Track:
    """The random numbers that one pass's index sampler had, or has to have again."""

    def __init__(self, own: list[OwnGenerator], sampler: Any) -> None:
        self.own = own
        self.sampler = sampler
        self.watched = not _draws_at_start(sampler)
        self.seeds: Tensor | None = None  # what the workers' base_seed is drawn from
        self.at_iter: State | None = None  # before iter(sampler), if watched
        self.kept: list[State] = []  # what samplers of the user's own counted by then
        self.at_first: State | None = None  # before its first index
        self.draws: list[tuple[int, State]] = []  # position, and the generators that moved there as they were
        self.draws_forgotten = False
        self.skip: int | None = None  # in a resumed pass: how many indices were delivered
        self.changed = True

    def resume(self, recorded: State, delivered: int) -> None:
        self.seeds = recorded["seeds"]
        self.at_iter = recorded["at_iter"]
        self.kept = recorded.get("kept", [])
        self.at_first = recorded["at_first"]
        self.draws = [(position, rng) for position, rng in recorded["draws"]]
        self.draws_forgotten = recorded["draws_forgotten"]
        self.skip = delivered

    def record(self, delivered: int) -> State:
        num_past = sum(position < delivered for position, _ in self.draws)
        if num_past > MAX_PAST_DRAWS:
            del self.draws[: num_past - MAX_PAST_DRAWS]
            self.draws_forgotten = True
        self.changed = False
        return {
            "seeds": self.seeds,
            "at_iter": self.at_iter,
            "kept": self.kept,
            "at_first": self.at_first,
            "draws": list(self.draws),
            "draws_forgotten": self.draws_forgotten,
        }


class Indices:
    """The indices of one pass. In a resumed pass the sampler first runs up to where it was."""

    def __init__(self, track: Track) -> None:
        self._track = track
        self._position = 0
        self._draws_to_repeat: dict[int, State] = {}
        self._inner: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._inner is None:
            self.seek()
        index = self._next()
        self._position += 1
        return index

    def begin(self) -> None:
        """Call iter() on the sampler, but not in a resumed pass: `seek` does it there."""
        track = self._track
        if track.skip is None:
            if track.watched:
                track.at_iter = all_rngs(track.own)
                track.kept = [_kept_by(part) for part in _own_parts(track.sampler)]
            self._inner = iter(track.sampler)

    def seek(self) -> None:
        """Run the sampler of a resumed pass up to the first index that was not delivered; once."""
        track = self._track
        if self._inner is not None or track.skip is None:
            return
        if track.at_iter is not None:
            set_all_rngs(track.at_iter, track.own)
        for part, kept in zip(_own_parts(track.sampler), track.kept, strict=False):
            _give_back(part, kept)
        self._inner = iter(track.sampler)
        if track.at_first is not None:
            set_all_rngs(track.at_first, track.own)
        self._draws_to_repeat = dict(track.draws)
        watched, track.watched = track.watched, False  # what is skipped was watched when it was delivered
        for self._position in range(track.skip):
            try:
                self._next()
            except StopIteration:
                raise CursorError(
                    f"{track.skip} batches of this pass had been delivered, but {sampler_name(track.sampler)} "
                    f"now ends after {self._position}; {AS_IT_WAS}"
                ) from None
        self._position = track.skip
        track.watched = watched

    def _next(self) -> Any:
        track, inner = self._track, self._inner
        assert inner is not None
        if self._position == 0:
            if track.at_first is None:
                # torch's own samplers never use numpy or random.
                rng = global_rng() if track.watched else {"torch": torch.get_rng_state()}
                track.at_first = rng | {"generators": states_of(track.own)}
                track.changed = True
            return next(inner)
        if self._position in self._draws_to_repeat:
            now = global_rng()
            set_global_rng(self._draws_to_repeat[self._position])
            try:
                return next(inner)
            finally:
                set_global_rng(now)
        if not track.watched:
            return next(inner)
        watch = Watch()
        try:
            return next(inner)
        finally:
            moved = watch.moved()
            if moved:
                track.draws.append((self._position, moved))
                track.changed = True


def _own_parts(sampler: Any) -> list[Any]:
    """Those of a chain of samplers that are classes of the user's own."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is part for part in found):
        if type(sampler) is not BatchSampler and type(sampler) not in _DRAW_AT_START:
            found.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return found


def _kept_by(part: Any) -> State:
    """What decides, beside random numbers, on the indices of its next pass: its state, or the numbers that it keeps."""
    if callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None)):
        with contextlib.suppress(UnsupportedValueError):
            return {"state": tree.freeze(part.state_dict())}
    values = getattr(part, "__dict__", {})
    return {"numbers": {name: value for name, value in values.items() if type(value) in (int, float, bool)}}


def _give_back(part: Any, kept: State) -> None:
    if "state" in kept:
        part.load_state_dict(tree.freeze(kept["state"]))
    for name, value in kept.get("numbers", {}).items():
        if getattr(part, name, value) != value:
            setattr(part, name, value)


def _draws_at_start(sampler: Any) -> bool:
    if type(sampler) is BatchSampler:
        return _draws_at_start(sampler.sampler)
    return type(sampler) in _DRAW_AT_START
