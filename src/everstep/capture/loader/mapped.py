"""A DataLoader over a map-style dataset: its sampler skips indices, and no skipped sample is loaded.

A stand-in takes the place of the index sampler in a *copy* of the loader; the user's loader is not changed. Workers
that persist belong to that copy and are used again by later passes, as the loader itself would.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from everstep.capture.loader.anatomy import lookahead, sampler_name, workers_persist
from everstep.capture.loader.generators import State, set_states_of
from everstep.capture.loader.passes import Pass
from everstep.capture.loader.sampler import MAX_PAST_DRAWS, Indices, Track
from everstep.capture.loader.warn import started_anew, warn_inexact, warn_of_workers


def index_slot(loader: Any) -> str:
    """The attribute that has the sampler which a pass over the loader runs."""
    return "batch_sampler" if loader.batch_sampler is not None else "sampler"


class MapPass(Pass):
    kind = "map"
    _track: Track

    def state(self) -> State:
        if self._track.changed:
            self._constant = {**self._constant, **self._track.record(self._delivered)}
        return super().state()

    @classmethod
    def open(cls, loader: Any, shape: State, state: State | None) -> Pass:
        standing = _standing_of(loader)
        seeds, standing.seeds_of_earlier_workers = standing.seeds_of_earlier_workers, None
        starts_workers = loader.num_workers > 0 and standing.iterator is None
        slot = index_slot(loader)
        constant = {
            "loader": shape,
            "num_workers": loader.num_workers,
            "lookahead": lookahead(loader),
            "workers_ran": standing.iterator is not None or seeds is not None,
        }
        opened = cls(loader, constant)
        track = opened._track = Track(opened._own, getattr(loader, slot))
        if state is not None:
            opened._delivered = state["delivered"]
            constant["workers_ran"] = state["pass"]["workers_ran"]
            track.resume(state["pass"], cls._num_to_skip(state))
            seeds = track.seeds
            _warn_if_inexact(loader, state, track.sampler, at_end=state["ended"] or cls._is_over(loader, state))
        elif seeds is not None and starts_workers:
            warn_of_workers(loader, started_anew(loader, 0))

        standing.source.arm(loader, track, starts_workers=starts_workers, seeds=seeds)
        clone = copy.copy(loader)
        for name, value in ((slot, standing.source), ("_iterator", standing.iterator)):
            object.__setattr__(clone, name, value)  # DataLoader.__setattr__ refuses these once it is built
        opened._batches = iter(clone)
        indices = standing.source.disarm()
        if starts_workers and seeds is not None:
            track.seeds = seeds
        if workers_persist(loader):
            if starts_workers:
                standing.iterator, standing.seeds = clone._iterator, track.seeds
            track.seeds = standing.seeds
        if state is not None:
            indices.seek()
            if state["ended"]:
                opened._expect_end()
            if state["pass"]["lookahead"] == constant["lookahead"]:  # else the sampler is not as far as it was
                set_states_of(opened._own, state["generators"])
        return opened

    @staticmethod
    def _num_to_skip(state: State) -> int:
        """How many batches of indices the sampler has to run through to get to the position."""
        return int(state["delivered"])

    @staticmethod
    def _is_over(loader: Any, state: State) -> bool:
        """Whether the last batch was delivered, though nobody asked for another yet."""
        return bool(state["delivered"] == state["pass"]["loader"]["num_batches"])


class _Source:
    """Stands in for the index sampler in the copy of a loader."""

    def arm(self, loader: Any, track: Track, *, starts_workers: bool, seeds: Tensor | None) -> None:
        """Get ready for one call of iter() on the copy.

        With seeds given, workers that it starts are seeded from these, and nothing is drawn for them.
        """
        self._track = track
        self._sampler = track.sampler
        self._seeder = torch.default_generator if loader.generator is None else loader.generator
        self._starts_workers = starts_workers
        self._seeds = seeds
        self._num_asked = 0
        self._indices: Indices | None = Indices(track)

    def disarm(self) -> Indices:
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


def seeds_of_running_workers(loader: Any) -> Tensor | None:
    """What the seeds of the loader's persistent workers were drawn from; None if none are running."""
    standing = _standings.get(loader) if isinstance(loader, DataLoader) else None
    return None if standing is None or standing.iterator is None else standing.seeds


def forget_workers(loader: Any) -> None:
    """Let workers end that persist from before a resume: they have drawn what a new process has yet to draw."""
    _standings.pop(loader, None)


def set_seeds_of_earlier_workers(loader: Any, seeds: Tensor) -> None:
    """Have the next pass start its workers with these seeds: the resumed run had them running at this point."""
    _standing_of(loader).seeds_of_earlier_workers = seeds


def _warn_if_inexact(loader: Any, state: State, sampler: Any, *, at_end: bool) -> None:
    recorded, delivered, now = state["pass"], state["delivered"], loader.num_workers
    if recorded["num_workers"] != now and not at_end:
        warn_of_workers(loader, f"a pass begun with {recorded['num_workers']} workers goes on with {now}")
    elif now > 0 and (
        (delivered > 0 and not at_end) or (loader.persistent_workers and (delivered > 0 or recorded["workers_ran"]))
    ):
        warn_of_workers(loader, started_anew(loader, delivered))
    if now > 0 and not getattr(loader, "in_order", True) and not at_end:
        warn_inexact(
            "with in_order=False the batches that were delivered need not be the first ones of the pass, so some may "
            "come twice and others not at all; use in_order=True"
        )
    if recorded["draws_forgotten"] and not at_end:
        warn_inexact(
            f"{sampler_name(sampler)} draws from the global random generators again and again during a pass; only "
            f"its last {MAX_PAST_DRAWS} draws are on record, and its order is exact only if no older one matters any "
            "more; let it draw from a torch.Generator that it keeps as an attribute"
        )
