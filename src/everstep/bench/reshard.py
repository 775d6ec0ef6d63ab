"""How fast a run comes back under another layout: against the same layout, and against DCP.

The overhead benchmark's model is trained under FSDP2 on some ranks, which leaves a base and frames after it, and a
checkpoint of DCP of the same state. Then both are loaded into live objects, by turns, on the same number of ranks and on
others; each number of ranks has real processes (gloo) of its own, which wait while others are measured. The others have a
run and a checkpoint of their own, too: loading these tells what so many processes take on this machine where nothing is cut,
so what another layout costs is the time of loading the source's over that (`ratio_to_own`). The time of a load is that of
the slowest rank, from a barrier on; beside it stands the CPU time of all ranks together, the system's included, which others
on the machine change less. Before every turn the files are dropped from the page cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from everstep.bench import peers, workloads
from everstep.bench.progress import Progress, silent
from everstep.bench.restore import drop_from_cache
from everstep.bench.workloads import Workload
from everstep.restore.history import History

WARM_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One measurement."""

    workload: Workload
    source: int = 2
    """Ranks that write the run."""
    targets: tuple[int, ...] = (4, 1)
    """Other numbers of ranks that load it."""
    num_frames: int = 8
    num_repetitions: int = 5
    folder: str | None = None
    peers: bool = True
    seed: int = 0


def measure(settings: Settings, progress: Progress = silent) -> dict[str, Any]:
    """One measurement, as a plain dict."""
    top = tempfile.mkdtemp(prefix="everstep-bench-", dir=settings.folder)
    try:
        with contextlib.ExitStack() as stack:
            sizes = [settings.source, *(n for n in settings.targets if n != settings.source)]
            progress("starting ranks", 0, sum(sizes))
            worlds = {n: stack.enter_context(_world(n, top, settings.workload)) for n in sizes}
            sums = {}
            for n, world in worlds.items():
                progress(f"writing a run by {n}", 0, settings.num_frames)
                sums[n] = world.do("write", num_frames=settings.num_frames, dcp=settings.peers)[0]
            return _measure(settings, top, worlds, sums, progress)
    finally:
        shutil.rmtree(top, ignore_errors=True)


def _measure(
    settings: Settings, top: str, worlds: dict[int, _World], sums: dict[int, list[int]], progress: Progress
) -> dict[str, Any]:
    """`sums`: of what the ranks of each world had when their run was written."""
    plans = {n: History(_run(top, n)).plans() for n in worlds}
    if any(len(plan.frames) != settings.num_frames for each in plans.values() for plan in each):
        raise AssertionError(f"the plans do not all replay {settings.num_frames} frames")
    files = [os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names]
    source, others = settings.source, [n for n in worlds if n != settings.source]
    ways = ("everstep", "dcp") if settings.peers else ("everstep",)
    turns = [(way, n, by) for way in ways for n in worlds for by in dict.fromkeys((source, n))]
    for way, n, by in turns:  # unmeasured; and are they right?
        worlds[n].do("load", way=way, by=by)
        if any(found != sums[by] for found in worlds[n].do("checksum")):
            raise AssertionError(f"{way} on {n} ranks: the state is not the one that {by} ranks had")
    seconds: dict[tuple[str, int, int], list[float]] = {turn: [] for turn in turns}
    cpu: dict[tuple[str, int, int], list[float]] = {turn: [] for turn in turns}
    lot = random.Random(settings.seed)
    for repetition in range(settings.num_repetitions):
        progress("repetitions", repetition, settings.num_repetitions)
        lot.shuffle(turns)
        for way, n, by in turns:
            drop_from_cache(files)
            taken = worlds[n].do("load", way=way, by=by)
            seconds[way, n, by].append(max(each for each, _ in taken))
            cpu[way, n, by].append(sum(each for _, each in taken))
    progress("repetitions", settings.num_repetitions, settings.num_repetitions)
    median, cpu_median = ({turn: statistics.median(s) for turn, s in each.items()} for each in (seconds, cpu))
    loads = {way: {n: median[way, n, source] for n in worlds} for way in ways}
    own = {way: {n: median[way, n, n] for n in worlds} for way in ways}
    ours = loads["everstep"]
    return {
        "workload": asdict(settings.workload), "source_ranks": source, "num_frames": settings.num_frames,
        "num_bytes": sum(plan.num_bytes for plan in plans[source]), "num_repetitions": settings.num_repetitions,
        "median_s": loads, "own_median_s": own,
        "seconds": [
            {"way": way, "ranks": n, "written_by": by, "seconds": s, "cpu_s": cpu[way, n, by]}
            for (way, n, by), s in seconds.items()
        ],
        "cpu_median_s": {way: {n: cpu_median[way, n, source] for n in worlds} for way in ways},
        "own_cpu_median_s": {way: {n: cpu_median[way, n, n] for n in worlds} for way in ways},
        "ratio": {n: ours[n] / ours[source] for n in others},
        "ratio_to_own": {way: {n: loads[way][n] / own[way][n] for n in others} for way in ways},
        "cpu_ratio_to_own": {
            way: {n: cpu_median[way, n, source] / cpu_median[way, n, n] for n in others} for way in ways
        },
        "ratio_to_dcp": {n: ours[n] / loads["dcp"][n] for n in worlds} if settings.peers else {},
    }  # fmt: skip


