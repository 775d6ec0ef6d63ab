"""The overhead benchmark on a tiny model: that it measures what it says, not how much it is."""

import os
import threading
import time

import pytest
import torch

import everstep
from everstep.bench import overhead, workloads
from everstep.bench.workloads import Workload

QUICK = Workload().quick()


def settings(tmp_path, **changes):
    given = {
        "workload": QUICK, "num_pairs": 2, "block_steps": 3, "base_interval": 1000, "num_peer_pairs": 0,
        "folder": str(tmp_path), "wait_for_follower": False,
    }  # fmt: skip
    return overhead.Settings(**{**given, **changes})


def test_training_with_everstep_is_the_same_bit_for_bit_and_leaves_nothing_behind(tmp_path):
    before = {t.name for t in threading.enumerate()}
    found = overhead.measure(settings(tmp_path))
    assert found["bit_equal_to_training_without"] is True
    assert os.listdir(tmp_path) == []
    assert {t.name for t in threading.enumerate()} <= before


def test_it_reports_an_interval_own_time_background_time_and_bytes(tmp_path):
    found = overhead.measure(settings(tmp_path, num_pairs=3))
    assert found["num_pairs"] == len(found["ratios"]) == 3
    assert 0 < found["ratio"]["low"] <= found["ratio"]["median"] <= found["ratio"]["high"]
    assert found["training_thread_share"] > 0
    assert found["training_thread_share"] == found["training_thread_s_a_step"] / found["step_s"]
    assert found["background_cpu_s_a_step"]["everstep-write"] > 0
    assert found["bytes_a_step"] > 0.5 * 4 * found["num_parameters"]
    assert found["step_s"] > 0


def test_the_thread_count_is_set_for_the_measurement_only(tmp_path):
    before = torch.get_num_threads()
    assert overhead.measure(settings(tmp_path, num_threads=2, num_pairs=1, block_steps=1))["num_threads"] == 2
    assert torch.get_num_threads() == before


def test_peers_save_the_whole_state(tmp_path):
    found = overhead.measure(settings(tmp_path, num_pairs=1, num_peer_pairs=1))
    assert set(found["peers"]) == {"torch.save", "dcp.async_save"}
    for peer in found["peers"].values():
        assert peer["bytes_a_step"] > 12 * found["num_parameters"]
        assert peer["ratio"]["median"] > 0


def test_compaction_runs_while_it_measures(tmp_path):
    found = overhead.measure(
        settings(tmp_path, base_interval=10, num_pairs=1, block_steps=12, wait_for_follower=True)
    )
    assert found["num_compactions"] >= 1 or found["background_cpu_s_a_step"]["follower"] > 0


def test_the_meter_counts_time_in_hooks_and_not_that_of_the_step_itself(tmp_path):
    model, optimizer = workloads.build(QUICK)
    batch = next(iter(workloads.batches(QUICK)))
    meter = overhead.Meter(optimizer)
    plain_zero_grad = meter._plain_zero_grad

    def slow_zero_grad(set_to_none=True):
        time.sleep(0.1)
        plain_zero_grad(set_to_none=set_to_none)

    meter._plain_zero_grad = slow_zero_grad
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    run.resume()
    meter.install(run)
    for _ in range(5):
        workloads.train_step(model, optimizer, batch)
        run.commit()
    measured = meter.seconds
    meter.remove()
    run.close()
    meter.finish()
    assert "zero_grad" not in vars(optimizer)
    assert measured > 0
    begun = meter.seconds
    workloads.train_step(model, optimizer, batch)
    assert meter.seconds == begun, "hooks are gone after close"
    assert measured < 5 * 0.1, "the 100 ms of the plain zero_grad are not Everstep's"


def test_what_the_run_counts_as_its_own_time_is_what_the_meter_sees(tmp_path):
    """Run.stats()["training_thread_s"] leaves nothing out."""
    found = overhead.measure(settings(tmp_path, num_pairs=4, block_steps=10))
    assert found["training_thread_share_by_stats"] == pytest.approx(found["training_thread_share"], rel=0.3, abs=0.01)


def test_growth_of_memory_is_reported_for_trainer_follower_and_training_without(tmp_path):
    found = overhead.measure_rss(settings(tmp_path, base_interval=1000), first_step=10, last_step=90)
    for name in ("trainer", "follower", "without"):
        slope = found[name]["slope_bytes_a_step"]
        assert slope["low"] <= slope["median"] <= slope["high"]
    assert found["trainer"]["peak_bytes"] >= found["trainer"]["last_quarter_bytes"] > 0
    assert os.listdir(tmp_path) == []


def test_snapshots_are_measured_without_a_follower_and_leave_no_pool_behind(tmp_path):
    (tmp_path / "pool").mkdir()
    found = overhead.measure(
        settings(tmp_path, mode="snapshot", snapshot_interval=2, pool=str(tmp_path / "pool"), wait_for_follower=True)
    )
    assert found["block_steps"] == 4 and found["snapshot_interval"] == 2
    assert found["bit_equal_to_training_without"] is True
    assert found["background_cpu_s_a_step"]["everstep-offload"] > 0
    assert found["bytes_a_step"] > 12 * found["num_parameters"] / 2
    assert os.listdir(tmp_path) == ["pool"] and os.listdir(tmp_path / "pool") == []
