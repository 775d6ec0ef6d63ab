"""In the trainer: starts its shadow, tells it of every frame, hears how far it is, and starts another if it dies.

Nothing here is waited for by training. While there is no shadow, frames pile up in memory and then go to disk.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.optim import Optimizer

from everstep import background
from everstep.errors import EverstepError, HiddenEditWarning, LinkError, UnprotectedWarning
from everstep.follow import recover
from everstep.follow.keeper import MAX_LAG, Keeper
from everstep.follow.serve import OUTPUT, SOCKET, no_payload
from everstep.follow.shadow import DISK, MEMORY
from everstep.link import addresses, sockets
from everstep.link.messages import Ack, Bye, Close, Frame, Hello, Message, Mismatch, Resend, Resume, Trouble, Welcome
from everstep.link.sockets import Channel
from everstep.store import shared
from everstep.store.log import DiskPlace, LogWriter
from everstep.store.retention import Retention
from everstep.store.runs import RunPath, describe_writer
from everstep.store.segments import FrameEntry

ON_LAG = ("spill", "wait")
LAG_BYTES = 2 << 30
_LAG_FRAMES = 4
_SPARE_BYTES = 256 << 20
MAX_SHADOWS = 5
"""In a row that died without having folded a step."""
_START_S = 120.0
"""How long a new shadow may take to listen."""
_SEND_S = 5.0
_RETRY_S = 1.0


class Part(NamedTuple):
    """A segment has been written up to here, in the middle of a frame."""

    path: str
    end_offset: int


class ShadowKeeper(Keeper):
    """Keeper of a run whose bases come from its shadow."""

    def __init__(
        self, path: RunPath, timeline: int, generation: int, step: int, policy: Retention, interval: int, *,
        run: str, log: LogWriter, memory: shared.MemoryPlace, disk: DiskPlace, optimizers: Mapping[str, Optimizer],
        on_lag: str, max_lag_bytes: int | None, keep_log: bool, idle_s: float, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__(path, timeline, generation, step, policy, interval, follower=True, optimizers=optimizers, say=say)
        self._run_id = run
        self._log, self._memory, self._disk = log, memory, disk
        self._folder = os.path.dirname(memory.folder)
        self._on_lag, self._max_lag_bytes = on_lag, max_lag_bytes
        self._keep_log = keep_log
        self._idle_s = idle_s
        self._resume_step = step
        self.unfit = self._register is None
        """The shadow could not build the optimizer: then there is none, the log is on disk, and bases come from here."""
        self._last_steps: dict[str, int] = {}
        """Segment -> its last step."""
        self._entries: dict[int, FrameEntry] = {}
        """Frames that the shadow has not folded."""
        self._guard = threading.Lock()
        self._to_send: queue.SimpleQueue[Message | FrameEntry | Part] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._channel: Channel | None = None
        self._shadow: subprocess.Popen[bytes] | None = None
        self._progressed = threading.Condition()
        self.folded = -1
        """By the shadow that lives; -1 while there is none."""
        self._released = -1
        """Frames up to this step are not here any more: a shadow has them, or had."""
        self._shadow_base = -1
        self._shadows = 0
        self._deaths = 0
        """Of shadows in a row that never folded anything."""
        self._lost_at: int | None = None
        self._needs_base = ""
        self._warning = ""
        self._spilled = False
        self.spilled_steps = 0
        self._stopping = self._hurries = False
        self._frame_bytes = 0
        self._attendant: threading.Thread | None = None
        if self.unfit:
            log.place = disk
            return
        self._attendant = background.start(self._attend, "everstep-shadow")

    # -- writer thread ------------------------------------------------------------------------------------------------

    def durable(self, step: int) -> None:
        if self.unfit:
            super().durable(step)

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
        self._to_send.put(entry)
        self._wake()
        self._make_room()

    def _make_room(self) -> None:
        """Take back what the shadow has folded; if it lags too far, wait or write to disk."""
        self._release()
        limit = max(LAG_BYTES, _LAG_FRAMES * self._frame_bytes) if self._max_lag_bytes is None else self._max_lag_bytes
        lag = self._memory.num_bytes()
        scarce = self._memory_is_scarce()
        if not self._spilled and (lag > limit or scarce):
            if self._on_lag == "wait" and not scarce and self.folded >= 0:
                with self._progressed:
                    while self._memory.num_bytes() > limit and self.folded >= 0 and not self._hurries:
                        self._progressed.wait(0.1)
                        self._release()
                return
            self._spilled = True
            self._log.place = self._disk
            why = "shared memory is nearly full" if scarce else f"the shadow is {lag / 1e6:.0f} MB behind"
            self._say(f"everstep: {self._path.path}: {why}: the log goes to disk from step {self._durable + 1} on")
        elif self._spilled:
            self.spilled_steps += 1
            if lag < limit / 2 and not scarce and self.folded >= self._durable - 4:
                self._spilled = False
                self._log.place = self._memory
                self._say(f"everstep: {self._path.path}: the shadow has caught up at step {self._durable}")

    def _release(self) -> None:
        floor = self.folded
        for path in self._memory.release(lambda path: self._last_steps.get(path, -1) > floor):
            self._last_steps.pop(path, None)

    def _memory_is_scarce(self) -> bool:
        found = os.statvfs(self._memory.folder)
        wanted = 2 * self._frame_bytes + _SPARE_BYTES
        return found.f_bavail * found.f_frsize < wanted or _available_bytes() < wanted

    # -- training thread ----------------------------------------------------------------------------------------------

    def wants_base(self, step: int, durable: int, log_bytes: int) -> str:
        if self._warning:
            warning, self._warning = self._warning, ""
            warnings.warn(warning, UnprotectedWarning, stacklevel=4)
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
        if not why and step - max(self.base_step, self._shadow_base, 0) >= MAX_LAG * self._interval:
            why = "the shadow lags"  # or hangs: the log must not grow for ever
        return why

    def base_done(self, step: int, log_bytes: int) -> None:
        """The trainer has written a base."""
        super().base_done(step, log_bytes)
        if not self.unfit:
            self._to_send.put(Resume(self._generation, self._timeline, step))
            self._wake()

    @property
    def unprotected_since(self) -> int | None:
        """The shadow died with what only it had: since then this process alone has the steps after the last base."""
        return self._lost_at

    def stats(self) -> dict[str, Any]:
        return {
            **super().stats(), "folded_step": self.folded, "shadows": self._shadows, "shadow_pid": self.shadow_pid(),
            "spilled_steps": self.spilled_steps, "log_memory_bytes": self._memory.num_bytes(),
        }  # fmt: skip

    def shadow_pid(self) -> int | None:
        return self._pid if self._channel is not None else None

    def let_go(self) -> None:
        """Nothing waits for the shadow from here on."""
        self._hurries = True
        with self._progressed:
            self._progressed.notify_all()

    def close(self, *, finish: bool = False) -> None:
        """Let the shadow go: with `finish` it ends, else it stays for whoever comes next."""
        self._finish = finish
        self._stopping = True
        self.let_go()
        if self._attendant is not None:
            self._wake()
            self._attendant.join()
        super().close()
        self._memory.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        if finish:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- its thread ---------------------------------------------------------------------------------------------------

    _pid: int | None = None
    _finish = False
    _said_goodbye = False

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"x")

    def _attend(self) -> None:
        while not self._stopping:
            try:
                channel = self._connect()
                if channel is None:
                    time.sleep(_RETRY_S / 10)
                    continue
                with channel:
                    self._channel = channel
                    self._converse(channel)
            except (LinkError, OSError) as e:
                if not self._stopping:
                    self._lost(e)
            finally:
                self._channel = None
        if self._finish:
            self._see_it_end()
        elif self._shadow is not None and self._shadow.poll() is None:
            self._shadow.returncode = 0  # it outlives this process: nobody waits for it

    def _see_it_end(self) -> None:
        """The run is closed, its last base is written: a shadow that does not end by itself is not needed."""
        process = self._shadow
        if self._said_goodbye and self._pid is not None and recover.wait_for_end(self._pid, _SEND_S):
            process = None
        if process is not None and process.poll() is None:
            process.kill()
        if self._shadow is not None:
            self._shadow.wait()

    def _connect(self) -> Channel | None:
        """A connection to the shadow that is there, or to a new one; None: not yet."""
        address = f"unix://{self._folder}/{SOCKET}"
        deadline = time.monotonic() + _START_S
        while not self._stopping and time.monotonic() < deadline:
            with contextlib.suppress(LinkError, OSError):
                channel = Channel(addresses.connect(address, timeout=_SEND_S), no_payload)
                try:
                    return self._introduce(channel)
                except BaseException:
                    channel.close()
                    raise
            if self._shadow is None or self._shadow.poll() is not None:
                if self._deaths >= MAX_SHADOWS:
                    self._give_up()
                    return None
                time.sleep(0.2 * self._deaths)
                self._deaths += 1
                self._start()
            time.sleep(0.02)
        return None

    def _give_up(self) -> None:
        """Shadows die one after another: the log goes to disk, and bases come from the trainer, as without one."""
        self.unfit = self._stopping = True
        self._register = None
        self._log.place = self._disk
        with contextlib.suppress(OSError), open(os.path.join(self._folder, OUTPUT), "rb") as output:
            told = output.read()[-2000:].decode(errors="replace")
            self._warning = f"{self._path.path}: shadows die as soon as they start; going on without. The last said:\n{told}"
        self._needs_base = "there is no shadow"

    def _introduce(self, channel: Channel) -> Channel:
        welcome = sockets.introduce(channel, self._hello(), self._token)
        self._pid = welcome.pid
        self._before_resume(channel, welcome)
        with contextlib.suppress(queue.Empty):
            while True:
                self._to_send.get_nowait()  # all is said anew
        channel.send(Resume(self._generation, self._timeline, self._resume_step), timeout=_SEND_S)
        with self._guard:
            entries = [self._entries[n] for n in sorted(self._entries)]
        for entry in entries:
            self._announce(channel, entry)
        return channel

    def _announce(self, channel: Channel, entry: FrameEntry) -> None:
        """Tell the shadow of a frame; it finds it where this process has written it."""
        place = MEMORY if entry.path.startswith(self._folder) else DISK
        name = f"{place}/{os.path.basename(entry.path)}"
        channel.send(
            Frame(entry.step, name, entry.offset, entry.footer_offset, entry.end_offset, entry.step), timeout=_SEND_S
        )

    def _ship(self, channel: Channel, path: str, end_offset: int) -> None:
        """Bring the shadow's log up to here: on this host it has the same."""

    _token: bytes | None = None

    def _hello(self) -> Hello:
        return Hello(
            1, self._run_id, self._path.path, self._timeline, self._generation, 0, "train",
            {k: str(v) for k, v in describe_writer().items()},
        )  # fmt: skip

    def _before_resume(self, channel: Channel, welcome: Welcome) -> None:
        """What the shadow must have before it is told where training goes on: on this host it has it."""

    def _start(self) -> None:
        self._shadows += 1
        command = [
            sys.executable, "-m", "everstep.follow.serve", self._path.path, "--folder", self._folder,
            "--interval", str(self._interval), "--idle", str(self._idle_s),
        ]  # fmt: skip
        if self._keep_log:
            command.append("--keep-log")
        for name in self._register or ():
            command += ["--register", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with open(os.path.join(self._folder, OUTPUT), "ab") as output:
            self._shadow = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=environment
            )

    def _converse(self, channel: Channel) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    item = self._to_send.get_nowait()
                    if isinstance(item, FrameEntry):
                        self._announce(channel, item)
                    elif isinstance(item, Part):
                        self._ship(channel, item.path, item.end_offset)
                    else:
                        channel.send(item, timeout=_SEND_S)
            if self._stopping:
                self._say_goodbye(channel)
                return
            poll = select.poll()
            poll.register(channel.fileno(), select.POLLIN)
            poll.register(self._wake_read, select.POLLIN)
            ready = dict(poll.poll(0 if channel.has_pending() else 1000))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            if channel.has_pending() or channel.fileno() in ready:
                for received in channel.receive(0):
                    self._hear(received.message)

    def _hear(self, message: Message) -> None:
        if isinstance(message, Ack):
            self._heard_progress(message)
        elif isinstance(message, Mismatch):
            self._mismatch = message.text
        elif isinstance(message, Resend):
            self._heard_resend(message)
        elif isinstance(message, Trouble):
            self._say(f"everstep: {self._path.path}: shadow: {message.text}")

    def _heard_resend(self, message: Resend) -> None:
        self._needs_base = f"the shadow needs {message.why}"

    def _heard_progress(self, ack: Ack) -> None:
        self.folded = ack.folded
        if ack.folded >= 0:
            self._deaths = 0
        with self._guard:
            for step in [n for n in self._entries if n <= ack.folded]:
                del self._entries[step]
                self._released = max(self._released, step)
        if ack.proven >= 0:
            self.proven_step = ack.proven
        if ack.base > self._shadow_base:
            self._follower_bases += 1
            self._shadow_base = ack.base
            self._heard_base(ack.base)
        if self._lost_at is not None and ack.folded >= self._lost_at:
            self._say(f"everstep: {self._path.path}: a new shadow holds step {ack.folded}: protected again")
            self._lost_at = None
        with self._progressed:
            self._progressed.notify_all()

    def _heard_base(self, step: int) -> None:
        """The shadow has written a base into the run's folder."""
        self.base_step = max(self.base_step, step)
        self._todo.put("retain")

    def _lost(self, e: Exception) -> None:
        """The connection is gone: is the shadow?"""
        with contextlib.suppress(Exception):
            if self._shadow is not None:
                self._shadow.wait(0.2)
        folded, self.folded = self.folded, -1
        with self._progressed:
            self._progressed.notify_all()
        alive = recover.is_alive(self._pid)
        if not alive and folded > self.base_step and not self._keep_log and self._lost_at is None:
            self._lost_at = self._durable
            self._warning = (
                f"{self._path.path}: the shadow (pid {self._pid}) died at step {folded}. Training goes on; until a new one "
                f"holds the state, a failure of this process would lead back to step {self.base_step}"
            )
        elif alive:
            self._say(f"everstep: {self._path.path}: the connection to the shadow was lost ({e}); connecting again")

    def _say_goodbye(self, channel: Channel) -> None:
        with contextlib.suppress(EverstepError, OSError):
            channel.send(Close(self._finish), timeout=_SEND_S)
            deadline = time.monotonic() + _SEND_S
            while time.monotonic() < deadline:
                for received in channel.receive(0.5):
                    if isinstance(received.message, Bye):
                        self._said_goodbye = True
                        return


def _available_bytes() -> int:
    """Memory that can be had without swapping."""
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 1 << 62
