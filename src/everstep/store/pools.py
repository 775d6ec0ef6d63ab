"""The pools of one rank: one that is being written, and those that it takes over from.

A pool's layout never changes, and a generation does not write into the pool of another: both make a new file. The old one
goes when the new one holds a step that every rank has.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Sequence

from everstep.atoms import Layout
from everstep.errors import CorruptionError, PoolError, StorageError
from everstep.format.documents import Manifest
from everstep.store import files
from everstep.store.bases import Slot
from everstep.store.medium import MakeMedium
from everstep.store.pool import Pool, SlotWriter, read_pool

_NAME = re.compile(r"rank-(\d{5})-g(\d{6,})-(\d+)\.pool")
_SPARE_BYTES, _SPARE_BYTES_A_TENSOR = 256 << 10, 512


class Pools:
    """Of one generation. One thread."""

    def __init__(
        self, folder: str, *, run: str, rank: int, generation: int, world_size: int, num_slots: int,
        medium: MakeMedium, before: Sequence[str] = (), on_begun: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`before`: folders of earlier generations' pools. `on_begun`: the first step is in a pool, and not yet reported."""
        self.folder = folder
        self._before = [each for each in before if each != folder]
        self._on_begun = on_begun
        self._has_begun = False
        self._run, self._rank, self._generation, self._world_size = run, rank, generation, world_size
        self._num_slots = num_slots
        self._medium = medium
        self._pool: Pool | None = None
        self._numbers = itertools.count()
        self._spare_bytes = 0
        self._has_old = True

    @property
    def num_bytes(self) -> int:
        return 0 if self._pool is None else self._pool.num_bytes

    @property
    def is_durable(self) -> bool:
        """Whether what is committed survives the host."""
        return not files.is_in_memory(self.folder)

    def begin(self, step: int, layout: Layout, slots: Sequence[Slot], order: Sequence[int] = ()) -> SlotWriter:
        """A slot for this step, of a new pool if these are other tensors than before. `order`: in which they will come."""
        if self._pool is None or not self._pool.fits(slots):
            self._make(layout, slots)
        assert self._pool is not None
        writer = self._pool.begin(step)
        if len(order) == len(slots):
            writer.order[:] = order
        return writer

    def _make(self, layout: Layout, slots: Sequence[Slot]) -> None:
        self.forget()
        files.make_dirs(self.folder)
        _remove_litter(self.folder, self._rank)
        taken = files.listing(self.folder)
        names = (f"rank-{self._rank:05d}-g{self._generation:06d}-{n}.pool" for n in self._numbers)
        self._pool = Pool.create(
            self.folder, next(name for name in names if name not in taken), run=self._run, rank=self._rank, layout=layout,
            slots=slots, num_slots=self._num_slots, medium=self._medium,
            spare_bytes=max(self._spare_bytes, _SPARE_BYTES + _SPARE_BYTES_A_TENSOR * len(slots)),
        )  # fmt: skip

    def make_larger(self, num_bytes: int) -> None:
        """What slots say beside their tensors takes so much, and does not fit: the next is in a pool with room for it."""
        self._spare_bytes = 2 * num_bytes
        self.forget()

    def forget(self) -> None:
        """Write no more into the pool that there is."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None
        self._has_old = True

    def committed(self, step: int) -> None:
        """A slot of this step has been. StorageError if nobody would find it."""
        assert self._pool is not None
        self._pool.check_still_there()
        if not self._has_begun:
            self._on_begun()
            self._has_begun = True
        if self._has_old and self._all_have_one():
            for name in files.listing(self.folder):
                if name != os.path.basename(self._pool.path) and self._is_ours(_maker_of(name)):
                    files.remove(os.path.join(self.folder, name))
            files.sync_dir(self.folder)
            for folder in self._before:
                for rank in {rank for name in files.listing(folder) if (rank := _maker_of(name)) is not None}:
                    if self._is_ours(rank):
                        remove_pools(folder, rank)
            self._has_old = False

    def _is_ours(self, rank: int | None) -> bool:
        """Whether this rank clears away what that one has left: the first does for those that there are no more."""
        return rank is not None and (rank == self._rank or (self._rank == 0 and rank >= self._world_size))

    def _all_have_one(self) -> bool:
        """Whether some step is in the newest pools of all ranks of this generation."""
        steps = []
        for rank in range(self._world_size):
            names = [n for n in files.listing(self.folder) if _rank_of(n) == rank and _generation_of(n) == self._generation]
            if not names:
                return False
            newest = max(names, key=lambda n: int(n.rsplit("-", 1)[1].removesuffix(".pool")))
            with contextlib.suppress(PoolError, CorruptionError, StorageError):  # then it has none that counts
                steps.append({m.step for m in read_pool(os.path.join(self.folder, newest), self._run)})
        return len(steps) == self._world_size and bool(set.intersection(*steps))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None


def remove_pools(folder: str, rank: int) -> None:
    """All of this rank's; and the folder, if it is empty then."""
    _remove_litter(folder, rank)
    for name in files.listing(folder):
        if _rank_of(name) == rank:
            files.remove(os.path.join(folder, name))
    if os.path.isdir(folder) and not files.listing(folder):
        files.remove_dir(folder)


def _remove_litter(folder: str, rank: int) -> None:
    """Pools that were being made when their process died: each as large as a pool. Only for the rank's writer."""
    for name in files.listing(folder):
        if _rank_of(name) is None and _maker_of(name) == rank:
            files.remove(os.path.join(folder, name))


def has_pools(folder: str, rank: int, generation: int) -> bool:
    """Whether a rank has a pool of this generation there, whatever state it is in."""
    return any((_rank_of(name), _generation_of(name)) == (rank, generation) for name in files.listing(folder))


def read_pools(folder: str, run: str, rank: int) -> tuple[list[Manifest], list[tuple[int, str]]]:
    """The committed slots of this rank's pools; and what is wrong with those that cannot be read, with their generations."""
    found: list[Manifest] = []
    problems: list[tuple[int, str]] = []
    for name in files.listing(folder):
        if _rank_of(name) == rank:
            try:
                found += read_pool(os.path.join(folder, name), run)
            except (PoolError, CorruptionError, StorageError) as e:
                problems.append((_generation_of(name) or 0, str(e)))
    return found, problems


def _rank_of(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def _maker_of(name: str) -> int | None:
    """The rank whose pool this is, or was to be when its process died."""
    made, _, rest = name.partition(".pool.")
    return _rank_of(f"{made}.pool" if rest.endswith(".tmp") else name)


def _generation_of(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[2])
