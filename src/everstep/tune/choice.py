"""The best setting under the user's limits, and why it is that one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from everstep.errors import UsageError
from everstep.tune.model import AUTO, FOLLOWER_SHARE, MODES, RAW, Codec, Cost, Limits, Measured, Setting, cost_of, costs

MAX_INTERVAL = 100_000
MAX_BATCH = 1024
_INTERVAL_RATIO = 1.08
_BATCH_RATIO = 1.15

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A setting, what it is expected to cost, and why it was chosen."""

    setting: Setting
    cost: Cost
    reason: str
    broken: tuple[str, ...] = ()
    """Limits that it does not keep."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which cannot say that something is infinite."""
        expected = {name: value for name, value in asdict(self.cost).items() if name != "keeps_up"}
        return {
            "setting": asdict(self.setting), "expected": expected, "reason": self.reason, "broken": list(self.broken)
        }  # fmt: skip


def choose(
    measured: Measured,
    limits: Limits | None = None,
    *,
    modes: Sequence[str] = ("delta",),
    bases: int = 2,
    max_batch: int = MAX_BATCH,
) -> Decision:
    """The setting with the greatest goodput within the limits; if none is, the one that breaks them least.

    `bases`: so many are to stay, fewer if `max_bytes` does not allow it.
    """
    limits = limits or Limits()
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise UsageError(f"modes to choose from must be among {', '.join(MODES)}, not {', '.join(unknown) or 'none'}")
    if bases < 1 or max_batch < 1:
        raise UsageError("at least one base must be kept, and a batch must be at least one step")
    for num_bases in range(bases, 0, -1):
        best = _best(measured, limits, modes, num_bases, max_batch)
        if max(best.excess) <= 0:
            break
    setting = best.setting
    free = best if limits == Limits() else _best(measured, Limits(), modes, bases, max_batch)
    return Decision(
        setting=setting, cost=cost_of(measured, setting), reason=_reason(measured, limits, setting, free.setting),
        broken=broken(measured, limits, setting),
    )  # fmt: skip


@dataclass(frozen=True)
class _Candidate:
    setting: Setting
    goodput: float
    excess: tuple[float, float]
    """By how much it breaks what must be, and what the user wants, relative to the limit that it breaks most; 0: not."""


def _best(measured: Measured, limits: Limits, modes: Sequence[str], bases: int, max_batch: int) -> _Candidate:
    found = [
        _best_of(measured, limits, mode, codec, bases, max_batch) for mode in modes for codec in _codecs(measured, mode)
    ]
    return min(found, key=lambda c: (c.excess, -c.goodput))


def _codecs(measured: Measured, mode: str) -> Sequence[Codec]:
    return measured.codecs[:1] if mode == "snapshot" else measured.codecs


def _best_of(measured: Measured, limits: Limits, mode: str, codec: Codec, bases: int, max_batch: int) -> _Candidate:
    intervals = np.concatenate([_geometric(MAX_INTERVAL, _INTERVAL_RATIO), _edges(measured, limits)])
    batches = _geometric(max_batch, _BATCH_RATIO) if mode == "delta" else np.ones(1)
    interval, batch = (a.ravel() for a in np.meshgrid(intervals, batches, indexing="ij"))
    cost = costs(measured, mode, codec, interval, batch, bases)
    must = _most(_needs(measured, cost), interval)
    wish = _most(_wishes(limits, cost), interval)
    allowed = must <= must.min()
    allowed &= wish <= wish[allowed].min()
    index = int(np.argmax(np.where(allowed, cost.goodput, -1.0)))
    setting = Setting(
        mode=mode, base_interval=int(interval[index]), batch_steps=int(batch[index]), codec=codec.name, bases=bases
    )
    return _Candidate(setting, float(cost.goodput[index]), (float(must[index]), float(wish[index])))


@cache
def _geometric(largest: int, ratio: float) -> Array:
    """Whole numbers from 1 to `largest`, each not much more than `ratio` times the one before."""
    count = int(np.ceil(np.log(largest) / np.log(ratio))) + 1
    return np.unique(np.round(np.geomspace(1, largest, count)))


def _edges(measured: Measured, limits: Limits) -> Array:
    """Base intervals at which a limit is just kept: where limits matter, the best is there."""
    found = []
    spare_s = measured.step_s - measured.fold_s
    if spare_s > 0:
        found.append(np.ceil(measured.base_s / (spare_s * FOLLOWER_SHARE)))
    if limits.max_overhead is not None:
        found.append(np.ceil(measured.base_stall_s / (limits.max_overhead * measured.step_s)))
        found.append(np.ceil(measured.live_stall_s / (limits.max_overhead * measured.step_s)))
    for codec in measured.codecs:
        replay_s = codec.replay * measured.replay_s
        if limits.max_recovery_s is not None and replay_s:
            age = (limits.max_recovery_s - measured.load_s) / replay_s - measured.base_s / measured.step_s
            found.append(np.floor(age / (1 + measured.fold_s / measured.step_s)))
    return np.array([value for value in found if 1 <= value <= MAX_INTERVAL])


def _needs(measured: Measured, cost: Cost) -> list[tuple[str, Array]]:
    """What must be, with by how much it is not, relative to itself."""
    return [
        (f"the memory there is ({measured.memory_bytes / 1e9:.1f} GB)", cost.memory_bytes / measured.memory_bytes - 1),
        ("what a follower can keep up with", 1 - cost.keeps_up),
    ]


