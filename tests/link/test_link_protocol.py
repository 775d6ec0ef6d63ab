"""Bytes <-> messages: whatever the splits, nothing is lost, copied needlessly, or believed without proof."""

from __future__ import annotations

import ctypes
import struct
import tracemalloc

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from link_samples import (
    CARRIERS,
    HANDSHAKE_SAMPLES,
    HELLO,
    OPEN_SAMPLES,
    SAMPLES,
    SEGMENT,
    Memory,
    Sent,
    conversations,
    drained,
    feed,
    opened,
    plain,
    refusing,
    wire,
)

from everstep.errors import LinkError, UsageError
from everstep.link import messages as m
from everstep.link.protocol import (
    HEADER_BYTES,
    MAX_HANDSHAKE_BYTES,
    MAX_META_BYTES,
    MAX_PAYLOAD_BYTES,
    READ_AHEAD_BYTES,
    Connection,
    Received,
    encode,
)


def framed(meta: bytes, payload_bytes: int = 0, *, claimed: int | None = None, magic: bytes = b"EVL1", framing: int = 1,
           zero: int = 0) -> bytes:  # fmt: skip
    """A frame with right checksums around anything."""
    head = struct.pack("<4sHHQI", magic, framing, zero, payload_bytes, len(meta) if claimed is None else claimed)
    head += struct.pack("<I", xxhash.xxh3_64_intdigest(head) & 0xFFFFFFFF)
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + meta)) + meta


# -- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", SAMPLES, ids=lambda s: type(s).__name__)
def test_every_message_comes_out_as_it_went_in(message: m.Message) -> None:
    connection = Connection(Memory()) if message in HANDSHAKE_SAMPLES else opened()
    payload = b"payload" if isinstance(message, CARRIERS) else b""
    assert plain(feed(connection, wire((message, payload)))) == [(message, payload)]
    assert connection.is_between_messages


def test_a_message_that_carries_payloads_may_have_an_empty_one_and_others_have_none() -> None:
    assert feed(opened(refusing), wire((m.Document("empty"), b""))) == [Received(m.Document("empty"), memoryview(b""))]
    assert feed(opened(), wire((m.Bye(), b""))) == [Received(m.Bye(), None)]


def test_a_message_may_arrive_byte_by_byte() -> None:
    sent: list[Sent] = [(s, b"0123456789" if isinstance(s, CARRIERS) else b"") for s in OPEN_SAMPLES]
    assert plain(feed(opened(), wire(*sent), [1] * 100_000)) == sent


def test_small_messages_that_arrive_together_are_all_delivered_by_one_call() -> None:
    connection = opened()
    data = wire(*[(m.Ack(i, i, i, i, i), b"") for i in range(20)], (m.Bye(), b""))
    buffer = connection.get_buffer()
    assert len(data) <= len(buffer)
    buffer[: len(data)] = data
    assert len(connection.received(len(data))) == 21
    assert not connection.has_more


def test_memory_for_a_payload_is_asked_for_when_what_came_before_it_has_been_delivered() -> None:
    """Where a payload belongs may depend on the messages before it."""
    memory = Memory()
    connection = Connection(memory)
    connection.open()
    data = wire((m.Ack(1, 1, 1, 1, 1), b""), (m.Document("a"), b"abc"), (m.Bye(), b""))
    connection.get_buffer()[: len(data)] = data
    assert [type(r.message) for r in connection.received(len(data))] == [m.Ack]
    assert connection.has_more and not memory.given
    with pytest.raises(LinkError):
        Connection.get_buffer(connection)
    connection = Connection(memory)
    connection.open()
    connection.get_buffer()[: len(data)] = data
    connection.received(len(data))
    assert [type(r.message) for r in connection.received(0)] == [m.Document, m.Bye]
    assert not connection.has_more and len(memory.given) == 1


@settings(max_examples=150, deadline=None)
@given(conversations(), st.lists(st.integers(1, 6000), max_size=200))
def test_any_split_of_the_stream_delivers_the_same(sent: list[Sent], sizes: list[int]) -> None:
    connection = opened()
    assert plain(feed(connection, wire(*sent), sizes)) == sent
    assert connection.is_between_messages


def test_nothing_is_delivered_before_its_last_byte() -> None:
    data = wire((m.Bytes(SEGMENT, 0), b"x" * 100))
    connection = opened()
    assert feed(connection, data[:-1]) == []
    assert not connection.is_between_messages
    assert plain(feed(connection, data[-1:])) == [(m.Bytes(SEGMENT, 0), b"x" * 100)]


