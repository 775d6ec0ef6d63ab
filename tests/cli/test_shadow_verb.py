"""`everstep shadow`."""

import pytest
from typer.testing import CliRunner

from everstep.cli.main import app
from everstep.follow import remote


@pytest.mark.parametrize(
    "options",
    [["--base-interval", "0"], ["--max-memory", "-1"], ["--max-memory", "inf"], ["--idle", "nan"], ["--idle", "0"]],
)
def test_numbers_that_mean_nothing_are_refused(options, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "main", lambda *_, **__: pytest.fail("it listens"))
    done = CliRunner().invoke(app, ["shadow", "--listen", "127.0.0.1:0", "--dir", str(tmp_path), *options])
    assert done.exit_code == 2 and options[0] in done.stderr


@pytest.mark.parametrize("token", [b"", b"  \n", b"\xff\xfe"])
def test_a_token_file_without_a_token_is_refused(token, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "main", lambda *_, **__: pytest.fail("it listens"))
    (tmp_path / "token").write_bytes(token)
    options = ["--dir", str(tmp_path / "shadows"), "--token-file", str(tmp_path / "token")]
    done = CliRunner().invoke(app, ["shadow", "--listen", "127.0.0.1:0", *options])
    assert done.exit_code == 2 and "token file" in done.stderr
