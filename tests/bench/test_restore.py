"""The restore benchmark on a tiny model: that all its ways give the same state from the same bytes."""

import os

import pytest
import torch

import everstep
from everstep.bench import restore as bench
from everstep.bench import workloads
from everstep.bench.workloads import Workload
from everstep.memory import same_bits

QUICK = Workload().quick()


def settings(tmp_path, **changes):
    given = {"workload": QUICK, "num_frames": 4, "num_repetitions": 1, "folder": str(tmp_path)}
    return bench.Settings(**{**given, **changes})


@pytest.fixture
def run_of_six_frames(tmp_path):
    path = str(tmp_path / "run")
    model = bench.make_run(path, settings(tmp_path, num_frames=6))
    return path, model


def test_the_run_has_one_base_of_full_state_before_its_frames(run_of_six_frames):
    path, _ = run_of_six_frames
    plan = everstep.open(path).plan()
    assert plan.base.step == bench.WARM_STEPS and len(plan.frames) == 6
    assert sum(t.role == "state" for t in plan.base.tensors) > 0


def test_frame_by_frame_gives_the_state_that_was_trained(run_of_six_frames):
    path, model = run_of_six_frames
    history = everstep.open(path)
    state = bench.frame_by_frame(path, history.steps[-1])
    names = {atom.name: atom.uid for atom in state.layout.atoms}
    whole = history.state()
    for name, p in model.named_parameters():
        assert same_bits(state.tensors[names[name]], p.detach())
        exp_avg = whole["optimizer"]["state"][name]["exp_avg"]
        assert same_bits(state.optimizers["optimizer"].state[names[name]]["exp_avg"], exp_avg)


def test_planned_ranges_cover_every_byte_of_the_plan_once(run_of_six_frames):
    path, _ = run_of_six_frames
    plan = everstep.open(path).plan()
    ranges = bench.planned_ranges(plan)
    assert sum(end - first for _, first, end in ranges) == plan.num_bytes
    assert len(ranges) < 1 + len(plan.frames), "frames that follow each other are read as one"
    for file, _, end in ranges:
        assert end <= os.path.getsize(file)


def test_shares_are_disjoint_and_complete_and_about_equal(run_of_six_frames):
    path, _ = run_of_six_frames
    state = bench.frame_by_frame(path, everstep.open(path).steps[-1])
    shares = bench._shares(state, 3)
    uids = [uid for params in state.optimizers["optimizer"].params for uid in params]
    assert sorted(uid for share in shares for uid in share) == sorted(uids)
    sizes = [sum(state.tensors[uid].numel() for uid in share) for share in shares]
    assert max(sizes) < 2 * min(sizes)


def test_it_measures_all_ways_by_turns_and_leaves_nothing_behind(tmp_path):
    before = torch.get_num_threads()
    found = bench.measure(settings(tmp_path, num_repetitions=2))
    ways = {"everstep", "everstep_in_place", "raw_read", "raw_fold", "frame_by_frame", "torch.load", "dcp.load"}
    assert set(found["median_s"]) == ways
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found["seconds"].values())
    assert found["bit_equal_to_the_trained_model"] is True
    bound = max(found["median_s"]["raw_read"], found["median_s"]["raw_fold"])
    assert found["ratio"] == found["median_s"]["everstep"] / bound
    assert os.listdir(tmp_path) == []
    assert torch.get_num_threads() == before


def test_peers_load_what_they_saved(tmp_path):
    from everstep.bench import peers

    model, optimizer = workloads.build(QUICK)
    batches = iter(workloads.batches(QUICK))
    workloads.train_step(model, optimizer, next(batches))
    other, other_optimizer = workloads.build(QUICK, seed=1)
    workloads.train_step(other, other_optimizer, next(batches))
    with peers.their_warnings_silenced():
        for make in (peers.TorchSave, peers.DcpSave):
            peer = make(str(tmp_path / make.name))
            workloads.train_step(model, optimizer, next(batches))
            peer.save(model, optimizer)
            peer.wait()
            peer.load(other, other_optimizer)
            for a, b in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(a, b)
                assert torch.equal(optimizer.state[a]["exp_avg_sq"], other_optimizer.state[b]["exp_avg_sq"])
