"""One look at a commit that tells whether the step was like all others.

After a step the caches are full of tensors, and every function that is called costs more than what it does (decision 0008).
So what tap, watch and structure ask at a commit is asked here once more, all of it in one function. If it holds, they have
nothing to tell; if anything is out of the ordinary, they are asked themselves, from the beginning.
"""

from __future__ import annotations

from operator import add, attrgetter, is_

import torch

from everstep import native
from everstep.capture import tap as taps
from everstep.capture import watch as watches
from everstep.capture.strays import Strays
from everstep.capture.structure import Structure
from everstep.capture.tap import Tap
from everstep.capture.watch import Watch

_versions, _requires_grad = attrgetter("_version"), attrgetter("requires_grad")
_pointers = torch.Tensor.data_ptr


class Usual:
    """The usual step of a model with one optimizer and many tensors, without small buffers. Training thread."""

    def __init__(self, tap: Tap, watch: Watch, structure: Structure, strays: Strays) -> None:
        self._tap, self._watch, self._structure, self._strays = tap, watch, structure, strays
        self._name = tap.name
        found = native.part()
        self._native = None if found is None else found.look
        self._looked_at: list[torch.Tensor] = []
        self._seen = b""
        self._lists: tuple[object, ...] = ()
        """What was compared, tensor by tensor, when `_seen` was taken."""

    def holds(self) -> bool:
        """Whether there was one update since the last commit, taken by reference, its gradients are gone, and neither groups
        nor tensors nor modules have been changed. Then that update counts as looked at."""
        tap, watch, structure, name = self._tap, self._watch, self._structure, self._name
        held, carry, params = tap._held, tap.carry, tap.params
        if not (tap._usual and held is not None and held.seal is not None and held.seal.dropped.is_set()):
            return False
        if tap._depth or tap.results_due or tap._is_wrapped or tap.updates != tap._told_updates + 1:
            return False
        if carry._kinds or carry.left or carry._stay or carry._num_seen < 2:
            return False
        if len(params) <= taps.LOOK_AT_ONCE or params[0].grad is not None or params[-1].grad is not None:
            return False
        delta, optimizer = watch._deltas[name], tap.optimizer
        if not watch._calm or watch._small or watch.reshaped or watch.hidden_edits or watch._updates[name] != 1:
            return False
        if delta is None or watch._whole_slice or len(watch._state_tensors[name]) <= watches.LOOK_HERE_TENSORS:
            return False
        if len(optimizer.state) != watch._state_sizes[name] or self._strays._params or self._strays._told:
            return False

        if not tap.groups_are_as_recorded(params=True):
            return False
        if structure._registrations.seen or not self._tensors_are_as_expected(delta):
            return False
        holders, keys, hung, containers, lengths = next(structure._parts)
        if not all(map(is_, map(dict.get, holders, keys), hung)) or list(map(len, containers)) != lengths:
            structure._registrations.seen = True  # this part's turn is over: all of them are looked at
            return False
        watch._updates[name] = 0
        watch._unread_updates[name] += 1
        return True

    def _tensors_are_as_expected(self, delta: watches.Delta) -> bool:
        """Whether version counters are where one update has brought them, and pointers and flags are what they were."""
        watch, structure, lists = self._watch, self._structure, self._lists
        if lists and not delta.moves_tensors and all(map(is_, lists, self._compared())) and self._look() == self._seen:
            return True
        tensors, expected = watch._param_tensors, watch._versions
        versions = list(map(_versions, tensors))
        if versions != (list(map(add, expected, delta.tensors)) if delta.moves_tensors else expected):
            return False
        if list(map(_pointers, tensors)) != watch._pointers:
            return False
        if list(map(_requires_grad, structure._flags_of)) != structure._flags:
            return False
        if delta.moves_tensors:
            watch._versions = versions
        elif self._native is not None:
            self._remember()
        return True

    def _compared(self) -> tuple[object, ...]:
        """These lists are never written to: another look makes others."""
        watch, structure = self._watch, self._structure
        return watch._param_tensors, watch._versions, watch._pointers, structure._flags_of, structure._flags

    def _remember(self) -> None:
        """All is as expected: so it is as long as the same look at it sees the same."""
        self._looked_at = list({id(t): t for t in (*self._watch._param_tensors, *self._structure._flags_of)}.values())
        self._seen = self._look()
        self._lists = self._compared() if self._seen else ()

    def _look(self) -> bytes:
        """Empty where that cannot be done: some have no memory, or no counter. Then it is not tried again."""
        if self._native is None:
            return b""
        try:
            return self._native(self._looked_at)
        except RuntimeError:
            self._native = None
            return b""
