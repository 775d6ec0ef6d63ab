"""Parts of global tensors: boxes, and the shares of them that processes have. Pure.

A *box* is a cuboid of a global tensor. A *share* is what one process has of it: boxes, and where in the process's memory
each begins. Nearly always that is one box that fills the memory; fused sub-parameters make several, padding makes memory
that belongs to no box.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import msgspec


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tensor: offset and size in each dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.size)


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def overlap(a: Box, b: Box) -> Box | None:
    """The elements that both have; None if there are none."""
    low = tuple(map(max, a.offset, b.offset))
    high = tuple(min(o + s, p + t) for o, s, p, t in zip(a.offset, a.size, b.offset, b.size, strict=True))
    if any(h <= n for n, h in zip(low, high, strict=True)):
        return None
    return Box(low, tuple(h - n for n, h in zip(low, high, strict=True)))


def without(box: Box, part: Box) -> Iterator[Box]:
    """Boxes that together are `box` without `part`, which lies in it."""
    offset, size = list(box.offset), list(box.size)
    for dim, (low, length) in enumerate(zip(part.offset, part.size, strict=True)):
        end = offset[dim] + size[dim]
        for start, stop in ((offset[dim], low), (low + length, end)):
            if stop > start:
                yield Box((*offset[:dim], start, *offset[dim + 1 :]), (*size[:dim], stop - start, *size[dim + 1 :]))
        offset[dim], size[dim] = low, length


def moved(box: Box, origin: Sequence[int], to: Sequence[int]) -> Box:
    """The box as seen from where `origin` is `to`."""
    return Box(tuple(o - a + b for o, a, b in zip(box.offset, origin, to, strict=True)), box.size)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))


def span(box: Box, size: Sequence[int]) -> tuple[int, int]:
    """In row-major memory of this size, the first element of a box and the one after its last."""
    first = last = 0
    for offset, length, extent in zip(box.offset, box.size, size, strict=True):
        first, last = first * extent + offset, last * extent + offset + length - 1
    return first, last + 1


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What one process has of a global tensor."""

    boxes: tuple[Box, ...]
    """Of the global tensor; no element twice. At least one, which may be empty."""
    at: tuple[tuple[int, ...], ...]
    """Where each begins in the process's memory."""
    size: tuple[int, ...]
    """The shape of that memory. What no box is in, is padding."""

    @property
    def numel(self) -> int:
        """Elements of the global tensor that it has."""
        return sum(box.numel for box in self.boxes)

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Whether the memory is simply the global tensor of this shape."""
        return self.size == tuple(shape) and self.numel == prod(shape) and all(
            box.offset == at for box, at in zip(self.boxes, self.at, strict=True)
        )  # fmt: skip


def filled(box: Box) -> Share:
    """One box that is all of the memory."""
    return Share((box,), ((0,) * len(box.offset),), box.size)


def composed(outer: Share, inner: Share) -> Share:
    """`outer` says what of a global tensor a tensor has, `inner` what of that tensor is here: so what is here."""
    boxes, at = [], []
    for here, place in zip(inner.boxes, inner.at, strict=True):
        for box, origin in zip(outer.boxes, outer.at, strict=True):
            common = overlap(here, Box(origin, box.size))
            if common is not None:
                boxes.append(moved(common, origin, box.offset))
                at.append(moved(common, here.offset, place).offset)
    if not boxes:
        nothing = (0,) * len(inner.size)
        boxes, at = [Box(nothing, nothing)], [nothing]
    return Share(tuple(boxes), tuple(at), inner.size)


class Cut(msgspec.Struct, frozen=True):
    """Elements that are copied: where they are in the source's memory, and where they go in the target's."""

    source: Box
    target: Box


def cuts(wanted: Share, sources: Iterable[tuple[int, Share]]) -> tuple[dict[int, list[Cut]], list[Box]]:
    """From which source each wanted element is taken: exactly one, the first that has it.

    Returns the cuts by the sources' keys, and what no source has of the global tensor.
    """
    found: dict[int, list[Cut]] = {}
    missing = [(box, box, at) for box, at in zip(wanted.boxes, wanted.at, strict=True) if box.numel]
    for key, share in sources:
        for theirs, origin in zip(share.boxes, share.at, strict=True):
            left = []
            for rest, box, at in missing:
                common = overlap(rest, theirs)
                if common is None:
                    left.append((rest, box, at))
                    continue
                cut = Cut(moved(common, theirs.offset, origin), moved(common, box.offset, at))
                found.setdefault(key, []).append(cut)
                left += [(part, box, at) for part in without(rest, common)]
            missing = left
    return found, [rest for rest, _, _ in missing]
