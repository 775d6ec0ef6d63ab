"""Which bytes of a state leave straight from where they are, which are snapshotted first, when, and what that costs. Pure.

A state is read-only from one update to the next. What the way out (the *link*) carries in that time needs no memory; what it does not is
copied first (a *snapshot*), as late as possible, and its memory is given back when it has left. If that is more than the
budget, training waits before the update (a *stall*), or only every k-th step is saved.

**Time.** A cycle begins at 0, right after an update, and has `step_s` seconds, or k of them if every k-th step is saved, and the stalls
beside. A piece may be read from `ready_s` on, until `deadline_s`, at most a step later, when it is overwritten. If all is updated in
one block, all pieces have ready 0 and the same deadline, the end of backward. With layer-wise updates each layer has its own; a
deadline is then in the next cycle, after `step_s`. All times of a Schedule are seconds since the cycle began, stalls included.

**The greedy choice.** Pieces are cut at multiples of a grain. The link carries one grain after another, the earliest deadline first; those
whose deadline has passed, which are snapshots by then, therefore come before all others. For every time t this carries the most that
can be carried of what is due by t, so that the bytes in memory are the fewest possible, at every moment at once, up to grains and
the time that copies take (docs/snapshots.md has the proof, tests compare with the exact optimum). A stall comes as late as possible,
for as long as it takes until the bytes that are due and not out fit into the budget.

**How an engine carries a schedule out.**
- The link takes actions in the order of `offload_s`, those of the cycle before that reach into this one first. It begins one when the one before
  has ended and the piece is ready; the times are what to expect, the order is what to do.
- A snapshot is copied at `copy_s`: by a thread that copies while the link carries (`copies="beside"`; the thread of an emulated link
  has time for it while it waits, and copies at copy bandwidth less link bandwidth), or by the training thread in the guard
  (`copies="guard"`), the last ones first, while the link carries the first ones. If its link time comes first, it is read from where
  it is until the copy is there. Its memory is taken when the copy begins and given back when the offload has ended.
- The guard before a piece's update waits until every in-place action of the piece has ended and every snapshot of it is copied.
  That is all: the stall is what this takes. What is late because a step was faster than planned may be copied there instead, as
  far as the budget goes.
- Steps between two saved ones have no guard; what is left of the snapshots leaves during them.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from everstep.errors import UsageError

GRAIN_BYTES = 2 << 20
"""Pieces are cut at multiples of this, or of a multiple of it so that there are not many more than MAX_GRAINS."""
MAX_GRAINS = 256
DRIFT = 0.15
"""Measurements that are off by this part of what was planned with call for another plan …"""
MAX_WARMUP = 8
"""Cycles from an empty link until one is as the one before. Nearly all are after one or two."""
_CLOSE = 1e-9
"""Of a step, or of a byte count: no difference."""

_SEARCH = 10
"""Halvings of the memory budget."""

Span = tuple[float, float]


@dataclass(frozen=True)
class Piece:
    """A tensor, or several with the same times."""

    name: str
    num_bytes: int
    ready_s: float
    deadline_s: float


@dataclass(frozen=True)
class Ground:
    """What was measured, and what is allowed."""

    step_s: float
    """A step of training that nothing delays."""
    bandwidth: float
    """Bytes a second on the way out."""
    copy_bandwidth: float
    """Bytes a second from memory to memory, by whoever makes the snapshots."""
    memory_bytes: int
    """That snapshots may take."""
    copies: Literal["beside", "guard"] = "beside"
    """Who makes snapshots: a thread beside training, or the training thread, which waits meanwhile."""


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
    regime: Literal["in place", "snapshots", "does not fit"]

    @property
    def period_s(self) -> float:
        return self.interval * self.ground.step_s + self.stall_s

    @property
    def snapshot_bytes(self) -> int:
        return sum(a.num_bytes for a in self.actions if a.copy_s)


def plan(
    pieces: Sequence[Piece], ground: Ground, *, may_stall: bool = False, max_overhead: float = 0.0, interval: int | None = None,
    grain_bytes: int | None = None,
) -> Schedule:  # fmt: skip
    """The schedule with the least memory.

    If not every step can be saved without waiting: `may_stall` saves every step and waits; otherwise the smallest interval at which
    waiting is at most `max_overhead` of a cycle's training, or, if there is none because the budget is too small for any, the smallest
    one at which it is least. `interval` sets it, whatever it costs.
    """
    _check(pieces, ground, interval, grain_bytes)
    step_s, total = ground.step_s, sum(p.num_bytes for p in pieces)
    if grain_bytes is None:
        grain_bytes = GRAIN_BYTES * max(1, math.ceil(total / GRAIN_BYTES / MAX_GRAINS))
    groups = _groups(pieces, grain_bytes)
    if interval is not None or may_stall:
        return _best(pieces, ground, groups, interval or 1, wanted=interval or 1)
    slack_s = _CLOSE * step_s
    full = max(1, math.ceil(total / (ground.bandwidth * step_s) - _CLOSE))
    least = max(1, math.ceil(total / (ground.bandwidth * step_s * (1 + max_overhead)) - _CLOSE))
    found = _best(pieces, ground, groups, least, wanted=1)
    if found.stall_s <= max_overhead * least * step_s + slack_s:
        return found
    # From here on nothing of a cycle is left when the next begins: what is waited for then, is waited for at any interval.
    best, high = _best(pieces, ground, groups, full + 2, wanted=1), full + 2
    if max_overhead and best.stall_s > max_overhead * high * step_s:
        return _best(pieces, ground, groups, math.ceil(best.stall_s / (max_overhead * step_s) - _CLOSE), wanted=1)

    def bearable(schedule: Schedule) -> bool:
        return schedule.stall_s <= max(max_overhead * schedule.interval * step_s, 0.0 if max_overhead else best_s) + slack_s

    best_s, low = best.stall_s, least
    if bearable(found):
        return found
    while high - low > 1:
        middle = (low + high) // 2
        found = _best(pieces, ground, groups, middle, wanted=1)
        if bearable(found):
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
        if piece.num_bytes < 0 or piece.ready_s < 0 or not 0 <= window_s <= ground.step_s * (1 + _CLOSE):
            raise UsageError(
                f"{piece} in a schedule of steps of {ground.step_s} s: a piece is ready at 0 or later and is overwritten after "
                "that, at most a step later"
            )


@dataclass
class _Group:
    """Grains with the same times: (piece, first byte, bytes), and how many bytes there are up to each."""

    ready_s: float
    deadline_s: float
    grains: list[tuple[int, int, int]] = field(default_factory=list)
    upto: list[int] = field(default_factory=list)


def _groups(pieces: Sequence[Piece], grain_bytes: int) -> list[_Group]:
    found: dict[Span, _Group] = {}
    for index, piece in enumerate(pieces):
        group = found.setdefault((piece.ready_s, piece.deadline_s), _Group(piece.ready_s, piece.deadline_s))
        for start in range(0, piece.num_bytes, grain_bytes):
            group.grains.append((index, start, min(grain_bytes, piece.num_bytes - start)))
    groups = [group for group in found.values() if group.grains]
    for group in groups:
        group.upto = list(accumulate((grain[2] for grain in group.grains), initial=0))
    return groups


@dataclass(eq=False)
class _Job:
    """A group in one cycle. The clock of the times is the link's."""

    group: _Group
    key: tuple[float, float, int]
    """Priority on the link."""
    ready_s: float = 0.0
    guard_s: Span = (0.0, 0.0)
    """From when training would overwrite it until it does."""
    next: int = 0
    """The first grain that has not begun."""
    runs: list[tuple[int, int, float]] = field(default_factory=list)
    """On the link: grains from, to, begun at."""
    due: bool = False

    @property
    def rest(self) -> int:
        return self.group.upto[-1] - self.group.upto[self.next]


