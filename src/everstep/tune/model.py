"""What a setting costs: Form B of LowDiff's model, with what this implementation adds to it.

Form B counts, for every second of training, `s_F/(F·τ) + c/(B·τ) + λ·[B·τ/2 + R_F + r·F/2]`: stalls of bases and of
batched syncs, and for every failure the work since the last sync, the loading of a base and the replay of the steps after
it. That is right as long as failures are rare. Here the same quantities go into the exact expectation for failures that
come at random (Daly's), of which Form B is the first term:

    goodput = λD / (e^{λD} - 1) · e^{-λ(l + R)} / (1 + overhead)

with D the time between two points that survive, l the time until such a point is stored, R the time until training goes on.
Where failures are of two kinds, each has its own rate and its own factor.

All of this works on numbers and on numpy arrays of settings alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import numpy as np

from everstep.errors import UsageError

MODES = ("delta", "shadow", "snapshot")
AUTO, RAW = "auto", "raw"
"""Of a run's frames: lossless codecs are tried, or not."""
MAX_LAG = 4
"""In base intervals: if there has been no base for so long, the trainer takes one (see follow.keeper)."""
FOLLOWER_SHARE = 0.5
"""Of the time that folding leaves to it, a follower may spend so much on writing bases: the rest is for catching up."""
SLOTS = 3
"""Of the pool that snapshots are written to, each of the size of the state."""
FRAMES_IN_MEMORY = 4
"""That a shadow may be behind."""

Number = Any
"""A float, or an array of them."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """One way to store gradients, and what a frame costs in it."""

    name: str
    frame_bytes: float
    encode_s: float = 0.0
    """Of the writer thread, for one frame, beside writing its bytes."""
    background_s: float = 0.0
    """Processor time, for one frame, beside Measured.background_s."""
    sync: float = 1.0
    """A sync of such frames takes so many times Measured.sync_s …"""
    replay: float = 1.0
    """… and replaying one at recovery so many times Measured.replay_s."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run costs where it runs: by measurement, or by assumption before there is one."""

    step_s: float
    """One step of training that nothing delays."""
    state_bytes: float
    """Parameters, buffers and optimizer state."""
    codecs: tuple[Codec, ...]
    disk_bytes_s: float
    """The log's storage, writing."""
    sync_s: float
    """One fdatasync, without the writing."""
    base_s: float
    """Writing a base in the background."""
    load_s: float
    """Reading a base at recovery."""
    replay_s: float
    """Replaying one step at recovery, with all cores."""
    fold_s: float
    """Folding one step in a follower, with its one thread."""
    fetch_s: float = math.inf
    """Taking the state from a shadow; infinite: there can be none."""
    ship_bytes_s: float = math.inf
    """The way to the shadow: memory, or a network."""
    elsewhere: bool = False
    """Whether the shadow is on another host, and outlives this one."""
    keeps_log: bool = False
    """Whether the shadow keeps the log on disk too: then loss of its host loses no more than delta mode would."""
    hook_s: float = 0.0
    """The training thread's own part in saving a step, whatever is set."""
    batch_stall_s: float = 0.0
    """What training waits for a sync, beside waiting for a writer that cannot keep up."""
    base_stall_s: float = 0.0
    """What training loses by a base that a follower makes, beside what folding costs."""
    live_stall_s: float = 0.0
    """What training loses by a snapshot of its own: the copying of what has not left when the next update comes."""
    background_s: float = 0.0
    """Processor time that saving a step takes in the background, without a follower's."""
    contention: float = 0.0
    """What part of the processor time of background work training loses by it: cores, caches and memory that both use."""
    restart_s: float = 0.0
    """From a failure until a new process asks for its state."""
    failure_rate: float
    """Failures a second."""
    host_share: float = 0.1
    """Of the failures, those that take the host's memory with them."""
    memory_bytes: float = math.inf
    """That frames and a shadow may take."""
    segment_bytes: float = 0.0
    """The log is removed in pieces of this size."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("codecs", "elsewhere", "keeps_log"):
                continue
            if not isinstance(value, int | float) or math.isnan(value) or value < 0:
                raise UsageError(f"{each.name} must be a number from 0 on, not {value!r}")
        for name in ("step_s", "disk_bytes_s", "ship_bytes_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be more than 0")
        for name in ("step_s", "failure_rate", "state_bytes"):
            if math.isinf(getattr(self, name)):
                raise UsageError(f"{name} must be finite")
        for name in ("host_share", "contention"):
            if getattr(self, name) > 1:
                raise UsageError(f"{name} must be from 0 to 1, a part of a whole, not {getattr(self, name)}")
        told = [getattr(codec, each.name) for codec in self.codecs for each in fields(codec) if each.name != "name"]
        if not told or not all(value >= 0 for value in told):
            raise UsageError("there must be a codec, and its bytes, seconds and ratios must be numbers from 0 on")

    def codec(self, name: str) -> Codec:
        """UsageError if it was not measured."""
        for codec in self.codecs:
            if codec.name == name:
                return codec
        raise UsageError(f"nothing is known of the codec {name!r}, only of {', '.join(c.name for c in self.codecs)}")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user allows; None: whatever is best."""

    max_overhead: float | None = None
    """Part of the training time that saving may cost, such as 0.01."""
    max_recovery_s: float | None = None
    """From asking for the state to having it, at the worst moment."""
    max_bytes: float | None = None
    """In the run's folder, at the worst moment."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise UsageError(f"{each.name} must be a number above 0, or None, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What can be set."""

    mode: str = "delta"
    base_interval: int = 200
    """F: steps from base to base."""
    batch_steps: int = 1
    """B: steps a sync."""
    codec: str = AUTO
    """`auto`: of what loses no bit, the smallest for each piece of a tensor; `raw`: frames as they are. Never a lossy one:
    that would be another training."""
    bases: int = 2
    """So many of the newest stay."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a setting costs; numbers, or arrays for arrays of settings."""

    overhead: Number
    """Part that saving adds to the time of training without failures."""
    lost_s: Number
    """Work that a failure costs, expected."""
    recovery_s: Number
    """From asking for the state to having it, expected."""
    worst_recovery_s: Number
    kept_bytes: Number
    """In the run's folder, at the worst moment."""
    memory_bytes: Number
    """Of frames and shadow."""
    goodput: Number
    """Part of all time that is training which lasts."""
    keeps_up: Number
    """Follower or shadow: what it can do a second over what it is given to do; below 1 it falls behind."""


