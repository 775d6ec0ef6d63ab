"""Random and mutated bytes into the server's end: no error but LinkError, bounded memory, nobody in without the token."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import xxhash
from link_samples import CARRIERS, HELLO, OPEN_SAMPLES, SAMPLES, Memory, drained

from everstep.errors import LinkError
from everstep.link import messages as m
from everstep.link.auth import ClientHandshake, ServerHandshake
from everstep.link.protocol import HEADER_BYTES, MAX_HANDSHAKE_BYTES, Connection, encode

TOKEN = b"the shadow's own secret"
SLACK_BYTES = 1 << 20
COUNTS = [pytest.param(2000, id="quick"), pytest.param(20_000, id="all", marks=pytest.mark.long)]
BOUND = 256 << 10
"""For meta and payload after the handshake."""


class Server:
    """What a shadow has of a client before it believes it: a connection and a handshake."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.connection = Connection(self.memory)
        self.handshake = ServerHandshake(TOKEN)
        self.said: list[m.Message] = []

    def take(self, data: bytes, rng: random.Random) -> None:
        """Bytes from the client, in random chunks. LinkError as soon as they are wrong."""
        at = 0
        while at < len(data):
            buffer = self.connection.get_buffer()
            n = min(len(buffer), len(data) - at, rng.choice((1, 7, 100, 5000)))
            buffer[:n] = data[at : at + n]
            at += n
            for got in drained(self.connection, n):
                reply = self.handshake.receive(got.message, self.connection.handshake_meta)
                if reply is not None:
                    self.said.append(reply)


def framed(meta: bytes, payload_bytes: int = 0) -> bytes:
    head = struct.pack("<4sHHQI", b"EVL1", 1, 0, payload_bytes, len(meta))
    head += struct.pack("<I", xxhash.xxh3_64_intdigest(head) & 0xFFFFFFFF)
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + meta)) + meta


# -- what an attacker sends -------------------------------------------------------------------------------------------


def anything(rng: random.Random, depth: int = 0) -> Any:
    """Some value that MessagePack can hold."""
    kind = rng.randrange(12 if depth < 3 else 8)
    if kind == 0:
        return rng.choice((0, 1, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, rng.getrandbits(20)))
    if kind == 1:
        return rng.choice((0.0, float("nan"), float("inf"), rng.random()))
    if kind == 2:
        return rng.choice((None, True, False))
    if kind in (3, 4):
        return rng.choice(("", "x", "../..", "/etc/passwd", "ü", "a\0b", "train", "x" * rng.choice((64, 65, 1024, 5000))))
    if kind in (5, 6):
        return rng.randbytes(rng.choice((0, 1, 31, 32, 33, 500)))
    if kind == 7:
        return msgspec.msgpack.Ext(rng.randrange(-128, 128), rng.randbytes(rng.choice((0, 4, 12, 16))))
    if kind in (8, 9):
        return [anything(rng, depth + 1) for _ in range(rng.choice((0, 1, 3, 100)))]
    names = [rng.choice(("type", "x", str(rng.random()))) for _ in range(rng.choice((0, 1, 3, 100)))]
    return {name: anything(rng, depth + 1) for name in names}


def wrong_fields(rng: random.Random) -> bytes:
    """A well-framed map that is nearly a message."""
    fields = msgspec.msgpack.decode(m.pack(rng.choice(SAMPLES)))
    for _ in range(rng.randrange(3)):
        name = rng.choice([*fields, "new"])
        if rng.random() < 0.3 and name in fields:
            del fields[name]
        else:
            fields[name] = anything(rng)
    return framed(msgspec.msgpack.encode(fields), rng.choice((0, 0, 0, 0, 1, 100, 2**30, 2**60)))


