"""What the training thread hands over: the parts of a frame before they are bytes.

Tensors in here are owned by the frame: copies, or references that nobody else can write to any more (see Seal).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from everstep.atoms import Layout
from everstep.capture.final import Final
from everstep.payloads import Payload

_news = threading.Condition()


class OneShot:
    """A threading.Event that can be set once. Several are made at every step and hardly any is waited for: it costs nothing
    until somebody does."""

    _is_set = _is_awaited = False

    def set(self) -> None:
        self._is_set = True
        if self._is_awaited:
            with _news:
                _news.notify_all()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self) -> None:
        if not self._is_set:
            with _news:
                self._is_awaited = True  # before the last look: who sets it looks after having set it
                _news.wait_for(self.is_set)


class Seal:
    """The promise that gradients held by reference were not written to before their bytes were read.

    The writer thread sets `read` when it has read them. Before it ends the frame it calls `release`, which opens the seal if
    nobody else can write to them any more. Else the training thread opens it: they had been read while their version
    counters had not moved, or (`instead`) something wrote to them and the results of the update are stored in place of its
    gradients.
    """

    release: Callable[[], bool]
    """Whether the seal is open now (any thread). Set by whoever holds the gradients."""
    instead: list[Item] | None = None
    also: Sequence[Item] = ()
    """What the training thread found out about this step after its commit."""
    spoiled: Set[int] = frozenset()
    """Parameters of which `instead` has what they became after the commit: the frame must not be taken for its step's."""

    def __init__(self) -> None:
        self.read = OneShot()
        self.open = OneShot()
        self.dropped = OneShot()
        """Set when it is worth to call `release` again, or when the seal is open."""

    def break_open(self) -> None:
        """Let nobody wait for it any longer."""
        self.open.set()
        self.dropped.set()
        self.release = _is_open

    def wait(self) -> None:
        """Return when it is open. In the writer thread, with nothing of it in hand."""
        if self.open.is_set() or self.release():
            return
        self.dropped.wait()
        if not self.release():
            self.open.wait()


def _is_open() -> bool:
    return True


@dataclass
class PendingUpdate:
    optimizer: str
    uids: list[int]
    grads: list[torch.Tensor | None]
    seal: Seal | None = None
    grad_scale: torch.Tensor | None = None
    skipped: bool = False
    num_bytes: int = 0
    at: int = -1
    """Which gradient the writer has in hand."""
    payloads: list[Payload | None] | None = None
    """What compression made of each, so far as it is known."""
    gather: Callable[[], None] | None = None
    """Fills `grads`, unless somebody has."""

    def payload(self, i: int) -> Payload | None:
        return None if self.payloads is None else self.payloads[i]


@dataclass
class PendingEarly:
    """Gradients that seem final. They are still anybody's to write to, or to replace, or to take back."""

    final: Final
    num_steps: int
    """Of their optimizer, that had begun before."""


@dataclass
class PendingTensor:
    uid: int
    tensor: torch.Tensor


@dataclass
class PendingTensors:
    """Several tensors of one dtype, concatenated."""

    uids: list[int]
    shapes: list[tuple[int, ...]]
    flat: torch.Tensor


@dataclass
class PendingState:
    optimizer: str
    uid: int
    state: dict[str, Any] | None
    """tree.freeze of the live dict."""


@dataclass
class PendingGroups:
    optimizer: str
    hyper: list[dict[str, Any]]
    params: list[tuple[int, ...]]


@dataclass
class PendingLayout:
    layout: Layout


@dataclass
class PendingCarry:
    kind: str
    uids: list[int]


@dataclass
class PendingGrad:
    uid: int
    tensor: torch.Tensor


Item = (
    PendingUpdate
    | PendingEarly
    | PendingTensor
    | PendingTensors
    | PendingState
    | PendingGroups
    | PendingLayout
    | PendingCarry
    | PendingGrad
)


class Audit:
    """Hashes of S(step), being taken."""

    def __init__(self) -> None:
        self.must_done = OneShot()
        """What has to be hashed at every step is."""
        self.done = OneShot()
        self.uids: list[int] = []
        self.pieces: list[int] = []
        self.hashes: list[int] = []
        self.buffers: list[tuple[list[int], list[tuple[int, ...]], torch.Tensor]] = []
        """Small buffers as of the commit (uids, shapes, concatenated copy): hashed by the writer thread."""
        self.complete = False
        self.replica_targets: list[Any] = []
        """Parameters that another rank stores, a few at each step, and (uid, piece, hash) of them."""
        self.replicas: list[tuple[int, int, int]] = []

    def add_all(self, uid: int, hashes: list[int]) -> None:
        """Of all pieces of an atom."""
        self.uids += [uid] * len(hashes)
        self.pieces += range(len(hashes))
        self.hashes += hashes

    def add(self, uid: int, piece: int, value: int) -> None:
        self.uids.append(uid)
        self.pieces.append(piece)
        self.hashes.append(value)


@dataclass
class PendingCommit:
    """The tail of a frame: with it, the frame is complete."""

    step: int
    cursor: dict[str, Any]
    audit: Audit
    wall_time_ns: int
    previous: Any = None
    """The cursor and the audit before, which are freed with this."""
