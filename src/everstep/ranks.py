"""The ranks of one training job: who stores what, and how they agree when a generation begins.

They talk over the store that torch.distributed was started with, at attach and resume; never over training's process
groups, and never at a step. (With shadows, a background thread tells how far they are: Least.)
"""

from __future__ import annotations

import datetime
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist
import xxhash

from everstep import background, errors
from everstep.atoms import Atom
from everstep.boxes import Share
from everstep.errors import EverstepError, UsageError
from everstep.memory import plain, view_bytes
from everstep.naming import Inventory

T = TypeVar("T")
_WAIT = datetime.timedelta(minutes=10)
_ROUND_S = 0.05
_IDLE_S = 1.0
_AGAIN_S = 1.0


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """One atom, or a part of it, on one rank."""

    uid: int
    role: str
    share: Share
    num_bytes: int
    optimized: bool
    """An optimizer of this rank updates it."""
    is_own: bool
    """Other ranks may have other values in the same place, and each stores its own."""
    aliases: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    """Of all of it."""


def holdings(inventory: Inventory) -> list[Holding]:
    """What this process has of the training state."""
    optimized = {uid for groups in inventory.groups.values() for group in groups for uid in group}
    return [
        Holding(
            atom.uid, atom.role, atom.share, tensor.numel() * tensor.element_size(), atom.uid in optimized,
            _is_own(atom, inventory.live[atom.uid] is not tensor), atom.aliases, atom.shape,
        )
        for atom in inventory.layout.atoms
        for tensor in (inventory.tensors[atom.uid],)
    ]  # fmt: skip


def _is_own(atom: Atom, is_dtensor: bool) -> bool:
    """Declared so; a plain buffer (BatchNorm's under DDP); or nothing but padding."""
    only_padding = bool(atom.held) and prod(atom.held) > 0 and not atom.share.numel
    if only_padding or atom.placement in ("averaged", "rank-local"):
        return True
    return atom.role == "buffer" and not is_dtensor and atom.placement != "sharded"


def assign(held: Sequence[Sequence[Holding]]) -> list[set[int]]:
    """For each rank the atoms that it stores. Pure.

    Every element of a parameter is stored by one rank: of those that have the same part and update it, the one with the
    least to store so far. What may differ between ranks, each rank stores itself.
    """
    stored: list[set[int]] = [set() for _ in held]
    load = [0] * len(held)
    replicas: dict[tuple[int, Share], list[tuple[int, Holding]]] = {}
    for rank, mine in enumerate(held):
        for h in mine:
            if h.is_own:
                stored[rank].add(h.uid)
            else:
                replicas.setdefault((h.uid, h.share), []).append((rank, h))
    largest_first = sorted(replicas.items(), key=lambda e: (-e[1][0][1].num_bytes, e[0][0], e[0][1].boxes[0].offset))
    for (uid, _), holders in largest_first:
        if not holders[0][1].num_bytes and any(h.uid == uid and h.num_bytes for mine in held for h in mine):
            continue  # an empty shard
        able = [rank for rank, h in holders if h.optimized] or [rank for rank, _ in holders]
        rank = min(able, key=lambda r: (load[r], r))
        stored[rank].add(uid)
        load[rank] += holders[0][1].num_bytes
    return stored


def aliases_of(held: Sequence[Sequence[Holding]]) -> dict[int, tuple[str, ...]]:
    """By atom: all other names that it has on any rank (pipeline stages know only theirs)."""
    found: dict[int, dict[str, None]] = {}
    for mine in held:
        for h in mine:
            found.setdefault(h.uid, {}).update(dict.fromkeys(h.aliases))
    return {uid: tuple(names) for uid, names in found.items()}


def hashes_of(inventory: Inventory) -> list[tuple[int, str, int]]:
    """(uid, name, hash of the bytes) of every parameter here."""
    return [
        (a.uid, a.label(), xxhash.xxh3_64_intdigest(view_bytes(plain(inventory.tensors[a.uid].detach()))))
        for a in inventory.layout.atoms
        if a.role == "param"
    ]


