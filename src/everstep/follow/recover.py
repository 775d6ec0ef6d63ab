"""From a shadow's memory back into a trainer: find the shadow of a run, ask what it holds, map it."""

from __future__ import annotations

import contextlib
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from everstep.errors import LinkClosed, LinkError, LinkRefused
from everstep.fold import State
from everstep.follow.arena import Copying, take
from everstep.follow.serve import SOCKET
from everstep.format import documents
from everstep.format.documents import Manifest, StoredTensor
from everstep.link import addresses, messages, sockets
from everstep.link.messages import Close, Fetch, Fetched, Hello, Message
from everstep.link.protocol import Received
from everstep.link.sockets import Channel
from everstep.memory import Bytes, new_pages
from everstep.restore.execute import state_of
from everstep.store import shared
from everstep.store.bases import cursor_of
from everstep.store.runs import RunPath

_ASK_S = 5.0
_MAX_MANIFEST_BYTES = 256 << 20
_WAIT_S = 300.0
"""A shadow may be folding or writing a base when it is asked."""


@dataclass
class Offer:
    """What a shadow of this host holds. It keeps still until release()."""

    step: int
    generation: int
    timeline: int
    proven: bool
    pid: int
    where: str
    _manifest: Manifest
    _file: str
    _memory: Bytes
    _channel: Channel

    def fetch(self, live: Mapping[int, torch.Tensor] | None = None) -> State:
        """The state, verified. With `live` (by uid) its values may come only at need_all(), to be called before release():
        from a shadow of the same host straight into the live tensors, where they fit."""
        if self._file:
            loading = Copying(self._manifest, self._file, live or {})
            state = state_of(self._manifest, loading.tensors)
            state.loading = loading
            if live is None:
                state.need_all()
                state.close()
        else:
            state = state_of(self._manifest, take(self._manifest, self._memory))
        state.cursor = self.cursor
        return state

    @property
    def cursor(self) -> bytes:
        return cursor_of(self._manifest)

    @property
    def fingerprint(self) -> dict[str, object]:
        return self._manifest.fingerprint

    def release(self) -> None:
        """The shadow may go on."""
        with contextlib.suppress(LinkError, OSError):
            self._channel.send(Fetched(), timeout=_ASK_S)
        self._channel.close()


def find(path: RunPath, run: str) -> Offer | None:
    """What the run's shadow on this host holds; None if there is none, or it holds nothing."""
    folder = shared.shared_folder(run, path.path)
    if not os.path.exists(os.path.join(folder, SOCKET)):
        return None
    return find_at(f"unix://{folder}/{SOCKET}", path, run)


def find_at(
    address: str, path: RunPath, run: str, *, token: bytes | None = None, tls: ssl.SSLContext | None = None
) -> Offer | None:
    """What the shadow at this address holds of the run; None if nobody answers, or it holds nothing."""
    incoming = _Incoming()
    try:
        channel = Channel(addresses.connect(address, timeout=_ASK_S, ssl_context=tls), incoming.sink)
    except LinkClosed:
        return None
    try:
        welcome = sockets.introduce(channel, Hello(1, run, path.path, 0, 0, 0, "fetch", {}), token)
        channel.send(Fetch(-1), timeout=_ASK_S)
        waiting = list(channel.receive(_WAIT_S))
        found = waiting.pop(0).message if waiting else None
        if not isinstance(found, messages.State):
            channel.close()
            return None
        name = f"the state that the shadow of {path.path} handed out"
        manifest = documents.decode(bytes(incoming.meta), Manifest, name)
        if not found.file:
            manifest = incoming.receive(channel, manifest, waiting)
    except LinkRefused:
        channel.close()
        if token is not None or tls is not None:
            raise
        return None
    except LinkClosed:
        channel.close()
        return None
    except BaseException:
        channel.close()
        raise
    return Offer(
        found.step, found.generation, found.timeline, found.proven, welcome.pid, address, manifest, found.file,
        incoming.memory, channel,
    )  # fmt: skip


class _Incoming:
    """Where what a shadow sends goes: the manifest, then, from another host, the bytes of every tensor."""

    def __init__(self) -> None:
        self.meta = bytearray()
        self.memory: Bytes = np.empty(0, np.uint8)
        self._tensors: tuple[StoredTensor, ...] = ()

    def sink(self, message: Message, num_bytes: int) -> memoryview | None:
        if isinstance(message, messages.State) and num_bytes <= _MAX_MANIFEST_BYTES:
            self.meta = bytearray(num_bytes)
            return memoryview(self.meta)
        if isinstance(message, messages.Region):
            self._lay_out()
            if message.index < len(self._tensors):
                stored = self._tensors[message.index]
                if message.start + num_bytes <= stored.num_bytes:
                    return memoryview(self.memory[stored.offset + message.start :][:num_bytes])
        return None

    def _lay_out(self) -> None:
        """Memory for everything that the manifest names."""
        if self._tensors or not self.meta:
            return
        manifest = documents.decode(bytes(self.meta), Manifest, "a state on its way")
        offset = 0
        found = []
        for stored in manifest.tensors:
            found.append(msgspec.structs.replace(stored, offset=offset))
            offset += -(-stored.num_bytes // 64) * 64
        self.memory = new_pages(max(offset, 1))
        self._tensors = tuple(found)

    def receive(self, channel: Channel, manifest: Manifest, waiting: list[Received]) -> Manifest:
        """All regions; the manifest with the places where they are here."""
        self._lay_out()
        got = sum(len(r.payload) for r in waiting if r.payload is not None)
        ended = any(isinstance(r.message, Fetched) for r in waiting)
        while not ended:
            received = channel.receive(_WAIT_S)
            if not received:
                raise LinkClosed("the shadow stopped sending its state")
            for r in received:
                ended = ended or isinstance(r.message, Fetched)
                got += 0 if r.payload is None else len(r.payload)
        if got != sum(t.num_bytes for t in self._tensors):
            raise LinkError(f"the shadow sent {got} bytes of its state and then said that this was all")
        return msgspec.structs.replace(manifest, tensors=self._tensors)


def dismiss(path: RunPath, run: str, generation: int) -> None:
    """Tell a shadow that nobody needs it any more to end (a trainer without one goes on with its run)."""
    folder = shared.shared_folder(run, path.path)
    with contextlib.suppress(LinkError, OSError):
        channel = Channel(addresses.connect(f"unix://{folder}/{SOCKET}", timeout=_ASK_S), lambda m, n: None)
        with channel:
            welcome = sockets.introduce(channel, Hello(1, run, path.path, 0, generation, 0, "train", {}))
            channel.send(Close(True), timeout=_ASK_S)
            channel.receive(_ASK_S)
        wait_for_end(welcome.pid, _ASK_S)


def wait_for_end(pid: int, seconds: float) -> bool:
    """Whether this process, which need not be a child, ends within so long."""
    deadline = time.monotonic() + seconds
    while is_alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_alive(pid: int | None) -> bool:
    """Whether there is a process of this number that runs, or could."""
    if pid is None:
        return False
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False
