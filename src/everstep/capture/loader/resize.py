"""Whether a data position means anything to another number of ranks."""

from __future__ import annotations

from typing import Any

from everstep.capture.loader.anatomy import name_of
from everstep.capture.loader.generators import State
from everstep.errors import CursorError


def resized_position(position: State) -> State:
    """A run's position (`pass`, `state`, `generators`) as far as it means something to another number of ranks.

    Before a pass and after it there is nothing to count: a pass that had ended becomes the next one, not begun; one of
    which nothing was delivered has not begun either. Generators of a loader belong to the rank that had them.
    """
    state, number = position["state"], position["pass"]
    if state is not None and state["kind"] != "counted" and (state["ended"] or not state["delivered"]):
        number, state = number + bool(state["ended"]), None
    return {"pass": number, "state": state, "generators": []}


def check_resizable(state: State | None, loader: Any, old_world: int, new_world: int) -> None:
    """CursorError if a pass stopped at this state on so many ranks cannot go on at the same sample on so many others."""
    if old_world == new_world or state is None or state["kind"] == "counted":
        return
    recorded = state["pass"]["loader"]
    what = recorded["type"] + (f" with {recorded['sampler']}" if "sampler" in recorded else "")
    raise CursorError(
        f"the run stopped on {old_world} ranks after {state['delivered']} batches of a pass over a {what}. On {new_world} "
        f"ranks this {name_of(loader)} cannot go on from there: which samples were read depends on the number of ranks. "
        f"Resume on {old_world} ranks; or start this pass anew from its beginning with cursor=\"drop\": samples that were "
        "read come again. A run over a DataLoader with sampler=everstep.data.Sampler(dataset) can be resized anywhere, "
        "because its position counts the samples of all ranks"
    )
