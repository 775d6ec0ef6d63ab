"""The data position: which batches of a pass over a loader were delivered, and how to get back there.

Three kinds of loader, told apart by what they offer:

    asked       has state_dict and load_state_dict (torchdata's StatefulDataLoader): its own state is kept
    map         a DataLoader over a map-style dataset: its sampler runs again and skips indices, and no
                skipped sample is loaded
    consumed    anything else that can be iterated: it is started again, and what was delivered is dropped

A sampler runs again with the random numbers it had. Two moments count, because a sampler may draw at either:
when its `__iter__` was called, and when its first index was asked for. Samplers that are not torch's own are
also watched for later draws from the global generators, which are recorded with their position. Generators that
belong to the loader, its samplers or its dataset are recorded at every position.

What does this stands in for the index sampler in a *copy* of the loader; the user's loader is not changed. Workers
that persist belong to that copy and are used again by later passes, as the loader itself would.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import json
import random
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from everstep.errors import CursorError, InexactWarning, SlowResumeWarning

State: TypeAlias = dict[str, Any]
OwnGenerator: TypeAlias = "torch.Generator | np.random.Generator | np.random.RandomState | random.Random"

_AS_IT_WAS = "give it the data and options that it had when the step was committed"
_END = object()


class Pass:
    """One pass over a loader whose position can be recorded at any batch boundary and resumed exactly.

    Iterated once, on the training thread. The position counts batches handed out by `next`, never those that
    workers have prefetched.
    """

    kind = "consumed"

    def __init__(self, loader: Any, constant: State) -> None:
        self._own = _own_generators(loader)
        self._constant = constant
        self._delivered = 0
        self._ended = False
        self._batches: Iterator[Any] = iter(())

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
            "generators": _states_of(self._own),
            "pass": self._constant,
        }

    def _end(self) -> None:
        self._ended = True
        self._batches = iter(())  # lets go of the workers


def open_pass(loader: Any, *, epoch: int, state: State | None) -> Pass:
    """Start a pass over the loader, or put one where `Pass.state()` was taken, in this or another process.

    Without a state, random numbers are drawn exactly as `iter(loader)` draws them. With one, all that positioning
    draws is drawn in here and leaves the global generators in no particular state: the caller sets them to their
    recorded values afterwards, before the first `next`. `set_epoch(epoch)` is called where the loader has one.
    """
    _set_epoch(loader, epoch)
    kind = _kind(loader)
    shape = _shape(loader, kind)
    if state is not None:
        _check_fits(loader, kind, shape, state)
    return {"map": _open_map, "asked": _open_asked, "consumed": _open_consumed}[kind](loader, shape, state)


def generator_states(loader: Any) -> list[Tensor]:
    """The states of the generators that the loader, its samplers and its dataset own: the state between passes.

    Before a pass has started there is no position to record, but a loader made with `generator=g`, or a sampler
    with a generator of its own, has a state that decides the next pass. A loader whose persistent workers are
    running gives one tensor more: what their seeds were drawn from, because such a loader draws none again. That is
    so for map-style loaders; of others with persistent workers keep the `Pass.state()` of the pass that ended.
    """
    states = _states_of(_own_generators(loader))
    standing = _standings.get(loader) if isinstance(loader, DataLoader) else None
    if standing is not None and standing.iterator is not None and standing.seeds is not None:
        states.append(standing.seeds)
    return states


def set_generator_states(loader: Any, states: list[Tensor]) -> None:
    """Give the loader's generators the states that `generator_states` returned for such a loader."""
    own = _own_generators(loader)
    had_workers = _workers_persist(loader) and len(states) == len(own) + 1
    _set_states_of(own, states[:-1] if had_workers else states)
    if had_workers:
        _standing_of(loader).seeds_of_earlier_workers = states[-1]


# ---------------------------------------------------------------------------------------------- map-style

# These draw from the global generators before their first index, if at all, and never again in a pass.
_DRAW_AT_START: tuple[type, ...] = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    list,
    tuple,
    range,
)
# Of a sampler that draws again and again. One that shuffles once a round needs the last; the others are spare.
_MAX_PAST_DRAWS = 4


