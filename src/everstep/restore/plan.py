"""From a run's listing to what can be restored and how. A plan can be printed before anything is restored."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from everstep.errors import CorruptionError, NothingToRestoreError, StepNotFoundError, UnreadableError
from everstep.format.documents import GenerationDocument, Manifest
from everstep.format.segment import file_name
from everstep.store import files
from everstep.store.bases import base_folder
from everstep.store.runs import Listing
from everstep.store.segments import FrameEntry, Segment, StoredFrame


@dataclass(frozen=True)
class Span:
    """Steps (low, high] of a line come from this generation's frames."""

    timeline: int
    generation: int
    low: int
    high: int | None
    in_memory: bool = False
    """It had no log on disk: what is not there (any more) is not missed."""


@dataclass(frozen=True)
class Plan:
    """How S(step) is made: a base, then frames."""

    step: int
    timeline: int
    generation: int
    base: Manifest
    base_folder: str
    frames: tuple[FrameEntry, ...]

    @property
    def num_bytes(self) -> int:
        return self.base.num_bytes + sum(f.end_offset - f.offset for f in self.frames)

    def __str__(self) -> str:
        lines = [
            f"restore step {self.step} (timeline {self.timeline}, generation {self.generation})",
            f"  base   step {self.base.step:>9}  {self.base.num_bytes / 1e6:10.1f} MB  {self.base_folder}",
        ]
        by_file: dict[str, list[FrameEntry]] = {}
        for frame in self.frames:
            by_file.setdefault(frame.path, []).append(frame)
        for path, frames in by_file.items():
            size = sum(f.end_offset - f.offset for f in frames) / 1e6
            lines.append(f"  frames {frames[0].step:>6} to {frames[-1].step:>6}  {size:8.1f} MB  {path}")
        lines.append(f"  {len(self.frames)} steps to replay, {self.num_bytes / 1e6:.1f} MB to read")
        return "\n".join(lines)


@dataclass
class Line:
    """One unbroken history: a generation and all it goes on from."""

    listing: Listing
    spans: list[Span]
    newest: GenerationDocument
    bases: dict[int, tuple[Manifest, str]] = field(default_factory=dict)
    frames: dict[int, FrameEntry] = field(default_factory=dict)
    segments: dict[str, Segment] = field(default_factory=dict)
    durable_step: int = -1
    horizon: int = 0
    gaps: list[tuple[int, int]] = field(default_factory=list)
    lost_from: int | None = None
    """A log file that once existed is gone: steps from here on may have been lost."""
    problems: list[str] = field(default_factory=list)

    @property
    def timelines(self) -> list[int]:
        """Timelines of the line, newest first."""
        return list(dict.fromkeys(s.timeline for s in self.spans))

    @property
    def generations(self) -> list[GenerationDocument]:
        """Those of the line, newest first."""
        known = self.listing.generations()
        return [known[s.generation] for s in self.spans]

    def steps(self) -> list[int]:
        """Every restorable step, in order."""
        found: set[int] = set(self.bases)
        for step in self.bases:
            n = step + 1
            while n in self.frames and n not in found:
                found.add(n)
                n += 1
        return sorted(found)

    def needs_memory(self, plan: Plan) -> bool:
        """Whether some of its frames are only in the memory of this host, in the log of a shadow."""
        return any(self.segments[frame.path].in_memory for frame in plan.frames)

    def missing(self) -> list[int]:
        """Steps that were durable once, that nobody removed, and that cannot be restored any more."""
        steps = self.steps()
        if not steps and not self.frames:
            return []
        there = set(steps)
        last = max([self.durable_step, *there])
        never = {n for first, end in self.gaps for n in range(first, min(end, last) + 1)}
        return [n for n in range(self.horizon, last + 1) if n not in there and n not in never]

    def damaged(self, after: int, high: int | None) -> list[str]:
        """What is wrong with bases that cannot be read, of steps after one and up to another."""
        found: dict[str, None] = {}
        for span in self.spans:
            ends = [n for n in (span.high, high) if n is not None]
            for step, text in self.listing.timelines[span.timeline].damaged.items():
                if after < step <= min(ends, default=step):
                    found[text] = None
        return list(found)

    def latest(self) -> int:
        """The newest step. CorruptionError if newer ones were durable once and are lost."""
        steps = self.steps()
        newest = steps[-1] if steps else -1
        if self.durable_step > newest:
            raise CorruptionError(
                f"{self.listing.path.path}: steps {newest + 1} to {self.durable_step} were durable but are damaged or "
                f"missing: {self._why()}. {_can_restore(steps)}"
            )
        if self.lost_from is not None:
            raise CorruptionError(
                f"{self.listing.path.path}: steps from {self.lost_from} on may be lost: {self._why()}. {_can_restore(steps)}"
            )
        if not steps:
            if self.problems:
                raise CorruptionError(f"{self.listing.path.path}: nothing can be restored: {self._why()}")
            raise NothingToRestoreError(
                f"{self.listing.path.path} holds no restorable step yet: its first base was not finished{self._partial()}"
            )
        return steps[-1]

    def lost(self, step: int) -> CorruptionError:
        """That this step was durable, and is not there any more."""
        return CorruptionError(
            f"{self.listing.path.path}: step {step} was durable but is damaged or missing: {self._why()}. "
            f"{_can_restore(self.steps())}"
        )

    def _partial(self) -> str:
        """Bases that are not whole, for people."""
        found = [text for n in self.timelines for text in self.listing.timelines[n].partial]
        if not found:
            return ""
        return f". There are parts of bases ({'; '.join(found)}): put the folders of all shadows of the run together"

    def _why(self) -> str:
        return "; ".join(self.problems) if self.problems else "their files are gone"

    def plans(self, step: int) -> list[Plan]:
        """All ways to make S(step), cheapest first. StepNotFoundError or CorruptionError if there is none."""
        plans = []
        for base in sorted((b for b in self.bases if b <= step), reverse=True):
            wanted = range(base + 1, step + 1)
            if all(n in self.frames for n in wanted):
                manifest, folder = self.bases[base]
                plans.append(
                    Plan(
                        step, self.spans[0].timeline, self.newest.generation, manifest, folder,
                        tuple(self.frames[n] for n in wanted),
                    )
                )  # fmt: skip
        if plans:
            return plans
        steps = self.steps()
        message = f"step {step} cannot be restored from {self.listing.path.path}"
        if step in self.missing() or (self.problems and not steps):
            raise CorruptionError(f"{message}: {self._why()}. {_can_restore(steps)}{self._partial()}")
        raise StepNotFoundError(f"{message}. {_can_restore(steps)}{self._partial()}")


