"""Shared memory that is really full: a small tmpfs holds the log and the shadow's state, and something else fills it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shadow_training import OPTIONS, kill, shadows_in
from torch import nn

import everstep
from everstep.errors import StorageError
from truth import crash, different, live_state

SIZE_MB = 340
"""Below some 256 MB of room memory is not used for the log."""


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="es-"))  # a short name: there will be a socket in it
    options = f"size={SIZE_MB}m,mode=700"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(made)], capture_output=True)
    if done.returncode:
        made.rmdir()
        pytest.skip("mounting a tmpfs is not allowed here")
    monkeypatch.setenv("EVERSTEP_SHARED", str(made))
    try:
        yield made
    finally:
        deadline = time.monotonic() + 30
        while left := shadows_in(made):
            for pid in left:
                kill(pid)
            assert time.monotonic() < deadline, "shadows come back again and again"
        subprocess.run(["umount", "-l", str(made)], check=True)
        made.rmdir()


def fill(memory: Path, leave_mb: int) -> Path:
    """Take what there is but for so much, as another program of this host would."""
    ballast = memory / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb") as f:
        while shutil.disk_usage(memory).free > leave_mb << 20:
            f.write(b"\1" * (1 << 16))
            f.flush()
    return ballast


def build() -> Any:
    """Frames of 5 MB: each has a segment of its own."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1100, 1100), nn.Tanh(), nn.Linear(1100, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


class Trainer:
    def __init__(self, path: Path, **options: Any) -> None:
        self.model, self.optimizer = build()
        settings = {"mode": "shadow", "quiet": True, **OPTIONS, **options}
        self.run = everstep.attach(self.model, self.optimizer, path, **settings)

    def train(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            x = torch.randn(4, 1100, generator=torch.Generator().manual_seed(self.run.step))
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.run.commit()

    def wait(self, true: Callable[[dict[str, Any]], bool]) -> None:
        deadline = time.monotonic() + 60
        while not true(self.run.stats()):
            assert time.monotonic() < deadline, self.run.stats()
            time.sleep(0.01)

    def state(self) -> dict[str, Any]:
        return live_state(self.model, self.optimizer)


@pytest.fixture
def trainer(tmp_path: Path, small_memory: Path) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(**options: Any) -> Trainer:
        made.append(Trainer(tmp_path / "run", **options))
        return made[-1]

    yield make
    for each in made:
        if not each.run._closed:
            crash(each.run)


def must_go_on_right(second: Trainer, at: int, states: dict[int, Any]) -> None:
    assert second.run.resume() == at
    assert different(states[at], second.state()) == []
    plain = Trainer.__new__(Trainer)
    plain.model, plain.optimizer = build()
    plain.run = type("Steps", (), {"step": 0, "commit": lambda self: setattr(self, "step", self.step + 1)})()
    plain.train(at)
    assert different(states[at], plain.state()) == []


def test_while_memory_is_nearly_full_the_log_goes_to_disk_and_comes_back(
    small_memory: Path, trainer: Callable[..., Trainer]
) -> None:
    first = trainer()
    first.run.resume()
    first.train(3)
    first.run.flush()
    first.wait(lambda stats: stats["folded_step"] == 3)
    ballast = fill(small_memory, 100)
    first.train(6)
    first.run.flush()
    assert first.run.stats()["spilled_steps"] >= 4
    first.wait(lambda stats: stats["folded_step"] == 9)
    ballast.unlink()
    first.train(2)
    first.run.flush()
    spilled = first.run.stats()["spilled_steps"]
    first.train(2)
    first.run.flush()
    assert first.run.stats()["spilled_steps"] == spilled
    states = {13: first.state()}
    crash(first.run)
    must_go_on_right(trainer(), 13, states)


@pytest.mark.parametrize("on_error", [pytest.param("raise", marks=pytest.mark.long), "warn"])
def test_memory_that_runs_full_within_a_step_is_told_and_nothing_wrong_comes_back(
    on_error: str, small_memory: Path, trainer: Callable[..., Trainer]
) -> None:
    first = trainer(on_error=on_error)
    first.run.resume()
    first.train(3)
    first.run.flush()
    first.wait(lambda stats: stats["folded_step"] == 3)
    shadow = first.run.stats()["shadow_pid"]
    os.kill(shadow, signal.SIGSTOP)  # gives no memory back
    first.train(4)  # into what it may have given back before
    first.run.flush()
    states = {7: first.state()}
    assert first.run.stats()["spilled_steps"] == 0
    ballast = fill(small_memory, 0)
    if on_error == "raise":
        with pytest.raises(StorageError, match=r"full|No space"):
            for _ in range(50):
                first.train()
                states[first.run.step] = first.state()
    else:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            deadline = time.monotonic() + 60
            while not caught or first.run.stats()["unprotected_since"] is not None:
                assert time.monotonic() < deadline, "protected again" if caught else "full"
                first.train()
                time.sleep(0.02)
        assert any("UNPROTECTED" in str(each.message) for each in caught)
        first.train(2)
        first.run.flush()
        assert ballast.exists()
        states[first.run.step] = first.state()
    durable = first.run.durable_step
    assert durable >= 7
    crash(first.run)
    os.kill(shadow, signal.SIGCONT)
    second = trainer()
    at = second.run.resume()
    assert at >= durable
    assert different(states[at], second.state()) == []
