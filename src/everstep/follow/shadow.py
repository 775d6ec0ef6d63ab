"""The eager follower: folds each frame as it arrives, holds the newest state in shared memory, writes the bases.

One thread (run()) owns the state; connections give it work and are told how far it is. It outlives its trainer.

Of several shadows each keeps a share of the atoms, or the line of one rank, and folds only what all have received: so that
all can serve one step.
"""

from __future__ import annotations

import base64
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from everstep.errors import CorruptionError, EverstepError, StepNotFoundError, StorageError
from everstep.fold import OptimizerState, State
from everstep.follow.arena import AtHand, Home
from everstep.follow.compact import Held, describe
from everstep.follow.kept import LogCopy
from everstep.follow.shares import PartFrame, Share
from everstep.format import documents, records
from everstep.format.documents import GenerationDocument, Manifest, StoredTensor
from everstep.format.parts import Part
from everstep.format.segment import parse_name
from everstep.frame import Update
from everstep.restore.execute import check_chain
from everstep.restore.plan import Line, line_of
from everstep.store import files, shared
from everstep.store.bases import base_folder, is_there, only_part
from everstep.store.runs import RunPath, read_listing
from everstep.store.segments import FrameEntry, Segment, StoredFrame

MEMORY, DISK = "memory", "disk"
"""Where a segment is: the first part of its name in messages."""
_BATCH_FRAMES = 16
AT_ONCE_FRAMES = 2
"""So many are waited for: folded together they take the state through memory once, and one look at its hashes."""
_PATIENCE_S = 0.5
"""A frame that stays alone is folded after so long."""
_MAX_WAITING_BASES = 8
_MAX_READERS = 64
_STAND_UP_S = 300.0
_AGAIN_S = 2.0
_ASKED_S = 10.0
"""It does not end before a trainer that has asked how far it is has had so long to come."""
"""After storage has failed, it is tried again after so long."""


@dataclass
class Progress:
    """How far the shadow is. -1: not yet."""

    received: int = -1
    folded: int = -1
    base: int = -1
    durable: int = -1
    """On this host's disk: the last step of the log that is kept there, or of the newest base."""
    proven: int = -1
    writing: bool = False
    """A base, now."""
    base_bytes: int = 0
    """Of the last one that this process has written, and what that took."""
    base_s: float = 0.0
    num_folded: int = 0
    """Steps, by this process, and what they took in all."""
    fold_s: float = 0.0
    fold_cpu_s: float = 0.0


@dataclass
class Handout:
    """The state at one step, ready to be mapped. It does not change before `done` is called."""

    step: int
    generation: int
    timeline: int
    proven: bool
    manifest: bytes
    file: str
    num_bytes: int
    done: Callable[[], None] = field(repr=False)
    regions: Callable[[], list[memoryview]] = field(repr=False)
    """The bytes of each tensor of the manifest, in its order."""


@dataclass
class _Given:
    """What a state was described as when it was last handed out, or in advance: it holds until the state changes."""

    state: State
    key: tuple[int, int, int]
    """Timeline, generation, step."""
    manifest: bytes
    file: str
    num_bytes: int
    stored: tuple[StoredTensor, ...]


