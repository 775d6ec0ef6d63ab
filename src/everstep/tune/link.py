"""The way out on a simulated clock: grains leave in the order of their deadlines, training waits where it must. Pure.

What happens is decided here, grain by grain; what it means for pieces is a Schedule's business.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Literal

CLOSE = 1e-9
"""Of a step: no difference."""
MAX_WARMUP = 20
"""Cycles until one must be as the one before. Nearly all are after one or two."""

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


@dataclass
class Group:
    """Grains with the same times: (piece, first byte, bytes), and how many bytes there are up to each."""

    ready_s: float
    deadline_s: float
    grains: list[tuple[int, int, int]] = field(default_factory=list)
    upto: list[int] = field(default_factory=list)


def groups_of(pieces: Sequence[Piece], grain_bytes: int) -> list[Group]:
    found: dict[Span, Group] = {}
    for index, piece in enumerate(pieces):
        group = found.setdefault((piece.ready_s, piece.deadline_s), Group(piece.ready_s, piece.deadline_s))
        for start in range(0, piece.num_bytes, grain_bytes):
            group.grains.append((index, start, min(grain_bytes, piece.num_bytes - start)))
    groups = [group for group in found.values() if group.grains]
    for group in groups:
        group.upto = list(accumulate((grain[2] for grain in group.grains), initial=0))
    return groups


@dataclass(eq=False)
class Job:
    """A group in one cycle. The clock of the times is the link's."""

    group: Group
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

    def out_s(self, bandwidth: float) -> float:
        """When all of it is out, as far as it has begun; infinite if it has not."""
        if self.rest or not self.runs:
            return math.inf
        first, end, begun_s = self.runs[-1]
        return begun_s + (self.group.upto[end] - self.group.upto[first]) / bandwidth


class Link:
    """Carries grains and makes training wait, cycle after cycle, from an empty start.

    One grain is on its way until `free_s`; `late_bytes` are due and have not begun.
    """

    def __init__(self, ground: Ground, budget: float, spared: Mapping[int, float]) -> None:
        self._ground, self._budget, self._spared = ground, budget, spared
        self._queue: list[tuple[tuple[float, float, int], Job]] = []
        self.free_s = 0.0
        self.late_bytes = 0
        self.waited = False
        """Training waited for the link, not only for copies."""
        self.slack_s = math.inf
        """By how much the link could have been later at any guard so far without a longer wait."""
        self._moving: tuple[Job, int] | None = None

    def fall_behind(self, now: float) -> None:
        """As cycles do that bring more than the link carries, until a guard waits: all at once."""
        if self.slack_s < math.inf:
            self.free_s = max(self.free_s, now) + self.slack_s

    def state(self, now: float, start_s: float) -> object:
        """All that what comes depends on; times since now, or since the cycle's start in training's time, rounded."""
        self.advance(now)
        scale = 1e7 / self._ground.step_s
        moving = (self._held(now) - self.late_bytes, round((self.free_s - now) * scale)) if self.free_s > now else None
        queue = sorted((round((key[0] - start_s) * scale), key[2], job.next) for key, job in self._queue)
        return self.late_bytes, moving, queue

    def arrive(self, job: Job, now: float) -> None:
        self.advance(now)
        job.ready_s = now
        self.free_s = max(self.free_s, now)
        heapq.heappush(self._queue, (job.key, job))

    def advance(self, until: float) -> None:
        """Begin every grain that begins before `until`."""
        slack_s = CLOSE * self._ground.step_s
        while self._queue and self.free_s < until - slack_s:
            job = self._queue[0][1]
            room = (until - slack_s - self.free_s) * self._ground.bandwidth
            self._begin(job, bisect_left(job.group.upto, job.group.upto[job.next] + room, job.next + 1))

    def guard(self, jobs: list[Job], now: float) -> float:
        """Training is about to overwrite these: return when it may."""
        self.advance(now)
        begun, older = now, self._held(now)
        for job in jobs:
            job.due = True
            self.late_bytes += job.rest
        if self._ground.copies == "guard" and self._held(now) > older:
            now = self._copied_at(jobs, now)
            self.advance(now)
        budget = max(0.0, self._budget - max(self._spared.get(job.key[2], 0.0) for job in jobs))
        if self._held(now) > budget:
            self.waited = True
            now = max(now, self.free_s)
            while self.late_bytes > budget:
                job = self._queue[0][1]
                need = min(self.late_bytes - budget, job.rest)
                self._begin(job, bisect_left(job.group.upto, job.group.upto[job.next] + need, job.next + 1))
                now = self.free_s
        for job in jobs:
            job.guard_s = (begun, now)
        out_s = max(job.out_s(self._ground.bandwidth) for job in jobs)
        room_s = (budget - self._held(now)) / self._ground.bandwidth if self._ground.copies == "beside" else 0.0
        self.slack_s = min(self.slack_s, max(0.0, now - out_s) + max(0.0, room_s))
        return now

    def _copied_at(self, jobs: list[Job], now: float) -> float:
        """When the training thread, which copies from the last grain on, meets the link, which carries from the first on."""
        jobs = sorted(jobs, key=lambda job: job.key)
        sizes = [grain[2] for job in jobs for grain in job.group.grains[job.next :]]
        first_s = self.free_s + (self.late_bytes - sum(sizes)) / self._ground.bandwidth  # older ones go first
        if self._moving and self._moving[0] in jobs and self.free_s > now + CLOSE * self._ground.step_s:
            sizes.insert(0, self._moving[1])
            first_s -= self._moving[1] / self._ground.bandwidth
        upto = list(accumulate(sizes, initial=0))

        def met_at(carried: int) -> float:
            out_s = first_s + upto[carried] / self._ground.bandwidth if carried else now
            return max(now + (upto[-1] - upto[carried]) / self._ground.copy_bandwidth, out_s)

        low, high = 0, len(sizes)
        while low < high:  # the more is carried, the later that ends, and the earlier the copies do
            middle = (low + high) // 2
            if met_at(middle) > met_at(middle + 1):
                low = middle + 1
            else:
                high = middle
        return met_at(low)

    def _held(self, now: float) -> int:
        """Bytes that are due and not out."""
        moving = self._moving[1] if self._moving and self._moving[0].due else 0
        return self.late_bytes + (moving if self.free_s > now + CLOSE * self._ground.step_s else 0)

    def _begin(self, job: Job, end: int) -> None:
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
class Outcome:
    """One cycle of many."""

    begin_s: float
    jobs: list[Job]
    stalls: list[Span] = field(default_factory=list)
    """From its begin to that of the next."""
    waited: bool = False
    """Training waited for the link, not only for copies."""

    @property
    def stall_s(self) -> float:
        return sum(end - begin for begin, end in self.stalls)


