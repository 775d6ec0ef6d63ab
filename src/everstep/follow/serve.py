"""The shadow's process: listens, lets trainers in, passes what they say to the Shadow. Outlives them.

    python -m everstep.follow.serve RUN --folder FOLDER-IN-MEMORY ...
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from everstep.background import give_way
from everstep.errors import EverstepError, LinkError
from everstep.follow.arena import AtHand
from everstep.follow.shadow import DISK, MEMORY, Handout, Progress, Shadow
from everstep.follow.shares import Share
from everstep.link import addresses, sockets
from everstep.link.auth import ServerHandshake
from everstep.link.messages import (
    Ack,
    Bye,
    Close,
    Document,
    Fetch,
    Fetched,
    Frame,
    Hello,
    Message,
    Mismatch,
    Region,
    Resend,
    Resume,
    State,
    Status,
    StatusReply,
    Trouble,
)
from everstep.link.messages import Bytes as LogBytes
from everstep.link.messages import Share as ShareMessage
from everstep.link.protocol import Received
from everstep.link.sockets import Channel
from everstep.store import files, shared
from everstep.store.runs import RunPath
from everstep.store.segments import FrameEntry

SOCKET = "shadow.sock"
LOCK = "shadow.lock"
OUTPUT = "shadow.log"
REGION_BYTES = 4 << 20
MAX_SHADOWS = 1024
"""That share a run's atoms."""
MAX_RANKS = 1 << 16
_REGION_S = 60.0
_COUNT_S = 5.0
"""How long who asks waits for frames to be counted that a dead trainer has left."""
ACCEPT_AGAIN_S = 0.05
"""After a connection could not be taken: the process may have no descriptor left for it."""
_TELL_S = 2.0
"""A trainer that does not listen for so long is let go; it connects again."""


def no_payload(message: Message, num_bytes: int) -> memoryview | None:
    """A sink for connections on which no payload is expected."""
    return None


class Receiver(Protocol):
    """What a trainer on another host sends, on its way into this host's memory and disk."""

    def begin(self, hello: Hello) -> tuple[str, int]:
        """A connection begins: the segment that was received last, and up to where."""
        ...

    def problem(self, entry: FrameEntry) -> str | None:
        """What is wrong with a frame as it arrived; empty if nothing is; None if it will come again anyway."""
        ...

    @property
    def good(self) -> tuple[str, int]:
        """Segment and offset up to which everything arrived as it was written."""
        ...

    def take(self, message: LogBytes | Document, payload: memoryview | None) -> None:
        """The payload of this message is complete."""
        ...

    def keep_share(self, share: Share | None, *, grown: bool) -> None:
        """Only what these atoms need will be sent from here on. Unless the share has `grown`, what was sent is of no use."""
        ...


@dataclass
class _Client:
    """A connection of a trainer."""

    channel: Channel
    hello: Hello
    share: tuple[ShareMessage, memoryview] | None = None
    """What it has said that the shadow is to keep; None: everything."""


