"""Small JSON documents (run, timeline, generation, layout, manifest) with a checksum around them. No I/O.

    {"xxh3":"<16 hex digits over the body's bytes>","body":<JSON>}
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import xxhash

from everstep.atoms import Layout
from everstep.errors import CorruptionError

T = TypeVar("T")

_HEAD = b'{"xxh3":"'
_MIDDLE = b'","body":'
_START = len(_HEAD) + 16 + len(_MIDDLE)

FORMAT_MAJOR, FORMAT_MINOR = 1, 1
RANKS = "ranks"
"""Feature of a run that several ranks have written: who knows only rank 0's files would take a part for the whole."""
FINE_PIECES = "fine-pieces"
"""Feature of a run with checksums of fine pieces: who knows only those of 2^19 elements would take it for damaged."""
KNOWN = frozenset((RANKS, FINE_PIECES))
LOST = -2
"""In the place of a gradient that was left on its parameter and could not be stored (`carried`)."""


class RunDocument(msgspec.Struct):
    """run.json"""

    run: str
    """uuid, hex"""
    format: tuple[int, int]
    created: str
    incompatible: tuple[str, ...] = ()
    """Features that a reader must know to read at all."""
    read_only: tuple[str, ...] = ()
    """Features that a writer must know to write; others may still read."""
    compatible: tuple[str, ...] = ()


class TimelineDocument(msgspec.Struct):
    """timelines/NNNN/timeline.json"""

    timeline: int
    parent: int | None = None
    parent_generation: int | None = None
    fork_step: int | None = None
    own_bases: bool = False
    """Its ranks hold other parts than the parent's: its steps stand on bases of its own, and no frame leads into it."""


class GenerationDocument(msgspec.Struct):
    """timelines/NNNN/generations/GGGGGG.json"""

    generation: int
    timeline: int
    parent: int | None
    """The generation it goes on from; None for the run's first."""
    resume_step: int
    world_size: int
    layout: str
    launch: str
    writer: dict[str, Any]
    fingerprint: dict[str, Any]
    asked_step: int | None = None
    """The step given to resume(step=n), when that opened this timeline."""
    log: str = "disk"
    """`memory`: its frames are in the memory of a host (mode="shadow"), and are not missed when that is lost; `pool`: it has
    none, but full states (mode="snapshot")."""
    holding: str = ""
    """A hash of which rank holds which boxes: frames go on from those of a generation that has the same."""
    pool: str = ""
    """The folder of its pools, from the run's own if it is inside that; empty: it has none."""


class KeptDocument(msgspec.Struct):
    """timelines/NNNN/kept.json: which steps may be missing without anything being wrong."""

    horizon: int
    """Retention may have removed steps below this one."""
    gaps: tuple[tuple[int, int, int], ...] = ()
    """(first, last, generation) of steps that this generation never stored, because storage had failed."""


class TuningDocument(msgspec.Struct):
    """tuning.json: what the tuner has learned and decided. Restoring needs nothing of it."""

    generation: int = 0
    """The newest that was tuned."""
    closed: bool = False
    """Whether that one ended because it was told to; if not, and another has begun, it failed."""
    num_failures: int = 0
    up_s: float = 0.0
    """Time in which these happened."""
    averages: dict[str, tuple[float, int]] = {}
    """Name -> (moving average, number of values)."""
    decisions: tuple[dict[str, Any], ...] = ()
    """Oldest first: generation, step, time, changed, setting, expected, reason, broken."""


class StoredTensor(msgspec.Struct, omit_defaults=True):
    """One tensor of a base."""

    uid: int
    role: str
    key: str
    """Name inside the safetensors file."""
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """First byte in the file."""
    num_bytes: int
    sums: tuple[int, ...]
    """xxh3 of each piece, seeded with (uid + first element)."""
    strides: tuple[int, ...] | None = None
    rank: int = 0
    fine: bool = False
    """Whether `sums` are of fine pieces."""

    @property
    def of_model(self) -> bool:
        """A parameter or a buffer; else what an optimizer knows of one, or a gradient."""
        return self.role in ("param", "buffer")


