"""What saving every step costs: time with Everstep over time without, in one process.

Two equal copies of model and optimizer train on equal batches; one is attached to a run, the other is not and has never
been, so that a block without Everstep pays for no hook. (Switching one copy on and off is no choice: steps that Everstep
does not see would have to be told to it by a base each time, and that would be paid for inside the blocks.) A copy is far
larger than any cache, so both start every block equally cold. In the second half of the pairs the copies change roles,
so that neither where the memory of one lies nor its age is taken for a cost.

Blocks come in pairs of two with and two without, in the order on-off-off-on or off-on-on-off by lot. A block with Everstep
ends with commit() and flush() inside its time. The follower process is stopped (SIGSTOP) at the end of such a block and
goes on (SIGCONT) at the start of the next: all of its work, compaction and the reading it takes, weighs on blocks with
Everstep and none on those without.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from everstep import native
from everstep.bench import machine, peers, statistics, workloads
from everstep.bench.background import Follower, threads_cpu_s, until_idle
from everstep.bench.progress import Progress, silent
from everstep.bench.workloads import Workload
from everstep.memory import same_bits
from everstep.run import Run, attach

BLOCK_S = 8.0
"""A block is so long unless told otherwise."""
WARM_STEPS = 8
"""More than Everstep takes to learn how gradients are owned."""
FOLLOWER_START_S = 60.0
"""Measuring begins without it if the follower has made no base by then."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One measurement."""

    workload: Workload
    num_threads: int = 1
    num_pairs: int = 20
    """Of four blocks each."""
    block_steps: int | None = None
    """None: as many as take BLOCK_S, at least 4."""
    base_interval: int | None = None
    """None: so that at least four compactions happen in each half."""
    num_peer_pairs: int = 3
    """0: peers are not measured."""
    folder: str | None = None
    """Where runs are written; None: the system's temporary folder."""
    wait_for_follower: bool = True
    """Start to measure only when the follower has made its first base."""
    mode: str = "delta"
    shadow: str = ""
    """With mode="shadow": the address of one that listens already; empty: a local one."""
    pool: str = ""
    """With mode="snapshot": a folder for the pool; empty: the run's own."""
    snapshot_interval: int | None = 1
    """With mode="snapshot": steps from one stored state to the next; None: as Everstep chooses."""
    early: bool = False
    """Gradients are handed over during backward."""
    codec: str = "none"
    """Both copies train with gradients compressed by this (workloads.CODECS)."""
    seed: int = 0


class _Copy:
    """One model in training."""

    def __init__(self, w: Workload, codec: str = "none") -> None:
        self.model, self.optimizer = workloads.build(w)
        self.compressor = workloads.compressor(codec, self.optimizer)
        self._loader = workloads.batches(w)
        self.stream = workloads.endless(self._loader)

    def attach(self, path: str, base_interval: int, settings: Settings) -> Run:
        """From now on batches come by way of the run."""
        options: dict[str, Any] = {}
        if settings.mode == "snapshot":
            options = {"snapshot_interval": settings.snapshot_interval, "pool": settings.pool}
        run = attach(
            self.model, self.optimizer, path, mode=settings.mode, shadow=settings.shadow, base_interval=base_interval,
            early=settings.early, compress=self.compressor, quiet=True, **options,
        )  # fmt: skip
        run.resume()
        self.stream = run.steps(self._loader)
        return run

    def restart(self) -> None:
        """From the first batch again, without a run."""
        self.stream = workloads.endless(self._loader)

    def train(self, num_steps: int, after: Callable[[], object] | None = None) -> None:
        for _ in range(num_steps):
            workloads.train_step(self.model, self.optimizer, next(self.stream))
            if after is not None:
                after()


