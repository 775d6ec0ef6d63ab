"""Several ranks, now or when the run was written, resume together: which step, from where, and what of it is this one's."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from everstep import cursor as cursors
from everstep import rng
from everstep.capture import loader as loaders
from everstep.capture.buckets import BucketOrders
from everstep.errors import (
    CorruptionError,
    EverstepError,
    InexactWarning,
    LinkError,
    MismatchError,
    NothingToRestoreError,
    StepNotFoundError,
    StorageError,
    UsageError,
)
from everstep.follow import recover
from everstep.follow.gather import Shadows, ShadowSource, common_step, leave_bases, reaches_all, writes_for
from everstep.format.documents import FINE_PIECES, RANKS, GenerationDocument, TimelineDocument
from everstep.generation import Resumed, first_timeline, forked_already, next_generation, open_generation
from everstep.naming import Inventory
from everstep.opening import Opened
from everstep.ranks import Holding, aliases_of, assign, check_replicas, hashes_of, holding_id, holdings
from everstep.restore.execute import Restored
from everstep.restore.history import Step, check_step
from everstep.restore.join import (
    Era,
    Joint,
    Source,
    fetch,
    is_newest,
    joint_of,
    latest_of,
    order_like,
    set_back,
    warn_if_set_back,
)
from everstep.restore.plan import line_files, line_of
from everstep.store.runs import Listing, read_listing

_SEEN_STEPS = 4096
"""So many of the newest steps are told to other ranks."""


@dataclass(frozen=True)
class Found:
    """What all ranks have agreed on."""

    at: int | None
    """The step; None for a new run."""
    from_memory: bool
    """Of all ranks' shadows."""
    joint: Joint | None
    restored: Restored | None
    """This rank's boxes."""

    @property
    def era(self) -> Era:
        """Of the step, which there must be."""
        assert self.joint is not None and self.at is not None
        return self.joint.eras[0] if self.from_memory else self.joint.find(self.at)


