"""open(run) -> History: a run seen from outside, read-only, without its model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from everstep import cursor as cursors
from everstep.errors import AuditError, CorruptionError, EverstepError, UsageError
from everstep.fold import Folder
from everstep.format.documents import Manifest
from everstep.frame import SetLayout
from everstep.layout import Pattern
from everstep.module_states import ModuleStates
from everstep.naming import Declared, Rename, named, take_inventory
from everstep.ranks import place
from everstep.restore.apply import apply, public_state
from everstep.restore.compare import Comparison, compare
from everstep.restore.execute import (
    Restored,
    audit,
    check_chain,
    layout_finder,
    load_base,
    no_gc,
    not_audited,
    num_threads,
    open_frames,
    warn_if_unproven,
)
from everstep.restore.join import Joint, Source, fetch, joint_of, order_like, set_back, still_has, warn_if_set_back
from everstep.restore.plan import Line, Plan, describe_steps
from everstep.restore.replicas import drifted
from everstep.store.bases import check_base, is_there
from everstep.store.runs import RunPath, read_listing
from everstep.store.segments import FrameEntry

Step = int | Literal["latest"]


@dataclass
class Report:
    """What verify() found."""

    num_bases: int = 0
    num_frames: int = 0
    num_bytes: int = 0
    deep: bool = False
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    replayed_step: int | None = None
    """With deep: the last step up to which every replayed step passed its audit, which always has the parameters."""
    proven_step: int | None = None
    """With deep: the last of them whose audit covers everything."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        head = (
            f"{self.num_bases} bases, {self.num_frames} frames, {self.num_bytes / 1e6:.1f} MB: "
            f"{'all good' if self.ok else f'{len(self.problems)} problem(s)'}"
        )
        if self.deep:
            head += f"; replayed and proven up to step {self.proven_step}"
            if self.replayed_step != self.proven_step:
                head += f", but for some optimizer state up to step {self.replayed_step}"
        return "\n  ".join([head, *self.problems, *self.notes])


