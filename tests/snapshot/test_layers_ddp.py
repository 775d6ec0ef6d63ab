"""Layer-wise updates under DDP: whenever the ranks are killed, they go on from one step with the bits of plain training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder in memory: of many steps some are stored before the kill."""
    with TemporaryDirectory(prefix="es-layers-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield folder


@pytest.mark.parametrize(
    ("num_kills", "seed"), [(3, 1), pytest.param(60, 2, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
@pytest.mark.long
def test_ranks_killed_at_any_moment_go_on_from_one_step_to_the_end_of_plain_training(
    memory: str, num_kills: int, seed: int
) -> None:
    command = [sys.executable, str(HERE / "layers_training.py"), memory, str(num_kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for life in found["lives"]:
        assert len(set(life["resumed"])) == 1 and all(life["is_right"]), found
    assert found["lives"][-1]["resumed"][0] > 0
    assert all(found["is_right"])
    assert min(found["in_backward"]) > 0 and min(found["early"]) > 0