def check_replicas(held: Sequence[Sequence[Holding]], hashes: Sequence[Sequence[tuple[int, str, int]]]) -> None:
    """UsageError unless ranks that hold the same part of a parameter have the same values in it."""
    shared = [{h.uid: h for h in mine if not h.is_own} for mine in held]
    first: dict[tuple[int, Share], tuple[int, int]] = {}
    shapes: dict[int, tuple[int, tuple[int, ...]]] = {}
    for rank, mine in enumerate(hashes):
        for uid, label, value in mine:
            here = shared[rank].get(uid)
            if here is None:
                continue
            before, shape = shapes.setdefault(uid, (rank, here.shape))
            if shape != here.shape:
                raise UsageError(
                    f"{label} is {here.shape} on rank {rank} and {shape} on rank {before}. If these are two different "
                    "tensors (pipeline stages that both call theirs by this name), give attach(rename=...) names that "
                    "differ; if they are parts of one, say which by attach(layout=[everstep.layout.Sharded(...)])"
                )
            before, known = first.setdefault((uid, here.share), (rank, value))
            if known != value:
                raise UsageError(
                    f"{label} has other values on rank {rank} than on rank {before}, though both hold it. If these are two "
                    "different tensors (pipeline stages that both call theirs by this name, experts), give "
                    "attach(rename=...) names that differ; if they are replicas, make them equal before attach, as "
                    "DistributedDataParallel does"
                )


def holding_id(held: Sequence[Sequence[Holding]], stored: Sequence[set[int]]) -> str:
    """A hash of who stores what: equal where frames of one generation can go on from those of another."""
    plain = [sorted((h.uid, h.share) for h in mine if h.uid in ours) for mine, ours in zip(held, stored, strict=True)]
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(plain))[:16]


def place() -> tuple[int, int]:
    """This process's rank, and how many there are, as far as torch.distributed knows."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


class Ranks:
    """This process among those that train together."""

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._store = store

    @classmethod
    def current(cls) -> Ranks:
        """As torch.distributed has it; one process alone if that is not in use."""
        if not dist.is_available() or not dist.is_initialized():
            told = os.environ.get("WORLD_SIZE", "1")
            if told != "1" and "TORCHELASTIC_RUN_ID" in os.environ:
                raise UsageError(
                    f"torchrun has started {told} processes, but torch.distributed is not initialised: call "
                    "torch.distributed.init_process_group() before attach"
                )
            return cls()
        size = dist.get_world_size()
        if size == 1:
            return cls()
        store = dist.distributed_c10d.PrefixStore("everstep", dist.distributed_c10d._get_default_store())
        return cls(dist.get_rank(), size, dist.distributed_c10d.PrefixStore(_meet(store, dist.get_rank(), size), store))

    def gather(self, name: str, value: Any) -> list[Any]:
        """What each rank gives under this name, in their order. `value` is plain data."""
        if self.size == 1:
            return [value]
        self._store.set(f"{name}/{self.rank}", msgspec.msgpack.encode(value))
        return [msgspec.msgpack.decode(self._get(f"{name}/{r}", name, r)) for r in range(self.size)]

    def all(self, name: str, work: Callable[[], Any]) -> list[Any]:
        """Each rank does its work; results of all. If one fails, all raise what it raised."""
        result, failure, own = None, None, None
        try:
            result = work()
        except Exception as e:
            failure, own = [type(e).__name__, str(e)], e
        if self.size == 1:
            if own is not None:
                raise own
            return [result]
        gathered = self.gather(name, [result, failure])
        for rank, (_, failed) in enumerate(gathered):
            if failed is not None:
                if own is not None:
                    raise own
                raise _error(rank, *failed)
        return [r for r, _ in gathered]

    def first(self, name: str, work: Callable[[], Any]) -> Any:
        """Rank 0 does it; all get what it returns, or raise what it raised."""
        return self.all(name, work if self.rank == 0 else lambda: None)[0]

    def least(self, name: str, changed: Callable[[], None], say: Callable[[str], None]) -> Least:
        """The least of a number that each rank tells. To be called by all ranks, with a name that was not used before."""
        return Least(dist.distributed_c10d.PrefixStore(name, self._store.clone()), self.rank, self.size, changed, say)

    def _get(self, key: str, what: str, rank: int) -> bytes:
        _wait(self._store, key, self.rank, rank, what)
        found: bytes = self._store.get(key)
        return found


class Least:
    """The least of a number that each rank tells again and again, as this rank last heard. A thread does all talking.

    It is late, by some _ROUND_S, and may be of different moments for different ranks; but it was right at some moment.
    Rank 0 reads what all have said and tells the rest. While nothing changes, nothing is said.
    """

    def __init__(
        self, store: Any, rank: int, size: int, changed: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self.value = -1
        self._store, self._rank, self._size = store, rank, size
        self._changed, self._say = changed, say
        self._own = -1
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._thread = background.start(self._run, "everstep-least")

    def tell(self, value: int) -> None:
        """This rank's number from now on. Any thread; waits for nothing."""
        if value != self._own:
            self._own = value
            self._news.set()

    def close(self) -> None:
        self._stopping.set()
        self._news.set()
        self._thread.join(_AGAIN_S)  # whoever has the store may be gone

    def _run(self) -> None:
        told: int | None = None
        is_told = False
        while not self._stopping.is_set():
            # Another rank's number may have changed unless all that is known is that all are where this one is.
            self._news.wait(_ROUND_S if self.value != self._own else _IDLE_S)
            self._news.clear()
            try:
                own = self._own
                if own != told:
                    self._store.set(str(self._rank), str(own))
                    told = own
                self._hear()
                is_told = False
            except RuntimeError as e:
                if not is_told and not self._stopping.is_set():
                    self._say(f"ranks cannot tell each other how far their shadows are, which therefore do not go on: {e}")
                is_told, told = True, None
                self._stopping.wait(_AGAIN_S)
            self._stopping.wait(_ROUND_S)

    def _hear(self) -> None:
        if self._rank == 0:
            keys = [str(rank) for rank in range(self._size)]
            found = min(map(int, self._store.multi_get(keys))) if self._store.check(keys) else -1
            if found != self.value:
                self._store.set("least", str(found))
        else:
            found = int(self._store.get("least")) if self._store.check(["least"]) else -1
        if found != self.value:
            self.value = found
            self._changed()


