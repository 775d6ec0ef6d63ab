"""A part of a base that is there as a whole: what a shadow that keeps some of the atoms begins with."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from everstep import tree
from everstep.format.documents import Manifest, StoredTensor
from everstep.format.parts import Part, renumbered
from everstep.memory import dtype_named
from everstep.store.bases import Slot, file_header, file_order, part_file


def part_of(manifest: Manifest, uids: Collection[int], part: Part) -> tuple[Manifest, bytes, list[StoredTensor]]:
    """A base's part with these atoms: its manifest, the header of its file, and the tensors that follow it there, in
    order and where they are in the base."""
    used = {i for i, t in enumerate(manifest.tensors) if t.of_model and t.uid in uids}

    def use(index: int) -> int:
        used.add(index)
        return index

    states = [[(u, s) for u, s in tree.plain_from_text(o.state) if u in uids or u == 0] for o in manifest.optimizers]
    for state in states:
        for _, packed in state:
            renumbered(packed, use)
    carried = [(u, i) for u, i in manifest.carried if u in uids]
    kept = sorted(used.union(i for _, i in carried if i >= 0))
    tensors = [manifest.tensors[i] for i in kept]
    slots = [Slot(t.uid, t.role, t.key, dtype_named(t.dtype), t.shape, t.strides) for t in tensors]
    order = file_order(slots)
    header, offsets = file_header([slots[i] for i in order])
    stored = {
        i: msgspec.structs.replace(tensors[i], offset=offset, rank=0)
        for i, offset in zip(order, offsets, strict=True)
    }
    new = {old: i for i, old in enumerate(kept)}
    optimizers = [
        msgspec.structs.replace(o, state=tree.plain_to_text([(u, renumbered(s, new.__getitem__)) for u, s in state]))
        for o, state in zip(manifest.optimizers, states, strict=True)
    ]
    last = stored[order[-1]] if order else None
    found = msgspec.structs.replace(
        manifest, tensors=tuple(stored[i] for i in range(len(kept))), optimizers=tuple(optimizers), part=part,
        carried=tuple((u, new[i] if i >= 0 else i) for u, i in carried),
        files={part_file(part): len(header) if last is None else last.offset + last.num_bytes},
    )  # fmt: skip
    return found, header, [tensors[i] for i in order]
