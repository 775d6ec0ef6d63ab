"""The truth about a run: copies of the live state after each commit, to compare bit for bit with what comes back."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import everstep
from everstep.store import files
from support import crash, equal

__all__ = [
    "Truth", "check_history", "check_resume", "crash", "different", "equal", "gate", "live_state", "slow", "tree_hash",
]  # fmt: skip


def copied(value: Any) -> Any:
    """A deep copy that keeps dtypes, strides, sparsity and types."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(v) for v in value)
    return value


def _named(objects: Any, name: str) -> dict[str, Any]:
    return objects if isinstance(objects, dict) else {name: objects}


def live_state(model: Any, optimizer: Any, extras: dict[str, Any] | None = None) -> dict[str, Any]:
    """The live objects in the form that History.state returns. Give the user's own modules, without wrappers."""
    models, optimizers = _named(model, "model"), _named(optimizer, "optimizer")
    names: dict[int, str] = {}
    for each in models.values():
        for name, p in each.named_parameters():
            names.setdefault(id(p), name)
    found: dict[str, Any] = {"model": {}, "optimizer": {}, "extras": {}}
    for key, each in models.items():
        found["model"][key] = copied(dict(each.state_dict()))
    for key, each in optimizers.items():
        groups = []
        for g, group in enumerate(each.param_groups):
            for i, p in enumerate(group["params"]):
                names.setdefault(id(p), f"param_groups.{g}.{i}")
            groups.append({**copied({k: v for k, v in group.items() if k != "params"}),
                           "params": [names[id(p)] for p in group["params"]]})  # fmt: skip
        state = {names[id(p)]: copied(dict(s)) for p, s in each.state.items() if isinstance(p, torch.Tensor)}
        found["optimizer"][key] = {"state": state, "param_groups": groups}
    for kind, objects in (("model", model), ("optimizer", optimizer)):
        if not isinstance(objects, dict):
            found[kind] = found[kind][kind]
    found["extras"] = {k: copied(e.state_dict()) for k, e in (extras or {}).items()}
    return found


def _in_order(value: Any) -> Any:
    """Dicts with sorted keys: order is no part of the truth."""
    if isinstance(value, dict):
        return {k: _in_order(value[k]) for k in sorted(value, key=str)}
    return value


def different(expected: Any, found: Any) -> list[str]:
    for part in (expected, found):
        groups = part["optimizer"]
        for each in [groups] if "param_groups" in groups else groups.values():
            each["param_groups"] = [_in_order(g) for g in each["param_groups"]]
    return equal(_in_order(expected), _in_order(found))


class Truth:
    """What the state was after each commit of a run."""

    def __init__(self, run: everstep.Run, model: Any, optimizer: Any, extras: dict[str, Any] | None = None) -> None:
        self.run = run
        self._objects = (model, optimizer, extras)
        self.states: dict[int, dict[str, Any]] = {}

    def resume(self, step: Any = "latest") -> int:
        at = self.run.resume(step)
        self.note()
        return at

    def note(self) -> None:
        self.states[self.run.step] = live_state(*self._objects)

    def commit(self, **kwargs: Any) -> int:
        """A commit that does nothing changes no truth."""
        step = self.run.commit(**kwargs)
        if step not in self.states:
            self.note()
        return step


def check_history(path: Any, truth: Truth | dict[int, Any], *, complete: bool = True, timeline: int | None = None) -> None:
    """Every restorable step has the bits it had; `complete`: and every noted step is restorable."""
    states = truth.states if isinstance(truth, Truth) else truth
    history = everstep.open(path, timeline=timeline)
    steps = history.steps
    if complete:
        assert steps == sorted(states), f"restorable: {steps}"
    for n in steps:
        wrong = different(states[n], history.state(n))
        assert wrong == [], f"step {n}: {wrong[:4]}"


def check_resume(
    path: Any, build: Callable[[], tuple[Any, ...]], truth: Truth | dict[int, Any], step: int, **options: Any
) -> None:
    """Fresh objects, scrambled, come back as they were at `step`."""
    states = truth.states if isinstance(truth, Truth) else truth
    model, optimizer, *rest = build()
    for each in _named(model, "model").values():
        scramble(each)
    extras = rest[0] if rest else None
    run = everstep.attach(model, optimizer, path, extras=extras, quiet=True, **options)
    try:
        assert run.resume() == step
        assert different(states[step], live_state(model, optimizer, extras)) == []
    finally:
        crash(run)


@torch.no_grad()
def scramble(module: nn.Module) -> None:
    """Values that no restore leaves behind unnoticed."""
    for t in (*module.parameters(), *module.buffers()):
        if t.is_contiguous() and t.numel() and not t.is_conj():
            t.view(-1).view(torch.uint8).fill_(0x01)


def _is_log(path: str) -> bool:
    return path.endswith(".frames")


@contextlib.contextmanager
def slow(seconds: float = 0.008, *, what: Callable[[str], bool] = _is_log) -> Iterator[None]:
    """Every write and sync of the log takes this long: the writer thread reads gradients late."""

    def fault(op: str, path: str) -> None:
        if op in ("write", "sync") and what(path):
            time.sleep(seconds)

    with files.observe(fault=fault):
        yield


class _Gate:
    def __init__(self) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        self.closed = False

    def close(self) -> None:
        self._open.clear()
        self.closed = True

    def open(self) -> None:
        self.closed = False
        self._open.set()

    def pass_through(self, op: str, path: str) -> None:
        if self.closed:
            self.reached.set()
            self._open.wait(60)


@contextlib.contextmanager
def gate(*, ops: tuple[str, ...] = ("write", "sync"), what: Callable[[str], bool] = _is_log) -> Iterator[_Gate]:
    """While closed, these operations on these paths stand still."""
    found = _Gate()

    def fault(op: str, path: str) -> None:
        if op in ops and what(path):
            found.pass_through(op, path)

    with files.observe(fault=fault):
        try:
            yield found
        finally:
            found.open()


def tree_hash(root: Any) -> dict[str, str]:
    """Every name under a folder (or file), with a hash of its bytes."""
    root = Path(root)
    found = {}
    if root.is_file():
        return {".": hashlib.sha256(root.read_bytes()).hexdigest()}
    for folder, _, names in os.walk(root):
        found[os.path.relpath(folder, root)] = "folder"
        for name in names:
            path = Path(folder, name)
            found[os.path.relpath(path, root)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
