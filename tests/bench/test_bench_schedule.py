"""The benchmark of the schedule on a tiny model: that all three regimes are reached and told."""

import os

from everstep.bench import schedule
from everstep.bench.workloads import Workload


def test_every_regime_tells_what_was_planned_and_what_was_measured(tmp_path):
    (tmp_path / "memory").mkdir()
    workload = Workload(dim=64, num_layers=2, num_heads=2, vocabulary=512, sequence=64, tokens=64)
    found = schedule.measure(workload, num_steps=4, folder=str(tmp_path), memory=str(tmp_path / "memory"))
    assert list(found["regimes"]) == list(schedule.REGIMES)
    for measured in found["regimes"].values():
        assert measured["planned_regime"] in schedule.REGIMES
        assert measured["measured_stall_s"] >= 0 and measured["measured_peak_bytes"] >= 0
    ways = [m["bandwidth"] for m in found["regimes"].values()]
    assert ways == sorted(ways, reverse=True), "each regime has a slower way out than the one before"
    assert os.listdir(tmp_path) == ["memory"] and os.listdir(tmp_path / "memory") == []