def _run(top: str, num_ranks: int) -> str:
    """The run that so many ranks wrote."""
    return os.path.join(top, f"run-{num_ranks}")


def _dcp(top: str, num_ranks: int) -> str:
    """DCP's checkpoint of the same."""
    return os.path.join(top, f"dcp-{num_ranks}")


# -- the ranks --------------------------------------------------------------------------------------------------------

_RANK = "import sys; from everstep.bench.reshard import serve; serve(sys.argv[1])"


class _World:
    """So many processes that do what they are told, all of them together."""

    def __init__(self, size: int, top: str, workload: Workload) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        told = json.dumps({"top": top, "workload": asdict(workload)})
        common = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _RANK, told], env={**common, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip

    def do(self, what: str, **arguments: Any) -> list[Any]:
        """What each rank answers."""
        for p in self._ranks:
            assert p.stdin is not None
            print(json.dumps([what, arguments]), file=p.stdin, flush=True)
        answers = []
        for rank, p in enumerate(self._ranks):
            assert p.stdout is not None
            line = p.stdout.readline()
            if not line:
                raise AssertionError(f"rank {rank} of {len(self._ranks)} died while it was to {what}")
            answers.append(json.loads(line))
        return answers

    def end(self) -> None:
        for p in self._ranks:
            p.kill()
        for p in self._ranks:
            p.communicate()


@contextlib.contextmanager
def _world(size: int, top: str, workload: Workload) -> Iterator[_World]:
    world = _World(size, top, workload)
    try:
        yield world
    finally:
        world.end()


def serve(told: str) -> None:
    """In a rank: do what each line says, until there are no more."""
    arguments = json.loads(told)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with peers.their_warnings_silenced():
        rank = _Rank(arguments["top"], Workload(**arguments["workload"]))
        for line in sys.stdin:
            what, given = json.loads(line)
            print(json.dumps(getattr(rank, what)(**given)), file=out, flush=True)
    dist.destroy_process_group()


class _Rank:
    """A model under FSDP2 over all ranks."""

    def __init__(self, top: str, workload: Workload) -> None:
        self._top = top
        self._workload = workload
        self._model, self._optimizer = self._build()
        self._step(next(iter(workloads.batches(workload))))  # loads of others want state to fill

    def _build(self) -> tuple[Any, torch.optim.AdamW]:
        from torch.distributed.fsdp import fully_shard

        model, _ = workloads.build(self._workload)
        if dist.get_world_size() > 1:
            mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def _step(self, batch: Any) -> None:
        workloads.train_step(self._model, self._optimizer, batch)

    def write(self, num_frames: int, dcp: bool) -> list[int]:
        """A run with a base of full optimizer state and frames after it; with `dcp` the same state by DCP. checksum()."""
        from torch.distributed.checkpoint import save  # type: ignore[attr-defined]

        from everstep.bench.restore import _LeaveWithoutBaseError
        from everstep.run import attach

        batches = iter(workloads.batches(self._workload))
        path = _run(self._top, dist.get_world_size())
        options: dict[str, Any] = {"quiet": True, "follower": False, "base_interval": 1 << 40}
        with attach(self._model, self._optimizer, path, **options) as run:
            run.resume()
            for _ in range(WARM_STEPS):
                self._step(next(batches))
                run.commit()
        with (
            contextlib.suppress(_LeaveWithoutBaseError),
            attach(self._model, self._optimizer, path, **options) as run,
        ):
            run.resume()
            for _ in range(num_frames):
                self._step(next(batches))
                run.commit()
            run.flush()
            dist.barrier()
            raise _LeaveWithoutBaseError
        if dcp:
            save(self._state(), checkpoint_id=_dcp(self._top, dist.get_world_size()))
        return self.checksum()

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, way: str, by: int) -> tuple[float, float]:
        """How long it takes to load what so many ranks wrote: the clock's time, and this process's CPU time."""
        from torch.distributed.checkpoint import load  # type: ignore[attr-defined]
        from torch.distributed.checkpoint.state_dict import set_state_dict

        dist.barrier()
        begun, cpu_begun = time.perf_counter(), time.process_time()
        if way == "everstep":
            History(_run(self._top, by)).restore(self._model, self._optimizer)
        else:
            state = self._state()
            load(state, checkpoint_id=_dcp(self._top, by))
            set_state_dict(
                self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        return time.perf_counter() - begun, time.process_time() - cpu_begun

    def checksum(self) -> list[int]:
        """Of the bits of all parameters, and of all optimizer state, over all ranks: equal under any layout."""
        totals = []
        state = [v for values in self._optimizer.state.values() for v in values.values() if v.dim()]
        for tensors in (list(self._model.parameters()), state):
            total = torch.zeros((), dtype=torch.int64)
            for tensor in tensors:
                memory = getattr(tensor, "_local_tensor", tensor).detach()
                total += memory.contiguous().view(torch.int32).sum(dtype=torch.int64)
            dist.all_reduce(total)
            totals.append(int(total))
        return totals
