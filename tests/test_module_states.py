"""What modules keep by get_extra_state() is part of every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import InexactWarning
from support import crash


class Counts(nn.Linear):
    """Keeps what no parameter or buffer holds: how often it was used, and a tensor."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.uses = 0
        self.largest = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.uses += 1
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return super().forward(x) * (1.0 + 0.1 * self.uses)

    def get_extra_state(self) -> dict[str, Any]:
        return {"uses": self.uses, "largest": self.largest}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.uses, self.largest = state["uses"], state["largest"]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Counts()))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(run: everstep.Run, model: nn.Module, optimizer: torch.optim.Optimizer, until: int) -> list[float]:
    losses = []
    while run.step < until:
        loss = model(torch.randn(2, 3)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.commit()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", ["delta", "snapshot"])
def test_a_killed_run_goes_on_with_what_modules_keep_for_themselves(mode: str, tmp_path: Any) -> None:
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "whole", mode=mode, quiet=True) as run:
        run.resume()
        expected = train(run, model, optimizer, 9)
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", mode=mode, quiet=True)
    run.resume()
    losses = train(run, model, optimizer, 5)
    run.flush()
    crash(run)
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", mode=mode, quiet=True) as run:
        assert run.resume() == 5
        losses += train(run, model, optimizer, 9)
    assert losses == expected


def test_every_step_has_its_own_and_a_state_dict_is_whole(tmp_path: Any) -> None:
    model, optimizer = build()
    with everstep.attach(model, {"main": optimizer}, tmp_path / "run", quiet=True) as run:
        run.resume()
        train(run, model, optimizer, 6)
    history = everstep.open(tmp_path / "run")
    for step in range(1, 7):
        found = history.state(step)["model"]
        assert found["1.0._extra_state"]["uses"] == step
    other, its_optimizer = build()
    other.load_state_dict(history.state(4)["model"])
    assert other[1][0].uses == 4
    history.restore(other, {"main": its_optimizer}, step=3)
    assert other[1][0].uses == 3


def test_what_cannot_be_stored_and_what_the_run_lacks_is_named(tmp_path: Any) -> None:
    class Odd(Counts):
        def get_extra_state(self) -> Any:
            return object()

    model = nn.Sequential(nn.Linear(3, 3), Odd())
    with pytest.warns(InexactWarning, match=r"not stored of model:1\._extra_state \(Odd\)"):
        run = everstep.attach(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "odd", quiet=True)
    run.close()
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with everstep.attach(plain, torch.optim.SGD(plain.parameters(), 0.1), tmp_path / "plain", quiet=True) as run:
        run.resume()
        train(run, plain, torch.optim.SGD(plain.parameters(), 0.1), 0)
    model = nn.Sequential(nn.Linear(3, 3), Counts())
    run = everstep.attach(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "plain", quiet=True)
    with pytest.warns(InexactWarning, match=r"nothing for model:1\._extra_state"):
        run.resume()
    run.close()