def test_fields_that_a_newer_peer_adds_are_skipped() -> None:
    meta = msgspec.msgpack.encode({"type": "bye", "reason": {"deep": [1, 2, {"x": b"y"}]}, "when": 3})
    assert plain(feed(opened(), framed(meta))) == [(m.Bye(), b"")]


# -- payloads land where they belong ----------------------------------------------------------------------------------


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_a_payload_is_received_straight_into_the_sinks_memory() -> None:
    log = bytearray(1 << 20)
    connection = opened(lambda message, n: memoryview(log)[message.offset : message.offset + n])
    payload = bytes(i & 255 for i in range(500_000))
    head = encode(m.Bytes(SEGMENT, 4096), len(payload))
    start = address_of(memoryview(log)) + 4096

    buffer = connection.get_buffer()
    buffer[: len(head)] = head
    assert connection.received(len(head)) == []
    at = 0
    while at < len(payload):
        buffer = connection.get_buffer()
        assert address_of(buffer) == start + at, "the driver is told to receive anywhere but into the log"
        assert len(buffer) == len(payload) - at
        n = min(len(buffer), 70_000)
        buffer[:n] = payload[at : at + n]
        at += n
        got = connection.received(n)
    assert got[0].payload is not None
    assert address_of(got[0].payload) == start
    assert log[4096 : 4096 + len(payload)] == payload
    assert not any(log[:4096])
    assert not any(log[4096 + len(payload) :])


def test_no_more_than_the_read_ahead_of_a_payload_is_copied() -> None:
    memory = Memory()
    connection = opened(memory)
    data = wire((m.Bytes(SEGMENT, 0), b"z" * 100_000))
    n = len(connection.get_buffer())
    assert n <= READ_AHEAD_BYTES
    connection.get_buffer()[:] = data[:n]
    connection.received(n)
    assert address_of(connection.get_buffer()) == address_of(memoryview(memory.given[0])) + n - (len(data) - 100_000)


def test_a_payload_may_be_received_into_memory_of_another_type() -> None:
    import torch

    tensor = torch.zeros(1000)
    value = torch.arange(1000.0)
    feed(opened(lambda message, n: memoryview(tensor.numpy())), wire((m.Region(0, 0), value.numpy().tobytes())))
    assert torch.equal(tensor, value)


# -- bounds -----------------------------------------------------------------------------------------------------------


