"""Data that does not depend on who reads it: an order for any number of ranks, randomness by sample."""

from __future__ import annotations

import hashlib
import operator
import os
import random
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.utils import data as torch_data
from torch.utils.data import Dataset, IterableDataset

from everstep.errors import CursorError, UsageError


class Sampler(torch_data.Sampler[int]):
    """The indices of one rank, from an order that all ranks share and a position that counts the samples of all.

        DataLoader(dataset, batch_size=b, sampler=Sampler(dataset))

    The order of an epoch depends on (seed, epoch) alone: not on the number of ranks, nor on versions of torch or numpy.
    With W ranks that take b samples a batch, the k-th batches of all ranks together are samples [k·W·b, (k+1)·W·b) of it;
    rank r has those at r, r + W, r + 2W, … in that stretch. So a run that goes on under other W and b, from the number of
    samples that all ranks have consumed, reads what is left of the epoch in the same order, each sample once.

    Every rank gets equally many indices, hence batches, as DDP needs. Where an epoch's rest does not divide by W, it is
    filled up with the first samples of the order: at most W - 1 samples of an epoch are read twice, at its very end.
    With `drop_last` at most W - 1 are left out instead. The DataLoader's `drop_last` leaves out a last batch of fewer than
    b samples on each rank. Give both the same value, and an epoch has as many batches under any W and b of one product.

    `rank` and `world_size` are torch.distributed's if it is initialised when a pass starts, else 0 and 1. Where several
    ranks must read the same samples (tensor or pipeline parallelism), give those of the data-parallel dimension.

    `Run.steps` keeps the position, calls `set_epoch`, and starts each new pass at the beginning of its epoch. In a loop
    of your own, call `set_epoch` before each epoch and `advance` for each batch, and give the sampler to `extras`:
    workers ask for indices long before training sees the samples, so that it cannot count by itself.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.num_samples = len(dataset) if isinstance(dataset, Sized) else operator.index(dataset)
        self.shuffle = bool(shuffle)
        self.seed = operator.index(seed)
        self.drop_last = drop_last
        self.epoch = 0
        self.consumed = 0
        """Samples of the epoch that were delivered to training, on all ranks together; iter() starts there."""
        if (rank is None) != (world_size is None):
            raise UsageError("Sampler takes rank and world_size together, or neither")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise UsageError(f"rank must be from 0 to world_size - 1, not {rank} of {world_size}")
        self._place = None if rank is None or world_size is None else (rank, world_size)

    @property
    def rank(self) -> int:
        return self._where()[0]

    @property
    def world_size(self) -> int:
        return self._where()[1]

    def _where(self) -> tuple[int, int]:
        # Asked late: a sampler may be made before the process group is.
        if self._place is not None:
            return self._place
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        launched = os.environ.get("WORLD_SIZE", "1")
        if launched != "1":
            raise UsageError(
                f"WORLD_SIZE is {launched}, but torch.distributed is not initialised: every process would read all samples. "
                "Call torch.distributed.init_process_group first, or give Sampler rank= and world_size="
            )
        return 0, 1

    def __len__(self) -> int:
        """Indices of this rank in a whole epoch, wherever the position is."""
        return self._share_of(self.num_samples)

    @property
    def num_left(self) -> int:
        """Indices of this rank from the position to the end of the epoch."""
        return self._share_of(self.num_samples - self.consumed)

    def _share_of(self, num_samples: int) -> int:
        world_size = self.world_size
        return (max(num_samples, 0) + (0 if self.drop_last else world_size - 1)) // world_size

    def __iter__(self) -> Iterator[int]:
        return _Indices(self)

    def _indices(self, consumed: int) -> np.ndarray[Any, Any]:
        """What this rank reads of the epoch after all ranks have consumed so many samples."""
        rank, world_size = self._where()
        count = self._share_of(self.num_samples - consumed)
        positions = (consumed + rank + world_size * np.arange(count, dtype=np.int64)) % max(self.num_samples, 1)
        if not self.shuffle:
            return positions
        digest = hashlib.blake2b(b"%d/%d" % (self.seed, self.epoch), digest_size=32).digest()
        # numpy has promised never to change what a RandomState gives for a seed.
        order = np.random.RandomState(np.frombuffer(digest, "<u4")).permutation(self.num_samples)
        return order[positions]

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order is read from now on. Another than before starts at its beginning."""
        if epoch != self.epoch:
            self.epoch = operator.index(epoch)
            self.consumed = 0

    def advance(self, num_samples: int) -> None:
        """Training has had so many samples more, on this rank and likewise on all others. `Run.steps` does this."""
        self.consumed = min(self.num_samples, self.consumed + num_samples * self.world_size)

    def state_dict(self) -> dict[str, Any]:
        """The position; it means the same to any number of ranks."""
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_samples": self.num_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position. CursorError if it is one of another order."""
        now = self.state_dict()
        other = [n for n in ("seed", "shuffle", "num_samples") if state[n] != now[n]]
        if other:
            raise CursorError(
                "this position belongs to another order of samples: "
                + "; ".join(f"{n} was {state[n]!r}, is {now[n]!r}" for n in other)
                + ". Make the Sampler as it was"
            )
        self.epoch, self.consumed = state["epoch"], state["consumed"]


