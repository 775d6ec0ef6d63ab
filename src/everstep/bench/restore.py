"""How fast a step comes back: restore against the raw work it cannot do without.

A run of the overhead benchmark's model with one base and many frames is written, then restored by turns with:

    raw read        the same bytes of the same files by large O_DIRECT reads, with the block size and number of threads
                    that were fastest here; nothing is looked at
    raw fold        the same gradients, in memory already, applied by the fused optimizer on all cores, step by step: by
                    torch's own threads, or by an optimizer a core for its share of the parameters, whichever is faster
    frame by frame  what a simple restore would do: read a frame, step, read the next
    peers           torch.load and DCP's load of the same state, saved whole

Before every measured turn the files are dropped from the page cache. (A hypervisor's own cache cannot be dropped; it
helps all alike.)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from everstep import tree
from everstep.bench import machine, peers, workloads
from everstep.bench.progress import Progress, silent
from everstep.bench.workloads import Workload
from everstep.fold import State, unhooked_step
from everstep.frame import Update
from everstep.memory import Bytes, same_bits, with_strides
from everstep.restore.execute import load_base, open_frames
from everstep.restore.history import History
from everstep.restore.plan import Line, Plan, line_of
from everstep.run import attach
from everstep.store import shared
from everstep.store.runs import RunPath, read_listing
from everstep.store.segments import StoredFrame

BLOCK = 4096
WARM_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One measurement."""

    workload: Workload
    num_frames: int = 48
    num_repetitions: int = 5
    folder: str | None = None
    """Where the run is written; None: the system's temporary folder."""
    peers: bool = True
    seed: int = 0


def measure(settings: Settings, progress: Progress = silent) -> dict[str, Any]:
    """One measurement, as a plain dict. Uses all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(machine.num_cores())
    top = tempfile.mkdtemp(prefix="everstep-bench-", dir=settings.folder)
    try:
        return _measure(settings, top, progress)
    finally:
        torch.set_num_threads(before)
        shutil.rmtree(top, ignore_errors=True)


class _LeaveWithoutBaseError(Exception):
    """Ends a run as an exception does: without the base that close() would leave at the last step."""


def make_run(path: str, settings: Settings, progress: Progress = silent) -> workloads.GPT:
    """A run with a base of full optimizer state and `num_frames` frames after it; returns the model as it ended."""
    model, optimizer = workloads.build(settings.workload)
    batches = iter(workloads.batches(settings.workload))
    options: dict[str, Any] = {"quiet": True, "follower": False, "base_interval": 1 << 40}
    with attach(model, optimizer, path, **options) as run:
        run.resume()
        for _ in range(WARM_STEPS):
            workloads.train_step(model, optimizer, next(batches))
            run.commit()
    with contextlib.suppress(_LeaveWithoutBaseError), attach(model, optimizer, path, **options) as run:
        run.resume()
        for done in range(settings.num_frames):
            progress("writing a run", done, settings.num_frames)
            workloads.train_step(model, optimizer, next(batches))
            run.commit()
        run.flush()
        progress("writing a run", settings.num_frames, settings.num_frames)
        raise _LeaveWithoutBaseError
    return model


def _measure(settings: Settings, top: str, progress: Progress) -> dict[str, Any]:
    path = os.path.join(top, "run")
    model = make_run(path, settings, progress)
    history = History(path)
    step = history.steps[-1]
    plan = history.plan(step)
    if len(plan.frames) != settings.num_frames:
        raise AssertionError(f"the plan replays {len(plan.frames)} frames, not {settings.num_frames}")
    ranges = planned_ranges(plan)
    raw = _RawRead(ranges, progress)
    fold = _RawFold(path, plan, progress)
    live = workloads.build(settings.workload, seed=1)
    workloads.train_step(*live, next(iter(workloads.batches(settings.workload))))  # torch's loads want state to fill
    rights: list[bool] = []

    def everstep_state() -> None:
        state = history.state(step)
        rights.append(all(same_bits(p.detach(), state["model"][name]) for name, p in model.named_parameters()))

    # Comparing takes time of its own, so only the first, unmeasured turn does it.
    everstep_state()
    turns: dict[str, tuple[Callable[[], object], list[str]]] = {
        "everstep": (lambda: history.state(step), [r[0] for r in ranges]),
        "everstep_in_place": (lambda: history.restore(*live, step), [r[0] for r in ranges]),
        "raw_read": (raw.run, [r[0] for r in ranges]),
        "raw_fold": (fold.run, []),
        "frame_by_frame": (lambda: frame_by_frame(path, step), [r[0] for r in ranges]),
    }
    with peers.their_warnings_silenced():
        if settings.peers:
            turns |= _peer_turns(top, history, step, live)
        seconds = _by_turns(settings, turns, progress)
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    bound = max(medians["raw_read"], medians["raw_fold"])
    return {
        "tokens": settings.workload.tokens,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_cores": machine.num_cores(),
        "num_frames": len(plan.frames),
        "num_bytes": plan.num_bytes,
        "num_repetitions": settings.num_repetitions,
        "page_cache": "dropped for the files read (fdatasync + POSIX_FADV_DONTNEED) before every turn",
        "raw_read_setting": raw.setting,
        "raw_fold_setting": {"by": fold.setting, "distinct_frames": fold.num_distinct},
        "median_s": medians,
        "seconds": seconds,
        "ratio": medians["everstep"] / bound,
        "ratio_to_frame_by_frame": medians["everstep"] / medians["frame_by_frame"],
        "bit_equal_to_the_trained_model": all(rights),
    }


def _peer_turns(
    top: str, history: History, step: int, live: tuple[workloads.GPT, torch.optim.AdamW]
) -> dict[str, tuple[Callable[[], object], list[str]]]:
    history.restore(*live, step)
    turns: dict[str, tuple[Callable[[], object], list[str]]] = {}
    for peer in (peers.TorchSave(os.path.join(top, "torch")), peers.DcpSave(os.path.join(top, "dcp"))):
        peer.save(*live)
        peer.wait()
        name = "torch.load" if isinstance(peer, peers.TorchSave) else "dcp.load"
        turns[name] = (lambda peer=peer: peer.load(*live), peer.files())  # type: ignore[misc]
    return turns


def _by_turns(
    settings: Settings, turns: dict[str, tuple[Callable[[], object], list[str]]], progress: Progress
) -> dict[str, list[float]]:
    """Every turn once in each repetition, in an order by lot."""
    order = list(turns)
    lot = random.Random(settings.seed)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for repetition in range(settings.num_repetitions):
        lot.shuffle(order)
        progress("repetitions", repetition, settings.num_repetitions)
        for name in order:
            work, paths = turns[name]
            drop_from_cache(paths)
            begun = time.perf_counter()
            result = work()
            seconds[name].append(time.perf_counter() - begun)
            del result  # giving memory back is not part of it
    progress("repetitions", settings.num_repetitions, settings.num_repetitions)
    return seconds


def drop_from_cache(paths: Sequence[str]) -> None:
    """The page cache no longer holds anything of these files."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def planned_ranges(plan: Plan) -> list[tuple[str, int, int]]:
    """(path, first byte, end byte) of all that a plan reads, neighbours joined."""
    ranges = [(os.path.join(plan.base_folder, name), 0, size) for name, size in plan.base.files.items()]
    for frame in plan.frames:
        last = ranges[-1]
        if last[0] == frame.path and last[2] == frame.offset:
            ranges[-1] = (last[0], last[1], frame.end_offset)
        else:
            ranges.append((frame.path, frame.offset, frame.end_offset))
    return ranges


