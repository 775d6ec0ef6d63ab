"""Whose part is read: for shards, for what is averaged, for what is each rank's own, for padding."""

from __future__ import annotations

from everstep.boxes import Box, Cut, Share, filled, whole
from everstep.restore.reshard import Reader, Reading, plan_atom

HALVES = {0: filled(Box((0,), (5,))), 1: filled(Box((5,), (5,)))}
ALL = filled(whole((10,)))


def plan(wanted: Share, held: dict[int, Share], placement: str = "sharded", rank: int | None = 0, ranks: int = 2) -> Reading:
    return plan_atom(wanted, held, 2, placement, Reader(rank, ranks))


def test_a_share_that_a_rank_has_is_taken_over_from_it_alone() -> None:
    assert plan(HALVES[1], HALVES) == Reading((5,), {1: []}, as_it_is=True)


def test_of_ranks_that_have_the_same_the_own_one_is_read() -> None:
    both = {0: ALL, 1: ALL}
    assert plan(ALL, both, rank=1).cuts.keys() == {1}
    assert plan(ALL, both, rank=5, ranks=6).cuts.keys() == {1}
    assert plan(ALL, both, rank=None).cuts.keys() == {0}


def test_parts_that_overlap_are_each_read_once() -> None:
    # One with less than the other, in the middle: counting elements would end before the last was read.
    held = {0: filled(Box((0,), (6,))), 1: filled(Box((2,), (4,))), 2: filled(Box((6,), (4,)))}
    reading = plan_atom(ALL, held, 3, "sharded", Reader(None, 1))
    assert not reading.missing
    assert reading.cuts == {
        0: [Cut(Box((0,), (6,)), Box((0,), (6,)))],
        2: [Cut(Box((0,), (4,)), Box((6,), (4,)))],
    }


def test_what_is_missing_is_told() -> None:
    assert plan(ALL, {0: HALVES[0]}).missing == (Box((5,), (5,)),)


def test_an_empty_share_is_told_its_type_by_one_rank() -> None:
    assert plan(filled(Box((10,), (0,))), HALVES) == Reading((0,), {0: []})


def test_padding_is_kept_by_the_rank_that_had_it_and_zero_for_others() -> None:
    nothing = Share((Box((0,), (0,)),), ((0,),), (4,))
    held = {0: filled(whole((3,))), 1: nothing}
    assert plan(nothing, held, rank=1) == Reading((4,), {1: []}, as_it_is=True)
    assert not plan(nothing, held, rank=0).as_it_is
    assert not plan(nothing, held, rank=1, ranks=3).as_it_is


def test_what_is_averaged_is_kept_by_as_many_ranks_and_else_read_from_all() -> None:
    both = {0: ALL, 1: ALL}
    assert plan(ALL, both, "averaged", rank=1) == Reading((10,), {1: []}, as_it_is=True)
    reading = plan(ALL, both, "averaged", rank=1, ranks=3)
    assert reading.is_mean
    assert reading.cuts.keys() == {0, 1}
    assert plan(HALVES[0], both, "averaged").is_mean  # another share of it is nobody's own


def test_what_is_local_comes_from_the_very_rank_or_not_at_all() -> None:
    both = {0: ALL, 1: ALL}
    assert plan(ALL, both, "rank-local", rank=1, ranks=4).cuts.keys() == {1}
    assert not plan(ALL, both, "rank-local", rank=2, ranks=4).cuts
    assert not plan(HALVES[0], both, "rank-local").cuts  # of another shape
    assert plan(ALL, {1: ALL}, "rank-local", rank=None).cuts.keys() == {1}
