"""The benchmark of layer-wise updates on a tiny model: that it measures what it says, not how much it is."""

import os
import threading

import pytest

from everstep.bench import layers
from everstep.bench.workloads import Workload
from everstep.capture.layerwise import Layerwise


def settings(tmp_path, **changes):
    given = {
        "workload": Workload().quick(), "num_rounds": 2, "block_steps": 3, "folder": str(tmp_path),
    }  # fmt: skip
    return layers.Settings(**{**given, **changes})


def test_ways_are_compared_in_one_process_and_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setitem(Layerwise.__init__.__kwdefaults__, "batch_bytes", 1)
    before = {t.name for t in threading.enumerate()}
    found = layers.measure(settings(tmp_path, num_rounds=1, block_steps=2))
    assert found["bit_equal_to_training_without"] is True
    assert list(found["ways"]) == ["without", "snapshots", "layerwise"]
    assert found["giving_way_to_not"] is None and found["max_bandwidth"] is None
    plain, early = found["ways"]["snapshots"], found["ways"]["layerwise"]
    assert plain["in_backward_share"] == plain["early_share"] == 0
    # How much had left when backward ended is a matter of time.
    assert early["in_backward_share"] > 0 and 0 <= early["early_share"] <= 1 and early["states_begun_early"] == 1
    assert all(way["ratio"]["low"] <= way["ratio"]["high"] for way in found["ways"].values())
    assert os.listdir(tmp_path) == []
    assert {t.name for t in threading.enumerate()} <= before


@pytest.mark.long
def test_on_a_slow_way_out_some_of_a_state_is_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "LINK_SHARE", 3.0)
    found = layers.measure(settings(tmp_path, slow=True, num_rounds=1, block_steps=2))
    assert found["max_bandwidth"] > 0 and found["ways"]["snapshots"]["copied_share"] > 0
    assert found["bit_equal_to_training_without"] is True


@pytest.mark.long
def test_two_ranks_reduce_gradients_and_states_give_way_to_that(tmp_path):
    found = layers.measure(settings(tmp_path, num_ranks=2))
    assert found["bit_equal_to_training_without"] is True
    giving, other = found["ways"]["layerwise"], found["ways"]["layerwise, not giving way"]
    assert giving["reducing_s_a_step"] > 0 and other["reducing_s_a_step"] > 0
    assert other["gave_way_s_a_step"] == 0
    assert found["giving_way_to_not"]["median"] > 0
    assert os.listdir(tmp_path) == []
