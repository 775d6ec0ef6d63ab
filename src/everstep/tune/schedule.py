"""Which bytes of a state leave straight from where they are, which are snapshotted first, when, and what that costs. Pure.

A state is read-only from one update to the next. What the way out (the *link*) carries in that time needs no memory;
what it does not is copied first (a *snapshot*), as late as possible, and its memory is given back when it has left. If
that is more than the budget, training waits before the update (a *stall*), or only every k-th step is saved.

**Time.** A cycle begins at 0, right after an update, and takes `step_s`, or k of that if every k-th step is saved, and
the stalls. A piece may be read from `ready_s` on, until it is overwritten at `deadline_s`, at most a step later. If all
is updated in one block, all pieces have ready 0 and one deadline, the end of backward. With layer-wise updates each
layer has its own: ready when its update in backward has ended, due when its next one begins, which is after `step_s`,
in the next cycle. All times of a Schedule are seconds since the cycle began, stalls included.

**The choice.** Pieces are cut at multiples of a grain. The link carries one grain after another, the earliest deadline
first; those whose deadline has passed, which are snapshots by then, therefore go before all others. So at every time t
the most that can be has been carried of what was due by t, and the least that can be is in memory, but for grains and
the time that copies take (docs/snapshots.md; tests compare with the exact optimum). A stall comes as late as possible,
and lasts until what is due and not out fits into the budget.

**How an engine carries it out.**
- The link takes actions in the order of `offload_s`, cycle after cycle: those of the cycle before that reach into this
  one have their times there, less `period_s`. It begins one when the one before has ended and the piece is ready. The
  times are what to expect, the order is what to do.
- A snapshot is copied at `copy_s`, in that order: by a thread that copies while the link carries (`copies="beside"`; the
  thread of an emulated link can while it waits, with a copy bandwidth less by what the link takes of it), or by the
  training thread in the guard (`copies="guard"`), while the link carries on. If the link comes to it first, it is read
  from where it is until the copy is there. Its memory is taken when its copy begins and given back when its offload has
  ended. Snapshots never take more than `peak_bytes`: a copy that does not fit waits until older ones have left.
- The guard before a piece's update waits until each in-place action of the piece has ended and each of its snapshots
  has been copied; no more. How long that takes is the stall. Copies that have not begun when all that leaves in place
  is out are begun then, whatever their time.
- Steps between saved ones have no guard; snapshots that are left leave during them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from everstep.errors import UsageError
from everstep.tune.choice import seconds
from everstep.tune.link import CLOSE, Ground, Group, Job, Outcome, Piece, Span, groups_of, simulate

__all__ = ["Action", "Ground", "Piece", "Schedule", "drifted", "explain", "plan"]

GRAIN_BYTES = 2 << 20
"""Pieces are cut at multiples of this, or of a multiple of it, so that there are not many more grains than MAX_GRAINS."""
MAX_GRAINS = 256
DRIFT = 0.1
"""A measurement that is off by more than this part of what was planned with calls for another plan."""
SAME = 1e-8
"""Of a cycle: what happens so close together happens at the same moment."""
_SEARCH = 10
"""Halvings of the memory budget."""


Regime = Literal["in place", "snapshots", "does not fit"]


@dataclass(frozen=True)
class Action:
    """One range of a piece's bytes on its way out."""

    piece: int
    kind: Literal["in place", "snapshot"]
    offload_s: Span
    copy_s: Span | None
    first_byte: int
    num_bytes: int


@dataclass(frozen=True)
class Schedule:
    """What happens in every cycle, again and again."""

    pieces: tuple[Piece, ...]
    ground: Ground
    actions: tuple[Action, ...]
    """In the order of the link. What begins after the cycle's end is carried in the next one."""
    interval: int
    """Every so many steps one is saved."""
    stall_s: float
    """A cycle: that training waits in all."""
    stalls: tuple[Span, ...]
    """Each before an update."""
    peak_bytes: int
    """Of snapshots in memory at one time."""
    regime: Regime

    @property
    def period_s(self) -> float:
        return self.interval * self.ground.step_s + self.stall_s

    @property
    def snapshot_bytes(self) -> int:
        return sum(a.num_bytes for a in self.actions if a.copy_s)


