"""Real processes for tests of shadows: a warm one that forks them, a folder in memory, trainers. Nothing of it is left."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shadow_training import OPTIONS, SMALL, Launcher, Program, ShadowHost, kill, shadows_in


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.close()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in shared memory of this test's own; neither it nor a shadow in it is left."""
    made = Path(tempfile.mkdtemp(prefix="es-", dir="/dev/shm"))
    monkeypatch.setenv("EVERSTEP_SHARED", str(made))
    yield made
    deadline = time.monotonic() + 30
    while left := shadows_in(made):  # a trainer that still lives starts another
        for pid in left:
            kill(pid)
        assert time.monotonic() < deadline, "shadows come back again and again"
    shutil.rmtree(made)


@pytest.fixture
def program(launcher: Launcher, memory: Path, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Makes Programs; their trainers are not left behind."""
    made: list[Program] = []

    def make(case: dict[str, Any] = SMALL, pause_s: float = 0.0, **attach: Any) -> Program:
        folder = tmp_path / f"program-{len(made)}"
        folder.mkdir()
        made.append(Program(launcher, folder, case, {**OPTIONS, **attach}, pause_s))
        return made[-1]

    yield make
    for each in made:
        if each.pid:
            kill(each.pid)


@pytest.fixture
def hosts(launcher: Launcher, memory: Path, tmp_path: Path) -> Iterator[Callable[[int], list[ShadowHost]]]:
    """Starts hosts of shadows."""
    made: list[ShadowHost] = []

    def make(num: int) -> list[ShadowHost]:
        for index in range(num):
            folder = tmp_path / f"host-{index}"
            folder.mkdir()
            made.append(ShadowHost(launcher, folder).start())
        return made

    yield make
    for host in made:
        kill(host.pid)
        print(f"{host.folder.name} said:\n{(host.folder / 'output').read_text()[-3000:]}")  # shown where a test fails