class Server:
    """Connections to one Shadow: of a run, or of one rank's part of it."""

    def __init__(self, shadow: Shadow, run: str, receiver: Receiver | None = None) -> None:
        self._shadow = shadow
        self._run = run
        self._receiver = receiver
        """For trainers on other hosts."""
        self._lock = threading.Lock()
        self._trainer: Channel | None = None
        self._is_closed = False
        self._telling = threading.Lock()
        """What is told last is newest: several threads tell how far the shadow is."""
        self._trainer_generation = self._trainer_timeline = 0
        self._began = time.time()
        shadow.tell = self._tell

    def run(self) -> None:
        """The shadow's life, in this thread. A trainer that is still connected when it ends must find another."""
        try:
            self._shadow.run()
        finally:
            with self._lock:
                self._is_closed = True
                if self._trainer is not None:
                    self._trainer.close()

    def serve(self, channel: Channel, handshake: ServerHandshake) -> None:
        """A client that has proven itself, until it goes."""
        reason = self._refusal(handshake.hello, channel)
        if reason:
            sockets.refuse(channel, handshake, reason)
            return
        if handshake.hello.purpose == "fetch":
            self._shadow.count(_COUNT_S)  # of several shadows, which step all have depends on it
        try:
            segment, offset = "", 0
            if self._receiver is not None and self.is_trainer(channel):
                segment, offset = self._receiver.begin(handshake.hello)
            generation, progress = self._shadow.standing()
            sockets.admit(
                channel, handshake, generation=generation, step=progress.folded, received=progress.received,
                base=progress.base, segment=segment, offset=offset,
            )  # fmt: skip
            if handshake.hello.purpose == "train":
                self._train(_Client(channel, handshake.hello))
            else:
                {"fetch": self._fetch, "status": self._status}[handshake.hello.purpose](channel)
        finally:
            with self._lock:
                if self._trainer is channel:
                    self._trainer = None
                    self._shadow.trainer_gone()

    def is_trainer(self, channel: Channel) -> bool:
        """Whether this is the trainer's connection. One of a newer generation becomes that by its resume."""
        return self._trainer is channel

    def _refusal(self, hello: Hello, channel: Channel) -> str:
        """Why this client may not go on; empty if it may. A trainer of the generation that was here is here again."""
        if hello.run != self._run:
            return f"this is the shadow of run {self._run}, not of {hello.run}"
        if self._is_closed:
            return "this shadow is about to end"
        if hello.purpose != "train":
            return ""
        with self._lock:
            reason = self._why_not(hello)
            if not reason and hello.generation == self._trainer_generation:
                self._trainer, self._trainer_timeline = channel, hello.timeline
                self._shadow.attached = True
            return reason

    def _why_not(self, hello: Hello) -> str:
        """Why this is not to be the trainer. With the lock."""
        newest = max(self._trainer_generation, self._shadow.generation)
        if hello.generation < newest:
            return f"generation {hello.generation} has been superseded by {newest}"
        if self._trainer is not None and hello.generation == self._trainer_generation:
            return f"another trainer of generation {hello.generation} is connected"
        return ""

    def _take_over(self, client: _Client) -> None:
        """A trainer of a newer generation has brought what there is to know of it, and is the trainer from here on."""
        hello = client.hello
        try:
            self._shadow.path.read_generation(hello.timeline, hello.generation)
        except (EverstepError, FileNotFoundError) as e:
            raise LinkError(f"nothing is known of generation {hello.generation}: {e}") from e
        with self._lock:
            reason = self._why_not(hello)
            if reason:
                raise LinkError(reason)
            before, self._trainer, self._trainer_generation = self._trainer, client.channel, hello.generation
            self._trainer_timeline = hello.timeline
            self._shadow.attached = True
        if before is not None:
            before.close()
        if self._receiver is not None:
            self._receiver.begin(hello)

    # -- a trainer ----------------------------------------------------------------------------------------------------

    def _train(self, client: _Client) -> None:
        while True:
            for received in client.channel.receive():
                self._hear(client, received)

    def _hear(self, client: _Client, received: Received) -> None:
        shadow, channel, message = self._shadow, client.channel, received.message
        if isinstance(message, (Frame, LogBytes)) and not self.is_trainer(channel):
            raise LinkError(f"{type(message).__name__} comes before Resume")
        if isinstance(message, Frame):
            entry = FrameEntry(
                message.step, message.offset, message.footer_offset, self._segment(message.segment),
                self._trainer_generation, message.end_offset,
            )  # fmt: skip
            if self._receiver is not None:
                wrong = self._receiver.problem(entry)
                if wrong:
                    channel.send(Resend(*self._receiver.good, wrong), timeout=_TELL_S)
                if wrong is None:
                    shadow.all_have(message.watermark)
                if wrong != "":
                    return
            shadow.frame(entry, message.watermark)
        elif self._receiver is not None and isinstance(message, (LogBytes, Document)):
            self._receiver.take(message, received.payload)
        elif self._receiver is not None and isinstance(message, ShareMessage):
            assert received.payload is not None
            client.share = _checked(message, received.payload)
            if self.is_trainer(channel):
                self._keep_share(client)
        elif isinstance(message, Resume):
            if (message.timeline, message.generation) != (client.hello.timeline, client.hello.generation):
                raise LinkError(f"{message} is not of generation {client.hello.generation}")
            if not self.is_trainer(channel):
                self._take_over(client)
                self._keep_share(client)
            elif client.share is None:
                self._keep_share(client)
            shadow.resume(message.timeline, message.generation, message.step, message.interval)
        elif isinstance(message, Close):
            channel.send(Bye(), timeout=_TELL_S)
            if message.finish:
                shadow.end(base=False)
        else:
            raise LinkError(f"a trainer does not say {type(message).__name__} here")

    def _keep_share(self, client: _Client) -> None:
        if self._receiver is None:
            return
        if client.share is None:  # a trainer with one shadow
            self._receiver.keep_share(None, grown=self._shadow.keep_share(None, None, 0))
            return
        message, payload = client.share
        share = frozenset(np.frombuffer(payload, "<u8").tolist())
        grown = self._shadow.keep_share((message.index, message.count), share, message.interval)
        self._receiver.keep_share(share, grown=grown)

    def _segment(self, name: str) -> str:
        """The file that a trainer of this host means: in memory or on disk, never elsewhere."""
        place, _, file = name.partition("/")
        if place == MEMORY and "/" not in file:
            rank = self._shadow.path.rank
            return os.path.join(shared.log_folder(self._shadow.folder, self._trainer_timeline, rank), file)
        if place == DISK and "/" not in file:
            return os.path.join(self._shadow.path.log(self._trainer_timeline), file)
        raise LinkError(f"{name!r} is not a segment of this run")

    def _tell(self, kind: str, value: Any) -> None:
        """In any thread."""
        channel = self._trainer
        if channel is None:
            return
        try:
            with self._telling:
                channel.send(_told(kind, value), timeout=_TELL_S)
        except LinkError:
            channel.close()

    # -- others -------------------------------------------------------------------------------------------------------

    def _fetch(self, channel: Channel) -> None:
        for received in channel.receive(30.0):
            if not isinstance(received.message, Fetch):
                raise LinkError(f"Fetch was expected, not {type(received.message).__name__}")
            try:
                handout: Handout = self._shadow.hand_out(received.message.step)
            except EverstepError as e:
                channel.send(Trouble(str(e)))
                return
            try:
                channel.send(
                    State(
                        handout.step, handout.generation, handout.timeline, handout.proven,
                        handout.file if self._receiver is None else "", handout.num_bytes,
                    ),
                    memoryview(handout.manifest if received.message.stream == 0 else b""),
                )  # fmt: skip
                if self._receiver is not None:
                    self._send_regions(channel, handout, received.message)
                done = channel.receive(600.0)
                if done and isinstance(done[0].message, Trouble):
                    self._shadow.look_again()
                elif not done or not isinstance(done[0].message, Fetched):
                    raise LinkError("the state that was handed out was not acknowledged")
            finally:
                handout.done()

    def _send_regions(self, channel: Channel, handout: Handout, asked: Fetch) -> None:
        """The state itself, for a trainer that cannot map it; what this stream has of it, if there are several."""
        number = 0
        for index, memory in enumerate(handout.regions()):
            for start in range(0, len(memory), REGION_BYTES):
                if number % asked.num_streams == asked.stream:
                    channel.send(Region(index, start), memory[start : start + REGION_BYTES], timeout=_REGION_S)
                number += 1
        channel.send(Fetched(), timeout=_REGION_S)

    def _status(self, channel: Channel) -> None:
        for received in channel.receive(30.0):
            if isinstance(received.message, Status):
                channel.send(StatusReply(json.dumps(self.status())))

    def status(self) -> dict[str, Any]:
        p = self._shadow.progress
        return {
            "pid": os.getpid(), "run": self._run, "path": self._shadow.path.path, "rank": self._shadow.path.rank,
            "timeline": self._shadow.timeline,
            "generation": self._shadow.generation, "trainer": self._trainer is not None, "received": p.received,
            "part": self._shadow.part, "folded": p.folded, "base": p.base, "durable": p.durable, "proven": p.proven,
            "rss_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "cpu_s": time.process_time(),
            "up_s": time.time() - self._began,
        }  # fmt: skip


