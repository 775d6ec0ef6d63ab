"""One process resumes what one process wrote: from disk, from a pool, or from a shadow's memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from everstep import cursor as cursors
from everstep.capture.buckets import BucketOrders
from everstep.errors import CorruptionError, EverstepError, NothingToRestoreError, StepNotFoundError
from everstep.follow import recover
from everstep.follow.arena import DamagedStateError
from everstep.follow.fetch import find_all
from everstep.format.documents import TimelineDocument
from everstep.generation import Resumed, first_timeline, forked_already, next_generation, open_generation
from everstep.opening import Opened
from everstep.restore.execute import Restored, check_before_replay, restore
from everstep.restore.history import Step, check_step
from everstep.restore.join import Era, is_newest, latest_of, set_back, warn_if_set_back
from everstep.restore.plan import Line, line_files, line_of
from everstep.store.runs import Listing, read_listing


class Alone:
    """One process that resumes a run. For one call of resume()."""

    def __init__(self, opened: Opened, start: Callable[[Resumed], None]) -> None:
        """`start` is called when the state is in the live objects and the generation is open."""
        self._opened = opened
        self._path = opened.path
        self._start = start
        self._say = opened.say
        self._fetch_s = 0.0

    def resume(self, listing: Listing, step: Step) -> tuple[Resumed, Restored | None]:
        """Where the run goes on, and the state, which is in the live objects; none for a new run."""
        begun = time.perf_counter()
        offer = self._find_shadow(listing, step)
        if offer is None and _had_shadow(listing):
            listing = read_listing(self._path)  # one that has ended meanwhile has left a base
        self._fetch_s = time.perf_counter() - begun
        try:
            while True:
                line, at, offer = self._choose(listing, step, offer)
                if line is None or at is None:
                    return self._begin_new(listing), None
                try:
                    if offer is None and step == "latest":
                        warn_if_set_back(self._path, Era([line]), at)
                    return self._restore(listing, line, at, step, offer)
                except DamagedStateError as e:
                    assert offer is not None
                    offer.is_damaged(str(e))
                    return self._resume_without(listing, step, offer, e)
                except CorruptionError as e:
                    if step != "latest" or not set_back(self._path, Era([line]), at, e):
                        raise
                    listing = read_listing(self._path)
        finally:
            if offer is not None:
                offer.release()

    def _resume_without(
        self, listing: Listing, step: Step, offer: recover.Offer, damage: DamagedStateError
    ) -> tuple[Resumed, Restored]:
        """A shadow's state turned out to be damaged when some of it was in the live model: all is taken from disk."""
        self._say(f"everstep: {damage}. The shadow (pid {offer.pid}) is not used; taking the state from disk")
        try:
            line, at, _ = self._choose(listing, step, None)
            if line is None or at is None:
                raise NothingToRestoreError("no step is on disk")
            return self._restore(listing, line, at, step, None)
        except EverstepError as e:
            if not offer.file:
                raise  # what comes over a connection is verified before it is put anywhere
            raise CorruptionError(
                f"{damage}; and from disk: {e}\nParts of the damaged state are in the live model: it must not be trained or "
                "saved. Build model and optimizer again, and resume, or start another run"
            ) from e

    def _find_shadow(self, listing: Listing, step: Step) -> recover.Offer | None:
        opened, options = self._opened, self._opened.options
        if not options.shadows:
            return recover.find(self._path, opened.run)
        line = None  # for a new run: a shadow that does not let us in says so all the same
        with contextlib.suppress(NothingToRestoreError):
            line = line_of(listing, check_tail=False)
        return find_all(
            options.shadows, self._path, opened.run, () if line is None else line.generations,
            token=options.token, tls=options.tls, num_streams=options.shadow_streams,
            at_least=latest_of(line) if line is not None and step == "latest" else -1,
            say=lambda text: self._say(f"everstep: {self._path.path}: {text}") if line is not None else None,
        )  # fmt: skip

    def _choose(
        self, listing: Listing, step: Step, offer: recover.Offer | None
    ) -> tuple[Line | None, int | None, recover.Offer | None]:
        """The line and step to restore, and the shadow that has it, if one has; no line for a new run."""
        check_step(step)
        try:
            line = line_of(listing, check_tail=offer is None)
            latest = step == "latest" or forked_already(listing, line, step, self._opened.launch)
            if offer is not None and _is_where_it_began(offer, line):
                offer.generation = line.newest.generation
            if offer is not None and offer.generation != line.newest.generation:
                self._say(
                    f"everstep: a shadow (pid {offer.pid}) of generation {offer.generation} is stale: generation "
                    f"{line.newest.generation} has gone on without it"
                )
                offer.release()
                offer = None
            if offer is not None and (offer.step == step or (latest and offer.step >= latest_of(line))):
                return line, offer.step, offer
            line = line_of(listing)
            if offer is not None:
                self._say(f"everstep: the shadow (pid {offer.pid}) holds step {offer.step}; taking the state from disk")
                offer.release()
            if latest:
                return line, line.latest(), None
            line.plans(step)  # type: ignore[arg-type]
            return line, step, None  # type: ignore[return-value]
        except NothingToRestoreError:
            if step in ("latest", 0):
                return None, None, None
            raise StepNotFoundError(f"step {step} cannot be restored: {self._path.path} has no steps yet") from None

    def _restore(
        self, listing: Listing, line: Line, at: int, asked: Step, offer: recover.Offer | None
    ) -> tuple[Resumed, Restored]:
        """Restore a step in place, and begin a generation there."""
        training = self._opened.training
        restored, replayed = self._fetch(line, at, offer)
        cursor = training.check(restored)
        self._path.sync(line_files(line, restored.plan))
        timeline = line.timelines[0]
        if not os.path.exists(os.path.join(self._path.timeline(timeline), "timeline.json")):
            raise CorruptionError(
                f"timeline.json of timeline {timeline} in {self._path.path} is missing: put it back from a copy, or go on "
                "under another path by everstep.open(run).restore(...)"
            )
        begun = time.perf_counter()
        training.apply(restored, cursor)
        self._fetch_s += time.perf_counter() - begun
        if at and training.compress is not None:
            training.warm(cursor)
        fork = offer is None and asked != "latest" and not is_newest(line, at)
        if fork:
            timeline = max(listing.timelines) + 1
            self._path.create_timeline(TimelineDocument(timeline, line.timelines[0], line.newest.generation, at))
        in_pool = restored.plan is not None and restored.plan.base.in_pool
        found = Resumed(
            step=at, timeline=timeline, generation=next_generation(listing),
            source="shadow" if offer is not None else "pool" if in_pool else "disk",
            in_memory=restored.plan is None or line.needs_memory(restored.plan), is_new=fork, cursor=cursor,
            proven=restored.proven, orders=self._orders(), shares=[] if offer is None else offer.shares,
            fetch_s=self._fetch_s, replayed=replayed,
            told=f"at step {at} ({self._describe(restored, at, offer)}{f', new timeline {timeline}' if fork else ''}; "
            f"{'every bit' if restored.proven else 'every bit of the parameters'} proven)",
        )  # fmt: skip
        self._begin(found, line.newest.generation, None if asked == "latest" else asked)
        return found, restored

    def _fetch(
        self, line: Line, at: int, offer: recover.Offer | None
    ) -> tuple[Restored, tuple[float, int] | None]:
        """A state, and what replaying so many steps took, if that was done. Of a shadow's, parts may come in apply()."""
        begun = time.perf_counter()
        training, replayed = self._opened.training, None
        if offer is not None:
            live = training.inventory().tensors
            if _has_finished_passes(cursors.decode(offer.cursor)):
                live = {}  # what is run again between them is undone from the state, which then is not the live one
            restored = Restored(offer.fetch(live), None, offer.proven, dict(offer.fingerprint))
        else:
            self._say(f"everstep: restoring step {at} of {self._path.path} …")
            check_before_replay(line, at, training.models, training.optimizers, training.declared)
            restored = restore(line, at, live=training.optimizers)
            if restored.plan is not None:
                replayed = time.perf_counter() - begun, at - restored.plan.base.step
        self._fetch_s += time.perf_counter() - begun
        return restored, replayed

    def _describe(self, restored: Restored, at: int, offer: recover.Offer | None) -> str:
        """Where a state came from."""
        if restored.plan is not None:
            kind = "the pool's step" if restored.plan.base.in_pool else "base"
            return f"{kind} {restored.plan.base.step} + {at - restored.plan.base.step} steps"
        assert offer is not None
        if self._opened.options.shadow:
            return f"from the memory of shadows at {offer.where}"
        return f"from the memory of its shadow, pid {offer.pid}"

    def _begin_new(self, listing: Listing) -> Resumed:
        found = Resumed(
            step=0, timeline=first_timeline(self._opened, listing), generation=next_generation(listing),
            orders=self._orders(), fetch_s=self._fetch_s,
        )  # fmt: skip
        self._begin(found, None, None)
        return found

    def _begin(self, found: Resumed, parent: int | None, asked_step: int | None) -> None:
        """Open a generation and start it."""
        open_generation(self._opened, found.timeline, found.generation, parent, found.step, asked_step)
        self._path.remove_after(found.timeline, found.step)
        self._start(found)

    def _orders(self) -> BucketOrders | None:
        training = self._opened.training
        return BucketOrders(training.models) if training.compress is not None else None


def _has_finished_passes(cursor: dict[str, Any]) -> bool:
    return cursor["data"] is not None and cursor["data"]["pass"] > 0


def _had_shadow(listing: Listing) -> bool:
    try:
        return line_of(listing, check_tail=False).newest.log == "memory"
    except NothingToRestoreError:
        return False
    except CorruptionError:
        return True


def _is_where_it_began(offer: recover.Offer, line: Line) -> bool:
    """Whether a shadow that the newest generation never reached holds the state from which that one began."""
    return offer.generation == line.newest.parent and offer.step == line.newest.resume_step
