"""`everstep verify`."""

import glob
import json
import shutil

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import everstep
from everstep.cli.main import app

runner = CliRunner()


def flip_a_gradient(run):
    """Change one byte inside the first frame of the newest timeline's log."""
    [file] = glob.glob(f"{run}/timelines/0002/log/*/*.frames")
    with open(file, "r+b") as f:
        f.seek(4096 + 128 + 8)
        byte = f.read(1)
        f.seek(-1, 1)
        f.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_a_whole_run_is_good_and_exit_code_is_0(run_with_a_fork, deep):
    done = runner.invoke(app, ["verify", run_with_a_fork, *deep])
    assert done.exit_code == 0, done.output
    assert "all good" in done.stdout


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_a_flipped_bit_is_found_and_exit_code_is_1(run_with_a_fork, deep):
    flip_a_gradient(run_with_a_fork)
    done = runner.invoke(app, ["verify", run_with_a_fork, *deep])
    assert done.exit_code == 1
    assert "step 5 is damaged" in done.stdout


def test_json_says_ok_and_counts(run_with_a_fork):
    done = runner.invoke(app, ["verify", run_with_a_fork, "--json", "--deep"])
    found = json.loads(done.stdout)
    assert found["ok"] is True and found["problems"] == []
    assert found["num_frames"] == 7 and found["num_bases"] >= 2
    assert found["proven_step"] == 7


def test_json_lists_problems(run_with_a_fork):
    flip_a_gradient(run_with_a_fork)
    done = runner.invoke(app, ["verify", run_with_a_fork, "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["ok"] is False and json.loads(done.stdout)["problems"]


def test_two_runs_are_compared_bit_by_bit(run_with_a_fork, tmp_path):
    other = shutil.copytree(run_with_a_fork, tmp_path / "other")
    equal = runner.invoke(app, ["verify", run_with_a_fork, "--against", str(other)])
    assert equal.exit_code == 0 and "equal in every bit" in equal.stdout
    model = nn.Linear(4, 4)
    with everstep.attach(model, torch.optim.AdamW(model.parameters()), other, quiet=True, follower=False) as run:
        run.resume()
        with torch.no_grad():
            model.bias[0].copy_(torch.nextafter(model.bias[0], torch.tensor(1.0)))
        run.commit()
    others = runner.invoke(app, ["verify", run_with_a_fork, "--against", str(other), "--json"])
    found = json.loads(others.stdout)
    assert others.exit_code == 1 and found["ok"] is False and (found["step"], found["other_step"]) == (7, 8)
    assert len(found["differences"]) == 1 and "bias" in found["differences"][0]
    before = runner.invoke(app, ["verify", run_with_a_fork, "--against", str(other), "--step", "7"])
    assert before.exit_code == 0, before.output


def test_progress_goes_to_stderr(run_with_a_fork):
    done = runner.invoke(app, ["verify", run_with_a_fork, "--json"])
    assert "frames: 7 of 7" in done.stderr
