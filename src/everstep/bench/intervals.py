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

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from everstep.bench import families, machine, peers, statistics
from everstep.bench.families import Family, Scale
from everstep.bench.progress import Progress, silent
from everstep.bench.savers import WAYS, Nothing, Place, Saver, Way

LIMIT = 0.05
TRIAL_INTERVAL = 4
"""At which the cost of a save is measured first: often enough to see it, seldom enough not to wait for the one before."""
MOST_SEARCHES = 4
LEAST_ROUNDS = 3
WARM_STEPS = 8
"""More than Everstep takes to learn how gradients are owned."""
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
    """No longer one is tried."""
    block_s: float = 1.5
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

    None is longer than `most`. Measured costs are not the same twice, and differ from one interval to the next: it ends
    after a few.
    """
    points: dict[int, Point] = {}
    interval = min(first, most)
    for _ in range(MOST_SEARCHES):
        missing = [k for k in (interval, interval - 1) if k >= 1 and k not in points]
        if not missing:
            break
        points |= {point.interval: point for point in measure(missing)}
        at, below = points[interval], points.get(interval - 1)
        if not at.is_under:
            interval = min(most, max(interval + 1, at.derived()))
        elif below is not None and below.is_under:
            interval = min(interval - 1, below.derived())
        else:
            break
    return points


def found(points: dict[int, Point]) -> tuple[int | None, bool]:
    """The smallest measured interval under the limit, None if there is none; whether one less was measured and is not."""
    under = [k for k, point in points.items() if point.is_under]
    if not under:
        return None, False
    least = min(under)
    return least, least == 1 or least - 1 in points


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
                    progress(f"{name}, {way}", done, total)
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

    def block(self, num_steps: int, *, lead: bool) -> float:
        """Seconds of so many steps."""
        self._saver.go_on()
        if lead:
            self.train(1)
        under_way = self._steps - self._saver.newest()
        begun = time.perf_counter()
        self.train(num_steps)
        if lead:
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
            points = {1: self._point(way, 1, rounds)}
        else:
            trial = self._point(way, TRIAL_INTERVAL, 2)
            most = self._settings.most_interval
            points = search(trial.derived(), most, lambda intervals: [self._point(way, k, rounds) for k in intervals])
        interval, is_confirmed = found(points)
        return {
            "interval": interval, "confirmed": is_confirmed, "every_step": way.every_step,
            "points": [points[k].as_dict() for k in sorted(points)],
        }  # fmt: skip

    def _point(self, way: Way, interval: int, num_rounds: int) -> Point:
        cycle_s = interval * self._guess_s
        num_steps = interval * max(1, round(self._settings.block_s / cycle_s))
        affordable = round(self._settings.point_s / (4 * num_steps * self._guess_s))
        orders = statistics.abba(min(num_rounds, max(LEAST_ROUNDS, affordable)), seed=self._settings.seed)
        half = (len(orders) + 1) // 2
        ratios: list[float] = []
        off_step_s: list[float] = []
        for index, part in enumerate((orders[:half], orders[half:])):
            on, off = self._copies if index == 0 else self._copies[::-1]
            if not part:
                continue
            for with_s, without_s in self._rounds(way, interval, on, off if way.hooks else on, num_steps, part):
                ratios.append(with_s / without_s)
                off_step_s.append(without_s / (2 * num_steps))
        self._off_step_s += off_step_s
        ratio = statistics.median_interval(ratios, seed=self._settings.seed)
        return Point(
            interval=interval, overhead=statistics.Interval(ratio.median - 1, ratio.low - 1, ratio.high - 1),
            step_s=statistics.median_interval(off_step_s).median, num_rounds=len(ratios), block_steps=num_steps,
        )  # fmt: skip

    def _rounds(
        self, way: Way, interval: int, on: _Copy, off: _Copy, num_steps: int, orders: Sequence[Sequence[bool]]
    ) -> list[tuple[float, float]]:
        """For each round the seconds of its blocks with and without."""
        s = self._settings
        disk = tempfile.mkdtemp(prefix="everstep-bench-", dir=s.folder)
        memory = tempfile.mkdtemp(prefix="everstep-bench-", dir=_memory(s))
        place = Place(disk=disk, memory=memory, base_interval=s.base_interval)
        try:
            saver = way.begin(on.model, on.optimizer, place, interval)
            try:
                side, without = _Side(on, saver, interval), _Side(off, Nothing(), 1)
                self._warm_up(side, without, way)
                sums = []
                for order in orders:
                    both = [0.0, 0.0]
                    for is_on in order:
                        both[is_on] += (side if is_on else without).block(num_steps, lead=interval == 1)
                    sums.append((both[True], both[False]))
                return sums
            finally:
                saver.close()
        finally:
            shutil.rmtree(disk, ignore_errors=True)
            shutil.rmtree(memory, ignore_errors=True)

    def _warm_up(self, side: _Side, without: _Side, way: Way) -> None:
        """A saver with hooks has learned, its first base is stored, and its follower is up."""
        for _ in range(max(WARM_STEPS, self._settings.base_interval + 1) if way.hooks else 1):
            side.train(1)
        without.train(2)
        side.align()
