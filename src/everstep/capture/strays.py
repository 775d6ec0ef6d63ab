"""Gradients of parameters that are in no optimizer: backward adds to them, and no optimizer's zero_grad() clears them.

They are state all the same. Who clips by the norm of all gradients of the model, or gives such a parameter to an optimizer
later, trains with what has been added up.
"""

from __future__ import annotations

import torch

from everstep import sharding
from everstep.capture.pending import Item, PendingCarry, PendingGrad
from everstep.memory import view_as_bits
from everstep.naming import Inventory


class Strays:
    """Those of a model's parameters that no optimizer has, and what was told of their gradients."""

    def __init__(self, inventory: Inventory) -> None:
        self.follow(inventory)
        self._told = {uid: grad._version for uid, grad in self._grads()}
        """By uid: the version of a gradient that S(step) has."""

    def follow(self, inventory: Inventory) -> None:
        """Groups or parameters have changed. One that is frozen gets no gradients, but may have one."""
        grouped = {uid for groups in inventory.groups.values() for group in groups for uid in group}
        others = {a.uid: inventory.live[a.uid] for a in inventory.layout.atoms if a.role == "param" and a.uid not in grouped}
        self._params = {uid: p for uid, p in others.items() if p.requires_grad or p.grad is not None}

    def _grads(self) -> list[tuple[int, torch.Tensor]]:
        found = [(uid, sharding.local_grad(p)) for uid, p in self._params.items()]
        return [(uid, grad) for uid, grad in found if grad is not None and not grad.is_sparse]

    def carried(self) -> list[Item]:
        """At a commit, before what taps tell: gradients that the next backward may add to, and which of them are gone."""
        if not self._params and not self._told:
            return []
        now = self._grads()
        items: list[Item] = []
        zeros = [uid for uid, grad in now if not bool(torch.count_nonzero(view_as_bits(grad)))]
        if zeros:
            items.append(PendingCarry("zero", zeros))
        items += [PendingGrad(uid, grad.detach().clone()) for uid, grad in now if uid not in zeros]
        before, self._told = self._told, {uid: grad._version for uid, grad in now}
        gone = [uid for uid in before if uid not in self._told]
        if gone:
            items.append(PendingCarry("none", gone))
        return items

    def carried_now(self) -> list[tuple[int, torch.Tensor]]:
        """(uid, gradient) of those that the last carried() has told of."""
        return [(uid, grad) for uid, grad in self._grads() if uid in self._told]

    def carry_is_intact(self) -> bool:
        """Whether these are still there, as they were."""
        return {uid: grad._version for uid, grad in self.carried_now()} == self._told
