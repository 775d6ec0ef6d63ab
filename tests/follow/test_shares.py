"""Atoms over shadows: each has one owner, in proportion to bytes, always the same; and records go to their owners."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import everstep
from everstep.atoms import Atom, Layout, OptimizerSpec, param_uid
from everstep.follow.shares import PartFrame, Partition, coupled, extended, share_out
from everstep.frame import SetGroups, SetLayout
from everstep.restore.plan import line_of
from everstep.store import files
from everstep.store.runs import RunPath, read_listing

SIZES = st.lists(st.integers(0, 1 << 22), min_size=1, max_size=40)
NUMS = st.integers(1, 6)


def layout_of(sizes: list[int], cls: str = "torch.optim.AdamW") -> Layout:
    atoms = tuple(Atom(param_uid("m", f"p{i}"), "param", "m", f"p{i}", (n,), "float32") for i, n in enumerate(sizes))
    return Layout(atoms, (OptimizerSpec("o", cls),), ("m",))


def loads(layout: Layout, shares: list[frozenset[int]]) -> list[int]:
    sizes = {a.uid: 4 * a.numel for a in layout.atoms}
    return [sum(sizes[uid] for uid in share) for share in shares]


@given(SIZES, NUMS)
def test_every_atom_has_one_owner(sizes: list[int], num: int) -> None:
    layout = layout_of(sizes)
    shares = share_out(layout, num)
    assert len(shares) == num
    assert sorted(uid for share in shares for uid in share) == sorted(a.uid for a in layout.atoms)


@given(SIZES, NUMS, st.randoms())
def test_the_order_of_atoms_does_not_matter(sizes: list[int], num: int, lot: object) -> None:
    layout = layout_of(sizes)
    atoms = list(layout.atoms)
    lot.shuffle(atoms)  # type: ignore[attr-defined]
    assert share_out(Layout(tuple(atoms), layout.optimizers, layout.models), num) == share_out(layout, num)


@given(SIZES, NUMS)
def test_no_share_is_larger_than_a_fair_one_and_the_largest_thing_that_cannot_be_cut(sizes: list[int], num: int) -> None:
    layout = layout_of(sizes)
    small = sum(4 * n for n in sizes if 4 * n < 1 << 15)
    largest = max([small if small * num <= 4 * sum(sizes) else 0, *(4 * n for n in sizes)])
    assert max(loads(layout, share_out(layout, num))) <= 4 * sum(sizes) / num + largest


def test_small_atoms_share_records_and_so_an_owner() -> None:
    layout = layout_of([1 << 20, 1 << 20, 1 << 20, 1 << 20, 64, 64, 64, 64, 64, 64])
    shares = share_out(layout, 2)
    small = {a.uid for a in layout.atoms if a.numel == 64}
    assert sum(bool(small & share) for share in shares) == 1


def test_where_all_are_small_each_shadow_has_some() -> None:
    layout = layout_of([100] * 10)
    assert loads(layout, share_out(layout, 2)) == [2000, 2000]


@given(SIZES, SIZES, NUMS)
def test_atoms_that_come_later_do_not_move_others(before: list[int], more: list[int], num: int) -> None:
    shares = share_out(layout_of(before), num)
    layout = layout_of([*before, *more])
    grown = extended(shares, layout)
    assert grown is not None
    assert all(old <= new for old, new in zip(shares, grown, strict=True))
    assert sorted(uid for share in grown for uid in share) == sorted(a.uid for a in layout.atoms)
    assert extended(grown, layout_of(before)) == grown, "those that are gone keep their owner"


def test_parameters_of_an_optimizer_that_is_not_torchs_stay_together() -> None:
    layout = layout_of([1 << 16] * 6, "mine:Own")
    uids = [a.uid for a in layout.atoms]
    together = coupled(layout, {"o": [uids[:2], uids[2:4]]})
    shares = share_out(layout, 2, together)
    assert any(set(uids[:4]) <= share for share in shares)
    assert coupled(layout_of([1]), {"o": [uids]}) == []
    assert extended([frozenset(uids[:1]), frozenset(uids[1:])], layout, together) is None, "they are apart already"


def test_optimizers_that_have_a_parameter_in_common_stay_together() -> None:
    layout = Layout((), (OptimizerSpec("a", "m:A"), OptimizerSpec("b", "m:B"), OptimizerSpec("c", "m:C")), ())
    assert coupled(layout, {"a": [[1, 2]], "b": [[3]], "c": [[2, 3]]}) == [{1, 2, 3}]


def test_a_partition_that_cannot_grow_begins_anew() -> None:
    layout = layout_of([1 << 16] * 4, "mine:Own")
    uids = tuple(a.uid for a in layout.atoms)
    partition = Partition([frozenset(uids[:2]), frozenset(uids[2:])], lambda i: layout)
    partition.see([])
    assert partition.version == 0
    partition.see([SetLayout("x"), SetGroups("o", (), (uids,))])
    assert partition.version == 1
    assert {partition.of(0), partition.of(1)} == {frozenset(uids), frozenset()}


@pytest.fixture
def frames(tmp_path: Path) -> list[PartFrame]:
    """Frames of a run with large and small gradients, a buffer, sparse gradients, state and tensors set by hand."""
    torch.manual_seed(1)
    model = nn.ModuleDict({
        "large": nn.Linear(128, 200), "norm": nn.BatchNorm1d(200), "table": nn.Embedding(50, 128, sparse=True),
    })  # fmt: skip
    dense = [*model["large"].parameters(), *model["norm"].parameters()]
    optimizers = {"a": torch.optim.AdamW(dense), "b": torch.optim.SparseAdam(model["table"].parameters())}
    run = everstep.attach(model, optimizers, tmp_path / "run", quiet=True, follower=False)
    run.resume()
    for n in range(6):
        model["norm"](model["large"](model["table"](torch.arange(n, n + 8)))).square().sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        if n == 3:
            with torch.no_grad():
                model["large"].weight[0] = 1.0
            optimizers["a"].state[dense[0]]["exp_avg"] = torch.ones_like(dense[0])
        run.commit()
    run.flush()
    line = line_of(read_listing(RunPath(tmp_path / "run")))
    found = [
        PartFrame(e, files.Reader(e.path), line.segments[e.path].seed) for _, e in sorted(line.frames.items())
    ]
    run.close()
    assert len(found) == 6
    return found


def test_what_shares_need_of_a_frame_is_all_of_it_and_nothing_large_twice(frames: list[PartFrame]) -> None:
    for frame in frames:
        uids = {g.uid for op in frame.footer.ops for g in getattr(op, "grads", ())}
        uids |= {op.uid for op in frame.footer.ops if hasattr(op, "uid")}
        needed: dict[int, int] = {}
        for uid in uids:
            for ordinal in frame.of(frozenset([uid])).ordinals():
                needed[ordinal] = needed.get(ordinal, 0) + 1
        assert sorted(needed) == list(range(len(frame.headers)))
        for ordinal, times in needed.items():
            assert times == 1 or frame.headers[ordinal].uid == 0, "only cursor and small gradients are in common"


def test_the_ranges_of_a_share_hold_its_records_and_the_frames_two_ends(frames: list[PartFrame]) -> None:
    for frame in frames:
        for op in frame.footer.ops:
            for gradient in getattr(op, "grads", ()):
                ranges = frame.of(frozenset([gradient.uid])).ranges()
                assert ranges[0][0] == frame.entry.offset and ranges[-1][1] == frame.entry.end_offset
                assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges)), "in order, and apart"
                for ordinal in frame.ordinals():
                    at = frame._offsets[ordinal]
                    assert any(a <= at and at + frame.headers[ordinal].padded_bytes <= b for a, b in ranges)


def test_all_shares_of_a_frame_are_those_of_the_whole(frames: list[PartFrame]) -> None:
    uids = {g.uid for f in frames for op in f.footer.ops for g in getattr(op, "grads", ())}
    uids |= {op.uid for f in frames for op in f.footer.ops if hasattr(op, "uid")}
    for frame in frames:
        assert frame.of(frozenset(uids)).ops == frame.footer.ops
        frame.check_payloads()
