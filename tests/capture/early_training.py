"""A training program that kills itself in the middle of a backward pass, when some gradients of that pass have left.

As a program: python early_training.py RUN MODE STEP. Its batches follow from the step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import everstep
from everstep.capture import early

STEPS = 14


def build() -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 96))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(torch.randn(4, 96, generator=torch.Generator().manual_seed(step))).square().mean()


def train(model: nn.Module, optimizer: Any, first: int, *, run: Any = None, kill_at: int = -1) -> None:
    """To the end. Every other step is clipped."""
    for step in range(first, STEPS):
        loss = loss_of(model, step)
        if step == kill_at:
            model[0].weight.register_hook(lambda grad: die(run))  # the last gradient of the pass
        loss.backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.commit()


def die(run: Any) -> None:
    capture = run._capture
    capture.flush()
    assert len(capture.offload._encoder.sent._sent) == 2  # of the other two layers, in a frame that has no footer
    capture.offload._log.write_out()
    while run.stats().get("folded_step", run.step) < run.step:  # a shadow takes some time to start
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def main(path: str, mode: str, kill_at: str) -> None:
    torch.set_num_threads(1)
    early.BATCH_BYTES = 1
    model, optimizer = build()
    run = everstep.attach(model, optimizer, path, mode=mode, early=True, quiet=True, base_interval=1000)
    train(model, optimizer, run.resume(), run=run, kill_at=int(kill_at))


if __name__ == "__main__":
    main(*sys.argv[1:])
