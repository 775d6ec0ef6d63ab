"""What a loader is made of: its kind, the shape that a position belongs to, its parts, its workers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset


def kind_of(loader: Any) -> str:
    """How its position is found again: "asked", "map" or "consumed"."""
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return "asked"
    plain = (DataLoader.__iter__, DataLoader._get_iterator)
    if (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and (type(loader).__iter__, type(loader)._get_iterator) == plain
    ):
        return "map"
    return "consumed"


def shape_of(loader: Any, kind: str) -> dict[str, Any]:
    """What must be the same for a position to mean the same."""
    if not isinstance(loader, DataLoader):
        return {"type": name_of(loader), "num_batches": _length(loader)}
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


def tell_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` on the loader, its samplers and its datasets: the outermost of each that has one."""
    told: list[Any] = []
    for chain in parts(loader):
        for part in chain:
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                owner = getattr(set_epoch, "__self__", part)  # not always `part`: wrappers pass attributes on
                if not any(owner is other for other in told):
                    told.append(owner)
                    set_epoch(epoch)
                break  # it passes the number on to what is inside, or means not to
