"""What many tests need: crashing a run in-process, comparing states bit for bit."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from everstep.capture.states import States


def crash(run: Any) -> None:
    """End a Run as a kill would: threads stop, nothing is committed, the segment is left as it is, the lock is free."""
    capture = run._capture
    if isinstance(capture, States):
        capture.close(finish=False)
    elif capture is not None:
        capture.settle()
        capture.offload.flush()
        for tap in capture.taps.values():
            tap.detach()
        capture._auditor.close()
        if capture.snapshot is not None:
            capture.snapshot.guard()
            capture.snapshot.wait()
        capture.offload.close(finish=False)
    if run._keeper is not None:
        run._keeper.close()
    run._opened.lock.release()
    run._closed = True


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors agree in dtype, shape and every bit. Not Everstep's own: it is under test."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = [t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*bits)


def equal(a: Any, b: Any, path: str = "") -> list[str]:
    """Paths at which two nested states differ in type, value or bits; empty if they are equal."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            return [f"{path}: {type(a).__name__} / {type(b).__name__}"]
        if a.layout != b.layout:
            return [f"{path}: {a.layout} / {b.layout}"]
        if a.is_sparse:
            same = a.shape == b.shape and a.is_coalesced() == b.is_coalesced()
            same = same and same_bits(a._indices(), b._indices()) and same_bits(a._values(), b._values())
        else:
            same = same_bits(a.detach(), b.detach())
        return [] if same else [f"{path}: tensors differ"]
    if isinstance(a, np.ndarray):
        same = isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        return [] if same else [f"{path}: arrays differ"]
    if isinstance(a, dict):
        if not isinstance(b, dict) or list(a) != list(b):
            return [f"{path}: keys {list(a)} / {list(b) if isinstance(b, dict) else b!r}"]
        return [d for k in a for d in equal(a[k], b[k], f"{path}.{k}")]
    if isinstance(a, (list, tuple)):
        if type(a) is not type(b) or len(a) != len(b):
            return [f"{path}: {a!r} / {b!r}"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in equal(x, y, f"{path}[{i}]")]
    if isinstance(a, float) and isinstance(b, float):
        return [] if np.float64(a).tobytes() == np.float64(b).tobytes() else [f"{path}: {a!r} / {b!r}"]
    return [] if type(a) is type(b) and a == b else [f"{path}: {a!r} / {b!r}"]


def fork_ranks(num: int, work: Callable[[int], None]) -> int:
    """Runs `work` for each rank in a process of its own, forked after the import of torch, which takes longest; ends all if
    one fails. What such a program exits with."""
    pids = []
    for rank in range(num):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work(rank)
                code = 0
            finally:
                if code:
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    failed = False
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status and not failed:
            failed = True
            for other in pids:
                os.kill(other, signal.SIGKILL)
    return int(failed)
