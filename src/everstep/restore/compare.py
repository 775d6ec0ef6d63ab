"""Two runs' states, atom by atom and bit by bit, whatever the layouts they were written under."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep import tree
from everstep.fold import State
from everstep.memory import same_bits
from everstep.restore.join import BATCH_BYTES, Source, fetch


@dataclass
class Comparison:
    """What compare() found."""

    step: int
    other_step: int
    num_tensors: int = 0
    """That both have and that were compared."""
    differences: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        steps = f"step {self.step}" if self.step == self.other_step else f"steps {self.step} and {self.other_step}"
        if self.ok:
            return f"{steps}: {self.num_tensors} tensors, equal in every bit"
        head = f"{steps}: {len(self.differences)} difference(s) in {self.num_tensors} tensors"
        return "\n  ".join([head, *self.differences])


def compare(a: Source, b: Source) -> Comparison:
    """Parameters, buffers, optimizer state and hyperparameters. Not the cursor, which is each rank's own."""
    found = Comparison(a.step, b.step)
    for one, other, where in ((a, b, "second"), (b, a, "first")):
        found.differences += [f"{x.label()} is not in the {where}" for uid, x in one.atoms.items() if uid not in other.atoms]
    for uid in a.atoms.keys() & b.atoms.keys():
        x, y = a.atoms[uid], b.atoms[uid]
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            found.differences.append(f"{x.label()} is {x.shape} {x.dtype} in the first, {y.shape} {y.dtype} in the second")
    common = [uid for uid, x in a.atoms.items() if uid in b.atoms and b.atoms[uid].shape == x.shape]
    for batch in _batches(a, common):
        mine, theirs = (fetch(s, {uid: s.atoms[uid] for uid in batch}).state for s in (a, b))
        _compare_states(found, mine, theirs, {uid: a.atoms[uid].label() for uid in batch})
    return found


def _batches(source: Source, uids: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for uid in uids:
        batch.append(uid)
        size += source.atoms[uid].numel * 16
        if size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _compare_states(found: Comparison, a: State, b: State, labels: dict[int, str]) -> None:
    for uid, label in labels.items():
        if uid not in a.tensors or uid not in b.tensors:  # each rank's own, and no rank has all of it
            if uid in a.tensors or uid in b.tensors:
                found.differences.append(f"{label}: only one of them has all of it")
            continue
        found.num_tensors += 1
        if not same_bits(a.tensors[uid], b.tensors[uid]):
            found.differences.append(f"{label}: {_how(a.tensors[uid], b.tensors[uid])}")
    for name in a.optimizers.keys() | b.optimizers.keys():
        if name not in a.optimizers or name not in b.optimizers:
            found.differences.append(f"optimizer {name!r} is in one of them only")
            continue
        mine, theirs = a.optimizers[name], b.optimizers[name]
        hyper = [{u: h for us, h in zip(o.params, o.hyper, strict=True) for u in us} for o in (mine, theirs)]
        for uid, label in labels.items():
            if (uid in hyper[0]) != (uid in hyper[1]) or (uid in hyper[0] and hyper[0][uid] != hyper[1][uid]):
                found.differences.append(
                    f"{label}: hyperparameters of {name!r} differ: {_told(hyper[0].get(uid))} and {_told(hyper[1].get(uid))}"
                )
            _compare_values(found, f"{name}: {label}", mine.state.get(uid, {}), theirs.state.get(uid, {}))


def _compare_values(found: Comparison, label: str, a: dict[str, Any], b: dict[str, Any]) -> None:
    for key in a.keys() | b.keys():
        if key not in a or key not in b:
            found.differences.append(f"{label}: {key} is in one of them only")
            continue
        x, y = a[key], b[key]
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            found.num_tensors += 1
            if x.is_sparse or y.is_sparse:
                x, y = x.coalesce().to_dense(), y.coalesce().to_dense()
            if not same_bits(x, y):
                found.differences.append(f"{label}: {key}: {_how(x, y)}")
        elif tree.pack(x) != tree.pack(y):
            found.differences.append(f"{label}: {key} is {x!r:.60} and {y!r:.60}")


def _how(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
    if not a.is_floating_point():
        return f"{int((a != b).sum())} of {a.numel()} elements differ"
    distance = (a.double() - b.double()).abs()
    return f"{int((distance != 0).sum())} of {a.numel()} elements differ, by at most {float(distance.max()):.3g}"


def _told(hyper: Any) -> str:
    return "none" if hyper is None else f"{tree.unpack(hyper)!r:.120}"
