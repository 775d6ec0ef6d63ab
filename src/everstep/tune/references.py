"""Formulas of others, for comparison in tests and documents. None of them decides anything here.

Those marked (R) are reconstructed from what the papers say, not copied from them.
"""

from __future__ import annotations

import math


def young(save_s: float, mtbf_s: float) -> float:
    """Seconds between checkpoints (Young 1974): `√(2·δ·M)`."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly(save_s: float, mtbf_s: float) -> float:
    """Seconds between checkpoints (Daly 2006), without the checkpoint itself; M if a checkpoint takes longer than 2·M."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    x = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - save_s


def daly_total(work_s: float, between_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Seconds that `work_s` of work take with a checkpoint every `between_s` of work (Daly's complete model)."""
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((between_s + save_s) / mtbf_s) * work_s / between_s


def checkfreq(full_s: float, hidden_s: float, step_s: float) -> int:
    """Steps between checkpoints (CheckFreq, FAST'21): so that one is done before the next begins."""
    return max(math.ceil((full_s - hidden_s) / step_s), 1)


def pccheck(write_s: float, num_concurrent: int, slowdown: float, step_s: float) -> int:
    """Steps between checkpoints of which N are in flight, so that training slows down to at most `slowdown` ≥ 1 (R)."""
    return max(math.ceil(write_s / (num_concurrent * slowdown * step_s)), 1)


def form_a_waste(
    bases_a_second: float, batch_s: float, *, load_s: float, merge_s: float, full_bytes: float, bytes_s: float, mtbf_s: float
) -> float:
    """Wasted part of the time of one worker in LowDiff's Form A (R): batches merged into one differential."""
    replayed = merge_s / 2 * (1 / (bases_a_second * batch_s) - 1)
    return (batch_s / 2 + load_s + replayed) / mtbf_s + full_bytes * bases_a_second / bytes_s


def form_a(*, merge_s: float, full_bytes: float, bytes_s: float, mtbf_s: float) -> tuple[float, float]:
    """(bases a second, seconds a batch) that waste least in Form A (R)."""
    frequency = (merge_s * bytes_s**2 / (4 * full_bytes**2 * mtbf_s**2)) ** (1 / 3)
    batch_s = (2 * full_bytes * merge_s * mtbf_s / bytes_s) ** (1 / 3)
    return frequency, batch_s


def form_b_waste(
    interval: float, batch: float, *, step_s: float, rate: float, base_stall_s: float, batch_stall_s: float, load_s: float,
    replay_s: float,
) -> float:  # fmt: skip
    """Wasted part of the time in LowDiff's Form B (R): every step replayed exactly."""
    stalls = base_stall_s / (interval * step_s) + batch_stall_s / (batch * step_s)
    return stalls + rate * (batch * step_s / 2 + load_s + replay_s * interval / 2)


def form_b(
    *, step_s: float, rate: float, base_stall_s: float, batch_stall_s: float, replay_s: float
) -> tuple[float, float]:
    """(steps between bases, steps a batch) that waste least in Form B (R)."""
    interval = math.sqrt(2 * base_stall_s / (rate * replay_s * step_s))
    return interval, math.sqrt(2 * batch_stall_s / rate) / step_s


def checkflow(state_bytes: float, bytes_s: float, forward_backward_s: float, step_s: float) -> tuple[float, float, int]:
    """(bytes to snapshot on the device, stall of a step, interval without one) to offload the whole state (R)."""
    in_place, in_all = bytes_s * forward_backward_s, bytes_s * step_s
    if state_bytes <= in_place:
        return 0.0, 0.0, 1
    if state_bytes <= in_all:
        return state_bytes - in_place, 0.0, 1
    return state_bytes - in_place, state_bytes / bytes_s - step_s, math.ceil(state_bytes / in_all)
