"""A generation: what one process, or several ranks together, write from one resume on. How it is opened, and on what."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from everstep.capture.buckets import BucketOrders
from everstep.fingerprint import fingerprint
from everstep.follow import recover
from everstep.follow.keeper import common_base
from everstep.format.documents import RANKS, GenerationDocument, TimelineDocument
from everstep.opening import Opened
from everstep.restore.plan import Line
from everstep.store import shared
from everstep.store.pools import remove_pools
from everstep.store.runs import Listing, describe_writer

LOGS = {"delta": "disk", "shadow": "memory", "snapshot": "pool"}
"""What a generation says about its log."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a generation goes on, with a state that is in the live objects; or a new run."""

    step: int
    timeline: int
    generation: int
    source: str = ""
    """`disk`, `pool` or `shadow`; empty: a new run."""
    in_memory: bool = False
    """Some of what it was made of is only in this host's memory: a shadow's state, or the log that one left."""
    is_new: bool = False
    """It stands on no base: it goes on where no other does, or not from the newest."""
    cursor: dict[str, Any] = field(default_factory=dict)
    """Of the step, for this rank."""
    proven: bool = True
    resized_from: int = 0
    """So many ranks wrote it, if their number was another."""
    orders: BucketOrders | None = None
    """Of DDP's buckets, where they are state."""
    shares: list[frozenset[int]] = field(default_factory=list)
    """What each of several shadows keeps, if they have been asked."""
    fetch_s: float = 0.0
    replayed: tuple[float, int] | None = None
    """Seconds that loading a base and replaying so many steps took."""
    told: str = ""
    """What the user is told."""


def open_generation(
    opened: Opened, timeline: int, generation: int, parent: int | None, step: int, asked_step: int | None,
    holding: str = "",
) -> None:  # fmt: skip
    """By one process: from here on older generations write nothing that counts."""
    path = opened.path
    opened.lock.used = True
    path.clean(timeline)
    path.sync([os.path.join(path.timeline(timeline), "timeline.json")])
    layout = opened.inventory().layout
    if any(atom.boxes for atom in layout.atoms):
        path.require(RANKS)
    path.write_layout(timeline, layout)
    path.write_generation(
        GenerationDocument(
            generation, timeline, parent, step, opened.ranks.size, layout.id, opened.launch, describe_writer(),
            fingerprint(), asked_step, LOGS[opened.mode], holding, opened.pool_folder,
        )
    )  # fmt: skip


def first_timeline(opened: Opened, listing: Listing) -> int:
    """Of a run without steps; made if a process that was killed has not."""
    timeline = max(listing.timelines, default=0)
    if not timeline:
        timeline = 1
        opened.path.create_timeline(TimelineDocument(1))
    return timeline


def next_generation(listing: Listing) -> int:
    return max(listing.generations(), default=0) + 1


def forked_already(listing: Listing, line: Line, step: int, launch: str) -> bool:
    """Whether an earlier process of this same launch has opened the fork that is asked for."""
    generations = listing.generations()
    return any(
        generations[s.generation].launch == launch and generations[s.generation].asked_step == step for s in line.spans
    )


def computes_differently(recorded: dict[str, Any]) -> bool:
    """Whether frames written before must not be replayed together with those to come."""
    now = fingerprint()
    return any(recorded.get(k) != now[k] for k in ("torch", "device", "capability", "deterministic"))


def own_pools(opened: Opened, listing: Listing) -> list[str]:
    """Folders of pools that earlier generations wrote, and nobody else writes."""
    folders = {opened.path.pool(g.pool) for g in listing.generations().values() if g.pool}
    return sorted(f for f in folders if opened.path.is_own_pool(opened.run, f))


class Leftovers:
    """What earlier generations have left, and this one does not go on with. One thread at a time."""

    def __init__(self, opened: Opened, found: Resumed, pools: list[str]) -> None:
        """`pools`: folders that earlier generations wrote."""
        self._opened, self._found = opened, found
        self._in_memory = found.in_memory and opened.mode != "shadow"
        leaves_pool = found.source == "pool" and opened.mode != "snapshot"
        # What is in them is history, if this goes on from it: not if another line is left behind.
        self._pools = pools if opened.mode != "snapshot" and not found.is_new else []
        self.hold_the_state = self._in_memory or leaves_pool
        """What was resumed is nowhere else, until a base is stored."""

    def dismiss_shadow(self) -> None:
        """This generation has begun. A shadow that does not belong to it ends, unless it holds the state."""
        if self._opened.mode != "shadow" and not self._in_memory:
            recover.dismiss(self._opened.path, self._opened.run, self._found.generation)

    def base_stored(self, step: int) -> None:
        """A base of this step is, by this rank: what held the state goes, pools when every rank has one."""
        if self._pools and self._all_have(step):
            pools, self._pools = self._pools, []
            for rank in range(self._opened.ranks.size):
                for folder in pools:
                    remove_pools(folder, rank)
        if self._in_memory:
            self._in_memory = False
            path, run = self._opened.path, self._opened.run
            recover.dismiss(path, run, self._found.generation)
            shared.remove(shared.shared_folder(run, path.path), [path.rank])  # if no shadow was there to do it

    def drop_own_pool(self, step: int) -> None:
        """This generation ends with a base of this step: when every rank has one, whoever is last removes all pools."""
        path, found = self._opened.path, self._found
        if self._all_have(step):
            for rank in range(self._opened.ranks.size):
                path.part(rank).pool_is_not_needed(found.timeline, found.generation)
                remove_pools(path.pool(self._opened.pool_folder), rank)

    def _all_have(self, step: int) -> bool:
        return common_base(self._opened.path, self._found.timeline, self._opened.ranks.size) >= step