class _Track:
    """The random numbers that one pass's index sampler had, or has to have again."""

    def __init__(self, own: list[OwnGenerator], sampler: Any) -> None:
        self.own = own
        self.sampler = sampler
        self.watched = not _draws_at_start(sampler)
        self.seeds: Tensor | None = None  # what the workers' base_seed is drawn from
        self.at_iter: State | None = None  # before iter(sampler), if watched
        self.at_first: State | None = None  # before its first index
        self.draws: list[tuple[int, State]] = []  # position, and the generators that moved there as they were
        self.draws_forgotten = False
        self.skip: int | None = None  # in a resumed pass: how many indices were delivered
        self.changed = True

    def resume(self, recorded: State, delivered: int) -> None:
        self.seeds = recorded["seeds"]
        self.at_iter = recorded["at_iter"]
        self.at_first = recorded["at_first"]
        self.draws = [(position, rng) for position, rng in recorded["draws"]]
        self.draws_forgotten = recorded["draws_forgotten"]
        self.skip = delivered

    def record(self, delivered: int) -> State:
        num_past = sum(position < delivered for position, _ in self.draws)
        if num_past > _MAX_PAST_DRAWS:
            del self.draws[: num_past - _MAX_PAST_DRAWS]
            self.draws_forgotten = True
        self.changed = False
        return {
            "seeds": self.seeds,
            "at_iter": self.at_iter,
            "at_first": self.at_first,
            "draws": list(self.draws),
            "draws_forgotten": self.draws_forgotten,
        }


class _MapPass(Pass):
    kind = "map"
    _track: _Track

    def state(self) -> State:
        if self._track.changed:
            self._constant = {**self._constant, **self._track.record(self._delivered)}
        return super().state()


class _Indices:
    """The indices of one pass. In a resumed pass the sampler first runs up to where it was."""

    def __init__(self, track: _Track) -> None:
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
                track.at_iter = _rngs(track.own)
            self._inner = iter(track.sampler)

    def seek(self) -> None:
        """Run the sampler of a resumed pass up to the first index that was not delivered; once."""
        track = self._track
        if self._inner is not None or track.skip is None:
            return
        if track.at_iter is not None:
            _set_rngs(track.at_iter, track.own)
        self._inner = iter(track.sampler)
        if track.at_first is not None:
            _set_rngs(track.at_first, track.own)
        self._draws_to_repeat = dict(track.draws)
        watched, track.watched = track.watched, False  # what is skipped was watched when it was delivered
        for self._position in range(track.skip):
            try:
                self._next()
            except StopIteration:
                raise CursorError(
                    f"{track.skip} batches of this pass had been delivered, but {_sampler_name(track.sampler)} "
                    f"now ends after {self._position}; {_AS_IT_WAS}"
                ) from None
        self._position = track.skip
        track.watched = watched

    def _next(self) -> Any:
        track, inner = self._track, self._inner
        assert inner is not None
        if self._position == 0:
            if track.at_first is None:
                # torch's own samplers never use numpy or random.
                rng = _global_rng() if track.watched else {"torch": torch.get_rng_state()}
                track.at_first = rng | {"generators": _states_of(track.own)}
                track.changed = True
            return next(inner)
        if self._position in self._draws_to_repeat:
            now = _global_rng()
            _set_global_rng(self._draws_to_repeat[self._position])
            try:
                return next(inner)
            finally:
                _set_global_rng(now)
        if not track.watched:
            return next(inner)
        watch = _Watch()
        try:
            return next(inner)
        finally:
            moved = watch.moved()
            if moved:
                track.draws.append((self._position, moved))
                track.changed = True


class _Source:
    """Stands in for the index sampler in the copy of a loader."""

    def arm(self, loader: Any, track: _Track, *, starts_workers: bool, seeds: Tensor | None) -> None:
        """Get ready for one call of iter() on the copy.

        With seeds given, workers that it starts are seeded from these, and nothing is drawn for them.
        """
        self._track = track
        self._sampler = track.sampler
        self._seeder = torch.default_generator if loader.generator is None else loader.generator
        self._starts_workers = starts_workers
        self._seeds = seeds
        self._num_asked = 0
        self._indices: _Indices | None = _Indices(track)

    def disarm(self) -> _Indices:
        """The indices of the pass that was opened; kept here no longer, as they may hold a long permutation."""
        indices, self._indices = self._indices, None
        assert indices is not None
        return indices

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        # A loader that starts workers asks twice. It draws base_seed after the first time and uses the iterator
        # of the second. A loader without workers, or whose workers are running, asks once.
        self._num_asked += 1
        if self._starts_workers and self._seeds is not None:
            if self._num_asked == 1:
                self._drawn_so_far = self._seeder.get_state()
                self._seeder.set_state(self._seeds)
                return iter(())
            self._seeder.set_state(self._drawn_so_far)
        assert self._indices is not None
        self._indices.begin()
        if self._starts_workers and self._num_asked == 1:
            self._track.seeds = self._seeder.get_state()
        return self._indices