def peak_of(connection: Connection, data: bytes) -> int:
    """Bytes allocated at most while the connection refuses these."""
    tracemalloc.start()
    try:
        with pytest.raises(LinkError):
            feed(connection, data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("payload_bytes", [MAX_PAYLOAD_BYTES + 1, 2**40, 2**60, 2**64 - 1])
def test_a_payload_above_the_bound_is_refused_before_the_sink_is_asked(payload_bytes: int) -> None:
    memory = Memory()
    assert peak_of(opened(memory), framed(m.pack(m.Bytes("a", 0)), payload_bytes)) < 100_000
    assert not memory.given


@pytest.mark.parametrize("meta_bytes", [MAX_META_BYTES + 1, 2**32 - 1])
def test_a_meta_above_the_bound_is_refused_before_memory_is_allocated(meta_bytes: int) -> None:
    assert peak_of(opened(), framed(b"", claimed=meta_bytes)) < 100_000


def test_a_meta_up_to_the_bound_is_received_and_its_memory_is_let_go() -> None:
    connection = opened()
    text = "x" * (MAX_META_BYTES - 100)
    assert plain(feed(connection, wire((m.Trouble(text), b""), (m.Bye(), b"")))) == [(m.Trouble(text), b""), (m.Bye(), b"")]
    assert len(connection.get_buffer()) <= READ_AHEAD_BYTES


def test_bounds_can_be_set() -> None:
    with pytest.raises(LinkError, match="at most"):
        feed(opened(max_meta=100), wire((m.Trouble("x" * 100), b"")))
    with pytest.raises(LinkError, match="at most"):
        feed(opened(max_payload=9), wire((m.Document("a"), b"0123456789")))
    assert feed(opened(max_payload=10), wire((m.Document("a"), b"0123456789")))


def test_a_sender_is_told_of_a_payload_that_no_receiver_would_take() -> None:
    with pytest.raises(UsageError, match="at most"):
        encode(m.Bytes("a", 0), MAX_PAYLOAD_BYTES + 1)
    with pytest.raises(UsageError, match="carries no payload"):
        encode(m.Bye(), 1)


@pytest.mark.parametrize("n", [-1, READ_AHEAD_BYTES + 1])
def test_a_driver_cannot_have_received_more_than_the_buffer_holds(n: int) -> None:
    with pytest.raises(LinkError, match="cannot have been received"):
        opened().received(n)


# -- what is not a message --------------------------------------------------------------------------------------------

BYE = m.pack(m.Bye())
MALFORMED = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: shadow\r\n\r\n",
    "wrong magic": framed(BYE, magic=b"EVL2"),
    "newer framing": framed(BYE, framing=2),
    "reserved bits": framed(BYE, zero=1),
    "empty meta": framed(b""),
    "no map": framed(msgspec.msgpack.encode([1, 2])),
    "no type": framed(msgspec.msgpack.encode({"step": 1})),
    "unknown type": framed(msgspec.msgpack.encode({"type": "exec", "code": "1"})),
    "missing field": framed(msgspec.msgpack.encode({"type": "fetch"})),
    "wrong field type": framed(msgspec.msgpack.encode({"type": "fetch", "step": "1"})),
    "trailing bytes in the meta": framed(BYE + b"\xc0"),
    "a negative offset": framed(msgspec.msgpack.encode({"type": "bytes", "segment": "a", "offset": -1}), 5),
    "a step below none": framed(msgspec.msgpack.encode({"type": "fetch", "step": -2})),
    "a number above 63 bits": framed(msgspec.msgpack.encode({"type": "fetch", "step": 2**63})),
    "an unfinished array": framed(b"\x82\xa4type\xa3bye\xa1x\xdd\xff\xff\xff\xff"),
    "nesting without end": framed(b"\x82\xa4type\xa3bye\xa1x" + b"\x91" * 60_000),
    "text that is not UTF-8": framed(b"\x82\xa4type\xa7trouble\xa4text\xa2\xff\xfe"),
    "a payload on a message that has none": framed(BYE, 3) + b"abc",
    "Hello after the handshake": wire((HELLO, b"")),
    "Welcome after the handshake": wire((HANDSHAKE_SAMPLES[4], b"")),
}  # fmt: skip


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_what_is_not_a_message_is_a_link_error_and_the_connection_is_dead(data: bytes) -> None:
    connection = opened()
    with pytest.raises(LinkError):
        feed(connection, data)
    for call in (connection.get_buffer, lambda: connection.received(0), connection.open):
        with pytest.raises(LinkError, match="failed before"):
            call()


