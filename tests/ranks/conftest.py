"""One world for all tests here: its processes start once."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from killing import shadows_in
from threaded import Threads
from workers import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    with World(4) as world:
        yield world


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in shared memory of this test's own; neither it nor a shadow in it is left."""
    made = Path(tempfile.mkdtemp(prefix="es-", dir="/dev/shm"))
    monkeypatch.setenv("EVERSTEP_SHARED", str(made))
    yield made
    deadline = time.monotonic() + 30
    while left := shadows_in(made):
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < deadline, "shadows come back again and again"
        time.sleep(0.02)
    shutil.rmtree(made)
