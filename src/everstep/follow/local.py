"""In the trainer: its shadow on the same host, started when it is not there, started again when it dies.

Ranks of one host share a process that has a shadow for each of them: whoever comes first starts it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from everstep.errors import LinkError
from everstep.follow import recover
from everstep.follow.serve import OUTPUT, SOCKET, no_payload
from everstep.follow.shadow import DISK, MEMORY
from everstep.follow.talk import NOTHING, SEND_S, Conversation, Subject, Trainer
from everstep.link import addresses
from everstep.link.messages import Ack, Resume, Welcome
from everstep.link.sockets import Channel
from everstep.store.segments import FrameEntry
from everstep.tune.averages import BaseMade

MAX_SHADOWS = 5
"""In a row that died without having folded a step."""
_START_LOCK = "start.lock"
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
        self._folded_before, self._pid_before = -1, self.pid
        """Of the shadow to which the connection was lost."""
        self._base_folded = NOTHING
        """What it had said of folding when there was a base last."""
        self._wrote = False
        """It has just ended writing one; else that base is the trainer's."""

    def set_interval(self, steps: int) -> None:
        """From now on it writes a base every so many steps. Any thread."""
        self._interval = steps
        self._messages.put(self._resume(self.subject.resume_step))
        self.wake()

    def _resume(self, step: int) -> Resume:
        interval = 0 if self.waits else self._interval  # shadows of several ranks must all write bases of the same steps
        return Resume(self.subject.generation, self.subject.timeline, step, interval)

    def _connect(self) -> Channel | None:
        """A connection to the shadow that is there, or to a new one."""
        address = f"unix://{self._folder}/{SOCKET}"
        deadline, why = time.monotonic() + _START_S, ""
        while not self._stopping and time.monotonic() < deadline:
            try:
                channel = Channel(addresses.connect(address, timeout=SEND_S), no_payload)
                try:
                    self._introduce(channel)
                    return channel
                except BaseException:
                    channel.close()
                    raise
            except (LinkError, OSError) as e:
                why = str(e)
            with self._starting() as may_start:
                if may_start and not self._start_unless_there(address, deadline):
                    return None
            time.sleep(0.02)
        if not self._stopping:
            self._is_lost(f"there is no shadow: {why}. Training goes on, and tries again and again")
        return None

    @contextlib.contextmanager
    def _starting(self) -> Iterator[bool]:
        """Whether it is for this process to see to it that there is a shadow: of several ranks one does that at a time."""
        fd = os.open(os.path.join(self._folder, _START_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
            else:
                try:
                    yield True
                finally:
                    fcntl.flock(fd, fcntl.LOCK_UN)  # a process that was forked meanwhile has this descriptor, too
        finally:
            os.close(fd)

    def _start_unless_there(self, address: str, deadline: float) -> bool:
        """Start a shadow's process and wait until it listens or is dead; False: there will be none."""
        if _listens(address):
            return True
        if self._process is None or self._process.poll() is not None:
            if self._deaths >= MAX_SHADOWS:
                self._give_up()
                return False
            time.sleep(0.2 * self._deaths)
            self._deaths += 1
            self._start()
        assert self._process is not None
        while not self._stopping and time.monotonic() < deadline and self._process.poll() is None:
            if _listens(address):
                break
            time.sleep(0.02)
        return True

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

    def _segment(self, entry: FrameEntry) -> str:
        """It finds the frame where this process has written it."""
        place = MEMORY if entry.path.startswith(self._folder) else DISK
        return f"{place}/{os.path.basename(entry.path)}"

    def _heard_progress(self, ack: Ack) -> None:
        if ack.folded >= 0:
            self._deaths = 0
        if ack.writing and not self.progress.writing:
            self.trainer.base_begins()
        self._wrote = self.progress.writing and not ack.writing
        super()._heard_progress(ack)

    def _heard_base(self, step: int) -> None:
        now, before = self.progress, self._base_folded
        if now.num_folded < before.num_folded:
            before = NOTHING  # another process
        self._base_folded = now
        made = BaseMade(
            num_bytes=now.base_bytes, write_s=now.base_us / 1e6, num_folded=now.num_folded - before.num_folded,
            fold_s=(now.fold_us - before.fold_us) / 1e6, fold_cpu_s=(now.fold_cpu_us - before.fold_cpu_us) / 1e6,
            num_cores=os.cpu_count() or 1,
        )  # fmt: skip
        self.trainer.heard_base(step, made if self._wrote else None)

    def _lost(self, e: Exception) -> None:
        """The connection is gone: is the shadow?"""
        with contextlib.suppress(Exception):
            if self._process is not None:
                self._process.wait(0.2)
        self._folded_before, self._pid_before = max(self._folded_before, self._forget_progress().folded), self.pid
        alive = recover.is_alive(self.pid)
        if not alive:
            self._it_died()
        else:
            self.trainer.say(f"the connection to the shadow was lost ({e}); connecting again")

    def _before_resume(self, channel: Channel, welcome: Welcome) -> None:
        """It may be another one than before."""
        if welcome.step < 0:
            self._it_died()
        self._folded_before = -1
        if self.trainer.base_step > self.subject.resume_step:
            self._messages.put(self._resume(self.trainer.base_step))

    def _it_died(self) -> None:
        folded, base = self._folded_before, self.trainer.base_step
        if folded > base and not self._keep_log:
            self._is_lost(
                f"the shadow (pid {self._pid_before}) died at step {folded}. Training goes on; until a new one holds the "
                f"state, a failure of this process would lead back to step {base}"
            )

    def _ended(self) -> None:
        if self._finish and not self.waits:
            self._see_it_end()
        elif self._finish and self._said_goodbye and self.pid is not None:
            recover.wait_for_end(self.pid, SEND_S)  # when the other ranks have said goodbye, too
        if self._process is not None and self._process.poll() is None:
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


def _listens(address: str) -> bool:
    """Whether a process takes connections there."""
    try:
        addresses.connect(address, timeout=SEND_S).close()
    except LinkError:
        return False
    return True
