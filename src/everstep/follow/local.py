"""In the trainer: its shadow on the same host, started when it is not there, started again when it dies."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from everstep.errors import LinkError
from everstep.follow import recover
from everstep.follow.serve import OUTPUT, SOCKET, no_payload
from everstep.follow.shadow import DISK, MEMORY
from everstep.follow.talk import SEND_S, Conversation, Subject, Trainer
from everstep.link import addresses
from everstep.link.messages import Ack, Frame
from everstep.link.sockets import Channel
from everstep.store.segments import FrameEntry

MAX_SHADOWS = 5
"""In a row that died without having folded a step."""
_START_S = 120.0
"""How long a new shadow may take to listen."""


class LocalShadow(Conversation):
    """A shadow of this host. It maps what this process has written, and is only told where."""

    def __init__(
        self, subject: Subject, trainer: Trainer, *, folder: str, interval: int, idle_s: float, keep_log: bool,
        register: Sequence[str],
    ) -> None:  # fmt: skip
        super().__init__(subject, trainer)
        self._folder = folder
        self._interval, self._idle_s, self._keep_log = interval, idle_s, keep_log
        self._register = register
        self._process: subprocess.Popen[bytes] | None = None
        self.started = 0
        self._deaths = 0
        """Of shadows in a row that never folded anything."""

    def _connect(self) -> Channel | None:
        """A connection to the shadow that is there, or to a new one."""
        address = f"unix://{self._folder}/{SOCKET}"
        deadline = time.monotonic() + _START_S
        while not self._stopping and time.monotonic() < deadline:
            with contextlib.suppress(LinkError, OSError):
                channel = Channel(addresses.connect(address, timeout=SEND_S), no_payload)
                try:
                    self._introduce(channel)
                    return channel
                except BaseException:
                    channel.close()
                    raise
            if self._process is None or self._process.poll() is not None:
                if self._deaths >= MAX_SHADOWS:
                    self._give_up()
                    return None
                time.sleep(0.2 * self._deaths)
                self._deaths += 1
                self._start()
            time.sleep(0.02)
        return None

    def _start(self) -> None:
        self.started += 1
        command = [
            sys.executable, "-m", "everstep.follow.serve", self.subject.path.path, "--folder", self._folder,
            "--interval", str(self._interval), "--idle", str(self._idle_s),
        ]  # fmt: skip
        if self._keep_log:
            command.append("--keep-log")
        for name in self._register:
            command += ["--register", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with open(os.path.join(self._folder, OUTPUT), "ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=environment
            )

    def _give_up(self) -> None:
        """Shadows die one after another."""
        self._stopping = True
        told = ""
        with contextlib.suppress(OSError), open(os.path.join(self._folder, OUTPUT), "rb") as output:
            told = output.read()[-2000:].decode(errors="replace")
        self.trainer.go_without(f"shadows die as soon as they start; going on without. The last said:\n{told}")

    def _announce(self, channel: Channel, entry: FrameEntry) -> None:
        """It finds the frame where this process has written it."""
        place = MEMORY if entry.path.startswith(self._folder) else DISK
        name = f"{place}/{os.path.basename(entry.path)}"
        channel.send(
            Frame(entry.step, name, entry.offset, entry.footer_offset, entry.end_offset, entry.step), timeout=SEND_S
        )

    def _heard_progress(self, ack: Ack) -> None:
        if ack.folded >= 0:
            self._deaths = 0
        super()._heard_progress(ack)

    def _heard_base(self, step: int) -> None:
        self.trainer.heard_base(step)

    def _lost(self, e: Exception) -> None:
        """The connection is gone: is the shadow?"""
        with contextlib.suppress(Exception):
            if self._process is not None:
                self._process.wait(0.2)
        folded = self._forget_progress().folded
        alive, base = recover.is_alive(self.pid), self.trainer.base_step
        if not alive and folded > base and not self._keep_log:
            self._is_lost(
                f"the shadow (pid {self.pid}) died at step {folded}. Training goes on; until a new one holds the state, a "
                f"failure of this process would lead back to step {base}"
            )
        elif alive:
            self.trainer.say(f"the connection to the shadow was lost ({e}); connecting again")

    def _ended(self) -> None:
        if self._finish:
            self._see_it_end()
        elif self._process is not None and self._process.poll() is None:
            self._process.returncode = 0  # it outlives this process: nobody waits for it

    def _see_it_end(self) -> None:
        """The run is closed, its last base is written: a shadow that does not end by itself is not needed."""
        process = self._process
        if self._said_goodbye and self.pid is not None and recover.wait_for_end(self.pid, SEND_S):
            process = None
        if process is not None and process.poll() is None:
            process.kill()
        if self._process is not None:
            self._process.wait()
