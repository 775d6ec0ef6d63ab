"""`everstep bench`: that the command line hands the right settings over and prints what it should."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from everstep.cli.main import app

runner = CliRunner()


def test_overhead_prints_one_json_document(tmp_path):
    options = ["--threads", "1", "--pairs", "2", "--no-peers", "--dir", str(tmp_path)]
    done = runner.invoke(app, ["bench", "overhead", "--quick", "--json", *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["benchmark"] == "overhead" and found["machine"]["cores"] >= 1
    [measured] = found["measurements"]
    assert measured["num_threads"] == 1 and measured["num_pairs"] == 2
    assert "peers" not in measured
    assert "pairs of blocks: 2 of 2" in done.stderr
    assert os.listdir(tmp_path) == []


def test_overhead_is_measured_beside_compressed_training(tmp_path):
    options = ["--codec", "topk", "--threads", "1", "--pairs", "2", "--no-peers", "--dir", str(tmp_path)]
    done = runner.invoke(app, ["bench", "overhead", "--quick", "--json", *options])
    assert done.exit_code == 0, done.output
    [measured] = json.loads(done.stdout)["measurements"]
    assert measured["codec"] == "topk" and measured["bit_equal_to_training_without"]


@pytest.mark.parametrize("options", [["--json"], []])
def test_frames_are_told_by_how_gradients_are_compressed(options, tmp_path):
    done = runner.invoke(app, ["bench", "frames", "--quick", "--steps", "1", "--dir", str(tmp_path), *options])
    assert done.exit_code == 0, done.output
    for codec in ("none", "topk", "quantize", "fp16", "bf16"):
        assert codec in done.stdout
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("options", [["--json"], pytest.param(["--ranks", "2"], marks=pytest.mark.long)])
def test_layers_are_told_with_and_without(options, tmp_path):
    done = runner.invoke(
        app, ["bench", "layers", "--quick", "--no-slow", "--dir", str(tmp_path), *options], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 0, done.output
    for word in ("without", "snapshots", "layerwise"):
        assert word in done.stdout
    assert ("not giving way" in done.stdout) == ("--ranks" in options)
    assert os.listdir(tmp_path) == []


def test_restore_prints_one_json_document(tmp_path):
    done = runner.invoke(app, ["bench", "restore", "--quick", "--json", "--no-peers", "--dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["benchmark"] == "restore" and found["num_frames"] == 6
    assert {"everstep", "raw_read", "raw_fold", "frame_by_frame"} <= set(found["median_s"])
    assert found["ratio"] > 0


def test_results_are_also_told_in_words(tmp_path):
    done = runner.invoke(
        app, ["bench", "overhead", "--quick", "--rss", "--threads", "1", "--dir", str(tmp_path)], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 0, done.output
    for word in ("trainer", "follower", "without"):
        assert word in done.stdout


@pytest.mark.parametrize("arguments", [["--threads", "0"], ["--dir", "/no/such/folder"], ["--codec", "zip"]])
def test_wrong_arguments_are_told_and_exit_code_is_2(arguments):
    done = runner.invoke(app, ["bench", "overhead", "--quick", *arguments])
    assert done.exit_code == 2
    assert "Traceback" not in done.stderr and arguments[0] in done.stderr


@pytest.mark.long
def test_the_program_measures_both_thread_counts_with_peers(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "everstep.cli.main", "bench", "overhead", "--quick", "--json", "--threads", "1", "--threads",
         "2", "--dir", str(tmp_path)],
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)["measurements"]
    assert [m["num_threads"] for m in measured] == [1, 2]
    assert all(set(m["peers"]) == {"torch.save", "dcp.async_save"} for m in measured)


@pytest.mark.long
@pytest.mark.parametrize("options", [["--json"], ["--codec", "topk"]])
def test_predictions_of_the_tuner_are_told_beside_measurements(options, tmp_path):
    done = runner.invoke(app, ["bench", "tune", "--quick", "--pairs", "1", "--dir", str(tmp_path), *options])
    assert done.exit_code == 0, done.output
    if options == ["--json"]:
        found = json.loads(done.stdout)
        assert found["recovery"]["predicted_s"] > 0 and found["recovery"]["steps"] >= 0
        parts = found["overhead"]["parts"]
        assert all(value >= 0 for value in parts.values()) and found["overhead"]["predicted"] >= sum(parts.values()) - 1e-9
    else:
        assert "predicted" in done.stdout and "measured" in done.stdout
    assert os.listdir(tmp_path) == []
