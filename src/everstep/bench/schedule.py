"""What the schedule of snapshot mode predicts, against what happens, in its three regimes.

Memory has no link of its own, so the way out is throttled (`max_bandwidth`) to what each regime needs: the state leaves
within forward and backward (in place), within a step (snapshots of what is left when the update comes), or not within a step
(does not fit: training waits). Every step is saved, into a pool in memory. The optimizer is AdamW parameter by parameter,
not fused: its update takes a good part of the step, so that the second regime is not a narrow one.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from everstep.bench import workloads
from everstep.bench.families import state_bytes
from everstep.bench.progress import Progress, silent
from everstep.bench.workloads import Workload
from everstep.run import attach

REGIMES = ("in place", "snapshots", "does not fit")
WARM_STEPS = 12
"""Until the schedule is planned with what was measured."""


def measure(
    workload: Workload, *, num_steps: int = 24, num_threads: int = 1, folder: str | None = None, memory: str = "/dev/shm",
    pictures: str | None = None, progress: Progress = silent,
) -> dict[str, Any]:  # fmt: skip
    """All regimes, as a plain dict. `memory`: a folder for the pool; where there is none, `folder`. `pictures`: a folder for
    drawings of a real step of each, against its plan."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        step_s, quiet_s, num_bytes = _plain(workload)
        leaves_in_s = {
            "in place": 0.8 * quiet_s, "snapshots": (quiet_s + step_s) / 2, "does not fit": 1.5 * step_s
        }  # fmt: skip
        found = {}
        for done, regime in enumerate(REGIMES):
            progress(regime, done, len(REGIMES))
            bandwidth = num_bytes / leaves_in_s[regime]
            top = tempfile.mkdtemp(prefix="everstep-bench-", dir=folder)
            pool = tempfile.mkdtemp(prefix="everstep-bench-", dir=memory if os.path.isdir(memory) else folder)
            try:
                found[regime], picture = _regime(workload, os.path.join(top, "run"), pool, bandwidth, num_steps)
                if pictures is not None:
                    os.makedirs(pictures, exist_ok=True)
                    with open(os.path.join(pictures, f"{regime.replace(' ', '-')}.svg"), "w") as f:
                        f.write(picture)
            finally:
                shutil.rmtree(top, ignore_errors=True)
                shutil.rmtree(pool, ignore_errors=True)
        progress("regimes", len(REGIMES), len(REGIMES))
    finally:
        torch.set_num_threads(before)
    return {
        "workload": asdict(workload), "num_threads": num_threads, "num_steps": num_steps, "state_bytes": num_bytes,
        "step_s": step_s, "forward_backward_s": quiet_s, "regimes": found,
    }  # fmt: skip


def _built(workload: Workload) -> tuple[workloads.GPT, torch.optim.Optimizer, Iterator[Any]]:
    model, _ = workloads.build(workload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False, fused=False)
    return model, optimizer, workloads.endless(workloads.batches(workload))


def _plain(workload: Workload) -> tuple[float, float, int]:
    """Seconds of a step and of its forward and backward, without Everstep, and bytes of the state."""
    model, optimizer, stream = _built(workload)
    steps, quiets = [], []
    for _ in range(8):
        begun = time.perf_counter()
        model(next(stream)).backward()
        quiets.append(time.perf_counter() - begun)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - begun)
    return statistics.median(steps[2:]), statistics.median(quiets[2:]), state_bytes(model, optimizer)


def _regime(workload: Workload, path: str, pool: str, bandwidth: float, num_steps: int) -> tuple[dict[str, Any], str]:
    model, optimizer, stream = _built(workload)
    with attach(
        model, optimizer, path, mode="snapshot", snapshot_interval=1, pool=pool, max_bandwidth=bandwidth,
        base_interval=1 << 40, quiet=True,
    ) as run:  # fmt: skip
        run.resume()
        stalls, peaks = [], []
        for step in range(WARM_STEPS + num_steps):
            workloads.train_step(model, optimizer, next(stream))
            run.commit()
            if step >= WARM_STEPS:
                schedule = run.stats()["schedule"]
                stalls.append(schedule["measured_stall_s"])
                peaks.append(schedule["measured_peak_bytes"])
        run.flush()
        stats = run.stats()
        states: Any = run._capture
        picture = states.picture()
    last = stats["schedule"]
    stall_s, peak_bytes = statistics.median(stalls), statistics.median(peaks)
    return {
        "bandwidth": bandwidth, "planned_regime": last["regime"], "planned_interval": last["interval"],
        "planned_stall_s": last["stall_s"], "measured_stall_s": stall_s,
        "planned_peak_bytes": last["peak_bytes"], "measured_peak_bytes": peak_bytes, "step_s": stats["step_s"],
        "says": last["says"], "snapshots": stats["snapshots"],
    }, picture  # fmt: skip
