"""Packed values as text for JSON documents: base64 of MessagePack."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from everstep.errors import CorruptionError
from everstep.tree.packing import pack
from everstep.tree.unpacking import unpack


def to_text(value: Any, *, path: str = "") -> str:
    """Return `value`, packed, as text. Raises as `pack` does."""
    return plain_to_text(pack(value, path=path))


def from_text(text: str) -> Any:
    """The inverse of to_text."""
    return unpack(plain_from_text(text))


def plain_to_text(plain: Any) -> str:
    """Packed values as text."""
    return base64.b64encode(msgspec.msgpack.encode(plain)).decode()


def plain_from_text(text: str) -> Any:
    """The packed values in a text."""
    try:
        return msgspec.msgpack.decode(base64.b64decode(text, validate=True))
    except (ValueError, msgspec.MsgspecError) as e:
        raise CorruptionError(f"packed values cannot be decoded: {e}") from e
