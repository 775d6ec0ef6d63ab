"""What layer-wise updates bring to snapshots, and giving way to reductions: every step's state is stored in memory.

Four ways to train the same model, each with a copy of its own: without Everstep, with snapshots, with snapshots whose states
begin to leave in backward (`layerwise=True`), and, where there are gradients to reduce, the latter without giving way to
reductions. Blocks of all come by turns, in rounds that are mirrored, so that drift cancels; in the second half of the rounds
the copies are made anew, in the opposite order. A block begins with a step that is not timed, and ends when no more states
are under way than after that step. No bases are written meanwhile.

With several ranks (DDP over gloo, a process for each) a block begins and ends for all at once. The first two ways reduce
gradients as DDP does without a hook; the others need `early_hook`, and pay for it.

Memory is a way out that is hardly ever too slow. So there is a second setting, in which it is (`max_bandwidth`): what leaves
takes LINK_SHARE of a step. Then a state that leaves earlier has to be copied, or waited for, less.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep.bench import machine, statistics, workloads
from everstep.bench.background import until_idle
from everstep.bench.progress import Progress, silent
from everstep.bench.workloads import Workload
from everstep.capture.early import early_hook
from everstep.capture.layerwise import Layerwise
from everstep.capture.states import States
from everstep.memory import same_bits
from everstep.run import Run, attach

BLOCK_S = 4.0
"""A block is so long unless told otherwise."""
WARM_STEPS = 8
"""More than layer-wise updates take to learn."""
CALIBRATED_STEPS = 7
LINK_SHARE = 0.95
"""Of a step, that a state takes on the slow way out."""
BUCKET_MB = 4
"""Of DDP's buckets: its default is more than all gradients of a small model."""
POLL_S = 0.0005
MOST_S = 60.0
"""A block that takes longer is as long as it is."""
WITHOUT, SNAPSHOTS, LAYERWISE, IN_THE_WAY = "without", "snapshots", "layerwise", "layerwise, not giving way"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One measurement."""

    workload: Workload
    """Of each rank."""
    num_ranks: int = 1
    num_threads: int = 1
    num_rounds: int = 10
    """Of two blocks of each way."""
    block_steps: int | None = None
    """None: as many as take BLOCK_S, at least 4."""
    slow: bool = False
    """With a way out that takes LINK_SHARE of a step for a state."""
    folder: str | None = None
    """Where runs are written; None: the system's temporary folder."""
    pool: str = "/dev/shm"
    """A folder in memory; where there is none, `folder`."""
    seed: int = 0


def workload(num_ranks: int, tokens: int) -> Workload:
    """The GPT of the other benchmarks; for several ranks on few cores a smaller one."""
    if num_ranks == 1:
        return Workload(tokens=tokens)
    return Workload(dim=256, num_layers=4, num_heads=4, vocabulary=4096, tokens=tokens)


def measure(settings: Settings, progress: Progress = silent) -> dict[str, Any]:
    """One measurement, as a plain dict."""
    memory = settings.pool if os.path.isdir(settings.pool) else settings.folder
    top = tempfile.mkdtemp(prefix="everstep-bench-", dir=settings.folder)
    pool = tempfile.mkdtemp(prefix="everstep-bench-", dir=memory)
    before = torch.get_num_threads()
    try:
        if settings.num_ranks == 1:
            torch.set_num_threads(settings.num_threads)
            return _Bench(settings, top, pool, progress).measure()
        return _by_ranks(settings, top, pool, progress)
    finally:
        torch.set_num_threads(before)
        for folder in (top, pool):
            shutil.rmtree(folder, ignore_errors=True)


# -- ranks ------------------------------------------------------------------------------------------------------------

_RANK = "import sys; from everstep.bench.layers import rank_main; rank_main(*sys.argv[1:])"


