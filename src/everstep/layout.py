"""What the tensors of hand-written parallelism are, declared by the user: patterns for `attach(..., layout=[...])`.

    from everstep.layout import Fused, Padded, Sharded

    everstep.attach(model, optimizer, "runs/gpt", layout=[
        Fused("*.attention.qkv.*", dim=0, sizes=(4096, 1024, 1024), index=tp_rank, count=tp_size),
        Sharded("*.experts.*", dim=0, index=ep_rank, count=ep_size),
        Sharded("embedding.weight", dim=0, index=tp_rank, count=tp_size),
        Padded("embedding.weight", dim=0, size=50257),
    ])

DTensors need none of this: they say themselves what they are. `pattern` is matched to canonical names in the run (after
`rename`), of parameters and buffers: as a shell does it (`*`, `?`, `[a-z]`), or all of the name by a compiled `re.Pattern`.
Of each kind the first that matches counts: Sharded and Fused are one kind, Averaged and Local another, Padded and Tied each
their own. A pattern that matches on no rank is an error.

Optimizer state follows its parameter: what has the parameter's shape is cut as it is, scalars must be equal on all ranks.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from everstep.boxes import Box, Share, composed, whole
from everstep.errors import UsageError

__all__ = ["Averaged", "Fused", "Local", "Padded", "Pattern", "Sharded", "Tied"]


@dataclass(frozen=True)
class Pattern:
    """What a name must look like for a declaration to be about it."""

    pattern: str | re.Pattern[str]

    def matches(self, name: str) -> bool:
        if isinstance(self.pattern, str):
            return fnmatch.fnmatchcase(name, self.pattern)
        return self.pattern.fullmatch(name) is not None

    def __str__(self) -> str:
        pattern = self.pattern if isinstance(self.pattern, str) else self.pattern.pattern
        return f"{type(self).__name__}({pattern!r})"


@dataclass(frozen=True)
class Sharded(Pattern):
    """The tensor is shard `index` of `count` along `dim`."""

    dim: int
    index: int
    count: int
    size: int | None = None
    """Of the whole tensor along `dim`, where shards are uneven: they are cut as torch.chunk does. None: all are equal."""

    def spread(self, label: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Share]:
        dim = _dim(self, label, shape, self.dim)
        size = shape[dim] * self.count if self.size is None else self.size
        return _fused(self, label, shape, dim, (size,), self.index, self.count)


@dataclass(frozen=True)
class Fused(Pattern):
    """The whole tensor is several sub-parameters one after the other along `dim` (QKV, SwiGLU); this one has shard `index`
    of `count` of each of them, one after the other."""

    dim: int
    sizes: Sequence[int]
    """Of the whole sub-parameters along `dim`. Shards are cut as torch.chunk does."""
    index: int = 0
    count: int = 1

    def spread(self, label: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Share]:
        return _fused(self, label, shape, _dim(self, label, shape, self.dim), tuple(self.sizes), self.index, self.count)


@dataclass(frozen=True)
class Padded(Pattern):
    """Only the first `size` along `dim` of the whole tensor mean anything (a vocabulary that is padded to a multiple).

    The rest is not part of the state: it is kept where a rank resumes with the very share it had, and else it is zero, in
    optimizer state too.
    """

    dim: int
    size: int

    def spread(self, label: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Share]:
        dim = _dim(self, label, shape, self.dim)
        if not 0 <= self.size <= shape[dim]:
            raise UsageError(f"{self}: {label} has {shape[dim]} along dimension {dim}, which is not {self.size} and padding")
        real = (*shape[:dim], self.size, *shape[dim + 1 :])
        return real, Share((whole(real),), ((0,) * len(shape),), shape)


@dataclass(frozen=True)
class Averaged(Pattern):
    """Each rank has values of its own (local SGD). Under another number of ranks, each gets the mean over all that there
    were, of optimizer state too: summed in float64 in the order of the ranks, divided, and rounded to the type it has."""


@dataclass(frozen=True)
class Local(Pattern):
    """It stays with its rank (residuals of error feedback). Under another number of ranks, a rank that was not there, or had
    another shape of it, keeps what it has, and a warning says so. Buffers that are no DTensors and not declared are each
    rank's own, too; but a new rank gets another's."""


@dataclass(frozen=True)
class Tied(Pattern):
    """It is the same tensor as the one that is called `name` on another rank, and stored once, under that name (an embedding
    on the first pipeline stage and the head on the last)."""

    name: str


P = TypeVar("P", bound=Pattern)


class Patterns:
    """All declarations."""

    def __init__(self, patterns: Iterable[Pattern] = ()) -> None:
        self._patterns = tuple(patterns)
        self.matched: set[str] = set()
        """Those that are about something here."""
        for p in self._patterns:
            if not isinstance(p, (Sharded, Fused, Padded, Averaged, Local, Tied)):
                raise UsageError(f"layout must be a list of patterns of everstep.layout, not of {type(p).__name__}")

    def name(self, name: str) -> str:
        """What a tensor is called in the run."""
        tied = self._find(name, Tied)
        return name if tied is None else tied.name

    def placement(self, name: str) -> str | None:
        """`averaged`, `rank-local`, or None if it is neither."""
        found = self._find(name, (Averaged, Local))
        return None if found is None else "averaged" if isinstance(found, Averaged) else "rank-local"

    def spread(self, name: str, label: str, shape: tuple[int, ...], here: Share) -> tuple[tuple[int, ...], Share]:
        """The global shape of a tensor, and what of it `here`, which is a share of this tensor, has."""
        for kind in ((Sharded, Fused), (Padded,)):
            found: Any = self._find(name, kind)
            if found is not None:
                shape, outer = found.spread(label, shape)
                here = composed(outer, here)
        return shape, here

    def _find(self, name: str, kind: type[P] | tuple[type[P], ...]) -> P | None:
        first = None
        for p in self._patterns:
            if isinstance(p, kind) and p.matches(name):
                self.matched.add(str(p))
                first = p if first is None else first
        return first


def _dim(pattern: Pattern, label: str, shape: tuple[int, ...], dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise UsageError(f"{pattern}: {label} is {shape} and has no dimension {dim}")
    return dim % len(shape)


def _fused(
    pattern: Pattern, label: str, shape: tuple[int, ...], dim: int, sizes: tuple[int, ...], index: int, count: int
) -> tuple[tuple[int, ...], Share]:
    if not 0 <= index < count:
        raise UsageError(f"{pattern}: there is no shard {index} of {count}")
    chunks = [-(-size // count) for size in sizes]
    starts = [min(index * chunk, size) for chunk, size in zip(chunks, sizes, strict=True)]
    lengths = [min(chunk, size - start) for chunk, size, start in zip(chunks, sizes, starts, strict=True)]
    if sum(lengths) != shape[dim]:
        raise UsageError(
            f"{pattern}: shard {index} of {count} of {' + '.join(map(str, sizes))} along dimension {dim} has "
            f"{sum(lengths)}, but {label} has {shape[dim]}: give the sizes that the whole tensor has there"
        )
    boxes, at = [], []
    for begin, start, length, place in zip(
        accumulate(sizes, initial=0), starts, lengths, accumulate(lengths, initial=0), strict=False
    ):
        if length or len(sizes) == 1:
            offset, origin = [0] * len(shape), [0] * len(shape)
            offset[dim], origin[dim] = begin + start, place
            boxes.append(Box(tuple(offset), (*shape[:dim], length, *shape[dim + 1 :])))
            at.append(tuple(origin))
    return (*shape[:dim], sum(sizes), *shape[dim + 1 :]), Share(tuple(boxes), tuple(at), shape)
