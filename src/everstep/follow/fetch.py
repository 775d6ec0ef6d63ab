"""From shadows on other hosts back into a trainer: one step that all of them have, over several connections to each."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from everstep.atoms import Layout
from everstep.errors import CorruptionError, LinkClosed, LinkError, LinkRefused
from everstep.follow.recover import MAX_MANIFEST_BYTES, Offer
from everstep.format import documents, parts
from everstep.format.documents import GenerationDocument, Manifest, StoredTensor
from everstep.link import addresses, messages, sockets
from everstep.link.messages import VERSION, Fetch, Fetched, Hello, Message, Region, Trouble, Welcome
from everstep.link.sockets import Channel
from everstep.memory import Bytes, new_pages
from everstep.store.runs import RunPath

NUM_STREAMS = 4
"""Connections to each shadow, over which a state comes at once."""
_MANY = 1 << 31
"""Streams of which one has next to nothing of a state but its manifest."""
_ASK_S = 5.0
_WAIT_S = 300.0
"""A shadow may be folding or writing a base when it is asked."""
_TRIES, _TRYING_S, _PAUSE_S = 5, 30.0, 0.1
"""A connection that breaks is made again, so often and for so long: what a shadow has may be nowhere else."""

T = TypeVar("T")


Generations = Sequence[GenerationDocument]
"""Of one line, newest first; none: whatever a shadow has will do."""


@dataclass
class _Stream:
    """One connection to a shadow, and where what comes over it goes."""

    address: str
    connect: Callable[[str, Callable[[Message, int], memoryview | None]], tuple[Channel, Welcome]]
    tensors: Sequence[StoredTensor] = ()
    memory: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    """Of these tensors. To be set before receive()."""
    meta: bytearray = field(default_factory=bytearray)
    channel: Channel | None = None
    got_bytes: int = 0

    def open(self) -> Welcome:
        self.channel, welcome = self.connect(self.address, self._sink)
        return welcome

    def ask(self, step: int, stream: int, num_streams: int) -> messages.State:
        """The shadow's state at a step (or the latest); then this stream's share of its bytes comes, for receive()."""
        assert self.channel is not None
        self.channel.send(Fetch(step, stream, num_streams), timeout=_ASK_S)
        found = self.channel.receive(_WAIT_S)
        if not found:
            raise LinkClosed(f"the shadow at {self.address} does not answer")
        message = found[0].message
        if isinstance(message, Trouble):
            raise _UnusableError(f"the shadow at {self.address} says: {message.text}")
        if not isinstance(message, messages.State):
            raise _UnusableError(f"the shadow at {self.address} was asked for its state and says {type(message).__name__}")
        self._ended = any(isinstance(r.message, Fetched) for r in found)  # a share of nothing
        return message

    def receive(self) -> None:
        """All that comes."""
        assert self.channel is not None
        while not self._ended:
            found = self.channel.receive(_WAIT_S)
            if not found:
                raise LinkClosed(f"the shadow at {self.address} stopped sending its state")
            for received in found:
                self._ended = self._ended or isinstance(received.message, Fetched)
                if isinstance(received.message, Region) and received.payload is not None:
                    self.got_bytes += len(received.payload)
    _ended = False

    def manifest(self) -> Manifest:
        return documents.decode(bytes(self.meta), Manifest, f"the state that the shadow at {self.address} handed out")

    def _sink(self, message: Message, num_bytes: int) -> memoryview | None:
        if isinstance(message, messages.State) and num_bytes <= MAX_MANIFEST_BYTES and not self.meta:
            self.meta = bytearray(num_bytes)
            return memoryview(self.meta)
        if isinstance(message, Region) and message.index < len(self.tensors):
            stored = self.tensors[message.index]
            if message.start + num_bytes <= stored.num_bytes:
                return memoryview(self.memory[stored.offset + message.start :][:num_bytes])
        return None

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()


def find_all(
    where: Sequence[str], path: RunPath, run: str, line: Generations = (), *, token: bytes | None = None,
    tls: ssl.SSLContext | None = None, num_streams: int = NUM_STREAMS, at_least: int = -1, step: int = -1,
    say: Callable[[str], None] = lambda text: None,
) -> Offer | None:  # fmt: skip
    """What the shadows at these addresses hold of a run, brought here: at `step`, or at the latest that all have. None, and
    why is said, if it is not all to be had, or of a step before `at_least`.

    `line` is the run's newest generation and those that it goes on from, as its folder tells. A shadow that the newest never
    reached is as good as one that it did, if it holds the step from which that generation began.
    """

    def connect(address: str, sink: Callable[[Message, int], memoryview | None]) -> tuple[Channel, Welcome]:
        return _connect(address, path, run, sink, token, tls)

    def fetch() -> Offer:
        streams = [_Stream(address, connect) for address in where]
        try:
            with ThreadPoolExecutor(len(where) * num_streams, "everstep-fetch") as pool:
                welcomes = list(pool.map(_Stream.open, streams))
                at = _common_step(where, welcomes, line) if step < 0 and len(where) > 1 else step
                return _fetch(streams, welcomes, at, at_least, line, num_streams, pool)
        finally:
            for stream in streams:
                stream.close()  # the shadows may go on

    try:
        return _insisting(fetch)
    except (LinkClosed, _UnusableError, CorruptionError) as e:
        needed = f"; of {len(where)} shadows all are needed" if len(where) > 1 else ""
        say(f"nothing is taken from shadows: {e}{needed}")
        return None
    except LinkRefused as e:
        if token is not None or tls is not None:
            raise
        say(f"nothing is taken from shadows: {e}")
        return None


def _insisting(work: Callable[[], T]) -> T:
    """What this brings over connections; it is done again if one breaks, or if bytes have changed on the way."""
    deadline = time.monotonic() + _TRYING_S
    for left in range(_TRIES - 1, -1, -1):
        try:
            return work()
        except (_UnreachableError, _UnusableError, LinkRefused):
            raise
        except LinkError:
            if not left or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)
    raise AssertionError("the last try has raised")


def _connect(
    address: str, path: RunPath, run: str, sink: Callable[[Message, int], memoryview | None], token: bytes | None,
    tls: ssl.SSLContext | None,
) -> tuple[Channel, Welcome]:  # fmt: skip
    try:
        channel = Channel(addresses.connect(address, timeout=_ASK_S, ssl_context=tls), sink)
    except LinkClosed as e:
        raise _UnreachableError(str(e)) from e
    try:
        return channel, sockets.introduce(channel, Hello(VERSION, run, path.path, 0, 0, path.rank, "fetch", {}), token)
    except BaseException:
        channel.close()
        raise


def standing(
    where: Sequence[str], path: RunPath, run: str, line: Generations, token: bytes | None = None,
    tls: ssl.SSLContext | None = None,
) -> int:  # fmt: skip
    """The greatest step that all shadows of one rank's part have received. LinkError, which says why, if there is none."""

    def ask(address: str) -> Welcome:
        channel, welcome = _connect(address, path, run, lambda message, num_bytes: None, token, tls)
        channel.close()
        return welcome

    return _common_step(where, [_insisting(partial(ask, address)) for address in where], line)


