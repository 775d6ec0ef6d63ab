"""What the tuner's model predicts against what is measured: overhead, and recovery after a kill.

A trainer process of the overhead benchmark's model runs with `tune=True`, and is killed again and again, at other distances
from its last base. What the run has measured by then goes into the model, as the tuner does it; only what the tuner decides
is not put into force, so that bases come at the interval that is asked for. Once it has seen a few recoveries, each further
one is compared with what the model expected right before it, by the median. Overhead is measured beside that, in blocks with
Everstep and without (overhead.py), at the same interval.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from everstep.bench import overhead, workloads
from everstep.bench.progress import Progress, silent
from everstep.bench.workloads import Workload
from everstep.errors import UnprovenWarning
from everstep.follow.tuned import Ground, read
from everstep.run import attach
from everstep.store.runs import RunPath
from everstep.tune.averages import Averages
from everstep.tune.model import AUTO, Limits, Measured, Setting, cost_of, shared_s

BASES = 6
"""That the model learns from, before the first kill."""
KILLS = (0.5, 0.25, 0.75, 0.4, 0.1, 0.6, 0.3, 0.9)
"""At which part of an interval a trainer is killed, one life after another."""
NUM_LEARNED = 3
"""Recoveries that the model has seen before one is compared with it."""

_TRAINER = """
import json, sys
from everstep.bench.tune import train
train(**json.loads(sys.argv[1]))
"""


def train(*, path: str, workload: dict[str, Any], num_threads: int, interval: int, codec: str) -> None:
    """In the trainer: resume, say what that took, then train until killed, and say how far it is."""
    warnings.simplefilter("ignore", UnprovenWarning)
    torch.set_num_threads(num_threads)
    w = Workload(**workload)
    model, optimizer = workloads.build(w)
    compressor = workloads.compressor(codec, optimizer)
    batches = workloads.endless(workloads.batches(w))
    run = attach(model, optimizer, path, tune=True, base_interval=interval, compress=compressor, quiet=True)
    run.resume()
    assert run._found is not None
    keeper: Any = run._keeper
    keeper.tuned._apply = lambda setting: None
    while True:
        workloads.train_step(model, optimizer, next(batches))
        run.commit()
        stats = run.stats()
        told = {
            "step": stats["step"], "written_step": stats["written_step"], "bases": stats["follower_bases"],
            "recovered": run._found.replayed,
        }  # fmt: skip
        print(json.dumps(told), flush=True)


def measure(settings: overhead.Settings, progress: Progress = silent) -> dict[str, Any]:
    """Both, as a plain dict. `settings.base_interval` must be given, and `settings.mode` be "delta"."""
    interval = settings.base_interval
    assert interval is not None and settings.mode == "delta"
    top = tempfile.mkdtemp(prefix="everstep-bench-", dir=settings.folder)
    path = os.path.join(top, "run")
    arguments = {
        "path": path, "workload": asdict(settings.workload), "num_threads": settings.num_threads, "interval": interval,
        "codec": settings.codec,
    }  # fmt: skip
    num_bases = 3 if not settings.wait_for_follower else BASES
    recoveries: list[tuple[float, int]] = []
    known: list[Measured] = []
    try:
        for i in range(len(KILLS) + 1):
            progress("lives of a run", i, len(KILLS) + 1)
            if i > NUM_LEARNED:
                known.append(_measured(path, settings.num_threads))
            enough = _is_enough(interval, num_bases if i == 0 else 1, KILLS[i]) if i < len(KILLS) else lambda told: True
            told = _life(arguments, enough)
            if i:
                recoveries.append(told["recovered"])
        progress("lives of a run", len(KILLS) + 1, len(KILLS) + 1)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    learned, compared = recoveries[:NUM_LEARNED], recoveries[NUM_LEARNED:]
    expected = [each.load_s + each.replay_s * num_steps for each, (_, num_steps) in zip(known, compared, strict=True)]
    ratios = [expected_s / seconds for expected_s, (seconds, _) in zip(expected, compared, strict=True)]
    measured = overhead.measure(settings, progress)
    last = known[-1]
    predicted = cost_of(last, Setting(base_interval=interval)).overhead
    ratio = measured["ratio"]
    return {
        **{k: measured[k] for k in ("tokens", "num_threads", "num_parameters", "num_pairs", "base_interval", "codec")},
        "overhead": {
            "predicted": predicted,
            "parts": {
                "hooks": last.hook_s / last.step_s,
                "background": shared_s(last, last.codec(AUTO)) / last.step_s,
                "bases": last.base_stall_s / interval / last.step_s,
            },
            "measured": {end: value - 1 for end, value in ratio.items()},
            "difference": predicted - (ratio["median"] - 1),
        },
        "recovery": {
            "steps": [num_steps for _, num_steps in compared], "predicted_s": expected,
            "measured_s": [seconds for seconds, _ in compared], "ratio": statistics.median(ratios), "ratios": ratios,
            "learned": learned,
        },
        "model": asdict(last),
    }  # fmt: skip


def _is_enough(interval: int, num_bases: int, part: float) -> Callable[[dict[str, Any]], bool]:
    """Whether a trainer is to be killed: after so many bases, when it is so far into an interval."""
    return lambda told: told["bases"] >= num_bases and told["step"] % interval == int(part * interval)


def _life(arguments: dict[str, Any], is_enough: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """A trainer until it has told enough; then it is killed. What it told last."""
    process = subprocess.Popen([sys.executable, "-c", _TRAINER, json.dumps(arguments)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told: dict[str, Any] = {}
    try:
        for line in process.stdout:
            told = json.loads(line)
            if is_enough(told):
                return told
        raise AssertionError(f"the trainer died at step {told.get('step', 0)}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _measured(path: str, num_threads: int) -> Measured:
    """What the tuner of this run would put into the model now."""
    document = read(RunPath(path))
    ground = Ground(limits=Limits(), failure_rate=0.0, memory_bytes=1e12, segment_bytes=0.0)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return ground.measured(Averages(document.averages), document, 0.0, Setting())
    finally:
        torch.set_num_threads(before)