class Shadow:
    """S(newest) of one run, or of one rank's part of it, in memory."""

    def __init__(
        self, path: RunPath, folder: str, *, run: str, base_interval: int, keep_log: bool = False, num_workers: int = 1,
        idle_s: float = 600.0, sweeps: bool = True, say: Callable[[str], None] = lambda text: None,
        at_hand: AtHand | None = None,
    ) -> None:  # fmt: skip
        """`at_hand`: where it holds memory for the next trainer, if that is of this host."""
        self.path = path
        self.folder = folder
        self._run = run
        self._interval = base_interval
        self._keep_log = keep_log
        self._num_workers = num_workers
        self._idle_s = idle_s
        self._sweeps = sweeps
        self._say = say
        self._work = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], threading.Event | None]] = deque()
        self._entries: dict[int, FrameEntry] = {}
        self._early: dict[int, FrameEntry] = {}
        """Frames of a generation that this thread has not gone on to yet."""
        self._early_watermark = -1
        self._held: Held | None = None
        self._home = Home(folder)
        self._fingerprint: dict[str, Any] = {}
        self._readers: dict[str, shared.MappedReader | files.Reader] = {}
        self._copy = LogCopy()
        self._unkept: dict[int, tuple[str, FrameEntry]] = {}
        """Frames that are folded, or will not be here, and are to be in the log on disk: under which name there."""
        self._acknowledge_at = self._base_at = 0.0
        """When what storage had no room for may be tried again."""
        self._asked_at = -1
        """Where it holds still, and has asked for a base, since what comes next is missing."""
        self._from_base_at: float | None = None
        """When a base is to be loaded that could not be."""
        self._handed_out = 0
        self._given: _Given | None = None
        self._prepared: tuple[int, int, int] | None = None
        self._at_hand = at_hand
        self.timeline = self.generation = 0
        self.watermark = -1
        """Frames above this step wait: other shadows do not have them yet. Without others it is what has been received."""
        self._part: Part | None = None
        self._share: Share | None = None
        """The atoms that this shadow keeps; None: all."""
        self._atoms: Share = frozenset()
        """Those that it holds or is about to."""
        self._default_interval = base_interval
        self._document: GenerationDocument | None = None
        """Of the generation that it follows."""
        self.progress = Progress()
        self.attached = False
        """Whether a trainer is connected."""
        self._since = time.monotonic()
        self._ending = self.is_leaving = False
        """It will end, or is about to."""
        self.is_over = False
        """Nothing will be done any more."""
        self.is_dismissed = False
        self.tell: Callable[[str, Any], None] = lambda kind, value: None
        """Set by the server: ("progress" | "received" | "mismatch" | "trouble" | "needs base", value)."""

    # -- called by connections ----------------------------------------------------------------------------------------

    def do(self, job: Callable[[], None], done: threading.Event | None = None) -> None:
        """Run this in the shadow's thread, between two folds; then, or when it will not be run any more, set `done`."""
        with self._work:
            if not self.is_over:
                self._jobs.append((job, done))
                self._work.notify_all()
            elif done is not None:
                done.set()

    def frame(self, entry: FrameEntry, watermark: int) -> None:
        """A frame is complete in the log."""
        with self._work:
            held = self._held
            if entry.generation > self.generation:
                self._early[entry.step] = entry
                self._early_watermark = max(self._early_watermark, watermark)
                return
            if entry.generation == self.generation and (held is None or held.step is None or entry.step > held.step):
                self._entries[entry.step] = entry
            self.progress.received = max(self.progress.received, entry.step)
            self.watermark = max(self.watermark, watermark)
            self._work.notify_all()
        if entry.step > self.watermark:
            self.tell("received", self.progress)  # others wait for this

    def standing(self) -> tuple[int, Progress]:
        """Generation and progress as of one moment: what a trainer that is attached by then is told stays true."""
        with self._work:
            return self.generation, replace(self.progress)

    def all_have(self, step: int) -> None:
        """The watermark alone: frames up to this step have been received by all."""
        with self._work:
            self.watermark = max(self.watermark, step)
            self._work.notify_all()

    def keep_share(self, part: Part | None, share: Share | None, interval: int) -> bool:
        """This is one of several shadows, which keeps these atoms and writes bases at multiples of `interval`; or it is the
        only one (None). Whether what it holds and has received is still of use."""
        with self._work:
            grown = self._part == part and (share is None or self._atoms <= share)
            self._part, self._share = part, share
            self._interval = interval or self._default_interval
            if not grown:
                self._entries, self._early = {}, {}
                self._atoms = share or frozenset()
        if not grown:
            self.do(self._forget)
        return grown

    @property
    def share(self) -> Share | None:
        return self._share

    @property
    def part(self) -> Part | None:
        return self._part

    @property
    def waits(self) -> bool:
        """Whether there are others, without which what it holds is of no use: shadows of other atoms, or of other ranks."""
        return self._part is not None or (self._document is not None and self._document.world_size > 1)

    def trainer_gone(self) -> None:
        """The connection was lost: whatever it has left complete in the log is folded."""
        self.attached = False
        self._since = max(self._since, time.monotonic())  # its successor may have asked before this was noticed
        self.do(self._read_the_rest)

    def resume(self, timeline: int, generation: int, step: int, interval: int = 0) -> None:
        """A trainer goes on from this step in this generation, or has written a base of it; it wants a base every `interval`
        steps, if it says so."""

        def job() -> None:
            if interval and generation >= self.generation:
                self._interval = interval
            self._resume(timeline, generation, step)

        self.do(job)

    def hand_out(self, step: int = -1) -> Handout:
        """The newest state, or that of a step which all shadows have. Waits for the fold that is under way."""
        found: list[Handout | Exception] = []
        ready = threading.Event()
        if self._at_hand is not None:
            self._at_hand.give_back()  # the next that is taken, by whoever has asked

        def job() -> None:
            try:
                if step >= 0:
                    self._go_to(step)
                elif not self.attached:
                    self._read_the_rest()
                    self._fold_all()
                found.append(self._hand_out())
            except StepNotFoundError as e:
                found.append(e)
            except Exception as e:
                found.append(e)
                self._failed(e)

        self.do(job, ready)
        ready.wait()
        if not found:
            raise StepNotFoundError("this shadow is about to end: ask again")
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def look_again(self) -> None:
        """Somebody says that what was handed out is not what it was described as: if that is so, forget it."""
        done = threading.Event()

        def job() -> None:
            given = self._given
            damaged = [] if given is None else [t.key for t in given.stored if not self._home.has(t)]
            if damaged:
                raise CorruptionError(f"the memory of {', '.join(damaged[:5])} changed by itself; all is given up")

        self.do(job, done)
        done.wait()

    def count(self, patience_s: float) -> None:
        """Return when `progress` tells of all that a trainer which is gone has left, or after so long. Whoever asks has time
        to take it. (Where there are no others, which step is to be had need not be known before it is asked for.)"""
        self._since = max(self._since, time.monotonic() + _ASKED_S - self._idle_s)
        if self.waits:
            counted = threading.Event()
            self.do(self._read_the_rest, counted)
            counted.wait(patience_s)

    def stand_up(self) -> None:
        """Hold the newest base that this shadow's folder has, for whoever asks before a trainer comes."""
        done = threading.Event()
        self.do(self._stand_up, done)
        done.wait(_STAND_UP_S)

    def end(self, *, base: bool) -> None:
        """Stop; `base`: after a base of the last step has been written. Else the trainer has no more need of it."""
        self.is_dismissed = not base
        self.do(lambda: self._end(base))

    # -- its thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until end(), or until it has been alone for so long."""
        try:
            while not self._ending:
                self._turn()
        finally:
            with self._work:
                self.is_over = True
                left = [done for _, done in self._jobs if done is not None]
            for done in left:
                done.set()
            self._close()

    def _turn(self) -> None:
        with self._work:
            self._work.wait_for(
                lambda: bool(self._jobs) or self._should_fold() or self._can_prepare() or self._home.can_be_huge,
                timeout=_PATIENCE_S,
            )
            job, done = self._jobs.popleft() if self._jobs else (None, None)
        try:
            if job is not None:
                job()
            elif self._can_fold():
                self._fold(_BATCH_FRAMES)
                self._base_if_due()
            elif self._is_at_gap():
                self._get_over_gap()
            elif self._home.can_be_huge:
                self._home.make_huge()
            elif self._can_prepare():
                assert self._held is not None
                self._prepared = self._given_key(self._held.state)  # it is tried once, and again when it is asked for
                given = self._describe()
                if self._at_hand is not None:
                    self._at_hand.hold(given.stored)
            elif not self.attached and time.monotonic() - self._since > self._idle_s:
                self._say(f"no trainer for {self._idle_s:.0f} s: this shadow leaves a base and ends")
                self._end(True, can_wait=True)
            elif self._is_behind():
                self._acknowledge()
            elif self._from_base_at is not None and time.monotonic() >= self._from_base_at:
                self._from_base()
        except Exception as e:  # an optimizer of the user's may raise anything
            self._failed(e)
        finally:
            if done is not None:
                done.set()

    def _failed(self, e: Exception) -> None:
        """What is held can no longer be trusted to be the trainer's state: start from a base again."""
        self._say(f"{type(e).__name__}: {e}")
        self.tell("trouble", f"{type(e).__name__}: {e}")
        if isinstance(e, StorageError):  # what is held, if anything is, is right
            if self._held is None and self.generation:
                self._from_base_at = time.monotonic() + _AGAIN_S
            return
        self._forget()
        self.tell("needs base", self.progress.received)

    def _forget(self) -> None:
        if self._held is not None:
            self._held.forget()
        self._held = self._given = None
        self.progress.folded = -1
        self.tell("progress", self.progress)  # who waits for it to go on would wait in vain

    def _can_fold(self) -> bool:
        held = self._held
        if held is None or held.step is None or self._handed_out or held.step >= self.watermark:
            return False
        return held.step + 1 in self._entries

    def _is_at_gap(self) -> bool:
        """Whether what comes next was never stored (the trainer had no room for it), or had been given up when this shadow
        came back with an old base; and a base of a later step is there, or has not been asked for yet."""
        held = self._held
        if held is None or held.step is None or self._handed_out:
            return False
        if held.step >= self.progress.base and (self._asked_at == held.step or not self.attached):
            return False
        with self._work:  # frames come in order: what is missing before one of them will not come
            return held.step + 1 not in self._entries and any(n > held.step for n in self._entries)

    def _is_passed_by(self, step: int) -> bool:
        """Whether frames that lead to this step, of which there is a base, are not here: a trainer elsewhere that has sent a
        base does not send those before it. (Where others wait, a later frame must tell.)"""
        held = self._held
        if held is None or held.step is None or self._handed_out or self._sweeps or self.waits:
            return False  # on the same host all frames come
        if self.progress.base < step:
            return False
        with self._work:
            return any(n not in self._entries for n in range(held.step + 1, step + 1))

    def _get_over_gap(self) -> None:
        assert self._held is not None and self._held.step is not None
        if self._held.step >= self.progress.base:  # until there is a base, what is held is better than nothing
            self._asked_at = self._held.step
            self.tell("needs base", self.progress.received)
            return
        self._say(f"what follows step {self._held.step} was never stored: going on from a later base")
        self._forget()
        self._from_base()

    def _should_fold(self) -> bool:
        held = self._held
        if not self._can_fold() or held is None or held.step is None:
            return False
        last = held.step + AT_ONCE_FRAMES
        return not self.attached or (last in self._entries and last <= self.watermark)

    def _can_prepare(self) -> bool:
        """Whether the trainer is gone and what the next one will ask for has not been hashed yet."""
        held = self._held
        return (
            not self.attached and held is not None and held.step is not None
            and self._prepared != self._given_key(held.state)
        )  # fmt: skip

    def _given_key(self, state: State) -> tuple[int, int, int]:
        return self.timeline, self.generation, state.step

    def _fold_all(self) -> None:
        while self._can_fold():
            self._fold(_BATCH_FRAMES)

    def _fold(self, at_most: int) -> None:
        held = self._held
        assert held is not None and held.step is not None
        if self.waits:
            at_most = min(at_most, self._interval - held.step % self._interval)  # all write bases of the same steps
        entries: list[FrameEntry] = []
        while len(entries) < at_most and held.step + len(entries) < self.watermark:
            entry = self._entries.get(held.step + len(entries) + 1)
            if entry is None:
                break
            entries.append(entry)
        if not entries:
            return  # they have been taken back meanwhile
        self._drop_some_readers(entries)
        frames = [self._frame(e) for e in entries]
        check_chain(frames)
        self._read_in_place(frames)
        before = held.step
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        try:
            bad = held.fold(frames, self._fingerprint)
        except StorageError:
            self._forget()  # it may be half of a step further
            raise
        self.progress.num_folded += len(entries)
        self.progress.fold_s += time.perf_counter() - begun
        self.progress.fold_cpu_s += time.thread_time() - begun_cpu
        last = entries[-1].step
        if bad:
            self._forget()
            text = (
                f"step {last}: the state that the log leads to (from step {before}) differs from the trainer's in "
                f"{', '.join(bad[:5])}"
            )
            self._say(text)
            self.tell("mismatch", (last, text))
            return
        if self._keep_log:
            self._will_keep(entries)
        if held.complete:
            self.progress.proven = last
        with self._work:
            for entry in entries:
                self._entries.pop(entry.step, None)
        if self._share is not None:
            self._atoms = frozenset(held.state.tensors)
            self._drop_readers(lambda path: True)  # their files are not used again
        try:
            if time.monotonic() >= self._acknowledge_at:
                self._acknowledge()
        except StorageError as e:
            self._failed(e)  # what is held is right, and can be handed out

    def _acknowledge(self) -> None:
        """Say that what is held is held: the trainer then gives up the memory of the frames that led there. A StorageError
        if they are not all where they are to be; then this is done later."""
        held = self._held
        if held is None or held.step is None:
            return
        try:
            if self._home.settle(held.state):
                self._given = None
            self._keep()
        except StorageError:
            self._acknowledge_at = time.monotonic() + _AGAIN_S
            raise
        self.progress.folded = held.step
        self.tell("progress", self.progress)

    def _is_behind(self) -> bool:
        """Whether what is held has not been said to be."""
        held = self._held
        if held is None or held.step is None or self._handed_out or self.progress.folded == held.step:
            return False
        return time.monotonic() >= self._acknowledge_at

    def _frame(self, entry: FrameEntry) -> StoredFrame:
        share = self._share
        if share is None:
            return StoredFrame(entry, self._reader(entry), self._seed(entry))
        return PartFrame(entry, self._reader(entry), self._seed(entry)).of(share)

    def _reader(self, entry: FrameEntry) -> shared.MappedReader | files.Reader:
        """The segment's reader; mapped once for as long as its file is used again under other names."""
        if not entry.path.startswith(self.folder):
            reader = self._readers.get(entry.path)
            if reader is None:
                reader = self._readers[entry.path] = files.Reader(entry.path, direct=True)
            return reader
        key = f"{self.folder}/{os.stat(entry.path).st_ino}"
        found = self._readers.get(key)
        if found is None or found.num_bytes < entry.end_offset:
            found = self._readers[key] = shared.MappedReader(entry.path)
        return found

    def _drop_some_readers(self, needed: list[FrameEntry]) -> None:
        """Before these frames are read: those of other segments on disk, and all if they are many."""
        paths = {entry.path for entry in needed}
        self._drop_readers(lambda path: not path.startswith(self.folder) and path not in paths)
        if len(self._readers) > _MAX_READERS:
            self._drop_readers(lambda path: True)

    def _drop_readers(self, which: Callable[[str], bool]) -> None:
        for path in [p for p in self._readers if which(p)]:
            self._readers.pop(path).close()

    def _seed(self, entry: FrameEntry) -> int:
        parsed = parse_name(os.path.basename(entry.path))
        if parsed is None:
            raise CorruptionError(f"{entry.path} is not a segment")
        return records.seed_of(bytes.fromhex(self._run), parsed[0], self.path.rank, parsed[1])

    def _read_in_place(self, frames: list[StoredFrame]) -> None:
        """Gradients are used where they are in the log, unless the optimizer may write into them."""
        assert self._held is not None
        only_reads = {name: _only_reads(optimizer) for name, optimizer in self._held.state.optimizers.items()}
        copies: dict[int, bool] = {}
        for frame in frames:
            in_place = all(
                only_reads.get(op.optimizer, False) and op.grad_scale is None for op in frame.ops if isinstance(op, Update)
            )
            copies[id(frame.reader)] = copies.get(id(frame.reader), False) or not in_place
        for frame in frames:
            if isinstance(frame.reader, shared.MappedReader):
                frame.reader.copies = copies[id(frame.reader)]

    def _will_keep(self, entries: list[FrameEntry]) -> None:
        folder = self.path.log(self.timeline)
        self._unkept.update({e.step: (os.path.join(folder, os.path.basename(e.path)), e) for e in entries})

    def _keep(self) -> None:
        """Copy frames to the log on disk, in order. What a StorageError leaves over is tried again later."""
        for step in sorted(self._unkept):
            path, entry = self._unkept[step]
            if entry.path.startswith(self.folder):  # else it was written there
                try:
                    reader = self._reader(entry)
                except FileNotFoundError:
                    self._say(f"step {step} is not in memory any more: the log on disk goes on without it")
                    del self._unkept[step]
                    continue
                assert isinstance(reader, shared.MappedReader)
                self._copy.keep(path, reader, entry.end_offset)
            del self._unkept[step]
            self.progress.durable = max(self.progress.durable, step)

    def _base_if_due(self) -> None:
        held = self._held
        if held is None or held.step is None:
            return
        since = held.step - self.progress.base
        is_due = since >= self._interval or (self.waits and since and held.step % self._interval == 0)
        if not is_due or time.monotonic() < self._base_at:
            return
        try:
            self._base()
        except (EverstepError, OSError):
            self._base_at = time.monotonic() + _AGAIN_S
            raise

    def _base(self) -> None:
        held = self._held
        if held is None or held.step is None or held.step == self.progress.base:
            return
        self.progress.writing = True
        self.tell("progress", self.progress)
        begun = time.perf_counter()
        try:
            manifest = held.write_base(direct=files.supports_direct(self.path.bases(self.timeline)))
        finally:
            self.progress.writing = False
        self.progress.base_s = time.perf_counter() - begun
        self.progress.base_bytes = sum(t.num_bytes for t in manifest.tensors)
        self.progress.base = max(self.progress.base, manifest.step)
        self.progress.durable = max(self.progress.durable, manifest.step)
        self._sweep()
        self.tell("progress", self.progress)

    def _sweep(self) -> None:
        """What dead generations have left in memory: what is held here has all of it."""
        if not self._sweeps or self._unkept or any(e.generation < self.generation for e in self._entries.values()):
            return
        for folder in shared.log_folders(self.folder, self.path.rank):
            for name in files.listing(folder):
                parsed = parse_name(name)
                if parsed is not None and parsed[0] < self.generation:
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(folder, name))

    # -- where it stands ----------------------------------------------------------------------------------------------

    def _resume(self, timeline: int, generation: int, step: int) -> None:
        if self._at_hand is not None:
            self._at_hand.give_back()
        if generation < self.generation:
            return  # a dead trainer's
        held = self._held
        if generation == self.generation:
            self._asked_at = -1  # who was asked may not have heard it
            if is_there(base_folder(self.path.bases(timeline), step), self._part):
                self.progress.base = max(self.progress.base, step)
            if held is None:
                self._from_base()
            elif self._is_passed_by(step):
                self._get_over_gap()
            return
        before, document = self._document, self.path.read_generation(timeline, generation)
        with self._work:
            self._document = document
            self.timeline, self.generation = timeline, generation
            self._entries = {n: e for n, e in self._early.items() if e.generation == generation}
            self._early = {}
            self.progress.received = max([step, *self._entries])
            self.progress.durable = min(self.progress.durable, step)
            self.watermark = max(step, self._early_watermark) if self.waits else self.progress.received
            self._early_watermark = -1
        self._unkept = {n: kept for n, kept in self._unkept.items() if n <= step}  # the dead trainer went further
        self._fingerprint = {}
        self._drop_readers(lambda path: True)
        if held is not None and held.step == step and _goes_on(before, document):
            held.go_on(timeline, generation)
            self._fingerprint = self._line().newest.fingerprint
            self.progress.folded = -1 if self._unkept else step
            self._sweep()
        else:
            self._forget()
            self._from_base()
        self.tell("progress", self.progress)

    def _line(self) -> Line:
        line = line_of(read_listing(self.path, self._part))
        if line.newest.generation != self.generation:
            raise CorruptionError(f"generation {self.generation} has been superseded by {line.newest.generation}")
        return line

    def _from_base(self) -> None:
        """Hold the newest base from which the log leads to its end; if there is none, ask for one."""
        self._from_base_at = None
        line = self._line()
        self._fingerprint = line.newest.fingerprint
        with self._work:  # frames go on arriving
            known = {**line.frames, **self._entries}
            newest = max([self.progress.received, *known])
        for base in sorted(line.bases, reverse=True):
            n = base
            while n + 1 in known:
                n += 1
            if n >= newest:
                break
        else:
            self.tell("needs base", newest)
            return
        self._load(line, base)
        with self._work:
            known.update(self._entries)  # what has arrived meanwhile
            newest = max([newest, base, *known])
            self._entries = {n: e for n, e in known.items() if n > base}
            self.progress.received = newest
            self.watermark = max(self.watermark, base if self.waits else newest)
        self._say(f"holds step {base} of {self.path.path}")
        self.tell("progress", self.progress)

    def _stand_up(self) -> None:
        if self._held is not None or self.attached or self.generation:
            return
        timelines = [int(name) for name in files.listing(self.path.timelines()) if name.isdigit()]
        bases = [os.path.join(self.path.bases(n), name) for n in timelines for name in files.listing(self.path.bases(n))]
        part = only_part(bases)
        line = line_of(read_listing(self.path, part))
        if not line.bases:
            return
        base = max(line.bases)
        self.timeline, self.generation = line.newest.timeline, line.newest.generation
        self._part, self._fingerprint, self._document = part, line.newest.fingerprint, line.newest
        if part is not None:
            self._share = frozenset(t.uid for t in line.bases[base][0].tensors if t.of_model)
        self._load(line, base)
        self.progress.received = self.watermark = base
        if self.waits and part is None:  # frames of which others may have fewer
            while self.progress.received + 1 in line.frames:
                self.progress.received += 1
                self._entries[self.progress.received] = line.frames[self.progress.received]
        self._say(f"holds step {base} of {self.path.path}, from disk")

    def _load(self, line: Line, base: int) -> None:
        held = Held(self.path, self.timeline, self.generation, num_workers=self._num_workers)
        held.part = self._part
        held.load(line, base)
        self._home.settle(held.state)
        self._held, self._given = held, None
        self._atoms = frozenset(held.state.tensors)
        self.progress.base = max(line.bases)
        self.progress.folded = -1 if self._unkept else base

    def _go_to(self, step: int) -> None:
        """Hold the state of a step that all shadows can have: by frames that were not folded yet, or from a base."""
        held = self._held
        if held is None or held.step is None:
            raise StepNotFoundError("this shadow holds no state yet")
        if held.step > step:
            line = self._line()
            if step not in line.bases:
                raise StepNotFoundError(f"this shadow is at step {held.step} and has no base of step {step}")
            self._load(line, step)
            with self._work:
                self._entries = {}
                self.progress.received = self.watermark = step
            return
        with self._work:
            self.watermark = max(self.watermark, step)
        while held.step is not None and held.step < step and self._can_fold():
            self._fold(min(_BATCH_FRAMES, step - held.step))
        if held.step != step:
            raise StepNotFoundError(f"this shadow can go to step {held.step}, and not to {step}")

    def _read_the_rest(self) -> None:
        """Frames that a trainer which is gone had finished but not announced. (Of several shadows, each has what it has.)"""
        held = self._held
        if held is None or held.step is None or self.attached or self._part is not None:
            return
        found = dict(self._entries)
        folder = shared.log_folder(self.folder, self.timeline, self.path.rank)
        for place in (folder, self.path.log(self.timeline)):
            for name in files.listing(place):
                parsed = parse_name(name)
                if parsed is None or parsed[0] != self.generation:
                    continue
                file = os.path.join(place, name)
                segment = Segment(file, self._run, self.path.rank, *parsed, in_memory=place == folder).scan()
                for entry in segment.frames:
                    if entry.step > held.step:
                        found.setdefault(entry.step, entry)
        n = held.step
        while n + 1 in found and self._is_whole(found[n + 1]):
            n += 1
        with self._work:
            if self.attached:
                return  # it is back, and says everything again
            self._entries = {s: e for s, e in found.items() if s <= n}
            self.progress.received = n
            if not self.waits:
                self.watermark = n

    def _is_whole(self, entry: FrameEntry) -> bool:
        try:
            self._frame(entry).check_payloads()
        except (CorruptionError, OSError):
            return False
        return True

    def _hand_out(self) -> Handout:
        held = self._held
        if held is None or held.step is None:
            raise StepNotFoundError("this shadow holds no state yet")
        state = held.state
        given = self._describe()
        self._handed_out += 1
        told = threading.Event()

        def done() -> None:
            if not told.is_set():
                told.set()
                with self._work:
                    self._handed_out -= 1
                    self._work.notify_all()

        return Handout(
            state.step, self.generation, self.timeline, held.complete or self.progress.proven == state.step,
            given.manifest, given.file, given.num_bytes, done,
            lambda: [memoryview(self._home.bytes_of(t)) for t in given.stored],
        )  # fmt: skip

    def _describe(self) -> _Given:
        """Where in memory everything is, with its hashes; once for a state."""
        assert self._held is not None
        state = self._held.state
        given = self._given
        if given is None or given.state is not state or given.key != self._given_key(state):
            slots, tensors, fields = describe(state)
            file, num_bytes, stored = self._home.hand_out(slots, tensors)
            manifest = Manifest(
                run=self._run, timeline=self.timeline, generation=self.generation, step=state.step, layout=state.layout,
                tensors=stored, files={}, cursor=base64.b64encode(state.cursor).decode(), audit="folded",
                fingerprint=self._fingerprint, part=self._part, **fields,
            )  # fmt: skip
            encoded = documents.encode(manifest)
            given = self._given = _Given(state, self._given_key(state), encoded, file, num_bytes, stored)
        return given

    def _end(self, base: bool, *, can_wait: bool = False) -> None:
        """Leave a base and stop. If that fails and it `can_wait`, what is held stays in memory and is tried again later."""
        if self._ending:
            return
        self.is_leaving = True
        try:
            if base and self._held is not None:
                if not self.attached:
                    self._read_the_rest()
                self._fold_all()
                self._keep()
                with contextlib.suppress(CorruptionError):  # superseded: another trainer has it now
                    self._base()
                    self._base_what_waits()
        except (EverstepError, OSError) as e:
            self._say(f"no base could be left at step {self.progress.folded}: {type(e).__name__}: {e}")
            if can_wait and os.path.isdir(self.path.path):
                self._since = time.monotonic()
                self.is_leaving = False
                return
        with self._work:
            self._ending = not (can_wait and self._jobs)  # somebody has come while the base was written
        if not self._ending:
            self._since = time.monotonic()
            self.is_leaving = False

    def _base_what_waits(self) -> None:
        """One of several may not have heard how far the others are. So that all have one step in common, what it was to hold
        next goes to disk too: the frames, or where these are not whole, bases."""
        if self._part is None:
            with self._work:
                waiting = [self._entries[n] for n in sorted(self._entries)]
            self._will_keep(waiting)
            self._keep()
            return
        for _ in range(_MAX_WAITING_BASES):
            held = self._held
            if self._part is None or held is None or held.step is None or held.step + 1 not in self._entries:
                return
            self.watermark = held.step + 1
            self._fold(1)
            self._base()

    def _close(self) -> None:
        self._drop_readers(lambda path: True)
        self._copy.close()
        self._home.close()

    @property
    def is_stored(self) -> bool:
        """Whether everything it has is on disk."""
        return not self._unkept and 0 <= self.progress.received == max(self.progress.base, self.progress.durable)


def _only_reads(optimizer: OptimizerState) -> bool:
    """Whether it is known that an optimizer does not write into gradients: fused ones do so only to scale them, and torch's
    SGD, one tensor at a time, makes new ones."""
    is_sgd = optimizer.spec.cls == "torch.optim.SGD"
    groups = [h if isinstance(h, dict) else {} for h in optimizer.hyper]
    return all(h.get("fused") is True or (is_sgd and "foreach" in h and not h["foreach"]) for h in groups)


def _goes_on(before: GenerationDocument | None, now: GenerationDocument) -> bool:
    """Whether a generation's frames lead on from the same boxes as those of one before it."""
    if before is None or before.world_size != now.world_size:
        return False
    return now.world_size == 1 or before.holding == now.holding