def _by_ranks(settings: Settings, top: str, pool: str, progress: Progress) -> dict[str, Any]:
    """Each rank in a process of its own; the first tells how far it is, and what was found."""
    told = json.dumps(asdict(settings))
    env = {**os.environ, "OMP_NUM_THREADS": str(settings.num_threads)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), told, top, pool], env=env, stdout=subprocess.PIPE, text=True
        )
        for rank in range(settings.num_ranks)
    ]
    found: dict[str, Any] = {}
    try:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            kind, value = json.loads(line)
            if kind == "progress":
                progress(*value)
            else:
                found = value
        for rank, process in enumerate(ranks):
            if process.wait(MOST_S):
                raise RuntimeError(f"rank {rank} of the benchmark ended with exit code {process.returncode}")
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    return found


def rank_main(rank: str, told: str, top: str, pool: str) -> None:
    """One of them."""
    given = json.loads(told)
    settings = Settings(**{**given, "workload": Workload(**given["workload"])})
    torch.set_num_threads(settings.num_threads)
    file_store: Any = getattr(dist, "FileStore")  # noqa: B009  # which the module's types do not name
    store = file_store(os.path.join(top, "store"), settings.num_ranks)
    dist.init_process_group(
        "gloo", store=store, rank=int(rank), world_size=settings.num_ranks, timeout=timedelta(seconds=10 * MOST_S)
    )

    def tell(kind: str, value: Any) -> None:
        if rank == "0":
            print(json.dumps([kind, value]), flush=True)

    tell("found", _Bench(settings, top, pool, lambda *value: tell("progress", value)).measure())
    dist.destroy_process_group()


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()


def _of_all(value: Any) -> list[Any]:
    """From each rank."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# -- one way to train -------------------------------------------------------------------------------------------------


@dataclass
class _Count:
    """What is summed up while a way's blocks run."""

    stall_s: float = 0.0
    ahead_s: float = 0.0
    gave_way_s: float = 0.0
    reducing_s: float = 0.0
    num_stored: int = 0
    num_early: int = 0
    stored_bytes: int = 0
    early_bytes: int = 0
    copied_bytes: int = 0
    in_backward: int = 0
    at_step: int = 0

    def add(self, sign: int, other: _Count) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + sign * value)


class _Reductions:
    """For how long some bucket was being reduced."""

    def __init__(self, layer: Any) -> None:
        self.seconds = 0.0
        self._num, self._begun = 0, 0.0
        self._begins, self._reduced = layer.bucket_begins, layer.bucket_reduced
        layer.bucket_begins, layer.bucket_reduced = self._on_begin, self._on_reduced

    def _on_begin(self) -> None:
        self._num += 1
        if self._num == 1:
            self._begun = time.perf_counter()
        self._begins()

    def _on_reduced(self, reduced: Any) -> None:
        self._num -= 1
        if self._num == 0:
            self.seconds += time.perf_counter() - self._begun
        self._reduced(reduced)


