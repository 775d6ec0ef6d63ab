"""Gradients that stay on their parameters over a commit: the next backward may add to them, so they are state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from everstep.capture.held import Held
from everstep.capture.pending import Item, PendingCarry, PendingGrad
from everstep.memory import same_bits, view_as_bits


class Carry:
    """Of one optimizer's parameters: what was told of their gradients at the last commit. Training thread."""

    def __init__(self) -> None:
        self.left = False
        """Gradients of the last update were on their parameters at the last commit, and it was not told: they seemed to be
        about to be dropped."""
        self._at_commit: list[torch.Tensor | None] = []
        self._stay = True
        """They were still there at the update after the last commit that looked, or that is not known yet."""
        self._num_seen = 0
        self._kinds: dict[int, str] = {}
        self._versions: dict[int, int] = {}

    def install(self, params: Sequence[Any], uids: Sequence[int], grad_of: Callable[[Any], Any]) -> None:
        """These are the parameters now; what becomes of their gradients is to be learned again."""
        self._params, self._uids, self._grad_of = params, uids, grad_of
        self._at_commit, self._num_seen, self._stay, self.left = [], 0, True, False

    def begin(self) -> None:
        """S(step) has the gradients that are there now: should they go before the next commit, that is told."""
        for uid, g in zip(self._uids, map(self._grad_of, self._params), strict=True):
            if g is not None and not g.is_sparse:
                self._kinds[uid], self._versions[uid] = "given", g._version

    @property
    def is_learning(self) -> bool:
        """Whether the next update tells what has become of the gradients at the last commit."""
        return bool(self._at_commit)

    def learn(self) -> None:
        """An update begins: were the gradients of the last commit still there?"""
        if self._at_commit:
            self._stay = any(
                g is not None and is_in(g, self._grad_of(p)) for p, g in zip(self._params, self._at_commit, strict=True)
            )
            self._num_seen += 1
            self._at_commit = []

    @property
    def is_rare(self) -> bool:
        """Whether gradients that are on parameters at a commit can be taken for ones that will be dropped."""
        return not self._stay and self._num_seen >= 2

    def late(self, held: Held) -> None:
        """The next update comes and its predecessor's gradients are still there: they belong to the last commit's state."""
        if self.left and held.seal is not None and held.attached():
            left = self._still_there(held)
            # If they have been added to by now, what they were at the commit is no longer known.
            kind = "consumed" if held.untouched() else "lost"
            held.seal.also = [PendingCarry(kind, list(left))]
            self._kinds |= dict.fromkeys(left, kind)  # a base may have others, which are to be told when they go
            if kind == "consumed":
                self._versions |= {uid: version for uid, (_, version) in left.items()}
            self._stay = True
        self.left = False

    def tell_left(self, held: Held | None) -> None:
        """A base of the last commit is taken: what seemed to be about to be dropped is in it, if it is still there.

        Should it be added to, a resume from that base goes on with it; should it go, the next commit says so.
        """
        if self.left and held is not None:
            for uid, (grad, version) in self._still_there(held).items():
                if grad._version == version:
                    self._kinds[uid], self._versions[uid] = "consumed", version
                else:
                    self._kinds[uid] = "lost"

    def _still_there(self, held: Held) -> dict[int, tuple[torch.Tensor, int]]:
        """By uid, the dense gradients of an update that are on their parameters, and their versions at it."""
        uid_of = {id(p): u for p, u in zip(self._params, self._uids, strict=True)}
        return {
            uid_of[id(p)]: (g, version)
            for p, g, version in zip(held.params, held.grads, held.versions, strict=True)
            if self._grad_of(p) is g and g is not None and not g.is_sparse
        }

    def gone(self) -> list[Item]:
        """At a commit: there are none any more."""
        if not self._kinds:
            return []
        gone = PendingCarry("none", list(self._kinds))
        self._kinds, self._versions = {}, {}
        return [gone]

    def look(self, held: Held | None, *, is_updated: bool, steps_write: bool) -> list[Item]:
        """At a commit: which there are. `is_updated`: this frame has an update. `steps_write`: into gradients."""
        consumed = {} if held is None else {id(g): v for g, v in zip(held.grads, held.versions, strict=True)}
        told = {id(g) for uid, g in zip(self._uids, self._at_commit, strict=False) if uid in self._kinds}
        self._at_commit = list(map(self._grad_of, self._params))
        kinds: dict[int, str] = {}
        versions: dict[int, int] = {}
        items: list[Item] = []
        for uid, g in zip(self._uids, self._at_commit, strict=True):
            if g is None:
                continue
            if g.is_sparse:
                if not self.is_rare:  # they are not stored; who resumes here is told, if it may matter
                    kinds[uid] = "lost"
                continue
            versions[uid] = g._version
            # In a frame without an update of this optimizer there is none to refer to: what an earlier frame told holds.
            is_said = is_updated or (id(g) in told and self._kinds.get(uid) == "consumed")
            if is_said and consumed.get(id(g)) == g._version and not steps_write:
                kinds[uid] = "consumed"
            elif not bool(torch.count_nonzero(view_as_bits(g))):
                kinds[uid] = "zero"
            else:
                kinds[uid] = "given"
                items.append(PendingGrad(uid, g.detach().clone()))
        gone = [u for u in self._kinds if u not in kinds]
        for kind in ("consumed", "zero", "lost"):
            uids = [u for u, k in kinds.items() if k == kind]
            if uids and (is_updated or kind != "consumed"):
                items.append(PendingCarry(kind, uids))
        if gone:
            items.append(PendingCarry("none", gone))
        self._kinds, self._versions = kinds, versions
        return items

    def is_intact(self) -> bool:
        """Whether the gradients that were told of are still there, as they were."""
        now = self._by_uid(self._versions)
        return all(
            g is not None and g._version == version
            for g, version in zip(now, self._versions.values(), strict=True)
        )

    def now(self) -> list[tuple[int, str, torch.Tensor]]:
        """(uid, kind, gradient) as told at the last commit."""
        found = zip(self._kinds.items(), self._by_uid(self._kinds), strict=True)
        return [(uid, kind, g) for (uid, kind), g in found if g is not None]

    def _by_uid(self, uids: dict[int, Any]) -> list[torch.Tensor | None]:
        """The gradients that these parameters have now; None too for those that have left the optimizer."""
        if not uids:
            return []
        by_uid = dict(zip(self._uids, self._params, strict=True))
        return [self._grad_of(by_uid[uid]) if uid in by_uid else None for uid in uids]


def is_in(before: torch.Tensor, now: torch.Tensor | None) -> bool:
    """Whether a gradient is that of before, or what was added to it: sparse ones are put one behind the other then, in new
    memory."""
    if now is None or now is before:
        return now is before
    if not (before.is_sparse and now.is_sparse) or now._nnz() < before._nnz():
        return False
    if now.is_coalesced():  # merged: whether it is in there could only be guessed
        return True
    count = before._nnz()
    return torch.equal(now._indices()[:, :count], before._indices()) and same_bits(
        now._values()[:count].contiguous(), before._values().contiguous()
    )
