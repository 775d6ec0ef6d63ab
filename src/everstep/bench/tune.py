"""What the tuner's model predicts against what is measured: overhead, and recovery after a kill.

A trainer process of the overhead benchmark's model runs with `tune=True`, and is killed again and again, at other distances
from its last base. The first recoveries teach the model how quick recoveries are; what the run has measured by then goes
into the model, as the tuner does it; only what the tuner decides is not put into force, so that bases come at the interval
that is asked for. The later recoveries are compared with what the model expects, by the median. Overhead is measured beside
that, in blocks with Everstep and without (overhead.py), at the same interval.
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
KILLS = (0.5, 0.25, 0.75)
"""At which part of an interval a trainer is killed: once so that the model learns, and once more to compare."""

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
    num_lives = 2 * len(KILLS) + 1
    recoveries: list[tuple[float, int]] = []
    known: Measured | None = None
    try:
        for i in range(num_lives):
            progress("lives of a run", i, num_lives)
            enough = _is_enough(interval, num_bases if i == 0 else 1, KILLS[i % len(KILLS)])
            told = _life(arguments, enough if i < num_lives - 1 else lambda told: True)
            if i:
                recoveries.append(told["recovered"])
            if i == len(KILLS):
                known = _measured(path, settings.num_threads)
        progress("lives of a run", num_lives, num_lives)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    assert known is not None
    learned, compared = recoveries[: len(KILLS)], recoveries[len(KILLS) :]
    expected = [known.load_s + known.replay_s * num_steps for _, num_steps in compared]
    ratios = [expected_s / seconds for expected_s, (seconds, _) in zip(expected, compared, strict=True)]
    measured = overhead.measure(settings, progress)
    predicted = cost_of(known, Setting(base_interval=interval)).overhead
    ratio = measured["ratio"]
    return {
        **{k: measured[k] for k in ("tokens", "num_threads", "num_parameters", "num_pairs", "base_interval", "codec")},
        "overhead": {
            "predicted": predicted,
            "parts": {
                "hooks": known.hook_s / known.step_s,
                "background": shared_s(known, known.codec(AUTO)) / known.step_s,
                "bases": known.base_stall_s / interval / known.step_s,
            },
            "measured": {end: value - 1 for end, value in ratio.items()},
            "difference": predicted - (ratio["median"] - 1),
        },
        "recovery": {
            "steps": [num_steps for _, num_steps in compared], "predicted_s": expected,
            "measured_s": [seconds for seconds, _ in compared], "ratio": statistics.median(ratios), "ratios": ratios,
            "learned": learned,
        },
        "model": asdict(known),
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
