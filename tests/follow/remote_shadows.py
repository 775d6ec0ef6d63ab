"""Hosts of shadows behind real sockets, a proxy that meddles, and a small training, for tests in one process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import everstep
from everstep.follow import fetch
from everstep.follow.remote import Host
from everstep.link import addresses
from everstep.restore.apply import public_state
from everstep.store.runs import RunPath
from support import equal


class Remote:
    """A host of shadows in this process, behind a real socket."""

    def __init__(self, folder: Path, token: bytes | None = None, port: int = 0, **options: Any) -> None:
        settings = {"interval": 1000, "max_bytes": 1 << 30, "idle_s": 100.0, **options}
        self.said: list[str] = []
        self.host = Host(str(folder), token=token, tls=None, say=self.said.append, **settings)
        self.listener = addresses.listen(f"tcp://127.0.0.1:{port}")
        self.port: int = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self.host.accept, args=(self.listener,))
        self.thread.start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()
        self.host.close()


class Proxy:
    """Between a trainer and its shadow: passes bytes on, and does to them what `meddle` says (or, to those of the shadow,
    `back`)."""

    def __init__(
        self, port: int, meddle: Callable[[bytes, int], bytes | None] | None,
        back: Callable[[bytes, int], bytes | None] | None = None,
    ) -> None:  # fmt: skip
        self._target = port
        self._meddle, self._back = meddle, back
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                threading.Thread(target=self._pump, args=(client, server, self._meddle), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, self._back), daemon=True).start()

    def _pump(
        self, source: socket.socket, target: socket.socket, meddle: Callable[[bytes, int], bytes | None] | None
    ) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                told = meddle(data, passed) if meddle is not None else data
                passed += len(data)
                if told is None:
                    break
                target.sendall(told)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            each.close()


class Training:
    def __init__(self, width: int = 96) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(32, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 32))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def backward(self, n: int) -> None:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(n))
        (self.model(x) - x).square().mean().backward()

    def step(self, n: int) -> None:
        self.backward(n)
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def attach(self, path: Path, address: str, **options: Any) -> everstep.Run:
        settings = {"mode": "shadow", "shadow": address, "quiet": True, "base_interval": 1000, **options}
        return everstep.attach(self.model, self.optimizer, path, **settings)

    def train(self, run: everstep.Run, until: int) -> None:
        while run.step < until:
            self.step(run.step + 1)
            run.commit()


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def held(run: everstep.Run, address: str, **options: Any) -> dict[str, Any]:
    """What the shadow holds, or several at these addresses, when they have everything."""
    run.flush()
    wait_until(lambda: run.stats()["folded_step"] == run.step)
    offer = fetch.find_all(address.split(","), RunPath(run.path), run._opened.run, **options)
    assert offer is not None and offer.step == run.step
    try:
        return public_state(offer.fetch(), {})
    finally:
        offer.release()


def live(training: Training, run: everstep.Run) -> dict[str, Any]:
    run.flush()
    return {
        "model": {k: v.clone() for k, v in training.model.state_dict().items()},
        "optimizer": [
            {k: v.clone() for k, v in training.optimizer.state[p].items()} for p in training.model.parameters()
        ],
    }


def must_hold(found: dict[str, Any], training: Training, run: everstep.Run) -> None:
    expected = live(training, run)
    names = [n for n, _ in training.model.named_parameters()]
    assert not equal({k: found["model"][k] for k in expected["model"]}, expected["model"])
    state = [{k: found["optimizer"]["state"][n][k] for k in e} for n, e in zip(names, expected["optimizer"], strict=True)]
    assert not equal(state, expected["optimizer"])
