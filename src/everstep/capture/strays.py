"""Gradients of parameters that are in no optimizer: backward adds to them, and no optimizer's zero_grad() clears them.

They are state all the same. Who clips by the norm of all gradients of the model, or gives such a parameter to an optimizer
later, trains with what has been added up.
"""

from __future__ import annotations

import warnings

import torch

from everstep import sharding
from everstep.capture.pending import Item, PendingCarry, PendingGrad
from everstep.errors import CostWarning
from everstep.memory import view_as_bits
from everstep.naming import Inventory

WORTH_A_WORD_BYTES = 1 << 20
"""Copying more than that at a commit is told, once."""


class Strays:
    """Those of a model's parameters that no optimizer has, and what was told of their gradients."""

    def __init__(self, inventory: Inventory) -> None:
        self.follow(inventory)
        self._told = {uid: (grad, grad._version) for uid, grad in self._grads()}
        """By uid: a gradient that S(step) has, and its version counter then."""
        self._warned = False

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
        before, self._told = self._told, {uid: (grad, grad._version) for uid, grad in self._grads()}
        changed = [(uid, grad) for uid, (grad, _) in self._told.items() if not _is_same(before.get(uid), grad)]
        items: list[Item] = []
        zeros = [uid for uid, grad in changed if not bool(torch.count_nonzero(view_as_bits(grad)))]
        if zeros:
            items.append(PendingCarry("zero", zeros))
        given = [PendingGrad(uid, grad.detach().clone()) for uid, grad in changed if uid not in zeros]
        items += given
        self._warn_of([item.tensor for item in given])
        gone = [uid for uid in before if uid not in self._told]
        if gone:
            items.append(PendingCarry("none", gone))
        return items

    def _warn_of(self, copies: list[torch.Tensor]) -> None:
        num_bytes = sum(copy.numel() * copy.element_size() for copy in copies)
        if num_bytes <= WORTH_A_WORD_BYTES or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{len(copies)} parameters that are in no optimizer have gradients, which nobody clears: they are state, so "
            f"{num_bytes / 1e6:.0f} MB are copied and stored at every step for them. Freeze them by requires_grad_(False) "
            "if they are not trained, else clear them by model.zero_grad()",
            CostWarning,
            stacklevel=5,
        )

    def carried_now(self) -> list[tuple[int, torch.Tensor]]:
        """(uid, gradient) of those that the last carried() has told of."""
        return [(uid, grad) for uid, grad in self._grads() if uid in self._told]

    def carry_is_intact(self) -> bool:
        """Whether these are still there, as they were."""
        now = dict(self.carried_now())
        return all(uid in now and _is_same(told, now[uid]) for uid, told in self._told.items())


def _is_same(told: tuple[torch.Tensor, int] | None, grad: torch.Tensor) -> bool:
    return told is not None and told[0] is grad and told[1] == grad._version