def plan(
    pieces: Sequence[Piece],
    ground: Ground,
    *,
    may_stall: bool = False,
    max_overhead: float = 0.0,
    interval: int | None = None,
    grain_bytes: int | None = None,
) -> Schedule:
    """The schedule with the least stall, and of those the least memory.

    If not every step can be saved without waiting: `may_stall` saves every step and waits. Otherwise it is the smallest
    interval at which training waits for at most `max_overhead` of its time; with 0, if the budget is too small for any
    interval, the smallest one at which it waits least. `interval` sets it, whatever it costs.
    """
    _check(pieces, ground, interval, grain_bytes)
    total = sum(piece.num_bytes for piece in pieces)
    if grain_bytes is None:
        grain_bytes = GRAIN_BYTES * max(1, math.ceil(total / GRAIN_BYTES / MAX_GRAINS))
    groups = groups_of(pieces, grain_bytes)
    if interval is not None or may_stall:
        return _best(pieces, ground, groups, interval or 1, wanted=interval or 1)
    steps = total / (ground.bandwidth * ground.step_s)
    return _smallest_interval(lambda k: _best(pieces, ground, groups, k, wanted=1), steps, ground.step_s, max_overhead)


def _smallest_interval(at: Callable[[int], Schedule], steps: float, step_s: float, max_overhead: float) -> Schedule:
    """`steps`: that the link takes for a state."""

    def bearable(schedule: Schedule, stall_s: float = 0.0) -> bool:
        return schedule.stall_s <= max(stall_s, max_overhead * schedule.interval * step_s) + CLOSE * step_s

    low = max(1, math.ceil(steps / (1 + max_overhead) - CLOSE))
    first = at(low)
    if bearable(first):
        return first
    # From here on nothing of a cycle is left when the next begins: what training waits for then, it does at any interval.
    high = max(1, math.ceil(steps - CLOSE)) + 2
    best = at(high)
    if max_overhead and not bearable(best):
        return at(math.ceil(best.stall_s / (max_overhead * step_s) - CLOSE))
    least_s = 0.0 if max_overhead else best.stall_s
    if bearable(first, least_s):
        return first
    while high - low > 1:
        middle = (low + high) // 2
        found = at(middle)
        if bearable(found, least_s):
            high, best = middle, found
        else:
            low = middle
    return best


def _check(pieces: Sequence[Piece], ground: Ground, interval: int | None, grain_bytes: int | None) -> None:
    if not (0 < ground.step_s < math.inf and 0 < ground.bandwidth < math.inf and ground.copy_bandwidth > 0):
        raise UsageError(f"a schedule needs a step's duration and bandwidths that are positive, not {ground}")
    if ground.memory_bytes < 0 or (interval is not None and interval < 1) or (grain_bytes is not None and grain_bytes < 1):
        raise UsageError("a schedule's memory budget may not be negative, its interval and grain must be at least 1")
    for piece in pieces:
        window_s = piece.deadline_s - piece.ready_s
        if piece.num_bytes < 0 or piece.ready_s < 0 or not 0 <= window_s <= ground.step_s * (1 + CLOSE):
            raise UsageError(
                f"{piece} in a schedule of steps of {ground.step_s} s: a piece is ready at 0 or later, and is overwritten "
                "after that, at most a step later"
            )


def drifted(old: Ground, new: Ground) -> bool:
    """Whether what is measured now is so far from what was planned with (`old`) that another plan is due.

    As long as measurements stay within DRIFT of those, there is none: they may go to and fro without the plan doing so.
    """
    if (old.memory_bytes, old.copies) != (new.memory_bytes, new.copies):
        return True
    pairs = ((old.step_s, new.step_s), (old.bandwidth, new.bandwidth), (old.copy_bandwidth, new.copy_bandwidth))
    return any(max(was, now) > (1 + DRIFT) * min(was, now) for was, now in pairs)