def _can_restore(steps: list[int]) -> str:
    if not steps:
        return "No step can be restored"
    return f"Restorable steps: {describe_steps(steps)}"


def describe_steps(steps: Iterable[int]) -> str:
    """`0 to 40, 60 to 75`"""
    parts: list[list[int]] = []
    for n in steps:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in parts)


def line_of(listing: Listing, *, timeline: int | None = None, check_tail: bool = True) -> Line:
    """The newest line, or the newest of one timeline.

    Without `check_tail` frames count whose middle a crash may have lost: only for a look at where the line stands.
    """
    generations = listing.generations()
    if timeline is None:
        numbers = list(generations)
        _check_no_newer_damaged(listing, max(numbers, default=0))
    else:
        if timeline not in listing.timelines:
            have = ", ".join(str(t) for t in sorted(listing.timelines)) or "none"
            raise StepNotFoundError(f"{listing.path.path} has no timeline {timeline}; it has: {have}")
        numbers = list(listing.timelines[timeline].generations)
    if not numbers:
        problems = [p for t in listing.timelines.values() for p in t.problems] + listing.problems
        if problems:
            raise CorruptionError(f"{listing.path.path}: {'; '.join(problems)}")
        raise NothingToRestoreError(f"{listing.path.path} holds no restorable step yet: no training has begun")
    return _line(listing, generations, generations[max(numbers)], check_tail)


def line_to(listing: Listing, generation: int, *, check_tail: bool = True) -> Line:
    """The line of one generation and all it goes on from."""
    generations = listing.generations()
    if generation not in generations:
        raise CorruptionError(f"generation {generation} of {listing.path.path} is damaged or missing")
    return _line(listing, generations, generations[generation], check_tail)


def _check_no_newer_damaged(listing: Listing, newest: int) -> None:
    for timeline in listing.timelines:
        for number in listing.timelines[timeline].unread:
            if number > newest:
                raise CorruptionError(
                    f"{listing.path.generation_file(timeline, number)} is damaged: it says where the newest "
                    "part of this run begins. Restore a step of an older timeline by everstep.open(run).state(step, "
                    "timeline=n), or put the file back from a copy"
                )
        for segment in listing.timelines[timeline].segments:
            if segment.generation > newest:
                raise CorruptionError(
                    f"{segment.path} belongs to generation {segment.generation}, whose document is missing"
                )
        for step, manifest in listing.timelines[timeline].bases.items():
            if manifest.generation > newest:
                raise CorruptionError(
                    f"{base_folder(listing.path.bases(timeline), step)} belongs to generation {manifest.generation}, whose "
                    "document is missing"
                )
    for manifest, folder in listing.slots:
        if manifest.generation > newest:
            raise CorruptionError(
                f"the pool in {folder} holds a step of generation {manifest.generation}, whose document is missing"
            )