def cost_of(measured: Measured, setting: Setting) -> Cost:
    """What this setting costs."""
    found = costs(
        measured, setting.mode, measured.codec(setting.codec), float(setting.base_interval), float(setting.batch_steps),
        setting.bases,
    )  # fmt: skip
    return Cost(**{each.name: float(getattr(found, each.name)) for each in fields(Cost)})


def costs(measured: Measured, mode: str, codec: Codec, interval: Number, batch: Number, bases: int) -> Cost:
    """The same for arrays of base intervals and batches."""
    if mode == "delta":
        return _delta(measured, codec, interval, batch, bases)
    if mode == "shadow":
        return _shadow(measured, codec, interval, bases)
    if mode == "snapshot":
        return _snapshot(measured, interval, bases)
    raise UsageError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")


def _delta(m: Measured, codec: Codec, interval: Number, batch: Number, bases: int) -> Cost:
    write_s, sync_s = codec.encode_s + codec.frame_bytes / m.disk_bytes_s, codec.sync * m.sync_s
    replay_s = codec.replay * m.replay_s
    waiting = np.maximum(write_s + sync_s / batch - m.step_s, 0.0) / m.step_s
    stalls_s = m.hook_s + shared_s(m, codec) + m.base_stall_s / interval + m.batch_stall_s / batch
    overhead = stalls_s / m.step_s + waiting
    step_s = m.step_s * (1 + overhead)
    making_s = interval * m.fold_s + m.base_s  # the follower folds when it is asked for a base
    between = np.minimum(np.maximum(interval, making_s / step_s), MAX_LAG * interval)
    late = np.minimum(making_s / step_s, MAX_LAG * interval)
    stored_s = write_s + sync_s
    worst_age = between + late
    recovery_s = m.load_s + replay_s * (between / 2 + late)
    return Cost(
        overhead=overhead,
        lost_s=batch * step_s / 2 + stored_s,
        recovery_s=recovery_s,
        worst_recovery_s=m.load_s + replay_s * worst_age,
        kept_bytes=(bases + 1) * m.state_bytes + codec.frame_bytes * ((bases - 1) * between + worst_age) + m.segment_bytes,
        memory_bytes=batch * codec.frame_bytes + 0 * interval,
        goodput=_goodput(m, overhead, [(1.0, batch * step_s, stored_s, recovery_s)]),
        keeps_up=_keeps_up(m, step_s, interval),
    )


