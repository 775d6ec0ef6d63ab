"""From a shadow's memory back into a trainer: find the shadow of a run, ask what it holds, map it."""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass

import numpy as np

from everstep.errors import CorruptionError, LinkError
from everstep.fold import State
from everstep.follow.arena import take
from everstep.follow.serve import SOCKET
from everstep.format import documents
from everstep.format.documents import Manifest
from everstep.link import addresses, messages, sockets
from everstep.link.messages import Close, Fetch, Fetched, Hello, Message, Trouble
from everstep.link.sockets import Channel
from everstep.memory import Bytes
from everstep.restore.execute import state_of
from everstep.store import shared
from everstep.store.bases import cursor_of
from everstep.store.runs import RunPath

_ASK_S = 5.0
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
    _manifest: Manifest
    _file: str
    _num_bytes: int
    _channel: Channel

    def fetch(self) -> State:
        """The state, where it lies in the shadow's memory, verified. Valid until the next step is committed."""
        try:
            fd = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise CorruptionError(f"the shadow's memory {self._file} cannot be opened: {e.strerror}") from e
        try:
            size = os.fstat(fd).st_size
            pages = mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        memory: Bytes = np.frombuffer(pages, np.uint8)
        state = state_of(self._manifest, take(self._manifest, memory))
        state.cursor = cursor_of(self._manifest)
        return state

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
    memory = bytearray()

    def sink(message: Message, num_bytes: int) -> memoryview | None:
        if not isinstance(message, messages.State):
            return None
        memory[:] = bytes(num_bytes)
        return memoryview(memory)

    try:
        channel = Channel(addresses.connect(f"unix://{folder}/{SOCKET}", timeout=_ASK_S), sink)
    except (LinkError, OSError):
        return None
    try:
        welcome = sockets.introduce(channel, Hello(1, run, path.path, 0, 0, 0, "fetch", {}))
        channel.send(Fetch(-1), timeout=_ASK_S)
        got = channel.receive(_WAIT_S)
        found = got[0].message if got else None
        if not isinstance(found, messages.State):
            channel.close()
            if isinstance(found, Trouble) or found is None:
                return None
            raise LinkError(f"a shadow answered {type(found).__name__}")
        manifest = documents.decode(bytes(memory), Manifest, f"the state that the shadow of {path.path} handed out")
    except (LinkError, OSError):
        channel.close()
        return None
    return Offer(
        found.step, found.generation, found.timeline, found.proven, welcome.pid, manifest, found.file, found.num_bytes,
        channel,
    )  # fmt: skip


def dismiss(path: RunPath, run: str, generation: int) -> None:
    """Tell a shadow that nobody needs it any more to end (a trainer without one goes on with its run)."""
    folder = shared.shared_folder(run, path.path)
    with contextlib.suppress(LinkError, OSError):
        channel = Channel(addresses.connect(f"unix://{folder}/{SOCKET}", timeout=_ASK_S), lambda m, n: None)
        with channel:
            sockets.introduce(channel, Hello(1, run, path.path, 0, generation, 0, "train", {}))
            channel.send(Close(True), timeout=_ASK_S)
            channel.receive(_ASK_S)