def layout_at(
    where: Sequence[str], path: RunPath, run: str, step: int, token: bytes | None = None, tls: ssl.SSLContext | None = None
) -> Layout:
    """The layout of the state that the shadows at these addresses hold, without the state. LinkError if it is not there."""

    def ask() -> Layout:
        stream = _Stream(where[0], lambda address, sink: _connect(address, path, run, sink, token, tls))
        try:
            stream.open()
            stream.ask(step, 0, _MANY)
            return stream.manifest().layout
        finally:
            stream.close()

    return _insisting(ask)


class _UnreachableError(LinkClosed):
    """There is no connection to a shadow."""


class _UnusableError(LinkError):
    """What a shadow holds is not what is needed."""


def _common_step(where: Sequence[str], welcomes: Sequence[Welcome], line: Generations) -> int:
    """The greatest step that all shadows have received and that is of this line."""
    begins = line[0].resume_step if line else 0
    found = []
    for address, welcome in zip(where, welcomes, strict=True):
        if welcome.step < 0:
            raise _UnusableError(f"the shadow at {address} holds no state of this run")
        numbers = [g.generation for g in line]
        after = line[: numbers.index(welcome.generation)] if welcome.generation in numbers else line
        if not after:
            found.append(welcome.received)
        elif (
            len(after) < len(line) and begins == min(g.resume_step for g in after)
            and welcome.step <= begins <= welcome.received
        ):  # fmt: skip
            found.append(begins)
        else:
            raise _UnusableError(
                f"the shadow at {address} is of generation {welcome.generation}; {line[0].generation} has gone on without it"
            )
    return min(found)


