"""`everstep plan`."""

import json

import pytest
from typer.testing import CliRunner

from everstep.cli.main import app

runner = CliRunner()


def planned(*args):
    done = runner.invoke(app, ["plan", *args, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_bytes_are_those_of_the_model():
    """Adam in fp32: 12 bytes a parameter; a dense gradient is a third of that, a half one a sixth, top-k a hundredth."""
    dense = planned("--params", "17M", "--step-s", "0.87")
    assert dense["state_bytes"] == 12 * 17e6 and dense["frame_bytes"] == 4 * 17e6
    assert planned("--params", "17M", "--step-s", "1", "--compression", "half")["frame_bytes"] == 2 * 17e6
    assert planned("--params", "17M", "--step-s", "1", "--compression", "topk")["frame_bytes"] <= 12 * 17e6 / 100
    small = planned("--params", "1e9", "--step-s", "1", "--precision", "bf16", "--optimizer", "momentum")
    assert small["state_bytes"] == 4e9


def test_every_mode_is_there_and_the_best_has_the_greatest_goodput():
    found = planned("--params", "7B", "--step-s", "5", "--ranks", "8", "--mtbf-h", "8")
    assert [m["name"] for m in found["modes"]] == ["delta", "shadow on this host", "shadow elsewhere", "snapshot"]
    assert [m["name"] for m in found["modes"] if not m["available"]] == ["snapshot"]
    best = max((m for m in found["modes"] if m["available"]), key=lambda m: m["expected"]["goodput"])
    assert found["best"] == best["name"]
    for mode in found["modes"]:
        assert 0 < mode["expected"]["goodput"] < 1 and mode["expected"]["lost_s"] > 0 and mode["reason"]
    assert found["modes"][0]["expected"]["lost_s"] < found["modes"][3]["expected"]["lost_s"]


def test_more_failures_mean_more_bases_and_less_goodput():
    rare, often = (planned("--params", "1B", "--step-s", "10", "--mtbf-h", h, "--interference", "1")["modes"][0]
                   for h in ("1000", "1"))  # fmt: skip
    assert often["setting"]["base_interval"] < rare["setting"]["base_interval"]
    assert often["expected"]["goodput"] < rare["expected"]["goodput"]


def test_limits_are_kept_or_named():
    found = planned("--params", "7B", "--step-s", "5", "--ranks", "8", "--max-recovery-s", "15")
    for mode in found["modes"]:
        assert mode["expected"]["worst_recovery_s"] <= 15 or mode["broken"] == ["max_recovery_s=15"]
    text = runner.invoke(app, ["plan", "--params", "7B", "--step-s", "5", "--max-gb", "10"]).stdout
    assert "! delta: cannot be within max_bytes=1e+10" in text and "* the best" not in text


def test_text_is_a_table_with_the_best_marked():
    text = runner.invoke(app, ["plan", "--params", "17M", "--step-s", "0.87"]).stdout
    assert "204.0 MB" in text and "goodput" in text and "* the best: mode" in text and "(!)" not in text
    assert text.splitlines()[-1].startswith("snapshot is for comparison")


@pytest.mark.parametrize("ratio", ["1e-9", "1"])
@pytest.mark.parametrize("disk", ["1e-18", "1e9"])
@pytest.mark.parametrize("params, step_s", [("1e-9", "1e18"), ("1e18", "1e-9"), ("1e18", "1e18")])
@pytest.mark.parametrize("mtbf_h", ["1e-12", "inf"])
def test_whatever_is_taken_gives_numbers(params, step_s, mtbf_h, disk, ratio):
    args = ["--params", params, "--step-s", step_s, "--mtbf-h", mtbf_h, "--disk-gbs", disk, "--topk-ratio", ratio]
    planned(*args, "--compression", "topk", "--sync-ms", "1e20", "--max-overhead", "0.01")
    assert runner.invoke(app, ["plan", *args, "--compression", "topk"]).exit_code == 0


@pytest.mark.parametrize(
    "args, told",
    [
        (["--params", "many", "--step-s", "1"], "params"),
        (["--params", "0", "--step-s", "1"], "params"),
        (["--params", "-5M", "--step-s", "1"], "params"),
        (["--params", "nan", "--step-s", "1"], "params"),
        (["--params", "17M", "--step-s", "0"], "step_s"),
        (["--params", "17M", "--step-s", "inf"], "step_s"),
        (["--params", "17M", "--step-s", "1", "--mtbf-h", "-1"], "mtbf_s"),
        (["--params", "17M", "--step-s", "1", "--precision", "fp7"], "precision"),
        (["--params", "17M", "--step-s", "1", "--optimizer", "magic"], "optimizer"),
        (["--params", "17M", "--step-s", "1", "--compression", "zip"], "compression"),
        (["--params", "17M", "--step-s", "1", "--compression", "topk", "--topk-ratio", "1.5"], "topk_ratio"),
        (["--params", "17M", "--step-s", "1", "--ranks", "0"], "ranks"),
        (["--params", "17M", "--step-s", "1", "--host-share", "2"], "host_share"),
        (["--params", "17M", "--step-s", "1", "--disk-gbs", "0"], "disk_bytes_s"),
        (["--params", "17M", "--step-s", "1", "--max-overhead", "0"], "max_overhead"),
        (["--params", "17M", "--step-s", "1", "--sync-ms", "inf"], "sync_s"),
        (["--params", "17M", "--step-s", "1", "--disk-gbs", "inf"], "disk_bytes_s"),
        (["--params", "17M", "--step-s", "1", "--restart-s", "1e400"], "restart_s"),
        (["--params", "1e307", "--step-s", "1"], "params"),
        (["--params", "1e300B", "--step-s", "1"], "params"),
        (["--params", "17M", "--step-s", "1e-300"], "step_s"),
        (["--params", "17M", "--step-s", "1", "--mtbf-h", "1e-320"], "mtbf_s"),
        (["--params", "17M", "--step-s", "1", "--ranks", "1" + 400 * "0"], "ranks"),
    ],
)
def test_nonsense_is_one_line_on_stderr_and_exit_code_2(args, told):
    done = runner.invoke(app, ["plan", *args])
    assert done.exit_code == 2 and done.stdout == ""
    assert told in done.stderr and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
