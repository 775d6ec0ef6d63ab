"""Shadows behind TCP on loopback, and a way to them that does what networks do."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

_END_S = 60.0
_CHUNK_BYTES = 1 << 18
_MANY_BYTES = 1 << 13
"""That come at once are of a record."""


class ShadowHost:
    """`everstep shadow` in a process of its own; started again, it listens at the same address."""

    def __init__(self, folder: str, interval: int) -> None:
        self._folder = tempfile.mkdtemp(prefix="everstep-shadow-", dir=folder)
        self._interval = interval
        self.port = 0
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "everstep.cli.main", "shadow", "--listen", f"127.0.0.1:{self.port}", "--dir",
             self._folder, "--base-interval", str(self._interval)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline().rsplit(",", 1)[1].strip(" )\n"))

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def tcp_shadow(folder: str, interval: int) -> Iterator[str]:
    """A shadow on loopback; its address."""
    host = ShadowHost(folder, interval)
    try:
        yield host.address
    finally:
        host.end()


class Network:
    """Between a trainer and its shadow: passes on what they say. Told to, it cuts the connection in the middle of a record,
    or changes a bit of one."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._order = ""
        self._done = threading.Event()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def do(self, order: str, patience_s: float) -> None:
        """"cut" or "damage" what the trainer sends next; return when that has happened."""
        self._done.clear()
        self._order = order
        if not self._done.wait(patience_s):
            raise AssertionError(f"nothing was sent within {patience_s:.0f} s that could be {order}")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [client, server]
                threading.Thread(target=self._pass_on, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(server, client, False), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_trainer: bool) -> None:
        data = bytearray(_CHUNK_BYTES)
        with contextlib.suppress(OSError):
            while num_bytes := source.recv_into(data):
                order = self._order if is_trainer and num_bytes >= _MANY_BYTES else ""
                if order:
                    self._order = ""
                if order == "damage":
                    data[num_bytes // 2] ^= 1
                target.sendall(memoryview(data)[: num_bytes // 2 if order == "cut" else num_bytes])
                if order:
                    self._done.set()
                if order == "cut":
                    break
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for end in (self._listener, *self._ends):
            end.close()
