"""Links over real sockets."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import ssl
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from link_samples import HELLO, SEGMENT, Memory

from everstep.errors import LinkClosed, LinkError, LinkRefused, UsageError
from everstep.link import messages as m
from everstep.link.addresses import (
    Address,
    accept,
    client_context,
    connect,
    is_loopback,
    listen,
    must_have_token,
    parse_address,
    serve_tls,
    server_context,
)
from everstep.link.sockets import Channel, admit, introduce, listen_to, refuse

TOKEN = b"0123456789abcdef"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Two ends of one link, open. The second one's memory is in `sink`."""
    a, b = socket.socketpair()
    one, two = Channel(a, Memory()), Channel(b, Memory())
    one.connection.open()
    two.connection.open()
    with one, two:
        yield one, two


def memory_of(channel: Channel) -> Memory:
    sink = channel.connection._sink
    assert isinstance(sink, Memory)
    return sink


# -- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://node-1.example:7070", Address("node-1.example", 7070)),
        ("tcp://[::1]:7070", Address("::1", 7070)),
        ("127.0.0.1:0", Address("127.0.0.1", 0)),
        ("unix:///run/user/1000/shadow.sock", Address(path="/run/user/1000/shadow.sock")),
    ],
)
def test_addresses_are_read_and_written(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "tcp://", "tcp://host", "tcp://host:", "tcp://host:70000", "tcp://:7070", "tcp://a b:1", "unix://x", "unix://",
             "http://host:80", "tcp://host:7070/x", "tcp://host:-1", "tcp://host:7070\n", "unix:///a\0b"]
)  # fmt: skip
def test_what_is_no_address_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="is no address"):
        parse_address(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_on_loopback_no_token_is_needed(host: str) -> None:
    assert is_loopback(host)
    must_have_token(host, None)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "node-1", "localhost.example", "127.0.0.1.example"])
def test_beyond_loopback_a_token_is_needed(host: str) -> None:
    for token in (None, b"", ""):
        with pytest.raises(UsageError, match="needs a token"):
            must_have_token(host, token)
    must_have_token(host, TOKEN)


# -- Unix sockets -----------------------------------------------------------------------------------------------------


