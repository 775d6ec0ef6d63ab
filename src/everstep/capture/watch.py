"""Noticing what changes the state apart from optimizer steps.

Three nets, from cheap to thorough:
- version counters, data pointers and identities of every tensor at every boundary;
- bytes: small buffers at every commit; a rotating slice of everything else after each update and again at the next
  boundary; in the first steps all of it, so that a tensor that is edited at every step is known from then on (volatile)
  and compared at every boundary;
- the audit (auditor.py): hashes of the state in every frame, checked by followers and restores.

Everything here runs on the training thread.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from everstep import tree
from everstep.atoms import PIECE_ELEMENTS, state_uid
from everstep.capture.pending import Item, PendingState, PendingTensor, PendingTensors
from everstep.memory import Bytes, plain, view_bytes
from everstep.naming import Inventory
from everstep.store.bases import piece_sum

SMALL_BUFFER_BYTES = 1 << 16
SLICE_BYTES = 1 << 16
FULL_STEPS = 3


class Watched:
    """One dense tensor whose bytes can be hashed."""

    __slots__ = ("alias", "data", "itemsize", "label", "owner", "tensor", "uid", "volatile")

    def __init__(self, uid: int, tensor: torch.Tensor, label: str, owner: tuple[str, int, str] | None) -> None:
        self.uid = uid
        self.label = label
        self.owner = owner
        """(optimizer, parameter uid, state name) for optimizer state."""
        self.volatile = False
        self.refresh(tensor)

    def refresh(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.alias = tensor.detach()
        """Keeps the memory alive while other threads hash it, whatever happens to the tensor."""
        self.itemsize = tensor.element_size()
        ordinary = tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        self.data: Bytes | None = view_bytes(self.alias) if ordinary else None

    def bytes(self) -> Bytes:
        return self.data if self.data is not None else view_bytes(plain(self.alias))

    def piece_ranges(self) -> list[tuple[Watched, int, int]]:
        """(self, first byte, end byte) of each piece."""
        size = PIECE_ELEMENTS * self.itemsize
        total = self.alias.numel() * self.itemsize
        return [(self, low, min(low + size, total)) for low in range(0, total, size)]

    def hash_range(self, low: int, high: int) -> int:
        """Of bytes [low, high); equals the audit's hash where that is a whole piece."""
        return piece_sum(self.bytes()[low:high], self.uid, low // self.itemsize)

    def copy(self) -> torch.Tensor:
        return self.tensor.detach().clone()


class Watch:
    """All tensors of the training state, and which of them changed behind the optimizers' backs."""

    def __init__(self, inventory: Inventory, optimizers: dict[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self._states: dict[str, list[Watched]] = {name: [] for name in optimizers}
        self._state_values: dict[str, list[Any]] = {name: [] for name in optimizers}
        self._state_versions: dict[str, list[int]] = {name: [] for name in optimizers}
        self._full_left = FULL_STEPS
        self._volatile: set[int] = set()
        self._slice: list[tuple[Watched, int, int, int]] = []
        self._whole_slice = False
        self._everything: list[Watched] | None = None
        self.hidden_edits: list[str] = []
        """Labels of tensors whose edit no version counter showed, since last asked."""
        self.install(inventory)

    # -- the set of tensors -------------------------------------------------------------------------------------------

    def install(self, inventory: Inventory) -> None:
        """(Re)build for these live objects."""
        labels = inventory.labels()
        roles = {a.uid: a.role for a in inventory.layout.atoms}
        self._inventory = inventory
        self._params: list[Watched] = []
        self._large: list[Watched] = []
        small: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
        for uid, tensor in inventory.tensors.items():
            if roles[uid] == "param":
                self._params.append(Watched(uid, tensor, labels[uid], None))
            elif tensor.numel() * tensor.element_size() > SMALL_BUFFER_BYTES or not tensor.is_contiguous():
                self._large.append(Watched(uid, tensor, labels[uid], None))
            else:
                small.setdefault(tensor.dtype, []).append((uid, tensor))
        for w in (*self._params, *self._large):
            w.volatile = w.uid in self._volatile
        self._tensors = self._params + self._large
        self._everything = None
        self._by_uid = {w.uid: w for w in self._tensors}
        self._param_tensors = [w.tensor for w in self._tensors]
        self._small = [_BufferPack(items) for items in small.values()]
        self._note_tensors(self._tensors)
        for name in self._optimizers:
            self._read_states(name)
        self._take_slice()

    def _note_tensors(self, watched: Iterable[Watched]) -> None:
        self._versions = [t._version for t in self._param_tensors]
        self._pointers = [t.data_ptr() for t in self._param_tensors]
        for pack in self._small:
            pack.note()

    def _values(self, name: str) -> list[Any]:
        return [v for s in self._optimizers[name].state.values() if isinstance(s, dict) for v in s.values()]

    def _read_states(self, name: str) -> None:
        """Learn the optimizer's state tensors anew."""
        optimizer = self._optimizers[name]
        uid_of = self._inventory.uid_of
        labels = self._inventory.labels()
        found: list[Watched] = []
        for p, values in optimizer.state.items():
            if not isinstance(p, torch.Tensor) or id(p) not in uid_of:
                continue
            param = uid_of[id(p)]
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.layout is torch.strided and isinstance(key, str):
                    uid = state_uid(name, param, key)
                    w = Watched(uid, value, f"{name}: {key} of {labels[param]}", (name, param, key))
                    w.volatile = uid in self._volatile
                    found.append(w)
        self._states[name] = found
        self._everything = None
        self._state_values[name] = self._values(name)
        self._state_versions[name] = [w.tensor._version for w in found]

    def targets(self) -> tuple[list[Watched], list[Watched]]:
        """(parameters and large buffers, optimizer state): what an audit hashes."""
        return self._tensors, [w for states in self._states.values() for w in states]

    def covers_all(self) -> bool:
        """Whether the current slice is everything."""
        return self._whole_slice

    # -- boundaries ---------------------------------------------------------------------------------------------------

    def check(self, *, commit: bool) -> list[Item]:
        """Everything that changed since the last update or check, copied. At a commit also small buffers."""
        changed: dict[int, Watched] = {}
        versions = [t._version for t in self._param_tensors]
        pointers = [t.data_ptr() for t in self._param_tensors]
        if versions != self._versions or pointers != self._pointers:
            for i, w in enumerate(self._tensors):
                if pointers[i] != self._pointers[i]:
                    w.refresh(w.tensor)
                    changed[w.uid] = w
                elif versions[i] != self._versions[i]:
                    changed[w.uid] = w
            self._versions, self._pointers = versions, pointers
        items: list[Item] = []
        touched_states: dict[tuple[str, int], None] = {}
        for name in self._optimizers:
            self._check_states(name, touched_states)
        self._check_bytes(changed, touched_states)
        for w in changed.values():
            items.append(PendingTensor(w.uid, w.copy()))
        if touched_states:
            items += self._state_items(touched_states)
        if changed or touched_states:
            self._rehash_slice()
        if commit:
            for pack in self._small:
                items += pack.changes()
        return items

    def _check_states(self, name: str, touched: dict[tuple[str, int], None]) -> None:
        values = self._values(name)
        cached = self._state_values[name]
        if len(values) != len(cached) or not all(map(operator.is_, values, cached)):
            before = {w.uid: w.tensor for w in self._states[name]}
            gone = {(name, w.owner[1]) for w in self._states[name] if w.owner is not None}
            self._read_states(name)
            for w in self._states[name]:
                assert w.owner is not None
                gone.discard((name, w.owner[1]))
                if before.get(w.uid) is not w.tensor:
                    touched[(name, w.owner[1])] = None
            # Values that are no tensors (numbers, None) may have been set too: look at what changed by identity.
            touched.update(dict.fromkeys(gone))
            touched.update(dict.fromkeys(self._non_tensor_owners(name)))
            return
        versions = [w.tensor._version for w in self._states[name]]
        if versions != self._state_versions[name]:
            for w, new, old in zip(self._states[name], versions, self._state_versions[name], strict=True):
                if new != old and w.owner is not None:
                    touched[(name, w.owner[1])] = None
            self._state_versions[name] = versions

    def _non_tensor_owners(self, name: str) -> list[tuple[str, int]]:
        uid_of = self._inventory.uid_of
        return [
            (name, uid_of[id(p)])
            for p, values in self._optimizers[name].state.items()
            if isinstance(p, torch.Tensor)
            and id(p) in uid_of
            and any(not isinstance(v, torch.Tensor) for v in values.values())
        ]

    def _check_bytes(self, changed: dict[int, Watched], touched: dict[tuple[str, int], None]) -> None:
        for w, low, high, expected in self._slice:
            if w.uid in changed or (w.owner is not None and (w.owner[0], w.owner[1]) in touched):
                continue
            if w.hash_range(low, high) != expected:
                self._found_hidden(w)
                if w.owner is None:
                    changed[w.uid] = w
                else:
                    touched[(w.owner[0], w.owner[1])] = None

    def _found_hidden(self, w: Watched) -> None:
        if w.uid not in self._volatile:
            self._volatile.add(w.uid)
            w.volatile = True
            if self._full_left <= 0:
                self.hidden_edits.append(w.label)

    def _state_items(self, touched: Iterable[tuple[str, int]]) -> list[Item]:
        by_uid = {uid: t for uid, t in self._inventory.tensors.items()}
        items: list[Item] = []
        for name, uid in touched:
            p = by_uid.get(uid)
            values = None if p is None else self._optimizers[name].state.get(p)
            items.append(PendingState(name, uid, None if values is None else tree.freeze(dict(values), path=name)))
            self._state_versions[name] = [w.tensor._version for w in self._states[name]]
        return items

    # -- around updates -----------------------------------------------------------------------------------------------

    def after_update(self, name: str) -> None:
        """The optimizer has just moved its parameters and state, as it should."""
        values = self._values(name)
        cached = self._state_values[name]
        if len(values) != len(cached) or not all(map(operator.is_, values, cached)):
            self._read_states(name)
        else:
            self._state_versions[name] = [w.tensor._version for w in self._states[name]]
        versions = [t._version for t in self._param_tensors]
        pointers = [t.data_ptr() for t in self._param_tensors]
        if pointers != self._pointers:
            for w, new, old in zip(self._tensors, pointers, self._pointers, strict=True):
                if new != old:
                    w.refresh(w.tensor)
        self._versions, self._pointers = versions, pointers
        self._take_slice()

    def after_commit(self) -> None:
        if self._full_left > 0:
            self._full_left -= 1

    def look_closely(self) -> None:
        """Compare everything for some steps again."""
        self._full_left = FULL_STEPS

    def _take_slice(self) -> None:
        """Hash what the next boundary compares."""
        if self._everything is None:
            tensors, states = self.targets()
            self._everything = [w for w in tensors + states if w.alias.numel()]
            self._total_bytes = sum(w.alias.numel() * w.itemsize for w in self._everything)
            self._turn = (0, 0)
        self._whole_slice = self._full_left > 0 or self._total_bytes <= SLICE_BYTES
        ranges: list[tuple[Watched, int, int]] = []
        for w in self._everything:
            if self._whole_slice or w.volatile:
                ranges += w.piece_ranges()
        if not self._whole_slice:
            ranges += self._rotate()
        self._slice = [(w, low, high, w.hash_range(low, high)) for w, low, high in ranges]

    def _rotate(self) -> list[tuple[Watched, int, int]]:
        """The next SLICE_BYTES of everything, going round."""
        assert self._everything is not None
        index, offset = self._turn
        budget = SLICE_BYTES
        ranges = []
        while budget > 0:
            w = self._everything[index]
            high = min(offset + budget, w.alias.numel() * w.itemsize)
            if not w.volatile:
                ranges.append((w, offset, high))
            budget -= high - offset
            offset = high
            if offset >= w.alias.numel() * w.itemsize:
                index, offset = (index + 1) % len(self._everything), 0
        self._turn = (index, offset)
        return ranges

    def _rehash_slice(self) -> None:
        self._slice = [(w, low, high, w.hash_range(low, high)) for w, low, high, _ in self._slice]

    def slice_sums(self) -> list[tuple[int, int, int]]:
        """(uid, piece, hash) of whole pieces, as they hold right after a check."""
        return [
            (w.uid, low // (PIECE_ELEMENTS * w.itemsize), value)
            for w, low, _, value in self._slice
            if self._whole_slice or w.volatile
        ]


class _BufferPack:
    """Small buffers of one dtype: compared and copied together, with one concatenation."""

    def __init__(self, items: list[tuple[int, torch.Tensor]]) -> None:
        self.uids = [uid for uid, _ in items]
        self.tensors = [t for _, t in items]
        self.shapes = [tuple(t.shape) for t in self.tensors]
        self.note()

    def _views(self) -> None:
        self._pointers = [t.data_ptr() for t in self.tensors]
        self._flat = [t.detach().reshape(-1) for t in self.tensors]

    def note(self) -> None:
        self._views()
        self._last = torch.cat(self._flat)

    def changes(self) -> list[Item]:
        if [t.data_ptr() for t in self.tensors] != self._pointers:
            self._views()
        now = torch.cat(self._flat)
        if now.numel() == 0 or view_bytes(plain(now)).tobytes() == view_bytes(plain(self._last)).tobytes():
            return []
        self._last = now
        return [PendingTensors(self.uids, self.shapes, now)]
