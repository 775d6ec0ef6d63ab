"""What the training state is made of, by name and global index: atoms, boxes, layouts. Pure."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import xxhash

from everstep.boxes import Box, Share, filled, whole

PIECE_ELEMENTS = 1 << 19
"""Tensors are stored, checked and replayed in pieces of this many elements (a multiple of 64: see fold.py)."""
FINE_ELEMENTS = 1 << 17
"""Fine pieces have less than twice as many."""
PACK_BELOW_BYTES = 1 << 15
"""Smaller gradients of an update share a record."""
SMALL_BUFFER_BYTES = 1 << 16
"""Buffers up to this size are recorded together."""
RESIDUALS = "residuals"
"""The name of the model whose buffers are what gradient compression has left out so far: each rank's own."""


def piece_elements(numel: int, *, fine: bool) -> int:
    """How many elements a piece of a tensor of `numel` elements has (its last may have fewer): a multiple of 64.

    Fine pieces are for what other numbers of ranks may read. They cut a tensor into a power of two of equal parts, as twice
    as many ranks would: into two, if it cannot be a small buffer (those are hashed as one), or more.
    """
    if not fine:
        return PIECE_ELEMENTS
    num_pieces = 1 << max(numel > SMALL_BUFFER_BYTES, (numel // FINE_ELEMENTS).bit_length() - 1)
    return max(1, -(-numel // (64 * num_pieces))) * 64


def uid_of(*key: str) -> int:
    """The stable 64-bit name of an atom: a hash of what it is called, so that it needs no registry."""
    return xxhash.xxh3_64_intdigest("\0".join(key).encode()) or 1


def param_uid(model: str, name: str) -> int:
    return uid_of("param", model, name)


def buffer_uid(model: str, name: str) -> int:
    return uid_of("buffer", model, name)


def state_uid(optimizer: str, param: int, name: str) -> int:
    return uid_of("state", optimizer, f"{param:016x}", name)


def owner_of_strays(optimizer: str, models: Collection[str]) -> str:
    """The owner of an optimizer's parameters that no model has: not a model's name, also if both are called the same."""
    return f"optimizer {optimizer}" if optimizer in models else optimizer


class Atom(msgspec.Struct, frozen=True, omit_defaults=True):
    """One named tensor of the training state in its global shape."""

    uid: int
    role: str
    """`param` or `buffer`; optimizer state is named by state_uid and described where it is stored."""
    owner: str
    """Key of the model it belongs to, or owner_of_strays() of its optimizer if no model has it."""
    name: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    placement: str = "replicated"
    """`replicated`, `sharded`, `rank-local`, or `averaged`: each rank has its own, and another number of ranks the mean."""
    boxes: tuple[tuple[int, Box], ...] = ()
    """(rank, box) where a rank does not hold all of it, or has padding."""
    at: tuple[tuple[int, ...], ...] = ()
    """Where each box begins in the rank's memory, if it is not one box that fills it."""
    held: tuple[int, ...] = ()
    """The shape of that memory then."""
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor (tied weights)."""
    requires_grad: bool = False
    persistent: bool = True

    @property
    def numel(self) -> int:
        n = 1
        for s in self.shape:
            n *= s
        return n

    @property
    def share(self) -> Share:
        """What the layout's own rank has of it."""
        if not self.at:
            return filled(self.boxes[0][1] if self.boxes else whole(self.shape))
        return Share(tuple(box for _, box in self.boxes), self.at, self.held)

    def label(self) -> str:
        """For messages: `model: layer.weight`."""
        return f"{self.owner}: {self.name}"


class OptimizerSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which class an optimizer is of."""

    name: str
    cls: str
    """`torch.optim.AdamW`, or `module:Qualname` of a class that is not torch's."""
    defaults: str = ""
    """base64 of the msgpack of tree.pack(optimizer.defaults)."""


class Layout(msgspec.Struct, frozen=True, omit_defaults=True):
    """All atoms and optimizers of a run at one time, and which rank holds what."""

    atoms: tuple[Atom, ...]
    optimizers: tuple[OptimizerSpec, ...]
    models: tuple[str, ...]
    world_size: int = 1
    rank: int = 0
    """Whose: a layout names the atoms, and of each the box, that one rank stores."""
    order: tuple[int, ...] = ()
    """With several ranks: all atoms that this one holds, as its models have them."""
    groups: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = ()
    """With several ranks: all parameters of each optimizer's groups on this one."""

    @property
    def fine(self) -> bool:
        """Whether what is written under it is cut into fine pieces."""
        return self.world_size > 1

    @property
    def id(self) -> str:
        """A hash of the content: equal layouts have equal ids."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(self))[:16]

    def by_uid(self) -> dict[int, Atom]:
        return {atom.uid: atom for atom in self.atoms}