class _Standing:
    """What is kept for a loader from pass to pass.

    Torch's iterator refers to the source, so the source must not refer to it: workers whose iterator is found by
    the cycle collector take seconds to stop.
    """

    def __init__(self) -> None:
        self.source = _Source()
        self.iterator: Any = None  # whose workers are running, if they persist
        self.seeds: Tensor | None = None  # what their seeds were drawn from
        self.seeds_of_earlier_workers: Tensor | None = None  # which the resumed run had at this point


_standings: WeakKeyDictionary[Any, _Standing] = WeakKeyDictionary()


def _standing_of(loader: Any) -> _Standing:
    return _standings.setdefault(loader, _Standing())


def _open_map(loader: Any, shape: State, state: State | None) -> Pass:
    standing = _standing_of(loader)
    seeds, standing.seeds_of_earlier_workers = standing.seeds_of_earlier_workers, None
    starts_workers = loader.num_workers > 0 and standing.iterator is None
    slot = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    constant = {
        "loader": shape,
        "num_workers": loader.num_workers,
        "lookahead": _lookahead(loader),
        "workers_ran": standing.iterator is not None or seeds is not None,
    }
    opened = _MapPass(loader, constant)
    track = opened._track = _Track(opened._own, getattr(loader, slot))
    if state is not None:
        opened._delivered = state["delivered"]
        constant["workers_ran"] = state["pass"]["workers_ran"]
        track.resume(state["pass"], state["delivered"])
        seeds = track.seeds
        _warn_if_inexact(loader, state, track.sampler)
    elif seeds is not None and starts_workers:
        _warn_of_workers(loader, _started_anew(loader, 0))

    standing.source.arm(loader, track, starts_workers=starts_workers, seeds=seeds)
    clone = copy.copy(loader)
    for name, value in ((slot, standing.source), ("_iterator", standing.iterator)):
        object.__setattr__(clone, name, value)  # DataLoader.__setattr__ refuses these once it is built
    opened._batches = iter(clone)
    indices = standing.source.disarm()
    if starts_workers and seeds is not None:
        track.seeds = seeds
    if _workers_persist(loader):
        if starts_workers:
            standing.iterator, standing.seeds = clone._iterator, track.seeds
        track.seeds = standing.seeds
    if state is not None:
        indices.seek()
        if state["ended"]:
            _expect_end(opened)
        if state["pass"]["lookahead"] == constant["lookahead"]:  # else the sampler is not as far as it was
            _set_states_of(opened._own, state["generators"])
    return opened


def _warn_if_inexact(loader: Any, state: State, sampler: Any) -> None:
    recorded, delivered, now = state["pass"], state["delivered"], loader.num_workers
    at_end = state["ended"] or delivered == recorded["loader"]["num_batches"]
    if recorded["num_workers"] != now and not at_end:
        _warn_of_workers(loader, f"a pass begun with {recorded['num_workers']} workers goes on with {now}")
    elif now > 0 and (
        (delivered > 0 and not at_end) or (loader.persistent_workers and (delivered > 0 or recorded["workers_ran"]))
    ):
        _warn_of_workers(loader, _started_anew(loader, delivered))
    if now > 0 and not getattr(loader, "in_order", True) and not at_end:
        _warn_inexact(
            "with in_order=False the batches that were delivered need not be the first ones of the pass, so some may "
            "come twice and others not at all; use in_order=True"
        )
    if recorded["draws_forgotten"] and not at_end:
        _warn_inexact(
            f"{_sampler_name(sampler)} draws from the global random generators again and again during a pass; only "
            f"its last {_MAX_PAST_DRAWS} draws are on record, and its order is exact only if no older one matters any "
            "more; let it draw from a torch.Generator that it keeps as an attribute"
        )


# ---------------------------------------------------------------------------------------------- asked


class _AskedPass(Pass):
    kind = "asked"
    _loader: Any
    _last: State | None = None

    def state(self) -> State:
        if self._ended and self._last is not None and self._last["delivered"] == self._delivered:
            return self._last  # asked after the end, a loader tells of its next pass
        self._last = {**super().state(), "loader": _copied(self._loader.state_dict())}
        return self._last


