"""How a benchmark tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""(what, done, total)."""


def silent(what: str, done: int, total: int) -> None:
    """Say nothing."""
