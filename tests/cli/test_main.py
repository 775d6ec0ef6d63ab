"""`everstep` as a program: help, errors, exit codes."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from everstep.cli.main import app

runner = CliRunner()


def test_help_does_not_import_torch():
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from everstep.cli.main import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "assert CliRunner().invoke(app, ['bench', 'overhead', '--help']).exit_code == 0\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_help_names_every_verb():
    out = runner.invoke(app, ["--help"]).output
    for verb in ("steps", "plan-restore", "verify", "plan", "tune", "bench"):
        assert verb in out


@pytest.mark.parametrize(
    "verb", [["steps"], ["plan-restore"], ["verify"], ["tune"], ["steps", "--json"], ["verify", "--deep"]]
)
def test_a_path_without_a_run_is_one_line_on_stderr_and_exit_code_2(tmp_path, verb):
    done = runner.invoke(app, [*verb, str(tmp_path / "nothing")])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and "no Everstep run" in done.stderr and "Traceback" not in done.stderr


def test_a_file_in_place_of_a_run_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("hello")
    done = runner.invoke(app, ["steps", str(file)])
    assert done.exit_code == 2 and "is a file" in done.stderr


def test_the_program_itself_ends_with_exit_code_2(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "everstep.cli.main", "steps", str(tmp_path / "nothing")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr and "no Everstep run" in done.stderr


def test_version_is_that_of_the_package():
    from importlib.metadata import version

    done = runner.invoke(app, ["--version"])
    assert done.exit_code == 0 and done.stdout.strip() == version("everstep")