def simulate(
    groups: list[Group], ground: Ground, interval: int, budget: float, spared: Mapping[int, float] = MappingProxyType({})
) -> Outcome:
    """The first cycle that begins as the one before it did, and therefore as all others after it.

    If the link cannot carry as much as comes, it starts with so much to do that training has to wait at once, and is made
    to fall behind until it does in every cycle: from an empty start that would take many. `spared`: of the budget, what is
    not for the guard of that group.
    """
    period_s, ticks = interval * ground.step_s, 10**10  # a step, so that times that are meant to be the same are
    moments: dict[tuple[int, int], list[int]] = {}  # at each time what is due (0) goes before what becomes ready (2)
    for index, group in enumerate(groups):
        moments.setdefault((round(group.deadline_s / ground.step_s * ticks), 0), []).append(index)
        moments.setdefault((round(group.ready_s / ground.step_s * ticks), 2), []).append(index)
    link, shift_s, before = Link(ground, budget, spared), 0.0, None
    carrying_s = sum(group.upto[-1] for group in groups) / ground.bandwidth
    begun_s, slack_s = 0.0, CLOSE * ground.step_s
    if carrying_s > period_s + slack_s:
        link.free_s = carrying_s + max(group.deadline_s for group in groups)
    events: list[tuple[int, int, int, list[Job]]] = [(0, 1, 0, [])]
    steady: Outcome | None = None
    cycle = steady_cycle = 0
    while not (steady and cycle > steady_cycle and all(job.due and not job.rest for job in steady.jobs)):
        _, order, at, jobs = heapq.heappop(events)
        if order == 1:
            cycle, start_s = at, at * period_s
            now = start_s + shift_s
            if cycle and steady is None and shift_s - begun_s < carrying_s - period_s - slack_s:
                link.fall_behind(now)
            begun_s, link.slack_s = shift_s, math.inf
            state = link.state(now, start_s)
            jobs = [Job(g, (start_s + g.deadline_s, start_s + g.ready_s, i)) for i, g in enumerate(groups)]
            for (tick, kind), those in moments.items():
                heapq.heappush(events, (cycle * interval * ticks + tick, kind, cycle, [jobs[i] for i in those]))
            heapq.heappush(events, ((cycle + 1) * interval * ticks, 1, cycle + 1, []))
            if steady is None and (state == before or cycle == MAX_WARMUP):
                steady, steady_cycle = Outcome(now, jobs), cycle
            before = state
            continue
        now = jobs[0].key[order // 2] + shift_s
        if order == 2:
            for job in jobs:
                link.arrive(job, now)
            continue
        until = link.guard(jobs, now)
        shift_s += until - now
        if steady and cycle == steady_cycle and until > now:
            steady.stalls.append((now, until))
    steady.waited = link.waited
    return steady