class _Link:
    """Carries grains and makes training wait, cycle after cycle, from an empty start.

    One grain is on its way until `free_s`; `late_bytes` are due and have not begun.
    """

    def __init__(self, ground: Ground, budget: float) -> None:
        self._ground, self._budget = ground, budget
        self._queue: list[tuple[tuple[float, float, int], _Job]] = []
        self.free_s = 0.0
        self.late_bytes = 0
        self.waited = False
        """Training waited for the link, not only for copies."""
        self._moving: tuple[_Job, int] | None = None

    def state(self, now: float, start_s: float) -> object:
        """All that what comes depends on; times since now, or since the cycle's start in training's time, rounded."""
        self.advance(now)
        scale = 1e7 / self._ground.step_s
        moving = (self._held(now) - self.late_bytes, round((self.free_s - now) * scale)) if self.free_s > now else None
        return self.late_bytes, moving, sorted((round((key[0] - start_s) * scale), key[2], job.next) for key, job in self._queue)

    def arrive(self, job: _Job, now: float) -> None:
        self.advance(now)
        job.ready_s = now
        self.free_s = max(self.free_s, now)
        heapq.heappush(self._queue, (job.key, job))

    def advance(self, until: float) -> None:
        """Begin every grain that begins before `until`."""
        slack_s = _CLOSE * self._ground.step_s
        while self._queue and self.free_s < until - slack_s:
            job = self._queue[0][1]
            room = (until - slack_s - self.free_s) * self._ground.bandwidth
            self._begin(job, bisect_left(job.group.upto, job.group.upto[job.next] + room, job.next + 1))

    def guard(self, jobs: list[_Job], now: float) -> float:
        """Training is about to overwrite these: return when it may."""
        self.advance(now)
        older = self._held(now)
        for job in jobs:
            job.due = True
            self.late_bytes += job.rest
        begun = now
        if self._ground.copies == "guard" and self._held(now) > older:
            now += self._copying_s(jobs, older, now)
            self.advance(now)
        if self._held(now) > self._budget:
            self.waited = True
            now = max(now, self.free_s)
            while self.late_bytes > self._budget:
                job = self._queue[0][1]
                need = min(self.late_bytes - self._budget, job.rest)
                self._begin(job, bisect_left(job.group.upto, job.group.upto[job.next] + need, job.next + 1))
                now = self.free_s
        for job in jobs:
            job.guard_s = (begun, now)
        return now

    def _copying_s(self, jobs: list[_Job], older: float, now: float) -> float:
        """Until all of these is either out, at the link's bandwidth from the front, or copied, at the copies' from the back."""
        fresh = self._held(now) - older
        link, copy = self._ground.bandwidth, self._ground.copy_bandwidth
        copying_s = min(fresh / copy, (fresh + older) / (link + copy))
        self.advance(now + copying_s)
        rest = sum(job.rest for job in jobs)
        if self._moving and self._moving[0] in jobs and self.free_s > now + copying_s + _CLOSE * self._ground.step_s:
            rest += self._moving[1]
        return max(copying_s, rest / copy)

    def _held(self, now: float) -> int:
        """Bytes that are due and not out."""
        moving = self._moving[1] if self._moving and self._moving[0].due else 0
        return self.late_bytes + (moving if self.free_s > now + _CLOSE * self._ground.step_s else 0)

    def _begin(self, job: _Job, end: int) -> None:
        upto = job.group.upto
        end = min(end, len(upto) - 1)
        num_bytes = upto[end] - upto[job.next]
        job.runs.append((job.next, end, self.free_s))
        self.free_s += num_bytes / self._ground.bandwidth
        self._moving = job, upto[end] - upto[end - 1]
        if job.due:
            self.late_bytes -= num_bytes
        job.next = end
        if end == len(upto) - 1:
            heapq.heappop(self._queue)


