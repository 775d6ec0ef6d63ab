"""The same model before a run exists: from the size of a model and the speed of machines."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from everstep.errors import UsageError
from everstep.tune.averages import CONTENTION
from everstep.tune.choice import Decision, choose
from everstep.tune.model import Codec, Limits, Measured

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of a parameter, its gradient and each of its moments. Autocast keeps all of these in fp32."""
MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2}
COMPRESSIONS = ("none", "half", "topk")
INDEX_BYTES = 4
_LEAST, _MOST = 1e-9, 1e18
"""What there is to plan with is between these: then nothing that follows from it is too large for a number."""
_MAY_BE_INFINITE = ("memory_bytes", "mtbf_s")


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """What there is to plan with. Speeds are those of one rank; defaults are about what one core and one disk of the machine
    gave on which Everstep was made."""

    params: float
    step_s: float
    mtbf_s: float
    """Between failures of the whole job."""
    precision: str = "fp32"
    optimizer: str = "adam"
    compression: str = "none"
    """Of gradients, for training."""
    topk_ratio: float = 0.01
    ranks: int = 1
    disk_bytes_s: float = 1.3e9
    sync_s: float = 0.3e-3
    link_bytes_s: float = 1.2e9
    """To a shadow on another host."""
    copy_bytes_s: float = 2e9
    """To a shadow on this host, and from it."""
    fold_params_s: float = 5e8
    """Parameters that one core updates in a second."""
    cores: int = 4
    """That replay at recovery."""
    memory_bytes: float = math.inf
    """Free, a rank."""
    restart_s: float = 30.0
    host_share: float = 0.1
    """Of the failures, those that take the host with them."""
    interference: float = 0.02
    """What a base in the background costs training, as a part of the time that making it takes."""
    handle_bytes_s: float = 1.6e9
    """Of a gradient: what one core encodes, writes and hashes in a second."""
    contention: float = CONTENTION
    """What part of that processor time training loses: 1 where it uses every core."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type in ("float", "int") and not (isinstance(value, int | float) and value >= 0):
                raise UsageError(f"{each.name} must be a number from 0 on, not {value!r}")
        speeds = ("disk_bytes_s", "link_bytes_s", "copy_bytes_s", "fold_params_s", "handle_bytes_s")
        for name in ("params", "step_s", "mtbf_s", "memory_bytes", "topk_ratio", *speeds):
            if not getattr(self, name) >= _LEAST:
                raise UsageError(f"{name} must be at least {_LEAST:g}, not {getattr(self, name)!r}")
        for each in fields(self):
            value = getattr(self, each.name)
            is_free = each.name in _MAY_BE_INFINITE and value == math.inf
            if each.type in ("float", "int") and value > _MOST and not is_free:
                raise UsageError(f"{each.name} must be at most {_MOST:g}, not {value!r:.40}")
        for name in ("ranks", "cores"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name, known in (("precision", BYTES), ("optimizer", MOMENTS), ("compression", COMPRESSIONS)):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if not 0 < self.topk_ratio <= 1:
            raise UsageError(f"topk_ratio must be above 0 and at most 1, not {self.topk_ratio}")
        if max(self.host_share, self.interference, self.contention) > 1:
            raise UsageError("host_share, interference and contention must be from 0 to 1: they are parts of a whole")

    @property
    def state_bytes(self) -> float:
        """Of the whole model: parameters and moments."""
        return self.params * BYTES[self.precision] * (1 + MOMENTS[self.optimizer])

    @property
    def frame_bytes(self) -> float:
        """Of all ranks, a step."""
        size = BYTES[self.precision]
        dense = self.params * size
        if self.compression == "half":
            return min(dense, self.params * 2)
        if self.compression == "topk":  # every rank has chosen its own elements; their union is stored once
            return min(dense, self.params * min(1.0, self.topk_ratio * self.ranks) * (size + INDEX_BYTES))
        return dense


@dataclass(frozen=True)
class Row:
    """One mode at its best."""

    name: str
    decision: Decision
    available: bool = True
    """Whether `mode="auto"` may choose it."""


@dataclass(frozen=True)
class Plan:
    """What each mode costs, and which is best."""

    assumed: Assumed
    rows: tuple[Row, ...]
    best: Row

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        a = self.assumed
        given = {each.name: getattr(a, each.name) for each in fields(a)}
        return {
            "assumed": {name: None if value == math.inf else value for name, value in given.items()},
            "state_bytes": a.state_bytes,
            "frame_bytes": a.frame_bytes,
            "frames_a_day_bytes": a.frame_bytes * 86400 / a.step_s,
            "modes": [{"name": row.name, "available": row.available, **row.decision.as_dict()} for row in self.rows],
            "best": self.best.name,
        }


def plan(assumed: Assumed, limits: Limits | None = None) -> Plan:
    """The best setting of each mode, and the best mode. Limits hold for the whole job; bytes are of all ranks."""
    limits = limits or Limits()
    if limits.max_bytes is not None:
        limits = replace(limits, max_bytes=limits.max_bytes / assumed.ranks)
    here = measured(assumed)
    rows = [
        Row("delta", choose(here, limits, modes=["delta"])),
        Row("shadow on this host", choose(here, limits, modes=["shadow"])),
        Row("shadow elsewhere", choose(measured(assumed, elsewhere=True), limits, modes=["shadow"])),
        Row("snapshot", choose(here, limits, modes=["snapshot"]), available=False),
    ]
    best = max(
        (row for row in rows if row.available), key=lambda row: (not row.decision.broken, row.decision.cost.goodput)
    )
    return Plan(assumed, tuple(rows), best)


def measured(assumed: Assumed, *, elsewhere: bool = False) -> Measured:
    """What one rank would measure, if all is as assumed."""
    a = assumed
    state_bytes, frame_bytes = a.state_bytes / a.ranks, a.frame_bytes / a.ranks
    fold_s = a.params / a.ranks / a.fold_params_s
    base_s = 2 * state_bytes / a.disk_bytes_s  # written, and read back
    link_bytes_s = a.link_bytes_s if elsewhere else a.copy_bytes_s
    return Measured(
        step_s=a.step_s, state_bytes=state_bytes, codecs=(Codec(name="auto", frame_bytes=frame_bytes),),
        disk_bytes_s=a.disk_bytes_s, sync_s=a.sync_s, base_s=base_s, load_s=state_bytes / a.disk_bytes_s,
        replay_s=max(fold_s / a.cores, frame_bytes / a.disk_bytes_s), fold_s=max(fold_s, frame_bytes / a.disk_bytes_s),
        fetch_s=state_bytes / link_bytes_s, ship_bytes_s=link_bytes_s, elsewhere=elsewhere,
        base_stall_s=a.interference * base_s, restart_s=a.restart_s,
        live_stall_s=max(state_bytes - a.step_s * a.disk_bytes_s, 0.0) / a.copy_bytes_s,
        background_s=a.params * BYTES[a.precision] / a.ranks / a.handle_bytes_s, contention=a.contention,
        failure_rate=1 / a.mtbf_s, host_share=a.host_share, memory_bytes=a.memory_bytes,
    )  # fmt: skip