def explain(schedule: Schedule) -> str:
    """In one line, for people."""
    ground, step_s = schedule.ground, schedule.ground.step_s
    total = sum(piece.num_bytes for piece in schedule.pieces)
    text = f"{size(total)} at {size(ground.bandwidth)}/s take {seconds(total / ground.bandwidth)}, a step {seconds(step_s)}"
    if schedule.regime == "does not fit":
        text += ": does not fit"
    if schedule.interval > 1:
        text += f", every {schedule.interval} steps one is saved"
    if schedule.snapshot_bytes:
        text += f"; {size(schedule.snapshot_bytes)} are snapshotted, {size(schedule.peak_bytes)} at a time"
    else:
        text += "; all leaves from where it is"
    if schedule.stall_s:
        part = schedule.stall_s / (schedule.interval * step_s)
        return f"{text}; training waits {seconds(schedule.stall_s)} for each, {part:.1%} of its time"
    return f"{text}; training waits for nothing"


def size(num_bytes: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.3g} B"


@dataclass(frozen=True)
class _Trial:
    """A schedule, and by how many bytes it breaks the budget: infinitely, if copies would have to begin too early."""

    schedule: Schedule
    excess_bytes: float
    fullest: Span
    """Ready and due of those whose copies take the most memory there is at a time."""


def _best(pieces: Sequence[Piece], ground: Ground, groups: list[Group], interval: int, *, wanted: int) -> Schedule:
    """At this interval: the least stall, and with it the least memory."""

    def at(budget: float) -> _Trial:
        return _trial(pieces, ground, interval, wanted, simulate(groups, ground, interval, budget, spared))

    index = {(group.ready_s, group.deadline_s): i for i, group in enumerate(groups)}
    spared = dict.fromkeys(index.values(), 0.0)
    budget = float(min(ground.memory_bytes, sum(group.upto[-1] for group in groups)))
    budget = _enough(groups, ground, interval, budget)
    found = at(budget)
    for _ in range(_SEARCH):  # what copies take while older snapshots are still there must fit, too: wait for those
        if found.excess_bytes <= 0:
            return found.schedule
        if found.excess_bytes == math.inf:
            break
        spared[index[found.fullest]] += found.excess_bytes
        found = at(budget)
    low, high, best = 0.0, budget, at(0.0)
    for _ in range(_SEARCH):  # the more is snapshotted, the less is waited for, if copies are in time
        middle = (low + high) / 2
        found = at(middle)
        if found.excess_bytes <= 0:
            low, best = middle, found
        else:
            high = middle
    return best.schedule


def _enough(groups: list[Group], ground: Ground, interval: int, budget: float) -> float:
    """Of the memory budget, what makes a difference.

    If the link cannot carry a state in a cycle, then with some memory it is never idle, and with more of it training would
    not wait less.
    """
    least_s = sum(group.upto[-1] for group in groups) / ground.bandwidth - interval * ground.step_s
    if least_s <= CLOSE * ground.step_s:
        return budget
    most_s = least_s * 1.001 + 1e-4 * ground.step_s

    def stall_s(each: float) -> float:
        return simulate(groups, ground, interval, each).stall_s

    low, high = 0.0, budget
    without_s = stall_s(low)
    if without_s <= most_s:
        return low
    with_s = stall_s(high)
    # A guard that copies all it may does so in vain if training has to wait for the link anyway.
    for _ in range(_SEARCH if ground.copies == "guard" else 0):
        if with_s <= most_s:
            break
        less_s = stall_s(high / 2)
        if less_s > with_s:
            break
        high, with_s = high / 2, less_s
    if without_s <= with_s:
        return low
    most_s = max(most_s, with_s)
    for _ in range(_SEARCH):
        middle = (low + high) / 2
        if stall_s(middle) > most_s:
            low = middle
        else:
            high = middle
    return high