@dataclass
class _Outcome:
    """One cycle of many."""

    begin_s: float
    jobs: list[_Job]
    stalls: list[Span]
    waited: bool

    @property
    def stall_s(self) -> float:
        return sum(end - begin for begin, end in self.stalls)


def _simulate(groups: list[_Group], ground: Ground, interval: int, budget: float) -> _Outcome:
    """The first cycle that begins as the one before it did, and therefore as all others after it."""
    period_s, scale = interval * ground.step_s, 1e10 / ground.step_s
    link, shift_s, before = _Link(ground, budget), 0.0, None
    events: dict[tuple[int, int], list[_Job]] = {}  # at each time what is due goes before what becomes ready
    cycles: list[list[_Job]] = []
    waiting: list[tuple[int, int]] = []
    steady: tuple[float, list[_Job]] | None = None

    def add_cycle() -> None:
        """Cycles are added while others run."""
        start_s = len(cycles) * period_s
        jobs = [_Job(g, (start_s + g.deadline_s, start_s + g.ready_s, i)) for i, g in enumerate(groups)]
        cycles.append(jobs)
        events[round(start_s * scale), 1] = []
        for job in jobs:
            events.setdefault((round(job.key[0] * scale), 0), []).append(job)
            events.setdefault((round(job.key[1] * scale), 2), []).append(job)
        waiting[:] = sorted(events)

    add_cycle()
    cycle = 0
    while not (steady and all(job.due and not job.rest for job in steady[1])):
        at = waiting.pop(0)
        tick, order = at
        jobs, now = events.pop(at), tick / scale + shift_s
        if order == 0:
            shift_s += link.guard(jobs, now) - now
        elif order == 2:
            for job in jobs:
                link.arrive(job, now)
        else:
            add_cycle()
            state = link.state(now, cycle * period_s)
            if steady is None and (state == before or cycle == MAX_WARMUP):
                steady = now, cycles[cycle]
            before, cycle = state, cycle + 1
    stalls = sorted({job.guard_s for job in steady[1] if job.guard_s[1] > job.guard_s[0]})
    return _Outcome(*steady, stalls, link.waited)


