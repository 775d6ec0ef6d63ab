"""Datasets whose randomness does not depend on who loads a sample, or when."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset


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
