"""Messages of every kind, and ways to get bytes into a connection."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from hypothesis import strategies as st

from everstep.link.messages import (
    VERSION,
    Ack,
    Bye,
    Bytes,
    Challenge,
    Close,
    Document,
    Fetch,
    Fetched,
    Frame,
    Hello,
    Message,
    Mismatch,
    Proof,
    Refused,
    Region,
    Resend,
    Resume,
    Share,
    State,
    Status,
    StatusReply,
    Trouble,
    Welcome,
)
from everstep.link.protocol import Connection, Received, encode

TOP = 2**63 - 1
SEGMENT = "timelines/0001/log/rank-00000/g000007-000000000101.frames"
WRITER = {"host": "node-1", "pid": 4711, "since": "2026-01-01T00:00:00+00:00", "load": 0.5, "root": False, "job": None}

HELLO = Hello(VERSION, "0123456789abcdef", "/runs/gpt", 1, 7, 0, "train", WRITER)
HANDSHAKE_SAMPLES: list[Message] = [
    HELLO,
    Hello(TOP, "", "", TOP, TOP, TOP, "status", {}),
    Challenge(bytes(32)),
    Proof(bytes(range(32)), b"\xff" * 32),
    Welcome(b"", 0, -1, -1, -1, "", 0, 1),
    Welcome(b"m" * 32, 7, 100, 101, 64, SEGMENT, TOP, 4711),
    Refused("ein anderer Läufer"),
]
PLAIN_SAMPLES: list[Message] = [
    Frame(101, SEGMENT, 4096, 8192, TOP, -1),
    Resume(8, 2, 100),
    Ack(-1, 0, 1, 2, TOP),
    Resend(SEGMENT, 4096, "a record's checksum is wrong"),
    Mismatch(5, "model.weight"),
    Trouble(""),
    Fetch(-1),
    Fetch(TOP, 3, 4),
    Fetched(),
    Status(),
    StatusReply("{}"),
    Close(True),
    Close(False),
    Bye(),
]
PAYLOAD_SAMPLES: list[Message] = [
    Bytes(SEGMENT, 0),
    Document("run.json"),
    Share(1, 2, 200),
    State(100, 7, 1, True, "", TOP),
    State(100, 7, 1, False, "/dev/shm/everstep/state", 0),
    Region(3, 1 << 40),
]
SAMPLES = HANDSHAKE_SAMPLES + PLAIN_SAMPLES + PAYLOAD_SAMPLES
OPEN_SAMPLES = PLAIN_SAMPLES + PAYLOAD_SAMPLES + [Refused("superseded")]
assert {type(m) for m in SAMPLES} == set(get_args(Message))

Sent = tuple[Message, bytes]


class Memory:
    """A sink that keeps the memory it gave out."""

    def __init__(self) -> None:
        self.given: list[bytearray] = []

    def __call__(self, message: Message, num_bytes: int) -> memoryview:
        self.given.append(bytearray(num_bytes))
        return memoryview(self.given[-1])


def refusing(message: Message, num_bytes: int) -> memoryview | None:
    return None


def opened(sink: object = None, **bounds: int) -> Connection:
    """A connection whose handshake is over."""
    connection = Connection(sink or Memory(), **bounds)  # type: ignore[arg-type]
    connection.open()
    return connection


def wire(*sent: Sent) -> bytes:
    return b"".join(encode(message, len(payload)) + payload for message, payload in sent)


def feed(connection: Connection, data: bytes, sizes: Iterable[int] = ()) -> list[Received]:
    """All messages in these bytes, which arrive in chunks of these sizes (then as large as the buffer)."""
    got: list[Received] = []
    chunks = iter(sizes)
    at = 0
    while at < len(data):
        buffer = connection.get_buffer()
        assert len(buffer) > 0
        n = min(len(buffer), len(data) - at, max(1, next(chunks, len(data))))
        buffer[:n] = data[at : at + n]
        at += n
        got += drained(connection, n)
    return got


def drained(connection: Connection, n: int) -> list[Received]:
    """All messages that so many bytes complete, each dealt with before memory for a payload behind it is asked for."""
    got = connection.received(n)
    while connection.has_more:
        got += connection.received(0)
    return got


def plain(got: list[Received]) -> list[Sent]:
    return [(r.message, bytes(r.payload or b"")) for r in got]


counts = st.integers(0, TOP)
steps = st.integers(-1, TOP)
names = st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,20}(?:/[A-Za-z0-9_][A-Za-z0-9._-]{0,20}){0,3}\Z")
texts = st.text(max_size=300)

messages = st.one_of(
    st.sampled_from(OPEN_SAMPLES),
    st.builds(Frame, steps, names, counts, counts, counts, steps),
    st.builds(Ack, steps, steps, steps, steps, steps),
    st.builds(Ack, steps, steps, steps, steps, steps, st.booleans(), counts, counts, counts, counts, counts),
    st.builds(Resume, counts, counts, steps, counts),
    st.builds(Trouble, texts),
    st.builds(StatusReply, st.integers(0, 20_000).map(lambda n: "x" * n)),
    st.builds(Bytes, names, counts),
    st.builds(Document, names),
    st.builds(Region, counts, counts),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Sent]:
    """Messages with payloads, some larger than what is read ahead."""
    sent: list[Sent] = []
    for message in draw(st.lists(messages, max_size=12)):
        size = draw(st.sampled_from([0, 1, 31, 4095, 4096, 4097, 20_000])) if isinstance(message, CARRIERS) else 0
        sent.append((message, bytes(i * 7 & 255 for i in range(size))))
    return sent


CARRIERS = (Bytes, Document, State, Region)
