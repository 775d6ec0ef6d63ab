"""Medians with intervals, slopes, and the order of blocks. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Interval:
    """A value and the ends of its 95 % interval."""

    median: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def median_interval(values: Sequence[float], *, seed: int = 0, resamples: int = 10_000) -> Interval:
    """The median and its 95 % bootstrap interval: percentiles of the medians of resamples."""
    data = np.asarray(values, np.float64)
    if data.size == 0:
        raise ValueError("a median needs at least one value")
    draws = np.random.default_rng(seed).integers(0, data.size, (resamples, data.size))
    medians = np.median(data[draws], axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return Interval(float(np.median(data)), float(low), float(high))


def slope_interval(values: Sequence[float], *, block: int = 20, seed: int = 0, resamples: int = 2_000) -> Interval:
    """The slope of values over their index and its 95 % interval.

    Neighbouring values hang together (memory grows and shrinks in saw-teeth), so medians of whole blocks are taken, a
    line is laid through them, and blocks are resampled.
    """
    data = np.asarray(values, np.float64)
    count = data.size // block
    if count < 3:
        raise ValueError(f"a slope needs at least {3 * block} values, not {data.size}")
    heights = np.median(data[: count * block].reshape(count, block), axis=1)
    positions = (np.arange(count) + 0.5) * block
    draws = np.random.default_rng(seed).integers(0, count, (resamples, count))
    slopes = [_slope(positions[d], heights[d]) for d in draws if np.ptp(d)]
    low, high = np.percentile(slopes, (2.5, 97.5))
    return Interval(_slope(positions, heights), float(low), float(high))


def _slope(x: _Floats, y: _Floats) -> float:
    centred = x - x.mean()
    return float((centred * (y - y.mean())).sum() / (centred * centred).sum())


def mirrored(num_sides: int, num_rounds: int, *, seed: int = 0) -> list[tuple[int, ...]]:
    """For each round the order of its blocks: every side once, then the same backwards; all are first equally often.

    Within a round any drift that is linear in time weighs on all sides alike.
    """
    turns = [[(first + i) % num_sides for i in range(num_sides)] for first in range(num_rounds)]
    random.Random(seed).shuffle(turns)
    return [(*turn, *reversed(turn)) for turn in turns]


def abba(num_pairs: int, *, seed: int = 0) -> list[tuple[bool, ...]]:
    """For each pair the order of its four blocks (True: on): on-off-off-on or off-on-on-off, by lot, as many of each."""
    return [tuple(side == 0 for side in order) for order in mirrored(2, num_pairs, seed=seed)]


def pair_ratio(order: Sequence[bool], seconds: Sequence[float]) -> float:
    """Time of the blocks with over time of the blocks without."""
    on = sum(s for is_on, s in zip(order, seconds, strict=True) if is_on)
    off = sum(s for is_on, s in zip(order, seconds, strict=True) if not is_on)
    return on / off
