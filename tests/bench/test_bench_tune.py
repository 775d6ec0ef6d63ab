"""The benchmark of the tuner's predictions on a tiny model: that it measures what it says, not how much it is."""

import os

import pytest

from everstep.bench import tune
from everstep.bench.overhead import Settings
from everstep.bench.workloads import Workload


@pytest.mark.long
@pytest.mark.timeout(600)
def test_recoveries_are_compared_with_what_was_expected_right_before_them(tmp_path):
    settings = Settings(
        workload=Workload().quick(), num_pairs=1, block_steps=4, base_interval=8, num_peer_pairs=0, folder=str(tmp_path),
        wait_for_follower=False,
    )  # fmt: skip
    found = tune.measure(settings)["recovery"]
    assert len(found["learned"]) == tune.NUM_LEARNED
    assert len(found["steps"]) == len(found["ratios"]) == len(tune.KILLS) - tune.NUM_LEARNED
    assert all(num_steps > 0 for num_steps in found["steps"]) and all(ratio > 0 for ratio in found["ratios"])
    assert min(found["ratios"]) <= found["ratio"] <= max(found["ratios"])
    assert os.listdir(tmp_path) == []
