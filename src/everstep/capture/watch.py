"""Noticing what changes the state apart from optimizer steps.

Three nets, from cheap to thorough:
- version counters, data pointers and identities of every tensor. In the first steps they are read around every update, and
  by how much each update moves them is learned; from then on one look a step, at the commit, is enough: a counter that is
  not where the updates alone would have brought it means an edit, and the results for that parameter are stored;
- bytes: small buffers at every commit; a rotating slice of everything else after each update and again at the next
  boundary; in the first steps all of it, so that a tensor that is edited at every step is known from then on (volatile)
  and compared at every boundary;
- the audit (auditor.py): hashes of the state in every frame, checked by followers and restores.

Everything here runs on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch.optim import Optimizer

from everstep import sharding, tree
from everstep.atoms import RESIDUALS, SMALL_BUFFER_BYTES, piece_elements, state_uid
from everstep.capture.pending import Item, PendingState, PendingTensor, PendingTensors
from everstep.memory import Bytes, plain, view_bytes
from everstep.naming import Inventory
from everstep.store.bases import piece_sum

SLICE_BYTES = 1 << 16
SLICE_RANGES = 4
SLICED_UP_TO_BYTES = 256 * SLICE_BYTES
"""A larger state is not looked at in slices: they would take too long to come round. The audit covers it at every step."""
LOOK_HERE_TENSORS = 96
"""Optimizer state of more tensors than this is looked at by the audit: on the training thread it takes too long."""
MAX_SURPRISES = 3
FULL_STEPS = 3
REPLICA_BYTES = 1 << 20
"""Of what other ranks store, so much (at least one tensor) is hashed at each step."""
_versions = attrgetter("_version")
_pointers = torch.Tensor.data_ptr


@dataclass
class Delta:
    """By how much one update of an optimizer moves version counters."""

    tensors: list[int]
    states: list[int]

    def __post_init__(self) -> None:
        self.moves_tensors = any(self.tensors)


@dataclass
class StateLook:
    """One optimizer's state as it must be found after a commit; run() looks, in another thread."""

    watch: Watch
    name: str
    values: list[Any]
    tensors: list[torch.Tensor]
    versions: list[int]
    delta: list[int]
    num_updates: int

    def run(self) -> bool:
        """Whether everything is as it must be; if not, the watch is alarmed."""
        now = self.watch.values(self.name)
        good = (
            len(now) == len(self.values)
            and all(map(is_, now, self.values))
            and list(map(_versions, self.tensors)) == _moved(self.versions, self.delta, self.num_updates)
        )
        if not good:
            self.watch.alarm(self.name)
        return good


def _moved(versions: list[int], delta: list[int], num_updates: int) -> list[int]:
    """Where so many updates bring version counters."""
    return [v + num_updates * d for v, d in zip(versions, delta, strict=True)]


