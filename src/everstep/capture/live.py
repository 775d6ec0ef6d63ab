"""Live state as what a base, or a slot of the pool, holds of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any

import torch
from torch.optim import Optimizer

from everstep import sharding, tree
from everstep.atoms import Layout, state_uid
from everstep.capture.structure import Structure
from everstep.format.documents import StoredOptimizer
from everstep.memory import Bytes, is_plain, strides_of, view_bytes
from everstep.naming import Inventory, follow_outer
from everstep.store.bases import Slot


@dataclass
class Described:
    """`tensors[i]` belongs to `slots[i]`; `settled[i]` tells that it is a copy, which nobody changes any more."""

    slots: list[Slot] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    settled: list[bool] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    """The live tensors that they were taken from."""
    views: list[Bytes | None] = field(default_factory=list)
    """Their memory, where find_views() has found it."""
    sizes: list[int] = field(default_factory=list)
    """In bytes."""
    _keys: set[str] = field(default_factory=set)

    def add(
        self, uid: int, role: str, key: str, tensor: torch.Tensor, *, settled: bool, source: torch.Tensor | None = None
    ) -> int:
        """Its index. `source`: what it is a copy of."""
        while key in self._keys:
            key += "'"
        slot = Slot(uid, role, key, tensor.dtype, tuple(tensor.shape), strides_of(tensor))
        self._append(slot, tensor.detach(), settled, tensor if source is None else source)
        return len(self.slots) - 1

    def _append(self, slot: Slot, tensor: torch.Tensor, settled: bool, source: torch.Tensor) -> None:
        self._keys.add(slot.key)
        self.slots.append(slot)
        self.tensors.append(tensor)
        self.settled.append(settled)
        self.sources.append(source)
        self.views.append(None)
        self.sizes.append(slot.num_bytes)

    def add_again(self, slot: Slot) -> None:
        """The place of a tensor that there was once and that is not there now: zeros, which nobody asks for."""
        zeros = torch.zeros((), dtype=slot.dtype).expand(slot.shape)
        self._append(slot, zeros, True, zeros)

    def add_atoms(self, inventory: Inventory, kept: Mapping[int, torch.Tensor] | None = None) -> None:
        """Parameters where they are; buffers may change in the next forward: they are copied now, but for those in `kept`,
        which nobody writes to and which are taken in place of the live ones."""
        kept = kept or {}
        for atom in inventory.layout.atoms:
            source = inventory.tensors[atom.uid]
            tensor = kept.get(atom.uid, source).detach()
            is_buffer = atom.role == "buffer"
            if is_buffer and atom.uid not in kept:
                tensor = tensor.clone()
            self.add(
                atom.uid, atom.role, f"{atom.owner}.{atom.name}", tensor, settled=is_buffer, source=source
            )

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

    def put_copy(self, index: int, tensor: torch.Tensor) -> None:
        """This one in place of a tensor: nobody changes it any more."""
        self.tensors[index], self.settled[index], self.views[index] = tensor, True, None

    def find_views(self) -> None:
        """Of all that are no copies and whose bytes can be looked at where they are. They hold as long as these do."""
        self.views = [
            view_bytes(t) if not settled and is_plain(t) else None
            for t, settled in zip(self.tensors, self.settled, strict=True)
        ]

    def copy(self) -> Described:
        return Described(
            self.slots[:], self.tensors[:], self.settled[:], self.sources[:], self.views[:], self.sizes[:], self._keys.copy()
        )

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)


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


_version = attrgetter("_version")
_PLACES: tuple[Callable[[torch.Tensor], Any], ...] = (torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride)
"""Where in memory a tensor is, and how it lies there."""
Mark = tuple[list[int], list[int]]
GradientsMark = list[tuple["weakref.ref[torch.Tensor]", int]]


class Live:
    """The live objects, described again and again: what has not changed since the last time is not looked at anew."""

    def __init__(self, take: Callable[[], Inventory], optimizers: Mapping[str, Optimizer], *, is_part: bool) -> None:
        """`is_part`: other ranks have some of the parameters that the groups name."""
        self._structure = Structure(take)
        self._optimizers = dict(optimizers)
        self._is_part = is_part
        self._refresh()

    @property
    def inventory(self) -> Inventory:
        return self._structure.inventory

    @property
    def layout(self) -> Layout:
        return self.inventory.layout

    def refresh(self) -> None:
        """Look at everything anew."""
        self._structure.take()
        self._refresh()

    def close(self) -> None:
        self._structure.close()

    def _refresh(self) -> None:
        inventory = self.inventory
        self._uids = {name: [uid for group in inventory.groups[name] for uid in group] for name in self._optimizers}
        self._params = {name: [inventory.live[uid] for uid in uids] for name, uids in self._uids.items()}
        self._groups = self._groups_now()
        """As the optimizers have them, with what other ranks store."""
        self._known: Described | None = None
        self._places: list[list[Any]] = []
        """Of what is known: what _PLACES say of each."""
        self._copied: list[int] = []
        """Where the buffers are in what is known."""
        params = inventory.params()
        self._held = [(uid, params[uid]) for uid in inventory.tensors if uid in params]
        """Parameters that this process stores."""
        self._memory = [inventory.tensors[uid] for uid, _ in self._held]
        self._buffers = [t for uid, t in inventory.tensors.items() if uid not in params]
        self._stored: tuple[StoredOptimizer, ...] = ()
        self._values: list[Any] = []
        self._watched: list[torch.Tensor] = []

    def describe(self) -> tuple[Described, tuple[StoredOptimizer, ...]]:
        """Everything as it is now: buffers are copied, the rest is where it is. The optimizers' hyper is left empty."""
        if self._structure.has_changed() or self.groups_changed():
            self.refresh()
        values = self._state_values()
        known = self._known
        if known is not None and values is not None and _same(values, self._values):
            if self._are_in_place():
                found = known.copy()
                with torch.no_grad():
                    for i in self._copied:
                        found.tensors[i] = found.sources[i].clone()
                return found, self._stored
            self.refresh()  # by `p.data = other` the same tensors have other memory
            values = self._state_values()
        found = Described()
        found.add_atoms(self.inventory)
        self._stored = tuple(
            found.add_optimizer(
                self.inventory, name, optimizer, self._uids[name], self._params[name], self.inventory.groups[name], ()
            )
            for name, optimizer in self._optimizers.items()
        )
        self._values = values or []
        self._watched = [t for t, slot in zip(found.tensors, found.slots, strict=True) if slot.role != "buffer"]
        self._known = None
        if values is not None:  # else numbers in it change without a trace
            self._known = found
            self._copied = [i for i, slot in enumerate(found.slots) if slot.role == "buffer"]
            self._places = [list(map(place, found.sources)) for place in _PLACES]
            found.find_views()
        return found.copy(), self._stored

    def _are_in_place(self) -> bool:
        """Whether everything that was described last is where in memory it was, and lies there as it did."""
        assert self._known is not None
        sources = self._known.sources
        return all(all(map(eq, map(place, sources), then)) for place, then in zip(_PLACES, self._places, strict=True))

    def known(self) -> Described | None:
        """As it was described last, if it still consists of the same tensors; None: that must be found out."""
        values = self._state_values()
        if self._known is None or values is None or not _same(values, self._values) or not self._are_in_place():
            return None
        return self._known.copy()

    def positions(self, live: Described) -> dict[int, list[int]]:
        """By id of each parameter: where it and what its optimizer keeps of it are in a description."""
        at = {slot.uid: i for i, slot in enumerate(live.slots) if slot.role != "grad"}
        found: dict[int, list[int]] = {}
        for name, optimizer in self._optimizers.items():
            for uid, p in zip(self._uids[name], self._params[name], strict=True):
                names = map(str, optimizer.state.get(p, {}))
                uids = [uid, *(state_uid(name, uid, key) for key in names)]
                found[id(p)] = [at[u] for u in uids if u in at]
            for p in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                found.setdefault(id(p), [])  # another rank stores it
        return found

    def hyper(self) -> dict[str, list[dict[str, Any]]]:
        """A copy of every optimizer's hyperparameters by group."""
        for optimizer in self._optimizers.values():
            follow_outer(optimizer)
        return {
            name: [
                tree.freeze({k: v for k, v in group.items() if k != "params"}, path=name) for group in optimizer.param_groups
            ]
            for name, optimizer in self._optimizers.items()
        }

    def gradients(self) -> list[tuple[int, torch.Tensor]]:
        """Those that are on their parameters now: the next backward may add to them."""
        return [(uid, sharding.local_grad(p)) for uid, p in self._held if p.grad is not None and not p.grad.is_sparse]

    def sparse_gradients(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """(uid, parameter, gradient) of those that are sparse."""
        return [(uid, p, p.grad) for uid, p in self._held if p.grad is not None and p.grad.is_sparse]

    def mark(self) -> Mark:
        """What differs if parameters or optimizer state have been changed, but for what no version counter shows."""
        values = self._state_values()
        watched = self._watched
        if values is None or not watched or not _same(values, self._values):
            values = [v for name, o in self._optimizers.items() for v in _leaves(o, self._uids[name], self._params[name])]
            watched = self._memory + [sharding.local(v) for v in values if isinstance(v, torch.Tensor)]
        return list(map(id, values)), list(map(_version, watched))

    def buffers_mark(self) -> list[int]:
        """What differs if buffers have been changed, but for what no version counter shows."""
        return list(map(_version, self._buffers))

    def gradients_mark(self) -> GradientsMark:
        """What gradients are on the parameters, and their versions: see has_gradients_of()."""
        grads = [p.grad for _, p in self._held]
        # Weak references: a gradient that is gone may have lent its id to the next.
        return [(weakref.ref(g), g._version) for g in grads if g is not None]

    def has_gradients_of(self, mark: GradientsMark) -> bool:
        """Whether the gradients that are on the parameters are those of a mark, unchanged."""
        now = self.gradients_mark()
        # By identity: references to living tensors compare these, element by element.
        return len(now) == len(mark) and all(g() is h() and v == w for (g, v), (h, w) in zip(now, mark, strict=True))

    def _groups_now(self) -> list[list[list[torch.Tensor]]]:
        return [[list(group["params"]) for group in optimizer.param_groups] for optimizer in self._optimizers.values()]

    def groups_changed(self) -> bool:
        """Whether parameters were added, removed or regrouped since everything was last looked at."""
        return any(
            len(now) != len(known) or not all(map(_same, now, known))
            for now, known in zip(self._groups_now(), self._groups, strict=True)
        )

    def _state_values(self) -> list[Any] | None:
        """All that the optimizers keep of what this process stores, if that are dense tensors, and for every parameter; else
        None."""
        found: list[Any] = []
        for name, optimizer in self._optimizers.items():
            state, params = optimizer.state, self._params[name]
            if len(state) != len(params) and not (self._is_part and all(isinstance(k, torch.Tensor) for k in state)):
                return None
            try:
                found += chain.from_iterable(map(dict.values, map(state.get, params)))  # type: ignore[arg-type]
            except TypeError:  # one has none
                return None
        if self._values and _same(found, self._values):
            return found
        is_known = all(isinstance(v, torch.Tensor) and not v.is_sparse for v in found)
        if self._is_part:
            is_known = is_known and all(sharding.local(v) is v for v in found)
        return found if is_known else None


def _leaves(optimizer: Optimizer, uids: Sequence[int], params: Sequence[torch.Tensor]) -> list[Any]:
    return [value for _, values in state_of(optimizer, uids, params) for value in values.values()]


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether these are the very same objects."""
    return len(a) == len(b) and all(map(is_, a, b))