class History:
    """Every restorable step of a run. Reads only; needs no model; never unpickles."""

    def __init__(self, run: str | os.PathLike[str], *, timeline: int | None = None) -> None:
        """`timeline`: which line to look at where a call does not say; None: the newest."""
        self._path = RunPath(run)
        self._timeline = timeline
        self._path.must_exist()
        self._path.read_run()

    def _joint(self, timeline: int | None = None) -> Joint:
        return joint_of(self._path, timeline=self._timeline if timeline is None else timeline)

    @property
    def path(self) -> str:
        return self._path.path

    @property
    def steps(self) -> list[int]:
        """Every restorable step of the line, ancestors included."""
        return self._joint().steps()

    @property
    def timelines(self) -> list[int]:
        return sorted(read_listing(self._path).timelines)

    def plan(self, step: Step = "latest", *, timeline: int | None = None, rank: int = 0) -> Plan:
        """How a step would be restored, as far as this rank wrote it; print it."""
        return self.plans(step, timeline=timeline)[rank]

    def plans(self, step: Step = "latest", *, timeline: int | None = None) -> list[Plan]:
        """The same for every rank that wrote it."""
        joint = self._joint(timeline)
        at = _step(joint, step)
        return [line.plans(at)[0] for line in joint.find(at).lines]

    def state(self, step: Step = "latest", *, timeline: int | None = None) -> dict[str, Any]:
        """S(step) as nested dicts of whole tensors: `model`, `optimizer`, `extras`."""
        restored = self._newest(step, timeline, lambda source: fetch(source, source.atoms))
        warn_if_unproven(restored)
        return public_state(restored.state, cursors.decode(restored.state.cursor))

    def restore(
        self, model: Any, optimizer: Any, step: Step = "latest", extras: dict[str, Any] | None = None, *,
        timeline: int | None = None, rename: Rename = None, layout: Sequence[Pattern] = (),
    ) -> int:  # fmt: skip
        """Put S(step) into these objects; returns the step. Nothing on disk changes; RNG is left alone.

        Sharded parameters (DTensors, and what `layout` declares) get their part. `rename`: from names in the model to names
        in the run.
        """
        models, optimizers = named(model, nn.Module, "model"), named(optimizer, Optimizer, "optimizer")
        given = cursors.check_extras(extras)
        modules = ModuleStates(models)
        declared = Declared(rename, layout)
        live = take_inventory(models, optimizers, declared)
        rank, world_size = place()
        if world_size == 1:
            declared.check([live.matched])

        def take(source: Source) -> Restored:
            if source.era.world_size == 1 and not any(atom.boxes for atom in live.layout.atoms):
                return fetch(source, source.atoms, live=optimizers)
            wanted = {**live.layout.by_uid(), **live.to_fill(source.atoms)}
            found = fetch(source, wanted, rank=rank, world_size=world_size, live=optimizers)
            order_like(found.state, live)
            return found

        with no_gc():
            restored = self._newest(step, timeline, take)
            cursor = cursors.decode(restored.state.cursor)
            if given:
                cursors.check_same_extras(given, cursor["extras"])
            warn_if_unproven(restored)
            apply(restored.state, models, optimizers, declared)
        modules.load(cursor.get("modules", {}))
        cursors.load_extras(given, cursor["extras"])
        return restored.state.step

    def _newest(self, step: Step, timeline: int | None, take: Callable[[Source], Restored]) -> Restored:
        """What `take` makes of a step; for "latest", of the newest whose slot in a pool is not damaged."""
        while True:
            source = self._source(step, timeline)
            if step == "latest":
                warn_if_set_back(self._path, source.era, source.step)
            try:
                return take(source)
            except CorruptionError as e:
                if not all(still_has(line, source.step) for line in source.era.lines if source.step in line.bases):
                    continue  # it was overwritten: there are newer ones
                if _removed(source):
                    continue  # look again at what there is now
                if step != "latest" or not set_back(self._path, source.era, source.step, e):
                    raise

    def _source(self, step: Step, timeline: int | None) -> Source:
        joint = self._joint(timeline)
        at = _step(joint, step)
        return Source(joint.find(at), at)

    def verify(self, *, deep: bool = False, progress: Callable[[int, int], None] | None = None) -> Report:
        """Check every checksum of the newest line; `deep` also replays every step against its audit."""
        report = Report(deep=deep)
        replayed: list[_Replayed] = []
        for era in self._joint().eras:
            for line in era.lines:
                found = self._verify_line(report, line, deep, progress)
                if era.high is None:
                    replayed.append(found)
            if era.world_size > 1:
                _checked(report, lambda lines=era.lines: report.problems.extend(drifted(lines)))  # type: ignore[misc]
        if deep and all(each.steps for each in replayed):
            report.replayed_step = min(max(each.steps) for each in replayed)
            report.proven_step = max(set.intersection(*(each.whole for each in replayed)), default=None)
        return report

    def _verify_line(
        self, report: Report, line: Line, deep: bool, progress: Callable[[int, int], None] | None
    ) -> _Replayed:
        """What one rank has written."""
        report.problems += line.problems
        for step, (manifest, folder) in sorted(line.bases.items()):
            report.num_bases += 1
            report.num_bytes += manifest.num_bytes
            _checked(report, lambda m=manifest, f=folder: _verify_base(line, m, f))  # type: ignore[misc]
            if manifest.step != step:
                report.problems.append(f"{folder} says that it is step {manifest.step}")
        entries = [line.frames[n] for n in sorted(line.frames)]
        for i, entry in enumerate(entries):
            report.num_frames += 1
            report.num_bytes += entry.end_offset - entry.offset
            _checked(report, lambda e=entry: _verify_frame(line, e))  # type: ignore[misc]
            if progress is not None:
                progress(i + 1, len(entries))
        for segment in line.segments.values():
            if segment.torn_bytes:
                report.notes.append(f"{segment.path}: {segment.torn_bytes} bytes of an unfinished step at its end")
        return _verify_deep(report, line) if deep else _Replayed()

    def compare(self, other: History, step: Step = "latest", *, other_step: Step | None = None) -> Comparison:
        """This run's state against another's, atom by atom, whatever their layouts."""
        return compare(self._source(step, None), other._source(step if other_step is None else other_step, None))

    def __repr__(self) -> str:
        try:
            return f"<everstep.History {self.path}: steps {describe_steps(self.steps)}>"
        except EverstepError as e:
            return f"<everstep.History {self.path}: {e}>"


def check_step(step: Step) -> None:
    """UsageError unless this can be the name of a step."""
    if step != "latest" and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
        raise UsageError(f"step must be 'latest' or a number from 0 on, not {step!r}")