def _told(kind: str, value: Any) -> Message:
    """What a shadow tells its trainer, as of now."""
    if kind in ("progress", "received"):
        p: Progress = value
        return Ack(
            p.received, p.folded, p.base, p.durable, p.proven, p.writing, p.base_bytes, int(p.base_s * 1e6),
            p.num_folded, int(p.fold_s * 1e6), int(p.fold_cpu_s * 1e6),
        )  # fmt: skip
    if kind == "mismatch":
        return Mismatch(*value)
    if kind == "needs base":
        return Resend("base", max(value, 0), "a state to go on from")
    return Trouble(value)


def _checked(message: ShareMessage, payload: memoryview) -> tuple[ShareMessage, memoryview]:
    if not (message.index < message.count <= MAX_SHADOWS and message.interval and len(payload) % 8 == 0):
        raise LinkError(f"{message} is no share of a run's atoms")
    return message, payload


class LocalHost:
    """The shadows of a run's ranks on this host, in one process: one for each rank whose trainer has come."""

    def __init__(self, run: str, make: Callable[[int], Shadow]) -> None:
        self._run = run
        self._make = make
        self._lock = threading.Lock()
        self._shadows: dict[int, tuple[Shadow, Server, threading.Thread]] = {}
        self._ending = False

    def accept(self, listener: socket.socket) -> None:
        """Serve everyone who connects, each in a thread. Returns when the listener is closed."""
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                if listener.fileno() < 0:
                    return
                time.sleep(ACCEPT_AGAIN_S)
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(LinkError, OSError), Channel(sock, no_payload) as channel:
            handshake = sockets.listen_to(channel)
            hello = handshake.hello
            if hello.run != self._run:
                sockets.refuse(channel, handshake, f"this is the shadow of run {self._run}, not of {hello.run}")
                return
            server = self._server(hello.rank, is_trainer=hello.purpose == "train")
            if server is None:
                sockets.refuse(channel, handshake, f"there is no shadow of rank {hello.rank} here")
                return
            server.serve(channel, handshake)

    def _server(self, rank: int, *, is_trainer: bool) -> Server | None:
        """Of a rank's shadow; a trainer gets a new one where there is none."""
        with self._lock:
            found = self._shadows.get(rank)
            if found is not None and found[2].is_alive():
                return found[1]
            if not is_trainer or self._ending or rank >= MAX_RANKS:
                return None
            shadow = self._make(rank)
            server = Server(shadow, self._run)
            thread = threading.Thread(target=server.run, name=f"everstep-rank-{rank}", daemon=True)
            self._shadows[rank] = shadow, server, thread
            thread.start()
            return server

    def wait(self, folder: str, idle_s: float) -> list[int]:
        """Until all shadows have ended, or nobody has come for so long, or the folder is gone and nobody will; ranks of
        whose log nothing needs to be kept."""
        begun = time.monotonic()
        while True:
            with self._lock:
                alive = [thread for _, _, thread in self._shadows.values() if thread.is_alive()]
                forlorn = time.monotonic() - begun > idle_s or not os.path.isdir(folder)
                if not alive and (self._shadows or self._ending or forlorn):
                    self._ending = True
                    return [r for r, (shadow, _, _) in self._shadows.items() if shadow.is_stored or shadow.is_dismissed]
            if alive:
                alive[0].join(0.5)
            else:
                time.sleep(0.02)

    def end(self) -> None:
        """Every shadow leaves a base and ends. From a signal handler: takes no lock."""
        self._ending = True
        for shadow, _, _ in list(self._shadows.values()):
            shadow.end(base=True)


