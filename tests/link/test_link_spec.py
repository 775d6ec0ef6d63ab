"""docs/link.md is enough to write a peer from: this one uses nothing of Everstep."""

from __future__ import annotations

import hashlib
import hmac
import re
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import xxhash
from link_samples import HELLO, SEGMENT, Memory

from everstep.link import messages as m
from everstep.link.protocol import MAX_HANDSHAKE_BYTES, MAX_META_BYTES, MAX_PAYLOAD_BYTES, encode
from everstep.link.sockets import Channel, admit, introduce, listen_to

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "link.md").read_text()
TOKEN = b"sixteen bytes or more"


class SpecPeer:
    """Either end of a link, as the page says it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(20)
        self.sock = sock

    def say(self, type_: str, payload: bytes = b"", **fields: Any) -> bytes:
        meta: bytes = msgspec.msgpack.encode({**fields, "type": type_})
        head = b"EVL1" + struct.pack("<HHQI", 1, 0, len(payload), len(meta))
        head += struct.pack("<I", xxhash.xxh3_64_intdigest(head) & 0xFFFFFFFF)
        self.sock.sendall(head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + meta)) + meta + payload)
        return meta

    def hear(self) -> tuple[dict[str, Any], bytes, bytes]:
        """Fields, meta, payload."""
        head = self.take(32)
        magic, framing, zero, payload_bytes, meta_bytes, low, whole = struct.unpack("<4sHHQIIQ", head)
        assert (magic, framing, zero) == (b"EVL1", 1, 0)
        assert low == xxhash.xxh3_64_intdigest(head[:20]) & 0xFFFFFFFF
        meta = self.take(meta_bytes)
        assert whole == xxhash.xxh3_64_intdigest(head[:24] + meta)
        return msgspec.msgpack.decode(meta), meta, self.take(payload_bytes)

    def take(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            more = self.sock.recv(n - len(data))
            assert more, "the other end closed the connection"
            data += more
        return data


def mac_of(who: bytes, *said: bytes) -> bytes:
    return hmac.new(TOKEN, b"everstep link " + who + b" 1\0" + b"".join(said), hashlib.sha256).digest()


@pytest.fixture
def ends() -> Iterator[tuple[Channel, SpecPeer]]:
    ours, theirs = socket.socketpair()
    with Channel(ours, Memory()) as channel, theirs:
        yield channel, SpecPeer(theirs)


def test_a_client_written_from_the_page_is_let_in_and_understood(ends: tuple[Channel, SpecPeer]) -> None:
    channel, peer = ends

    def serve() -> list[Any]:
        handshake = listen_to(channel, TOKEN)
        assert handshake.hello.writer == {"host": "a"}
        admit(channel, handshake, generation=3, step=4)
        got: list[Any] = []
        while len(got) < 2:
            got += channel.receive(20)
        channel.send(m.State(5, 3, 1, True, "", 7), b"{}")
        return got

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        hello = peer.say("hello", version=m.VERSION, run="0a", path="/r", timeline=1, generation=3, rank=0, purpose="train",
                         writer={"host": "a"}, colour="a field of the future")  # fmt: skip
        challenge = peer.hear()[0]
        assert challenge["type"] == "challenge"
        said = (challenge["nonce"], bytes(32), hello)
        peer.say("proof", nonce=bytes(32), mac=mac_of(b"client", *said))
        welcome = peer.hear()[0]
        assert (welcome["type"], welcome["generation"], welcome["step"]) == ("welcome", 3, 4)
        assert welcome["mac"] == mac_of(b"server", *said)
        peer.say("bytes", b"some bytes of the log", segment="g000003-000000000005.frames", offset=4096)
        peer.say("frame", step=5, segment="x", offset=4096, footer_offset=4100, end_offset=8192, watermark=-1)
        fields, _, payload = peer.hear()
        assert (fields["type"], fields["num_bytes"], payload) == ("state", 7, b"{}")
        [sent, frame] = served.result(20)
    assert sent.message == m.Bytes("g000003-000000000005.frames", 4096)
    assert sent.payload == b"some bytes of the log"
    assert frame.message == m.Frame(5, "x", 4096, 4100, 8192, -1)


def test_a_server_written_from_the_page_is_believed_and_understood(ends: tuple[Channel, SpecPeer]) -> None:
    channel, peer = ends
    with ThreadPoolExecutor(1) as pool:
        introduced = pool.submit(introduce, channel, HELLO, TOKEN)
        hello, meta, _ = peer.hear()
        assert hello["purpose"] == "train"
        nonce = bytes(range(32))
        peer.say("challenge", nonce=nonce)
        proof = peer.hear()[0]
        assert proof["mac"] == mac_of(b"client", nonce, proof["nonce"], meta)
        mac = mac_of(b"server", nonce, proof["nonce"], meta)
        peer.say("welcome", mac=mac, generation=7, step=1, received=2, base=0, segment="", offset=0, pid=3)
        assert introduced.result(20).received == 2
    channel.send(m.Bytes(SEGMENT, 64), b"abc", b"def")
    assert peer.hear()[0] == {"type": "bytes", "segment": SEGMENT, "offset": 64}
    peer.say("ack", received=1, folded=1, base=0, durable=-1, proven=0)
    assert [r.message for r in channel.receive(20)] == [m.Ack(1, 1, 0, -1, 0)]


def test_the_page_lists_every_message_with_its_fields_and_payload() -> None:
    rows = {r[0]: r for r in re.findall(r"^\| `(\w+)` \| ([CS ]+) \| (.*?) \| (.*?)\|$", PAGE, re.MULTILINE)}
    assert list(rows) == [t.__name__.lower() for t in get_args(m.Message)]
    for type_ in get_args(m.Message):
        _, _, fields, payload = rows[type_.__name__.lower()]
        listed = [name.strip() for part in fields.split(" · ") if ":" in part for name in part.split(":")[0].split(",")]
        assert listed == list(type_.__struct_fields__), type_.__name__
        assert bool(payload.strip()) == (type_ in m.PAYLOADS), type_.__name__


def test_the_message_in_the_page_is_what_is_sent() -> None:
    page = PAGE[PAGE.index("## A message, byte by byte") :]
    shown = "".join(re.findall(r"^    ((?:[0-9a-f]{2} )*[0-9a-f]{2})(?:   .*)?$", page, re.MULTILINE))
    assert bytes.fromhex(shown) == encode(m.Ack(12, 11, 8, -1, 9))


def test_the_bounds_in_the_page_are_those_in_force() -> None:
    assert (MAX_HANDSHAKE_BYTES, MAX_META_BYTES, MAX_PAYLOAD_BYTES) == (64 << 10, 16 << 20, 1 << 30)
    assert "| meta | 64 KiB | 16 MiB |" in PAGE
    assert "| payload | none | 1 GiB |" in PAGE
