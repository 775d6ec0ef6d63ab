"""The demo proves what it says, and says so when it cannot."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(*arguments: str, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.long
def test_the_quick_demo_is_killed_and_ends_equal_bit_for_bit(tmp_path: Path) -> None:
    done = run(str(EXAMPLES / "demo.py"), "--quick", "--dir", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"kills +│ [12] ", done.stdout), done.stdout
    assert re.search(r"SIGKILL in step \d+ → resumed at step \d+ in", done.stdout)
    assert re.search(r"loss curve +│ equal, bit for bit", done.stdout)
    assert re.search(r"final weights +│ equal, bit for bit", done.stdout)
    assert re.search(r"step +40 brought back: hash [0-9a-f]{32} equal", done.stdout)
    for row in ("steps lost", "overhead", "bytes a step", "time to resume"):
        assert row in done.stdout


def test_the_demo_refuses_a_folder_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    done = run(str(EXAMPLES / "demo.py"), "--quick", "--dir", str(tmp_path))
    assert done.returncode != 0
    assert "something else" in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_the_demo_says_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo
    import gpt

    import everstep

    model, optimizer, schedule, loader = gpt.build(gpt.SIZES["tiny"], 2)
    extras = {"schedule": schedule}
    with everstep.attach(model, optimizer, tmp_path / "run", extras=extras, quiet=True, follower=False) as run:
        reference = {}
        for batch in run.steps(loader):
            loss = gpt.learn(model, optimizer, batch)
            reference[run.step + 1] = loss, gpt.digest(gpt.live_state(model, optimizer))
            if run.step == 1:
                break
    final = {"state": gpt.live_state(model, optimizer), "rng": torch.get_rng_state(), "schedule": {}}
    torch.save(final, tmp_path / "uninterrupted.pt")
    torch.save(final, tmp_path / "killed.pt")
    losses = [(step, loss) for step, (loss, _) in reference.items()]
    assert demo.compare(tmp_path, reference, demo.Killed(losses), 2) == []

    with torch.no_grad():
        model.norm.bias[0] += 1
    torch.save({**final, "state": gpt.live_state(model, optimizer)}, tmp_path / "killed.pt")
    other = {**reference, 2: (reference[2][0], "0" * 32)}
    found = demo.compare(tmp_path, other, demo.Killed([losses[0], (2, losses[1][1] + 1e-6)]), 2)
    assert found[0].startswith("loss of step 2")
    assert "final norm.bias" in found
    assert "step 2 as everstep.open brings it back" in found