class _Indices(Iterator[int]):
    """One rank's indices. Its own state_dict is for torchdata's StatefulDataLoader, which counts what it takes here."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._seek(sampler.consumed)

    def _seek(self, consumed: int) -> None:
        self._start = consumed
        self._left: Iterator[Any] | None = None  # not yet: a DataLoader with workers asks twice, and uses one
        self._taken = 0

    def __next__(self) -> int:
        if self._left is None:
            self._left = iter(self._sampler._indices(self._start))
        index = int(next(self._left))
        self._taken += 1
        return index

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self._start + self._taken * self._sampler.world_size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._seek(state["consumed"])


class SeededDataset(Dataset[Any]):
    """A map-style dataset whose samples see random numbers that depend on (seed, epoch, index) alone.

    Around each `dataset[index]` the global generators of torch (CPU), numpy and random are seeded, and afterwards
    put back exactly as they were. So a sample's augmentation is the same in any worker, in any batch, and after a
    resume; and loading it does not move the random numbers of the training loop.

    `set_epoch` reaches running workers as well (the number is in shared memory). `Run.steps` calls it; in a
    hand-written loop call it before each pass, or every epoch sees the same augmentations.

    Not covered: generators that the dataset keeps for itself (let it make them inside `__getitem__`, from the seeded
    ones), accelerators' generators, and a `collate_fn` that draws random numbers inside a worker. A `__getitems__`
    of the dataset is not used: one call for many samples cannot be seeded for each.
    """

    seeded_per_sample = True  # what a resumed DataLoader with workers looks for before it warns

    def __init__(self, dataset: Dataset[Any] | Sequence[Any], seed: int = 0) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"SeededDataset wraps a map-style dataset (one with __getitem__), not {type(dataset).__name__}; "
                "an iterable dataset has no index to seed from: seed inside its __iter__, from its own position"
            )
        self.dataset = dataset
        self.seed = operator.index(seed)
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        """The epoch that samples are seeded with from now on, in every process."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Seed samples for this epoch from now on, in running workers too; passed on to the wrapped dataset."""
        self._epoch.fill_(epoch)
        inner = getattr(self.dataset, "set_epoch", None)
        if callable(inner):
            inner(epoch)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        with _surroundings_kept():
            _seed_all(self.seed, self.epoch, index)
            return self.dataset[index]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """The samples at these indices, each seeded on its own: equal to `[self[i] for i in indices]`, but faster."""
        samples = []
        with _surroundings_kept():
            epoch = self.epoch
            for index in indices:
                _seed_all(self.seed, epoch, index)
                samples.append(self.dataset[index])
        return samples

    def __getattr__(self, name: str) -> Any:
        # Only for what is not found here. Copying and unpickling ask before `dataset` exists.
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)


@contextmanager
def _surroundings_kept() -> Iterator[None]:
    torch_state, numpy_state, random_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(random_state)


def _seed_all(seed: int, epoch: int, index: Any) -> None:
    digest = hashlib.blake2b(b"%d/%d/" % (seed, epoch) + _index_bytes(index), digest_size=20).digest()
    # The default generator itself: torch.manual_seed would also touch accelerators.
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    random.seed(int.from_bytes(digest[12:], "little"))


def _index_bytes(index: Any) -> bytes:
    """The same bytes for the same index in every process, whatever integer type a sampler yields."""
    try:
        return b"%d" % operator.index(index)
    except TypeError:
        pass
    if isinstance(index, str):
        return b"s%d:" % len(index) + index.encode()
    if isinstance(index, bytes):
        return b"b%d:" % len(index) + index
    if isinstance(index, float):
        return b"f" + float(index).hex().encode()
    if isinstance(index, (tuple, list)):
        return b"(" + b",".join(_index_bytes(part) for part in index) + b")"
    raise TypeError(
        f"SeededDataset cannot seed from an index of type {type(index).__name__}; "
        "have the sampler yield integers, floats, strings, bytes or tuples of them"
    )