def _open_asked(loader: Any, shape: State, state: State | None) -> Pass:
    constant = {"loader": shape, "lookahead": _lookahead(loader), "workers_ran": _workers_run(loader)}
    opened = _AskedPass(loader, constant)
    opened._loader = loader
    if state is None:
        opened._constant["start"] = _rngs(opened._own)
        opened._batches = iter(loader)
        return opened
    recorded = opened._constant = state["pass"]
    opened._delivered = state["delivered"]
    opened._last = state
    if getattr(loader, "num_workers", 0) > 0 and opened._delivered > 0 and not state["ended"]:
        _warn_of_workers(loader, _started_anew(loader, opened._delivered))
    _set_rngs(recorded["start"], opened._own)  # a sampler that has no state of its own runs again from here
    try:
        loader.load_state_dict(_copied(state["loader"]))
        if state["ended"]:
            loader.state_dict()  # makes a StatefulDataLoader take what it was given now, not in its next pass
            opened._end()
        else:
            opened._batches = _iter_without_seeds(loader) if recorded["workers_ran"] else iter(loader)
            _skip_indices(opened._batches, recorded["start"], opened._own)
    except Exception as error:
        raise CursorError(
            f"{_name(loader)} refused the state that it gave ({type(error).__name__}: {error}); {_AS_IT_WAS}"
        ) from error
    if recorded["lookahead"] == _lookahead(loader):
        _set_states_of(opened._own, state["generators"])
    return opened


def _iter_without_seeds(loader: Any) -> Iterator[Any]:
    """Start a pass and its workers, but draw their seeds elsewhere: the recorded pass had its workers already."""
    generator, loader.generator = loader.generator, torch.Generator()
    try:
        return iter(loader)
    finally:
        loader.generator = generator


def _skip_indices(batches: Any, start: State, own: list[OwnGenerator]) -> None:
    """Run a sampler that has no state up to the position; a StatefulDataLoader leaves that to its first `next`.

    Only without workers: these are given their first indices in iter(), so there the sampler has run already.
    """
    if isinstance(getattr(batches, "_sampler_iter", None), itertools.islice) and batches._num_workers == 0:
        at_first = _rngs(own)
        _set_rngs(start, own)
        indices = iter(batches._index_sampler)
        _set_rngs(at_first, own)
        for _ in range(batches._sampler_iter_yielded):
            next(indices)
        batches._sampler_iter = indices


# ---------------------------------------------------------------------------------------------- consumed


class _IteratorPass(Pass):
    """A pass over a bare iterator, which cannot start again: what earlier passes took from it counts as well."""

    _taken: list[int]

    def __next__(self) -> Any:
        batch = super().__next__()
        self._taken[0] += 1
        return batch


_taken_from: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()


def _open_consumed(loader: Any, shape: State, state: State | None) -> Pass:
    opened = (_IteratorPass if isinstance(loader, Iterator) else Pass)(loader, {"loader": shape})
    taken = [0]
    if isinstance(opened, _IteratorPass):
        with suppress(TypeError):  # some kinds of iterator take no weak references
            taken = _taken_from.setdefault(loader, taken)
        opened._taken = taken
    if state is None:
        opened._constant |= {
            "start": _rngs(opened._own),
            "taken_before": taken[0],
            "workers_ran": _workers_run(loader),
        }
        opened._batches = iter(loader)
        return opened

    recorded = opened._constant = state["pass"]
    opened._delivered = state["delivered"]
    target = recorded["taken_before"] + state["delivered"]
    if target < taken[0]:
        raise CursorError(
            f"{taken[0]} batches were taken from this {_name(loader)} already, and the recorded position is after "
            f"{target}; an iterator cannot go back: give a new one"
        )
    if recorded["workers_ran"]:
        _warn_of_workers(loader, _started_anew(loader, 0))
    if state["ended"] and not isinstance(opened, _IteratorPass) and not _workers_persist(loader):
        opened._end()
    else:
        if target > taken[0] and not isinstance(loader, (list, tuple, range)):
            _warn_of_slow_resume(loader, target - taken[0])
        _set_rngs(recorded["start"], opened._own)
        opened._batches = iter(loader)
        while taken[0] < target:
            if next(opened._batches, _END) is _END:
                raise CursorError(
                    f"the recorded position is after {target} batches, but {_name(loader)} now ends after {taken[0]}; "
                    + _AS_IT_WAS
                )
            taken[0] += 1
        if state["ended"]:
            _expect_end(opened)
    _set_states_of(opened._own, state["generators"])
    return opened


def _expect_end(opened: Pass) -> None:
    if next(opened._batches, _END) is not _END:
        raise CursorError(f"the pass had ended at the recorded position, but its loader goes on now; {_AS_IT_WAS}")
    opened._end()


