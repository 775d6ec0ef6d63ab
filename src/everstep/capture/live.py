"""Live state as what a base, or a slot of the pool, holds of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from everstep import sharding, tree
from everstep.atoms import state_uid
from everstep.format.documents import StoredOptimizer
from everstep.memory import strides_of
from everstep.naming import Inventory
from everstep.store.bases import Slot


@dataclass
class Described:
    """`tensors[i]` belongs to `slots[i]`; `settled[i]` tells that it is a copy, which nobody changes any more."""

    slots: list[Slot] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    settled: list[bool] = field(default_factory=list)
    _keys: set[str] = field(default_factory=set)

    def add(self, uid: int, role: str, key: str, tensor: torch.Tensor, *, settled: bool) -> int:
        """Its index."""
        while key in self._keys:
            key += "'"
        self._keys.add(key)
        self.slots.append(Slot(uid, role, key, tensor.dtype, tuple(tensor.shape), strides_of(tensor)))
        self.tensors.append(tensor.detach())
        self.settled.append(settled)
        return len(self.slots) - 1

    def add_atoms(self, inventory: Inventory) -> None:
        """Parameters where they are; buffers may change in the next forward: they are copied now."""
        for atom in inventory.layout.atoms:
            tensor = inventory.tensors[atom.uid].detach()
            is_buffer = atom.role == "buffer"
            key = f"{atom.owner}.{atom.name}"
            self.add(atom.uid, atom.role, key, tensor.clone() if is_buffer else tensor, settled=is_buffer)

    def add_optimizer(
        self, inventory: Inventory, name: str, optimizer: Optimizer, uids: Sequence[int], params: Sequence[torch.Tensor],
        group_uids: Sequence[tuple[int, ...]], hyper: Sequence[dict[str, Any]],
    ) -> StoredOptimizer:  # fmt: skip
        """The state of these of its parameters, and `hyper` as its groups' hyperparameters."""
        names = {a.uid: a.name for a in inventory.layout.atoms}
        entries = []
        for uid, values in state_of(optimizer, uids, params):
            name_of = {id(v): str(k) for k, v in values.items()}

            def put(t: torch.Tensor, uid: int = uid, name_of: dict[int, str] = name_of) -> int:
                key = name_of.get(id(t), f"#{len(self.slots)}")
                return self.add(
                    state_uid(name, uid, key), "state", f"{name}.{names.get(uid, '')}.{key}", t, settled=False
                )

            entries.append((uid, tree.pack(dict(values), put, path=name)))
        return StoredOptimizer(name, tuple(group_uids), pack_hyper(hyper, name), tree.plain_to_text(entries))

    @property
    def num_bytes(self) -> int:
        return sum(s.num_bytes for s in self.slots)


def state_of(
    optimizer: Optimizer, uids: Sequence[int], params: Sequence[torch.Tensor]
) -> list[tuple[int, dict[Any, Any]]]:
    """What an optimizer keeps, by parameter; what belongs to none under 0."""
    state = optimizer.state
    known = [(u, sharding.local_values(state[p])) for u, p in zip(uids, params, strict=True) if p in state]
    other = {k: v for k, v in state.items() if not isinstance(k, torch.Tensor)}
    return [*known, (0, other)] if other else known


def pack_hyper(hyper: Sequence[dict[str, Any]], name: str) -> str:
    return tree.plain_to_text([tree.pack(h, path=name) for h in hyper])