def _step(joint: Joint, step: Step) -> int:
    check_step(step)
    return joint.latest() if step == "latest" else step


def _checked(report: Report, work: Callable[[], None]) -> None:
    try:
        work()
    except (CorruptionError, AuditError) as e:
        report.problems.append(str(e))


def _verify_base(line: Line, manifest: Manifest, folder: str) -> None:
    try:
        check_base(folder, manifest)
    except CorruptionError:
        if still_has(line, manifest.step) and not _removed_base(line, manifest, folder):
            raise


def _removed(source: Source) -> bool:
    """Whether retention has removed something that this step stood on since the run was read."""
    plans = [(line, plan) for line in source.era.lines for plan in line.plans(source.step)]
    return any(
        _removed_base(line, plan.base, plan.base_folder) or any(_removed_frame(line, entry) for entry in plan.frames)
        for line, plan in plans
    )


def _removed_base(line: Line, manifest: Manifest, folder: str) -> bool:
    """Whether retention has removed it since the line was read."""
    return not manifest.in_pool and not is_there(folder) and manifest.step < _horizon(line, manifest.generation)


def _removed_frame(line: Line, entry: FrameEntry) -> bool:
    """The same of the file that this frame is in."""
    return not os.path.exists(entry.path) and entry.step <= _horizon(line, entry.generation)


def _horizon(line: Line, generation: int) -> int:
    """Of the generation's timeline, as it is now."""
    return line.listing.path.read_kept(line.listing.generations()[generation].timeline).horizon


def _verify_frame(line: Line, entry: FrameEntry) -> None:
    plan = Plan(entry.step, 0, 0, None, "", (entry,))  # type: ignore[arg-type]
    try:
        frames, readers = open_frames(line, plan)
    except CorruptionError:
        if _removed_frame(line, entry):
            return
        raise
    try:
        frames[0].check_payloads()
        for op in frames[0].ops:
            if isinstance(op, SetLayout):
                layout_finder(line)(op.layout)
    finally:
        for reader in readers:
            reader.close()


@dataclass
class _Replayed:
    """Steps of one line whose audits passed, and those of them whose audits cover everything."""

    steps: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)


def _verify_deep(report: Report, line: Line) -> _Replayed:
    """From each base replay to the next base (or the end), checking every audit."""
    starts = sorted(line.bases)
    steps = line.steps()
    replayed = _Replayed()
    for i, start in enumerate(starts):
        end = starts[i + 1] if i + 1 < len(starts) else steps[-1]
        while end > start and not all(n in line.frames for n in range(start + 1, end + 1)):
            end -= 1
        plan = _plan_from(line, start, end)
        try:
            _replay(report, line, plan, replayed)
        except EverstepError as e:
            if not still_has(line, start) or _removed_base(line, plan.base, plan.base_folder):
                continue
            if any(_removed_frame(line, f) for f in plan.frames):
                continue
            report.problems.append(str(e))
            break
    return replayed


def _plan_from(line: Line, start: int, end: int) -> Plan:
    manifest, folder = line.bases[start]
    frames = tuple(line.frames[n] for n in range(start + 1, end + 1))
    return Plan(end, line.spans[0].timeline, line.newest.generation, manifest, folder, frames)


def _replay(report: Report, line: Line, plan: Plan, replayed: _Replayed) -> None:
    frames, readers = open_frames(line, plan)
    try:
        check_chain(frames)
        state = load_base(plan, os.cpu_count() or 1)
        replayed.steps.add(state.step)
        if plan.base.is_proven:
            replayed.whole.add(state.step)
        for frame in frames:
            Folder(find_layout=layout_finder(line), num_threads=num_threads(line, frame)).fold(state, [frame])
            bad = audit(state, frame.footer)
            if bad:
                report.problems.append(
                    f"step {frame.step}: replaying gives other values than the trainer had for {', '.join(bad[:5])}"
                )
                return
            replayed.steps.add(frame.step)
            if not not_audited(state, frame.footer):
                replayed.whole.add(frame.step)
    finally:
        for reader in readers:
            reader.close()


def open_run(run: str | os.PathLike[str], *, timeline: int | None = None) -> History:
    """Open a run to read it: its newest line, or that of one timeline. NotARunError if there is no run."""
    return History(run, timeline=timeline)
