"""States in parts, of which several shadows keep one each: their manifests, joined. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from everstep import tree
from everstep.errors import CorruptionError
from everstep.format.documents import IN_PART, Manifest, StoredTensor

Part = tuple[int, int]
"""Number index of so many."""


def join(parts: Sequence[Manifest], where: str) -> Manifest:
    """One manifest for parts of one state. CorruptionError if they are not that, or if it is not all of it."""
    first = parts[0]
    same = ("run", "timeline", "generation", "step", "layout", "cursor")
    for part in parts[1:]:
        for name in same:
            if getattr(part, name) != getattr(first, name):
                raise CorruptionError(f"{where}: the parts of step {first.step} are not of one state: {name} differs")
    tensors: list[StoredTensor] = []
    carried: list[tuple[int, int]] = []
    states: dict[str, list[tuple[int, Any]]] = {o.name: [] for o in first.optimizers}
    for number, part in enumerate(parts):
        shift = len(tensors)
        tensors += [msgspec.structs.replace(t, rank=number) for t in part.tensors]
        carried += [(uid, index + shift if index >= 0 else index) for uid, index in part.carried]
        if [(o.name, o.params, o.hyper) for o in part.optimizers] != [(o.name, o.params, o.hyper) for o in first.optimizers]:
            raise CorruptionError(f"{where}: the parts of step {first.step} are not of one state: their groups differ")
        for optimizer in part.optimizers:
            states[optimizer.name] += [
                (u, renumbered(s, shift.__add__))
                for u, s in tree.plain_from_text(optimizer.state)
                if u or not number  # what an optimizer keeps for none of its parameters is in all
            ]
    atoms = sorted(t.uid for t in tensors if t.of_model)
    if atoms != sorted(atom.uid for atom in first.layout.atoms):
        raise CorruptionError(f"{where}: the parts of step {first.step} are not all of its state, or hold something twice")
    optimizers = []
    for optimizer in first.optimizers:
        order = [uid for group in optimizer.params for uid in group]
        by_uid = dict(states[optimizer.name])
        state = [(uid, by_uid[uid]) for uid in (*order, *(u for u in by_uid if u not in order)) if uid in by_uid]
        optimizers.append(msgspec.structs.replace(optimizer, state=tree.plain_to_text(state)))
    return msgspec.structs.replace(
        first, tensors=tuple(tensors), carried=tuple(carried), optimizers=tuple(optimizers), part=None,
        audit=first.audit if all(part.is_proven for part in parts) else IN_PART,
        files={name: size for part in parts for name, size in part.files.items()},
    )  # fmt: skip


def renumbered(packed: Any, number: Callable[[int], int]) -> Any:
    """A packed state whose tensors have other numbers."""
    marks: dict[int, tuple[torch.Tensor, int]] = {}

    def mark(index: int) -> torch.Tensor:
        tensor = torch.empty(0)
        marks[id(tensor)] = tensor, number(index)
        return tensor

    state = tree.unpack(packed, mark)
    return tree.pack(state, lambda t: marks[id(t)][1] if id(t) in marks else None)
