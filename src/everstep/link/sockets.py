"""Links over connected sockets: Unix, TCP, TLS. The one place of this package that does I/O.

Sockets are set to non-blocking and waited for with poll, so that one thread can send while another receives, also over
TLS, whose objects two threads must not use at the same moment.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator

from everstep.errors import LinkClosed, LinkError
from everstep.link.auth import ClientHandshake, ServerHandshake
from everstep.link.messages import Hello, Message, Welcome
from everstep.link.protocol import MAX_META_BYTES, MAX_PAYLOAD_BYTES, Connection, Received, Sink, encode

_MAX_PARTS = min(os.sysconf("SC_IOV_MAX") if "SC_IOV_MAX" in os.sysconf_names else 1024, 1024)
_TLS_PART_BYTES = 256 << 10
_HANDSHAKE_S = 10.0


class Channel:
    """One end of a link over a connected socket, which it owns from here on.

    One thread may receive while others send and another closes; messages of several senders do not mix.
    """

    def __init__(
        self, sock: socket.socket, sink: Sink, *, max_meta: int = MAX_META_BYTES, max_payload: int = MAX_PAYLOAD_BYTES
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self.connection = Connection(sink, max_meta=max_meta, max_payload=max_payload)
        self._sending = threading.Lock()
        self._tls_call = threading.Lock()
        self._state = threading.Lock()
        self._users = 0
        self._closed = ""
        self.sent_bytes = 0
        self.received_bytes = 0

    def fileno(self) -> int:
        """For poll; -1 when closed. Ask `has_pending` first."""
        return self._sock.fileno()

    def has_pending(self) -> bool:
        """Whether there are messages, or bytes held by TLS, that poll does not see: then `receive(0)` before waiting."""
        if self.connection.has_more:
            return True
        if self._tls is None or self._tls.fileno() < 0:
            return False
        with self._tls_call:
            return self._tls.pending() > 0

    def send(self, message: Message, *parts: bytes | bytearray | memoryview, timeout: float | None = None) -> None:
        """Send a message and its payload, without copying. On return the parts may be changed again.

        It is then with the kernel, which does not mean that it arrived. LinkClosed when the connection is gone, or when
        nothing at all could be sent for `timeout` seconds; the connection is then closed, since half a message may be out.
        """
        views = [memoryview(p).cast("B") for p in parts if memoryview(p).nbytes]
        head = encode(message, sum(v.nbytes for v in views))
        with self._sending, self._in_use():
            try:
                self._send_all([memoryview(head), *views], timeout)
            except OSError as e:
                self._shut(f"sending failed: {e}")
                raise LinkClosed(f"the connection was lost while sending {type(message).__name__}: {e}") from e
            except BaseException as e:
                self._shut(f"sending failed: {e}")
                raise

    def receive(self, timeout: float | None = None) -> list[Received]:
        """The next messages; none if nothing became complete within `timeout` seconds (None: for ever).

        LinkClosed at the end of the stream, LinkError for bytes that are no messages; close the channel then.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._in_use():
            done = self.connection.received(0) if self.connection.has_more else []
            while not done:
                n = self._receive_some(deadline)
                if n is None:
                    return []
                self.received_bytes += n
                done = self.connection.received(n)
            return done

    def close(self) -> None:
        """End the connection at once and wake whoever sends or receives. From any thread, any number of times."""
        self._shut("closed here")

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the socket -----------------------------------------------------------------------------------------------------

    def _send_all(self, views: list[memoryview], timeout: float | None) -> None:
        first = 0
        while first < len(views):
            sent = self._send_some(views[first : first + _MAX_PARTS], timeout)
            self.sent_bytes += sent
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent:
                views[first] = views[first][sent:]

    def _send_some(self, views: list[memoryview], timeout: float | None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                if self._tls is None:
                    return self._sock.sendmsg(views)
                with self._tls_call:
                    return self._tls.send(views[0][:_TLS_PART_BYTES])
            except (BlockingIOError, ssl.SSLWantWriteError):
                ready = self._wait(select.POLLOUT, deadline)
            except ssl.SSLWantReadError:
                ready = self._wait(select.POLLIN, deadline)
            if not ready:
                raise TimeoutError(f"nothing could be sent for {timeout} s")

    def _receive_some(self, deadline: float | None) -> int | None:
        """Bytes put into the connection's buffer; None if the deadline passed."""
        buffer = self.connection.get_buffer()
        while True:
            try:
                if self._tls is None:
                    n = self._sock.recv_into(buffer)
                else:
                    with self._tls_call:
                        n = self._tls.recv_into(buffer)
            except (BlockingIOError, ssl.SSLWantReadError):
                ready = self._wait(select.POLLIN, deadline)
            except ssl.SSLWantWriteError:
                ready = self._wait(select.POLLOUT, deadline)
            except OSError as e:
                raise LinkClosed(f"the connection was lost: {e}") from e
            else:
                if n:
                    return n
                where = "" if self.connection.is_between_messages else " in the middle of a message"
                raise LinkClosed(self._closed or f"the other end closed the connection{where}")
            if not ready:
                return None

    def _wait(self, event: int, deadline: float | None) -> bool:
        """Until the socket is ready, or has an error that the next call will show. False if the deadline passed."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        poll = select.poll()
        poll.register(self._sock, event)
        return bool(poll.poll(left))

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """The descriptor is not given back to the system, and so to another file, while a thread uses it."""
        with self._state:
            if self._closed:
                raise LinkClosed(f"this connection is over: {self._closed}")
            self._users += 1
        try:
            yield
        finally:
            with self._state:
                self._users -= 1
                if self._closed and not self._users:
                    self._sock.close()

    def _shut(self, why: str) -> None:
        with self._state:
            if not self._closed:
                self._closed = why
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
            if not self._users:
                self._sock.close()


# -- the handshake over a channel -------------------------------------------------------------------------------------------


def introduce(channel: Channel, hello: Hello, token: bytes | None = None, *, timeout: float = _HANDSHAKE_S) -> Welcome:
    """Client: the whole handshake. LinkRefused if the server says no; LinkError if it is not to be trusted."""
    deadline = time.monotonic() + timeout
    handshake = ClientHandshake(hello, token)
    channel.send(handshake.start(), timeout=timeout)
    while handshake.welcome is None:
        reply = handshake.receive(_one(channel, deadline))
        if reply is not None:
            channel.send(reply, timeout=timeout)
    channel.connection.open()
    return handshake.welcome


def listen_to(channel: Channel, token: bytes | None = None, *, timeout: float = _HANDSHAKE_S) -> ServerHandshake:
    """Server: the handshake up to the verdict, in at most `timeout` seconds. Then look at its `hello`, and `admit` or
    `refuse`. LinkError, after telling the client, if it has not proven the token.
    """
    deadline = time.monotonic() + timeout
    handshake = ServerHandshake(token)
    while not handshake.is_proven:
        reply = handshake.receive(_one(channel, deadline), channel.connection.handshake_meta)
        if reply is not None:
            channel.send(reply, timeout=timeout)
        if handshake.turn is handshake.turn.FAILED:
            raise LinkError(f"a client was refused: {getattr(reply, 'reason', '')}")
    return handshake


def admit(
    channel: Channel, handshake: ServerHandshake, *, generation: int = 0, step: int = -1, received: int = -1, base: int = -1,
    segment: str = "", offset: int = 0, timeout: float = _HANDSHAKE_S,
) -> None:  # fmt: skip
    """Server: welcome the client. From now on all messages are accepted from it."""
    message = handshake.welcome(
        generation=generation, step=step, received=received, base=base, segment=segment, offset=offset, pid=os.getpid()
    )
    channel.connection.open()
    channel.send(message, timeout=timeout)


def refuse(channel: Channel, handshake: ServerHandshake, reason: str, *, timeout: float = _HANDSHAKE_S) -> None:
    """Server: tell the client no. The caller closes the channel."""
    channel.send(handshake.refuse(reason), timeout=timeout)


def _one(channel: Channel, deadline: float) -> Message:
    """The next message of the handshake: there is one a call until the connection is open."""
    got = channel.receive(max(0.0, deadline - time.monotonic()))
    if not got:
        raise LinkClosed("the other end did not finish the handshake in time")
    return got[0].message
