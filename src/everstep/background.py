"""Threads and processes that must not get in the way of training."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

_NICE = 10


def start(work: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread that gives way to the training thread where both want the same core.

    Without that, a machine with few cores runs it on the core of the training thread as often as not, although another
    core would be free a few milliseconds later.
    """

    def run() -> None:
        give_way()
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def give_way() -> None:
    """This thread never preempts another when it wakes up, and weighs less than it. Does nothing where it cannot."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def only_when_idle() -> None:
    """This process runs when nothing else wants the core; and a core that runs it counts as free for others."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(19)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
