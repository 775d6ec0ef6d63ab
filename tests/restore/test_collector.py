"""A restore makes many small objects: the cycle collector rests meanwhile, and is as it was afterwards."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import MismatchError


@pytest.mark.parametrize("enabled", [True, False])
def test_the_cycle_collector_is_left_as_it_was(enabled: bool, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with everstep.attach(model, optimizer, tmp_path, quiet=True, follower=False) as run:
        run.resume()
    other = nn.Linear(4, 2)
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        everstep.open(tmp_path).restore(model, optimizer)
        assert gc.isenabled() == enabled
        with pytest.raises(MismatchError):
            everstep.open(tmp_path).restore(other, torch.optim.SGD(other.parameters(), lr=0.1))
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
