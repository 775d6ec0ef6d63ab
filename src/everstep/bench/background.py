"""What Everstep does beside training, in its follower and its threads, and how it is kept out of blocks without Everstep."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

from everstep.bench import machine
from everstep.follow.attend import ShadowKeeper
from everstep.run import Run

IDLE_S = 0.01
"""Threads that took no processor time for so long have nothing to do."""
MOST_S = 5.0
"""After so long a benchmark no longer waits for them."""


class Follower:
    """The run's follower process or shadow, if it has one: it runs only while blocks with Everstep do."""

    def __init__(self, run: Run) -> None:
        self._keeper: Any = run._keeper

    @property
    def pid(self) -> int | None:
        if isinstance(self._keeper, ShadowKeeper):
            return self._keeper.shadow_pid()
        process = getattr(self._keeper, "_process", None)
        return None if process is None or process.poll() is not None else int(process.pid)

    def _signal(self, number: int) -> None:
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def cpu_s(self) -> float:
        pid = self.pid
        return 0.0 if pid is None else machine.process_cpu_s(pid)


def threads_cpu_s() -> dict[str, float]:
    """Processor time of Everstep's threads in this process so far, by name."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.name.startswith("everstep-") and thread.native_id is not None:
            found[thread.name] = found.get(thread.name, 0.0) + machine.thread_cpu_s(thread.native_id)
    return found


def until_idle() -> None:
    """Return when Everstep's threads in this process have nothing to do: a base copied from a pool goes on after flush()."""
    deadline = time.monotonic() + MOST_S
    before = sum(threads_cpu_s().values())
    while time.monotonic() < deadline:
        time.sleep(IDLE_S)
        now = sum(threads_cpu_s().values())
        if now - before < IDLE_S / 10:
            return
        before = now
