"""The recovery benchmark on a tiny model: that every way brings the state back from where it says."""

import os

import pytest
import torch

from everstep.bench import peers, recover, workloads
from everstep.bench.workloads import Workload

QUICK = Workload().quick()


def test_a_process_that_has_not_trained_loads_what_another_saved(tmp_path):
    model, optimizer = workloads.build(QUICK)
    batches = iter(workloads.batches(QUICK))
    with peers.their_warnings_silenced():
        for make in (peers.TorchSave, peers.DcpSave):
            workloads.train_step(model, optimizer, next(batches))
            saver = make(str(tmp_path / make.name))
            saver.save(model, optimizer)
            saver.wait()
            other, other_optimizer = workloads.build(QUICK, seed=1)
            make(str(tmp_path / make.name)).load(other, other_optimizer)
            for a, b in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(a, b)
                assert torch.equal(optimizer.state[a]["exp_avg_sq"], other_optimizer.state[b]["exp_avg_sq"])


@pytest.mark.long
def test_every_way_recovers_from_where_it_says_and_leaves_nothing_behind(tmp_path):
    """That the source is right, and the step, is looked at by the benchmark itself."""
    (tmp_path / "memory").mkdir()
    found = recover.measure(QUICK, num_repetitions=1, folder=str(tmp_path), memory=str(tmp_path / "memory"))
    assert set(found["ways"]) == {"shadow", "disk", "pool in memory", "pool on disk", "torch.load", "dcp.load"}
    for parts in found["ways"].values():
        assert parts["total_s"] > parts["fetch_s"] > 0
    assert os.listdir(tmp_path) == ["memory"] and os.listdir(tmp_path / "memory") == []
