"""The cursor: the small non-tensor state of a step. RNG, data position, extras."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from everstep import rng, tree
from everstep.errors import CorruptionError, MismatchError, UsageError


def check_extras(extras: Mapping[str, Any] | None) -> dict[str, Any]:
    """Extras as a dict; UsageError unless each has state_dict and load_state_dict."""
    if extras is not None and not isinstance(extras, Mapping):
        raise UsageError(f"extras must be a dict of named objects, not a {type(extras).__name__}")
    found = dict(extras or {})
    for name, extra in found.items():
        if not isinstance(name, str):
            raise UsageError(f"names of extras must be strings, not {name!r}")
        if not callable(getattr(extra, "state_dict", None)) or not callable(getattr(extra, "load_state_dict", None)):
            raise UsageError(
                f"extras[{name!r}] is a {type(extra).__name__}, which has no state_dict/load_state_dict: give it both"
            )
    return found


def capture_extras(extras: Mapping[str, Any]) -> dict[str, Any]:
    """state_dict of every extra, frozen. UnsupportedValueError names what cannot be stored."""
    return {name: tree.freeze(extra.state_dict(), path=f"extras[{name!r}]") for name, extra in extras.items()}


def check_same_extras(extras: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """MismatchError unless the names are those of the run."""
    missing = [n for n in saved if n not in extras]
    unknown = [n for n in extras if n not in saved]
    if missing or unknown:
        raise MismatchError(
            f"extras differ from the run's: not given: {', '.join(missing) or 'none'}; not in the run: "
            f"{', '.join(unknown) or 'none'}. Pass the same extras as before"
        )


def load_extras(extras: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Hand each extra its state back."""
    for name, extra in extras.items():
        extra.load_state_dict(tree.freeze(saved[name]))


def encode(cursor: Mapping[str, Any]) -> bytes:
    """As bytes: RNG in a compact form, everything else as a tree."""
    return msgspec.msgpack.encode(tree.pack({**cursor, "rng": rng.to_plain(cursor["rng"])}))


def decode(data: bytes) -> dict[str, Any]:
    """What encode stored; rng in the form that rng.install takes."""
    try:
        found = tree.unpack(msgspec.msgpack.decode(data))
    except msgspec.MsgspecError as e:
        raise CorruptionError(f"a cursor cannot be decoded: {e}") from e
    if not isinstance(found, dict):
        raise CorruptionError("a cursor is not a mapping")
    return found