# ---------------------------------------------------------------------------------------------- loaders


def _kind(loader: Any) -> str:
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return "asked"
    plain = (DataLoader.__iter__, DataLoader._get_iterator)
    if (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and (type(loader).__iter__, type(loader)._get_iterator) == plain
    ):
        return "map"
    return "consumed"


def _shape(loader: Any, kind: str) -> State:
    """What must be the same for a position to mean the same."""
    if not isinstance(loader, DataLoader):
        return {"type": _name(loader), "num_batches": _length(loader)}
    # Not the length over an iterable dataset: it is an estimate, and torch complains later about having given it.
    sized = not isinstance(loader.dataset, IterableDataset)
    index_sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    batch_size = getattr(index_sampler, "batch_size", None)
    return {
        "type": _name(loader),
        "num_batches": _length(loader) if sized else None,
        "num_samples": _length(loader.dataset) if sized else None,
        "batch_size": batch_size if isinstance(batch_size, int) else None,
        "sampler": _sampler_name(index_sampler),
    } | ({} if kind == "map" else {"num_workers": loader.num_workers})


def _check_fits(loader: Any, kind: str, shape: State, state: State) -> None:
    was = {"kind": state["kind"], **state["pass"]["loader"]}
    now = {"kind": kind, **shape}
    differences = [f"{n} was {was.get(n)!r}, is {now.get(n)!r}" for n in was | now if was.get(n) != now.get(n)]
    if differences:
        raise CursorError(
            f"the recorded data position, after {state['delivered']} batches of a pass, does not fit this "
            f"{_name(loader)}: {'; '.join(differences)}. Build the loader as it was when the step was committed; "
            "to train on with other data, load the weights into a new run"
        )


def _name(thing: Any) -> str:
    return type(thing).__name__


def _sampler_name(sampler: Any) -> str:
    inner = getattr(sampler, "sampler", None)
    return _name(sampler) + ("" if inner is None else f"({_sampler_name(inner)})")


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _lookahead(loader: Any) -> int:
    """How many batches of indices are asked for before they are delivered."""
    return int(getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", None) or 0))


def _workers_persist(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers


def _workers_run(loader: Any) -> bool:
    return _workers_persist(loader) and loader._iterator is not None


def _chain(part: Any, inward: str) -> list[Any]:
    """The object and those inside it, found by the attribute `inward`, from the outside in."""
    chain: list[Any] = []
    while part is not None and len(chain) < 8 and not any(part is outer for outer in chain):
        chain.append(part)
        part = getattr(part, inward, None)
    return chain


def _parts(loader: Any) -> list[list[Any]]:
    """The loader, its samplers and its datasets, as chains from the outside in."""
    parts = [getattr(loader, name, None) for name in ("batch_sampler", "sampler", "dataset")]
    inward = ("sampler", "sampler", "dataset")
    return [[loader], *(_chain(part, name) for part, name in zip(parts, inward, strict=True))]


def _set_epoch(loader: Any, epoch: int) -> None:
    told: list[Any] = []
    for chain in _parts(loader):
        for part in chain:
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                owner = getattr(set_epoch, "__self__", part)  # not always `part`: wrappers pass attributes on
                if not any(owner is other for other in told):
                    told.append(owner)
                    set_epoch(epoch)
                break  # it passes the number on to what is inside, or means not to


def _draws_at_start(sampler: Any) -> bool:
    if type(sampler) is BatchSampler:
        return _draws_at_start(sampler.sampler)
    return type(sampler) in _DRAW_AT_START


def _seeded_per_sample(dataset: Any) -> bool:
    if getattr(dataset, "seeded_per_sample", False):
        return True
    inside = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
    return all(part is not None and part is not dataset and _seeded_per_sample(part) for part in inside)


def _started_anew(loader: Any, delivered: int) -> str:
    return (
        f"the {loader.num_workers} workers of this {_name(loader)} start anew, and the random numbers that they had "
        f"after {delivered} batches are not reproduced"
    )


def _warn_of_workers(loader: Any, what: str) -> None:
    dataset = getattr(loader, "dataset", None)
    if _seeded_per_sample(dataset):
        return
    if isinstance(dataset, IterableDataset):
        mend = "seed inside the dataset, from its own position"
    else:
        mend = "wrap the dataset in everstep.data.SeededDataset"
    _warn_inexact(
        f"{what}: the order of samples is exact, random augmentations in workers are not. To make them exact, {mend}; "
        "if the dataset draws no random numbers, say so with an attribute `seeded_per_sample = True` on it"
    )


def _warn_inexact(message: str) -> None:
    warnings.warn(message, InexactWarning, stacklevel=5)


def _warn_of_slow_resume(loader: Any, num_batches: int) -> None:
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        faster = "a map-style dataset, or torchdata's StatefulDataLoader over a dataset that has state_dict"
    elif isinstance(loader, DataLoader):
        faster = "a DataLoader that does not override __iter__, or state_dict and load_state_dict on this one"
    else:
        faster = "a DataLoader over a map-style dataset, given as it is, or state_dict and load_state_dict on this object"
    warnings.warn(
        f"{_name(loader)} cannot be positioned: {num_batches} batches are fetched and dropped to resume it, which is "
        f"right only if it gives the same batches when started again. Faster: {faster}",
        SlowResumeWarning,
        stacklevel=4,
    )


# ---------------------------------------------------------------------------------------------- random numbers


def _global_rng() -> State:
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "random": _random_state(random.getstate()),
    }


def _rngs(own: list[OwnGenerator]) -> State:
    return _global_rng() | {"generators": _states_of(own)}


def _set_rngs(rngs: State, own: list[OwnGenerator]) -> None:
    _set_global_rng(rngs)
    _set_states_of(own, rngs["generators"])


def _random_state(state: tuple[Any, ...]) -> State:
    version, words, gauss = state
    return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}


