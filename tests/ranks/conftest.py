"""One world for all tests here: its processes start once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from workers import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    with World(4) as world:
        yield world