def claim(folder: str) -> int:
    """Take a run's folder in memory for a shadow of this process, without what a dead one has left; its lock."""
    lock = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise LinkError("another shadow of this run is there already") from None
    for name in files.listing(folder):
        if name.startswith("state-"):  # of a shadow that was killed
            os.unlink(os.path.join(folder, name))
    return lock


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="everstep-shadow", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--folder", required=True, help="the run's folder in memory")
    parser.add_argument("--interval", type=int, default=200, help="steps between bases")
    parser.add_argument("--idle", type=float, default=600.0, help="seconds without a trainer after which it ends")
    parser.add_argument("--keep-log", action="store_true", help="copy the log to the run's folder on disk")
    parser.add_argument("--register", action="append", default=[], help="module:Class of an optimizer to import")
    args = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the trainer
    give_way()

    import torch

    from everstep.fold import register

    torch.set_num_threads(1)
    for name in args.register:
        module, _, qualname = name.partition(":")
        register(getattr(importlib.import_module(module), qualname))
    if not os.path.isdir(args.folder):
        print("the run was closed meanwhile", flush=True)
        return 0
    try:
        claim(args.folder)
    except LinkError as e:
        print(e, flush=True)
        return 1
    run = RunPath(args.run).read_run().run

    def make(rank: int) -> Shadow:
        return Shadow(
            RunPath(args.run, rank), args.folder, run=run, base_interval=args.interval, keep_log=args.keep_log,
            idle_s=args.idle,
            say=lambda text: print(f"{time.strftime('%H:%M:%S')} rank {rank}: {text}", flush=True), at_hand=AtHand(),
        )  # fmt: skip

    host = LocalHost(run, make)
    listener = addresses.listen(addresses.parse_address(f"unix://{args.folder}/{SOCKET}"))
    threading.Thread(target=host.accept, args=(listener,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: host.end())
    stored: list[int] = []
    try:
        stored = host.wait(args.folder, args.idle)
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(args.folder, SOCKET))
        shared.remove(args.folder, stored, everything=not os.path.isdir(args.run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