def _wishes(limits: Limits, cost: Cost) -> list[tuple[str, Array]]:
    """Each limit of the user's, with by how much it is exceeded, relative to itself."""
    given = [
        ("max_overhead", limits.max_overhead, cost.overhead),
        ("max_recovery_s", limits.max_recovery_s, cost.worst_recovery_s),
        ("max_bytes", limits.max_bytes, cost.kept_bytes),
    ]
    return [(f"{name}={limit:g}", value / limit - 1) for name, limit, value in given if limit is not None]


def _most(excesses: list[tuple[str, Array]], like: Array) -> Array:
    """The largest of each setting's; 0 if it breaks nothing."""
    found: Array = np.max([np.zeros_like(like), *(values for _, values in excesses)], axis=0)
    return found


def broken(measured: Measured, limits: Limits, setting: Setting) -> tuple[str, ...]:
    """The limits that a setting does not keep."""
    cost = cost_of(measured, setting)
    return tuple(name for name, excess in [*_needs(measured, cost), *_wishes(limits, cost)] if excess > 0)


def excess_of(measured: Measured, limits: Limits, setting: Setting) -> tuple[float, float]:
    """By how much a setting breaks what must be, and what the user wants: what settings are compared by."""
    cost = cost_of(measured, setting)
    must, wish = (max([0.0, *(float(e) for _, e in found)]) for found in (_needs(measured, cost), _wishes(limits, cost)))
    return must, wish


def _reason(measured: Measured, limits: Limits, setting: Setting, free: Setting) -> str:
    """In words."""
    parts = [_why_mode(measured, setting), _why_interval(measured, setting)]
    if setting.mode == "delta":
        parts.append(_why_batch(measured, setting))
    parts.append(_why_codec(measured, setting))
    missed = broken(measured, limits, setting)
    if missed:
        parts.append(f"no setting keeps within {' and '.join(missed)}: this comes nearest")
    elif free != setting:
        bound = broken(measured, limits, free)
        if bound:
            parts.append(f"without {' and '.join(bound)} it would be {describe(replace(free, bases=setting.bases))}")
    return "; ".join(part for part in parts if part)


def _why_mode(m: Measured, setting: Setting) -> str:
    often = f"with a failure every {seconds(1 / m.failure_rate)}" if m.failure_rate else "without failures"
    return f"mode {setting.mode}, {often}"


def _why_interval(m: Measured, setting: Setting) -> str:
    text = f"a base every {setting.base_interval} steps"
    cost = cost_of(m, setting)
    if setting.mode == "snapshot":
        return f"{text}: each stalls training for {seconds(m.live_stall_s)}, a failure loses {seconds(cost.lost_s)} of work"
    if setting.mode == "shadow" and m.keeps_log:
        return f"{text}: each costs training {seconds(m.base_stall_s)}, and only after loss of the host is the log replayed"
    if setting.mode == "shadow":
        lost = "both hosts at once" if m.elsewhere else "the host"
        return f"{text}: each costs training {seconds(m.base_stall_s)}, and only loss of {lost} needs one"
    if m.base_stall_s == 0.0:
        return f"{text}: they cost training nothing, and more often the follower could not write them"
    return f"{text}: each costs training {seconds(m.base_stall_s)}, and replaying a step takes {seconds(m.replay_s)}"


def _why_batch(m: Measured, setting: Setting) -> str:
    if setting.batch_steps == 1:
        return "a sync every step: waiting for more would gain less than a failure costs"
    codec = m.codec(setting.codec)
    slow = codec.encode_s + codec.frame_bytes / m.disk_bytes_s + codec.sync * m.sync_s > m.step_s
    why = "the disk cannot sync every step in time" if slow else f"a sync stalls training for {seconds(m.batch_stall_s)}"
    return f"a sync every {setting.batch_steps} steps: {why}"


def _why_codec(m: Measured, setting: Setting) -> str:
    """Empty where there is no choice, or none that was measured."""
    known = {codec.name: codec for codec in m.codecs}
    if setting.mode == "snapshot" or not {AUTO, RAW} <= set(known):
        return ""
    auto, raw = known[AUTO], known[RAW]
    saved_bytes, takes_s = raw.frame_bytes - auto.frame_bytes, auto.encode_s - raw.encode_s
    if saved_bytes <= 0 and takes_s <= 0:
        return ""
    told = f"{saved_bytes / 1e6:.3g} MB of the {raw.frame_bytes / 1e6:.3g} MB of a frame for {seconds(takes_s)} of work"
    if setting.codec == RAW:
        return f"frames as they are: lossless codecs would save only {told}"
    return f"lossless codecs, which save {told}"


def describe(setting: Setting) -> str:
    """A setting in a few words."""
    text = f"mode {setting.mode}, a base every {setting.base_interval} steps"
    if setting.mode == "delta":
        text += f", a sync every {setting.batch_steps}"
    return f"{text}, frames as they are" if setting.codec == RAW else text


def seconds(value: float) -> str:
    """A time for people."""
    for unit, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if value >= 2 * unit:
            return f"{value / unit:.3g} {name}"
    if value == 0.0:
        return "0 s"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"
