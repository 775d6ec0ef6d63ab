"""A loader with state_dict and load_state_dict: it is asked for its own state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everstep.capture.loader.anatomy import lookahead, name_of, workers_run
from everstep.capture.loader.generators import OwnGenerator, State, all_rngs, set_all_rngs, set_states_of
from everstep.capture.loader.passes import AS_IT_WAS, Pass
from everstep.capture.loader.warn import started_anew, warn_of_workers
from everstep.errors import CursorError


class AskedPass(Pass):
    kind = "asked"
    _loader: Any
    _last: State | None = None

    def state(self) -> State:
        if self._ended and self._last is not None and self._last["delivered"] == self._delivered:
            return self._last  # asked after the end, a loader tells of its next pass
        self._last = {**super().state(), "loader": _copied(self._loader.state_dict())}
        return self._last

    @classmethod
    def open(cls, loader: Any, shape: State, state: State | None) -> Pass:
        constant = {"loader": shape, "lookahead": lookahead(loader), "workers_ran": workers_run(loader)}
        opened = cls(loader, constant)
        opened._loader = loader
        if state is None:
            opened._constant["start"] = all_rngs(opened._own)
            opened._batches = iter(loader)
            return opened
        recorded = opened._constant = state["pass"]
        opened._delivered = state["delivered"]
        opened._last = state
        if getattr(loader, "num_workers", 0) > 0 and opened._delivered > 0 and not state["ended"]:
            warn_of_workers(loader, started_anew(loader, opened._delivered))
        set_all_rngs(recorded["start"], opened._own)  # a sampler that has no state of its own runs again from here
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
                f"{name_of(loader)} refused the state that it gave ({type(error).__name__}: {error}); {AS_IT_WAS}"
            ) from error
        if recorded["lookahead"] == lookahead(loader):
            set_states_of(opened._own, state["generators"])
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
        at_first = all_rngs(own)
        set_all_rngs(start, own)
        indices = iter(batches._index_sampler)
        set_all_rngs(at_first, own)
        for _ in range(batches._sampler_iter_yielded):
            next(indices)
        batches._sampler_iter = indices


def _copied(value: Any) -> Any:
    """The same value, in memory that its owner will not write to."""
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(part) for part in value)
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value
