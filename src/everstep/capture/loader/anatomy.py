"""What a loader is made of: its kind, the shape that a position belongs to, its parts, its workers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from everstep.data import Sampler


def kind_of(loader: Any) -> str:
    """How its position is found again: "asked", "counted", "map" or "consumed"."""
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return "asked"
    plain = (DataLoader.__iter__, DataLoader._get_iterator)
    if (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and (type(loader).__iter__, type(loader)._get_iterator) == plain
    ):
        return "map" if counting_sampler(loader) is None else "counted"
    return "consumed"


def counting_sampler(loader: Any) -> Sampler | None:
    """The everstep.data.Sampler whose indices the loader takes as they come; one that is wrapped may be reordered."""
    batches = loader.batch_sampler
    if batches is None:
        sampler = loader.sampler
    elif type(batches) is BatchSampler:
        sampler = batches.sampler
    else:
        return None
    return sampler if isinstance(sampler, Sampler) and type(sampler).__iter__ is Sampler.__iter__ else None


def shape_of(loader: Any, kind: str) -> dict[str, Any]:
    """What must be the same for a position to mean the same."""
    if not isinstance(loader, DataLoader):
        return {"type": name_of(loader), "num_batches": _length(loader)}
    if kind == "counted":
        sampler = counting_sampler(loader)
        assert sampler is not None
        order = {"num_samples": sampler.num_samples, "shuffle": sampler.shuffle, "seed": sampler.seed}
        return {"type": name_of(loader), "sampler": "everstep.data.Sampler", **order}
    # Not the length over an iterable dataset: it is an estimate, and torch complains later about having given it.
    sized = not isinstance(loader.dataset, IterableDataset)
    index_sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    batch_size = getattr(index_sampler, "batch_size", None)
    return {
        "type": name_of(loader),
        "num_batches": _length(loader) if sized else None,
        "num_samples": _length(loader.dataset) if sized else None,
        "batch_size": batch_size if isinstance(batch_size, int) else None,
        "sampler": sampler_name(index_sampler),
    } | ({} if kind == "map" else {"num_workers": loader.num_workers})


def name_of(thing: Any) -> str:
    return type(thing).__name__


def sampler_name(sampler: Any) -> str:
    inner = getattr(sampler, "sampler", None)
    return name_of(sampler) + ("" if inner is None else f"({sampler_name(inner)})")


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def lookahead(loader: Any) -> int:
    """How many batches of indices are asked for before they are delivered."""
    return int(getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", None) or 0))


def workers_persist(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers


def workers_run(loader: Any) -> bool:
    return workers_persist(loader) and loader._iterator is not None


def _chain(part: Any, inward: str) -> list[Any]:
    """The object and those inside it, found by the attribute `inward`, from the outside in."""
    chain: list[Any] = []
    while part is not None and len(chain) < 8 and not any(part is outer for outer in chain):
        chain.append(part)
        part = getattr(part, inward, None)
    return chain


def parts(loader: Any) -> list[list[Any]]:
    """The loader, its samplers and its datasets, as chains from the outside in."""
    outermost = [getattr(loader, name, None) for name in ("batch_sampler", "sampler", "dataset")]
    inward = ("sampler", "sampler", "dataset")
    return [[loader], *(_chain(part, name) for part, name in zip(outermost, inward, strict=True))]


def start_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` on the loader, its samplers and its datasets: the outermost of each that has one.

    An everstep.data.Sampler also forgets how far it was: whoever opens a pass decides where it starts.
    """
    told: list[Any] = []
    for chain in parts(loader):
        for part in chain:
            if isinstance(part, Sampler):
                part.consumed = 0
        for part in chain:
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                owner = getattr(set_epoch, "__self__", part)  # not always `part`: wrappers pass attributes on
                if not any(owner is other for other in told):
                    told.append(owner)
                    set_epoch(epoch)
                break  # it passes the number on to what is inside, or means not to
