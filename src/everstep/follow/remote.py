"""Shadows for trainers on other hosts: one process, a folder of runs, a port.

What a trainer sends (the log's own records, the run's documents, a base to begin with) lands where a trainer of this host
would have put it; from there on everything is as for a local shadow.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable

from everstep.errors import CorruptionError, EverstepError, LinkError
from everstep.follow import serve
from everstep.follow.keeper import stored
from everstep.follow.serve import Server
from everstep.follow.shadow import MEMORY, Shadow
from everstep.follow.shares import PartFrame, Share
from everstep.format import records
from everstep.format.segment import parse_name
from everstep.link import addresses, sockets
from everstep.link.auth import ServerHandshake
from everstep.link.messages import Bytes, Document, Hello, Message, Trouble
from everstep.link.messages import Share as ShareMessage
from everstep.link.protocol import Sink
from everstep.link.sockets import Channel
from everstep.store import files, retention, shared
from everstep.store.retention import Retention
from everstep.store.runs import RunPath
from everstep.store.segments import FrameEntry, StoredFrame

_ASK_S = 10.0
_MAX_DOCUMENT_BYTES = 64 << 20
_MAX_PART_BYTES = 64 << 20
_MAX_SHARE_BYTES = 8 << 20
_MAX_SEGMENT_BYTES = 1 << 42
_MAX_STRANGERS = 64
"""At once; more are not let in. Each is given ten seconds to prove itself."""
_DOCUMENTS = re.compile(
    r"run\.json|timelines/\d{4,}/(timeline\.json|generations/\d{6,}\.json|layouts/[0-9a-f]{16}\.json)"
)
_BASE_FILES = re.compile(
    r"base/(\d{4,})/(\d{12,})/(manifest\.json|rank-\d{5}\.safetensors|part-\d{5}-of-\d{5}\.(?:json|safetensors))"
)


_documents = threading.Lock()
"""Ranks send the same ones."""


class Inbox:
    """Where what one trainer sends goes (a serve.Receiver). One connection at a time."""

    def __init__(self, path: RunPath, folder: str, run: str, max_bytes: int) -> None:
        self._path = path
        self._folder = folder
        self._run = run
        self._max_bytes = max_bytes
        self._places: dict[int, shared.MemoryPlace] = {}
        self._timeline = 0
        self._generation = 0
        self._name = ""
        self._file: shared.MappedAppender | None = None
        self._got = self._good = 0
        """Bytes of it received; and of these, the bytes of frames that are right."""
        self._asked_again = False
        """Something was wrong: nothing more is taken on this connection, the trainer begins another."""
        self._is_new = False
        self._share: Share | None = None
        """The atoms of which log bytes come; None: all. Then there are gaps between these bytes."""
        self._base: dict[str, int] = {}
        self._last_steps: dict[str, int] = {}
        """Segment -> the last step of it that is here."""
        self._newest = -1
        """The last step of the generation that has arrived: they come in order."""
        self._lock = threading.Lock()

    def begin(self, hello: Hello) -> tuple[str, int]:
        if hello.purpose != "train":
            return "", 0
        with self._lock:
            if hello.generation != self._generation:
                self._drop()
            self._timeline, self._generation = hello.timeline, hello.generation
            self._asked_again = False
            if self._file is None:
                return "", 0
            self._file.truncate(self._got)  # what was under way when the connection was cut
            return f"{MEMORY}/{self._name}", self._got

    def keep_share(self, share: Share | None, *, grown: bool) -> None:
        with self._lock:
            if not grown:
                self._drop()
                for place in self._places.values():
                    place.close()
                self._places.clear()
            self._share = share

    def _drop(self) -> None:
        """Of a dead generation nothing more will come; what was not folded is of no use."""
        if self._file is not None:
            self._file.close()
        self._file, self._name, self._got, self._good, self._asked_again = None, "", 0, 0, False
        self._last_steps.clear()
        self._newest = -1
        for place in self._places.values():
            place.release(lambda path: False)
        mine = {path for place in self._places.values() for path in place.paths()}
        for folder in shared.log_folders(self._folder, self._path.rank):
            for name in files.listing(folder):
                if os.path.join(folder, name) not in mine:  # of a shadow before this one
                    os.unlink(os.path.join(folder, name))

    def sink(self, message: Message, num_bytes: int) -> memoryview | None:
        """Memory for a payload that is about to arrive; None: it is refused."""
        if isinstance(message, Document):
            fits = num_bytes <= _MAX_DOCUMENT_BYTES and _DOCUMENTS.fullmatch(message.name)
            return memoryview(bytearray(num_bytes)) if fits else None
        if isinstance(message, ShareMessage):
            return memoryview(bytearray(num_bytes)) if num_bytes <= _MAX_SHARE_BYTES else None
        if not isinstance(message, Bytes) or not 0 < num_bytes <= _MAX_PART_BYTES:
            return None
        if _BASE_FILES.fullmatch(message.segment):
            return memoryview(bytearray(num_bytes))
        with self._lock:
            return self._log_memory(message, num_bytes)

    def _log_memory(self, message: Bytes, num_bytes: int) -> memoryview | None:
        """Only what comes next in the log is written; what is there already is not touched again."""
        place, _, name = message.segment.partition("/")
        parsed = parse_name(name)
        if place != MEMORY or parsed is None or parsed[0] != self._generation:
            return None
        self._is_new = False
        memory = self._place()
        if self._asked_again:
            return memoryview(bytearray(num_bytes))  # it comes again, on another connection
        if name != self._name:
            current = parse_name(self._name)
            if current is not None and parsed < current:
                return memoryview(bytearray(num_bytes))  # said twice: what comes next is not in an older segment
            if message.offset or memory.num_bytes() + num_bytes > self._max_bytes:
                return None
            if self._file is not None:
                # More than was announced: the shadow may have found frames that came before a connection was cut.
                self._last_steps[self._file.path] = parsed[1] - 1
                self._file.close()
            path = os.path.join(memory.folder, name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of a shadow before this one
            self._file, self._name, self._got, self._good = memory.create(path), name, 0, 0
        elif message.offset < self._got:
            return memoryview(bytearray(num_bytes))  # said twice
        assert self._file is not None
        if message.offset != self._got and self._share is None:
            return None
        if message.offset + num_bytes > _MAX_SEGMENT_BYTES or self._file.used_bytes + num_bytes > self._max_bytes:
            return None
        self._is_new = True
        self._file.truncate(message.offset)
        return memoryview(self._file.reserve(num_bytes))

    def _place(self) -> shared.MemoryPlace:
        if self._timeline not in self._places:
            folder = shared.log_folder(self._folder, self._timeline, self._path.rank)
            self._places[self._timeline] = shared.MemoryPlace(folder, sparse=self._share is not None)
        return self._places[self._timeline]

    def take(self, message: Bytes | Document, payload: memoryview | None) -> None:
        assert payload is not None
        if isinstance(message, Document):
            self._document(message.name, bytes(payload))
            return
        if _BASE_FILES.fullmatch(message.segment):
            self._base_part(message, payload)
            return
        with self._lock:
            # Room may have been made for it before a frame ahead of it was found to be damaged.
            is_next = message.segment == f"{MEMORY}/{self._name}" and message.offset >= self._got
            if self._is_new and is_next and not self._asked_again:
                self._got = message.offset + len(payload)

    def _document(self, name: str, data: bytes) -> None:
        path = os.path.join(self._path.path, name)
        files.make_dirs(os.path.dirname(path))
        if name.endswith("/timeline.json"):
            timeline = int(name.split("/")[1])
            for folder in (self._path.generations, self._path.layouts, self._path.bases, self._path.log):
                files.make_dirs(folder(timeline))
        with _documents:
            with contextlib.suppress(FileNotFoundError):
                if files.read_whole(path) == data:
                    return
            files.write_whole(path, data)

    def _base_part(self, message: Bytes, payload: memoryview) -> None:
        """A part of a base's file. The manifest comes last, and with it the base exists."""
        found = _BASE_FILES.fullmatch(message.segment)
        assert found is not None
        folder = os.path.join(self._path.bases(int(found[1])), found[2])
        if found[3].endswith(".json"):
            for name in self._base:
                files.sync_file(os.path.join(folder, name))
            self._base.clear()
            files.write_whole(os.path.join(folder, found[3]), bytes(payload))
            return
        files.make_dirs(folder)
        expected = self._base.get(found[3], 0) if message.offset else 0
        if message.offset != expected:
            raise LinkError(f"{message.segment}: bytes from {message.offset} on, but {expected} were next")
        with open(os.path.join(folder, found[3]), "wb" if not message.offset else "r+b") as f:
            f.seek(message.offset)
            f.write(payload)
        self._base[found[3]] = message.offset + len(payload)

    def problem(self, entry: FrameEntry) -> str | None:
        with self._lock:
            if self._asked_again:
                return None
            if os.path.basename(entry.path) != self._name:
                return None if entry.step <= self._newest else self._again("it has not arrived")
            if entry.end_offset <= self._good and entry.step <= self._newest:
                return ""
            if entry.end_offset > self._got:
                return self._again("it has not arrived")
            parsed = parse_name(self._name)
            assert parsed is not None
            try:
                seed = records.seed_of(bytes.fromhex(self._run), parsed[0], self._path.rank, parsed[1])
                reader = shared.MappedReader(entry.path)
                share = self._share
                frame = StoredFrame(entry, reader, seed) if share is None else PartFrame(entry, reader, seed).of(share)
                frame.check_payloads()
            except (CorruptionError, OSError, ValueError) as e:
                return self._again(str(e))
            self._good = max(self._good, entry.end_offset)
            self._newest = max(self._newest, entry.step)
            self._last_steps[entry.path] = self._newest
            return ""

    def _again(self, why: str) -> str:
        """From the last good frame on, when there is another connection."""
        self._asked_again = True
        self._got = self._good
        return why

    @property
    def good(self) -> tuple[str, int]:
        """The segment that is being received, and up to where all is right."""
        return f"{MEMORY}/{self._name}" if self._name else "", self._good

    def release(self, folded: int) -> None:
        """The shadow has folded so far: memory of older segments is used again."""
        with self._lock:
            place = self._places.get(self._timeline)
            if place is not None:
                for path in place.release(lambda path: self._last_steps.get(path, 1 << 62) > folded):
                    self._last_steps.pop(path, None)

    def close(self) -> None:
        with self._lock:
            self._drop()
            for place in self._places.values():
                place.close()