class StoredOptimizer(msgspec.Struct):
    """Groups and per-parameter state of one optimizer in a base."""

    name: str
    params: tuple[tuple[int, ...], ...]
    """Parameter uids of each group."""
    hyper: str
    """base64 of the msgpack of [tree.pack of each group without its parameters]."""
    state: str
    """base64 of the msgpack of [[parameter uid, tree.pack of its state; dense tensors by their index in `tensors`]]."""


TRAINER = "trainer"
"""A base that was taken from live state."""
FOLDED, IN_PART = "folded", "folded-in-part"
"""How a follower made a base: the audit of its step passed, and covers everything; or not all of the optimizer state."""


class Manifest(msgspec.Struct):
    """bases/SSSSSSSSSSSS/manifest.json, written last: with it the base exists, without it not."""

    run: str
    timeline: int
    generation: int
    step: int
    layout: Layout
    tensors: tuple[StoredTensor, ...]
    optimizers: tuple[StoredOptimizer, ...]
    cursor: str
    """base64 of the msgpack cursor."""
    files: dict[str, int]
    """File name -> bytes."""
    carried: tuple[tuple[int, int], ...] = ()
    """(parameter uid, index in `tensors`): gradients that the next backward adds to; -1: zeros, -2: could not be stored."""
    part: tuple[int, int] | None = None
    """(index, count) of a part that holds only some of the atoms; None: the whole."""
    audit: str = ""
    """`trainer` (taken from live state), or how a follower made it."""
    fingerprint: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        """That it takes; a pool's file holds other slots, too."""
        return sum(t.num_bytes for t in self.tensors) if self.in_pool else sum(self.files.values())

    @property
    def in_pool(self) -> bool:
        """Whether this is a slot of a pool."""
        return any(name.endswith(".pool") for name in self.files)

    @property
    def is_proven(self) -> bool:
        """Whether all of it is what the trainer had; else parameters and buffers are."""
        return self.audit != IN_PART


class PoolDocument(msgspec.Struct):
    """Written once into a pool: what each of its slots holds."""

    layout: Layout
    tensors: tuple[StoredTensor, ...]
    """Their offsets are from the beginning of a slot's data; `sums` are empty, and in the slots' headers."""


class SlotDocument(msgspec.Struct, omit_defaults=True):
    """In the header of a slot of a pool: what a manifest has beside its tensors."""

    optimizers: tuple[StoredOptimizer, ...]
    cursor: str
    carried: tuple[tuple[int, int], ...] = ()
    audit: str = ""
    fingerprint: dict[str, Any] = {}
    layout: Layout | None = None
    """None: the pool's."""


def encode(document: object) -> bytes:
    data = msgspec.json.encode(document)
    return _HEAD + xxhash.xxh3_64_hexdigest(data).encode() + _MIDDLE + data + b"}\n"


def told_format(data: bytes) -> tuple[int, int] | None:
    """The format that a run.json of any version names, as far as it can be made out."""
    for text in (data, body(data)):
        try:
            found = msgspec.json.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        found = found.get("body", found) if isinstance(found, dict) else {}
        told = found.get("format") if isinstance(found, dict) else None
        if isinstance(told, list) and len(told) == 2 and all(isinstance(n, int) for n in told):
            return told[0], told[1]
    return None


def body(data: bytes) -> bytes:
    """The JSON inside the envelope of a document that decode() has accepted."""
    return data[_START:-2]


# Made while one thread imports this: msgspec prepares a type at its first use, and crashes if two threads are at it at once.
_DECODERS: dict[type[Any], Any] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (
        RunDocument, TimelineDocument, GenerationDocument, KeptDocument, TuningDocument, Manifest, Layout, PoolDocument,
        SlotDocument,
    )
}


def decode(data: bytes, kind: type[T], where: str) -> T:
    """The document in these bytes; CorruptionError naming `where` if they are not exactly what was written."""
    content = body(data)
    if (
        not data.startswith(_HEAD)
        or data[_START - len(_MIDDLE) : _START] != _MIDDLE
        or data[-2:] != b"}\n"
        or data[len(_HEAD) : len(_HEAD) + 16] != xxhash.xxh3_64_hexdigest(content).encode()
    ):
        raise CorruptionError(f"{where} is damaged: its checksum does not fit its content")
    try:
        found: T = _DECODERS[kind].decode(content)
        return found
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise CorruptionError(f"{where} is not a valid {kind.__name__}: {e}") from e
