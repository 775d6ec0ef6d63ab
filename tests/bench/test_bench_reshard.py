"""Loading under another layout, measured."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from everstep.bench import reshard
from everstep.bench.workloads import Workload


@pytest.mark.long
def test_the_same_ranks_load_what_others_wrote_and_what_they_wrote_themselves_by_turns(tmp_path: Path) -> None:
    settings = reshard.Settings(
        workload=Workload().quick(), source=2, targets=(1,), num_frames=2, num_repetitions=2, folder=str(tmp_path)
    )
    found = reshard.measure(settings)
    turns = {(each["way"], each["ranks"], each["written_by"]): each for each in found["seconds"]}
    assert set(turns) == {(way, n, by) for way in ("everstep", "dcp") for n, by in ((2, 2), (1, 2), (1, 1))}
    assert all(len(each[what]) == 2 and min(each[what]) > 0 for each in turns.values() for what in ("seconds", "cpu_s"))
    for what, ratio in (("seconds", "ratio_to_own"), ("cpu_s", "cpu_ratio_to_own")):
        for way in ("everstep", "dcp"):
            others, own = (statistics.median(turns[way, 1, by][what]) for by in (2, 1))
            assert found[ratio][way] == {1: others / own}
    assert list(tmp_path.iterdir()) == []
