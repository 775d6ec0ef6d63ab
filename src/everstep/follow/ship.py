"""In the trainer: a shadow on another host, and the log on its way there."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Iterator

from everstep.errors import LinkError, StorageError
from everstep.follow.shadow import MEMORY
from everstep.follow.talk import Conversation, Subject, Trainer
from everstep.link import addresses
from everstep.link.messages import Bytes, Document, Frame, Resend, Resume, Welcome
from everstep.link.sockets import Channel
from everstep.store import files, shared
from everstep.store.segments import FrameEntry

_PART_BYTES = 4 << 20
_SEND_S = 30.0
TELL_AFTER_S = 2.0
"""Without a connection for so long, the user is told."""


class RemoteShadow(Conversation):
    """A shadow on another host: this host's memory holds the log until it has arrived there."""

    def __init__(
        self, subject: Subject, trainer: Trainer, *, address: str, token: bytes | None, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(subject, trainer)
        self._address = addresses.parse_address(address)
        self._token, self._tls = token, tls
        self._sent: tuple[str, int] = ("", 0)
        """Segment and offset up to which the shadow has the log."""
        self._layouts_at = 0
        self._base_sent = -1
        """The base that the shadow was sent last: if it asks again, that one was of no use to it."""
        self._wants_base = False
        """It has nothing to go on from, and waits for a base that the trainer is yet to take."""
        self._failing_since: float | None = None
        self.sent_bytes = 0

    def _connect(self) -> Channel | None:
        try:
            sock = addresses.connect(self._address, timeout=_SEND_S, ssl_context=self._tls)
            channel = Channel(sock, lambda message, num_bytes: None)
            try:
                self._introduce(channel, self._token)
            except BaseException:
                channel.close()
                raise
        except (LinkError, OSError) as e:
            self._failed_to_connect(e)
            return None
        self._failing_since = None
        return channel

    def _failed_to_connect(self, e: Exception) -> None:
        """Nobody is there, or it says no: the user is told, once, if that lasts."""
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        elif time.monotonic() - self._failing_since > TELL_AFTER_S:
            self._is_lost(
                f"{e}. Training goes on, and tries again and again; until it is there, steps are in this host's memory (and "
                "on its disk, when that is full) only"
            )

    def _before_resume(self, channel: Channel, welcome: Welcome) -> None:
        self._sent = (welcome.segment, welcome.offset)
        self._wants_base = False
        for name in self._documents():
            self._send_document(channel, name)

    def _documents(self) -> Iterator[str]:
        """The run's small files, in an order in which they make sense."""
        path = self.subject.path
        yield "run.json"
        for timeline in files.listing(path.timelines()):
            top = f"timelines/{timeline}"
            yield f"{top}/timeline.json"
            for kind in ("layouts", "generations"):
                for name in files.listing(os.path.join(path.path, top, kind)):
                    if name.endswith(".json"):
                        yield f"{top}/{kind}/{name}"
        self._layouts_at = self._layouts_time()

    def _layouts_time(self) -> int:
        return os.stat(self.subject.path.layouts(self.subject.timeline)).st_mtime_ns

    def _send_document(self, channel: Channel, name: str) -> None:
        data = files.read_whole(os.path.join(self.subject.path.path, name))
        channel.send(Document(name), memoryview(data), timeout=_SEND_S)

    def base_done(self, step: int) -> None:
        """Of no concern to a shadow that has no need of it."""
        self.wake()

    def _say_all(self, channel: Channel) -> None:
        if not self._wants_base or self._give_base(channel):
            super()._say_all(channel)

    def _announce(self, channel: Channel, entry: FrameEntry) -> None:
        if self._layouts_time() != self._layouts_at:
            for name in self._documents():
                self._send_document(channel, name)
        segment = f"{MEMORY}/{os.path.basename(entry.path)}"
        at = self._sent[1] if self._sent[0] == segment else 0
        if at < entry.end_offset:
            reader = shared.MappedReader(entry.path)
            for start in range(at, entry.end_offset, _PART_BYTES):
                size = min(_PART_BYTES, entry.end_offset - start)
                part = memoryview(reader.view(start, size))
                channel.send(Bytes(segment, start), part, timeout=_SEND_S)
                self.sent_bytes += size
            self._sent = (segment, entry.end_offset)
        channel.send(
            Frame(entry.step, segment, entry.offset, entry.footer_offset, entry.end_offset, entry.step), timeout=_SEND_S
        )

    def _heard_resend(self, channel: Channel, message: Resend) -> None:
        if message.segment != "base":
            self.trainer.say(f"the shadow asks for step data again: {message.why}")
            self._sent = (message.segment, message.offset)
            self._announced = -1
            for entry in self.trainer.frames(-1):
                if os.path.basename(entry.path) != os.path.basename(message.segment) or entry.end_offset > message.offset:
                    break
                self._announced = entry.step
            return
        base = self.trainer.base_step
        if self.trainer.released > base:
            self._is_lost(
                f"the shadow at {self._address} has lost what it held. Training goes on; until it has a new base, a failure "
                f"of this process would lead back to step {base}"
            )
        self._wants_base = True
        if not self._give_base(channel):
            super()._heard_resend(channel, message)

    def _give_base(self, channel: Channel) -> bool:
        """Send the base that the shadow waits for, if there is one from which the log leads on."""
        base = self.trainer.base_step
        if base < self.trainer.released or base == self._base_sent:
            return False
        self._base_sent = base
        try:
            self._send_base(channel, base)
        except (FileNotFoundError, StorageError):
            return False
        self._wants_base = False
        return True

    def _lost(self, e: Exception) -> None:
        """What has not arrived stays here, in memory or on disk, until the connection is back."""
        self.trainer.say(f"the connection to the shadow at {self._address} was lost ({e})")
        self._forget_progress()

    def _send_base(self, channel: Channel, step: int) -> None:
        """A base of this host, the manifest last."""
        subject = self.subject
        folder = os.path.join(subject.path.bases(subject.timeline), f"{step:012d}")
        names = [n for n in files.listing(folder) if n != "manifest.json"]
        if not names:
            raise FileNotFoundError(folder)
        prefix = f"base/{subject.timeline:04d}/{step:012d}"
        for name in (*names, "manifest.json"):
            with files.Reader(os.path.join(folder, name)) as reader:
                for start in range(0, reader.num_bytes, _PART_BYTES):
                    channel.send(Bytes(f"{prefix}/{name}", start), reader.read(start, _PART_BYTES), timeout=_SEND_S)
        channel.send(Resume(subject.generation, subject.timeline, step), timeout=_SEND_S)