class Together:
    """One rank among those that resume a run."""

    def __init__(self, opened: Opened, start: Callable[[Resumed], None]) -> None:
        """`start` is called, within what all ranks do together, when a rank's state is in its live objects and the
        generation is open."""
        self._opened = opened
        self._path = opened.path
        self._ranks = opened.ranks
        self._start = start
        self._say = opened.say

    def resume(self, step: Step) -> tuple[Resumed, Restored | None]:
        """Where the run goes on, and what this rank has of the state, which is in its live objects; none for a new run."""
        opened, ranks, path = self._opened, self._ranks, self._path
        full = opened.training.inventory()
        told = ranks.gather("tell what they hold", holdings(full))
        held = [msgspec.convert(each, list[Holding]) for each in told]
        stored = assign(held)
        opened.training.store_part(set(full.tensors), stored[ranks.rank], aliases_of(held))
        holding = holding_id(held, stored)
        begun = time.perf_counter()
        found = self._find(step, full, held, holding)
        fetch_s = time.perf_counter() - begun
        timeline, generation, is_new = ranks.first("open a generation", lambda: self._agree(found, step, holding))
        resumed = Resumed(step=found.at or 0, timeline=timeline, generation=generation, is_new=is_new, fetch_s=fetch_s)
        if found.restored is None:
            hashes = ranks.gather("hash", hashes_of(full))
            ranks.first("compare their parameters", partial(check_replicas, held, hashes))
        else:
            resumed = self._apply(found, found.restored, resumed)
        if self._has_buckets():
            resumed = replace(resumed, orders=BucketOrders(opened.training.models))
        ranks.all("start", lambda: self._begin(resumed))
        if ranks.rank == 0 and found.restored is not None:
            for rank in range(ranks.size, resumed.resized_from):  # nobody goes on with these
                recover.dismiss(path.part(rank), opened.run, generation, wait_s=0.0)
        return resumed, found.restored

    def _apply(self, found: Found, restored: Restored, resumed: Resumed) -> Resumed:
        """Put what this rank has of a state into its live objects, and say so."""
        at, training, num_ranks = resumed.step, self._opened.training, self._ranks.size
        was = found.era.world_size
        in_pool = not found.from_memory and found.era.is_in_pool(at)
        cursor = self._cursor(restored, was, at)
        training.apply(restored, cursor)
        if at and was == num_ranks and self._has_buckets():
            training.warm(cursor)
        return replace(
            resumed, source="shadow" if found.from_memory else "pool" if in_pool else "disk",
            in_memory=found.from_memory or found.era.needs_memory(at), cursor=cursor,
            proven=restored.proven, resized_from=was if was != num_ranks else 0,
            told=f"at step {at} on {num_ranks} rank{'s' if num_ranks > 1 else ''}"
            f"{' from the memory of all ranks’ shadows' if found.from_memory else ''}"
            f"{f' (written by {was}: random numbers begin anew)' if was != num_ranks else ''}"
            f"{f', new timeline {resumed.timeline}' if resumed.is_new else ''}",
        )  # fmt: skip

    def _has_buckets(self) -> bool:
        """Whether the order of DDP's buckets is state: it decides how ranks are added up, and what hooks keep by bucket."""
        return self._ranks.size > 1 or self._opened.training.compress is not None

    def _cursor(self, restored: Restored, was: int, at: int) -> dict[str, Any]:
        """The cursor for this rank: its own where the number of ranks is the same."""
        cursor = cursors.decode(restored.state.cursor)
        if was == self._ranks.size:
            return cursor
        return {
            **cursor,
            "rng": rng.derived(rng.seed_in(cursor["rng"]), at, self._ranks.rank),
            "data": loaders.resized_position(cursor["data"]),
        }

    def _begin(self, found: Resumed) -> None:
        """Make this rank's part of the generation ready to be written, and start it."""
        self._path.make_part(found.timeline)
        self._path.remove_after(found.timeline, found.step)
        if self._ranks.rank:
            self._path.clean(found.timeline)
            self._path.write_layout(found.timeline, self._opened.inventory().layout)
        self._start(found)

    def _agree(self, found: Found, asked: Step, holding: str) -> list[Any]:
        """By one process: where this generation writes. [timeline, generation, whether it needs bases first]"""
        joint, at, path = found.joint, found.at, self._path
        listing = joint.listing if joint is not None else read_listing(path)
        path.require(RANKS, FINE_PIECES)
        generation = next_generation(listing)
        if joint is None or at is None:
            timeline = first_timeline(self._opened, listing)
            open_generation(self._opened, timeline, generation, None, 0, None, holding)
            return [timeline, generation, True]
        newest, source = joint.eras[0].newest, found.era

        def fits(written: GenerationDocument) -> bool:
            return written.holding == holding and written.world_size == self._ranks.size

        is_older = at < latest_of(joint) if found.from_memory else not is_newest(joint, at)
        fork = is_older or not fits(newest)
        parent = source.newest if fork else newest
        timeline = joint.eras[0].lines[0].timelines[0]
        if fork:
            timeline = max(listing.timelines) + 1
            path.create_timeline(
                TimelineDocument(timeline, parent.timeline, parent.generation, at, own_bases=not fits(parent))
            )
        for line in source.lines:
            path.sync(line_files(line, None))
        open_generation(
            self._opened, timeline, generation, parent.generation, at, None if asked == "latest" else asked, holding
        )
        return [timeline, generation, fork or source is not joint.eras[0]]

    def _find(self, step: Step, full: Inventory, held: list[list[Holding]], holding: str) -> Found:
        """All agree on a step, and each takes what it has of it. Nothing is written but bases of what was in memory only."""
        ranks = self._ranks
        asked = ranks.gather("ask shadows", self._standings())
        seen = ranks.gather("see steps", self._seen_steps()) if any(asked) else []
        at: int | None
        at, source = ranks.first("choose a step", lambda: self._choose_step(step, asked, holding, seen))
        restored: list[Restored] = []
        joint: Joint | None = None
        if at is not None and source != "disk":
            at, source, joint = self._from_shadows(at, source, step, asked, full, held, restored)
        while at is not None and source == "disk" and not restored:
            joint = joint_of(self._path)
            self._say(f"everstep: restoring step {at} of {self._path.path} …")
            if not self._restore_all(Source(joint.find(at), at), full, held, restored, may_set_back=step == "latest"):
                name = f"choose an older step than {at}"  # ranks meet once under each name
                at, source = ranks.first(name, lambda: self._choose_step(step, [], holding, []))
        if joint is not None and restored and source == "disk" and step == "latest" and at is not None and not ranks.rank:
            warn_if_set_back(self._path, joint.find(at), at)
        return Found(at, source == "memory", joint, restored[0] if restored else None)

    def _restore_all(
        self, source: Source, full: Inventory, held: list[list[Holding]], restored: list[Restored], *, may_set_back: bool
    ) -> bool:
        """Every rank's part of a step. False if a slot of a pool is damaged on any rank: then that step does not count."""

        def take() -> str:
            try:
                restored.append(self._restore_part(source, full, held))
            except CorruptionError as e:
                if not may_set_back or e.step != source.step or not e.in_base or not source.era.is_in_pool(source.step):
                    raise
                return str(e)
            return ""

        failed = [said for said in self._ranks.all(f"restore step {source.step}", take) if said]
        if not failed:
            return True
        restored.clear()
        damage = CorruptionError(failed[0])
        damage.step, damage.in_base = source.step, True
        return not set_back(self._path, source.era, source.step, damage)

    def _shadows(self) -> Shadows:
        """Those of all ranks."""
        options = self._opened.options
        return Shadows(self._path, self._opened.run, options.shadows, options.token, options.tls, options.shadow_streams)

    def _standings(self) -> list[int | str]:
        """What the shadows of all ranks tell this process; nothing if the run was not written with shadows."""
        try:
            line = line_of(read_listing(self._path.part(0)), check_tail=False)
        except (NothingToRestoreError, CorruptionError):
            return []
        return self._shadows().standings(line.generations) if line.newest.log == "memory" else []

    def _from_shadows(
        self, at: int, source: str, step: Step, asked: list[list[int | str]], full: Inventory, held: list[list[Holding]],
        restored: list[Restored],
    ) -> tuple[int | None, str, Joint]:  # fmt: skip
        """All ranks: what their shadows hold, or bases of that. If that fails, the step to be had from disk."""
        ranks = self._ranks
        joint = joint_of(self._path)
        self._say(f"everstep: taking step {at} of {self._path.path} from the memory of all ranks' shadows …")

        def take() -> str:
            try:
                if source == "memory":
                    with contextlib.closing(ShadowSource(joint.eras[0], at, self._shadows())) as found:
                        restored.append(self._restore_part(found, full, held))
                else:
                    newest = joint.eras[0].newest
                    leave_bases(self._shadows(), newest, at, writes_for(asked, ranks.rank))
            except (LinkError, CorruptionError, StorageError) as e:
                return f"{type(e).__name__}: {e}"
            return ""

        failed = [said for said in ranks.all("take from shadows", take) if said]
        if not failed:
            return at, source if source == "memory" else "disk", joint
        restored.clear()
        self._say_not_taken(failed[0])
        seen = ranks.gather("see steps again", self._seen_steps())  # shadows that have ended meanwhile left bases
        at_disk: int | None
        at_disk, source = ranks.first("choose a step on disk", lambda: self._choose_step(step, [], "", seen))
        return at_disk, source, joint

    def _say_not_taken(self, why: str) -> None:
        self._say(f"everstep: {self._path.path}: nothing is taken from shadows: {why}; the shadows of all ranks are needed")

    def _seen_steps(self) -> list[int]:
        """The newest steps that this process could restore. Of a log in hosts' memory, others may see other parts."""
        with contextlib.suppress(EverstepError):
            return joint_of(self._path).steps()[-_SEEN_STEPS:]
        return []

    def _choose_step(
        self, step: Step, asked: list[list[int | str]], holding: str, seen: list[list[int]]
    ) -> tuple[int | None, str]:
        """By one process: the step to restore (None for a new run), and from where: "disk"; the "memory" of all ranks'
        shadows; or "bases" that these shadows' states must be written as first. Nothing is written."""
        check_step(step)
        try:
            joint = joint_of(self._path)
            line = joint.eras[0].lines[0]
            latest = step == "latest" or forked_already(joint.listing, line, step, self._opened.launch)
            in_memory, why = common_step(asked) if asked and all(asked) else (-1, "")
            if in_memory >= 0 and (in_memory == step or (latest and in_memory >= latest_of(joint))):
                newest = joint.eras[0].newest
                same = newest.holding == holding and newest.world_size == self._ranks.size
                return in_memory, "memory" if same and reaches_all(asked) else "bases"
            if why:
                self._say_not_taken(why)
            elif in_memory >= 0:
                self._say(f"everstep: {self._path.path}: the shadows hold step {in_memory}; taking the state from disk")
            at = joint.latest() if latest else step
            common = set.intersection(*map(set, seen)) if seen else {at}
            if latest and at not in common and common:
                at = max(common)
        except NothingToRestoreError:
            if step in ("latest", 0):
                return None, "disk"
            raise StepNotFoundError(f"step {step} cannot be restored: {self._path.path} has no steps yet") from None
        assert isinstance(at, int)
        joint.find(at)
        return at, "disk"

    def _restore_part(self, source: Source, full: Inventory, held: list[list[Holding]]) -> Restored:
        """This rank's boxes of a step."""
        at = source.step
        to_fill = full.to_fill(source.atoms)
        here = {h.uid for mine in held for h in mine} | to_fill.keys()
        missing = [
            a.label()
            for uid, a in source.atoms.items()
            if uid not in here and a.owner in source.layout.models and a.placement != "rank-local"
        ]
        if missing:
            raise MismatchError(
                f"step {at} does not fit the objects given: {len(missing)} tensor(s) of the run are in no rank's model: "
                f"{', '.join(missing[:10])}. Build the same model as the run was written with; where pipeline stages name "
                "their parameters differently, give attach(rename=...)"
            )
        updated = {uid for groups in full.groups.values() for group in groups for uid in group}
        # What joined its optimizer in mid-run may be in none yet; what is in another rank's alone is none of ours.
        updated |= full.tensors.keys() - {h.uid for mine in held for h in mine if h.optimized}
        restored = fetch(
            source, {**full.layout.by_uid(), **to_fill}, rank=self._ranks.rank, world_size=self._ranks.size,
            live=self._opened.training.optimizers, stateful=updated,
        )  # fmt: skip
        order_like(restored.state, full)
        self._opened.training.check(restored)
        left = [
            a.label()
            for uid, a in full.layout.by_uid().items()
            if a.placement == "rank-local" and uid in source.atoms and uid not in restored.state.tensors
        ]
        if left:
            warnings.warn(
                f"{', '.join(left[:5])} is Local, and rank {self._ranks.rank} had none of this shape when step {at} was "
                "written: it keeps what it has",
                InexactWarning,
                stacklevel=3,
            )
        return restored


def is_in_parts(opened: Opened, listing: Listing, step: Step) -> bool:
    """Whether steps of this run must be cut or joined to be had in one process that has what this one has."""
    generations = listing.generations()
    eras = any(timeline.document.own_bases for timeline in listing.timelines.values())
    if not generations:
        return False
    newest = generations[max(generations)]
    if eras or any(g.world_size > 1 for g in generations.values()):
        if newest.world_size > 1 or newest.log != "memory":
            return True
        # The newest state may be in a shadow's memory only; but before the first base of its era nothing is there.
        steps = line_of(listing, check_tail=False).steps()
        return not steps or (step != "latest" and step not in steps)
    then = opened.path.read_layout(newest.layout, [newest.timeline]).by_uid()
    now = opened.training.inventory().layout.atoms
    both = [(a, then[a.uid]) for a in now if a.uid in then]
    differ = [a.label() for a, b in both if a.shape == b.shape and a.share != b.share]
    if differ and opened.mode == "shadow":
        raise UsageError(
            f"{', '.join(differ[:5])}: layout declares it otherwise than the run was written with. Resume once with "
            "mode='delta' to go on under another layout"
        )
    return bool(differ)
