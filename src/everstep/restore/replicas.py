"""Copies of parameters that several ranks hold: are they still equal?

Each frame has the hashes of all parameters that its rank stores, and of some that others store. Where those differ, ranks
have drifted apart: something changed a parameter on one of them only.

A parameter may be cut and copied at once (HSDP; FSDP2 over tensor parallelism, for what is not parallel). A frame does not
say which of the parts a copy is of, so it must be equal to one of them: that another part has just the bytes that a drifted
copy has is left out of account.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.frame import Footer, audit_entries, audit_of
from everstep.restore.plan import Line
from everstep.store import files
from everstep.store.segments import StoredFrame


def drifted(lines: Sequence[Line], after: int = -1) -> list[str]:
    """In words, which copies differ at which step first. `after`: only later steps are looked at."""
    found: dict[tuple[int, int], str] = {}
    common = set.intersection(*(set(line.frames) for line in lines))
    for step in sorted(n for n in common if n > after):
        footers = [_footer(line, step) for line in lines]
        stored: dict[tuple[bool, int, int], dict[int, int]] = {}  # hashes, and which rank stores what has them
        for rank, footer in enumerate(footers):
            entries = audit_entries(footer)
            for uid, piece, value in zip(*(entries[k].tolist() for k in ("uid", "piece", "hash")), strict=True):
                stored.setdefault((footer.fine, uid, piece), {}).setdefault(value, rank)
        for rank, footer in enumerate(footers):
            entries = audit_of(footer.replicas)
            for uid, piece, value in zip(*(entries[k].tolist() for k in ("uid", "piece", "hash")), strict=True):
                expected = stored.get((footer.fine, uid, piece), {value: rank})
                if value not in expected and (rank, uid) not in found:
                    owners = " or ".join(f"rank {owner}" for owner in expected.values())
                    found[rank, uid] = (
                        f"rank {rank}'s copy of {_label(lines, uid)} is not what {owners} has, seen at step {step}: "
                        "something changed it on one of them only"
                    )
    return list(found.values())


def _footer(line: Line, step: int) -> Footer:
    entry = line.frames[step]
    with files.Reader(entry.path) as reader:
        return StoredFrame(entry, reader, line.segments[entry.path].seed).footer


def _label(lines: Sequence[Line], uid: int) -> str:
    for line in lines:
        for manifest, _ in line.bases.values():
            for atom in manifest.layout.atoms:
                if atom.uid == uid:
                    return atom.label()
    return f"{uid:016x}"
