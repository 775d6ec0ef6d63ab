"""Which of several shadows keeps which atoms, and what of a frame each of them needs. Pure.

A parameter, its gradient and its optimizer state go together. An atom is never cut.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from everstep import tree
from everstep.atoms import PACK_BELOW_BYTES, SMALL_BUFFER_BYTES, Atom, Layout
from everstep.format.records import HEADER_BYTES
from everstep.frame import Op, SetGrad, SetGroups, SetLayout, SetState, SetTensor, TensorRef, Update
from everstep.memory import dtype_named
from everstep.restore.parts import part_of_op
from everstep.store.segments import StoredFrame

Share = frozenset[int]
"""Uids of parameters and buffers."""


def share_out(layout: Layout, num: int, together: Iterable[Collection[int]] = ()) -> list[Share]:
    """The layout's atoms in `num` shares of about equal bytes; the same for the same arguments, always.

    Atoms in one of `together` get one owner. So do the small ones, which share records, unless they are more than a share.
    """
    return _assign([set() for _ in range(num)], layout, together) or [frozenset()] * num


def extended(shares: Sequence[Share], layout: Layout, together: Iterable[Collection[int]] = ()) -> list[Share] | None:
    """The shares with owners for atoms that are new in this layout; others keep theirs, also if they are gone.

    None if that cannot be: atoms that must be together from here on are not.
    """
    return _assign([set(share) for share in shares], layout, together)


def _assign(shares: list[set[int]], layout: Layout, together: Iterable[Collection[int]]) -> list[Share] | None:
    sizes = {atom.uid: _num_bytes(atom) for atom in layout.atoms}
    owner = {uid: index for index, share in enumerate(shares) for uid in share}
    loads = [sum(sizes.get(uid, 0) for uid in share) for share in shares]
    for item in _items(layout, sizes, len(shares), together):
        owners = {owner[uid] for uid in item if uid in owner}
        if len(owners) > 1:
            if _must_be_together(item, together):
                return None
            owners = set()
        new = [uid for uid in item if uid not in owner]
        index = owners.pop() if owners else loads.index(min(loads))
        shares[index].update(new)
        loads[index] += sum(sizes[uid] for uid in new)
    return [frozenset(share) for share in shares]


def _must_be_together(item: Collection[int], together: Iterable[Collection[int]]) -> bool:
    return any(len(set(item) & set(group)) > 1 for group in together)


def _items(
    layout: Layout, sizes: dict[int, int], num: int, together: Iterable[Collection[int]]
) -> list[list[int]]:
    """Atoms that get one owner, largest first: then the loads come out nearly equal."""
    left = dict(sizes)
    items = []
    for group in together:
        item = sorted(uid for uid in set(group) if uid in left)
        items.append(item)
        for uid in item:
            del left[uid]
    small = sorted(atom.uid for atom in layout.atoms if atom.uid in left and _is_small(atom))
    if sum(left[uid] for uid in small) * num <= sum(sizes.values()):
        items.append(small)
        for uid in small:
            del left[uid]
    items += [[uid] for uid in left]
    return sorted((i for i in items if i), key=lambda item: (-sum(sizes[uid] for uid in item), item))


def _is_small(atom: Atom) -> bool:
    """Whether it shares records with others."""
    return _num_bytes(atom) < (PACK_BELOW_BYTES if atom.role == "param" else SMALL_BUFFER_BYTES + 1)


def _num_bytes(atom: Atom) -> int:
    return atom.numel * dtype_named(atom.dtype).itemsize


def coupled(layout: Layout, groups: Mapping[str, Iterable[Iterable[int]]]) -> list[set[int]]:
    """Parameters that must be together: those of optimizers that are not torch's, whose updates may look at all of them."""
    classes = {spec.name: spec.cls for spec in layout.optimizers}
    found: list[set[int]] = []
    for name, params in groups.items():
        if classes.get(name, "").startswith("torch.optim."):
            continue
        item = {uid for uids in params for uid in uids}
        for other in [o for o in found if o & item]:
            item |= other
            found.remove(other)
        found.append(item)
    return found


class Partition:
    """The shares of a run's shadows, as they grow with its layout. Any thread."""

    def __init__(self, shares: Sequence[Share], find_layout: Callable[[str], Layout]) -> None:
        self._shares = list(shares)
        self._find_layout = find_layout
        self._lock = threading.Lock()
        self.version = 0
        """Grows when shares do."""

    def __len__(self) -> int:
        return len(self._shares)

    def of(self, index: int) -> Share:
        return self._shares[index]

    def see(self, ops: Sequence[Op]) -> None:
        """Operations of a frame that is about to be sent: atoms that are new in it get an owner."""
        layouts = [op.layout for op in ops if isinstance(op, SetLayout)]
        groups = {op.optimizer: op.params for op in ops if isinstance(op, SetGroups)}
        for layout_id in layouts:
            layout = self._find_layout(layout_id)
            together = coupled(layout, groups)
            with self._lock:
                shares = extended(self._shares, layout, together)
                if shares is None:  # every shadow will need a base
                    shares = share_out(layout, len(self._shares), together)
                if shares != self._shares:
                    self._shares = shares
                    self.version += 1


class PartFrame(StoredFrame):
    """A frame of which only what one share needs is there, or is looked at. Its footer and its cursor are whole."""

    share: Share = frozenset()

    def of(self, share: Share) -> PartFrame:
        self.share = share
        return self

    @property
    def ops(self) -> tuple[Op, ...]:
        """Those on atoms of the share. Groups are whole: the parts of a state must agree on them."""
        ops = self.footer.ops
        return tuple(p for op in ops for p in ([op] if isinstance(op, SetGroups) else part_of_op(op, self.share)))

    def ordinals(self) -> list[int]:
        """The records that the share needs: those of its atoms, and the cursor."""
        found = {len(self.headers) - 1}
        for op in self.ops:
            for ref in _refs(op):
                found.update(range(ref.first, ref.first + ref.num_pieces))
        return sorted(found)

    def ranges(self) -> list[tuple[int, int]]:
        """Where these are in the segment, and the footer with what pads it, and where the frame begins (so that whoever
        receives it again after damage knows that this is it); those that touch are one."""
        found: list[tuple[int, int]] = []
        begin, footer = self.entry.offset, self.entry.footer_offset
        spans = [(self._offsets[i], self._offsets[i] + self.headers[i].padded_bytes) for i in self.ordinals()]
        for start, stop in ((begin, begin + HEADER_BYTES), *spans, (footer, self.entry.end_offset)):
            if found and found[-1][1] >= start:
                start = found.pop()[0]
            found.append((start, stop))
        return found

    def check_payloads(self) -> None:
        self.check_records(self.ordinals())


def _refs(op: Op) -> list[TensorRef]:
    """Where the tensors of an operation are."""
    if isinstance(op, Update):
        if op.skipped:
            return []
        dense = [g.dense for g in op.grads if g.dense is not None]
        sparse = [g.sparse for g in op.grads if g.sparse is not None]
        return [*dense, *(s.indices for s in sparse), *(s.values for s in sparse)]
    if isinstance(op, (SetTensor, SetGrad)):
        return [op.ref]
    if isinstance(op, SetState) and op.state is not None:
        found: list[TensorRef] = []

        def note(plain: list[int]) -> torch.Tensor:
            found.append(TensorRef(plain[0], (), plain[2], plain[3]))
            return torch.empty(0)

        tree.unpack(op.state, note)
        return found
    return []
