"""The hunt for torn states: an update writes its number into every element of everything, media are slow, threads are late,
processes are killed. Whatever can be restored is of one step, whole."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import everstep
from everstep.capture import leaving as leaving_module
from everstep.capture.leaving import Leaving
from everstep.errors import NotARunError, NothingToRestoreError

SIZES = [(3,), (700, 40), (1,), (40_000,), (64, 8, 3, 3), (530_000,), (2000,), (16, 4, 3, 3), (5,), (7000,)]
"""One is more than one piece; small ones, that leave together, are among the others and follow each other."""


class Numbered(nn.Module):
    """Every element is the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size) for size in SIZES)
        for i in (4, 7):
            self.weights[i].data = self.weights[i].data.to(memory_format=torch.channels_last)
        self.register_buffer("seen", torch.zeros(5000))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def forward(self) -> None:
        """Buffers move in forward."""
        self.seen.fill_(-1)
        self.count.fill_(-1)

    @torch.no_grad()
    def settle(self, step: int) -> None:
        self.seen.fill_(step)
        self.count.fill_(step)


class Numbering(Optimizer):
    """`hidden`: writes so that no version counter shows it. Guards alone must do then."""

    def __init__(self, params: Any, hidden: bool) -> None:
        super().__init__(params, {"hidden": hidden})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["moment"] = torch.zeros_like(p)
                    state["half"] = torch.zeros(p.numel() // 2 + 1, dtype=torch.float64)
                number = int(p.view(-1)[0] if p.is_contiguous() else p[0, 0, 0, 0]) + 1
                for tensor in (p, *state.values()):
                    (tensor.data if group["hidden"] else tensor).fill_(number)


def numbers(value: Any) -> set[float]:
    """The least and the largest that are in each tensor of a state."""
    if isinstance(value, torch.Tensor):
        return {float(n) for n in value.aminmax()}
    if isinstance(value, dict):
        return {n for each in value.values() for n in numbers(each)}
    return set()


def live_numbers(model: nn.Module, optimizer: Optimizer) -> set[float]:
    return numbers(dict(model.state_dict())) | numbers(dict(optimizer.state))


def slow_down(seed: int) -> None:
    """Each piece may be late, before it is copied and after it, so may small ones together, and each state before it begins.
    How many small ones leave together differs from state to state."""
    fill, fill_together, carry, draw = Leaving._fill, Leaving._fill_together, Leaving.carry, random.Random(seed)

    def late(share: float) -> None:
        if draw.random() < share:
            time.sleep(draw.random() * 0.004)

    def filled(self: Leaving, index: int, region: Any, start: int) -> None:
        late(0.2)
        fill(self, index, region, start)
        late(0.2)

    def filled_together(self: Leaving, indices: Any, into: Any) -> None:
        late(0.5)
        fill_together(self, indices, into)
        late(0.5)

    def carried(self: Leaving, writer: Any) -> None:
        leaving_module.TOGETHER_BYTES = draw.choice((100, 10_000, 40_000, 1 << 20))
        late(0.3)
        carry(self, writer)

    Leaving._fill, Leaving.carry = filled, carried  # type: ignore[method-assign]
    Leaving._fill_together = filled_together  # type: ignore[method-assign]


class Told:
    """What a process said before it was killed."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16)

    def tell(self, resumed: int, durable: int) -> None:
        self._memory[:] = struct.pack("<qq", resumed + 1, durable + 1)

    def read(self) -> tuple[int, int]:
        resumed, durable = struct.unpack("<qq", self._memory[:])
        return resumed - 1, durable - 1


def train(path: Path, told: Told, seed: int, hidden: bool, options: dict[str, Any]) -> None:
    """For ever."""
    slow_down(seed)
    draw = random.Random(seed)
    model = Numbered()
    optimizer = Numbering(model.parameters(), hidden)
    run = everstep.attach(model, optimizer, path, mode="snapshot", quiet=True, **options)
    at = run.resume()
    found = live_numbers(model, optimizer)
    assert found == {at}, f"resumed at step {at} with elements of steps {sorted(found)}"
    told.tell(at, run.durable_step)
    while True:
        model()
        if draw.random() < 0.3:
            time.sleep(draw.random() * 0.003)
        optimizer.step()
        model.settle(run.step + 1)
        run.commit(wait=draw.random() < 0.03)
        told.tell(at, run.durable_step)


def killed_after(seconds: float, is_up: Callable[[], bool], work: Callable[[], None]) -> None:
    """Runs this in a process that does not live longer than that, counted from when it is up."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        finally:
            sys.stderr.flush()
            os._exit(1)
    while not is_up() and os.waitpid(pid, os.WNOHANG) == (0, 0):
        time.sleep(0.002)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "it ended by itself"


def hunt(path: Path, num_kills: int, seed: int, hidden: bool, least: int, **options: Any) -> None:
    """So many kills, and more until so many states have been looked at: a slow machine stores few between two of them."""
    Numbering(Numbered().parameters(), hidden)  # what torch imports for the first optimizer, forked processes need not
    draw = random.Random(seed)
    looked_at, latest, kill = 0, -1, 0
    while kill < num_kills or looked_at < least:
        kill += 1
        told = Told()
        # Some are killed at once, some when they have resumed, and some when they have stored something, however slow it is.
        early = draw.random() < 0.2
        what = kill % 2
        killed_after(
            draw.uniform(0, 0.3), lambda e=early, t=told, w=what: e or t.read()[w] >= 0,  # type: ignore[misc]
            lambda k=kill, t=told: train(path, t, 1000 * seed + k, hidden, options),  # type: ignore[misc]
        )  # fmt: skip
        resumed, durable = told.read()
        assert resumed in (-1, max(latest, 0)), f"step {latest} was there, and step {resumed} was resumed"
        try:
            history = everstep.open(path)
            steps = history.steps
            newest = history.plan().step
        except (NotARunError, NothingToRestoreError):
            assert durable < 0 and latest < 0
            continue
        assert steps[-1] == newest >= max(durable, latest), f"{steps}, and step {durable} was durable"
        for n in steps:
            state = history.state(n)
            found = numbers(state["model"]) | numbers(state["optimizer"]["state"])
            assert found == {n}, f"step {n} has elements of steps {sorted(found)}"
            looked_at += 1
        latest = newest


CASES: list[tuple[str, dict[str, Any]]] = [
    ("direct", {"pool_mode": "direct", "snapshot_interval": 1}),
    ("direct in memory", {"pool_mode": "direct", "pool": "shm", "pool_slots": 2}),
    ("staged", {"pool_mode": "staged", "snapshot_interval": 2, "pool_memory": 1 << 20}),
    ("disk", {"pool_mode": "disk", "snapshot_interval": 1, "base_interval": 7, "retention": {"bases": 1}}),
    ("what fits", {"max_bandwidth": 3e8}),
    ("slow medium", {"max_bandwidth": 6e7, "pool": "shm", "snapshot_interval": 1, "pool_memory": 3 << 20}),
    ("staged in memory", {"pool_mode": "staged", "pool": "shm", "snapshot_interval": 1}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=[name for name, _ in CASES])
@pytest.mark.sampled(2)
def test_every_state_that_a_kill_leaves_is_of_one_step(name: str, options: dict[str, Any], shm: Path) -> None:
    hidden = "memory" in name or name == "direct"
    options = {k: str(shm) if v == "shm" else v for k, v in options.items()}
    hunt(shm / "run", 4, 1, hidden, 2, **options)  # in memory, where a commit does not wait for others' disks


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("hidden", [False, True], ids=["", "hidden"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=[name for name, _ in CASES])
def test_thousands_of_states_that_kills_leave_are_of_one_step_each(
    name: str, options: dict[str, Any], hidden: bool, disk: Path, shm: Path
) -> None:
    options = {k: str(shm) if v == "shm" else v for k, v in options.items()}
    hunt(disk / "run", 150, 11 + hidden, hidden, 300, **options)
