"""In the trainer: the log on its way to a shadow on another host."""

from __future__ import annotations

import contextlib
import os
import ssl
import time
from collections.abc import Iterator
from typing import Any

from everstep.errors import LinkError, StorageError
from everstep.follow.attend import Part, ShadowKeeper
from everstep.follow.shadow import MEMORY
from everstep.link import addresses
from everstep.link.messages import Bytes, Document, Frame, Resend, Resume, Welcome
from everstep.link.sockets import Channel
from everstep.store import files, shared
from everstep.store.segments import FrameEntry

_PART_BYTES = 4 << 20
_SEND_S = 30.0
TELL_AFTER_S = 2.0
"""Without a connection for so long, the user is told."""


class RemoteKeeper(ShadowKeeper):
    """Keeper of a run whose shadow is on another host: this host's memory holds the log until it has arrived there."""

    def __init__(self, *args: Any, address: str, token: bytes | None, tls: ssl.SSLContext | None, **named: Any) -> None:
        self._address = addresses.parse_address(address)
        self._token, self._tls = token, tls
        self._sent: tuple[str, int] = ("", 0)
        """Segment and offset up to which the shadow has the log."""
        self._layouts_at = 0
        self._base_sent = -1
        """The base that the shadow was sent last: if it asks again, that one was of no use to it."""
        self._failing_since: float | None = None
        self.sent_bytes = 0
        super().__init__(*args, **named)

    def _connect(self) -> Channel | None:
        try:
            sock = addresses.connect(self._address, timeout=_SEND_S, ssl_context=self._tls)
            channel = Channel(sock, lambda message, num_bytes: None)
            try:
                found = self._introduce(channel)
            except BaseException:
                channel.close()
                raise
        except (LinkError, OSError) as e:
            self._failed_to_connect(e)
            return None
        self._failing_since = None
        return found

    def _failed_to_connect(self, e: Exception) -> None:
        """Nobody is there, or it says no: the user is told, once, if that lasts."""
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        elif self._lost_at is None and time.monotonic() - self._failing_since > TELL_AFTER_S:
            self._lost_at = max(self._durable, 0)
            self._warning = (
                f"{self._path.path}: {e}. Training goes on, and tries again and again; until it is there, steps are in this "
                "host's memory (and on its disk, when that is full) only"
            )

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "sent_bytes": self.sent_bytes}

    def _before_resume(self, channel: Channel, welcome: Welcome) -> None:
        self._sent = (welcome.segment, welcome.offset)
        for name in self._documents():
            self._send_document(channel, name)

    def _documents(self) -> Iterator[str]:
        """The run's small files, in an order in which they make sense."""
        yield "run.json"
        for timeline in files.listing(self._path.timelines()):
            top = f"timelines/{timeline}"
            yield f"{top}/timeline.json"
            for kind in ("layouts", "generations"):
                for name in files.listing(os.path.join(self._path.path, top, kind)):
                    if name.endswith(".json"):
                        yield f"{top}/{kind}/{name}"
        self._layouts_at = self._layouts_time()

    def _layouts_time(self) -> int:
        return os.stat(self._path.layouts(self._timeline)).st_mtime_ns

    def _send_document(self, channel: Channel, name: str) -> None:
        data = files.read_whole(os.path.join(self._path.path, name))
        channel.send(Document(name), memoryview(data), timeout=_SEND_S)

    def _announce(self, channel: Channel, entry: FrameEntry) -> None:
        if self._layouts_time() != self._layouts_at:
            for name in self._documents():
                self._send_document(channel, name)
        self._ship(channel, entry.path, entry.end_offset)
        channel.send(
            Frame(
                entry.step, self._name(entry.path), entry.offset, entry.footer_offset, entry.end_offset, entry.step
            ),
            timeout=_SEND_S,
        )  # fmt: skip

    def _name(self, path: str) -> str:
        return f"{MEMORY}/{os.path.basename(path)}"

    def _ship(self, channel: Channel, path: str, end_offset: int) -> None:
        segment = self._name(path)
        at = self._sent[1] if self._sent[0] == segment else 0
        if at >= end_offset:
            return
        reader = shared.MappedReader(path)
        for start in range(at, end_offset, _PART_BYTES):
            size = min(_PART_BYTES, end_offset - start)
            part = memoryview(reader.view(start, size))
            channel.send(Bytes(segment, start), part, timeout=_SEND_S)
            self.sent_bytes += size
        self._sent = (segment, end_offset)

    def part_written(self) -> None:
        """In the writer thread: what has been written of a frame goes on its way before the rest of it is known."""
        path, end_offset = self._log.position()
        if self._log.in_memory and not self.unfit:
            self._to_send.put(Part(path, end_offset))
            self._wake()

    def _heard_resend(self, message: Resend) -> None:
        channel = self._channel
        if channel is None:
            return
        if message.segment != "base":
            self._say(f"everstep: {self._path.path}: the shadow asks for step data again: {message.why}")
            self._sent = (message.segment, message.offset)
            with self._guard:
                entries = [self._entries[n] for n in sorted(self._entries)]
            for entry in entries:
                same = os.path.basename(entry.path) == os.path.basename(message.segment)
                if not same or entry.end_offset > message.offset:
                    self._announce(channel, entry)
            return
        base = self.base_step
        if self._released > base and self._lost_at is None:
            self._lost_at = self._durable
            self._warning = (
                f"{self._path.path}: the shadow at {self._address} has lost what it held. Training goes on; until it has a "
                f"new base, a failure of this process would lead back to step {base}"
            )
        if base >= self._released and base != self._base_sent:
            self._base_sent = base
            with contextlib.suppress(FileNotFoundError, StorageError):
                self._send_base(channel, base)
                return
        super()._heard_resend(message)

    def _see_it_end(self) -> None:
        """It ends by itself, on its own host."""

    def _heard_base(self, step: int) -> None:
        """The shadow has written a base, on its own host."""

    def _lost(self, e: Exception) -> None:
        """The connection is gone. What has not arrived stays here, in memory or on disk, until it is back."""
        self._say(f"everstep: {self._path.path}: the connection to the shadow at {self._address} was lost ({e})")
        self.folded = -1
        with self._progressed:
            self._progressed.notify_all()

    def _send_base(self, channel: Channel, step: int) -> None:
        """A base of this host, the manifest last."""
        folder = os.path.join(self._path.bases(self._timeline), f"{step:012d}")
        names = [n for n in files.listing(folder) if n != "manifest.json"]
        if not names:
            raise FileNotFoundError(folder)
        prefix = f"base/{self._timeline:04d}/{step:012d}"
        for name in (*names, "manifest.json"):
            with files.Reader(os.path.join(folder, name)) as reader:
                for start in range(0, reader.num_bytes, _PART_BYTES):
                    channel.send(Bytes(f"{prefix}/{name}", start), reader.read(start, _PART_BYTES), timeout=_SEND_S)
        channel.send(Resume(self._generation, self._timeline, step), timeout=_SEND_S)
