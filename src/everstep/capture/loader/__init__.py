"""The data position: which batches of a pass over a loader were delivered, and how to get back there.

Four kinds of loader, told apart by what they offer; each has a module:

    asked       has state_dict and load_state_dict (torchdata's StatefulDataLoader): its own state is kept
    counted     a DataLoader over everstep.data.Sampler: the samples that all ranks have had are counted, which
                means the same to any number of ranks
    map         a DataLoader over a map-style dataset: its sampler runs again and skips indices, and no
                skipped sample is loaded
    consumed    anything else that can be iterated: it is started again, and what was delivered is dropped

A sampler runs again with the random numbers it had. Two moments count, because a sampler may draw at either:
when its `__iter__` was called, and when its first index was asked for. Samplers that are not torch's own are
also watched for later draws from the global generators, which are recorded with their position. Generators that
belong to the loader, its samplers or its dataset are recorded at every position.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from everstep.capture.loader.anatomy import kind_of, name_of, shape_of, start_epoch, workers_persist
from everstep.capture.loader.asked import AskedPass
from everstep.capture.loader.consumed import ConsumedPass
from everstep.capture.loader.counted import CountedPass
from everstep.capture.loader.generators import State, own_generators, set_states_of, states_of
from everstep.capture.loader.mapped import (
    MapPass,
    forget_workers,
    index_slot,
    seeds_of_running_workers,
    set_seeds_of_earlier_workers,
)
from everstep.capture.loader.passes import Pass
from everstep.capture.loader.resize import check_resizable, resized_position
from everstep.capture.loader.sampler import give_back, kept_by
from everstep.errors import CursorError

__all__ = [
    "Pass",
    "as_in_a_new_process",
    "check_resizable",
    "generator_states",
    "open_pass",
    "open_resized_pass",
    "resized_position",
    "sampler_states",
    "set_generator_states",
    "set_sampler_states",
]

_KINDS: dict[str, type[Pass]] = {kind.kind: kind for kind in (AskedPass, CountedPass, MapPass, ConsumedPass)}


def open_pass(loader: Any, *, epoch: int, state: State | None) -> Pass:
    """Start a pass over the loader, or put one where `Pass.state()` was taken, in this or another process.

    Without a state, random numbers are drawn exactly as `iter(loader)` draws them. With one, all that positioning
    draws is drawn in here and leaves the global generators in no particular state: the caller sets them to their
    recorded values afterwards, before the first `next`. `set_epoch(epoch)` is called where the loader has one.
    """
    start_epoch(loader, epoch)
    kind = kind_of(loader)
    shape = shape_of(loader, kind)
    if state is not None:
        _check_fits(loader, kind, shape, state)
    return _KINDS[kind].open(loader, shape, state)


def open_resized_pass(loader: Any, *, epoch: int, state: State) -> Pass:
    """Put a pass where `Pass.state()` was taken on a rank of another number of ranks; see `check_resizable`.

    The random numbers in the state are another rank's and are not used: this pass draws as `iter(loader)` does, from
    the global generators as the caller has set them for this rank (`rng.derived`), and leaves them where that leads.
    Generators of the loader's own stay as they are.
    """
    start_epoch(loader, epoch)
    kind = kind_of(loader)
    shape = shape_of(loader, kind)
    _check_fits(loader, kind, shape, state)
    return CountedPass.open_resized(loader, shape, state)


def as_in_a_new_process(loader: Any) -> None:
    """A run that is resumed in a process which used the loader before finds it without running workers, as in any other."""
    if not workers_persist(loader):
        return
    if kind_of(loader) == "consumed":
        loader._iterator = None
    else:
        forget_workers(loader)


def generator_states(loader: Any) -> list[Tensor]:
    """The states of the generators that the loader, its samplers and its dataset own: the state between passes.

    Before a pass has started there is no position to record, but a loader made with `generator=g`, or a sampler
    with a generator of its own, has a state that decides the next pass. A loader whose persistent workers are
    running gives one tensor more: what their seeds were drawn from, because such a loader draws none again. That is
    so for map-style loaders; of others with persistent workers keep the `Pass.state()` of the pass that ended.
    """
    states = states_of(own_generators(loader))
    seeds = seeds_of_running_workers(loader)
    if seeds is not None:
        states.append(seeds)
    return states


def sampler_states(loader: Any) -> list[State]:
    """What samplers of the user's own count from pass to pass, where a pass over the loader would run them again."""
    return kept_by(getattr(loader, index_slot(loader))) if kind_of(loader) == "map" else []


def set_sampler_states(loader: Any, states: list[State]) -> None:
    """Give them what `sampler_states` returned for such a loader."""
    if states and kind_of(loader) == "map":
        give_back(getattr(loader, index_slot(loader)), states)


def set_generator_states(loader: Any, states: list[Tensor]) -> None:
    """Give the loader's generators the states that `generator_states` returned for such a loader."""
    own = own_generators(loader)
    had_workers = workers_persist(loader) and len(states) == len(own) + 1
    set_states_of(own, states[:-1] if had_workers else states)
    if had_workers:
        set_seeds_of_earlier_workers(loader, states[-1])


def _check_fits(loader: Any, kind: str, shape: State, state: State) -> None:
    was = {"kind": state["kind"], **state["pass"]["loader"]}
    now = {"kind": kind, **shape}
    differences = [f"{n} was {was.get(n)!r}, is {now.get(n)!r}" for n in was | now if was.get(n) != now.get(n)]
    if differences:
        raise CursorError(
            f"the recorded data position, after {state['delivered']} batches of a pass, does not fit this "
            f"{name_of(loader)}: {'; '.join(differences)}. Build the loader as it was when the step was committed; "
            "to train on with other data, load the weights into a new run"
        )