def _fetch(
    streams: list[_Stream], welcomes: Sequence[Welcome], step: int, at_least: int, line: Generations,
    num_streams: int, pool: ThreadPoolExecutor,
) -> Offer:  # fmt: skip
    """All at this step; every stream's bytes go where they belong in one memory. Adds the other connections to `streams`."""
    firsts = list(streams)
    states = list(pool.map(lambda s: s.ask(step, 0, num_streams), firsts))
    if states[0].step < at_least:
        raise _UnusableError(f"they hold step {states[0].step}, and step {at_least} is here")
    manifests = [s.manifest() for s in firsts]
    for index, (stream, manifest) in enumerate(zip(firsts, manifests, strict=True)):
        if manifest.part != (None if len(firsts) == 1 else (index, len(firsts))):
            raise _UnusableError(f"the shadow at {stream.address} keeps another part of the atoms than it should")
    manifests, memory = _lay_out(manifests)
    for stream, manifest in zip(firsts, manifests, strict=True):
        stream.tensors, stream.memory = manifest.tensors, memory
        streams += [_Stream(stream.address, stream.connect, manifest.tensors, memory) for _ in range(1, num_streams)]

    def more(stream: _Stream, number: int, first: messages.State) -> None:
        stream.open()
        state = stream.ask(first.step, number, num_streams)
        if (state.step, state.generation, state.timeline) != (first.step, first.generation, first.timeline):
            raise _UnusableError(f"the shadow at {stream.address} has gone on from step {first.step} to {state.step}")
        stream.receive()

    work = [pool.submit(stream.receive) for stream in firsts]
    rest = iter(streams[len(firsts) :])
    for state in states:
        work += [pool.submit(more, next(rest), number, state) for number in range(1, num_streams)]
    for each in work:
        each.result()
    got, wanted = sum(s.got_bytes for s in streams), sum(t.num_bytes for m in manifests for t in m.tensors)
    if got != wanted:
        raise _UnusableError(f"{got} bytes of a state of {wanted} were sent, and said to be all")
    generation = states[0].generation
    if len(firsts) > 1 and line:
        generation = line[0].generation
    joined = manifests[0]
    if len(firsts) > 1:
        same = [msgspec.structs.replace(m, generation=generation, timeline=manifests[0].timeline) for m in manifests]
        joined = parts.join(same, "the shadows' states")
    return Offer(
        joined.step, generation, states[0].timeline, all(s.proven for s in states), welcomes[0].pid,
        ", ".join(s.address for s in firsts), joined, "", memory,
        [frozenset(t.uid for t in m.tensors if t.of_model) for m in manifests],
    )  # fmt: skip


def _lay_out(manifests: Sequence[Manifest]) -> tuple[list[Manifest], Bytes]:
    """Memory for everything that the manifests name, and these with where in it each tensor is."""
    offset = 0
    found = []
    for manifest in manifests:
        tensors = []
        for stored in manifest.tensors:
            tensors.append(msgspec.structs.replace(stored, offset=offset))
            offset += -(-stored.num_bytes // 64) * 64
        found.append(msgspec.structs.replace(manifest, tensors=tuple(tensors)))
    return found, new_pages(max(offset, 1))
