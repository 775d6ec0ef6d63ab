"""In the trainer: the conversation with one shadow, whatever happens to the connection. A keeper has one or several."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from everstep import background
from everstep.errors import EverstepError
from everstep.link import sockets
from everstep.link.messages import (
    VERSION,
    Ack,
    Bye,
    Close,
    Frame,
    Hello,
    Message,
    Mismatch,
    Resend,
    Resume,
    Trouble,
    Welcome,
)
from everstep.link.sockets import Channel
from everstep.store.log import OpenFrame
from everstep.store.runs import RunPath, describe_writer
from everstep.store.segments import FrameEntry
from everstep.tune.averages import BaseMade

SEND_S = 5.0
_RETRY_S = 0.1
NOTHING = Ack(-1, -1, -1, -1, -1)


@dataclass(frozen=True)
class Subject:
    """What the conversation is about."""

    path: RunPath
    run: str
    timeline: int
    generation: int
    resume_step: int


class Trainer(Protocol):
    """What a conversation asks of the process that it is held in, and tells it. Any thread."""

    @property
    def base_step(self) -> int:
        """The newest base in the run's folder."""
        ...

    @property
    def released(self) -> int:
        """Frames up to this step are not in the log any more: shadows have them, or had."""
        ...

    @property
    def newest(self) -> int:
        """The last step whose frame is complete in the log."""
        ...

    @property
    def watermark(self) -> int:
        """The greatest step that all shadows have received, those of other ranks too."""
        ...

    @property
    def num_needed(self) -> int:
        """So many shadows are needed to have a state: this one, and those that it must not be ahead of."""
        ...

    def frames(self, after: int) -> list[FrameEntry]:
        """Those of the log that follow this step, in order."""
        ...

    @property
    def open_frame(self) -> OpenFrame | None:
        """What is in the log's memory of the frame that follows all these, if something is."""
        ...

    def heard(self, conversation: Conversation) -> None:
        """Its progress has changed, or it is connected, or not any more."""
        ...

    def base_begins(self) -> None:
        """A shadow of this host has begun to write a base."""
        ...

    def heard_base(self, step: int, made: BaseMade | None) -> None:
        """There is a base in the run's folder, and what that took, if a shadow of this host has written it."""
        ...

    def heard_mismatch(self, text: str) -> None: ...

    def needs_base(self, why: str) -> None:
        """The trainer is to take one of its live state."""
        ...

    def go_without(self, why: str) -> None:
        """There will be no shadow."""
        ...

    def warn(self, text: str) -> None:
        """Tell the user, as a warning."""
        ...

    def say(self, text: str) -> None: ...