class _Way:
    """A copy of the model that trains in one of the ways."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.model, self.optimizer = workloads.build(settings.workload)
        self._trained: Any = self.model
        rank = dist.get_rank() if dist.is_initialized() else 0
        if settings.num_ranks > 1:
            self._trained = DistributedDataParallel(self.model, bucket_cap_mb=BUCKET_MB)
            if name in (LAYERWISE, IN_THE_WAY):
                self._trained.register_comm_hook(None, early_hook())
        self._stream = workloads.endless(workloads.batches(settings.workload, seed=rank))
        self._run: Run | None = None
        self._states: States | None = None
        self._layers: list[tuple[Layerwise, _Reductions]] = []
        self.counts = _Count()
        """Of its blocks."""

    def attach(self, top: str, pool: str, max_bandwidth: float | None) -> None:
        if self.name == WITHOUT:
            return
        run = self._run = attach(
            self._trained, self.optimizer, os.path.join(top, self.name), mode="snapshot", pool=pool, snapshot_interval=1,
            layerwise=self.name != SNAPSHOTS, max_bandwidth=max_bandwidth, base_interval=1 << 30, quiet=True,
        )  # fmt: skip
        run.resume()
        assert isinstance(run._capture, States)
        self._states = run._capture
        self._states.gives_way = self.name != IN_THE_WAY
        self._layers = [(layer, _Reductions(layer)) for layer in self._states.layers]

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            workloads.train_step(self._trained, self.optimizer, next(self._stream))
            if self._run is not None:
                self._run.commit()

    def rest(self) -> None:
        """Nothing is left to do that could weigh on others."""
        if self._run is not None:
            self._run.flush()
        until_idle()
        _together()

    def block(self, num_steps: int) -> float:
        """Seconds of so many steps."""
        _together()
        self.train(1)
        under_way = self._under_way()
        _together()
        self.counts.add(-1, self._count())
        begun = time.perf_counter()
        self.train(num_steps)
        while self._under_way() > under_way and time.perf_counter() < begun + MOST_S:
            time.sleep(POLL_S)
        _together()
        seconds = time.perf_counter() - begun
        self.counts.add(1, self._count())
        self.rest()
        return seconds

    def _under_way(self) -> int:
        return 0 if self._states is None else self._states.step - self._states.synced_step

    def _count(self) -> _Count:
        """Since it was attached."""
        s = self._states
        if s is None:
            return _Count()
        return _Count(
            s.stall_s, s.ahead_s, s.gave_way_s, sum(r.seconds for _, r in self._layers), s.num_stored, s.num_early,
            s.stored_bytes, s.early_bytes, s.copied_bytes, sum(layer.stats.in_backward for layer, _ in self._layers),
            sum(layer.stats.at_step for layer, _ in self._layers),
        )  # fmt: skip

    def close(self) -> None:
        if self._run is not None:
            self._run.close()


# -- all of them ------------------------------------------------------------------------------------------------------


@dataclass
class _Found:
    """Of one way."""

    seconds: list[float] = field(default_factory=list)
    """Of both its blocks, in each round."""
    counts: _Count = field(default_factory=_Count)
    num_steps: int = 0


class _Bench:
    """In one of the ranks."""

    def __init__(self, settings: Settings, top: str, pool: str, progress: Progress) -> None:
        self._settings = settings
        self._top, self._pool = top, pool
        self._progress = progress
        self._names = [WITHOUT, SNAPSHOTS, LAYERWISE, *([IN_THE_WAY] if settings.num_ranks > 1 else [])]
        self._found = {name: _Found() for name in self._names}
        self._bit_equal = True

    def measure(self) -> dict[str, Any]:
        s = self._settings
        self._calibrate()
        orders = statistics.mirrored(len(self._names), s.num_rounds, seed=s.seed)
        half = (len(orders) + 1) // 2
        done = 0
        for index, part in enumerate((orders[:half], orders[half:])):
            if part:
                self._session(index, part, done, len(orders))
            done += len(part)
        self._progress("rounds", done, len(orders))
        return self._report()

    def _calibrate(self) -> None:
        """How long a step is, by which the length of blocks and the slow way out are chosen."""
        s = self._settings
        way = _Way(WITHOUT, s)
        way.train(2)
        seconds = []
        for _ in range(CALIBRATED_STEPS):
            _together()
            begun = time.perf_counter()
            way.train(1)
            _together()
            seconds.append(time.perf_counter() - begun)
        self._step_s = max(_of_all(statistics.median_interval(seconds).median))
        self._block_steps = s.block_steps or max(4, round(BLOCK_S / self._step_s))
        self._num_parameters = sum(p.numel() for p in way.model.parameters())
        state_bytes = 12 * self._num_parameters / s.num_ranks  # each rank stores its part
        self._max_bandwidth = state_bytes / (LINK_SHARE * self._step_s) if s.slow else None

    def _session(self, index: int, orders: Sequence[tuple[int, ...]], done: int, total: int) -> None:
        """Some rounds, with copies of their own."""
        names = self._names if index == 0 else self._names[::-1]
        made = {name: _Way(name, self._settings) for name in names}
        ways = [made[name] for name in self._names]
        try:
            self._progress("warming up", done, total)
            for way in ways:
                way.attach(os.path.join(self._top, str(index)), self._pool, self._max_bandwidth)
                way.train(WARM_STEPS)
                way.rest()
            for k, order in enumerate(orders):
                self._progress("rounds", done + k, total)
                seconds = dict.fromkeys(range(len(ways)), 0.0)
                for i in order:
                    seconds[i] += ways[i].block(self._block_steps)
                for i, way in enumerate(ways):
                    self._found[way.name].seconds.append(seconds[i])
            for way in ways:
                found = self._found[way.name]
                found.counts.add(1, way.counts)
                found.num_steps += 2 * len(orders) * self._block_steps
                self._bit_equal &= all(
                    same_bits(a.detach(), b.detach())
                    for a, b in zip(way.model.parameters(), ways[0].model.parameters(), strict=True)
                )
        finally:
            for way in ways:
                way.close()

    def _report(self) -> dict[str, Any]:
        s = self._settings
        by_rank = _of_all({name: found.counts for name, found in self._found.items()})
        bit_equal = all(_of_all(self._bit_equal))
        ways = {}
        for name, found in self._found.items():
            counts = _Count()
            for each in by_rank:
                counts.add(1, each[name])
            ways[name] = self._told(found, counts)
        plain, early, other = (self._found.get(name) for name in (SNAPSHOTS, LAYERWISE, IN_THE_WAY))
        assert plain is not None and early is not None
        stored = plain.counts
        return {
            "num_ranks": s.num_ranks,
            "num_threads": s.num_threads,
            "tokens": s.workload.tokens,
            "workload": asdict(s.workload),
            "num_parameters": self._num_parameters,
            "state_bytes": stored.stored_bytes / max(1, stored.num_stored),
            "bucket_mb": BUCKET_MB if s.num_ranks > 1 else None,
            "max_bandwidth": self._max_bandwidth,
            "pool_file_system": machine.file_system(self._pool),
            "num_rounds": s.num_rounds,
            "block_steps": self._block_steps,
            "step_s": statistics.median_interval(self._found[WITHOUT].seconds).median / (2 * self._block_steps),
            "ways": ways,
            "layerwise_to_snapshots": self._ratio(early, plain),
            "giving_way_to_not": None if other is None else self._ratio(early, other),
            "bit_equal_to_training_without": bit_equal,
        }

    def _ratio(self, found: _Found, other: _Found) -> dict[str, float]:
        """Of the time of one way to that of another, round by round."""
        ratios = [a / b for a, b in zip(found.seconds, other.seconds, strict=True)]
        return statistics.median_interval(ratios, seed=self._settings.seed).as_dict()

    def _told(self, found: _Found, counts: _Count) -> dict[str, Any]:
        """Of one way: `counts` are those of all ranks."""
        steps = max(1, found.num_steps * self._settings.num_ranks)
        stored, stored_bytes = max(1, counts.num_stored), max(1, counts.stored_bytes)
        block_steps = 2 * self._block_steps
        return {
            "ratio": self._ratio(found, self._found[WITHOUT]),
            "seconds_a_step": [s / block_steps for s in found.seconds],
            "stall_s_a_step": counts.stall_s / steps,
            "reducing_s_a_step": counts.reducing_s / steps,
            "gave_way_s_a_step": counts.gave_way_s / steps,
            "in_backward_share": counts.in_backward / max(1, counts.in_backward + counts.at_step),
            "states_begun_early": counts.num_early / stored,
            "early_share": counts.early_bytes / stored_bytes,
            "copied_share": counts.copied_bytes / stored_bytes,
            "left_before_update_s": counts.ahead_s / stored,
        }