class Meter:
    """Times every call of Everstep's on the training thread, from outside: hooks, zero_grad, commit."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Before attach: zero_grad's own time must not count as Everstep's."""
        self.seconds = 0.0
        self._optimizer: Any = optimizer
        self._plain_zero_grad: Any = optimizer.zero_grad
        self._inner_s = 0.0
        self._others = set(self._optimizer._optimizer_step_pre_hooks)
        """Hooks that were there before: gradient compression."""
        vars(optimizer)["zero_grad"] = self._inner

    def _inner(self, set_to_none: bool = True) -> None:
        begun = time.perf_counter()
        self._plain_zero_grad(set_to_none=set_to_none)
        self._inner_s += time.perf_counter() - begun

    def install(self, run: Run) -> None:
        """After attach and resume."""
        params: list[Any] = [p for group in self._optimizer.param_groups for p in group["params"]]
        for hooks in (
            self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks,
            *(p._post_accumulate_grad_hooks or {} for p in params),
        ):  # fmt: skip
            for key, hook in hooks.items():
                if key not in self._others:
                    hooks[key] = self._timed(hook)
        taps: Any = getattr(run._live(), "taps", {})
        for tap in taps.values():
            early = tap._early
            if early is not None:
                early._backward_ends = self._timed(early._backward_ends)
        self._wrapped_zero_grad = self._optimizer.__dict__["zero_grad"]
        self._optimizer.zero_grad = self._timed(self._wrapped_zero_grad)
        live: Any = run
        live.commit = self._timed(run.commit)

    def remove(self) -> None:
        """Before close."""
        self._optimizer.zero_grad = self._wrapped_zero_grad

    def finish(self) -> None:
        """After close."""
        self._optimizer.__dict__.pop("zero_grad", None)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun, inner = time.perf_counter(), self._inner_s
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begun - (self._inner_s - inner)

        return timed


@dataclass
class _Totals:
    """Sums over blocks with Everstep."""

    ratios: list[float] = field(default_factory=list)
    off_step_s: list[float] = field(default_factory=list)
    steps: int = 0
    thread_s: float = 0.0
    counted_thread_s: float = 0.0
    stall_s: float = 0.0
    log_bytes: int = 0
    early_bytes: int = 0
    early_void_bytes: int = 0
    removed_bytes: int = 0
    snapshots: int = 0
    compactions: int = 0
    follower_cpu_s: float = 0.0
    background_cpu_s: dict[str, float] = field(default_factory=dict)
    bit_equal: bool = True


def measure(settings: Settings, progress: Progress = silent) -> dict[str, Any]:
    """One measurement, as a plain dict."""
    before = torch.get_num_threads()
    torch.set_num_threads(settings.num_threads)
    top = tempfile.mkdtemp(prefix="everstep-bench-", dir=settings.folder)
    pool = settings.pool and tempfile.mkdtemp(prefix="everstep-bench-", dir=settings.pool)
    try:
        return _measure(replace(settings, pool=pool), top, progress)
    finally:
        torch.set_num_threads(before)
        for folder in filter(None, (top, pool)):
            shutil.rmtree(folder, ignore_errors=True)


