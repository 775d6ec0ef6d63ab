"""How soon a killed trainer trains again: from SIGKILL to its next completed step, and where the time goes.

A trainer process of the overhead benchmark's model is killed in mid-run and started again at once. Its parts:

    start       from the kill until the new process runs its first line
    import      torch, Everstep, model, optimizer, data
    fetch       the state from the shadow's memory (from connecting to it), from a pool in memory or on disk, from the log,
                or by torch.load or DCP's load; Everstep's are verified; in the live tensors
    begin       the rest of attach() and resume(): the run's listing, a new generation, watching
    step        the first step

and, in the same run, one memcpy of the state from and to memory that has been touched before; and one into new memory, such
as a process that has just been started must take (where a hypervisor takes free memory back, that is several times as slow).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from everstep.bench import machine, peers
from everstep.bench.progress import Progress, silent
from everstep.bench.workloads import Workload
from everstep.follow.recover import dismiss
from everstep.store.runs import RunPath

RUNS: dict[str, dict[str, Any]] = {
    "shadow": {"mode": "shadow"},
    "disk": {},
    "pool in memory": {"mode": "snapshot", "snapshot_interval": 1},
    "pool on disk": {"mode": "snapshot", "snapshot_interval": 1},
}
"""Ways to recover that are runs, with what attach is given for them."""
SOURCES = {"shadow": "shadow", "disk": "disk", "pool in memory": "pool", "pool on disk": "pool"}
PEERS: dict[str, Callable[[str], peers.Peer]] = {"torch.load": peers.TorchSave, "dcp.load": peers.DcpSave}
WAYS = (*RUNS, *PEERS)
PARTS = ("total_s", "start_s", "import_s", "fetch_s", "begin_s", "step_s")
WARM_STEPS = 12

_TRAINER = """
import time; began = time.time()
import json, os, sys
arguments = json.loads(sys.argv[1])
from everstep.bench.recover import train
train(began, **arguments)
"""


def train(began: float, *, way: str, folder: str, memory: str, workload: dict[str, Any]) -> None:
    """In the trainer: resume, say when what was done, then train until killed."""
    torch.set_num_threads(1)
    from everstep.bench import workloads
    from everstep.run import attach

    w = Workload(**workload)
    model, optimizer = workloads.build(w)
    batches = workloads.endless(workloads.batches(w))
    path = os.path.join(folder, way)
    steps = os.path.join(folder, f"{way}.step")
    built = time.time()
    step, source, run, peer = 0, way, None, None
    if way in PEERS:
        peer = PEERS[way](path)
        if os.path.exists(steps):
            with open(steps) as f:
                step = int(f.read())
            peer.load(model, optimizer)
        fetch_s = time.time() - built
    else:
        options = RUNS[way] | ({"pool": memory} if way == "pool in memory" else {})
        run = attach(model, optimizer, path, base_interval=1000, quiet=True, **options)
        step = run.resume()
        source, fetch_s = run.stats()["resumed_from"], run.stats()["fetch_s"]
    fetched = time.time()
    while True:
        workloads.train_step(model, optimizer, next(batches))
        step += 1
        if run is not None:
            run.commit()
        elif peer is not None and step == WARM_STEPS:
            peer.save(model, optimizer)
            peer.wait()
            with open(steps, "w") as f:
                f.write(str(step))
        told = {
            "step": step, "began": began, "built": built, "fetched": fetched, "fetch_s": fetch_s, "now": time.time(),
            "source": source,
            "folded": run.stats().get("folded_step", step) if way == "shadow" and run is not None else step,
        }  # fmt: skip
        print(json.dumps(told), flush=True)


def measure(
    workload: Workload, *, num_repetitions: int = 5, folder: str | None = None, memory: str = "/dev/shm",
    progress: Progress = silent,
) -> dict[str, Any]:  # fmt: skip
    """All ways, by turns, as a plain dict. `memory`: a folder for the pool in memory; where there is none, `folder`."""
    top = tempfile.mkdtemp(prefix="everstep-bench-", dir=folder)
    pool = tempfile.mkdtemp(prefix="everstep-bench-", dir=memory if os.path.isdir(memory) else folder)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    trainers: dict[str, _Trainer] = {}
    copies, copies_new = [], []
    try:
        for way in WAYS:
            progress(f"{way}: warming up", 0, num_repetitions)
            trainers[way] = _Trainer(way, top, pool, workload)
            trainers[way].train(WARM_STEPS)
            trainers[way].pause()
        for repetition in range(num_repetitions):
            for way in WAYS:
                progress(way, repetition, num_repetitions)
                trainer = trainers[way]
                trainer.go_on()
                found[way].append(trainer.recover())
                trainer.pause()
            copies.append(_memcpy_s(workload))
            copies_new.append(_memcpy_new_s(workload))
        progress("done", num_repetitions, num_repetitions)
    finally:
        for trainer in trainers.values():
            trainer.end()
        path = RunPath(os.path.join(top, "shadow"))
        if path.exists():
            dismiss(path, path.read_run().run, 1 << 30)
        memory_file_system = machine.file_system(pool)
        shutil.rmtree(top, ignore_errors=True)
        shutil.rmtree(pool, ignore_errors=True)
    ways = {way: {part: statistics.median(m[part] for m in found[way]) for part in PARTS} for way in WAYS}
    memcpy, memcpy_new = statistics.median(copies), statistics.median(copies_new)
    return {
        "workload": asdict(workload), "num_repetitions": num_repetitions, "memory_file_system": memory_file_system,
        "ways": ways, "all": found, "memcpy_s": memcpy, "memcpy_new_s": memcpy_new, "state_bytes": _state_bytes(workload),
        "fetch_ratio": ways["shadow"]["fetch_s"] / memcpy, "fetch_ratio_new": ways["shadow"]["fetch_s"] / memcpy_new,
    }  # fmt: skip


class _Trainer:
    """A trainer process, killed and started again."""

    def __init__(self, way: str, folder: str, memory: str, workload: Workload) -> None:
        self._way = way
        self._arguments = json.dumps({"way": way, "folder": folder, "memory": memory, "workload": asdict(workload)})
        self._steps = 0
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TRAINER, self._arguments], stdout=subprocess.PIPE, text=True
        )

    def _told(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the trainer ({self._way}) died")
        told: dict[str, Any] = json.loads(line)
        return told

    def train(self, num_steps: int) -> None:
        """So many steps, and until a shadow has caught up."""
        told = self._told()
        while told["step"] < num_steps or told["folded"] < told["step"] - 4:
            told = self._told()

    def recover(self) -> dict[str, float]:
        """Kill it in mid-run, start it again, and see how long that takes."""
        for _ in range(WARM_STEPS):  # it has stood still while others were measured
            self._told()
        killed = time.time()
        self.end()
        self._start()
        told = self._told()
        if told["source"] != SOURCES.get(self._way, self._way):
            raise AssertionError(f"{self._way}: the state came from {told['source']}")
        if told["step"] <= WARM_STEPS:
            raise AssertionError(f"{self._way}: it went on at step {told['step']}")
        self.train(0)
        return {
            "total_s": told["now"] - killed, "start_s": told["began"] - killed, "import_s": told["built"] - told["began"],
            "fetch_s": told["fetch_s"], "begin_s": told["fetched"] - told["built"] - told["fetch_s"],
            "step_s": told["now"] - told["fetched"],
        }  # fmt: skip

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _state_bytes(workload: Workload) -> int:
    from everstep.bench import workloads

    model, _ = workloads.build(workload)
    return 3 * sum(p.numel() * p.element_size() for p in model.parameters())


def _memcpy_s(workload: Workload) -> float:
    source = torch.ones(_state_bytes(workload), dtype=torch.uint8)
    target = torch.empty_like(source)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    target.copy_(source)
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begun)
    torch.set_num_threads(before)
    return statistics.median(seconds)


_COPY_NEW = """
import sys, time, numpy as np
from everstep.memory import new_pages
source = np.ones(int(sys.argv[1]), np.uint8)
target = new_pages(len(source))
begun = time.perf_counter()
np.copyto(target, source)
print(time.perf_counter() - begun)
"""


def _memcpy_new_s(workload: Workload) -> float:
    """In a process of its own, which gets its memory as one that resumes does."""
    command = [sys.executable, "-c", _COPY_NEW, str(_state_bytes(workload))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
