"""Segments: what the first and last record of a log file say, and how files are named. No I/O."""

from __future__ import annotations

import re
from typing import Any

import msgspec

_NAME = re.compile(r"g(\d{6,})-(\d{12,})\.frames")


class SegmentHeader(msgspec.Struct):
    """Payload of the first record."""

    run: str
    timeline: int
    generation: int
    rank: int
    layout: str
    first_step: int
    fingerprint: dict[str, Any]


class SegmentEnd(msgspec.Struct):
    """Payload of the last record of a segment that was finished in order."""

    steps: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where each frame begins."""
    footers: tuple[int, ...]
    """Where each frame's footer record begins."""
    durable_step: int
    next_step: int | None
    """First step of the segment that follows, None if the run was closed here."""


def file_name(generation: int, first_step: int) -> str:
    return f"g{generation:06d}-{first_step:012d}.frames"


def parse_name(name: str) -> tuple[int, int] | None:
    """(generation, first step) of a segment's file name, None for other files."""
    m = _NAME.fullmatch(name)
    return (int(m[1]), int(m[2])) if m else None
