"""A shadow of this host in the test's own process, where faults (files.observe) and patches reach it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from remote_shadows import Training

import everstep
from everstep.errors import StorageError, UnprotectedWarning
from everstep.follow.arena import AtHand
from everstep.follow.local import LocalShadow
from everstep.follow.serve import SOCKET, LocalHost
from everstep.follow.shadow import Shadow
from everstep.link import addresses
from everstep.store.log import LogWriter
from everstep.store.runs import RunPath


class _Process:
    """What a LocalShadow knows of the shadow's process: it is this one."""

    pid = os.getpid()
    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None: ...


class Near:
    """Starts shadows in this process, as LocalShadow would start them in another."""

    def __init__(self) -> None:
        self.shadows: list[Shadow] = []
        self.said: list[str] = []
        self._hosts: list[tuple[LocalHost, socket.socket]] = []

    @property
    def shadow(self) -> Shadow:
        return self.shadows[-1]

    def start(self, talk: LocalShadow) -> None:
        path, folder = talk.subject.path.path, talk._folder

        def make(rank: int) -> Shadow:
            made = Shadow(
                RunPath(path, rank), folder, run=talk.subject.run, base_interval=talk._interval, keep_log=talk._keep_log,
                idle_s=talk._idle_s, say=self.said.append, at_hand=AtHand(),
            )  # fmt: skip
            self.shadows.append(made)
            return made

        host = LocalHost(talk.subject.run, make)
        listener = addresses.listen(addresses.parse_address(f"unix://{folder}/{SOCKET}"))
        threading.Thread(target=host.accept, args=(listener,), daemon=True).start()
        talk._process = _Process()  # type: ignore[assignment]
        talk.started += 1
        self._hosts.append((host, listener))

    def close(self) -> None:
        for host, listener in self._hosts:
            host.end()
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            for _, _, thread in host._shadows.values():
                thread.join(30)


class NearTraining(Training):
    """With a shadow of this host."""

    def attach_near(self, path: Path, **options: Any) -> everstep.Run:
        settings = {"mode": "shadow", "quiet": True, "base_interval": 1000, "shadow_idle_s": 100.0, **options}
        return everstep.attach(self.model, self.optimizer, path, **settings)


class Fault:
    """Fails operations on matching paths while it is armed (see files.observe)."""

    def __init__(self, ops: tuple[str, ...], what: Callable[[str], bool], code: int = errno.ENOSPC) -> None:
        self.ops, self.what, self.code = ops, what, code
        self.armed = False
        self.hits: list[tuple[str, str]] = []

    def __call__(self, op: str, path: str) -> None:
        if self.armed and op in self.ops and self.what(path):
            self.hits.append((op, path))
            raise OSError(self.code, os.strerror(self.code))


def wait_for(true: Callable[[], Any], what: str = "", seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited in vain {what}"
        time.sleep(0.005)


class FullLog:
    """While `now`, nothing can be written to a run's log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = False
        begin = LogWriter.begin

        def full(log: LogWriter, *args: Any) -> None:
            if self.now:
                raise StorageError("shared memory is full")
            begin(log, *args)

        monkeypatch.setattr(LogWriter, "begin", full)

    def lose_steps(self, training: Training, run: everstep.Run) -> None:
        """Train on while nothing can be stored, and until that is over."""
        with pytest.warns(UnprotectedWarning, match="UNPROTECTED"):
            self.now = True
            while run._unprotected_since is None:
                training.train(run, run.step + 1)
                time.sleep(0.01)
            training.train(run, run.step + 3)
            self.now = False
            deadline = time.monotonic() + 30
            while run._unprotected_since is not None:
                assert time.monotonic() < deadline, run.stats()
                training.train(run, run.step + 1)
                time.sleep(0.02)