BAD_NAMES = ["../run.json", "/etc/passwd", "a/../b", "a//b", ".b", "a/.b", "a/", "a\0b", "a\nb", "a\n", "x" * 1025, "a b"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_could_leave_the_folder_is_refused(name: str) -> None:
    for message in (m.Document(name), m.Bytes(name, 0), m.Frame(1, name, 0, 0, 0, 0)):
        with pytest.raises(LinkError, match="cannot be read"):
            feed(opened(), wire((message, b"")))


@pytest.mark.parametrize("run", ["../x", "a/b", "x" * 65, "a\n"])
def test_the_name_of_a_run_is_no_path(run: str) -> None:
    with pytest.raises(LinkError, match="cannot be read"):
        feed(Connection(Memory()), wire((m.Hello(1, run, "", 1, 1, 0, "train", {}), b"")))


def test_what_a_writer_says_of_itself_is_small_and_flat() -> None:
    for writer in ({str(i): i for i in range(65)}, {"x": {"y": 1}}, {"x": [1]}, {"k" * 65: 1}):
        with pytest.raises(LinkError, match="cannot be read"):
            feed(Connection(Memory()), wire((m.Hello(1, "r", "", 1, 1, 0, "train", writer), b"")))


def test_a_payload_that_the_sink_refuses_is_a_link_error() -> None:
    with pytest.raises(LinkError, match="not wanted"):
        feed(opened(refusing), wire((m.Document("a"), b"abc")))


@pytest.mark.parametrize("memory", [bytearray(2), bytearray(4), b"abc"], ids=["short", "long", "read-only"])
def test_memory_that_does_not_fit_the_payload_is_a_link_error(memory: bytes) -> None:
    with pytest.raises(LinkError, match="the memory for 3 bytes"):
        feed(opened(lambda message, n: memoryview(memory)), wire((m.Document("a"), b"abc")))


def test_a_sink_that_fails_kills_the_connection() -> None:
    def full(message: m.Message, num_bytes: int) -> memoryview:
        raise MemoryError("no room")

    connection = opened(full)
    with pytest.raises(MemoryError):
        feed(connection, wire((m.Document("a"), b"abc")))
    with pytest.raises(LinkError, match="no room"):
        connection.get_buffer()


# -- before the handshake is over -------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [s for s in SAMPLES if s not in HANDSHAKE_SAMPLES], ids=lambda s: type(s).__name__)
def test_before_the_handshake_is_over_there_is_nothing_but_the_handshake(message: m.Message) -> None:
    with pytest.raises(LinkError, match="before the handshake is over"):
        feed(Connection(Memory()), wire((message, b"")))


def test_before_the_handshake_is_over_there_are_no_payloads_and_no_large_messages() -> None:
    memory = Memory()
    for message in (HELLO, m.Bytes("a", 0)):
        with pytest.raises(LinkError, match="at most 65536 and 0 are accepted before the handshake is over"):
            feed(Connection(memory), framed(m.pack(message), 1)[:HEADER_BYTES])
    assert not memory.given
    assert peak_of(Connection(memory), framed(b"", claimed=MAX_HANDSHAKE_BYTES + 1)) < 100_000


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=50))
def test_nothing_behind_a_message_of_the_handshake_is_read_before_it_is_judged(sizes: list[int]) -> None:
    connection = Connection(Memory())
    welcome = HANDSHAKE_SAMPLES[5]
    rest: list[Sent] = [(m.Ack(1, 1, 1, 1, 1), b""), (m.Document("a"), b"abc")]
    stream, chunks, got = wire((welcome, b""), *rest), iter(sizes), []
    while not got:
        buffer = connection.get_buffer()
        n = min(len(buffer), next(chunks, 10_000))
        buffer[:n] = stream[:n]
        stream = stream[n:]
        got = connection.received(n)
    assert plain(got) == [(welcome, b"")]
    assert connection.handshake_meta == m.pack(welcome)
    assert stream == wire(*rest)
    connection.open()
    assert plain(feed(connection, stream)) == rest
    assert connection.handshake_meta == m.pack(welcome)


# -- damage on the way ------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*OPEN_SAMPLES, m.Trouble("x" * 5000)]), st.data())
def test_a_damaged_message_is_an_error_or_incomplete_never_another_message(message: m.Message, data: st.DataObject) -> None:
    payload = b"p" * 50 if isinstance(message, CARRIERS) else b""
    good = wire((message, payload))
    summed = len(good) - len(payload)
    bad = bytearray(good)
    for at in data.draw(st.lists(st.integers(0, summed - 1), min_size=1, max_size=4)):
        bad[at] ^= data.draw(st.integers(0, 255))
    connection = opened()
    try:
        got = plain(feed(connection, bytes(bad)))
    except LinkError:
        assert bad != good
    else:
        assert got in ([(message, payload)], [])
        assert (got == []) <= (bad != good)


@settings(max_examples=100, deadline=None)
@given(conversations(), st.lists(st.integers(1, 6000), max_size=100), st.data())
def test_what_came_before_the_damage_is_delivered(sent: list[Sent], sizes: list[int], data: st.DataObject) -> None:
    good, bad = wire(*sent), bytearray(wire((m.Ack(1, 2, 3, 4, 5), b"")))
    bad[data.draw(st.integers(0, HEADER_BYTES - 1))] ^= 1
    connection = opened()
    stream, got, chunks = good + bytes(bad), [], iter(sizes)
    with pytest.raises(LinkError):
        while stream:
            buffer = connection.get_buffer()
            n = min(len(buffer), len(stream), next(chunks, len(stream)))
            buffer[:n] = stream[:n]
            stream = stream[n:]
            got += drained(connection, n)
        connection.get_buffer()
    assert plain(got) == sent


@pytest.mark.parametrize("at", range(HEADER_BYTES - 8))
def test_a_damaged_header_is_found_without_waiting_for_what_it_claims(at: int) -> None:
    good = wire((m.Ack(1, 2, 3, 4, 5), b""))
    for bit in range(8):
        bad = bytearray(good[:HEADER_BYTES])
        bad[at] ^= 1 << bit
        with pytest.raises(LinkError):
            feed(opened(), bytes(bad))
