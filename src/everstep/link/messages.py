"""What a trainer and a shadow say to each other. MessagePack maps with the message's name under "type". No I/O.

Some messages are followed by a payload, bytes that are not part of the map: see PAYLOADS. docs/link.md says who sends
what, when. Numbers are checked when a message is decoded: an offset is never negative, a name never leaves its folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from everstep.errors import LinkError

VERSION = 3
"""Of this vocabulary. Fields may be added to it without a new number: readers skip those they do not know."""

NONCE_BYTES = 32
MAC_BYTES = 32

_MAX = 2**63 - 1
_NAME = r"\A(?:[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)*)?\Z"

Count = Annotated[int, Meta(ge=0, le=_MAX)]
Step = Annotated[int, Meta(ge=-1, le=_MAX)]
"""A step; -1 means none (in Fetch: the latest)."""
Name = Annotated[str, Meta(max_length=1024, pattern=_NAME)]
"""A name in the run's folder, parts joined by slashes; none begins with a dot. Empty means none."""
Short = Annotated[str, Meta(max_length=4096)]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Mac = Annotated[bytes, Meta(max_length=MAC_BYTES)]
"""Empty where there is no token."""
RunId = Annotated[str, Meta(max_length=64, pattern=r"\A[A-Za-z0-9_-]*\Z")]
Purpose = Literal["train", "fetch", "status"]
if TYPE_CHECKING:
    Writer = dict[str, object]
else:  # What may come over the wire: few, and flat, so that memory stays bounded.
    Writer = Annotated[dict[Annotated[str, Meta(max_length=64)], str | int | float | bool | None], Meta(max_length=64)]


class Hello(msgspec.Struct, frozen=True, tag=str.lower):
    """First message, client to server: which run this is about, and what for."""

    version: Count
    run: RunId
    path: Short
    timeline: Count
    generation: Count
    rank: Count
    purpose: Purpose
    writer: Writer
    """Who this is, for people: host, pid, since when. Strings, numbers, booleans or None by name."""


class Challenge(msgspec.Struct, frozen=True, tag=str.lower):
    """The server has a token and wants it proven."""

    nonce: Nonce


class Proof(msgspec.Struct, frozen=True, tag=str.lower):
    """The client has the same token."""

    nonce: Nonce
    mac: Mac


class Welcome(msgspec.Struct, frozen=True, tag=str.lower):
    """The client may go on. Segment and offset: up to where the log of its generation has been received."""

    mac: Mac
    generation: Count
    step: Step
    received: Step
    base: Step
    segment: Name
    offset: Count
    pid: Count


class Refused(msgspec.Struct, frozen=True, tag=str.lower):
    """The client may not go on; the server closes the connection after this."""

    reason: str


class Bytes(msgspec.Struct, frozen=True, tag=str.lower):
    """Payload: bytes of a log segment, from this offset on."""

    segment: Name
    offset: Count


class Frame(msgspec.Struct, frozen=True, tag=str.lower):
    """This frame is complete in the log. Watermark: the greatest step that all shadows have received."""

    step: Step
    segment: Name
    offset: Count
    footer_offset: Count
    end_offset: Count
    watermark: Step


class Document(msgspec.Struct, frozen=True, tag=str.lower):
    """Payload: a small file of the run's folder."""

    name: Name


class Share(msgspec.Struct, frozen=True, tag=str.lower):
    """This server is number `index` of `count` shadows, each of which keeps some of the atoms.

    Payload: the uids of those that it keeps, 8 bytes each. Interval: it writes a base at steps that are multiples of this.
    """

    index: Count
    count: Count
    interval: Count


class Resume(msgspec.Struct, frozen=True, tag=str.lower, omit_defaults=True):
    """The trainer goes on from this step in a new generation.

    Interval: it wants a base every so many steps from here on; 0: as it was.
    """

    generation: Count
    timeline: Count
    step: Step
    interval: Count = 0


class Ack(msgspec.Struct, frozen=True, tag=str.lower, omit_defaults=True):
    """How far the shadow is: greatest step received, folded, in a base, durable on its disk, proven by audit.

    And what that took: whether a base is being written; bytes and microseconds of the last one; steps that were folded in
    all, in how many microseconds, and how much of that was processor time.
    """

    received: Step
    folded: Step
    base: Step
    durable: Step
    proven: Step
    writing: bool = False
    base_bytes: Count = 0
    base_us: Count = 0
    num_folded: Count = 0
    fold_us: Count = 0
    fold_cpu_us: Count = 0


class Resend(msgspec.Struct, frozen=True, tag=str.lower):
    """The log from here on did not arrive as it was written: connect again, and send it again."""

    segment: Name
    offset: Count
    why: str


class Mismatch(msgspec.Struct, frozen=True, tag=str.lower):
    """The folded state does not have the hashes that the trainer recorded: a new base is needed."""

    step: Step
    text: str


class Trouble(msgspec.Struct, frozen=True, tag=str.lower):
    """Something the other side's user should read."""

    text: str


class Fetch(msgspec.Struct, frozen=True, tag=str.lower):
    """Hand out the state at this step; -1 for the latest. Of its bytes, those that are this stream's of so many."""

    step: Step
    stream: Count = 0
    num_streams: Annotated[int, Meta(ge=1, le=_MAX)] = 1


class State(msgspec.Struct, frozen=True, tag=str.lower):
    """The state asked for. Payload: its manifest, JSON. File: where it can be mapped; empty if it follows in Regions."""

    step: Step
    generation: Count
    timeline: Count
    proven: bool
    file: Short
    num_bytes: Count


class Region(msgspec.Struct, frozen=True, tag=str.lower):
    """Payload: bytes of the manifest's tensor number `index`, from byte `start` on."""

    index: Count
    start: Count


class Fetched(msgspec.Struct, frozen=True, tag=str.lower):
    """Server: all regions are sent. Client: it has the state, the server may let go of it."""


class Status(msgspec.Struct, frozen=True, tag=str.lower):
    """How are you?"""


class StatusReply(msgspec.Struct, frozen=True, tag=str.lower):
    """JSON, for people and tools."""

    text: str


class Close(msgspec.Struct, frozen=True, tag=str.lower):
    """Nothing more will come. Finish: the run is closed, so leave a base at its last step and end."""

    finish: bool


class Bye(msgspec.Struct, frozen=True, tag=str.lower):
    """Close is done; the connection ends here."""


Message = (
    Hello | Challenge | Proof | Welcome | Refused
    | Bytes | Frame | Document | Share | Resume | Ack | Resend | Mismatch | Trouble
    | Fetch | State | Region | Fetched | Status | StatusReply | Close | Bye
)  # fmt: skip

HANDSHAKE = (Hello, Challenge, Proof, Welcome, Refused)
"""The only messages there are before the handshake is finished. Of these only Refused may come later."""
PAYLOADS = (Bytes, Document, Share, State, Region)
"""The only messages that may be followed by a payload."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """The message's map. The same message always gives the same bytes."""
    return _ENCODER.encode(message)


def unpack(meta: bytes | memoryview) -> Message:
    """The message in these bytes; LinkError if they are none."""
    try:
        return _DECODER.decode(meta)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise LinkError(f"a message that cannot be read: {e}") from e
