"""In the trainer: keeper of a run whose bases come from its shadows; gives the log's memory back when they have it.

Nothing here is waited for by training. While there is no shadow, frames pile up in memory and then go to disk.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer

from everstep.errors import HiddenEditWarning, UnprotectedWarning
from everstep.follow.keeper import MAX_LAG, Keeper, common_base
from everstep.follow.local import LocalShadow
from everstep.follow.ship import RemoteShadow
from everstep.follow.talk import Conversation, Make, Subject
from everstep.ranks import Least, Ranks
from everstep.store import shared
from everstep.store.log import DiskPlace, LogWriter, OpenFrame
from everstep.store.retention import Retention
from everstep.store.runs import RunPath
from everstep.store.segments import FrameEntry
from everstep.tune.averages import BaseMade

ON_LAG = ("spill", "wait")
LAG_BYTES = 2 << 30
_LAG_FRAMES = 4
_STORE_S = 30.0
"""A run that closes waits so long for a shadow that makes no progress with copying the log to disk."""
_SPARE_BYTES = 256 << 20


class ShadowKeeper(Keeper):
    """Keeper of a run with a shadow on this host, or with one or several on others."""

    def __init__(
        self, path: RunPath, timeline: int, generation: int, step: int, policy: Retention, interval: int, *,
        run: str, log: LogWriter, memory: shared.MemoryPlace, disk: DiskPlace, optimizers: Mapping[str, Optimizer],
        on_lag: str, max_lag_bytes: int | None, keep_log: bool, idle_s: float, say: Callable[[str], None],
        elsewhere: Sequence[Make] = (), ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        """`elsewhere` makes the conversations with shadows on other hosts; without any, there is one here. `ranks`: this
        process is one of several, whose shadows must all have a step before one of them folds it."""
        world_size = 1 if ranks is None else ranks.size
        super().__init__(
            path, timeline, generation, step, policy, interval, follower=True, optimizers=optimizers, say=say,
            world_size=world_size,
        )  # fmt: skip
        self.num_needed = world_size * max(len(elsewhere), 1)
        self._least: Least | None = None
        """What the shadows of all ranks have received."""
        self._began = step
        self._log, self._memory, self._disk = log, memory, disk
        self._folder = os.path.dirname(memory.folder)
        self._on_lag, self._max_lag_bytes = on_lag, max_lag_bytes
        self._keep_log = keep_log and not elsewhere
        self.unfit = self._register is None
        """The shadow could not build the optimizer: then there is none, the log is on disk, and bases come from here."""
        self._last_steps: dict[str, int] = {}
        """Segment -> its last step."""
        self._entries: dict[int, FrameEntry] = {}
        """Frames that some shadow has not folded."""
        self._open_frame: OpenFrame | None = None
        """What has been written of the frame that comes next."""
        self._guard = threading.Lock()
        self._progressed = threading.Condition()
        self._released = -1
        self._needs_base = ""
        self._warnings: list[str] = []
        self._spilled = False
        self.spilled_steps = 0
        self._hurries = False
        self._frame_bytes = 0
        self._talks: list[Conversation] = []
        if ranks is not None and ranks.size > 1:
            self._least = ranks.least("received by shadows", self._heard_least, self.say)
        if self._register is None:
            log.place = disk
            self._tell_least()
            return
        subject = Subject(path, run, timeline, generation, step)
        self._talks = [make(subject, self) for make in elsewhere] or [
            LocalShadow(
                subject, self, folder=self._folder, interval=interval, idle_s=idle_s, keep_log=keep_log,
                register=self._register,
            )
        ]  # fmt: skip
        for talk in self._talks:
            talk.start()

    # -- writer thread ------------------------------------------------------------------------------------------------

    def durable(self, step: int) -> None:
        if self.unfit:
            super().durable(step)
            self._tell_least()

    def written(self, step: int) -> None:
        """A frame is complete in the log."""
        if self.unfit:
            return
        self._durable = step
        entry = self._log.last
        assert entry is not None and entry.step == step
        self._frame_bytes = entry.end_offset - entry.offset
        self._last_steps[entry.path] = step
        with self._guard:
            self._entries[step] = entry
            self._open_frame = None
        for talk in self._talks:
            talk.wake()
        self._make_room()

    def part_written(self) -> None:
        """A frame has grown in the log. A shadow elsewhere can be sent that before the rest of it is known."""
        if self.unfit or not self._log.in_memory:
            return
        with self._guard:
            self._open_frame = self._log.open_frame()
        for talk in self._talks:
            if talk.takes_parts:
                talk.wake()

    def _make_room(self) -> None:
        """Take back what the shadows have folded; if one lags too far, wait or write to disk."""
        self._release()
        limit = max(LAG_BYTES, _LAG_FRAMES * self._frame_bytes) if self._max_lag_bytes is None else self._max_lag_bytes
        lag = self._memory.num_bytes()
        scarce = self._memory_is_scarce()
        if not self._spilled and (lag > limit or scarce):
            if self._on_lag == "wait" and not scarce and self._all_are_there():
                with self._progressed:
                    while self._memory.num_bytes() > limit and self._all_are_there() and not self._must_go_on():
                        self._progressed.wait(0.1)
                        self._release()
                return
            self._spill("shared memory is nearly full" if scarce else f"the shadow is {lag / 1e6:.0f} MB behind")
        elif self._spilled:
            self.spilled_steps += 1
            if lag < limit / 2 and not scarce and self.folded >= self._durable - 4:
                self._spilled = False
                self._log.place = self._memory
                self.say(f"the shadow has caught up at step {self._durable}")

    def _spill(self, why: str) -> None:
        self._spilled = True
        self._log.place = self._disk
        self.say(f"{why}: the log goes to disk from step {self._durable + 1} on")

    def never_stored(self, first: int, last: int) -> None:
        super().never_stored(first, last)
        with self._guard:
            self._open_frame = None
        for talk in self._talks:
            talk.never_stored(last)
        if not (self.unfit or self._spilled) and self._memory_is_scarce():  # it got full faster than was looked
            self._spill("shared memory is full")

    def _all_are_there(self) -> bool:
        """Only then does waiting help: a rank whose shadow is gone gets to its next base if the others go on."""
        return self.folded >= 0 and (self._least is None or self._least.value >= 0)

    def _must_go_on(self) -> bool:
        """Whether nothing may be waited for: the run is about to close, or a shadow waits for a base itself, which is there
        only when the steps before it are stored."""
        return self._hurries or bool(self._needs_base) or self._mismatch is not None

    def _release(self) -> None:
        floor = self.folded
        for path in self._memory.release(lambda path: self._last_steps.get(path, -1) > floor):
            self._last_steps.pop(path, None)

    def _memory_is_scarce(self) -> bool:
        found = os.statvfs(self._memory.folder)
        wanted = 2 * self._frame_bytes + _SPARE_BYTES
        return found.f_bavail * found.f_frsize < wanted or shared.available_bytes() < wanted

    # -- training thread ----------------------------------------------------------------------------------------------

    def wants_base(self, step: int, durable: int, log_bytes: int) -> str:
        while self._warnings:
            warnings.warn(self._warnings.pop(0), UnprotectedWarning, stacklevel=4)
        if self.unfit:
            why, self._needs_base = self._needs_base, ""
            return why or super().wants_base(step, durable, log_bytes)
        if self._mismatch is not None:
            message, self._mismatch = self._mismatch, None
            warnings.warn(
                f"{message}. Something changed it without a trace. A new base is being taken; steps from there on are right",
                HiddenEditWarning,
                stacklevel=4,
            )
            return message
        why, self._needs_base = self._needs_base, ""
        there = min(talk.shadow_base for talk in self._talks)
        if not why and step - max(self.base_step, there, self._began) >= MAX_LAG * self._interval:
            why = "the shadow lags"  # or hangs: the log must not grow for ever
        return why

    def keep(self, interval: int, policy: Retention) -> None:
        super().keep(interval, policy)
        for talk in self._talks:
            if isinstance(talk, LocalShadow):
                talk.set_interval(interval)

    def base_done(self, step: int, log_bytes: int) -> None:
        """The trainer has written a base."""
        super().base_done(step, log_bytes)
        for talk in self._talks:
            talk.base_done(step)

    @property
    def folded(self) -> int:
        """By all shadows; -1 while one is not there."""
        return min((talk.progress.folded for talk in self._talks), default=-1)

    @property
    def unprotected_since(self) -> int | None:
        """A shadow died with what only it had: since then this process alone has the steps after the last base."""
        return min((talk.lost_at for talk in self._talks if talk.lost_at is not None), default=None)

    def stats(self) -> dict[str, Any]:
        sent = [talk.sent_bytes for talk in self._talks if isinstance(talk, RemoteShadow)]
        return {
            **super().stats(), "folded_step": self.folded, "shadow_pid": self.shadow_pid(),
            "shadows": sum(talk.started for talk in self._talks if isinstance(talk, LocalShadow)),
            "spilled_steps": self.spilled_steps, "log_memory_bytes": self._memory.num_bytes(),
            **({"sent_bytes": sum(sent)} if sent else {}),
            **({"received_step": self.watermark} if sent or self._least is not None else {}),
        }  # fmt: skip

    def shadow_pid(self) -> int | None:
        """Of the (first) shadow; None while it is not there."""
        return self._talks[0].pid if self._talks and self._talks[0].is_connected else None

    def let_go(self) -> None:
        """Training does not wait for the shadow from here on."""
        self._hurries = True
        self._wake_writer()

    def store_log(self) -> None:
        """Return when the shadow has copied the log to disk, if it is to; or stops doing it, and that is said."""
        if not self._keep_log or self.unfit:
            return
        stored, deadline = -2, 0.0
        with self._progressed:
            while stored < self._durable:
                now = min(talk.progress.durable for talk in self._talks)
                if now > stored:
                    stored, deadline = now, time.monotonic() + _STORE_S
                elif time.monotonic() > deadline:
                    self.say(
                        f"the shadow has not stored all of the log within {_STORE_S:.0f} s: of the steps after "
                        f"{max(stored, 0)} only bases are left"
                    )
                    return
                self._progressed.wait(0.1)

    def close(self, *, finish: bool = False) -> None:
        """Let the shadows go: with `finish` they end, else they stay for whoever comes next."""
        self.let_go()
        if self._least is not None:
            self._least.close()
        for talk in self._talks:
            talk.close(finish=finish)
        super().close(finish=finish)
        self._memory.close()
        if finish:
            shared.remove(self._folder, [self._path.rank])

    # -- its own thread -----------------------------------------------------------------------------------------------

    def _complete(self) -> int:
        """Frames come and go in memory: only bases tell of what all ranks have."""
        return common_base(self._path, self._timeline, self._world_size)

    def _compare_ranks(self) -> None:
        """Frames are gone before all ranks' could be laid side by side."""

    # -- conversations (a talk.Trainer): their threads ----------------------------------------------------------------

    @property
    def released(self) -> int:
        return self._released

    @property
    def newest(self) -> int:
        return self._durable

    @property
    def watermark(self) -> int:
        return self._received() if self._least is None else self._least.value

    def _received(self) -> int:
        """By all shadows of this rank; without any, what is on disk is as good."""
        return self._durable if self.unfit else min(talk.progress.received for talk in self._talks)

    def _tell_least(self) -> None:
        if self._least is not None:
            self._least.tell(self._received())

    def _heard_least(self) -> None:
        """All ranks' shadows have more, or one is gone. In a thread of its own."""
        for talk in self._talks:
            talk.wake()
        self._wake_writer()

    def frames(self, after: int) -> list[FrameEntry]:
        with self._guard:
            return [self._entries[n] for n in sorted(self._entries) if n > after]

    @property
    def open_frame(self) -> OpenFrame | None:
        with self._guard:
            return self._open_frame

    def heard(self, conversation: Conversation) -> None:
        folded, proven = self.folded, min(talk.progress.proven for talk in self._talks)
        with self._guard:
            for step in [n for n in self._entries if n <= folded]:
                del self._entries[step]
                self._released = max(self._released, step)
        if proven >= 0:
            self.proven_step = proven
        self._tell_least()
        for talk in self._talks:
            if talk is not conversation:
                talk.wake()  # what all have received may be more now
        self._wake_writer()

    def base_begins(self) -> None:
        if self.tuned is not None:
            self._todo.put(partial(self.tuned.base_begins, self.tuned.counters()))

    def heard_base(self, step: int, made: BaseMade | None) -> None:
        self._follower_bases += 1
        self.base_step = max(self.base_step, step)
        self._todo.put("retain")
        if self.tuned is not None and made is not None:
            self._todo.put(partial(self.tuned.base_made, made, self.tuned.counters()))

    def heard_mismatch(self, text: str) -> None:
        self._mismatch = text
        self._wake_writer()

    def needs_base(self, why: str) -> None:
        self._needs_base = why
        self._wake_writer()

    def _wake_writer(self) -> None:
        with self._progressed:
            self._progressed.notify_all()

    def go_without(self, why: str) -> None:
        """The log goes to disk, and bases come from the trainer, as without a shadow."""
        self.unfit = True
        self._register = None
        self._log.place = self._disk
        self._tell_least()
        self.warn(why)
        self._needs_base = "there is no shadow"

    def warn(self, text: str) -> None:
        self._warnings.append(f"{self._path.path}: {text}")

    def say(self, text: str) -> None:
        self._say(f"everstep: {self._path.path}: {text}")