def wrong_meta(rng: random.Random) -> bytes:
    """Well-framed bytes that may not even be MessagePack, up to the bound: huge claims, deep nesting."""
    meta = bytearray(m.pack(rng.choice(SAMPLES)))
    kind = rng.randrange(4)
    if kind == 0:
        return framed(mutated(bytes(meta), rng))
    if kind == 1:
        return framed(rng.randbytes(rng.randrange(300)))
    start = b"\x82\xa4type\xa5hello\xa6writer" if rng.random() < 0.5 else b"\x82\xa4type\xa3bye\xa1x"
    if kind == 2:
        nested = rng.choice((b"\x91", b"\x81\xa1x", b"\x81\x90", b"\xdd" + b"\xff" * 4, b"\xdf" + b"\xff" * 4))
        return framed(start + nested * 5000)
    many = rng.choice((b"\x90", b"\x80", b"\xc0", b"\x00", b"\xa0")) * (MAX_HANDSHAKE_BYTES - 100)
    return framed(start + b"\xdc\xff\x00" + many)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The same with some bytes changed, removed, doubled or put in."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            out[at:at] = rng.randbytes(rng.randrange(1, 40))
        elif kind == 1:
            del out[at : at + rng.randrange(1, 40)]
        elif kind == 2:
            out[at:at] = out[at : at + rng.randrange(1, 200)]
        elif at < len(out):
            out[at] = rng.choice((0, 255, out[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
    return bytes(out)


def overheard() -> list[bytes]:
    """What a client with the right token says in another connection, message by message."""
    client, server = ClientHandshake(HELLO, TOKEN), ServerHandshake(TOKEN)
    hello = client.start()
    challenge = server.receive(hello, m.pack(hello))
    assert challenge is not None
    proof = client.receive(challenge)
    assert proof is not None
    assert server.receive(proof, m.pack(proof)) is None
    assert server.is_proven, "these bytes do open the connection that they were made for"
    rest = [encode(s, 10) + b"0123456789" if isinstance(s, CARRIERS) else encode(s) for s in OPEN_SAMPLES]
    return [encode(hello), encode(proof), *rest]


def attacks() -> list[Callable[[random.Random], bytes]]:
    heard = overheard()
    whole = b"".join(heard)
    return [
        lambda rng: rng.randbytes(rng.randrange(600)),
        lambda rng: b"EVL1" + rng.randbytes(rng.randrange(600)),
        lambda rng: mutated(whole, rng),
        lambda rng: b"".join(rng.choices(heard, k=rng.randrange(1, 6))),
        lambda rng: heard[0] + b"".join(rng.choices(heard, k=rng.randrange(1, 4))),
        lambda rng: wrong_fields(rng) + wrong_fields(rng),
        lambda rng: heard[0] + wrong_fields(rng),
        wrong_meta,
        lambda rng: heard[0] + wrong_meta(rng),
        lambda rng: heard[0] + encode(m.Proof(rng.randbytes(32), rng.randbytes(32))) + heard[2],
    ]


# -- what must hold ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
def test_no_bytes_get_past_the_handshake_without_the_token(count: int) -> None:
    rng = random.Random(count)
    makers = attacks()
    errors = 0
    for i in range(count):
        data = makers[i % len(makers)](rng)
        server = Server()
        try:
            server.take(data, rng)
        except LinkError:
            errors += 1
        assert not server.handshake.is_proven, data
        assert not server.connection.is_open
        assert not server.memory.given, "no payload is accepted from who has not proven itself"
        assert all(isinstance(said, m.Challenge | m.Refused) for said in server.said)
    assert errors > count // 2


@pytest.mark.parametrize("count", COUNTS)
def test_a_stranger_costs_bounded_memory(count: int) -> None:
    rng = random.Random(-count)
    makers = attacks()
    count //= 4  # tracing is slow
    tracemalloc.start()
    try:
        for i in range(count):
            data = makers[i % len(makers)](rng)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            server = Server()
            with contextlib.suppress(LinkError):
                server.take(data, rng)
            used = tracemalloc.get_traced_memory()[1] - before
            assert used < MAX_HANDSHAKE_BYTES + SLACK_BYTES, (used, data[:200])
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("count", COUNTS)
def test_a_peer_gone_wrong_after_the_handshake_causes_nothing_but_link_errors(count: int) -> None:
    rng = random.Random(count + 1)
    good = [encode(s, 10) + b"0123456789" if isinstance(s, CARRIERS) else encode(s) for s in OPEN_SAMPLES]
    makers: list[Callable[[random.Random], bytes]] = [
        lambda rng: mutated(b"".join(rng.choices(good, k=8)), rng),
        lambda rng: b"".join(rng.choices(good, k=3)) + wrong_fields(rng),
        lambda rng: wrong_fields(rng) + rng.randbytes(rng.randrange(200)),
        wrong_meta,
    ]
    delivered = errors = 0
    for i in range(count):
        data = makers[i % len(makers)](rng)
        memory = Memory()
        connection = Connection(memory, max_meta=BOUND, max_payload=BOUND)
        connection.open()
        at = 0
        try:
            while at < len(data):
                buffer = connection.get_buffer()
                n = min(len(buffer), len(data) - at)
                buffer[:n] = data[at : at + n]
                at += n
                for got in drained(connection, n):
                    delivered += 1
                    assert m.unpack(m.pack(got.message)) == got.message
        except LinkError:
            errors += 1
        assert sum(map(len, memory.given)) <= BOUND + len(data)
    assert delivered > count // 2
    assert errors > count // 2


def test_a_stranger_that_claims_much_and_sends_nothing_costs_nothing() -> None:
    tracemalloc.start()
    try:
        servers = []
        for _ in range(50):
            server = Server()
            server.take(framed(bytes(MAX_HANDSHAKE_BYTES))[:HEADER_BYTES], random.Random(0))
            servers.append(server)
        assert tracemalloc.get_traced_memory()[1] < 50 * (MAX_HANDSHAKE_BYTES + 20_000)
    finally:
        tracemalloc.stop()
