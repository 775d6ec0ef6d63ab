"""Several ranks, now or when the run was written, resume together: which step, from where, and what of it is this one's."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from everstep import cursor as cursors
from everstep.compress import Compressor, Tapped
from everstep.compress.agree import check_same_compressor
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
from everstep.follow.gather import Shadows, ShadowSource, common_step, leave_bases, reaches_all, writes_for
from everstep.naming import Declared, Inventory
from everstep.options import Options
from everstep.ranks import Holding, Ranks
from everstep.restore.apply import check_fits
from everstep.restore.execute import Restored, warn_if_unproven
from everstep.restore.history import Step
from everstep.restore.join import Joint, Source, fetch, joint_of, order_like, set_back, warn_if_set_back
from everstep.restore.plan import Line, line_of
from everstep.store.runs import Listing, RunPath, read_listing

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


@dataclass(frozen=True, kw_only=True)
class Together:
    """One rank among those that resume a run."""

    path: RunPath
    run: str
    ranks: Ranks
    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    declared: Declared
    extras: Mapping[str, Any]
    compress: Compressor[Any] | Tapped | None
    options: Options
    launch: str
    say: Callable[[str], None]

    def find(self, step: Step, full: Inventory, held: list[list[Holding]], holding: str) -> Found:
        """All agree on a step, and each takes what it has of it. Nothing is written but bases of what was in memory only."""
        ranks = self.ranks
        asked = ranks.gather("ask shadows", self._standings())
        seen = ranks.gather("see steps", self._seen_steps()) if any(asked) else []
        at: int | None
        at, source = ranks.first("choose a step", lambda: self._choose_step(step, asked, holding, seen))
        restored: list[Restored] = []
        joint: Joint | None = None
        if at is not None and source != "disk":
            at, source, joint = self._from_shadows(at, source, step, asked, seen, full, held, restored)
        while at is not None and source == "disk" and not restored:
            joint = joint_of(self.path)
            self.say(f"everstep: restoring step {at} of {self.path.path} …")
            if not self._restore_all(Source(joint.find(at), at), full, held, restored, may_set_back=step == "latest"):
                name = f"choose an older step than {at}"  # ranks meet once under each name
                at, source = ranks.first(name, lambda: self._choose_step(step, [], holding, []))
        if joint is not None and restored and source == "disk" and step == "latest" and at is not None and not ranks.rank:
            warn_if_set_back(self.path, joint.find(at), at)
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

        failed = [said for said in self.ranks.all(f"restore step {source.step}", take) if said]
        if not failed:
            return True
        restored.clear()
        damage = CorruptionError(failed[0])
        damage.step, damage.in_base = source.step, True
        return not set_back(self.path, source.era, source.step, damage)

    def _shadows(self) -> Shadows:
        """Those of all ranks."""
        options = self.options
        return Shadows(self.path, self.run, options.shadows, options.token, options.tls, options.shadow_streams)

    def _standings(self) -> list[int | str]:
        """What the shadows of all ranks tell this process; nothing if the run was not written with shadows."""
        try:
            line = line_of(read_listing(self.path.part(0)), check_tail=False)
        except (NothingToRestoreError, CorruptionError):
            return []
        return self._shadows().standings(line.generations) if line.newest.log == "memory" else []

    def _from_shadows(
        self, at: int, source: str, step: Step, asked: list[list[int | str]], seen: list[list[int]], full: Inventory,
        held: list[list[Holding]], restored: list[Restored],
    ) -> tuple[int | None, str, Joint]:  # fmt: skip
        """All ranks: what their shadows hold, or bases of that. If that fails, the step to be had from disk."""
        ranks = self.ranks
        joint = joint_of(self.path)
        self.say(f"everstep: taking step {at} of {self.path.path} from the memory of all ranks' shadows …")

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
        at_disk: int | None
        at_disk, source = ranks.first("choose a step on disk", lambda: self._choose_step(step, [], "", seen))
        return at_disk, source, joint

    def _say_not_taken(self, why: str) -> None:
        self.say(f"everstep: {self.path.path}: nothing is taken from shadows: {why}; the shadows of all ranks are needed")

    def _seen_steps(self) -> list[int]:
        """The newest steps that this process could restore. Of a log in hosts' memory, others may see other parts."""
        with contextlib.suppress(EverstepError):
            return joint_of(self.path).steps()[-_SEEN_STEPS:]
        return []

    def _choose_step(
        self, step: Step, asked: list[list[int | str]], holding: str, seen: list[list[int]]
    ) -> tuple[int | None, str]:
        """By one process: the step to restore (None for a new run), and from where: "disk"; the "memory" of all ranks'
        shadows; or "bases" that these shadows' states must be written as first. Nothing is written."""
        if step != "latest" and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
            raise UsageError(f"step must be 'latest' or a number from 0 on, not {step!r}")
        try:
            joint = joint_of(self.path)
            line = joint.eras[0].lines[0]
            latest = step == "latest" or forked_already(joint.listing, line, step, self.launch)
            in_memory, why = common_step(asked) if asked and all(asked) else (-1, "")
            if in_memory >= 0 and (in_memory == step or (latest and in_memory >= latest_of(joint))):
                newest = joint.eras[0].newest
                same = newest.holding == holding and newest.world_size == self.ranks.size
                return in_memory, "memory" if same and reaches_all(asked) else "bases"
            if why:
                self._say_not_taken(why)
            elif in_memory >= 0:
                self.say(f"everstep: {self.path.path}: the shadows hold step {in_memory}; taking the state from disk")
            at = joint.latest() if latest else step
            common = set.intersection(*map(set, seen)) if seen else {at}
            if latest and at not in common and common:
                at = max(common)
        except NothingToRestoreError:
            if step in ("latest", 0):
                return None, "disk"
            raise StepNotFoundError(f"step {step} cannot be restored: {self.path.path} has no steps yet") from None
        assert isinstance(at, int)
        joint.find(at)
        return at, "disk"

    def _restore_part(self, source: Source, full: Inventory, held: list[list[Holding]]) -> Restored:
        """This rank's boxes of a step."""
        at = source.step
        here = {h.uid for mine in held for h in mine}
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
        restored = fetch(
            source, full.layout.by_uid(), rank=self.ranks.rank, world_size=self.ranks.size, live=self.optimizers,
            stateful=updated,
        )  # fmt: skip
        order_like(restored.state, full)
        check_fits(restored.state, self.models, self.optimizers, self.declared)
        cursor = cursors.decode(restored.state.cursor)
        cursors.check_same_extras(self.extras, cursor["extras"])
        check_same_compressor(self.compress, cursor)
        warn_if_inexact(restored)
        left = [
            a.label()
            for uid, a in full.layout.by_uid().items()
            if a.placement == "rank-local" and uid in source.atoms and uid not in restored.state.tensors
        ]
        if left:
            warnings.warn(
                f"{', '.join(left[:5])} is Local, and rank {self.ranks.rank} had none of this shape when step {at} was "
                "written: it keeps what it has",
                InexactWarning,
                stacklevel=3,
            )
        return restored


def forked_already(listing: Listing, line: Line, step: int, launch: str) -> bool:
    """Whether an earlier process of this same launch has opened the fork that is asked for."""
    generations = listing.generations()
    return any(
        generations[s.generation].launch == launch and generations[s.generation].asked_step == step for s in line.spans
    )


def warn_if_inexact(restored: Restored) -> None:
    """Say what of a state is lost or not proven."""
    if restored.state.lost:
        warnings.warn(
            f"at step {restored.state.step} gradients were being accumulated over the commit and could not be stored: "
            f"resume(step={restored.state.step - 1}) goes on exactly",
            InexactWarning,
            stacklevel=4,
        )
    warn_if_unproven(restored)


def latest_of(line: Line | Joint) -> int:
    """The newest step in files; damage there does not matter where a shadow has the state."""
    try:
        return line.latest()
    except (CorruptionError, NothingToRestoreError):
        return -1
