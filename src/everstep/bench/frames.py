"""How large a frame is against the full state, by how gradients are compressed."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from typing import Any

from everstep.bench import workloads
from everstep.bench.progress import Progress, silent
from everstep.bench.workloads import Workload
from everstep.run import attach

STATE_BYTES_A_PARAMETER = 12
"""Adam's: parameter and two moments, in float32."""


def measure(
    workload: Workload, *, num_steps: int = 4, folder: str | None = None, progress: Progress = silent
) -> dict[str, Any]:
    """For each codec the median of what the log grows by at a step: header, cursor, footer and padding included.

    Residuals of error feedback are in the log once in `base_interval` steps, and in no frame that is measured here.
    """
    found: dict[str, Any] = {}
    num_parameters = 0
    for done, codec in enumerate(workloads.CODECS):
        progress(f"frames of {codec}", done, len(workloads.CODECS))
        model, optimizer = workloads.build(workload)
        compressor = workloads.compressor(codec, optimizer)
        num_parameters = sum(p.numel() for p in model.parameters())
        stream = workloads.endless(workloads.batches(workload))
        top = tempfile.mkdtemp(prefix="everstep-bench-", dir=folder)
        try:
            with attach(model, optimizer, os.path.join(top, "run"), compress=compressor, follower=False, quiet=True) as run:
                run.resume()
                sizes = []
                for _ in range(num_steps):
                    before = run.stats()["log_bytes"]
                    workloads.train_step(model, optimizer, next(stream))
                    run.commit()
                    run.flush()
                    sizes.append(run.stats()["log_bytes"] - before)
                reused = run.stats()["reused_bytes"]
        finally:
            shutil.rmtree(top, ignore_errors=True)
        size = statistics.median(sizes)
        found[codec] = {
            "frame_bytes": size, "times_smaller": STATE_BYTES_A_PARAMETER * num_parameters / size,
            "reused_share": reused / num_steps / (4 * num_parameters),
        }  # fmt: skip
    progress("frames", len(workloads.CODECS), len(workloads.CODECS))
    return {
        "num_parameters": num_parameters, "state_bytes": STATE_BYTES_A_PARAMETER * num_parameters, "codecs": found,
    }  # fmt: skip
