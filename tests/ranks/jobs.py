"""What the processes of a world are asked to do."""

from __future__ import annotations

import os
import time

import torch.distributed as dist
from builders import one, whole_state
from layouts import LAYOUTS
from transformer import global_batch

from support import equal


def train_plainly(layout: str, optimizer: str, steps: int) -> list[float]:
    """Train without Everstep; the losses. What the ranks hold at the start is one model, put together again, and
    replicas agree at the end (whole_state sees to that)."""
    way = LAYOUTS[layout]
    training = way.build(optimizer)
    begun = whole_state(training)
    if begun is not None:
        whole = one(optimizer, way.family)
        names = sorted([*whole.model.named_parameters(), *whole.model.named_buffers()])
        assert not equal(begun["model"], dict(names))
    losses = [training.step(global_batch(i)) for i in range(steps)]
    whole_state(training)
    return losses


def say(word: str) -> list[object]:
    return [word, dist.get_rank() if dist.is_initialized() else None, os.getpid()]


def fail_on(rank: int) -> None:
    """Raise on one rank while the others wait for it."""
    if dist.get_rank() == rank:
        raise ValueError("a rank that fails")
    dist.barrier()


def wait_for_ever() -> None:
    dist.barrier()
    time.sleep(1000)