class _Hosted:
    """The shadow of one run, or of one rank's part of it, in this process."""

    def __init__(
        self, path: RunPath, run: str, claims: _Claims, *, interval: int, max_bytes: int, idle_s: float,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        folder = shared.shared_folder(run, path.path)
        shared.make_private(folder)
        self._claims = claims
        claims.add(folder)
        self.shadow = Shadow(path, folder, run=run, base_interval=interval, idle_s=idle_s, sweeps=False, say=say)
        self.inbox = Inbox(path, folder, run, max_bytes)
        self.server = Server(self.shadow, run, self.inbox)
        tell = self.shadow.tell

        def told(kind: str, value: object) -> None:
            if kind == "progress":
                self.inbox.release(self.shadow.progress.folded)
                self._retain()
            tell(kind, value)

        self.shadow.tell = told
        self._path = path
        self._retained = -1
        self.thread = threading.Thread(target=self._run, name=f"everstep-{run[:8]}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.server.run()
        finally:
            self.inbox.close()
            if self.shadow.is_stored or self.shadow.is_dismissed:
                shared.remove(self.shadow.folder, [self._path.rank])
            self._claims.drop(self.shadow.folder)

    def _retain(self) -> None:
        """Two bases are enough here: the history is the trainer's."""
        base = self.shadow.progress.base
        if base > self._retained and not self.shadow.is_leaving:
            self._retained = base
            bases, _ = stored(self._path, self.shadow.timeline, self.shadow.part)
            retention.execute(retention.plan_removal(Retention(bases=2), bases, [], base))


class _Claims:
    """Runs' folders in memory, each held as long as a shadow of one of its ranks is here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, tuple[int, int]] = {}
        """Folder -> descriptor of its lock, how many need it."""

    def add(self, folder: str) -> None:
        """LinkError if another process has it."""
        with self._lock:
            lock, count = self._held.get(folder) or (serve.claim(folder), 0)
            self._held[folder] = lock, count + 1

    def drop(self, folder: str) -> None:
        with self._lock:
            lock, count = self._held.pop(folder)
            if count > 1:
                self._held[folder] = lock, count - 1
            else:
                os.close(lock)


class Host:
    """Listens for trainers of other hosts and keeps a shadow for each of their runs, or of these runs' ranks."""

    def __init__(
        self, folder: str, *, token: bytes | None, tls: ssl.SSLContext | None, interval: int, max_bytes: int, idle_s: float,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._folder = os.path.abspath(folder)
        self._token, self._tls = token, tls
        self._interval, self._max_bytes, self._idle_s = interval, max_bytes, idle_s
        self._say = say
        self._lock = threading.Lock()
        self._claims = _Claims()
        self._runs: dict[tuple[str, int], _Hosted] = {}
        """By run and rank."""
        self._strangers = threading.Semaphore(_MAX_STRANGERS)
        """Taken by connections that have not proven to have the token."""

    def accept(self, listener: socket.socket) -> None:
        """Serve everyone who connects, each in a thread. Returns when the listener is closed."""
        while True:
            try:
                sock = addresses.accept(listener)
            except OSError:
                if listener.fileno() < 0:
                    return
                time.sleep(serve.ACCEPT_AGAIN_S)
                continue
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        sinks: list[Sink] = []
        try:
            with contextlib.ExitStack() as opened:
                try:
                    if self._tls is not None:
                        sock = addresses.serve_tls(sock, self._tls)
                    channel = opened.enter_context(Channel(sock, lambda m, n: sinks[0](m, n) if sinks else None))
                    handshake = sockets.listen_to(channel, self._token)
                finally:
                    self._strangers.release()
                self._serve_proven(channel, handshake, sinks)
        except (EverstepError, OSError) as e:
            self._say(f"a connection ended: {e}")

    def _serve_proven(self, channel: Channel, handshake: ServerHandshake, sinks: list[Sink]) -> None:
        """A client that has the token. What it sends goes to the sink that is added here."""
        try:
            hosted = self._hosted(handshake.hello)
        except EverstepError as e:
            sockets.refuse(channel, handshake, str(e))
            return
        if hosted is None:
            sockets.admit(channel, handshake)
            channel.receive(_ASK_S)
            channel.send(Trouble(f"this shadow knows nothing of run {handshake.hello.run}"), timeout=_ASK_S)
            return

        def sink(message: Message, num_bytes: int) -> memoryview | None:
            if isinstance(message, Bytes) and not hosted.server.is_trainer(channel):
                return None
            return hosted.inbox.sink(message, num_bytes)

        sinks.append(sink)
        hosted.server.serve(channel, handshake)

    def _hosted(self, hello: Hello) -> _Hosted | None:
        """The run's shadow; a trainer gets a new one where there is none."""
        if not re.fullmatch(r"[0-9a-f]{32}", hello.run):
            raise LinkError(f"{hello.run!r} is no run id")
        if hello.rank >= serve.MAX_RANKS:
            raise LinkError(f"there is no rank {hello.rank}")
        name = f"{hello.run[:8]} rank {hello.rank}" if hello.rank else hello.run[:8]
        with self._lock:
            found = self._runs.get((hello.run, hello.rank))
            if found is not None and found.shadow.is_over:
                found.thread.join()  # the next one has what it has left on disk
            if found is None or not found.thread.is_alive():
                path = RunPath(os.path.join(self._folder, hello.run), hello.rank)
                if hello.purpose != "train" and not path.exists():
                    return None
                found = self._runs[hello.run, hello.rank] = _Hosted(
                    path, hello.run, self._claims, interval=self._interval, max_bytes=self._max_bytes, idle_s=self._idle_s,
                    say=lambda text: self._say(f"{name} {text}"),
                )  # fmt: skip
        if hello.purpose == "fetch":
            found.shadow.stand_up()
        return found

    def close(self) -> None:
        """Every shadow leaves a base and ends."""
        for hosted in self._runs.values():
            hosted.shadow.end(base=True)
        for hosted in self._runs.values():
            hosted.thread.join()


def main(
    listen: str, folder: str, *, token: bytes | None, certfile: str | None, keyfile: str | None, interval: int,
    max_bytes: int, idle_s: float, ready: Callable[[socket.socket], None] = lambda listener: None,
) -> None:  # fmt: skip
    """`everstep shadow`: until interrupted, or told to end (SIGTERM: what service managers send)."""
    address = addresses.parse_address(listen)
    addresses.must_have_token(address.host, token)
    tls = addresses.server_context(certfile, keyfile) if certfile is not None else None

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    files.make_dirs(os.path.abspath(folder))
    host = Host(folder, token=token, tls=tls, interval=interval, max_bytes=max_bytes, idle_s=idle_s, say=say)
    listener = addresses.listen(address)
    acceptor = threading.Thread(target=host.accept, args=(listener,), daemon=True)
    # Waited for, not handled: a handler could miss one that comes right before a call that blocks.
    told_to_end = (signal.SIGINT, signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, told_to_end)
    try:
        acceptor.start()
        ready(listener)
        signal.sigwait(told_to_end)
        say("ending: every run gets a base at its last step")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # else accept() goes on waiting
        listener.close()
        acceptor.join()
        host.close()