@dataclass(frozen=True)
class _Trial:
    """A schedule, and by how many bytes it breaks the budget: infinitely, if copies would have to begin too early."""

    schedule: Schedule
    excess_bytes: float


def _best(pieces: Sequence[Piece], ground: Ground, groups: list[_Group], interval: int, *, wanted: int) -> Schedule:
    """At this interval: the least stall, and with it the least memory."""

    def at(budget: float) -> _Trial:
        return _trial(pieces, ground, interval, wanted, _simulate(groups, ground, interval, budget))

    total = sum(g.upto[-1] for g in groups)
    least_s = total / ground.bandwidth - interval * ground.step_s
    if least_s > _CLOSE * ground.step_s:
        return _least_memory(at, min(ground.memory_bytes, total), least_s, 1e-3 * least_s + 1e-4 * interval * ground.step_s)
    budget = float(min(ground.memory_bytes, total))
    found = at(budget)
    for _ in range(3):  # copies that must begin early take memory, too: leave room for them
        if found.excess_bytes <= 0:
            return found.schedule
        if budget <= found.excess_bytes:
            break
        budget -= found.excess_bytes
        found = at(budget)
    return _most_memory(at, budget)


def _most_memory(at: Callable[[float], _Trial], high: float) -> Schedule:
    """With the largest budget at which copies are in time and fit: the more is snapshotted, the less is waited for."""
    low, best = 0.0, at(0.0)
    for _ in range(_SEARCH):
        middle = (low + high) / 2
        found = at(middle)
        if found.excess_bytes <= 0:
            low, best = middle, found
        else:
            high = middle
    return best.schedule


def _least_memory(at: Callable[[float], _Trial], high: float, least_s: float, tolerance_s: float) -> Schedule:
    """The link is never idle, and with memory enough training waits for `least_s`: no more memory than for that.

    Below that memory a cycle waits longer, from the first one on. Above it, cycles wait less until memory has filled up.
    """
    low, best = 0.0, at(0.0)
    for _ in range(_SEARCH):
        if best.schedule.stall_s <= least_s + tolerance_s:
            break
        middle = (low + high) / 2
        found = at(middle)
        if found.excess_bytes <= 0 and found.schedule.stall_s >= least_s - _CLOSE * least_s:
            low, best = middle, found
        else:
            high = middle
    return best.schedule