def _line(
    listing: Listing, generations: dict[int, GenerationDocument], newest: GenerationDocument, check_tail: bool
) -> Line:
    spans, broken = _spans(listing, generations, newest)
    line = Line(listing, spans, newest)
    line.problems += broken + listing.problems
    for span, before in itertools.zip_longest(spans, spans[1:]):
        _add_limits(line, span, before, spans[-1])
        _add_problems(line, span)
        _add_bases(line, span)
        for segment in _segments(line, span):
            _add_segment(line, span, segment)
    for span, before in itertools.pairwise(spans):
        if before.in_memory and not span.in_memory:
            _add_unpromised(line, span)
    _miss_whole_log(line)
    if check_tail:
        _cut_torn_tail(line)
    for span in spans:
        high = line.durable_step if span.high is None else min(span.high, line.durable_step)
        for segment in _segments(line, span):
            line.problems += [t for first, last, t in segment.holes if first <= high and last > span.low]
    missing = line.missing()
    if missing:
        line.problems.append(f"steps {describe_steps(missing)} were durable but cannot be restored any more")
    return line


def _spans(
    listing: Listing, generations: dict[int, GenerationDocument], newest: GenerationDocument
) -> tuple[list[Span], list[str]]:
    """From a generation back to the first that it stands on, and what is wrong on the way."""
    spans: list[Span] = []
    document: GenerationDocument | None = newest
    high: int | None = None
    while document is not None:
        spans.append(Span(document.timeline, document.generation, document.resume_step, high, document.log != "disk"))
        high = document.resume_step if high is None else min(high, document.resume_step)
        if document.parent is None:
            break
        parent = generations.get(document.parent)
        if listing.timelines[document.timeline].document.own_bases and (
            parent is None or parent.timeline != document.timeline
        ):
            break  # what came before is in other parts: see join.py
        if parent is None:
            return spans, [f"generation {document.parent} of {listing.path.path} is damaged or missing"]
        document = parent
    return spans, []


def _segments(line: Line, span: Span) -> list[Segment]:
    return [s for s in line.listing.timelines[span.timeline].segments if s.generation == span.generation]


def _gaps(line: Line, span: Span) -> list[tuple[int, int]]:
    """(first, last) of steps of this generation that were never stored."""
    kept = line.listing.timelines[span.timeline].kept
    return [(first, last) for first, last, generation in kept.gaps if generation == span.generation]


def _add_limits(line: Line, span: Span, before: Span | None, first: Span) -> None:
    """What retention has removed, what was never there, and what the generation's beginning says was durable."""
    timeline = line.listing.timelines[span.timeline]
    line.horizon = max(line.horizon, timeline.kept.horizon)
    line.gaps += [(first, last if span.high is None else min(last, span.high)) for first, last in _gaps(line, span)]
    if span.in_memory:
        # A state in a pool may be stored before the first base is: then that step is not missed either.
        begin = span.low if before is None else span.low + 1
        line.gaps.append((begin, sys.maxsize if span.high is None else span.high))
    # Where a timeline begins with bases of its own, its first step is durable in the layout before it. A generation that was
    # killed before these bases were there is followed by another that begins at the same step.
    begins = line.listing.timelines[first.timeline].document.own_bases and span.low <= first.low
    if begins:
        line.horizon = max(line.horizon, span.low)
    if span.low and not begins and not (before is not None and before.in_memory):
        line.durable_step = max(line.durable_step, span.low if span.high is None else min(span.low, span.high))


def _add_unpromised(line: Line, span: Span) -> None:
    """A generation goes on from a pool or a shadow's memory: until its first base is stored its steps stand on that alone,
    which goes when a base is there, its own or that of the next generation. None of them was called durable."""
    if any(segment.durable_step >= span.low for segment in _segments(line, span)):
        return  # there was a base once
    bases = [n for n, (manifest, _) in line.bases.items() if n >= span.low and not manifest.in_pool]
    last = min(bases) - 1 if bases else sys.maxsize
    line.gaps.append((span.low + 1, last if span.high is None else min(last, span.high)))


def _add_problems(line: Line, span: Span) -> None:
    """All of the timeline's, but for those of files that the line does not go through."""
    dead = {
        problem
        for segment in _segments(line, span)
        if span.high is not None and segment.first_step > span.high
        for problem in segment.problems
    }
    problems = line.listing.timelines[span.timeline].problems
    line.problems += [p for p in problems if p not in line.problems and p not in dead]