def _trial(pieces: Sequence[Piece], ground: Ground, interval: int, wanted: int, outcome: Outcome) -> _Trial:
    begin_s, slack_s = outcome.begin_s, CLOSE * ground.step_s
    stalls = tuple((begin - begin_s, end - begin_s) for begin, end in outcome.stalls)
    period_s = interval * ground.step_s + outcome.stall_s
    in_place: list[Action] = []
    left: list[tuple[Action, Job]] = []
    for job in outcome.jobs:
        upto = job.group.upto
        for first, last, at_s in job.runs:
            at_s -= begin_s
            for index in range(first, last):
                piece, start, num_bytes = job.group.grains[index]
                begin, end = (at_s + (upto[i] - upto[first]) / ground.bandwidth for i in (index, index + 1))
                if end <= job.guard_s[1] - begin_s + slack_s:
                    in_place.append(Action(piece, "in place", (begin, end), None, start, num_bytes))
                else:
                    left.append((Action(piece, "snapshot", (begin, end), None, start, num_bytes), job))
    snapshots, late = _copied(left, ground, begin_s, period_s)
    peak, fullest = _peak(snapshots, period_s)
    busy = sum(piece.num_bytes for piece in pieces) > ground.bandwidth * interval * ground.step_s * (1 + CLOSE)
    waits = outcome.waited or busy or interval > wanted or (outcome.stall_s > 0 and not snapshots)
    actions = sorted([*_joined(in_place), *snapshots], key=lambda a: a.offload_s)
    regime: Regime = "does not fit" if waits else "snapshots" if snapshots else "in place"
    schedule = Schedule(tuple(pieces), ground, tuple(actions), interval, outcome.stall_s, stalls, peak, regime)
    excess = math.inf if late else peak - ground.memory_bytes
    return _Trial(schedule, excess, (pieces[fullest].ready_s, pieces[fullest].deadline_s) if snapshots else (0.0, 0.0))


def _copied(left: list[tuple[Action, Job]], ground: Ground, begin_s: float, period_s: float) -> tuple[list[Action], bool]:
    """With the times of their copies, as late as possible, one after another; and whether one would begin too early.

    What the link takes first is copied last: if the link is faster than planned, it need not be copied at all.
    """
    slack_s = CLOSE * ground.step_s
    left = sorted(left, key=lambda each: (-each[1].guard_s[1], each[0].offload_s))
    found: list[Action] = []
    late = sum(action.num_bytes for action, _ in left) / ground.copy_bandwidth > period_s
    # Deadlines may be more than a period apart: those of later cycles go first, until they repeat.
    requests = [(job.guard_s[1] - begin_s + n * period_s, n, action, job) for n in (2, 1, 0) for action, job in left]
    free_s = math.inf
    for due_s, n, action, job in sorted(requests, key=lambda request: -request[0]):
        end_s = min(free_s, due_s)
        free_s = end_s - action.num_bytes / ground.copy_bandwidth
        if n == 0:
            earliest_s = (job.guard_s[0] if ground.copies == "guard" else job.ready_s) - begin_s
            late = late or free_s < earliest_s - slack_s
            found.append(replace(action, copy_s=(free_s, end_s)))
    return found, late


def _joined(actions: list[Action]) -> list[Action]:
    """Neighbours as one."""
    found: list[Action] = []
    for action in actions:
        last = found[-1] if found else None
        if (
            last is not None and last.piece == action.piece and last.first_byte + last.num_bytes == action.first_byte
            and abs(last.offload_s[1] - action.offload_s[0]) <= CLOSE * action.offload_s[1]
        ):  # fmt: skip
            span = last.offload_s[0], action.offload_s[1]
            found[-1] = replace(last, offload_s=span, num_bytes=last.num_bytes + action.num_bytes)
        else:
            found.append(action)
    return found


def _peak(snapshots: Sequence[Action], period_s: float) -> tuple[int, int]:
    """The most that they take at one time, when cycle follows cycle, and the piece whose copy begins then.

    Each takes its memory from its copy's begin to its offload's end.
    """
    held, changes = 0, []
    for action in snapshots:
        assert action.copy_s is not None
        begin_s, end_s = action.copy_s[0], action.offload_s[1]
        begin, end = (round(t / period_s % 1 / SAME) * SAME % 1 for t in (begin_s, end_s))
        changes += [(begin, action.num_bytes, action.piece), (end, -action.num_bytes, action.piece)]
        held += action.num_bytes * (math.floor((end_s - begin_s) / period_s) + (end < begin))
    peak = 0, 0
    for _, change, piece in sorted(changes):  # at the same time memory is given back before it is taken
        held += change
        peak = max(peak, (held, piece))
    return peak
