"""Where links begin and end: addresses, sockets that connect and listen, and their TLS."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from everstep.errors import LinkClosed, LinkError, UsageError

_MAX_UNIX_BYTES = 107
"""What fits into the kernel's sockaddr_un."""


class Address(NamedTuple):
    """Of a shadow. A path for a Unix socket; else host and port for TCP."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """An address from tcp://host:port, tcp://[v6]:port, host:port or unix:///absolute/path. UsageError otherwise."""
    if text.startswith("unix://"):
        path = text.removeprefix("unix://")
        if not path.startswith("/") or "\0" in path:
            raise UsageError(f"{text!r} is no address: a Unix socket has an absolute path, as in unix:///run/me/shadow.sock")
        return Address(path=path)
    found = re.fullmatch(r"(?:tcp://)?(?:\[([0-9A-Fa-f:.%\w]+)\]|([\w.-]+)):([0-9]{1,5})", text, re.ASCII)
    if found is None or int(found[3]) > 65535:
        raise UsageError(f"{text!r} is no address: give tcp://host:port or unix:///path")
    return Address(found[1] or found[2], int(found[3]))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that host. Names other than localhost are not looked up: they are not."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def must_have_token(host: str, token: bytes | str | None) -> None:
    """UsageError for a shadow that would listen beyond this machine without a token."""
    if not token and not is_loopback(host):
        raise UsageError(
            f"a shadow that listens on {host or 'all interfaces'} can be reached from other machines and needs a token: "
            "give one, the same to trainer and shadow, or listen on 127.0.0.1"
        )


def connect(
    address: Address | str, *, timeout: float = 10.0, ssl_context: ssl.SSLContext | None = None, server_hostname: str = ""
) -> socket.socket:
    """A connected socket. LinkClosed if nobody answers, LinkError if TLS does not trust who does.

    The certificate must be for `server_hostname`, or else for the address's host.
    """
    where = parse_address(address) if isinstance(address, str) else address
    try:
        if where.path:
            sock = _connect_unix(where.path, timeout)
        else:
            sock = socket.create_connection((where.host, where.port), timeout)
            _tune(sock)
    except OSError as e:
        raise LinkClosed(f"no shadow answers at {where}: {e}") from e
    return sock if ssl_context is None else _secure(sock, ssl_context, where, server_hostname or where.host)


def listen(address: Address | str, *, backlog: int = 16) -> socket.socket:
    """A listening socket. A Unix socket can be used by its owner only; a dead one of the same name is replaced.

    LinkError if another process listens there. Who listens on TCP calls `must_have_token` first.
    """
    where = parse_address(address) if isinstance(address, str) else address
    try:
        return _listen_unix(where.path, backlog) if where.path else _listen_tcp(where, backlog)
    except OSError as e:
        raise LinkError(f"cannot listen at {where}: {e}") from e


def accept(listener: socket.socket) -> socket.socket:
    """The next client's socket, blocking. TLS, where wanted, follows with `serve_tls`, in the client's own thread."""
    sock, _ = listener.accept()
    sock.setblocking(True)
    if sock.family != socket.AF_UNIX:
        _tune(sock)
    return sock


def serve_tls(sock: socket.socket, context: ssl.SSLContext, *, timeout: float = 10.0) -> ssl.SSLSocket:
    """A client's socket with TLS on it. LinkError if that fails; the socket is closed then."""
    try:
        sock.settimeout(timeout)
        return context.wrap_socket(sock, server_side=True)
    except (OSError, ValueError) as e:
        sock.close()
        raise LinkError(f"a client without valid TLS: {e}") from e


def client_context(cafile: str | Path | None = None) -> ssl.SSLContext:
    """TLS for trainers. The shadow's certificate must be signed by one in `cafile` (or be it), or by a CA of the system."""
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    if cafile is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        with _readable(str(cafile)):
            context.load_verify_locations(str(cafile))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def server_context(certfile: str | Path, keyfile: str | Path | None = None) -> ssl.SSLContext:
    """TLS for shadows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with _readable(f"{certfile}, {keyfile}" if keyfile else str(certfile)):
        context.load_cert_chain(str(certfile), None if keyfile is None else str(keyfile))
    return context


@contextlib.contextmanager
def _readable(files: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise UsageError(f"cannot use the certificate in {files}: {e}") from e


def _secure(sock: socket.socket, context: ssl.SSLContext, where: Address, name: str) -> ssl.SSLSocket:
    try:
        return context.wrap_socket(sock, server_hostname=name)
    except (OSError, ValueError) as e:
        sock.close()
        raise LinkError(f"no trustworthy TLS with the shadow at {where}: {e}") from e


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _connect_unix(path: str, timeout: float) -> socket.socket:
    _check_length(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def _listen_tcp(where: Address, backlog: int) -> socket.socket:
    family = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _tune(sock)
        sock.bind((where.host, where.port))
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def _listen_unix(path: str, backlog: int) -> socket.socket:
    _check_length(path)
    with _locked(os.path.dirname(path)):
        _remove_stale(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(sock.fileno(), 0o600)  # On Linux the name is born with this mode; nobody can connect before listen.
            sock.bind(path)
            os.chmod(path, 0o600)
            sock.listen(backlog)
        except BaseException:
            sock.close()
            raise
        return sock


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Of two shadows that start at the same moment, the second must not remove the socket of the first."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{path} is no socket: remove it, or give another path")
    try:
        _connect_unix(path, 1.0).close()
    except ConnectionRefusedError:
        os.unlink(path)
    else:
        raise LinkError(f"another process listens at {path}")


def _check_length(path: str) -> None:
    if len(os.fsencode(path)) > _MAX_UNIX_BYTES:
        raise UsageError(f"{path} is too long for a Unix socket: at most {_MAX_UNIX_BYTES} bytes")
