"""How often a state can be saved: the smallest interval at which saving costs less than 5 % of the training time.

As LightCheck's table has it, for its six model families. A first measurement at a small interval gives the cost of a save,
and that the interval; there, and at one step less, the overhead is measured, and the interval corrected if it must be.

Blocks of training with a saver and without come by turns, in rounds that are mirrored, so that drift cancels. Blocks are
short, so their ends must not count: with a save at every step a block begins with a step that is not timed, and ends when no
more saves are under way than after that step; with an interval it begins with a step that saves, and ends with the wait that
the next save would have. Between blocks nothing of a saver is left running. Savers that stay attached to a model train one
copy while another trains without; in the second half of the rounds the copies change roles.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from everstep.bench import families, machine, peers, statistics
from everstep.bench.families import Family, Scale
from everstep.bench.progress import Progress, silent
from everstep.bench.savers import WAYS, Nothing, Place, Saver, Way

LIMIT = 0.05
TRIAL_INTERVAL = 4
"""At which the cost of a save is measured first: often enough to see it, seldom enough not to wait for the one before.
Everstep's own are first measured at every step."""
TRIAL_ROUNDS = 2
MOST_SEARCHES = 9
LEAST_ROUNDS = 3
WARM_STEPS = 8
"""More than Everstep takes to learn how gradients are owned."""
MOST_WARM_STEPS = 100
"""Bases that are farther apart are no part of what is measured."""
POLL_S = 0.0005
MOST_S = 60.0
"""A block that takes longer is as long as it is: what is wrong is told when the saver is waited for."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One measurement."""

    families: Sequence[str] = tuple(families.FAMILIES)
    ways: Sequence[str] = tuple(WAYS)
    num_threads: int = 1
    num_rounds: int = 5
    """At each interval, of two blocks with and two without; where that takes longer than `point_s`, fewer (LEAST_ROUNDS)."""
    most_interval: int = 200
    """No longer one is tried, and none that takes longer than `most_interval_s`."""
    most_interval_s: float = 12.0
    block_s: float = 1.2
    """A block takes at least so long, and at least one interval."""
    point_s: float = 60.0
    base_interval: int = 32
    """Everstep writes bases so often: oftener than by default, so that they are part of what is measured."""
    folder: str | None = None
    """Where is saved; None: the system's temporary folder."""
    memory: str = "/dev/shm"
    """A folder in memory, for pools; where there is none, `folder`."""
    quick: bool = False
    """Tiny models."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Point:
    """What was measured at one interval."""

    interval: int
    overhead: statistics.Interval
    step_s: float
    """Of training without."""
    num_rounds: int
    block_steps: int

    @property
    def save_s(self) -> float:
        """What one save costs."""
        return self.overhead.median * self.interval * self.step_s

    @property
    def is_under(self) -> bool:
        return self.overhead.median < LIMIT

    def derived(self) -> int:
        """The smallest interval that is under the limit if a save costs the same there."""
        return max(1, math.ceil(self.save_s / (LIMIT * self.step_s)))

    def as_dict(self) -> dict[str, Any]:
        return {
            "interval": self.interval, "overhead": self.overhead.as_dict(), "save_s": self.save_s, "step_s": self.step_s,
            "num_rounds": self.num_rounds, "block_steps": self.block_steps,
        }  # fmt: skip


def search(first: int, most: int, measure: Callable[[Sequence[int]], list[Point]]) -> dict[int, Point]:
    """Points at the smallest interval under the limit and at one less, and at those that were tried on the way there.

    None is longer than `most`. What a save is measured to cost leads there; where that leads astray, halving does. Measured
    costs are not the same twice, and one may be found under the limit and a longer one over it: the longer is believed.
    """
    points: dict[int, Point] = {}
    over, under = 0, None
    interval, reach = min(first, most), 1
    for turn in range(MOST_SEARCHES):
        pair = [k for k in (interval, interval - 1) if k >= 1]
        points |= {point.interval: point for point in measure([k for k in pair if k not in points])}
        over = max(over, *(k for k in pair if not points[k].is_under), 0)
        under = min((k for k, point in points.items() if point.is_under and k > over), default=None)
        if under == over + 1 or over >= most:
            break
        guess = points[pair[-1] if points[interval].is_under else interval].derived()
        if under is None:
            interval = min(most, max(over + reach, guess))
            reach *= 2  # a guess just above may be too low again and again
        else:
            interval = guess if over < guess < under and turn % 2 == 0 else (over + under + 1) // 2
    return points


def found(points: dict[int, Point]) -> tuple[int | None, bool]:
    """The smallest measured interval under the limit, None if there is none; whether one less was measured and is not.

    If there is such a one, it is the one; the longest, should there be several.
    """
    under = [k for k, point in points.items() if point.is_under]
    if not under:
        return None, False
    confirmed = [k for k in under if k == 1 or (k - 1 in points and not points[k - 1].is_under)]
    return (max(confirmed), True) if confirmed else (min(under), False)


def measure(settings: Settings, progress: Progress = silent) -> dict[str, Any]:
    """All families and ways, as a plain dict."""
    before = torch.get_num_threads()
    torch.set_num_threads(settings.num_threads)
    begun = time.perf_counter()
    results: dict[str, Any] = {}
    total, done = len(settings.families) * len(settings.ways), 0
    try:
        with peers.their_warnings_silenced():
            for name in settings.families:
                family = families.FAMILIES[name]
                scale = family.quick if settings.quick else family.scale
                savers: dict[str, Any] = {}
                bench = _Bench(settings, family, scale)
                for way in settings.ways:
                    bench.say = partial(_say, progress, name, done, total)
                    savers[way] = bench.measure(WAYS[way])
                    done += 1
                results[name] = {**families.describe(family, scale), "step_s": bench.step_s(), "savers": savers}
        progress("families and savers", total, total)
    finally:
        torch.set_num_threads(before)
    return {
        "limit": LIMIT, "num_threads": settings.num_threads, "base_interval": settings.base_interval,
        "memory_file_system": machine.file_system(_memory(settings)), "seconds": time.perf_counter() - begun,
        "families": results,
    }  # fmt: skip


def _say(progress: Progress, family: str, done: int, total: int, way: Way, intervals: Sequence[int]) -> None:
    every = " and ".join(map(str, intervals))
    progress(f"{family}, {way.name}, every {every}", done, total)


def _memory(settings: Settings) -> str:
    return settings.memory if os.path.isdir(settings.memory) else settings.folder or tempfile.gettempdir()


class _Copy:
    """One model in training."""

    def __init__(self, family: Family, scale: Scale) -> None:
        self.model, self.optimizer = family.build(scale)
        self._batches = [family.batch(scale, seed=i) for i in range(4)]
        self._turn = 0

    def train(self, num_steps: int, saver: Saver) -> None:
        for _ in range(num_steps):
            families.train_step(self.model, self.optimizer, self._batches[self._turn % len(self._batches)])
            self._turn += 1
            saver.after_step()


class _Side:
    """A copy that trains with a saver, or without."""

    def __init__(self, copy: _Copy, saver: Saver, interval: int) -> None:
        self._copy = copy
        self._saver = saver
        self.interval = interval
        self._steps = 0

    def train(self, num_steps: int) -> None:
        self._copy.train(num_steps, self._saver)
        self._steps += num_steps

    def align(self) -> None:
        """The next step saves, and nothing is under way."""
        for _ in range(2 * self.interval):
            self.train(1)
            self._saver.wait()
            if self._saver.newest() == self._steps:
                break
        else:
            raise AssertionError(f"nothing was saved in {2 * self.interval} steps")
        self.train(self.interval - 1)
        self._saver.rest()

    def block(self, num_steps: int) -> float:
        """Seconds of so many steps."""
        self._saver.go_on()
        if self.interval == 1:
            self.train(1)
        under_way = self._steps - self._saver.newest()
        begun = time.perf_counter()
        self.train(num_steps)
        if self.interval == 1:
            deadline = begun + MOST_S
            while self._steps - self._saver.newest() > under_way and time.perf_counter() < deadline:
                time.sleep(POLL_S)
        else:
            self._saver.wait()
        seconds = time.perf_counter() - begun
        self._saver.rest()
        return seconds


class _Bench:
    """Two equal copies of one model, and what is measured with them."""

    def __init__(self, settings: Settings, family: Family, scale: Scale) -> None:
        self._settings = settings
        self.say: Callable[[Way, Sequence[int]], None] = lambda way, intervals: None
        self._copies = _Copy(family, scale), _Copy(family, scale)
        self._off_step_s: list[float] = []
        self._guess_s = self._calibrate()

    def _calibrate(self) -> float:
        for copy in self._copies:
            copy.train(2, Nothing())
        begun = time.perf_counter()
        self._copies[0].train(4, Nothing())
        return (time.perf_counter() - begun) / 4

    def step_s(self) -> float:
        """Median of all blocks without a saver."""
        return statistics.median_interval(self._off_step_s).median

    def measure(self, way: Way) -> dict[str, Any]:
        """The smallest interval of one way to save, and all points that were measured."""
        rounds = self._settings.num_rounds
        if way.every_step:
            points = {1: self._point(way, 1)}
        else:
            first = 1 if way.hooks else self._points(way, [TRIAL_INTERVAL], TRIAL_ROUNDS)[0].derived()
            s = self._settings
            most = max(1, min(s.most_interval, int(s.most_interval_s / self._guess_s)))
            points = search(first, most, lambda intervals: self._points(way, intervals, rounds))
        interval, is_confirmed = found(points)
        return {
            "interval": interval, "confirmed": is_confirmed, "every_step": way.every_step,
            "points": [points[k].as_dict() for k in sorted(points)],
        }  # fmt: skip

    def _points(self, way: Way, intervals: Sequence[int], num_rounds: int) -> list[Point]:
        if way.hooks:  # one copy can be attached to one run only
            return [self._point(way, interval) for interval in intervals]
        blocks = [self._block_steps(k) for k in intervals]
        rounds = self._rounds_of(1, way, intervals, blocks, self._num_rounds(blocks, num_rounds))
        return self._made(intervals, blocks, rounds)

    def _point(self, way: Way, interval: int) -> Point:
        """By two runs: the copies change roles."""
        blocks = [self._block_steps(interval)]
        num_rounds = self._num_rounds(blocks, self._settings.num_rounds)
        rounds = self._rounds_of(2, way, [interval], blocks, num_rounds)
        return self._made([interval], blocks, rounds)[0]

    def _block_steps(self, interval: int) -> int:
        return interval * max(1, round(self._settings.block_s / (interval * self._guess_s)))

    def _num_rounds(self, blocks: Sequence[int], wanted: int) -> int:
        round_s = 2 * (sum(blocks) + blocks[0]) * self._guess_s
        return min(wanted, max(LEAST_ROUNDS, round(self._settings.point_s / round_s)))

    def _made(self, intervals: Sequence[int], blocks: Sequence[int], rounds: Sequence[Sequence[float]]) -> list[Point]:
        """Points, from the seconds a step of each round: without, and at each interval."""
        without = [r[0] for r in rounds]
        self._off_step_s += without
        points = []
        for index, (interval, num_steps) in enumerate(zip(intervals, blocks, strict=True), 1):
            overheads = [r[index] / r[0] - 1 for r in rounds]
            point = Point(
                interval=interval, overhead=statistics.median_interval(overheads, seed=self._settings.seed),
                step_s=statistics.median_interval(without).median, num_rounds=len(rounds), block_steps=num_steps,
            )  # fmt: skip
            points.append(point)
        return points

    def _rounds_of(
        self, num_parts: int, way: Way, intervals: Sequence[int], blocks: Sequence[int], num_rounds: int
    ) -> list[list[float]]:
        """For each round the seconds a step: without, and at each interval. Copies change roles with each part."""
        self.say(way, intervals)
        orders = statistics.mirrored(1 + len(intervals), num_rounds, seed=self._settings.seed)
        cut = -(-len(orders) // num_parts)
        rounds = []
        for index in range(num_parts):
            on, other = self._copies if index == 0 else self._copies[::-1]
            part = orders[index * cut : (index + 1) * cut]
            if part:
                rounds += self._rounds(way, intervals, on, other if way.hooks else on, blocks, part)
        return rounds

    def _rounds(
        self, way: Way, intervals: Sequence[int], on: _Copy, off: _Copy, blocks: Sequence[int],
        orders: Sequence[Sequence[int]],
    ) -> list[list[float]]:  # fmt: skip
        steps = [blocks[0], *blocks]
        with contextlib.ExitStack() as stack:
            sides = [_Side(off, Nothing(), 1)]
            for interval in intervals:
                place = Place(
                    disk=stack.enter_context(_folder(self._settings.folder)),
                    memory=stack.enter_context(_folder(_memory(self._settings))),
                    base_interval=self._settings.base_interval,
                )  # fmt: skip
                saver = way.begin(on.model, on.optimizer, place, interval)
                stack.callback(saver.close)
                sides.append(_Side(on, saver, interval))
            self._warm_up(sides, way)
            sums = []
            for order in orders:
                seconds = [0.0] * len(sides)
                for side in order:
                    seconds[side] += sides[side].block(steps[side])
                sums.append([s / (2 * count) for s, count in zip(seconds, steps, strict=True)])
        return sums

    def _warm_up(self, sides: Sequence[_Side], way: Way) -> None:
        """A saver with hooks has learned, its first base is stored, and its follower is up, if it comes to that."""
        until_base = self._settings.base_interval + 1
        num_steps = WARM_STEPS if way.hooks else 1
        if way.every_step and until_base <= MOST_WARM_STEPS:  # only these have a follower
            num_steps = max(num_steps, until_base)
        sides[0].train(2)
        for side in sides[1:]:
            side.train(num_steps)
            side.align()


@contextlib.contextmanager
def _folder(inside: str | None) -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="everstep-bench-", dir=inside)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