def _shadow(m: Measured, codec: Codec, interval: Number, bases: int) -> Cost:
    ship_s = codec.encode_s + codec.frame_bytes / m.ship_bytes_s
    waiting = max(ship_s - m.step_s, m.fold_s - m.step_s, 0.0) / m.step_s
    shared = shared_s(m, codec, elsewhere=m.elsewhere)
    overhead = (m.hook_s + shared + m.base_stall_s / interval) / m.step_s + waiting
    step_s = m.step_s * (1 + overhead)
    gone, replay_s, log_bytes = shadow_loss(m), codec.replay * m.replay_s, 0.0
    late = m.base_s / step_s  # steps until a base that is being written is there
    lost = (gone, interval * step_s, m.base_s, m.load_s)
    worst_s = m.load_s
    if m.keeps_log:
        lost = (gone, step_s, ship_s, m.load_s + replay_s * (interval / 2 + late))
        worst_s = m.load_s + replay_s * (interval + late)
        log_bytes = codec.frame_bytes * (bases * interval + late) + m.segment_bytes
    kinds = [(1.0 - gone, step_s, ship_s, m.fetch_s), lost]
    worst = [m.fetch_s] * (gone < 1) + [worst_s] * (gone > 0)
    return Cost(
        overhead=overhead,
        lost_s=sum(share * (between / 2 + stored) for share, between, stored, _ in kinds),
        recovery_s=sum(share * recovery for share, _, _, recovery in kinds) + 0 * interval,
        worst_recovery_s=reduce(np.maximum, worst) + 0 * interval,
        kept_bytes=(bases + 1) * m.state_bytes + log_bytes + 0 * interval,
        memory_bytes=m.state_bytes + FRAMES_IN_MEMORY * codec.frame_bytes + 0 * interval,
        goodput=_goodput(m, overhead, kinds),
        keeps_up=_keeps_up(m, step_s, interval),
    )


def shadow_loss(m: Measured) -> float:
    """Part of the failures that take the shadow too, with all frames since its last base: those of its host; if that is
    another one, those of both hosts at once, as if they failed independently."""
    return m.host_share**2 if m.elsewhere else m.host_share


def shared_s(m: Measured, codec: Codec, *, elsewhere: bool = False) -> float:
    """What training loses a step to background work; folding, which a follower does for every step, is a part of that unless
    it is done on another host."""
    return m.contention * (m.background_s + codec.background_s + (0.0 if elsewhere else m.fold_s))


def snapshot_s(m: Measured) -> float:
    """Until a snapshot has left: written once, and neither folded nor read back."""
    return m.state_bytes / m.disk_bytes_s


def _snapshot(m: Measured, interval: Number, bases: int) -> Cost:
    written_s = snapshot_s(m)
    waiting = np.maximum(written_s / interval - m.step_s, 0.0) / m.step_s
    overhead = (m.live_stall_s + m.contention * written_s) / (interval * m.step_s) + waiting
    between_s = interval * m.step_s * (1 + overhead)
    return Cost(
        overhead=overhead,
        lost_s=between_s / 2 + written_s,
        recovery_s=m.load_s + 0 * interval,
        worst_recovery_s=m.load_s + 0 * interval,
        kept_bytes=(SLOTS + bases + 1) * m.state_bytes + 0 * interval,
        memory_bytes=max(m.state_bytes - m.step_s * m.disk_bytes_s, 0.0) + 0 * interval,
        goodput=_goodput(m, overhead, [(1.0, between_s, written_s, m.load_s)]),
        keeps_up=np.inf + 0 * interval,
    )


def _keeps_up(m: Measured, step_s: Number, interval: Number) -> Number:
    """Time that a follower has for a base over the time that it takes."""
    spare_s = np.maximum(step_s - m.fold_s, 0.0) * interval * FOLLOWER_SHARE
    return spare_s / m.base_s if m.base_s else np.where(spare_s > 0, np.inf, 0.0)


def _goodput(m: Measured, overhead: Number, kinds: list[tuple[float, Number, Number, Number]]) -> Number:
    """`kinds` of failures: (share, seconds between points that survive, until one is stored, until the state is back)."""
    found: Number = 1.0 / (1.0 + overhead)
    for share, between_s, stored_s, recovery_s in kinds:
        rate = share * m.failure_rate
        if rate == 0.0:
            continue
        with np.errstate(over="ignore"):  # if no point is reached before a failure comes, nothing lasts: 0
            found = found * rate * between_s / np.expm1(rate * between_s)
            found = found * np.exp(-rate * (stored_s + m.restart_s + recovery_s))
    return found
