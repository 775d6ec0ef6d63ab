"""`everstep tune`."""

import json

from typer.testing import CliRunner

from everstep.cli.main import app
from everstep.format.documents import TuningDocument
from everstep.store.runs import RunPath
from everstep.tune import Codec, Decision, Measured, Setting, cost_of

runner = CliRunner()
MEASURED = Measured(
    step_s=0.5, state_bytes=2e8, codecs=(Codec(name="auto", frame_bytes=7e7),), disk_bytes_s=1e9, sync_s=1e-3, base_s=0.4,
    load_s=0.2, replay_s=0.05, fold_s=0.04, failure_rate=1e-5,
)  # fmt: skip


def decided(path, rank=0):
    setting = Setting(base_interval=120)
    decision = Decision(setting=setting, cost=cost_of(MEASURED, setting), reason="because a test says so")
    told = {"generation": 2, "step": 1500, "changed": True, "time": "2030-01-01T00:00:00+00:00", **decision.as_dict()}
    document = TuningDocument(2, False, 3, 7200.0, {"step_s": (0.5, 9), "base_stall_s": (-0.001, 4)}, (told,))
    RunPath(path, rank).write_tuning(document)
    return told


def test_decisions_are_printed_with_their_reasons(run_with_a_fork):
    told = decided(run_with_a_fork)
    found = json.loads(runner.invoke(app, ["tune", run_with_a_fork, "--json"]).stdout)
    assert found["ranks"][0]["decisions"] == [told] and found["ranks"][0]["failures"] == 3
    text = runner.invoke(app, ["tune", run_with_a_fork]).stdout
    assert "because a test says so" in text and "every 120 steps" in text and "3 failures in 2 h" in text
    assert "lossless codecs" in text
    assert "base_stall_s -1 ms" in text


def test_every_rank_that_was_tuned_is_told(run_with_a_fork):
    decided(run_with_a_fork)
    decided(run_with_a_fork, 3)
    found = json.loads(runner.invoke(app, ["tune", run_with_a_fork, "--json"]).stdout)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 3]
    assert "rank 3" in runner.invoke(app, ["tune", run_with_a_fork]).stdout


def test_a_run_that_was_not_tuned_says_so(run_with_a_fork):
    done = runner.invoke(app, ["tune", run_with_a_fork])
    assert done.exit_code == 0 and "not tuned" in done.stdout


def test_a_damaged_document_is_named(run_with_a_fork):
    decided(run_with_a_fork)
    with open(RunPath(run_with_a_fork).tuning(), "r+b") as f:
        f.seek(40)
        f.write(b"!!")
    done = runner.invoke(app, ["tune", run_with_a_fork])
    assert done.exit_code == 2 and "tuning.json" in done.stderr and "Traceback" not in done.stderr