def _trial(pieces: Sequence[Piece], ground: Ground, interval: int, wanted: int, outcome: _Outcome) -> _Trial:
    begin_s, slack_s = outcome.begin_s, _CLOSE * ground.step_s
    stalls = tuple((begin - begin_s, end - begin_s) for begin, end in outcome.stalls)
    period_s = interval * ground.step_s + outcome.stall_s
    in_place: list[Action] = []
    left: list[tuple[Action, _Job]] = []
    for job in outcome.jobs:
        upto = job.group.upto
        for first, end, at_s in job.runs:
            at_s -= begin_s
            for index in range(first, end):
                piece, start, num_bytes = job.group.grains[index]
                span = (at_s + (upto[index] - upto[first]) / ground.bandwidth, at_s + (upto[index + 1] - upto[first]) / ground.bandwidth)
                if span[1] <= job.guard_s[1] - begin_s + slack_s:
                    in_place.append(Action(piece, "in place", span, None, start, num_bytes))
                else:
                    left.append((Action(piece, "snapshot", span, None, start, num_bytes), job))
    snapshots, late = _copied(left, ground, begin_s, period_s)
    peak = peak_bytes(snapshots, period_s)
    waits = outcome.waited or interval > wanted
    schedule = Schedule(
        tuple(pieces), ground, tuple(sorted([*_joined(in_place), *snapshots], key=lambda a: a.offload_s)), interval, outcome.stall_s,
        stalls, peak, "does not fit" if waits else "snapshots" if snapshots else "in place",
    )  # fmt: skip
    return _Trial(schedule, math.inf if late else peak - ground.memory_bytes)


def _copied(left: list[tuple[Action, _Job]], ground: Ground, begin_s: float, period_s: float) -> tuple[list[Action], bool]:
    """With the times of their copies, as late as possible, one after another; and whether one would begin too early.

    What the link takes first is copied last: if the link is faster than planned, it need not be copied at all.
    """
    slack_s = _CLOSE * ground.step_s
    left = sorted(left, key=lambda each: (-each[1].guard_s[1], each[0].offload_s))
    found: list[Action] = []
    free_s, late = math.inf, False
    for action, job in left:
        end_s = min(free_s, job.guard_s[1] - begin_s)
        free_s = end_s - action.num_bytes / ground.copy_bandwidth
        earliest_s = (job.guard_s[0] if ground.copies == "guard" else job.ready_s) - begin_s
        late = late or free_s < earliest_s - slack_s
        found.append(replace(action, copy_s=(free_s, end_s)))
    if found:
        late = late or found[0].copy_s[1] - free_s > period_s + slack_s  # type: ignore[index]
    return found, late


def _joined(actions: list[Action]) -> list[Action]:
    """Neighbours as one."""
    found: list[Action] = []
    for action in actions:
        last = found[-1] if found else None
        if (
            last is not None and last.piece == action.piece and last.first_byte + last.num_bytes == action.first_byte
            and abs(last.offload_s[1] - action.offload_s[0]) <= _CLOSE * action.offload_s[1]
        ):  # fmt: skip
            found[-1] = replace(last, offload_s=(last.offload_s[0], action.offload_s[1]), num_bytes=last.num_bytes + action.num_bytes)
        else:
            found.append(action)
    return found


def peak_bytes(actions: Iterable[Action], period_s: float) -> int:
    """The most memory that snapshots take at one time, when cycle follows cycle: each from its copy's begin to its offload's end."""
    always, changes = 0, []
    for action in actions:
        if action.copy_s is not None:
            begin_s, end_s = action.copy_s[0], action.offload_s[1]
            whole = math.floor((end_s - begin_s) / period_s)
            always += whole * action.num_bytes
            begin, end = (round(t / period_s % 1, 12) % 1 for t in (begin_s, end_s))
            changes += [(begin, action.num_bytes), (end, -action.num_bytes)]
            always += action.num_bytes if end < begin else 0
    changes.sort()  # at the same time memory is given back before it is taken
    return max(accumulate((change for _, change in changes), initial=always), default=0)