def _set_global_rng(rng: State) -> None:
    if "torch" in rng:
        torch.set_rng_state(rng["torch"])
    if "numpy" in rng:
        np.random.set_state(rng["numpy"])
    if "random" in rng:
        state = rng["random"]
        random.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))


class _Watch:
    """Tells which global generators have moved since it was made, and what they were.

    numpy's is looked at in place, because its get_state takes 40 µs. The normal deviate that numpy may hold back is
    not seen that way; it matters only to a sampler that draws normal deviates.
    """

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._random = random.getstate()
        self._numpy = _numpy_words()

    def moved(self) -> State:
        moved: State = {}
        if not np.array_equal(self._torch.numpy(), torch.get_rng_state().numpy()):
            moved["torch"] = self._torch
        if self._random != random.getstate():
            moved["random"] = _random_state(self._random)
        if self._numpy != _numpy_words():
            words = np.frombuffer(self._numpy, np.uint32)
            state = {"key": words[:624].copy(), "pos": int(words[624])}
            moved["numpy"] = {"bit_generator": "MT19937", "state": state, "has_gauss": 0, "gauss": 0.0}
        return moved


def _numpy_words() -> bytes:
    """The 624 words and the position of numpy's global MT19937; nothing if another generator was put in."""
    generator = np.random.mtrand.get_bit_generator()
    if not isinstance(generator, np.random.MT19937):
        return b""
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


def _own_generators(loader: Any) -> list[OwnGenerator]:
    """Every generator that the loader, its samplers and its datasets hold as attributes, in a fixed order."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    known = [torch.default_generator, np.random.mtrand._rand, vars(random)["_inst"]]
    num_global = len(known)
    for part in itertools.chain.from_iterable(_parts(loader)):
        for value in getattr(part, "__dict__", {}).values():
            if isinstance(value, kinds) and not isinstance(value, random.SystemRandom):
                known += [] if any(value is other for other in known) else [value]
    return known[num_global:]


def _states_of(generators: list[OwnGenerator]) -> list[Tensor]:
    return [_state_of(generator) for generator in generators]


def _state_of(generator: OwnGenerator) -> Tensor:
    """Its state as bytes: torch's own, or JSON."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    state: Any
    if isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
    elif isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
    else:
        state = generator.getstate()
    text = json.dumps(state, default=lambda array: array.tolist())
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _set_states_of(generators: list[OwnGenerator], states: list[Tensor]) -> None:
    if len(generators) != len(states):
        raise CursorError(
            f"the loader, its samplers and its dataset had {len(states)} random generators of their own when the step "
            f"was committed, and have {len(generators)} now; build them with the same generators"
        )
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
            continue
        value = json.loads(state.numpy().tobytes())
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = _with_arrays(value)
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(_with_arrays(value))
        else:
            generator.setstate((value[0], tuple(value[1]), value[2]))


def _with_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_arrays(part) for key, part in value.items()}
    return np.array(value, np.uint64) if isinstance(value, list) else value


def _copied(value: Any) -> Any:
    """The same value, in memory that its owner will not write to."""
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(part) for part in value)
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value
