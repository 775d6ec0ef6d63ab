"""Boxes and shares: whatever the partitions, joining gives the global tensor, and no element is read twice."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.boxes import Box, Share, composed, cuts, filled, overlap, slices, whole, without

Draw = st.DrawFn


@st.composite
def shapes(draw: Draw) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))


@st.composite
def partitions(draw: Draw, shape: tuple[int, ...]) -> list[Share]:
    """Shares that together have every element at least once: cut, fused, padded, replicated, uneven, empty."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(boxes) - 1))
        box = boxes.pop(at)
        if not shape:
            boxes.append(box)
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.size[dim]))
        low, high = list(box.size), list(box.size)
        low[dim], high[dim] = cut, box.size[dim] - cut
        offset = list(box.offset)
        offset[dim] += cut
        boxes += [Box(box.offset, tuple(low)), Box(tuple(offset), tuple(high))]
    # Boxes of one rank one after the other along a dimension (fused) if they fit together, else a share for each.
    shares = []
    while boxes:
        group = [boxes.pop()]
        if shape and draw(st.booleans()):
            dim = draw(st.integers(0, len(shape) - 1))
            group += [b for b in boxes if _others(b.size, dim) == _others(group[0].size, dim)]
            boxes = [b for b in boxes if b not in group]
            shares.append(_stacked(group, dim, draw(st.integers(0, 2))))
        else:
            shares.append(filled(group[0]))
    shares += draw(st.lists(st.sampled_from(shares), max_size=2))
    return draw(st.permutations(shares))


def _others(size: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return size[:dim] + size[dim + 1 :]


def _stacked(boxes: list[Box], dim: int, padding: int) -> Share:
    at, place = [], 0
    for box in boxes:
        at.append(tuple(place if d == dim else 0 for d in range(len(box.size))))
        place += box.size[dim]
    size = tuple(place + padding if d == dim else n for d, n in enumerate(boxes[0].size))
    return Share(tuple(boxes), tuple(at), size)


def memory_of(share: Share, full: torch.Tensor) -> torch.Tensor:
    """What a rank with this share has, with -1 where there is padding."""
    memory = torch.full(share.size, -1)
    for box, at in zip(share.boxes, share.at, strict=True):
        memory[slices(Box(at, box.size))] = full[slices(box)]
    return memory


@st.composite
def resharding(draw: Draw) -> tuple[tuple[int, ...], list[Share], list[Share]]:
    shape = draw(shapes())
    return shape, draw(partitions(shape)), draw(partitions(shape))


@given(resharding())
@settings(max_examples=300, deadline=None)
def test_joining_gives_the_global_tensor_and_every_element_comes_from_one_source(
    case: tuple[tuple[int, ...], list[Share], list[Share]],
) -> None:
    shape, sources, targets = case
    full = torch.arange(prod(shape)).reshape(shape)
    memories = [memory_of(share, full) for share in sources]
    for target in targets:
        found, missing = cuts(target, list(enumerate(sources)))
        assert not missing
        joined = torch.full(target.size, -1)
        times = torch.zeros(target.size, dtype=torch.int64)
        for rank, parts in found.items():
            assert parts
            for cut in parts:
                joined[slices(cut.target)] = memories[rank][slices(cut.source)]
                times[slices(cut.target)] += 1
        assert torch.equal(joined, memory_of(target, full))
        assert torch.equal(times, (joined >= 0).long())


@given(resharding(), st.data())
@settings(max_examples=100, deadline=None)
def test_what_no_source_has_is_told(case: tuple[tuple[int, ...], list[Share], list[Share]], data: st.DataObject) -> None:
    shape, sources, targets = case
    gone = data.draw(st.integers(0, len(sources) - 1))
    left = [(r, share) for r, share in enumerate(sources) if r != gone]
    have = torch.zeros(shape, dtype=torch.bool)
    for _, share in left:
        for box in share.boxes:
            have[slices(box)] = True
    for target in targets:
        missing = torch.zeros(shape, dtype=torch.bool)
        for box in cuts(target, left)[1]:
            assert not missing[slices(box)].any()
            missing[slices(box)] = True
        wanted = torch.zeros(shape, dtype=torch.bool)
        for box in target.boxes:
            wanted[slices(box)] = True
        assert torch.equal(missing, wanted & ~have)


@given(st.data(), shapes())
@settings(max_examples=100, deadline=None)
def test_a_share_of_a_share_has_what_both_say(data: st.DataObject, shape: tuple[int, ...]) -> None:
    full = torch.arange(prod(shape)).reshape(shape)
    outer = data.draw(st.sampled_from(data.draw(partitions(shape))))
    inner = data.draw(st.sampled_from(data.draw(partitions(outer.size))))
    both = composed(outer, inner)
    here = torch.full(inner.size, -1)
    between = memory_of(outer, full)
    for box, at in zip(inner.boxes, inner.at, strict=True):
        here[slices(Box(at, box.size))] = between[slices(box)]
    assert torch.equal(memory_of(both, full), here)


@given(st.data(), shapes())
def test_a_box_without_a_part_of_it_is_the_rest(data: st.DataObject, shape: tuple[int, ...]) -> None:
    shares = data.draw(partitions(shape))
    part = data.draw(st.sampled_from(shares)).boxes[0]
    if not part.numel:
        return
    times = torch.zeros(shape, dtype=torch.int64)
    times[slices(part)] += 1
    for box in without(whole(shape), part):
        assert box.numel
        times[slices(box)] += 1
    assert bool((times == 1).all())


def test_boxes_that_only_touch_have_nothing_in_common() -> None:
    assert overlap(Box((0, 0), (2, 3)), Box((2, 0), (2, 3))) is None
    assert overlap(Box((0, 0), (3, 3)), Box((2, 1), (2, 3))) == Box((2, 1), (1, 2))
    assert overlap(Box((0,), (0,)), Box((0,), (3,))) is None
