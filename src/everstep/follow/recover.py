"""From a shadow's memory back into a trainer: find the shadow of a run on this host, ask what it holds, read it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from everstep.errors import LinkClosed, LinkError, LinkRefused
from everstep.fold import State
from everstep.follow.arena import Copying, take
from everstep.follow.serve import SOCKET
from everstep.format import documents
from everstep.format.documents import Manifest
from everstep.link import addresses, messages, sockets
from everstep.link.messages import VERSION, Close, Fetch, Fetched, Hello, Message, Trouble
from everstep.link.sockets import Channel
from everstep.memory import Bytes
from everstep.restore.execute import state_of
from everstep.restore.parts import keep
from everstep.store import shared
from everstep.store.bases import cursor_of
from everstep.store.parts import part_of
from everstep.store.runs import RunPath

_ASK_S = 5.0
MAX_MANIFEST_BYTES = 256 << 20
_WAIT_S = 300.0
"""A shadow may be folding or writing a base when it is asked."""


@dataclass
class Offer:
    """What a shadow holds, or several together. One of this host keeps still until release()."""

    step: int
    generation: int
    timeline: int
    proven: bool
    pid: int
    where: str
    manifest: Manifest
    file: str
    """Which it can be read from; empty: it is in `memory`."""
    memory: Bytes = field(default_factory=lambda: np.empty(0, np.uint8), repr=False)
    shares: list[frozenset[int]] = field(default_factory=list)
    """Of several shadows: the atoms that each of them has."""
    channel: Channel | None = field(default=None, repr=False)

    def fetch(self, live: Mapping[int, torch.Tensor] | None = None, only: Set[int] | None = None) -> State:
        """The state, verified. With `live` (by uid) its values may come only at need_all(), to be called before release():
        from a shadow of the same host straight into the live tensors, where they fit. `only`: of parameters and buffers
        these alone, with what optimizers know of them."""
        manifest = self.manifest if only is None else _cut(self.manifest, only)
        if self.file:
            loading = Copying(manifest, self.file, live or {})
            state = state_of(manifest, loading.tensors)
            state.loading = loading
            if live is None:
                state.need_all()
                state.close()
        else:
            state = state_of(manifest, take(manifest, self.memory))
        state.cursor = self.cursor
        if only is not None:
            keep(state, only)
        return state

    @property
    def cursor(self) -> bytes:
        return cursor_of(self.manifest)

    @property
    def fingerprint(self) -> dict[str, object]:
        return self.manifest.fingerprint

    def is_damaged(self, text: str) -> None:
        """Tell a shadow of this host; returns when it has looked at what it holds, and given it up if that is so."""
        if self.channel is not None:
            with contextlib.suppress(LinkError, OSError):
                self.channel.send(Trouble(text), timeout=_ASK_S)
                self.channel.receive(_WAIT_S)  # nothing: it ends the conversation
            self.channel.close()
            self.channel = None

    def release(self) -> None:
        """The shadow may go on."""
        if self.channel is not None:
            with contextlib.suppress(LinkError, OSError):
                self.channel.send(Fetched(), timeout=_ASK_S)
            self.channel.close()


def _cut(manifest: Manifest, uids: Set[int]) -> Manifest:
    """With these atoms alone, where they are."""
    there = {t.key: t for t in manifest.tensors}
    found, _, _ = part_of(manifest, uids, (0, 1))
    return msgspec.structs.replace(found, tensors=tuple(there[t.key] for t in found.tensors), files={}, part=manifest.part)


def address_of(path: RunPath, run: str) -> str:
    """Of the run's shadow on this host, if there is one."""
    return f"unix://{shared.shared_folder(run, path.path)}/{SOCKET}"


def find(path: RunPath, run: str, step: int = -1) -> Offer | None:
    """What the run's shadow on this host holds of this rank's part, at a step or the latest; None if there is none, or it
    holds nothing, or cannot go to that step."""
    address = address_of(path, run)
    if not os.path.exists(addresses.parse_address(address).path):
        return None
    return _ask(address, path, run, step)


def _ask(address: str, path: RunPath, run: str, step: int) -> Offer | None:
    incoming = _Manifest()
    try:
        channel = Channel(addresses.connect(address, timeout=_ASK_S), incoming.sink)
    except LinkClosed:
        return None
    try:
        welcome = sockets.introduce(channel, Hello(VERSION, run, path.path, 0, 0, path.rank, "fetch", {}))
        channel.send(Fetch(step), timeout=_ASK_S)
        waiting = channel.receive(_WAIT_S)
        found = waiting[0].message if waiting else None
        if not isinstance(found, messages.State):
            channel.close()
            return None
        manifest = documents.decode(bytes(incoming.data), Manifest, f"the state that the shadow of {path.path} handed out")
    except (LinkClosed, LinkRefused):
        channel.close()
        return None
    except BaseException:
        channel.close()
        raise
    where = (found.step, found.generation, found.timeline)
    return Offer(*where, found.proven, welcome.pid, address, manifest, found.file, channel=channel)


class _Manifest:
    """Where what a shadow of this host sends goes: there is only the manifest."""

    def __init__(self) -> None:
        self.data = bytearray()

    def sink(self, message: Message, num_bytes: int) -> memoryview | None:
        if not isinstance(message, messages.State) or num_bytes > MAX_MANIFEST_BYTES:
            return None
        self.data = bytearray(num_bytes)
        return memoryview(self.data)


def dismiss(path: RunPath, run: str, generation: int, *, wait_s: float = _ASK_S) -> None:
    """Tell a shadow that nobody needs it any more to end (a trainer without one goes on with its run)."""
    with contextlib.suppress(LinkError, OSError):
        channel = Channel(addresses.connect(address_of(path, run), timeout=_ASK_S), lambda m, n: None)
        with channel:
            hello = Hello(VERSION, run, path.path, 0, generation, path.rank, "train", {})
            welcome = sockets.introduce(channel, hello)
            channel.send(Close(True), timeout=_ASK_S)
            channel.receive(_ASK_S)
        wait_for_end(welcome.pid, wait_s)


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