class Watched:
    """One dense tensor whose bytes can be hashed."""

    __slots__ = (
        "_pieces", "alias", "data", "fine", "itemsize", "label", "owner", "piece_bytes", "tensor", "uid", "volatile",
    )  # fmt: skip

    def __init__(
        self, uid: int, tensor: torch.Tensor, label: str, owner: tuple[str, int, str] | None, fine: bool = False
    ) -> None:
        self.uid = uid
        self.fine = fine
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
        self.piece_bytes = piece_elements(tensor.numel(), fine=self.fine) * self.itemsize
        ordinary = tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        self.data: Bytes | None = view_bytes(self.alias) if ordinary else None
        self._pieces: list[tuple[Bytes, int]] | None = None

    def bytes(self) -> Bytes:
        return self.data if self.data is not None else view_bytes(plain(self.alias))

    def piece_ranges(self) -> list[tuple[Watched, int, int]]:
        """(self, first byte, end byte) of each piece."""
        size = self.piece_bytes
        total = self.alias.numel() * self.itemsize
        return [(self, low, min(low + size, total)) for low in range(0, total, size)]

    def is_piece(self, low: int, high: int) -> bool:
        size = self.piece_bytes
        return low % size == 0 and high == min(low + size, self.alias.numel() * self.itemsize)

    def hash_range(self, low: int, high: int) -> int:
        """Of bytes [low, high); equals the audit's hash where that is a whole piece."""
        return piece_sum(self.bytes()[low:high], self.uid, low // self.itemsize)

    def piece_hashes(self) -> list[int]:
        """Of every piece, in order (any thread)."""
        pieces = self._pieces
        if pieces is None:
            data = self.bytes()
            pieces = [(data[low:high], self.uid + low // self.itemsize) for _, low, high in self.piece_ranges()]
            if self.data is not None:
                self._pieces = pieces  # the next time there is nothing to do but to hash
        return [piece_sum(data, key, 0) for data, key in pieces]

    def copy(self) -> torch.Tensor:
        return self.tensor.detach().clone()


class Watch:
    """All tensors of the training state, and which of them changed behind the optimizers' backs."""

    def __init__(self, inventory: Inventory, optimizers: dict[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self._states: dict[str, list[Watched]] = {name: [] for name in optimizers}
        self._state_tensors: dict[str, list[torch.Tensor]] = {name: [] for name in optimizers}
        self._state_values: dict[str, list[Any]] = {name: [] for name in optimizers}
        self._state_versions: dict[str, list[int]] = {name: [] for name in optimizers}
        self._state_sizes = dict.fromkeys(optimizers, 0)
        self._alarm: set[str] = set()
        self._full_left = FULL_STEPS
        self._unstable: set[str] = set()
        """Optimizers whose effect on version counters cannot be foretold."""
        self._deltas: dict[str, Delta | None] = dict.fromkeys(optimizers)
        self._updates = dict.fromkeys(optimizers, 0)
        """Since the last commit."""
        self._unread_updates = dict.fromkeys(optimizers, 0)
        """Since the version counters of its state were read."""
        self._calm = False
        """Nothing but version counters needs a look until something unusual happens."""
        self._surprises = dict.fromkeys(optimizers, 0)
        self._volatile: set[int] = set()
        self._slice: list[tuple[Watched, int, int, int, int]] = []
        self.reshaped = False
        """A tensor has another shape or dtype than its atom: the layout must be made anew."""
        self._whole_slice = False
        self._num_volatile = 0
        self._everything: list[Watched] | None = None
        self._all_states: list[Watched] = []
        self._replica_turn = 0
        self.end_audit: Callable[[], object] = lambda: None
        """Returns when no other thread hashes any of this; called before a tensor is looked at in other memory."""
        self.hidden_edits: list[str] = []
        """Labels of tensors whose edit no version counter showed, since last asked."""
        self.install(inventory)

    # -- the set of tensors -------------------------------------------------------------------------------------------

    def install(self, inventory: Inventory) -> None:
        """(Re)build for these live objects."""
        self._calm = False
        labels = inventory.labels()
        roles = {a.uid: a.role for a in inventory.layout.atoms}
        fine = inventory.layout.fine
        self._inventory = inventory
        self._params: list[Watched] = []
        self._large: list[Watched] = []
        small: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
        residuals = {a.uid for a in inventory.layout.atoms if a.owner == RESIDUALS}
        for uid, tensor in inventory.tensors.items():
            if uid in residuals:
                continue  # they change at every step; when they are stored, their compressor says (see Capture)
            if roles[uid] == "param":
                self._params.append(Watched(uid, tensor, labels[uid], None, fine))
            elif tensor.numel() * tensor.element_size() > SMALL_BUFFER_BYTES or not tensor.is_contiguous():
                self._large.append(Watched(uid, tensor, labels[uid], None, fine))
            else:
                small.setdefault(tensor.dtype, []).append((uid, tensor))
        for w in (*self._params, *self._large):
            w.volatile = w.uid in self._volatile
        self._replicas = [Watched(uid, t, str(uid), None, fine) for uid, t in inventory.replicas.items()]
        self._tensors = self._params + self._large
        self._everything = None
        self._by_uid = {w.uid: w for w in self._tensors}
        self._param_tensors = [w.tensor for w in self._tensors]
        self._small = [_BufferPack(items) for items in small.values()]
        self._note_tensors(self._tensors)
        for name in self._optimizers:
            self._read_states(name)
            self._deltas[name], self._updates[name] = None, 0
        self._full_left = max(self._full_left, FULL_STEPS)
        self._take_slice()

    def _note_tensors(self, watched: Iterable[Watched]) -> None:
        self._versions = list(map(_versions, self._param_tensors))
        self._pointers = list(map(_pointers, self._param_tensors))
        for pack in self._small:
            pack.note()

    def values(self, name: str) -> list[Any]:
        try:
            return list(chain.from_iterable(map(dict.values, self._optimizers[name].state.values())))
        except TypeError:  # an optimizer that keeps other things than dicts in its state
            return [v for s in self._optimizers[name].state.values() if isinstance(s, dict) for v in s.values()]

    def states_now(self, name: str) -> list[Watched]:
        """The optimizer's state tensors as they hang there (any thread)."""
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
                    label, owner = f"{name}: {key} of {labels[param]}", (name, param, key)
                    w = Watched(uid, sharding.local(value), label, owner, self._inventory.layout.fine)
                    w.volatile = uid in self._volatile
                    found.append(w)
        return found

    def _read_states(self, name: str) -> None:
        """Learn the optimizer's state tensors anew."""
        found = self._states[name] = self.states_now(name)
        self._state_tensors[name] = [w.tensor for w in found]
        self._everything = None
        self._state_values[name] = self.values(name)
        self._state_sizes[name] = len(self._optimizers[name].state)
        self._read_state_versions(name)

    def _read_state_versions(self, name: str) -> list[int]:
        self._unread_updates[name] = 0
        versions = self._state_versions[name] = list(map(_versions, self._state_tensors[name]))
        return versions

    def targets(self) -> tuple[list[Watched], list[Watched]]:
        """(parameters and large buffers, optimizer state): what makes up the state, apart from small buffers."""
        if self._everything is None:
            self._all_states = [w for states in self._states.values() for w in states]
        return self._tensors, self._all_states

    def quiet_targets(self) -> tuple[list[Watched], list[int], list[Watched]]:
        """(parameters and large buffers, their version counters at the commit, optimizer state) to be hashed.

        Without what is known to change between commit and update: that is hashed at the commit itself.
        """
        tensors, states = self.targets()
        if not self._volatile:
            return tensors, self._versions, states
        return (
            [w for w in tensors if not w.volatile],
            [v for w, v in zip(tensors, self._versions, strict=True) if not w.volatile],
            [w for w in states if not w.volatile],
        )

    def next_replicas(self) -> list[Watched]:
        """Some of the parameters that other ranks store, going round."""
        found: list[Watched] = []
        size = 0
        while self._replicas and len(found) < len(self._replicas) and size < REPLICA_BYTES:
            self._replica_turn = (self._replica_turn + 1) % len(self._replicas)
            found.append(self._replicas[self._replica_turn])
            size += found[-1].alias.numel() * found[-1].itemsize
        return found

    def is_volatile(self, uid: int) -> bool:
        return uid in self._volatile

    def small_buffers(self) -> list[tuple[list[int], list[tuple[int, ...]], torch.Tensor]]:
        """(uids, shapes, copy) as of the last commit."""
        return [(pack.uids, pack.shapes, pack.last) for pack in self._small]

    def is_bare(self) -> bool:
        """Whether there are neither small buffers, nor copies of other ranks' parameters, nor slices of this step."""
        return not (self._small or self._replicas or self._slice)

    def covers_all(self) -> bool:
        """Whether the current slice is everything."""
        return self._whole_slice

    # -- boundaries ---------------------------------------------------------------------------------------------------

    def states_to_look_at(self) -> tuple[list[StateLook], list[tuple[list[torch.Tensor], list[int]]]]:
        """What the audit compares after this commit, in place of the training thread; and of optimizers that the
        training thread has compared, the state tensors with their version counters."""
        looks: list[StateLook] = []
        known: list[tuple[list[torch.Tensor], list[int]]] = []
        precise = not self._calm and self._precise()
        for name, delta in self._deltas.items():
            if precise or delta is None or self._looks_here(name):
                known.append((self._state_tensors[name], self._state_versions[name]))
            else:
                looks.append(
                    StateLook(self, name, self._state_values[name], self._state_tensors[name],
                              self._state_versions[name], delta.states, self._unread_updates[name])
                )  # fmt: skip
        return looks, known

    def look_at_states(self, name: str) -> None:
        """The optimizer's state was replaced: the next check must see it."""
        self._calm = False
        self._unstable.add(name)

    def is_calm(self) -> bool:
        """Whether before_update would find nothing to look at."""
        return self._calm and not self._alarm and not self.hidden_edits

    def alarm(self, name: str) -> None:
        """Somebody edited this optimizer's state: look closely before its next update (any thread)."""
        self._alarm.add(name)

    def before_update(self) -> list[Item]:
        """What changed since the last boundary, copied, as far as it must be known before an update."""
        if self._calm and not self._alarm:
            return []
        alarm = set(self._alarm)
        if alarm:
            self._calm = False
            self._unstable |= alarm
            self._alarm -= alarm
        if self._precise():
            return self._check_all(alarm)
        changed: dict[int, Watched] = {}
        touched: dict[tuple[str, int], None] = {}
        self._check_bytes(changed, touched)
        return self._items(changed, touched)

    def at_commit(self) -> list[Item]:
        """What changed since the last boundary, copied."""
        items = self._check_all() if self._precise() else self._check_expected()
        self._calm = not (items or self._slice or self._precise())
        for pack in self._small:
            items += pack.changes()
            self.reshaped |= pack.reshaped
        return items

    def before_install(self) -> list[Item]:
        """All is about to be learned anew: what has been left to the audit's thread is looked at now, as at an alarm."""
        return self._check_all(self._optimizers.keys())

    def changed_since_commit(self) -> set[int]:
        """Before the next update: parameters that are not what they were at the last commit, or whose state is not."""
        versions, pointers = map(_versions, self._param_tensors), map(_pointers, self._param_tensors)
        now = zip(self._tensors, versions, pointers, strict=True)
        changed = {w.uid for (w, *found), *then in zip(now, self._versions, self._pointers, strict=True) if found != then}
        for name, cached in self._state_values.items():
            values = self.values(name)
            if len(values) != len(cached) or not all(map(is_, values, cached)):
                changed |= {uid for group in self._inventory.groups[name] for uid in group}
            for w, version in zip(self._states[name], self._expected(name), strict=True):
                if w.tensor._version != version and w.owner is not None:
                    changed.add(w.owner[1])
        return changed

    def _looks_here(self, name: str) -> bool:
        """Whether the training thread compares this optimizer's state at each commit: few tensors, or an audit that is
        taken by the training thread itself."""
        return len(self._state_tensors[name]) <= LOOK_HERE_TENSORS or self._whole_slice

    def _precise(self) -> bool:
        """Whether counters are read around every update, because its effect on them is not (yet) known."""
        return self._full_left > 0 or bool(self._unstable) or None in self._deltas.values()

    def _check_all(self, alarm: Set[str] = frozenset()) -> list[Item]:
        """Compare with the last look, which was taken right after the last update.

        Not so where an `alarm` was found by the audit's thread: the last update may have gone by what had been edited before
        it. So parameters are stored with their state.
        """
        changed = self._moved_tensors(None)
        touched: dict[tuple[str, int], None] = {}
        for name in self._optimizers:
            self._check_states(name, touched)
        changed.update({uid: self._by_uid[uid] for name, uid in touched if name in alarm and uid in self._by_uid})
        self._check_bytes(changed, touched)
        return self._items(changed, touched)

    def _check_expected(self) -> list[Item]:
        """Compare with where the updates since the last commit should have brought the version counters."""
        for name, count in self._updates.items():
            if count:
                delta = self._deltas[name]
                assert delta is not None
                self._unread_updates[name] += count
                if delta.moves_tensors:
                    self._versions = _moved(self._versions, delta.tensors, count)
        changed = self._moved_tensors(self._volatile)
        touched: dict[tuple[str, int], None] = {}
        for name, optimizer in self._optimizers.items():
            before = len(touched)
            if self._looks_here(name) or len(optimizer.state) != self._state_sizes[name]:
                self._check_states(name, touched)
            if len(touched) > before and self._updates[name]:
                self._unexpected(name)
        # An edit before an update changes what the update did: parameter and state are stored together.
        for name, groups in self._inventory.groups.items():
            if self._updates[name] and (changed or touched):
                ours = {uid for group in groups for uid in group}
                hit = [uid for uid in changed if uid in ours]
                for uid in [u for n, u in touched if n == name and u in self._by_uid]:
                    changed[uid] = self._by_uid[uid]
                for uid in hit:
                    touched[(name, uid)] = None
                if hit:
                    self._unexpected(name)
            self._updates[name] = 0
        self._check_bytes(changed, touched)
        return self._items(changed, touched)

    def _unexpected(self, name: str) -> None:
        """If version counters keep being unpredictable, look at them around every update."""
        self._surprises[name] += 1
        if self._surprises[name] >= MAX_SURPRISES:
            self._unstable.add(name)

    def _moved_tensors(self, ignore: set[int] | None) -> dict[int, Watched]:
        versions = list(map(_versions, self._param_tensors))
        pointers = list(map(_pointers, self._param_tensors))
        changed: dict[int, Watched] = {}
        if versions != self._versions or pointers != self._pointers:
            if pointers != self._pointers:
                self.end_audit()  # of the last commit, when they were in the memory that they had then
            for i, w in enumerate(self._tensors):
                if pointers[i] != self._pointers[i]:
                    self.reshaped |= w.alias.shape != w.tensor.shape or w.alias.dtype != w.tensor.dtype
                    w.refresh(w.tensor)
                    changed[w.uid] = w
                elif versions[i] != self._versions[i] and not (ignore and w.uid in ignore):
                    changed[w.uid] = w
                    if ignore is not None:
                        self._volatile.add(w.uid)
                        w.volatile = True
            self._versions, self._pointers = versions, pointers
        return changed

    def _items(self, changed: dict[int, Watched], touched: dict[tuple[str, int], None]) -> list[Item]:
        items: list[Item] = [PendingTensor(w.uid, w.copy()) for w in changed.values()]
        if touched:
            items += self._state_items(touched)
        if self._everything is None or len(self._volatile) != self._num_volatile:
            self._take_slice()
        elif items:
            self._rehash_slice()
        return items

    def _check_states(self, name: str, touched: dict[tuple[str, int], None]) -> None:
        values, cached = self.values(name), self._state_values[name]
        states, expected = self._states[name], self._expected(name)
        if len(values) == len(cached) and all(map(is_, values, cached)):
            if self._read_state_versions(name) == expected:
                return
        else:
            self._read_states(name)
            self._deltas[name] = None
            now = {w.uid for w in self._states[name]}
            touched.update({(name, w.owner[1]): None for w in states if w.owner is not None and w.uid not in now})
            # Values that are no tensors (numbers, None) may have been set too.
            touched.update(dict.fromkeys(self._non_tensor_owners(name)))
        before = {w.uid: (w.tensor, version) for w, version in zip(states, expected, strict=True)}
        for w, version in zip(self._states[name], self._state_versions[name], strict=True):
            tensor, then = before.get(w.uid, (None, -1))
            if w.owner is not None and (tensor is not w.tensor or version != then):
                touched[(name, w.owner[1])] = None

    def _expected(self, name: str) -> list[int]:
        """Version counters of the state, where the updates since they were last read have brought them."""
        count, versions = self._unread_updates[name], self._state_versions[name]
        if not count:
            return versions
        delta = self._deltas[name]
        assert delta is not None
        return _moved(versions, delta.states, count)

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
        for w, low, high, expected, version in self._slice:
            if w.uid in changed or (w.owner is not None and (w.owner[0], w.owner[1]) in touched):
                continue
            if w.hash_range(low, high) != expected:
                self._found_edit(w, hidden=w.tensor._version == version)
                if w.owner is None:
                    changed[w.uid] = w
                else:
                    touched[(w.owner[0], w.owner[1])] = None

    def _found_edit(self, w: Watched, *, hidden: bool) -> None:
        """From now on this tensor is compared at every boundary."""
        if w.uid not in self._volatile:
            self._volatile.add(w.uid)
            w.volatile = True
            if hidden and self._full_left <= 0:
                self.hidden_edits.append(w.label)

    def _state_items(self, touched: Iterable[tuple[str, int]]) -> list[Item]:
        by_uid = self._inventory.live
        items: list[Item] = []
        for name, uid in touched:
            p = by_uid.get(uid)
            values = None if p is None else self._optimizers[name].state.get(p)
            frozen = None if values is None else tree.freeze(sharding.local_values(values), path=name)
            items.append(PendingState(name, uid, frozen))
            self._read_state_versions(name)
        return items

    # -- around updates -----------------------------------------------------------------------------------------------

    def after_update(self, name: str) -> None:
        """The optimizer has just moved its parameters and state, as it should."""
        if self._calm:
            self._updates[name] += 1
            return
        if self._precise():
            self._look_again(name)
        else:
            self._updates[name] += 1
        self._take_slice()

    def _look_again(self, name: str) -> None:
        """Read all counters right after an update, and learn how it moves them."""
        before = self._versions, self._state_versions[name]
        values = self.values(name)
        cached = self._state_values[name]
        same = len(values) == len(cached) and all(map(is_, values, cached))
        if same:
            self._read_state_versions(name)
        else:
            self._read_states(name)
        versions = list(map(_versions, self._param_tensors))
        pointers = list(map(_pointers, self._param_tensors))
        if pointers != self._pointers:
            for w, new, old in zip(self._tensors, pointers, self._pointers, strict=True):
                if new != old:
                    w.refresh(w.tensor)
        self._versions, self._pointers = versions, pointers
        delta = None
        if same:
            delta = Delta(
                [a - b for a, b in zip(versions, before[0], strict=True)],
                [a - b for a, b in zip(self._state_versions[name], before[1], strict=True)],
            )
        if self._full_left == 1 and (delta is None or delta != self._deltas[name]):
            self._unstable.add(name)
        self._deltas[name] = delta

    def after_commit(self) -> None:
        if self._full_left > 0:
            self._full_left -= 1

    def look_closely(self) -> None:
        """Compare everything for some steps again."""
        self._calm = False
        self._full_left = FULL_STEPS
        for name in self._optimizers:
            self._deltas[name], self._updates[name] = None, 0
            self._look_again(name)

    def _take_slice(self) -> None:
        """Hash what the next boundary compares."""
        if self._everything is None:
            tensors, states = self.targets()
            self._everything = [w for w in tensors + states if w.alias.numel()]
            self._total_bytes = sum(w.alias.numel() * w.itemsize for w in self._everything)
            self._turn = (0, 0)
        self._whole_slice = self._full_left > 0 or self._total_bytes <= SLICE_BYTES
        self._num_volatile = len(self._volatile)
        ranges: list[tuple[Watched, int, int]] = []
        if self._whole_slice or self._volatile:
            for w in self._everything:
                if self._whole_slice or w.volatile:
                    ranges += w.piece_ranges()
        if not self._whole_slice and self._total_bytes <= SLICED_UP_TO_BYTES:
            ranges += self._rotate()
        self._slice = [(w, low, high, w.hash_range(low, high), w.tensor._version) for w, low, high in ranges]

    def _rotate(self) -> list[tuple[Watched, int, int]]:
        """The next SLICE_BYTES of everything, going round."""
        assert self._everything is not None
        index, offset = self._turn
        budget = SLICE_BYTES
        ranges: list[tuple[Watched, int, int]] = []
        while budget > 0 and len(ranges) < SLICE_RANGES:
            w = self._everything[index]
            high = min(offset + budget, w.alias.numel() * w.itemsize)
            if not w.volatile:
                ranges.append((w, offset, high))
            budget -= max(high - offset, 1024)
            offset = high
            if offset >= w.alias.numel() * w.itemsize:
                index, offset = (index + 1) % len(self._everything), 0
        self._turn = (index, offset)
        return ranges

    def _rehash_slice(self) -> None:
        self._slice = [
            (w, low, high, w.hash_range(low, high), w.tensor._version) for w, low, high, _, _ in self._slice
        ]

    def slice_sums(self) -> list[tuple[int, int, int]]:
        """(uid, piece, hash) of whole pieces, as they hold right after a check."""
        return [
            (w.uid, low // w.piece_bytes, value)
            for w, low, high, value, _ in self._slice
            if (self._whole_slice or w.volatile) and w.is_piece(low, high)
        ]


class _BufferPack:
    """Small buffers of one dtype: compared and copied together, with one concatenation."""

    def __init__(self, items: list[tuple[int, torch.Tensor]]) -> None:
        self.uids = [uid for uid, _ in items]
        self.tensors = [t for _, t in items]
        self.shapes = [tuple(t.shape) for t in self.tensors]
        self.note()

    def _views(self) -> None:
        self._pointers = list(map(_pointers, self.tensors))
        self._sizes = list(map(torch.Tensor.numel, self.tensors))
        self._flat = [t.detach().reshape(-1) for t in self.tensors]

    def note(self) -> None:
        self.reshaped = False
        self._views()
        self.last = torch.cat(self._flat)

    def changes(self) -> list[Item]:
        sizes = list(map(torch.Tensor.numel, self.tensors))
        if sizes != self._sizes or list(map(_pointers, self.tensors)) != self._pointers:
            if [tuple(t.shape) for t in self.tensors] != self.shapes or {t.dtype for t in self.tensors} != {self.last.dtype}:
                self.reshaped = True
                return [PendingTensor(u, t.detach().clone()) for u, t in zip(self.uids, self.tensors, strict=True)]
            self._views()
        now = torch.cat(self._flat)
        if now.numel() == 0 or view_bytes(plain(now)).tobytes() == view_bytes(plain(self.last)).tobytes():
            return []
        self.last = now
        return [PendingTensors(self.uids, self.shapes, now)]
