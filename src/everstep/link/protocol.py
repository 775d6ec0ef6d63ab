"""Bytes in, messages out: one end of a link without a socket, a clock or a thread.

    header (32 bytes) | meta (a message, MessagePack) | payload (bytes of the log, of a file, of a tensor)

A driver asks `get_buffer()` where the next bytes belong, puts them there and says how many in `received(n)`. Header and
meta go to a small buffer of the connection's own, payloads to the memory that the sink names for them, so that log bytes
are received where they stay. Only what was read ahead behind a meta (a few KiB at most) is copied.

A length is trusted when the header's own checksum is right and it is within bounds, and memory is asked for after that.
The payload has no checksum here: log records, documents and states bring their own.

A connection starts in the handshake: small messages, no payloads, nothing read ahead, so that what follows the handshake
is judged after it. `open()` ends it. After any error the connection is dead: every later call raises.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import xxhash

from everstep.errors import LinkError, UsageError
from everstep.link import messages
from everstep.link.messages import HANDSHAKE, PAYLOADS, Message, Refused

MAGIC = b"EVL1"
FRAMING = 1
"""Version of header and framing; messages.VERSION is that of what is said."""

_LAYOUT = struct.Struct("<4sHHQIIQ")
"""Magic, framing, zero, payload bytes, meta bytes, checksum of the first 20 bytes (low half), of all before and the meta."""
HEADER_BYTES = _LAYOUT.size
_HEAD = struct.Struct("<4sHHQI")
_SUM = struct.Struct("<I")

MAX_META_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 1 << 30
MAX_HANDSHAKE_BYTES = 64 << 10
READ_AHEAD_BYTES = 4096

Sink = Callable[[Message, int], "memoryview | None"]
"""Where the payload of this message, of so many bytes, belongs: memory of just that length, or None to refuse it.

The memory is the connection's until the message is delivered, and the sink's again after that."""


class Received(NamedTuple):
    """One message. The payload is the sink's memory, now filled; None for messages that carry none."""

    message: Message
    payload: memoryview | None


def encode(message: Message, payload_bytes: int = 0) -> bytes:
    """Header and meta of a message; its payload must follow on the wire, sent by the caller.

    UsageError for a payload on a message that carries none, or of more than MAX_PAYLOAD_BYTES: send several then.
    """
    if payload_bytes and not isinstance(message, PAYLOADS):
        raise UsageError(f"{type(message).__name__} carries no payload")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise UsageError(f"a payload of {payload_bytes} bytes; one message carries at most {MAX_PAYLOAD_BYTES}")
    meta = messages.pack(message)
    head = _HEAD.pack(MAGIC, FRAMING, 0, payload_bytes, len(meta))
    head += _SUM.pack(_low(head))
    return head + struct.pack("<Q", _sum(head, meta)) + meta


