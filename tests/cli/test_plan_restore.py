"""`everstep plan-restore`."""

import json

from typer.testing import CliRunner

import everstep
from everstep.cli.main import app

runner = CliRunner()


def test_text_is_the_plan_itself(run_with_a_fork):
    done = runner.invoke(app, ["plan-restore", run_with_a_fork, "--step", "3"])
    assert done.exit_code == 0
    assert done.stdout.strip() == str(everstep.open(run_with_a_fork).plan(3)).strip()


def test_json_names_base_and_frames(run_with_a_fork):
    found = json.loads(runner.invoke(app, ["plan-restore", run_with_a_fork, "--step", "3", "--json"]).stdout)
    assert found["step"] == 3 and found["base"]["step"] == 0
    assert [f["step"] for f in found["frames"]] == [1, 2, 3]
    assert found["num_bytes"] == found["base"]["bytes"] + sum(f["bytes"] for f in found["frames"])


def test_without_a_step_it_is_the_latest(run_with_a_fork):
    assert json.loads(runner.invoke(app, ["plan-restore", run_with_a_fork, "--json"]).stdout)["step"] == 7


def test_another_timeline_can_be_asked_for(run_with_a_fork):
    found = json.loads(runner.invoke(app, ["plan-restore", run_with_a_fork, "--timeline", "1", "--json"]).stdout)
    assert (found["step"], found["timeline"]) == (6, 1)


def test_a_missing_step_says_which_there_are(run_with_a_fork):
    done = runner.invoke(app, ["plan-restore", run_with_a_fork, "--step", "99"])
    assert done.exit_code == 2
    assert "99" in done.stderr and "0 to 7" in done.stderr


def test_a_missing_timeline_says_which_there_are(run_with_a_fork):
    done = runner.invoke(app, ["plan-restore", run_with_a_fork, "--timeline", "9"])
    assert done.exit_code == 2 and "1, 2" in done.stderr
