"""A small run that was resumed at an older step once: two timelines."""

import pytest
import torch
from torch import nn

import everstep


@pytest.fixture
def run_with_a_fork(tmp_path):
    """Steps 0 to 6 on timeline 1, of which timeline 2 has forked at step 4 and gone on to step 7."""
    path = str(tmp_path / "run")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    def train(run, num_steps):
        for _ in range(num_steps):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.commit()

    with everstep.attach(model, optimizer, path, quiet=True, follower=False) as run:
        run.resume()
        train(run, 6)
    with everstep.attach(model, optimizer, path, quiet=True, follower=False) as run:
        assert run.resume(step=4) == 4
        train(run, 3)
    return path
