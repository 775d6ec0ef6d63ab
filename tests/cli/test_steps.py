"""`everstep steps`."""

import json

from typer.testing import CliRunner

import everstep
from everstep.cli.main import app

runner = CliRunner()


def test_json_lists_the_steps_of_the_newest_line_and_of_every_timeline(run_with_a_fork):
    done = runner.invoke(app, ["steps", run_with_a_fork, "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    history = everstep.open(run_with_a_fork)
    assert found["steps"] == history.steps
    assert [t["timeline"] for t in found["timelines"]] == [1, 2]
    assert found["timelines"][0]["steps"] == [0, 1, 2, 3, 4, 5, 6]
    assert (found["timelines"][1]["parent"], found["timelines"][1]["fork_step"]) == (1, 4)
    assert found["timelines"][1]["steps"][-1] == 7
    assert found["durable_step"] == 7
    assert found["problems"] == []


def test_json_has_the_sizes_of_bases_and_log(run_with_a_fork):
    first = json.loads(runner.invoke(app, ["steps", run_with_a_fork, "--json"]).stdout)["timelines"][0]
    assert first["log_bytes"] > 0 and first["num_segments"] == 1
    assert [b["step"] for b in first["bases"]] == [0, 6]
    assert all(b["bytes"] > 0 for b in first["bases"])


def test_text_names_steps_and_fork(run_with_a_fork):
    done = runner.invoke(app, ["steps", run_with_a_fork])
    assert done.exit_code == 0
    assert "0 to 7" in done.stdout
    assert "timeline 1, step 4" in done.stdout