class Connection:
    """The receiving half of a link's end. One thread at a time."""

    def __init__(self, sink: Sink, *, max_meta: int = MAX_META_BYTES, max_payload: int = MAX_PAYLOAD_BYTES) -> None:
        self._sink = sink
        self._max_meta, self._max_payload = max_meta, max_payload
        self._opened = False
        self._dead = ""
        self._buffer = memoryview(bytearray(READ_AHEAD_BYTES))
        """Holds bytes [begin, end) that were received and not yet understood. Replaced by a larger one for a large meta."""
        self._begin = self._end = 0
        self._needed = HEADER_BYTES
        """So many bytes from `begin` on are known to belong to the next message."""
        self._message: Message | None = None
        """Whose payload is being received."""
        self._payload = memoryview(b"")
        self._filled = 0
        self.has_more = False
        """A message with a payload has been read behind those that were delivered last: call `received(0)` when they have
        been dealt with. (Where a payload belongs may depend on them, so its memory is asked for only then.)"""
        self.handshake_meta = b""
        """The meta, as received, of the last message of the handshake: proofs are made over these bytes."""

    @property
    def is_open(self) -> bool:
        """Whether the handshake is over."""
        return self._opened

    @property
    def is_between_messages(self) -> bool:
        """Whether an end of the stream would be a clean one here."""
        return self._message is None and self._begin == self._end

    def open(self) -> None:
        """The handshake is over: from now on there are all messages but those of the handshake, and payloads."""
        self._check_alive()
        self._opened = True

    def fail(self, why: str) -> NoReturn:
        """Kill the connection for a reason that only the caller can see, and raise it."""
        self._dead = self._dead or why
        raise LinkError(why)

    def get_buffer(self) -> memoryview:
        """Where the next received bytes belong, never empty. Valid until the next call of `received`. Not if `has_more`."""
        self._check_alive()
        if self.has_more:
            self.fail("received(0) was not called though there was more")
        if self._message is not None:
            return self._payload[self._filled :]
        return self._buffer[self._end : self._limit()]

    def received(self, n: int) -> list[Received]:
        """So many bytes were put into the buffer. The messages that are complete now, in order.

        Those before an error are delivered first; the next call raises it.
        """
        self._check_alive()
        room = len(self._payload) - self._filled if self._message is not None else self._limit() - self._end
        if not 0 <= n <= room:
            self.fail(f"{n} bytes cannot have been received into a buffer of {room}")
        done: list[Received] = []
        try:
            self._advance(n, done)
        except BaseException as e:
            self._dead = self._dead or str(e) or type(e).__name__
            self._payload = memoryview(b"")
            if not done or not isinstance(e, LinkError):
                raise
        return done

    def _advance(self, n: int, done: list[Received]) -> None:
        if self._message is not None:
            self._filled += n
            if self._filled < len(self._payload):
                return
            done.append(self._take())
        else:
            self._end += n
        self.has_more = False
        while (message := self._next(bool(done))) is not None:
            done.append(message)

    def _next(self, others: bool) -> Received | None:
        """The next message of the buffer; None if it is not complete, or must wait until `others` have been delivered."""
        have = self._end - self._begin
        if have < HEADER_BYTES:
            self._make_room(HEADER_BYTES)
            return None
        head = bytes(self._buffer[self._begin : self._begin + HEADER_BYTES])
        payload_bytes, meta_bytes = self._lengths(head)
        if have < HEADER_BYTES + meta_bytes:
            self._make_room(HEADER_BYTES + meta_bytes)
            return None
        start = self._begin + HEADER_BYTES
        meta = self._buffer[start : start + meta_bytes]
        if _sum(head[: HEADER_BYTES - 8], meta) != _LAYOUT.unpack(head)[6]:
            self.fail("a message whose checksum is wrong")
        message = messages.unpack(meta)
        self._check_allowed(message, payload_bytes)
        if payload_bytes and others:
            self.has_more = True
            return None
        if not self._opened:
            self.handshake_meta = bytes(meta)
        self._begin = start + meta_bytes
        if not payload_bytes:
            self._shrink()
            return Received(message, memoryview(b"") if isinstance(message, PAYLOADS) else None)
        return self._begin_payload(message, payload_bytes)

    def _lengths(self, head: bytes) -> tuple[int, int]:
        """Payload and meta length of a header, checked."""
        magic, framing, zero, payload_bytes, meta_bytes, low, _ = _LAYOUT.unpack(head)
        if magic != MAGIC:
            self.fail("bytes that are no message of an Everstep link: is something else at the other end?")
        if low != _low(head[: _HEAD.size]):
            self.fail("a header whose checksum is wrong")
        if framing != FRAMING or zero:
            self.fail(f"a link of version {framing}; this one speaks {FRAMING}. Use the same Everstep at both ends")
        max_meta = self._max_meta if self._opened else min(self._max_meta, MAX_HANDSHAKE_BYTES)
        max_payload = self._max_payload if self._opened else 0
        if meta_bytes > max_meta or payload_bytes > max_payload:
            self.fail(
                f"a message of {meta_bytes} and a payload of {payload_bytes} bytes; "
                f"at most {max_meta} and {max_payload} are accepted{'' if self._opened else ' before the handshake is over'}"
            )
        return payload_bytes, meta_bytes

    def _check_allowed(self, message: Message, payload_bytes: int) -> None:
        name = type(message).__name__
        if not self._opened and not isinstance(message, HANDSHAKE):
            self.fail(f"{name} before the handshake is over")
        if self._opened and isinstance(message, HANDSHAKE) and not isinstance(message, Refused):
            self.fail(f"{name} after the handshake")
        if payload_bytes and not isinstance(message, PAYLOADS):
            self.fail(f"{name} with a payload, which it must not have")

    def _begin_payload(self, message: Message, num_bytes: int) -> Received | None:
        """Ask for the payload's memory and give it what was read ahead."""
        memory = self._sink(message, num_bytes)
        if memory is None:
            self.fail(f"a payload that is not wanted here: {num_bytes} bytes of {message}")
        if memory.readonly or memory.nbytes != num_bytes:
            self.fail(f"the memory for {num_bytes} bytes of {message} cannot be written, or has {memory.nbytes} bytes")
        self._message, self._payload = message, memory.cast("B")
        ahead = min(self._end - self._begin, num_bytes)
        self._payload[:ahead] = self._buffer[self._begin : self._begin + ahead]
        self._filled = ahead
        self._begin += ahead
        self._shrink()
        return self._take() if ahead == num_bytes else None

    def _take(self) -> Received:
        assert self._message is not None
        done = Received(self._message, self._payload)
        self._message, self._payload, self._filled = None, memoryview(b""), 0
        return done

    def _limit(self) -> int:
        """Up to where the buffer may be filled."""
        return len(self._buffer) if self._opened else self._begin + self._needed

    def _make_room(self, num_bytes: int) -> None:
        """For a header, or a message whose length has been checked, that begins where the buffer's bytes begin."""
        self._needed = num_bytes
        if self._begin + num_bytes > len(self._buffer):
            self._move(max(num_bytes, READ_AHEAD_BYTES))
        elif self._begin == self._end:
            self._begin = self._end = 0

    def _shrink(self) -> None:
        """Let go of a buffer that was made for one large meta."""
        if len(self._buffer) > READ_AHEAD_BYTES and self._end - self._begin <= READ_AHEAD_BYTES:
            self._move(READ_AHEAD_BYTES)

    def _move(self, size: int) -> None:
        """What is in the buffer, at the start of one of this size."""
        kept = bytes(self._buffer[self._begin : self._end])
        if size != len(self._buffer):
            self._buffer = memoryview(bytearray(size))
        self._buffer[: len(kept)] = kept
        self._begin, self._end = 0, len(kept)

    def _check_alive(self) -> None:
        if self._dead:
            raise LinkError(f"this connection failed before: {self._dead}")


def _low(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF


def _sum(head: bytes, meta: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(head)
    digest.update(meta)
    return digest.intdigest()
