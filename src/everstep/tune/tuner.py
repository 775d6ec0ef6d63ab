"""When to change one's mind: at bases, when enough was measured, and when it is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from everstep.tune.averages import Averages
from everstep.tune.choice import Decision, broken, choose, describe, excess_of
from everstep.tune.model import Limits, Measured, Setting, cost_of

MARGIN = 0.1
"""A change must save this part of what is wasted (or of what lasts, if that is less) …"""
WORTH = 1e-4
"""… and this part of all time."""
LARGEST_CHANGE = 4
"""Times more or less in one decision: what was measured under one setting says less of one that is far away."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the tuner made of what was known at a base."""

    step: int
    changed: bool
    decision: Decision
    """Its setting is in force from here on."""


def is_worth(then: float, now: float) -> bool:
    """Whether another goodput is so much better that a change pays."""
    return then - now > max(MARGIN * min(1 - now, now), WORTH)


def keeps_better(then: tuple[float, float], now: tuple[float, float]) -> bool:
    """Whether limits are broken by so much less (see excess_of) that a change pays; not at all is always less."""
    for after, before in zip(then, now, strict=True):
        if after < before and (after == 0.0 or before - after > MARGIN * before):
            return True
        if after > before:
            return False
    return False


class Tuner:
    """Holds the setting in force. Pure but for what it remembers; one thread."""

    def __init__(
        self, setting: Setting, limits: Limits, *, modes: Sequence[str] = ("delta",), bases: int = 2, max_batch: int = 1
    ) -> None:
        """`modes` that may be changed to; `bases` that are to be kept; `max_batch` 1: the number of steps a sync is not its
        business."""
        self.setting = setting
        """In force."""
        self._limits, self._modes, self._bases, self._max_batch = limits, modes, bases, max_batch

    def at_base(self, step: int, averages: Averages, measured: Measured) -> Verdict | None:
        """Decide anew; None while too little was measured."""
        if not averages.ready():
            return None
        best = choose(measured, self._limits, modes=self._modes, bases=self._bases, max_batch=self._max_batch)
        wanted = self._towards(best.setting)
        now, then = cost_of(measured, self.setting), cost_of(measured, wanted)
        saved = then.goodput - now.goodput
        at_odds = keeps_better(*(excess_of(measured, self._limits, setting) for setting in (wanted, self.setting)))
        reason = best.reason if wanted == best.setting else f"on the way to {best.reason}"
        if wanted == self.setting:
            why = f"as before: {reason}"
        elif at_odds:
            why = f"limits would not be kept otherwise: {reason}"
        elif is_worth(then.goodput, now.goodput):
            why = f"saves {saved:.2%} of all time: {reason}"
        else:
            why = f"as before: {describe(wanted)} would save only {max(saved, 0.0):.3%} of all time"
            wanted, then = self.setting, now
        changed = wanted != self.setting
        self.setting = wanted
        missed = broken(measured, self._limits, wanted)
        return Verdict(step=step, changed=changed, decision=Decision(setting=wanted, cost=then, reason=why, broken=missed))

    def _towards(self, best: Setting) -> Setting:
        now = self.setting
        return replace(
            best,
            base_interval=_near(best.base_interval, now.base_interval),
            batch_steps=_near(best.batch_steps, now.batch_steps),
        )


def _near(wanted: int, now: int) -> int:
    return min(max(wanted, -(-now // LARGEST_CHANGE)), now * LARGEST_CHANGE)