def _add_bases(line: Line, span: Span) -> None:
    for step, manifest in line.listing.timelines[span.timeline].bases.items():
        inside = manifest.generation == span.generation and (span.high is None or step <= span.high)
        if inside and step >= span.low and step not in line.bases and manifest.run == line.listing.run.run:
            line.bases[step] = (manifest, base_folder(line.listing.path.bases(span.timeline), step))
    for manifest, folder in line.listing.slots:  # a committed slot of a pool is a base
        step = manifest.step
        inside = (manifest.timeline, manifest.generation) == (span.timeline, span.generation)
        if inside and span.low <= step and (span.high is None or step <= span.high) and step not in line.bases:
            line.bases[step] = (manifest, folder)


def _add_segment(line: Line, span: Span, segment: Segment) -> None:
    """Its frames; and whether the file that it says comes next is there."""
    line.segments[segment.path] = segment
    durable = segment.durable_step
    line.durable_step = max(line.durable_step, durable if span.high is None else min(durable, span.high))
    gaps = _gaps(line, span)
    for frame in segment.frames:
        stored = not any(first <= frame.step <= last for first, last in gaps)
        if stored and span.low < frame.step and (span.high is None or frame.step <= span.high):
            line.frames.setdefault(frame.step, frame)
    others = _segments(line, span)
    if segment.is_cut_off and span.high is None and not any(s.first_step > segment.first_step for s in others):
        line.lost_from = max(segment.frames[-1].step if segment.frames else segment.first_step - 1, *line.bases, -1) + 1
    following = None if segment.end is None else segment.end.next_step
    if following is None or following <= line.horizon or (span.high is not None and following > span.high):
        return
    if any(s.first_step == following and s.header is not None for s in others):
        return
    name = file_name(span.generation, following)
    if not any(s.first_step == following for s in others) and os.path.exists(
        os.path.join(os.path.dirname(segment.path), name)
    ):
        return  # it is younger than the listing
    line.problems.append(
        f"the log file of generation {span.generation} that begins at step {following} is missing or damaged"
    )
    if span.high is None and not any(s.first_step > following for s in others):
        line.lost_from = following


def _miss_whole_log(line: Line) -> None:
    """The newest generation's log had begun, and no file of it is there, though retention never removes the last one.

    (Of a log in memory only parts are on disk for a while: there a base tells that they were not needed any more.)
    """
    span = line.spans[0]
    if span.generation not in line.listing.timelines[span.timeline].logs or _segments(line, span):
        return
    last = max((span.low, *line.bases))
    if not span.in_memory or last == span.low:
        line.problems.append(f"the log of generation {span.generation}, which begins at step {span.low + 1}, is missing")
        line.lost_from = last + 1


def _cut_torn_tail(line: Line) -> None:
    """Frames that nothing says were durable are read in full before they count: their middle may have been lost."""
    generation = line.newest.generation
    tail = [n for n in sorted(line.frames) if n > line.durable_step and line.frames[n].generation == generation]
    for i, step in enumerate(tail):
        entry = line.frames[step]
        try:
            with files.Reader(entry.path, direct=True) as reader:
                StoredFrame(entry, reader, line.segments[entry.path].seed).check_payloads()
        except UnreadableError as e:  # no crash leaves that behind: it was stored
            line.problems.append(str(e))
            line.lost_from = step
            for lost in tail[i:]:
                del line.frames[lost]
            return
        except (CorruptionError, FileNotFoundError):
            for torn in tail[i:]:
                del line.frames[torn]
            line.segments[entry.path].torn_bytes += entry.end_offset - entry.offset
            return


def line_files(line: Line, plan: Plan | None) -> list[str]:
    """Every file that a plan, and whoever goes on from it, stands on."""
    path = line.listing.path
    found = []
    if plan is not None:
        found += [os.path.join(plan.base_folder, name) for name in ("manifest.json", *plan.base.files)]
    found += [path for path, segment in line.segments.items() if not segment.in_memory]
    found += [os.path.join(folder, name) for _, folder in line.bases.values() for name in files.listing(folder)]
    for span in line.spans:
        found.append(os.path.join(path.generations(span.timeline), f"{span.generation:06d}.json"))
    for timeline in line.timelines:
        found.append(os.path.join(path.timeline(timeline), "timeline.json"))
        found += [os.path.join(path.layouts(timeline), n) for n in files.listing(path.layouts(timeline))]
    return [f for f in found if os.path.exists(f)]
