"""In the trainer: feeds the tuner with what bases and the steps between them cost, and keeps what it decides in the run.

All of this happens in the keeper's thread, when a base begins and when it is there. The training thread has no part in it.
In delta mode the follower folds all steps since the last base while it makes one; a shadow has folded them as they came, and
only writes.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from everstep.errors import CorruptionError
from everstep.format.documents import TuningDocument
from everstep.store.runs import RunPath
from everstep.tune.averages import Averages, BaseMade, Counters, contention_of, estimated_rate
from everstep.tune.choice import Decision, choose
from everstep.tune.model import Limits, Measured, Setting
from everstep.tune.tuner import Tuner, Verdict, is_worth

MAX_DECISIONS = 200
"""The newest that are kept."""
COPY_BYTES_S = 1e9
"""Assumed until a shadow is there to be measured: how quickly a state is read from its memory, and frames are put there."""


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What the tuner is told, and does not measure."""

    limits: Limits
    failure_rate: float | None
    """A second; None: from the run's own restarts."""
    memory_bytes: float
    segment_bytes: float
    keeps_log: bool = False
    """A shadow would keep the log on disk too."""

    def measured(self, averages: Averages, document: TuningDocument, up_s: float, setting: Setting) -> Measured:
        """`setting`: the one under which the newest averages were taken."""
        rate = self.failure_rate
        return averages.measured(
            failure_rate=estimated_rate(document.num_failures, document.up_s + up_s) if rate is None else rate,
            memory_bytes=self.memory_bytes, segment_bytes=self.segment_bytes, copy_bytes_s=COPY_BYTES_S,
            contention=contention_of(torch.get_num_threads() * num_local_ranks(), num_cores()), setting=setting,
            keeps_log=self.keeps_log,
        )  # fmt: skip


def num_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_local_ranks() -> int:
    """Of this job on this host, as torchrun says."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() else 1


class Tuned:
    """The tuner of one generation. One thread at a time."""

    def __init__(
        self, path: RunPath, generation: int, setting: Setting, ground: Ground, *, max_batch: int,
        counters: Callable[[], Counters], apply: Callable[[Setting], None], mode: Decision | None = None,
    ) -> None:  # fmt: skip
        """`setting` is where a run begins that has decided nothing yet; `apply` puts one into force; `mode` is what
        choose_mode() decided, if it was asked."""
        self._path, self._ground, self._apply = path, ground, apply
        self.counters = counters
        """Where the run's stand now. Any thread."""
        self._begun = time.monotonic()
        self._before_s = 0.0
        document = read(path)
        if document.generation and not document.closed:
            document.num_failures += 1  # nobody closed the last one
        self._document = document
        document.generation, document.closed = generation, False
        self._averages = Averages(document.averages)
        bases, last = setting.bases, last_setting(document)
        stays = mode is None or (last is not None and mode.setting.mode == last.mode)
        goes_on = last if stays or mode is None else mode.setting
        if goes_on is not None and goes_on.mode == setting.mode:
            setting = goes_on if max_batch > 1 else replace(goes_on, batch_steps=setting.batch_steps)
        apply(setting)
        self._tuner = Tuner(setting, ground.limits, modes=(setting.mode,), bases=bases, max_batch=max_batch)
        if mode is not None and not stays:
            changed = setting != last
            self._keep(Verdict(step=counters().step, changed=changed, decision=replace(mode, setting=setting)))
        self._mark: Counters | None = None
        """Since when no base is being made; None: one is, or failed, or none has been made yet."""
        self._base: Counters | None = None
        """When the base that is being made was begun."""
        self._write()

    def recovered(self, seconds: float, num_steps: int) -> None:
        """This generation began with loading a state and replaying so many steps."""
        self._averages.recovered(seconds, num_steps)

    def fetched(self, seconds: float) -> None:
        """This generation began with taking a state from a shadow of this host."""
        self._averages.fetched(seconds)

    def base_begins(self, now: Counters) -> None:
        setting = self._tuner.setting
        if self._mark is not None:
            self._averages.quiet(self._mark, now, setting.batch_steps, in_memory=setting.mode == "shadow")
        self._mark, self._base = None, now

    def base_made(self, made: BaseMade, now: Counters) -> None:
        """Learn from it, and decide."""
        if self._base is not None:
            self._averages.base(self._base, now, made)
        self._mark, self._base = now, None
        verdict = None
        if self._averages.ready():
            measured = self._ground.measured(self._averages, self._document, self._up_s(), self._tuner.setting)
            verdict = self._tuner.at_base(now.step, self._averages, measured)
        if verdict is not None:
            self._keep(verdict)
            if verdict.changed:
                self._apply(verdict.decision.setting)
        self._write()

    def close(self) -> None:
        """The run ends because it was told to."""
        self._document.closed = True
        self._write()

    def stats(self) -> dict[str, Any]:
        """For Run.stats(). Any thread."""
        document = self._document
        return {
            "setting": asdict(self._tuner.setting),
            "failures": document.num_failures,
            "averages": {name: value for name, (value, _) in self._averages.kept().items()},
            "decisions": list(document.decisions),
        }

    def _keep(self, verdict: Verdict) -> None:
        last = self._document.decisions[-1] if self._document.decisions else None
        new = {
            "generation": self._document.generation, "step": verdict.step, "changed": verdict.changed,
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **verdict.decision.as_dict(),
        }  # fmt: skip
        if last is not None and not verdict.changed and not last["changed"]:
            self._document.decisions = (*self._document.decisions[:-1], new)  # of staying as it is, the newest reason
        else:
            self._document.decisions = (*self._document.decisions, new)[-MAX_DECISIONS:]

    def _up_s(self) -> float:
        return time.monotonic() - self._begun - self._before_s

    def _write(self) -> None:
        document = self._document
        up_s = self._up_s()
        document.up_s += up_s
        self._before_s += up_s
        document.averages = self._averages.kept()
        self._path.write_tuning(document)


def read(path: RunPath) -> TuningDocument:
    """What earlier generations learned; nothing if it cannot be read: it is advice, and can be learned again."""
    try:
        return path.read_tuning()
    except CorruptionError:
        return TuningDocument()


def last_setting(document: TuningDocument) -> Setting | None:
    return Setting(**document.decisions[-1]["setting"]) if document.decisions else None


def choose_mode(path: RunPath, ground: Ground, bases: int) -> Decision | None:
    """Which mode what was measured speaks for; None while too little was."""
    document = read(path)
    averages, last = Averages(document.averages), last_setting(document)
    if not averages.ready() or last is None:
        return None
    measured = ground.measured(averages, document, 0.0, last)
    stay, best = (choose(measured, ground.limits, modes=modes, bases=bases) for modes in ((last.mode,), ("delta", "shadow")))
    worth = is_worth(best.cost.goodput, stay.cost.goodput) or len(best.broken) < len(stay.broken)
    return best if worth else stay