def test_a_unix_socket_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "s"
    old = os.umask(0)
    try:
        with listen(f"unix://{path}"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(old)


def test_the_socket_of_a_dead_shadow_is_replaced_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/s"
    with listen(address):
        with pytest.raises(LinkError, match="another process listens"):
            listen(address)
        connect(address).close()
    assert (tmp_path / "s").exists()
    with pytest.raises(LinkClosed, match="no shadow answers"):
        connect(address)
    with listen(address):
        connect(address).close()
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(UsageError, match="is no socket"):
        listen(f"unix://{tmp_path}/s")
    assert (tmp_path / "s").read_text() == "precious"


def test_of_many_that_start_at_once_exactly_one_listens(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    address = f"unix://{tmp_path}/s"
    listen(address).close()
    start = threading.Barrier(8)

    def try_to_listen() -> socket.socket | None:
        start.wait(10)
        with contextlib.suppress(LinkError):
            return listen(address)
        return None

    sockets = [s for s in [f.result() for f in [pool.submit(try_to_listen) for _ in range(8)]] if s is not None]
    try:
        assert len(sockets) == 1
        connect(address).close()
    finally:
        for s in sockets:
            s.close()


def test_a_path_too_long_for_a_socket_is_a_usage_error() -> None:
    for call in (listen, connect):
        with pytest.raises(UsageError, match="too long"):
            call("unix:///" + "x" * 200)


def test_listening_where_one_cannot_is_a_link_error(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="cannot listen"):
        listen(f"unix://{tmp_path}/none/s")
    with listen("127.0.0.1:0") as taken, pytest.raises(LinkError, match="cannot listen"):
        listen(Address(*taken.getsockname()))


# -- the whole way ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["unix", "tcp", "tls"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ssl.SSLContext | None, ssl.SSLContext | None]:
    """Address to listen at, TLS of server and client."""
    if request.param == "unix":
        return f"unix://{tmp_path}/s", None, None
    if request.param == "tcp":
        return "tcp://127.0.0.1:0", None, None
    certificate, key = certificate_for("127.0.0.1", tmp_path)
    return "tcp://127.0.0.1:0", server_context(certificate, key), client_context(certificate)


def certificate_for(host: str, folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl command to make a certificate with")
    certificate, key = folder / f"{host}.pem", folder / f"{host}.key"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", key, "-out", certificate, "-subj", "/CN=everstep", "-addext", f"subjectAltName=IP:{host}"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return certificate, key


def address_of(listener: socket.socket) -> Address:
    name = listener.getsockname()
    return Address(path=name) if isinstance(name, str) else Address(name[0], name[1])


Served = Callable[[Channel], Any]


def serve(
    pool: ThreadPoolExecutor, listener: socket.socket, context: ssl.SSLContext | None, work: Served, sink: Any = None
) -> Future[Any]:
    def one() -> Any:
        sock = accept(listener)
        if context is not None:
            sock = serve_tls(sock, context)
        with Channel(sock, sink or Memory()) as channel:
            return work(channel)

    return pool.submit(one)


@pytest.mark.parametrize("token", [None, TOKEN], ids=["open", "token"])
def test_a_trainer_and_a_shadow_meet_and_talk(way: Any, token: bytes | None, pool: ThreadPoolExecutor) -> None:
    where, server_tls, client_tls = way

    def shadow(channel: Channel) -> bytes:
        handshake = listen_to(channel, token)
        admit(channel, handshake, generation=handshake.hello.generation, step=100, received=101)
        channel.send(m.Ack(0, 0, 0, 0, 0))
        got = []
        while not got or got[-1].message != m.Close(True):
            got += channel.receive(10)
        channel.send(m.Bye())
        assert [type(r.message) for r in got] == [m.Bytes, m.Frame, m.Close]
        assert got[0].payload is not None
        return bytes(got[0].payload)

    with listen(where) as listener:
        served = serve(pool, listener, server_tls, shadow)
        sock = connect(address_of(listener), ssl_context=client_tls)
        with Channel(sock, Memory()) as channel:
            welcome = introduce(channel, HELLO, token)
            assert (welcome.generation, welcome.step, welcome.received) == (7, 100, 101)
            channel.send(m.Bytes(SEGMENT, 0), b"abc", memoryview(b"def"), bytearray(), bytearray(b"ghi"))
            channel.send(m.Frame(1, SEGMENT, 0, 0, 9, -1))
            channel.send(m.Close(True))
            got = []
            while len(got) < 2:
                got += channel.receive(10)
            assert [r.message for r in got] == [m.Ack(0, 0, 0, 0, 0), m.Bye()]
            assert served.result(10) == b"abcdefghi"
            with pytest.raises(LinkClosed, match="other end closed"):
                channel.receive(10)


def test_a_hundred_megabytes_go_through_a_slow_reader_unchanged(way: Any, pool: ThreadPoolExecutor) -> None:
    where, server_tls, client_tls = way
    size = 100 << 20
    block = os.urandom(1 << 20)
    memory = bytearray(size)

    def shadow(channel: Channel) -> list[Any]:
        admit(channel, listen_to(channel))
        got = []
        for _ in range(20):
            got += channel.receive(0)
            time.sleep(0.005)
        return got or channel.receive(60)

    with listen(where) as listener:
        served = serve(pool, listener, server_tls, shadow, lambda message, n: memoryview(memory)[:n])
        with Channel(connect(address_of(listener), ssl_context=client_tls), Memory()) as channel:
            introduce(channel, HELLO)
            parts = [memoryview(block)[i * 300 : i * 300 + 300] for i in range(3000)]  # more parts than one call takes
            parts += [memoryview(block)] * 99 + [memoryview(block)[900_000:]]
            total = sum(len(p) for p in parts)
            channel.send(m.Bytes(SEGMENT, 0), *parts, timeout=30)
            [received] = served.result(60)
    expected = block[:900_000] + block * 99 + block[900_000:]
    assert received.payload is not None
    assert len(received.payload) == total == len(expected)
    assert received.payload == expected


def test_sending_copies_nothing(pair: tuple[Channel, Channel], pool: ThreadPoolExecutor) -> None:
    import tracemalloc

    one, two = pair
    tensor = memoryview(bytearray(64 << 20))
    memory = bytearray(64 << 20)
    two.connection._sink = lambda message, n: memoryview(memory)
    tracemalloc.start()
    try:
        sent = pool.submit(one.send, m.Region(0, 0), tensor)
        assert two.receive(30)
        sent.result(30)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_tensors_are_sent_and_received_as_they_are(pair: tuple[Channel, Channel], pool: ThreadPoolExecutor) -> None:
    import torch

    one, two = pair
    tensors = [torch.arange(12.0).reshape(3, 4), torch.zeros(0, 3), torch.arange(5, dtype=torch.int16)]
    one.send(m.Region(0, 0), *[memoryview(t.numpy()) for t in tensors])
    [got] = two.receive(10)
    assert got.payload == b"".join(t.numpy().tobytes() for t in tensors)


# -- several threads, ends and time -----------------------------------------------------------------------------------


def test_messages_of_several_senders_do_not_mix(pair: tuple[Channel, Channel], pool: ThreadPoolExecutor) -> None:
    one, two = pair

    def send(who: int) -> None:
        for i in range(50):
            one.send(m.Region(who, i), bytes([who]) * 7001, bytes([who]) * 3000)

    sending = [pool.submit(send, who) for who in range(4)]
    got = []
    while len(got) < 200:
        got += two.receive(10)
    for s in sending:
        s.result(10)
    for who in range(4):
        assert [r.message for r in got if r.message.index == who] == [m.Region(who, i) for i in range(50)]
    assert all(r.payload == bytes([r.message.index]) * 10_001 for r in got)


def test_both_directions_run_at_the_same_time(way: Any, pool: ThreadPoolExecutor) -> None:
    where, server_tls, client_tls = way
    data = os.urandom(3 << 20)

    def both(channel: Channel) -> bool:
        sending = pool.submit(lambda: [channel.send(m.Region(0, i), data) for i in range(4)])
        got = []
        while len(got) < 4:
            got += channel.receive(20)
        sending.result(20)
        return all(r.payload == data for r in got)

    def shadow(channel: Channel) -> bool:
        admit(channel, listen_to(channel))
        return both(channel)

    with listen(where) as listener:
        served = serve(pool, listener, server_tls, shadow)
        with Channel(connect(address_of(listener), ssl_context=client_tls), Memory()) as channel:
            introduce(channel, HELLO)
            assert both(channel)
            assert served.result(20)


def test_receive_returns_nothing_at_its_timeout_and_goes_on_afterwards(pair: tuple[Channel, Channel]) -> None:
    one, two = pair
    start = time.monotonic()
    assert two.receive(0.05) == []
    assert two.receive(0) == []
    assert 0.04 < time.monotonic() - start < 5
    one.send(m.Bye())
    assert [r.message for r in two.receive(0)] == [m.Bye()]


def test_a_send_that_cannot_go_on_times_out_and_the_connection_is_over(pair: tuple[Channel, Channel]) -> None:
    one, _ = pair
    with pytest.raises(LinkClosed, match=r"nothing could be sent for 0\.1 s"):
        one.send(m.Region(0, 0), bytes(64 << 20), timeout=0.1)
    with pytest.raises(LinkClosed, match="this connection is over"):
        one.send(m.Bye())


def test_an_end_in_the_middle_of_a_message_is_told_from_a_clean_one(pool: ThreadPoolExecutor) -> None:
    from everstep.link.protocol import encode

    for cut, words in ((0, "closed the connection$"), (5, "in the middle"), (40, "in the middle"), (-1, "in the middle")):
        a, b = socket.socketpair()
        with Channel(b, Memory()) as channel:
            channel.connection.open()
            a.sendall((encode(m.Region(0, 0), 1000) + bytes(1000))[:cut])
            a.close()
            with pytest.raises(LinkClosed, match=words):
                channel.receive(10)


def test_close_wakes_who_receives_and_who_sends(pool: ThreadPoolExecutor) -> None:
    a, b = socket.socketpair()
    one, two = Channel(a, Memory()), Channel(b, Memory())
    one.connection.open()
    receiving = pool.submit(one.receive)
    sending = pool.submit(one.send, m.Region(0, 0), bytes(64 << 20))
    time.sleep(0.1)
    assert not receiving.done()
    assert not sending.done()
    one.close()
    for waiting in (receiving, sending):
        with pytest.raises(LinkClosed):
            waiting.result(10)
    assert one.fileno() == -1, "the descriptor is given back when the last one has left"
    one.close()
    with pytest.raises(LinkClosed, match="closed here"):
        one.receive()
    two.close()


def test_a_peer_that_is_gone_is_a_closed_link(pair: tuple[Channel, Channel]) -> None:
    one, two = pair
    two.close()
    with pytest.raises(LinkClosed, match="lost while sending"):
        for _ in range(100):
            one.send(m.Region(0, 0), bytes(100_000))


def test_bytes_that_are_no_messages_are_a_link_error(pair: tuple[Channel, Channel]) -> None:
    one, two = pair
    one._sock.send(b"SSH-2.0-OpenSSH_9.9 and some more bytes\r\n")
    with pytest.raises(LinkError, match="something else at the other end"):
        two.receive(10)
    with pytest.raises(LinkError, match="failed before"):
        two.receive(10)


# -- the handshake over a socket --------------------------------------------------------------------------------------


def shake(pool: ThreadPoolExecutor, server: Served, client: Served) -> tuple[Future[Any], Future[Any]]:
    a, b = socket.socketpair()

    def run(sock: socket.socket, work: Served) -> Any:
        with Channel(sock, Memory()) as channel:
            return work(channel)

    return pool.submit(run, a, server), pool.submit(run, b, client)


def test_a_client_with_another_token_is_turned_away(pool: ThreadPoolExecutor) -> None:
    server, client = shake(pool, lambda c: listen_to(c, TOKEN), lambda c: introduce(c, HELLO, b"another"))
    with pytest.raises(LinkError, match="a client was refused: the token is wrong"):
        server.result(10)
    with pytest.raises(LinkRefused, match="the token is wrong"):
        client.result(10)


def test_a_refused_client_learns_why(pool: ThreadPoolExecutor) -> None:
    def no(channel: Channel) -> None:
        refuse(channel, listen_to(channel), "generation 6 is over")

    server, client = shake(pool, no, lambda c: introduce(c, HELLO))
    server.result(10)
    with pytest.raises(LinkRefused, match="generation 6 is over"):
        client.result(10)


def test_a_client_that_says_nothing_or_too_little_is_dropped_in_time(pool: ThreadPoolExecutor) -> None:
    def drip(channel: Channel) -> None:
        with contextlib.suppress(OSError):
            for byte in b"EVL1" + bytes(1000):
                channel._sock.send(bytes([byte]))
                time.sleep(0.02)

    start = time.monotonic()
    server, client = shake(pool, lambda c: listen_to(c, TOKEN, timeout=0.2), drip)
    with pytest.raises(LinkClosed, match="did not finish the handshake in time"):
        server.result(10)
    assert time.monotonic() - start < 5
    client.result(10)


# -- TLS --------------------------------------------------------------------------------------------------------------


def tls_error(pool: ThreadPoolExecutor, server: ssl.SSLContext, client: ssl.SSLContext | None) -> tuple[Any, Any]:
    """What both ends say when they meet."""
    with listen("127.0.0.1:0") as listener:
        served = serve(pool, listener, server, listen_to)
        try:
            with Channel(connect(address_of(listener), ssl_context=client), Memory()) as channel:
                introduce(channel, HELLO, timeout=5)
        except LinkError as e:
            mine: Any = e
        return served.exception(10), mine


def test_a_certificate_that_is_not_trusted_is_refused(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    (tmp_path / "other").mkdir()
    certificate, key = certificate_for("127.0.0.1", tmp_path)
    other, _ = certificate_for("127.0.0.1", tmp_path / "other")
    for context in (client_context(other), client_context()):
        theirs, mine = tls_error(pool, server_context(certificate, key), context)
        assert isinstance(theirs, LinkError)
        assert "no trustworthy TLS" in str(mine)


def test_a_certificate_of_another_host_is_refused_unless_it_is_named(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    certificate, key = certificate_for("127.0.0.9", tmp_path)
    _, mine = tls_error(pool, server_context(certificate, key), client_context(certificate))
    assert "no trustworthy TLS" in str(mine)
    with listen("127.0.0.1:0") as listener:
        served = serve(pool, listener, server_context(certificate, key), lambda c: admit(c, listen_to(c)))
        sock = connect(address_of(listener), ssl_context=client_context(certificate), server_hostname="127.0.0.9")
        with Channel(sock, Memory()) as channel:
            introduce(channel, HELLO)
        served.result(10)


def test_a_client_without_tls_gets_nowhere_with_a_server_that_has_it(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    certificate, key = certificate_for("127.0.0.1", tmp_path)
    theirs, mine = tls_error(pool, server_context(certificate, key), None)
    assert "without valid TLS" in str(theirs)
    assert isinstance(mine, LinkError)


def test_old_versions_of_tls_are_not_spoken(tmp_path: Path) -> None:
    certificate, key = certificate_for("127.0.0.1", tmp_path)
    for context in (server_context(certificate, key), client_context(certificate), client_context()):
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert client_context(certificate).check_hostname
    assert client_context(certificate).verify_mode is ssl.CERT_REQUIRED


def test_a_certificate_that_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    for file in (tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(UsageError, match="cannot use the certificate"):
            server_context(file)
        with pytest.raises(UsageError, match="cannot use the certificate"):
            client_context(file)


def test_tcp_sockets_do_not_wait_to_fill_packets() -> None:
    with listen("127.0.0.1:0") as listener, connect(address_of(listener)) as one, accept(listener) as two:
        for sock in (one, two):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    with pytest.raises(LinkClosed, match=os.strerror(errno.ECONNREFUSED)):
        connect("127.0.0.1:1")