class Conversation:
    """One shadow, from this trainer's side. What differs between shadows here and elsewhere is in the subclasses."""

    send_s = SEND_S
    takes_parts = False
    """Whether it is sent what there is of a frame before the rest of it is known."""

    def __init__(self, subject: Subject, trainer: Trainer) -> None:
        self.subject = subject
        self.trainer = trainer
        self.progress = NOTHING
        """What the shadow has said last; nothing while there is no connection."""
        self.shadow_base = -1
        """The newest base that it ever said it had."""
        self.pid: int | None = None
        self.lost_at: int | None = None
        """It is gone with what only it had: since this step the trainer alone has the steps after the last base."""
        self._announced = -1
        """It has been told of frames up to this step."""
        self._told_watermark = -1
        self.waits = trainer.num_needed > 1
        """Whether the shadow folds only what others have too."""
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._channel: Channel | None = None
        self._stopping = self._finish = self._said_goodbye = False
        self._thread: threading.Thread | None = None

    # -- any thread ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = background.start(self._attend, "everstep-shadow")

    @property
    def is_connected(self) -> bool:
        return self._channel is not None

    def wake(self) -> None:
        """There is something to say."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"x")

    def base_done(self, step: int) -> None:
        """The trainer has written a base."""
        self._messages.put(self._resume(step))
        self.wake()

    def never_stored(self, last: int) -> None:
        """Steps up to this one do not exist, and the log goes on after them. A shadow of this host finds the base there."""

    def close(self, *, finish: bool) -> None:
        """Let the shadow go: with `finish` it ends, else it stays for whoever comes next."""
        self._finish, self._stopping = finish, True
        self.wake()
        if self._thread is not None:
            self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # -- its thread ---------------------------------------------------------------------------------------------------

    def _attend(self) -> None:
        while not self._stopping:
            try:
                channel = self._connect()
                if channel is None:
                    time.sleep(_RETRY_S)
                    continue
                with channel:
                    self._channel = channel
                    self._converse(channel)
            except (EverstepError, OSError) as e:
                if not self._stopping:
                    self._lost(e)
            finally:
                self._channel = None
        self._ended()

    def _introduce(self, channel: Channel, token: bytes | None = None) -> None:
        subject = self.subject
        hello = Hello(
            VERSION, subject.run, subject.path.path, subject.timeline, subject.generation, subject.path.rank, "train",
            {k: str(v) for k, v in describe_writer().items()},
        )  # fmt: skip
        welcome = sockets.introduce(channel, hello, token)
        self.pid = welcome.pid
        with contextlib.suppress(queue.Empty):
            while True:
                self._messages.get_nowait()  # where things stand is said anew
        self._announced = self._told_watermark = -1
        self._before_resume(channel, welcome)
        channel.send(self._resume(subject.resume_step), timeout=SEND_S)

    def _converse(self, channel: Channel) -> None:
        while True:
            self._say_all(channel)
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
                    self._hear(channel, received.message)

    def _say_all(self, channel: Channel) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                channel.send(self._messages.get_nowait(), timeout=SEND_S)
        for entry in self.trainer.frames(self._announced):
            if not self._has_room(entry):
                break
            self._announce(channel, entry)
            self._announced = entry.step
        if self.waits and self.trainer.watermark > self._told_watermark:
            sent = [e for e in self.trainer.frames(-1) if e.step <= self._announced]
            if sent:
                self._send_frame(channel, sent[-1])  # again, for the watermark's sake

    def _send_frame(self, channel: Channel, entry: FrameEntry) -> None:
        """The frame is complete there, and how far all shadows are."""
        self._told_watermark = self.trainer.watermark if self.waits else entry.step
        where = (entry.offset, entry.footer_offset, entry.end_offset)
        channel.send(Frame(entry.step, self._segment(entry), *where, self._told_watermark), timeout=self.send_s)

    def _hear(self, channel: Channel, message: Message) -> None:
        if isinstance(message, Ack):
            self._heard_progress(message)
        elif isinstance(message, Mismatch):
            self._heard_mismatch(message)
        elif isinstance(message, Resend):
            self._heard_resend(channel, message)
        elif isinstance(message, Trouble):
            self.trainer.say(f"shadow: {message.text}")

    def _heard_progress(self, ack: Ack) -> None:
        self.progress = ack
        if ack.base > self.shadow_base:
            self.shadow_base = ack.base
            self._heard_base(ack.base)
        if self.lost_at is not None and ack.folded >= self.lost_at:
            self.trainer.say(f"a new shadow holds step {ack.folded}: protected again")
            self.lost_at = None
        self.trainer.heard(self)

    def _is_lost(self, warning: str) -> None:
        """Something is unprotected from here on: the user is told, once."""
        if self.lost_at is None:
            self.lost_at = max(self.trainer.newest, 0)
            self.trainer.warn(warning)

    def _forget_progress(self) -> Ack:
        """Nobody is there; what it had said last."""
        last, self.progress = self.progress, NOTHING
        self.trainer.heard(self)
        return last

    def _say_goodbye(self, channel: Channel) -> None:
        with contextlib.suppress(EverstepError, OSError):
            channel.send(Close(self._finish), timeout=SEND_S)
            deadline = time.monotonic() + SEND_S
            while time.monotonic() < deadline:
                for received in channel.receive(0.5):
                    if isinstance(received.message, Bye):
                        self._said_goodbye = True
                        return

    def _resume(self, step: int) -> Resume:
        """Training goes on from this step, or there is a base of it."""
        return Resume(self.subject.generation, self.subject.timeline, step)

    # -- what differs -------------------------------------------------------------------------------------------------

    def _connect(self) -> Channel | None:
        """A connection on which both have introduced themselves; None: not yet."""
        raise NotImplementedError

    def _before_resume(self, channel: Channel, welcome: Welcome) -> None:
        """What the shadow must have before it is told where training goes on: on this host it has it."""

    def _has_room(self, entry: FrameEntry) -> bool:
        """Whether the shadow may be sent this frame now."""
        return True

    def _announce(self, channel: Channel, entry: FrameEntry) -> None:
        """Tell the shadow of a frame."""
        self._send_frame(channel, entry)

    def _segment(self, entry: FrameEntry) -> str:
        """What the shadow calls the file that a frame is in."""
        raise NotImplementedError

    def _heard_resend(self, channel: Channel, message: Resend) -> None:
        self.trainer.needs_base(f"the shadow needs {message.why}")

    def _heard_mismatch(self, message: Mismatch) -> None:
        """It holds nothing any more. The trainer takes a base."""
        self.trainer.heard_mismatch(message.text)

    def _heard_base(self, step: int) -> None:
        """The shadow has written a base, wherever it is."""

    def _lost(self, e: Exception) -> None:
        """The connection is gone."""
        raise NotImplementedError

    def _ended(self) -> None:
        """After close()."""


Make = Callable[[Subject, Trainer], Conversation]
