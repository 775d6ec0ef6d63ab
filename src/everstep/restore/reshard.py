"""Which rank's part every wanted element is taken from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from everstep.boxes import Box, Cut, Share, cuts


@dataclass(frozen=True)
class Reader:
    """Who reads."""

    rank: int | None
    """None: somebody outside."""
    num_ranks: int
    """As many as this one's."""


@dataclass(frozen=True)
class Reading:
    """What is read of one atom for a wanted share of it."""

    size: tuple[int, ...]
    """The shape of the memory it goes into."""
    cuts: Mapping[int, list[Cut]] = field(default_factory=dict)
    """By the ranks that are read. A rank without cuts only tells of dtype and scalars."""
    as_it_is: bool = False
    """The one rank that is read has just this share: its memory is taken over."""
    is_mean: bool = False
    """Cuts of different ranks may go to the same place, which gets their mean."""
    missing: tuple[Box, ...] = ()
    """What no rank has."""


def plan_atom(wanted: Share, held: Mapping[int, Share], num_ranks: int, placement: str, reader: Reader) -> Reading:
    """Every element from one rank, the own one first; what is to be averaged from all that have it.

    `held`: the shares that ranks of the source, of which there are `num_ranks`, have stored.
    """
    same_size = reader.num_ranks == num_ranks
    if placement == "rank-local":
        source = min(held) if reader.rank is None else reader.rank
        return _taken(wanted, source) if held.get(source) == wanted else Reading(wanted.size)
    if placement == "averaged":
        if same_size and reader.rank is not None and held.get(reader.rank) == wanted:
            return _taken(wanted, reader.rank)
        return _mean(wanted, held)
    near = None if reader.rank is None else reader.rank % num_ranks
    order = sorted(held, key=lambda r: (held[r] != wanted, r != near, r))
    first = order[0]
    only_padding = not wanted.numel and prod(wanted.size) > 0
    if held[first] == wanted and (not only_padding or (first == reader.rank and same_size)):
        return _taken(wanted, first)
    found, missing = cuts(wanted, [(r, held[r]) for r in order])
    return Reading(wanted.size, found or {first: []}, missing=tuple(missing))


def _taken(wanted: Share, rank: int) -> Reading:
    return Reading(wanted.size, {rank: []}, as_it_is=True)


def _mean(wanted: Share, held: Mapping[int, Share]) -> Reading:
    each = {r: cuts(wanted, [(r, share)])[0].get(r, []) for r, share in sorted(held.items())}
    _, missing = cuts(wanted, held.items())
    used = {r: parts for r, parts in each.items() if parts} or {min(held): []}
    return Reading(wanted.size, used, is_mean=True, missing=tuple(missing))
