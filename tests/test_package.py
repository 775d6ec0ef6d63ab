"""The package's face: its public names, its version, and that what the README says runs."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep import errors
from support import crash

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_public_names_are_these() -> None:
    assert everstep.__all__ == [
        "EverstepError", "History", "Retention", "Run", "attach", "compress", "data", "early_hook", "errors", "layout",
        "open", "register", "tune",
    ]  # fmt: skip
    for name in everstep.__all__:
        assert getattr(everstep, name) is not None


def test_the_version_is_that_of_the_distribution() -> None:
    assert everstep.__version__ == version("everstep")


def test_the_package_is_typed() -> None:
    assert (Path(everstep.__file__).parent / "py.typed").exists()


def test_every_error_is_an_everstep_error_and_every_warning_an_everstep_warning() -> None:
    classes = [v for v in vars(errors).values() if isinstance(v, type)]
    assert len(classes) > 15
    for cls in classes:
        assert issubclass(cls, errors.EverstepError) or issubclass(cls, errors.EverstepWarning)
        assert cls.__doc__
        assert cls.__name__ in (errors.__doc__ or ""), f"{cls.__name__} is not in the tree that errors.py draws"


def test_importing_everstep_starts_nothing_and_configures_nothing() -> None:
    code = (
        "import threading, logging, warnings, signal; before = signal.getsignal(signal.SIGTERM), list(warnings.filters);"
        "import torch; filters = list(warnings.filters); import everstep;"
        "assert threading.active_count() == 1, threading.enumerate();"
        "assert not logging.root.handlers;"
        "assert list(warnings.filters) == filters;"
        "assert signal.getsignal(signal.SIGTERM) == before[0]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_examples_of_the_readme_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(README)
    assert len(blocks) >= 4
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in blocks:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(compile(block, "README.md", "exec"), names)
    first = everstep.open("runs/first")
    assert first.steps[-1] == 128
    assert first.state()["model"]["weight"].shape == (1, 16)
    assert names["start"] == 0
    assert names["report"].ok, names["report"]
    by_hand = everstep.open("runs/by-hand")
    assert by_hand.timelines == [1, 2]
    assert by_hand.steps[-1] == 60
    assert len(names["loader"]) == 64


def test_the_first_example_of_the_readme_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """The README's loop as it stands, killed in the middle, then run again."""
    block = python_blocks(README)[0]
    last = "        optimizer.zero_grad()\n"
    body = block.replace(last, f"{last}        print(run.step, flush=True)\n")
    assert body != block
    script = tmp_path / "train.py"
    script.write_text(body.replace("optimizer.step()", "optimizer.step(); __import__('time').sleep(0.02)"))
    process = subprocess.Popen(
        [sys.executable, str(script)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        for line in process.stdout:
            if int(line) >= 20:
                process.kill()
                break
        process.wait()
    latest = everstep.open(tmp_path / "runs/first").steps[-1]
    assert 16 <= latest <= 22
    script.write_text(body)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True
    )
    assert int(done.stdout.split()[0]) == latest
    assert f"at step {latest}" in done.stderr
    assert everstep.open(tmp_path / "runs/first").steps[-1] == 128


def test_the_readme_names_every_option_of_attach_and_no_other() -> None:
    from everstep.options import Options

    table = README.split("## Options of attach")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)`", " ".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    named |= {name for name in Options.__dataclass_fields__ if f"`{name}`" in table}
    assert named - {"option"} == set(Options.__dataclass_fields__)


def test_a_step_that_a_refusal_offers_can_be_resumed(tmp_path: Path) -> None:
    """docs/failure-model.md: a durable step is gone: resume() refuses, resume(step=n) with a step it lists goes on."""

    def attach() -> tuple[torch.nn.Module, torch.optim.Optimizer, everstep.Run]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)

    model, optimizer, run = attach()
    run.resume()
    truth = {}
    for _ in range(6):
        model(torch.randn(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        truth[run.commit(wait=True)] = model.weight.detach().clone()
    crash(run)
    (segment,) = tmp_path.rglob("*.frames")
    data = bytearray(segment.read_bytes())
    for at in range(len(data) // 2, len(data) // 2 + 5000, 300):
        data[at] ^= 0xFF
    segment.write_bytes(bytes(data))

    model, optimizer, run = attach()
    before = model.weight.detach().clone()
    with pytest.raises(errors.CorruptionError, match=r"were durable .* Restorable steps: 0 to \d"):
        run.resume()
    assert torch.equal(model.weight, before)
    offered = everstep.open(tmp_path / "run").steps[-1]
    assert 0 < offered < 5
    assert run.resume(step=offered) == offered
    assert torch.equal(model.weight, truth[offered])
    run.close()
    assert everstep.open(tmp_path / "run").steps == list(range(offered + 1))


def test_every_link_within_the_documents_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("http"):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
                assert anchor in slugs, f"{page.name}: {target}"


def test_the_repository_names_no_machine_and_no_registry() -> None:
    shown = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if shown.returncode:
        pytest.skip("not a git checkout")
    for name in ["Makefile", ".ci/run", "pyproject.toml", "README.md"]:
        text = (ROOT / name).read_text()
        assert not re.search(r"index-url|pypi\.org|download\.pytorch\.org|(?<![\w.])/(home|root|work)/", text), name
