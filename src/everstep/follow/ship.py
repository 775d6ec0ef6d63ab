"""In the trainer: a shadow on another host, and the log on its way there."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Iterator, Sequence

import numpy as np

from everstep.errors import CorruptionError, LinkError, StorageError
from everstep.follow.shadow import MEMORY
from everstep.follow.shares import PartFrame, Partition
from everstep.follow.talk import Conversation, Subject, Trainer
from everstep.format import documents, records
from everstep.format.documents import StoredTensor
from everstep.format.segment import parse_name
from everstep.link import addresses
from everstep.link.messages import Ack, Bytes, Document, Mismatch, Resend, Resume, Share, Welcome
from everstep.link.sockets import Channel
from everstep.store import files, shared
from everstep.store.bases import manifest_name, part_file, read_manifest
from everstep.store.parts import part_of
from everstep.store.segments import FrameEntry

_PART_BYTES = 4 << 20
_SEND_S = 30.0
STAGE_BYTES = 512 << 20
MIN_STAGED = 4
"""So many frames may wait at a shadow for others in any case."""
_AGAIN_S = 0.1
"""After something came damaged: perhaps it always does."""
TELL_AFTER_S = 2.0
"""Without a connection for so long, the user is told."""


class RemoteShadow(Conversation):
    """A shadow on another host: this host's memory holds the log until it has arrived there."""

    send_s = _SEND_S

    def __init__(
        self, subject: Subject, trainer: Trainer, *, address: str, token: bytes | None, tls: ssl.SSLContext | None,
        partition: Partition | None = None, index: int = 0, interval: int = 0, max_staged_bytes: int = STAGE_BYTES,
    ) -> None:  # fmt: skip
        """With a `partition`, it is number `index` of several, keeps its share of the atoms, writes its part of a base at
        multiples of `interval`, and is sent at most `max_staged_bytes` of what others have not received."""
        super().__init__(subject, trainer)
        self._partition, self._index, self._interval = partition, index, interval
        self._max_staged_bytes = max_staged_bytes
        self._told_version = -1
        self._told_share: frozenset[int] = frozenset()
        self._address = addresses.parse_address(address)
        self._token, self._tls = token, tls
        self._sent: tuple[str, int] = ("", 0)
        """Segment and offset up to which the shadow has the log."""
        self._told_documents: set[str] = set()
        self._base_sent = -1
        """The base that the shadow was sent last: if it asks again, that one was of no use to it."""
        self._wants_base = False
        """It has nothing to go on from, and waits for a base that the trainer is yet to take."""
        self._gap_end = -1
        """Steps up to this one were never stored: only a base leads on from before them."""
        self._failing_since: float | None = None
        self.sent_bytes = 0
        self.takes_parts = partition is None  # which shadow needs what of a frame is known when it is complete

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
        self._base_sent = -1  # it may not have arrived
        self._wants_base = False
        self._told_documents.clear()
        for name in self._documents():
            self._send_document(channel, name)
        if self._partition is not None:
            self._send_share(channel)
        if welcome.generation == self.subject.generation and welcome.step >= 0:
            self._announced = welcome.received
            self._heard_progress(Ack(welcome.received, welcome.step, welcome.base, -1, -1))

    def _send_share(self, channel: Channel) -> None:
        partition = self._partition
        assert partition is not None
        self._told_version, self._told_share = partition.version, partition.of(self._index)
        uids = np.array(sorted(self._told_share), "<u8").tobytes()
        channel.send(Share(self._index, len(partition), self._interval), uids, timeout=_SEND_S)

    def _documents(self) -> Iterator[str]:
        """The run's small files, in an order in which they make sense."""
        path = self.subject.path
        yield "run.json"
        for timeline in files.listing(path.timelines()):
            top = f"timelines/{timeline}"
            yield f"{top}/timeline.json"
            yield from self._documents_in(f"{top}/layouts")
            yield from self._documents_in(f"{top}/generations")

    def _documents_in(self, folder: str) -> Iterator[str]:
        for name in files.listing(os.path.join(self.subject.path.path, folder)):
            if name.endswith(".json"):
                yield f"{folder}/{name}"

    def _send_document(self, channel: Channel, name: str) -> None:
        data = files.read_whole(os.path.join(self.subject.path.path, name))
        channel.send(Document(name), memoryview(data), timeout=_SEND_S)
        self._told_documents.add(name)

    def _send_new_layouts(self, channel: Channel) -> None:
        """Those that frames may refer to from now on. (A folder's time does not tell: it moves in steps of milliseconds.)"""
        for name in self._documents_in(f"timelines/{self.subject.timeline:04d}/layouts"):
            if name not in self._told_documents:
                self._send_document(channel, name)

    def base_done(self, step: int) -> None:
        """Of no concern to a shadow that has no need of it."""
        if self._wants_base and step < self.trainer.released:
            self.trainer.needs_base("the shadow needs a later base")  # it was asked for while this one was under way
        self.wake()

    def never_stored(self, last: int) -> None:
        self._gap_end = max(self._gap_end, last)

    def _say_all(self, channel: Channel) -> None:
        if (self._wants_base or self._is_before_gap()) and not self._give_base(channel):
            return
        part = self.trainer.open_frame  # asked before frames() is: all that come before it are among those
        super()._say_all(channel)
        is_next = not self.trainer.frames(self._announced)
        if self.takes_parts and part is not None and part.step > self._announced and is_next:
            self._ship(channel, part.path, part.end_offset)

    def _is_before_gap(self) -> bool:
        """Whether there is a base that leads it over a gap, which it was not sent."""
        base = self.trainer.base_step
        return self.progress.folded < self._gap_end <= base != self._base_sent

    def _has_room(self, entry: FrameEntry) -> bool:
        """Of several shadows, each keeps what others have not received; but not without bound."""
        if not self.waits:
            return True
        waiting = [e for e in self.trainer.frames(self.progress.folded) if e.step <= self._announced]
        staged = sum(e.end_offset - e.offset for e in waiting)
        if self._partition is not None:
            staged //= len(self._partition)
        return len(waiting) < MIN_STAGED or staged < self._max_staged_bytes

    def _announce(self, channel: Channel, entry: FrameEntry) -> None:
        self._send_new_layouts(channel)
        self._ship(channel, entry.path, entry.end_offset, entry)
        self._send_frame(channel, entry)

    def _ship(self, channel: Channel, path: str, end_offset: int, entry: FrameEntry | None = None) -> None:
        """Bring the shadow's log up to here, which is where the frame of `entry` ends or in the middle of one."""
        segment = _name(path)
        at = self._sent[1] if self._sent[0] == segment else 0
        if at >= end_offset:
            return
        reader = shared.MappedReader(path)
        needed = [(at, end_offset)] if entry is None else self._ranges(channel, entry, reader, at)
        for first, stop in needed:
            for start in range(max(first, at), stop, _PART_BYTES):
                size = min(_PART_BYTES, stop - start)
                channel.send(Bytes(segment, start), memoryview(reader.view(start, size)), timeout=_SEND_S)
                self.sent_bytes += size
        self._sent = (segment, end_offset)

    def _ranges(
        self, channel: Channel, entry: FrameEntry, reader: shared.MappedReader, at: int
    ) -> list[tuple[int, int]]:
        """What the shadow needs of the bytes up to this frame's end."""
        partition = self._partition
        if partition is None:
            return [(at, entry.end_offset)]
        parsed = parse_name(os.path.basename(entry.path))
        assert parsed is not None
        seed = records.seed_of(bytes.fromhex(self.subject.run), parsed[0], self.subject.path.rank, parsed[1])
        frame = PartFrame(entry, reader, seed)
        partition.see(frame.footer.ops)
        if partition.version != self._told_version:
            grown = partition.of(self._index) >= self._told_share
            self._send_share(channel)
            if not grown:  # it forgets what it holds, and asks for a base
                subject = self.subject
                channel.send(Resume(subject.generation, subject.timeline, subject.resume_step), timeout=_SEND_S)
        head = records.unpack(reader.read(0, records.HEADER_BYTES), records.at(seed, 0))
        if head is None:
            raise CorruptionError(f"{entry.path} does not begin as a segment does")
        return [(0, head.padded_bytes), *frame.of(partition.of(self._index)).ranges()]

    def _segment(self, entry: FrameEntry) -> str:
        return _name(entry.path)

    def _heard_progress(self, ack: Ack) -> None:
        if ack.folded >= max(self.trainer.released, 0):
            self._wants_base = False  # the log leads on from what it holds
        super()._heard_progress(ack)

    def _heard_resend(self, channel: Channel, message: Resend) -> None:
        if message.segment != "base":
            # On a new connection both know from where it goes on. On this one nobody could tell what is sent again from what
            # is under way, since a base may have come in between.
            time.sleep(_AGAIN_S)
            raise LinkError(f"step data came damaged: {message.why}")
        if 0 <= self.progress.folded < self._gap_end:
            return  # it gets the base that is being taken, without which no shadow gets over what was never stored
        base = self.trainer.base_step
        if self.trainer.released > base:
            self._is_lost(
                f"the shadow at {self._address} has lost what it held. Training goes on; until it has a new base, a failure "
                f"of this process would lead back to step {base}"
            )
        self._wants_base = True
        if not self._give_base(channel):
            super()._heard_resend(channel, message)

    def _heard_mismatch(self, message: Mismatch) -> None:
        self._wants_base, self._base_sent = True, self.trainer.base_step  # not that one: what it leads to is in doubt
        super()._heard_mismatch(message)

    def _give_base(self, channel: Channel) -> bool:
        """Send the base that the shadow waits for, if there is one from which the log leads on."""
        base = self.trainer.base_step
        if base < self.trainer.released or base == self._base_sent:
            return False
        try:
            self._send_base(channel, base)
        except (FileNotFoundError, StorageError):
            self._base_sent = base
            self.trainer.needs_base(f"the base of step {base} cannot be read")
            return False
        self._base_sent = base
        self._wants_base = False
        return True

    def _lost(self, e: Exception) -> None:
        """What has not arrived stays here, in memory or on disk, until the connection is back."""
        self.trainer.say(f"the connection to the shadow at {self._address} is made again ({e})")
        self._forget_progress()

    def _send_base(self, channel: Channel, step: int) -> None:
        """A base of this host, the manifest last."""
        subject = self.subject
        folder = os.path.join(subject.path.bases(subject.timeline), f"{step:012d}")
        whole = manifest = read_manifest(folder)
        if whole is None or manifest is None:
            raise FileNotFoundError(folder)
        prefix = f"base/{subject.timeline:04d}/{step:012d}"
        if self._partition is not None:
            part = (self._index, len(self._partition))
            manifest, header, tensors = part_of(whole, self._partition.of(self._index), part)
            names = sorted(whole.files)
            source = [(os.path.join(folder, names[t.rank]), t) for t in tensors]
            self._send_part(channel, f"{prefix}/{part_file(part)}", header, source)
        else:
            for name in manifest.files:
                with files.Reader(os.path.join(folder, name)) as reader:
                    for start in range(0, reader.num_bytes, _PART_BYTES):
                        channel.send(Bytes(f"{prefix}/{name}", start), reader.read(start, _PART_BYTES), timeout=_SEND_S)
        told = documents.encode(manifest)
        channel.send(Bytes(f"{prefix}/{manifest_name(manifest.part)}", 0), told, timeout=_SEND_S)
        channel.send(Resume(subject.generation, subject.timeline, step), timeout=_SEND_S)
        self._announced = max(self._announced, step)

    def _send_part(
        self, channel: Channel, name: str, header: bytes, tensors: Sequence[tuple[str, StoredTensor]]
    ) -> None:
        """The file of a part of a base: a header of its own, then tensors as they are in the base's files."""
        channel.send(Bytes(name, 0), header, timeout=_SEND_S)
        at = len(header)
        for path, stored in tensors:
            with files.Reader(path) as reader:
                for start in range(stored.offset, stored.offset + stored.num_bytes, _PART_BYTES):
                    data = reader.read(start, min(_PART_BYTES, stored.offset + stored.num_bytes - start))
                    channel.send(Bytes(name, at), data, timeout=_SEND_S)
                    at += len(data)


def _name(path: str) -> str:
    """What the shadow calls a segment, wherever it is here."""
    return f"{MEMORY}/{os.path.basename(path)}"
