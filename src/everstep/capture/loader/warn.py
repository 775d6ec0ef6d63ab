"""Warnings that a resumed pass may not be what it would have been, or takes long to resume."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from everstep.capture.loader.anatomy import name_of
from everstep.errors import InexactWarning, SlowResumeWarning


def warn_of_workers(loader: Any, what: str) -> None:
    """Warn of random numbers in workers, unless the dataset is seeded per sample; `what` says what became of them."""
    dataset = getattr(loader, "dataset", None)
    if _seeded_per_sample(dataset):
        return
    if isinstance(dataset, IterableDataset):
        mend = "seed inside the dataset, from its own position"
    else:
        mend = "wrap the dataset in everstep.data.SeededDataset"
    warn_inexact(
        f"{what}: the order of samples is exact, random augmentations in workers are not. To make them exact, {mend}; "
        "if the dataset draws no random numbers, say so with an attribute `seeded_per_sample = True` on it"
    )


def warn_inexact(message: str) -> None:
    warnings.warn(message, InexactWarning, stacklevel=5)


def warn_of_slow_resume(loader: Any, num_batches: int) -> None:
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        faster = "a map-style dataset, or torchdata's StatefulDataLoader over a dataset that has state_dict"
    elif isinstance(loader, DataLoader):
        faster = "a DataLoader that does not override __iter__, or state_dict and load_state_dict on this one"
    else:
        faster = "a DataLoader over a map-style dataset, given as it is, or state_dict and load_state_dict on this object"
    warnings.warn(
        f"{name_of(loader)} cannot be positioned: {num_batches} batches are fetched and dropped to resume it, which is "
        f"right only if it gives the same batches when started again. Faster: {faster}",
        SlowResumeWarning,
        stacklevel=4,
    )


def started_anew(loader: Any, delivered: int) -> str:
    return (
        f"the {loader.num_workers} workers of this {name_of(loader)} start anew, and the random numbers that they had "
        f"after {delivered} batches are not reproduced"
    )


def _seeded_per_sample(dataset: Any) -> bool:
    if getattr(dataset, "seeded_per_sample", False):
        return True
    inside = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
    return all(part is not None and part is not dataset and _seeded_per_sample(part) for part in inside)
