"""How well compressed training learns, and what kills with residual="base" do to it.

`pytest -m long -s tests/compress/test_loss.py` prints the numbers of docs/compression.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import loss_training
import pytest
import torch
from torch import nn

from everstep.compress import TopK

MARGIN = 1.05


def fitted(compressor: TopK | None) -> float:
    """Loss of a noisy linear regression after many small batches."""
    g = torch.Generator().manual_seed(0)
    x, truth = torch.randn(2000, 300, generator=g), torch.randn(300, generator=g)
    y = x @ truth + torch.randn(2000, generator=g)
    w = nn.Parameter(torch.zeros(300))
    optimizer = torch.optim.SGD([w], lr=2e-3)
    if compressor is not None:
        compressor.attach(optimizer)
    for at in range(2500):
        rows = torch.randint(0, 2000, (64,), generator=torch.Generator().manual_seed(at))
        w.grad = 2 * x[rows].T @ (x[rows] @ w.detach() - y[rows]) / 64
        optimizer.step()
    return float((x @ w.detach() - y).pow(2).mean())


def test_one_element_in_a_hundred_with_error_feedback_learns_what_dense_training_does() -> None:
    dense, kept = fitted(None), fitted(TopK(0.01))
    assert kept < MARGIN * dense
    assert fitted(TopK(0.01, error_feedback=False)) > MARGIN * dense


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_gpt_comes_within_the_margin_of_dense_training_also_after_five_kills(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p])}
    done = subprocess.run(
        [sys.executable, loss_training.__file__, tmp_path], env=env, capture_output=True, text=True, timeout=1700
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    for name, each in found.items():
        print(f"\n{name}, of text not seen:", ", ".join(f"{step}: {loss:.3f}" for step, loss in each["unseen"].items()))
        after = (sum(each["seen"][k : k + 20]) / 20 for k in loss_training.KILLS)
        print(f"{name}, of text seen, in 20 steps after each kill:", ", ".join(f"{loss:.3f}" for loss in after))
    last = str(loss_training.STEPS)
    dense, kept, killed = (found[name]["unseen"][last] for name in ("dense", "topk", "killed"))
    assert kept < MARGIN * dense and killed < MARGIN * dense