def _measure(settings: Settings, top: str, progress: Progress) -> dict[str, Any]:
    copies = _Copy(settings.workload, settings.codec), _Copy(settings.workload, settings.codec)
    block_steps = _whole(settings.block_steps or _calibrate(copies), settings)
    orders = statistics.abba(settings.num_pairs, seed=settings.seed)
    half = (len(orders) + 1) // 2
    interval = settings.base_interval or min(200, max(4, 2 * half * block_steps // 4))
    totals = _Totals()
    done = 0
    for index, part in enumerate((orders[:half], orders[half:])):
        if not part:
            continue
        on, off = (copies[0], copies[1]) if index == 0 else (copies[1], copies[0])

        def told(text: str, count: int) -> None:
            progress(text, count, len(orders))

        session = _Session(settings, on, off, os.path.join(top, f"run-{index}"), interval, block_steps, totals)
        done = session.run(part, done, told)
    found = _report(settings, totals, copies[0], block_steps, interval)
    if settings.num_peer_pairs:
        found["peers"] = _measure_peers(settings, copies[0], top, block_steps, progress)
    return found


def _whole(block_steps: int, settings: Settings) -> int:
    """So many steps, or some more, that a block ends with a stored state: else flush() would store one more."""
    interval = settings.snapshot_interval if settings.mode == "snapshot" else None
    return block_steps if interval is None else -(-block_steps // interval) * interval


def _calibrate(copies: tuple[_Copy, _Copy]) -> int:
    """How many steps take BLOCK_S."""
    for copy in copies:
        copy.train(4)  # a process's first steps are up to half as long again as later ones
    begun = time.perf_counter()
    for copy in copies:
        copy.train(2)
    step_s = (time.perf_counter() - begun) / 4
    return max(4, round(BLOCK_S / step_s))


class _Session:
    """Some pairs with one copy attached and the other not."""

    def __init__(
        self, settings: Settings, on: _Copy, off: _Copy, path: str, interval: int, block_steps: int, totals: _Totals
    ) -> None:
        self._settings = settings
        self._on, self._off = on, off
        self._path = path
        self._interval = interval
        self._block_steps = block_steps
        self._totals = totals

    def run(self, orders: list[tuple[bool, ...]], done: int, told: Callable[[str, int], None]) -> int:
        """Measure these pairs; returns how many are done in all."""
        self._off.restart()
        self._meter = Meter(self._on.optimizer)
        run = self._run = self._on.attach(self._path, self._interval, self._settings)
        self._follower = Follower(run)
        self._meter.install(run)
        try:
            told("warming up", done)
            self._warm_up()
            before = run.stats()
            for order in orders:
                told("pairs of blocks", done)
                seconds = [self._block(is_on) for is_on in order]
                self._totals.ratios.append(statistics.pair_ratio(order, seconds))
                off = sum(s for s, is_on in zip(seconds, order, strict=True) if not is_on)
                self._totals.off_step_s.append(off / (2 * self._block_steps))
                done += 1
            told("pairs of blocks", done)
            self._add(before, run.stats())
        finally:
            self._follower.go_on()
            self._meter.remove()
            run.close()
            self._meter.finish()
            self._on.restart()
            shutil.rmtree(self._path, ignore_errors=True)
        return done

    def _warm_up(self) -> None:
        """Everstep has learned, its first base is stored, its follower is up and has made one."""
        wait = self._settings.wait_for_follower and self._settings.mode != "snapshot"
        for _ in range(max(WARM_STEPS, self._interval + 1 if wait else 0)):
            for copy in (self._on, self._off):
                copy.train(1)
        self._run.commit()
        self._run.flush()
        deadline = time.monotonic() + FOLLOWER_START_S
        while wait and not self._run.stats()["follower_bases"] and time.monotonic() < deadline:
            time.sleep(0.05)
        until_idle()
        self._follower.stop()

    def _block(self, is_on: bool) -> float:
        if not is_on:
            begun = time.perf_counter()
            self._off.train(self._block_steps)
            return time.perf_counter() - begun
        totals, meter = self._totals, self._meter
        self._follower.go_on()
        threads, follower, own = threads_cpu_s(), self._follower.cpu_s(), meter.seconds
        begun = time.perf_counter()
        self._on.train(self._block_steps)
        self._run.commit()
        self._run.flush()
        seconds = time.perf_counter() - begun
        totals.thread_s += meter.seconds - own
        totals.follower_cpu_s += max(0.0, self._follower.cpu_s() - follower)
        for name, used in threads_cpu_s().items():
            totals.background_cpu_s[name] = totals.background_cpu_s.get(name, 0.0) + used - threads.get(name, 0.0)
        until_idle()
        self._follower.stop()
        totals.steps += self._block_steps
        return seconds

    def _add(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        totals = self._totals

        def gained(key: str) -> Any:
            """0 for what a mode does not count."""
            return after.get(key, 0) - before.get(key, 0)

        totals.counted_thread_s += gained("training_thread_s")
        totals.stall_s += gained("stall_s")
        totals.log_bytes += gained("log_bytes")
        totals.early_bytes += gained("early_bytes")
        totals.early_void_bytes += gained("early_void_bytes")
        totals.removed_bytes += gained("removed_bytes")
        totals.snapshots += gained("snapshots")
        totals.compactions += gained("follower_bases")
        totals.bit_equal &= all(
            same_bits(a.detach(), b.detach())
            for a, b in zip(self._on.model.parameters(), self._off.model.parameters(), strict=True)
        )


def _report(settings: Settings, totals: _Totals, copy: _Copy, block_steps: int, interval: int) -> dict[str, Any]:
    w, steps = settings.workload, max(totals.steps, 1)
    gradient_bytes = sum(p.numel() * p.element_size() for p in copy.model.parameters())
    step_s = statistics.median_interval(totals.off_step_s).median
    return {
        "tokens": w.tokens,
        "num_threads": settings.num_threads,
        "num_parameters": sum(p.numel() for p in copy.model.parameters()),
        "num_pairs": len(totals.ratios),
        "block_steps": block_steps,
        "base_interval": interval,
        "durability": "step",
        "mode": settings.mode,
        "native_part": native.part() is not None,
        "shadow": settings.shadow or ("local" if settings.mode == "shadow" else ""),
        "pool_file_system": machine.file_system(settings.pool or settings.folder or tempfile.gettempdir()),
        "snapshot_interval": totals.steps / totals.snapshots if totals.snapshots else None,
        "gradient_bytes": gradient_bytes,
        "early": settings.early,
        "codec": settings.codec,
        "early_share": totals.early_bytes / steps / gradient_bytes,
        "early_void_share": totals.early_void_bytes / steps / gradient_bytes,
        "ratio": statistics.median_interval(totals.ratios, seed=settings.seed).as_dict(),
        "ratios": totals.ratios,
        "step_s": step_s,
        "training_thread_s_a_step": (totals.thread_s - totals.stall_s) / steps,
        "training_thread_share": (totals.thread_s - totals.stall_s) / steps / step_s,
        "training_thread_share_by_stats": totals.counted_thread_s / steps / step_s,
        "stall_s_a_step": totals.stall_s / steps,
        "background_cpu_s_a_step": {
            **{name: used / steps for name, used in sorted(totals.background_cpu_s.items())},
            "follower": totals.follower_cpu_s / steps,
        },
        "bytes_a_step": totals.log_bytes / steps,
        "num_compactions": totals.compactions,
        "removed_bytes": totals.removed_bytes,
        "bit_equal_to_training_without": totals.bit_equal,
    }


def _measure_peers(
    settings: Settings, copy: _Copy, top: str, block_steps: int, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Each saves the whole state of one unattached copy at every step."""
    found: dict[str, dict[str, Any]] = {}
    with peers.their_warnings_silenced():
        for make in (peers.TorchSave, peers.DcpSave):
            peer = make(os.path.join(top, make.name))
            found[peer.name] = _measure_peer(settings, copy, peer, max(2, block_steps // 2), progress)
            shutil.rmtree(os.path.join(top, make.name), ignore_errors=True)
    return found


def _measure_peer(
    settings: Settings, copy: _Copy, peer: peers.Peer, block_steps: int, progress: Progress
) -> dict[str, Any]:
    def save() -> None:
        peer.save(copy.model, copy.optimizer)

    copy.train(2, save)
    peer.wait()
    orders = statistics.abba(settings.num_peer_pairs, seed=settings.seed)
    ratios = []
    for done, order in enumerate(orders):
        progress(f"peer {peer.name}", done, len(orders))
        seconds = []
        for is_on in order:
            os.sync()  # what a peer left in the page cache must not weigh on the block that follows
            begun = time.perf_counter()
            copy.train(block_steps, save if is_on else None)
            peer.wait()
            seconds.append(time.perf_counter() - begun)
        ratios.append(statistics.pair_ratio(order, seconds))
    progress(f"peer {peer.name}", len(orders), len(orders))
    return {
        "ratio": statistics.median_interval(ratios, seed=settings.seed).as_dict(),
        "num_pairs": len(ratios),
        "block_steps": block_steps,
        "bytes_a_step": sum(os.path.getsize(path) for path in peer.files()),
    }


def measure_rss(
    settings: Settings, *, first_step: int = 100, last_step: int = 500, progress: Progress = silent
) -> dict[str, Any]:
    """Resident memory from one step to another, with Everstep and without: its slope, in bytes a step."""
    before = torch.get_num_threads()
    torch.set_num_threads(settings.num_threads)
    top = tempfile.mkdtemp(prefix="everstep-bench-", dir=settings.folder)
    interval = settings.base_interval or max(4, (last_step - first_step) // 8)
    block = max(2, (last_step - first_step) // 20)
    try:
        copy = _Copy(settings.workload, settings.codec)
        run = copy.attach(os.path.join(top, "run"), interval, settings)
        follower = Follower(run)
        # Touched before: what a measurement keeps of each step must not be taken for growth.
        own, other, without = np.full((3, last_step - first_step), -1, np.int64)
        try:
            for step in range(last_step):
                copy.train(1)
                if step >= first_step:
                    own[step - first_step] = machine.resident_bytes()
                    other[step - first_step] = machine.resident_bytes(follower.pid or 0)
                progress("steps with Everstep", step + 1, last_step)
            stats = run.stats()
        finally:
            run.close()
        copy.restart()
        for step in range(first_step, last_step):
            copy.train(1)
            without[step - first_step] = machine.resident_bytes()
            progress("steps without", step + 1 - first_step, last_step - first_step)
    finally:
        torch.set_num_threads(before)
        shutil.rmtree(top, ignore_errors=True)
    return {
        "tokens": settings.workload.tokens,
        "num_threads": settings.num_threads,
        "first_step": first_step,
        "last_step": last_step,
        "num_compactions": stats["follower_bases"],
        "trainer": _growth(own.tolist(), block),
        "follower": _growth(other.tolist(), block),
        "without": _growth(without.tolist(), block),
    }


def _growth(values: list[int], block: int) -> dict[str, Any]:
    quarter = max(1, len(values) // 4)
    return {
        "slope_bytes_a_step": statistics.slope_interval(values, block=block).as_dict(),
        "first_quarter_bytes": sorted(values[:quarter])[quarter // 2],
        "last_quarter_bytes": sorted(values[-quarter:])[quarter // 2],
        "peak_bytes": max(values),
    }


def describe(workload: Workload) -> dict[str, Any]:
    """The workload as a plain dict."""
    return asdict(workload)

