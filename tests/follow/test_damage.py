"""A shadow whose memory changes by itself: what it hands out is found to be wrong, and the state comes from disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shadow_training import OPTIONS
from torch import nn

import everstep
from everstep.errors import CorruptionError
from everstep.follow import recover
from everstep.store.runs import RunPath
from truth import crash, different, live_state


def build() -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train_step(model: nn.Module, optimizer: Any, step: int) -> None:
    model(torch.randn(6, 300, generator=torch.Generator().manual_seed(step))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Trainer:
    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> None:
        self.model, self.optimizer = build()
        self.run = everstep.attach(self.model, self.optimizer, path, mode="shadow", **{**OPTIONS, **options})
        self._capsys = capsys

    def resume(self) -> tuple[int, str]:
        """The step, and what was said."""
        self._capsys.readouterr()
        step = self.run.resume()
        return step, "".join(self._capsys.readouterr())

    def train(self, last: int) -> dict[str, Any]:
        """To this step, which the shadow then holds; the state."""
        while self.run.step < last:
            train_step(self.model, self.optimizer, self.run.step)
            self.run.commit()
        self.run.flush()
        deadline = time.monotonic() + 60
        while self.run.stats()["folded_step"] < last:
            assert time.monotonic() < deadline, self.run.stats()
            time.sleep(0.005)
        return self.state()

    def state(self) -> dict[str, Any]:
        return live_state(self.model, self.optimizer)


@pytest.fixture
def trainer(tmp_path: Path, memory: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(**options: Any) -> Trainer:
        made.append(Trainer(tmp_path / "run", capsys, **options))
        return made[-1]

    yield make
    for each in made:
        if not each.run._closed:
            crash(each.run)


def damage(run: everstep.Run, key: str) -> int:
    """Flip a bit of what the shadow has described; its pid."""
    offer = recover.find(RunPath(run.path), run._opened.run)
    assert offer is not None and offer.file
    stored = next(t for t in offer.manifest.tensors if key in t.key)
    with open(offer.file, "r+b") as f:
        f.seek(stored.offset)
        byte = f.read(1)
        f.seek(stored.offset)
        f.write(bytes([byte[0] ^ 1]))
    offer.release()
    return offer.pid


@pytest.mark.parametrize("key", ["0.weight", pytest.param("exp_avg", marks=pytest.mark.long)])
def test_what_a_shadow_cannot_hand_out_intact_is_taken_from_elsewhere(key: str, trainer: Callable[..., Trainer]) -> None:
    first = trainer()
    first.resume()
    right = first.train(7)
    crash(first.run)
    pid = damage(first.run, key)
    second = trainer()
    at, said = second.resume()
    assert at == 7  # small frames are still in the log in memory, though the shadow has folded them
    assert second.run.stats()["resumed_from"] == "disk"
    assert "checksum" in said and key in said and "from disk" in said
    assert different(right, second.state()) == []
    # The shadow has given up what it had, and follows again.
    right = second.train(12)
    assert second.run.stats()["shadow_pid"] == pid
    crash(second.run)
    third = trainer()
    assert third.resume()[0] == 12
    assert third.run.stats()["resumed_from"] == "shadow"
    assert different(right, third.state()) == []
    plain = build()
    for step in range(12):
        train_step(*plain, step)
    assert different(live_state(*plain), third.state()) == []


def test_when_nothing_else_has_the_step_the_live_model_is_said_to_be_unusable(
    trainer: Callable[..., Trainer], memory: Path
) -> None:
    first = trainer()
    first.resume()
    right = first.train(5)
    crash(first.run)
    for segment in memory.glob("**/log-*/*"):
        segment.unlink()
    offer = recover.find(RunPath(first.run.path), first.run._opened.run)
    assert offer is not None
    offer.is_damaged("it looks wrong")  # but is not: nothing is given up
    second = trainer()
    assert second.resume()[0] == 5
    assert second.run.stats()["resumed_from"] == "shadow"
    assert different(right, second.state()) == []
    crash(second.run)
    damage(second.run, "2.bias")
    third = trainer()
    with pytest.raises(CorruptionError, match=r"2\.bias.*\n.*must not be trained or saved"):
        third.run.resume(step=5)