def _meet(store: Any, rank: int, size: int) -> str:
    """A name that only the living ranks of this very attach know.

    A store outlives restarts of its job, and may hold what processes that are dead now have said. So each rank says a word
    of its own, rank 0 answers each word with its own, and waits until every rank has repeated that.
    """
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"here/{rank}", mine)
        answer = f"there/{rank}/{mine}"
        _wait(store, answer, rank, 0, "attach")
        word: str = store.get(answer).decode()
        store.set(f"{word}/{rank}", "")
        return word
    answered: dict[int, bytes] = {}
    missing = set(range(1, size))
    deadline = time.monotonic() + _WAIT.total_seconds()
    while missing:
        for r in sorted(missing):
            if store.check([f"{mine}/{r}"]):
                missing.discard(r)
            elif store.check([f"here/{r}"]):
                said = store.get(f"here/{r}")
                if answered.get(r) != said:
                    store.set(f"there/{r}/{said.decode()}", mine)
                    answered[r] = said
        if missing and time.monotonic() > deadline:
            raise _too_late(0, min(missing), "attach")
        time.sleep(0.005 if missing else 0.0)
    return mine


def _wait(store: Any, key: str, rank: int, other: int, what: str) -> None:
    try:
        store.wait([key], _WAIT)
    except dist.DistStoreError as e:
        raise _too_late(rank, other, what) from e


def _too_late(rank: int, other: int, what: str) -> EverstepError:
    return EverstepError(
        f"rank {rank} waited {_WAIT} for rank {other} to {what}: it has died, or does not call the same functions of "
        "Everstep in the same order"
    )


def _error(rank: int, kind: str, message: str) -> Exception:
    found = getattr(errors, kind, EverstepError)
    try:
        if isinstance(found, type) and issubclass(found, EverstepError):
            return found(f"rank {rank}: {message}")
    except TypeError:  # one that wants more than a message
        pass
    return EverstepError(f"rank {rank}: {kind}: {message}")
