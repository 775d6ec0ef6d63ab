"""Sparse frames of plain SGD are replayed without being made dense, and every bit is as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.compress import TopK
from everstep.fold import sparse, tiles
from support import crash, same_bits

NUMEL = (1 << 19) + 4321
"""Two pieces."""


def trained(path: Path, steps: int = 6, scale: float | None = None, **options: Any) -> torch.Tensor:
    """A run of so many steps that was killed; its parameter, of which some elements are -0.0, some have no gradient ever."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(NUMEL))
    with torch.no_grad():
        p[::3] = -0.0
    optimizer = torch.optim.SGD([p], **{"lr": 0.1, **options})
    compressor = TopK(0.01, error_feedback=False)
    compressor.attach(optimizer)
    if scale is not None:

        def clip(*_: Any) -> None:
            assert p.grad is not None
            p.grad.mul_(scale)

        optimizer.register_step_pre_hook(clip)
    run = everstep.attach(nn.ParameterList([p]), optimizer, path, compress=compressor, quiet=True, follower=False)
    run.resume()
    for _ in range(steps):
        p.grad = torch.randn(NUMEL)
        optimizer.step()
        optimizer.zero_grad()
        run.commit()
    run.flush()
    crash(run)
    return p.detach()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    found: list[bool] = []

    def counted(*args: Any) -> bool:
        found.append(sparse.step_sparse(*args))
        return found[-1]

    monkeypatch.setattr(tiles, "step_sparse", counted)
    return found


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}], ids=["default", "foreach", "loop"])
def test_plain_sgd_is_replayed_on_the_elements_that_have_a_gradient(
    options: dict[str, Any], tmp_path: Path, calls: list[bool]
) -> None:
    p = trained(tmp_path, **options)
    assert same_bits(everstep.open(tmp_path).state()["model"]["0"], p)
    assert calls == [True] * 12


def test_gradients_that_were_clipped_after_compression_are_multiplied_first(tmp_path: Path, calls: list[bool]) -> None:
    p = trained(tmp_path, scale=0.37)
    assert same_bits(everstep.open(tmp_path).state()["model"]["0"], p)
    assert calls == [True] * 12


def test_gradients_of_the_other_sign_are_made_dense(tmp_path: Path, calls: list[bool]) -> None:
    p = trained(tmp_path, scale=-1.0)
    assert same_bits(everstep.open(tmp_path).state()["model"]["0"], p)
    assert not any(calls)


@pytest.mark.parametrize(
    "options",
    [{"momentum": 0.9}, {"weight_decay": 0.01}, {"maximize": True}, {"fused": True}, {"lr": 0.0}],
    ids=lambda options: next(iter(options)),
)
def test_every_other_sgd_is_replayed_tile_by_tile(options: dict[str, Any], tmp_path: Path, calls: list[bool]) -> None:
    p = trained(tmp_path, **options)
    assert same_bits(everstep.open(tmp_path).state()["model"]["0"], p)
    assert calls == []