class _RawRead:
    """The same bytes into memory that is used again and again."""

    def __init__(self, ranges: Sequence[tuple[str, int, int]], progress: Progress) -> None:
        self._ranges = ranges
        trials = []
        # Twice each: one that was disturbed must not make the fastest way look slow, and so Everstep look good.
        settings = 2 * [(mb << 20, threads) for mb in (1, 4, 16) for threads in (1, 2, 4, 8)]
        for i, (block, threads) in enumerate(settings):
            progress("looking for the fastest way to read", i, len(settings))
            drop_from_cache([r[0] for r in ranges])
            begun = time.perf_counter()
            self._read(block, threads)
            trials.append((time.perf_counter() - begun, block, threads))
        progress("looking for the fastest way to read", len(settings), len(settings))
        _, self._block, self._threads = min(trials)
        self.setting = {"block_bytes": self._block, "num_threads": self._threads, "direct": self._direct}

    def run(self) -> None:
        self._read(self._block, self._threads)

    def _read(self, block: int, num_threads: int) -> None:
        todo: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
        descriptors: list[int] = []
        failures: list[BaseException] = []
        try:
            for path, first, end in self._ranges:
                descriptors.append(self._open(path))
                for offset in range(first // BLOCK * BLOCK, end, block):
                    todo.put((descriptors[-1], offset, min(block, -(-(end - offset) // BLOCK) * BLOCK)))
            threads = [
                threading.Thread(target=_read_all, args=(todo, block, failures)) for _ in range(num_threads)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for fd in descriptors:
                os.close(fd)
        if failures:
            raise failures[0]

    def _open(self, path: str) -> int:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            self._direct = True
        except OSError:
            fd = os.open(path, os.O_RDONLY)
            self._direct = False
        return fd


def _read_all(todo: queue.SimpleQueue[tuple[int, int, int]], block: int, failures: list[BaseException]) -> None:
    buffer: Bytes = np.frombuffer(mmap.mmap(-1, block), np.uint8)
    buffer[::BLOCK] = 0
    view = memoryview(buffer)
    try:
        while True:
            fd, offset, size = todo.get_nowait()
            done = 0
            while done < size:
                got = os.preadv(fd, [view[done:size]], offset + done)
                if got == 0 or got % BLOCK:
                    break  # the end of the file
                done += got
    except queue.Empty:
        pass
    except BaseException as e:
        failures.append(e)


def _update(frame: StoredFrame) -> Update:
    """The one update of a frame of this benchmark's runs."""
    updates = [op for op in frame.ops if isinstance(op, Update)]
    assert len(updates) == 1
    return updates[0]


def _gradients(frame: StoredFrame) -> dict[int, torch.Tensor]:
    refs = {g.uid: g.dense for g in _update(frame).grads if g.dense is not None}
    flats = frame.read([(ref, 0, ref.numel) for ref in refs.values()])
    return {
        uid: with_strides(flat, ref.shape, ref.strides) for (uid, ref), flat in zip(refs.items(), flats, strict=True)
    }


def _optimizer(state: State, uids: Set[int] | None = None) -> tuple[torch.optim.AdamW, dict[int, torch.Tensor]]:
    """A fused AdamW that holds this state's tensors, or some of them."""
    saved = state.optimizers["optimizer"]
    wanted = [uid for params in saved.params for uid in params if uids is None or uid in uids]
    tensors = {uid: state.tensors[uid].detach() for uid in wanted}
    hyper = tree.unpack(saved.hyper[0])
    optimizer = torch.optim.AdamW(list(tensors.values()), lr=hyper["lr"], fused=True)
    optimizer.param_groups[0].update(hyper)
    for uid, tensor in tensors.items():
        optimizer.state[tensor] = dict(saved.state[uid])
    return optimizer, tensors


class _RawFold:
    """The same gradients, in memory already, by the fused optimizer on all cores, one step after another."""

    def __init__(self, path: str, plan: Plan, progress: Progress) -> None:
        line = line_of(read_listing(RunPath(path)))
        state = load_base(plan, machine.num_cores())
        step_bytes = sum(t.numel() * t.element_size() for t in state.tensors.values())
        self.num_distinct = max(1, min(len(plan.frames), shared.available_bytes() // 2 // max(step_bytes, 1)))
        self._num_frames = len(plan.frames)
        frames, readers = open_frames(line, plan)
        try:
            self._grads = []
            for i, frame in enumerate(frames[: self.num_distinct]):
                progress("reading gradients into memory", i, self.num_distinct)
                self._grads.append({uid: g.clone() for uid, g in _gradients(frame).items()})
            progress("reading gradients into memory", self.num_distinct, self.num_distinct)
        finally:
            for reader in readers:
                reader.close()
        self._whole = _optimizer(state)
        self._shares = [_optimizer(state, share) for share in _shares(state, machine.num_cores())]
        self._choose()

    def _choose(self) -> None:
        ways = {"torch's threads": self._by_torch, "an optimizer a core": self._by_cores}
        taken = {}
        for name, way in ways.items():
            way()
            begun = time.perf_counter()
            way()
            taken[name] = time.perf_counter() - begun
        self.setting = min(taken, key=lambda name: taken[name])
        self.run = ways[self.setting]

    def _by_torch(self) -> None:
        self._fold(*self._whole)

    def _by_cores(self) -> None:
        def work(optimizer: torch.optim.AdamW, tensors: dict[int, torch.Tensor]) -> None:
            torch.set_num_threads(1)
            self._fold(optimizer, tensors)

        threads = [threading.Thread(target=work, args=share) for share in self._shares]
        before = torch.get_num_threads()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.set_num_threads(before)

    def _fold(self, optimizer: torch.optim.AdamW, tensors: dict[int, torch.Tensor]) -> None:
        for i in range(self._num_frames):
            grads = self._grads[i % self.num_distinct]
            for uid, tensor in tensors.items():
                tensor.grad = grads[uid]
            unhooked_step(optimizer)


def _shares(state: State, count: int) -> list[set[int]]:
    """The parameters in `count` groups of about equal size."""
    uids = [uid for params in state.optimizers["optimizer"].params for uid in params]
    shares: list[set[int]] = [set() for _ in range(count)]
    sizes = [0] * count
    for uid in sorted(uids, key=lambda u: -state.tensors[u].numel()):
        least = sizes.index(min(sizes))
        shares[least].add(uid)
        sizes[least] += state.tensors[uid].numel()
    return [share for share in shares if share]


def frame_by_frame(path: str, step: int) -> State:
    """S(step) the simple way: read a frame, step, read the next."""
    line: Line = line_of(read_listing(RunPath(path)))
    plan = line.plans(step)[0]
    frames, readers = open_frames(line, plan)
    try:
        state = load_base(plan, machine.num_cores())
        optimizer, tensors = _optimizer(state)
        for frame in frames:
            for uid, grad in _gradients(frame).items():
                tensors[uid].grad = grad
            unhooked_step(optimizer)
    finally:
        for reader in readers:
            reader.close()
    state.step = step
    return state
