"""Runs on a simulated clock: steps, batches, bases and replay as they happen, failures at random times.

Nothing of the model's formulas is used here: the model is compared with this. Many settings run at once, and all of them
meet the same failures, so that their difference is not one of luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from everstep.tune.model import MAX_LAG, Measured, Setting, shadow_loss, shared_s, snapshot_s

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """An entry for each case."""

    goodput: Array
    """Steps that last, times their undisturbed duration, over all time."""
    lost_steps: Array
    """A failure."""
    recovery_s: Array
    """A recovery that was not itself interrupted: from asking for the state to having it."""


@dataclass(frozen=True)
class _Mechanics:
    """What happens in each case, as arrays."""

    step_s: Array
    """Bounded below by what the background needs for a step, because training waits for it."""
    plain_s: Array
    batch: Array
    batch_stall_s: Array
    interval: Array
    base_stall_s: Array
    written_s: Array
    """From the end of a step until its frame is stored, if its batch ends there."""
    base_s: Array
    """From asking for a base until it counts."""
    load_s: Array
    fetch_s: Array
    replay_s: Array
    restart_s: Array
    mean_s: Array
    """Between failures."""
    only_bases: Array
    """Part of the failures that leave nothing but bases …"""
    keeps_log: Array
    """… and, where this is 1, the log on disk."""


def simulate(cases: Sequence[tuple[Measured, Setting]], num_failures: int, seed: int) -> Outcome:
    """Let every case meet `num_failures` failures.

    Waits and kinds are exponential and uniform, drawn one from each of as many equally likely strata and then shuffled:
    fewer failures say as much as many independent ones would.
    """
    random = np.random.default_rng(seed)
    waits, kinds = -np.log1p(-_strata(random, num_failures)), _strata(random, num_failures)
    m = _mechanics(cases)
    step = np.zeros(len(cases))  # that training has reached and that lasts
    base = np.zeros(len(cases))
    lost, recovered_s, recoveries = np.zeros(len(cases)), np.zeros(len(cases)), np.zeros(len(cases))
    recovery_s = np.zeros(len(cases))
    for wait, kind in zip(waits, kinds, strict=True):
        until_s = wait * m.mean_s
        up_s = until_s - recovery_s
        trains = up_s > 0
        up_s = np.maximum(up_s, 0.0)
        done = _steps_in(m, step, base, up_s)
        stored = np.floor(_steps_in(m, step, base, np.maximum(up_s - m.written_s, 0.0)) / m.batch) * m.batch
        asked = np.floor((step + _steps_in(m, step, base, np.maximum(up_s - m.base_s, 0.0)) - base) / m.interval)
        new_base = base + np.where(up_s >= m.base_s, asked, 0.0) * m.interval
        only_bases = kind < m.only_bases
        lasts = np.where(only_bases & (m.keeps_log == 0), new_base, step + stored)
        lost += np.where(trains, step + done - lasts, 0.0)
        base = np.where(trains, np.minimum(new_base, lasts), base)
        step = np.where(trains, lasts, step)
        replayed = m.load_s + m.replay_s * (step - base)
        from_disk = only_bases | ~np.isfinite(m.fetch_s)  # of which nothing is replayed where only bases are left
        back_s = np.where(from_disk, replayed, m.fetch_s)
        recovered_s += np.where(trains, back_s, 0.0)
        recoveries += trains
        # A failure during recovery: the same again.
        recovery_s = np.where(trains, m.restart_s + back_s, recovery_s)
    total_s = waits.sum() * m.mean_s
    count = np.maximum(recoveries, 1)
    return Outcome(step * m.plain_s / total_s, lost / count, recovered_s / count)


def _strata(random: np.random.Generator, count: int) -> Array:
    return random.permutation((np.arange(count) + random.random(count)) / count)


def _steps_in(m: _Mechanics, step: Array, base: Array, time_s: Array) -> Array:
    """Whole steps that training makes in this time, stalls included: of syncs as they come, of bases each at its step."""
    step_s = m.step_s + m.batch_stall_s / m.batch
    cycle_s = m.interval * step_s + m.base_stall_s
    since = (step - base) % m.interval
    time_s = time_s + since * step_s
    cycles = np.floor(time_s / cycle_s)
    rest = np.minimum(np.floor((time_s - cycles * cycle_s) / step_s), m.interval)
    return np.maximum(cycles * m.interval + rest - since, 0.0)


def _mechanics(cases: Sequence[tuple[Measured, Setting]]) -> _Mechanics:
    columns = np.array([_mechanics_of(m, s) for m, s in cases])
    return _Mechanics(*columns.T)


def _mechanics_of(m: Measured, s: Setting) -> tuple[float, ...]:
    """In the order of _Mechanics."""
    codec = m.codec(s.codec)
    if s.mode == "delta":
        write_s, sync_s = codec.encode_s + codec.frame_bytes / m.disk_bytes_s, codec.sync * m.sync_s
        step_s = m.hook_s + shared_s(m, codec) + max(m.step_s, write_s + sync_s / s.batch_steps)
        batch, batch_stall_s, base_stall_s = s.batch_steps, m.batch_stall_s, m.base_stall_s
        written_s, base_s = write_s + sync_s, s.base_interval * m.fold_s + m.base_s
        fetch_s, only_bases = np.inf, 0.0
    elif s.mode == "shadow":
        ship_s = codec.encode_s + codec.frame_bytes / m.ship_bytes_s
        step_s = m.hook_s + shared_s(m, codec, elsewhere=m.elsewhere) + max(m.step_s, ship_s, m.fold_s)
        batch, batch_stall_s, base_stall_s = 1, 0.0, m.base_stall_s
        written_s, base_s = ship_s, m.base_s
        fetch_s, only_bases = m.fetch_s, shadow_loss(m)
    else:
        step_s = max(m.step_s, snapshot_s(m) / s.base_interval)
        batch, batch_stall_s, base_stall_s = 1, 0.0, m.live_stall_s + m.contention * snapshot_s(m)
        written_s, base_s = 0.0, snapshot_s(m)
        fetch_s, only_bases = np.inf, 1.0
    interval = float(s.base_interval)
    if s.mode == "delta":  # one base at a time: the next is begun when the last is done, or taken by the trainer
        interval = min(max(interval, np.ceil(base_s / step_s)), MAX_LAG * interval)
        base_s = min(base_s, MAX_LAG * s.base_interval * step_s)
    return (
        step_s, m.step_s, batch, batch_stall_s, interval, base_stall_s, written_s, base_s, m.load_s, fetch_s,
        codec.replay * m.replay_s, m.restart_s, 1 / m.failure_rate, only_bases, s.mode == "shadow" and m.keeps_log,
    )  # fmt: skip
