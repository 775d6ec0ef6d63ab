"""What the training thread hands over: the parts of a frame before they are bytes.

Tensors in here are owned by the frame: copies, or references that nobody else can write to any more (see Seal).
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.atoms import Layout


class OneShot:
    """A threading.Event that can be set once and costs a tenth: three are made at every step."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):  # set before
            self._lock.release()

    def is_set(self) -> bool:
        return not self._lock.locked()

    def wait(self) -> None:
        with self._lock:
            pass


class Seal:
    """The promise that gradients held by reference were not written to before their bytes were read.

    The writer thread sets `read` when it has read them. The training thread opens the seal: either nobody else can write to
    them any more, or they had been read while their version counters had not moved, or (`instead`) something wrote to them
    and the results of the update are stored in place of its gradients.
    """

    def __init__(self) -> None:
        self.read = OneShot()
        self.open = OneShot()
        self.instead: list[Item] | None = None
        self.also: list[Item] = []
        """What the training thread found out about this step after its commit."""


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


class Reading:
    """Whether the writer thread has a gradient in hand that was handed over early."""

    __slots__ = ("busy",)

    def __init__(self) -> None:
        self.busy = False


@dataclass
class PendingEarly:
    """Gradients that seem final. They are still anybody's to write to, or to replace; what is None was taken back."""

    uids: list[int]
    grads: list[torch.Tensor | None]
    reading: Reading


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
        self.done = OneShot()
        self.uids: list[int] = []
        self.pieces: list[int] = []
        self.hashes: list[int] = []
        self.buffers: list[tuple[list[int], list[tuple[int, ...]], torch.Tensor]] = []
        """Small buffers as of the commit (uids, shapes, concatenated copy): hashed by the writer thread."""
        self.complete = False

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
    seals: list[Seal] = field(default_factory=list)
