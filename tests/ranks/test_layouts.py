"""Every layout trains as one process does, without Everstep: what the matrix stands on."""

from __future__ import annotations

import pytest
from layouts import LAYOUTS
from workers import World

TOLERANCE = 5e-6
"""Another order of sums moves losses (of about 6) by less."""


def check(world: World, optimizer: str) -> None:
    alone: dict[str, list[float]] = {}
    for name, way in LAYOUTS.items():
        if optimizer not in way.kinds:
            continue
        losses = world.run("jobs:train_plainly", name, optimizer, 3, ranks=way.ranks)
        assert all(ranks_losses == losses[0] for ranks_losses in losses), name
        wanted = alone.setdefault(way.family, losses[0])
        assert losses[0] == pytest.approx(wanted, rel=0, abs=TOLERANCE), name


@pytest.mark.long
def test_every_layout_trains_as_one_process_does(world: World) -> None:
    check(world, "adamw")


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw-fused", "sgd"])
def test_every_layout_trains_as_one_process_does_with_other_optimizers(world: World, optimizer: str) -> None:
    check(world, optimizer)
