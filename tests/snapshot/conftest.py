"""Training set-ups and crash images are those of the other modes' tests."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / other) for other in ("exactness", "crash", "ranks")]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: thousands of commits do not wait for a disk that others use, too."""
    folder = Path(tempfile.mkdtemp(prefix="es-run-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in memory; nothing of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="es-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)
