"""Patterns: what a declaration says about a tensor, and what it refuses."""

from __future__ import annotations

import re

import pytest
import torch

import everstep
from everstep.boxes import Box, Share, filled, whole
from everstep.errors import UsageError
from everstep.layout import Averaged, Fused, Local, Padded, Pattern, Patterns, Sharded, Tied
from everstep.naming import Declared, take_inventory


def spread(shape: tuple[int, ...], *patterns: Pattern) -> tuple[tuple[int, ...], Share]:
    return Patterns(patterns).spread("w", "model: w", shape, filled(whole(shape)))


def test_shards_are_cut_as_torch_cuts_chunks() -> None:
    full = torch.arange(10)
    for count in (1, 2, 3, 4, 10, 12):
        chunks = [*torch.chunk(full, count), *[full[10:]] * 12]
        for index in range(count):
            shape, share = spread((len(chunks[index]),), Sharded("w", 0, index, count, size=10))
            assert shape == (10,)
            start = sum(len(chunk) for chunk in chunks[:index])
            expected = filled(Box((start,), (len(chunks[index]),)))
            assert share == expected or share.numel == expected.numel == 0


def test_equal_shards_need_no_size() -> None:
    assert spread((4, 3), Sharded("w", -1, 1, 2)) == ((4, 6), filled(Box((0, 3), (4, 3))))


def test_fused_parts_are_cut_each_for_itself() -> None:
    shape, share = spread((6, 3), Fused("w", 0, (8, 2, 2), 1, 2))
    assert shape == (12, 3)
    assert share.boxes == (Box((4, 0), (4, 3)), Box((9, 0), (1, 3)), Box((11, 0), (1, 3)))
    assert share.at == ((0, 0), (4, 0), (5, 0))


def test_one_shard_of_all_is_the_tensor_itself() -> None:
    shape, share = spread((12, 3), Fused("w", 0, (8, 2, 2)))
    assert share.is_whole(shape)
    atom = take_inventory({"m": torch.nn.Linear(3, 4)}, {}, Declared(layout=[Fused("weight", 0, (2, 2))])).layout.atoms[0]
    assert not atom.boxes
    assert not atom.at


def test_padding_is_cut_off_after_sharding() -> None:
    patterns = [[Sharded("w", 0, index, 4), Padded("w", 0, 5)] for index in range(4)]
    found = [spread((2, 3), *each) for each in patterns]
    assert {shape for shape, _ in found} == {(5, 3)}
    assert [share.boxes[0] for _, share in found] == [
        Box((0, 0), (2, 3)), Box((2, 0), (2, 3)), Box((4, 0), (1, 3)), Box((0, 0), (0, 0)),
    ]  # fmt: skip
    assert {share.size for _, share in found} == {(2, 3)}


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (Sharded("w", 0, 2, 2), "there is no shard 2 of 2"),
        (Sharded("w", 2, 0, 2), "has no dimension 2"),
        (Sharded("w", 0, 0, 2, size=7), "has 4, but model: w has 6"),
        (Fused("w", 0, (8, 2), 0, 2), "has 5, but model: w has 6"),
        (Padded("w", 0, 7), "has 6 along dimension 0"),
    ],
)
def test_what_does_not_fit_is_refused(pattern: Pattern, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        spread((6, 3), pattern)


def test_the_first_that_matches_counts() -> None:
    patterns = Patterns([Local("a.*"), Averaged("*")])
    assert patterns.placement("a.b") == "rank-local"
    assert patterns.placement("b") == "averaged"


def test_names_are_matched_by_the_shell_s_rules_or_by_all_of_an_expression() -> None:
    assert Local("*.weight").matches("a.b.weight")
    assert not Local("weight").matches("a.weight")
    assert Local(re.compile(r"a\.\d+")).matches("a.12")
    assert not Local(re.compile(r"a\.\d+")).matches("a.12.weight")


def test_a_pattern_that_is_about_nothing_is_refused(tmp_path: object) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UsageError, match=r"Local\('wieght'\) matches no parameter"):
        everstep.attach(model, optimizer, f"{tmp_path}/run", layout=[Averaged("*"), Local("wieght")])
    with pytest.raises(UsageError, match="list of patterns"):
        everstep.attach(model, optimizer, f"{tmp_path}/run", layout=["weight"])


def test_a_tied_tensor_has_the_name_of_the_other_and_its_own_as_an_alias() -> None:
    inventory = take_inventory({"m": torch.nn.Linear(3, 4)}, {}, Declared(layout=[Tied("weight", "embedding.weight")]))
    atom = inventory.layout.atoms[0]
    assert (atom.name, atom.aliases) == ("embedding.weight", ("weight",))


def test_tied_names_of_two_different_tensors_are_refused() -> None:
    with pytest.raises(UsageError, match="same name"):
        take_inventory({"m": torch.nn.Linear(3, 3)}, {}, Declared(layout=[Tied("weight", "bias")]))
