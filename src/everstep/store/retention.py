"""What to keep. A pure plan of removals, and its execution in an order that a crash cannot hurt."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from everstep.errors import UsageError
from everstep.store import files
from everstep.store.bases import remove_base


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which steps stay restorable. The newest base and everything after it always stay."""

    bases: int = 2
    """So many of the newest bases, with all steps since the oldest of them."""
    every: int | None = None
    """Also every base whose step is the first at or after a multiple of this, without the steps between."""
    window_steps: int = 0
    """Also every one of the last so many steps."""
    max_bytes: int | None = None
    """Give up `bases` and `window_steps` (never the newest base and its steps) to stay under this."""
    min_bytes: int = 0
    """Remove nothing while the timeline takes less than this."""

    def __post_init__(self) -> None:
        for name in ("bases", "every", "window_steps", "max_bytes", "min_bytes"):
            value = getattr(self, name)
            kind, told = (Real, "number") if name.endswith("_bytes") else (Integral, "whole number")
            if (not isinstance(value, kind) or value != value) and not (value is None and name in ("every", "max_bytes")):
                raise UsageError(f"{name} of a retention must be a {told}, not {value!r}")
        if self.bases < 1 or self.window_steps < 0:
            raise UsageError("retention must keep at least one base, and no negative number of steps")
        if (self.every is not None and self.every < 1) or (self.max_bytes is not None and self.max_bytes < 1):
            raise UsageError("retention limits must be positive")

    def __str__(self) -> str:
        parts = [f"last {self.bases} bases and all steps since"]
        if self.every:
            parts.append(f"a base every {self.every} steps")
        if self.window_steps:
            parts.append(f"last {self.window_steps} steps")
        if self.min_bytes:
            parts.append(f"everything below {self.min_bytes / 1e9:.1f} GB")
        if self.max_bytes:
            parts.append(f"at most {self.max_bytes / 1e9:.1f} GB")
        return ", ".join(parts)


@dataclass(frozen=True)
class StoredBase:
    step: int
    num_bytes: int
    folder: str


@dataclass(frozen=True)
class StoredSegment:
    first_step: int
    last_step: int
    num_bytes: int
    path: str


@dataclass(frozen=True)
class Removal:
    """Segments oldest first, then bases oldest first: what is left is always whole."""

    horizon: int
    """Steps below this one may be missing afterwards."""
    segments: tuple[StoredSegment, ...]
    bases: tuple[StoredBase, ...]

    @property
    def num_bytes(self) -> int:
        return sum(s.num_bytes for s in self.segments) + sum(b.num_bytes for b in self.bases)


def plan_removal(
    policy: Retention, bases: Sequence[StoredBase], segments: Sequence[StoredSegment], step: int
) -> Removal:
    """What may go. `segments` of one line, `step` the newest step."""
    order = sorted(bases, key=lambda b: b.step)
    if not order or sum(b.num_bytes for b in bases) + sum(s.num_bytes for s in segments) < policy.min_bytes:
        return Removal(0, (), ())
    oldest = order[max(0, len(order) - policy.bases)].step
    if policy.window_steps:
        before = [b.step for b in order if b.step <= step - policy.window_steps]
        oldest = min(oldest, before[-1] if before else order[0].step)
    removal = _remove_before(policy, order, segments, oldest)
    if policy.max_bytes is not None:
        total = sum(b.num_bytes for b in order) + sum(s.num_bytes for s in segments)
        for base in order:
            if total - removal.num_bytes <= policy.max_bytes:
                break
            if base.step > oldest:
                oldest = base.step
                removal = _remove_before(policy, order, segments, oldest)
    return removal


def _remove_before(
    policy: Retention, order: Sequence[StoredBase], segments: Sequence[StoredSegment], oldest: int
) -> Removal:
    milestones = set()
    if policy.every:
        seen = set()
        for base in order:
            mark = -(-base.step // policy.every)
            if mark not in seen:
                seen.add(mark)
                milestones.add(base.step)
    return Removal(
        oldest,
        tuple(s for s in sorted(segments, key=lambda s: s.first_step) if s.last_step <= oldest),
        tuple(b for b in order if b.step < oldest and b.step not in milestones),
    )


def execute(removal: Removal) -> None:
    """Remove. Names are gone durably in this order, so that a crash leaves a shorter history, never a torn one."""
    folders = sorted({os.path.dirname(segment.path) for segment in removal.segments})
    for folder in folders:
        files.sync_dir(folder)  # the newest may be there by name only: a log without any segment is a lost one
    for segment in removal.segments:
        files.remove(segment.path)
    for folder in folders:
        files.sync_dir(folder)
    for base in removal.bases:
        remove_base(base.folder)
