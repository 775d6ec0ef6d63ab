"""tap: communication hooks of others (torch's PowerSGD, fp16, the user's own), made visible.

What such a hook makes of a bucket is the gradient that the optimizer consumes, and that is what frames store. A tap sees to
what the hook itself does not: all ranks have the same one, its result fits the bucket, and what it remembers from step to
step (PowerSGD's P, Q, errors and random numbers) is state, which `everstep.attach(..., compress=tapped)` stores with every
step.
"""

# No `from __future__ import annotations`: DDP looks at the annotations of hooks, and wants classes.

import collections
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.futures import Future

from everstep import tree
from everstep.compress.agree import agree
from everstep.errors import UnsupportedValueError, UsageError

_RANDOM = "numpy.random.RandomState"
_CONSTANTS = frozenset({bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_POWER_SGD = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
_VALUES = (dict, list, tuple, set, collections.deque, bytearray, torch.Tensor, np.ndarray)
"""Things whose attributes, if they have any, are not what they consist of."""


def tap(hook: Callable[[Any, Any], Any], state: Any = None) -> "Tapped":
    """For model.register_comm_hook(tapped.state, tapped.hook), in place of register_comm_hook(state, hook)."""
    return Tapped(hook, state)


class Tapped:
    """A communication hook with its state."""

    def __init__(self, hook: Callable[[Any, Any], Any], state: Any = None) -> None:
        if not callable(hook):
            raise UsageError(f"a communication hook is a function of (state, bucket), not a {type(hook).__name__}")
        self.state = state
        self._hook = hook
        self.process_group: Any = None
        """That of the DDP module, where it is not the default one."""
        self._agreed = False
        self._talks_within = any(cls.__module__ == _POWER_SGD for cls in type(state).__mro__)
        """Whether its callbacks send messages, and wait for them: on gloo those of another bucket get in their way."""
        self._checked: set[tuple[int, int]] = set()

    def describe(self) -> dict[str, Any]:
        """What must be the same on all ranks and after a resume."""
        name = getattr(self._hook, "__qualname__", type(self._hook).__qualname__)
        return {"kind": "tap", "hook": f"{getattr(self._hook, '__module__', '')}.{name}"}

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
        """A DDP communication hook that does what the tapped one does."""
        buffer = bucket.buffer()
        if not self._agreed:
            agree(self.describe(), self.process_group or dist.group.WORLD, buffer.device)
            self._agreed = True
        future: Any = self._hook(state, bucket)
        if not isinstance(future, torch._C.Future):
            raise UsageError(
                f"{self.describe()['hook']} returned a {type(future).__name__}; a communication hook returns a "
                "torch.futures.Future of one tensor"
            )
        key = (bucket.index(), buffer.numel())
        if key not in self._checked or (self._talks_within and buffer.device.type == "cpu"):
            # The first time, here: what is raised in a future loses its type.
            self._check(future.wait(), buffer)
            self._checked.add(key)
            return cast("Future[torch.Tensor]", future)

        def check(done: "Future[Any]") -> torch.Tensor:
            return self._check(done.value(), buffer)

        return cast("Future[torch.Tensor]", future.then(check))

    def _check(self, result: Any, buffer: torch.Tensor) -> torch.Tensor:
        found = result[0] if isinstance(result, (list, tuple)) and len(result) == 1 else result
        if not isinstance(found, torch.Tensor) or found.shape != buffer.shape or found.dtype != buffer.dtype:
            what = f"{tuple(found.shape)} {found.dtype}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise UsageError(
                f"{self.describe()['hook']} made {what} of a bucket of {tuple(buffer.shape)} {buffer.dtype}: a "
                "communication hook must return a tensor of the bucket's shape and dtype"
            )
        return found

    # -- state ----------------------------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """What the hook remembers. UnsupportedValueError names what cannot be stored."""
        state = self.state
        if callable(getattr(state, "state_dict", None)):
            return {"state": tree.freeze(state.state_dict(), path="compress.state")}
        found = {name: _plain(value) for name, value in _remembered(state).items()}
        return {"state": tree.freeze(found, path="compress.state")}

    def set_position(self, position: Mapping[str, Any]) -> None:
        """The inverse of position()."""
        state = self.state
        if callable(getattr(state, "load_state_dict", None)):
            state.load_state_dict(tree.freeze(position["state"]))
        elif isinstance(state, dict):
            found = {key: _thawed(value, state.get(key)) for key, value in position["state"].items()}
            for key in [key for key, value in state.items() if not isinstance(value, dist.ProcessGroup)]:
                del state[key]
            for key, value in found.items():
                state[key] = value
        else:
            for name, value in position["state"].items():
                setattr(state, name, _thawed(value, getattr(state, name, None)))


def _remembered(state: Any) -> dict[Any, Any]:
    """What a state consists of, by name, without process groups: each process has its own."""
    if _is_constant(state):
        return {}
    found = _attributes(state)
    if isinstance(state, dict) and not found:
        found = dict(state)
    elif isinstance(state, _VALUES) or not (hasattr(state, "__dict__") or _slots(type(state))):
        raise UnsupportedValueError(
            f"compress.state: cannot store this {type(state).__name__}, the state of a tapped hook. Give the hook a dict, "
            "an object with attributes, or one with state_dict() and load_state_dict()"
        )
    return {name: value for name, value in found.items() if not isinstance(value, dist.ProcessGroup)}


def _is_constant(value: Any) -> bool:
    """Whether there is nothing in it that a hook could change."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, dist.ProcessGroup) or type(value) in _CONSTANTS


def _attributes(state: Any) -> dict[Any, Any]:
    """Those of an object that are its own."""
    found = {name: getattr(state, name) for name in _slots(type(state)) if hasattr(state, name)}
    found.update(getattr(state, "__dict__", {}))
    return found


def _slots(kind: type) -> list[str]:
    """As attributes are called: a name of two underscores is its class's own."""
    found = []
    for cls in kind.__mro__:
        given = cls.__dict__.get("__slots__", ())
        for name in (given,) if isinstance(given, str) else given:
            is_private = name.startswith("__") and not name.endswith("__") and cls.__name__.strip("_")
            if name not in ("__dict__", "__weakref__"):
                found.append(f"_{cls.__name__.lstrip('_')}{name}" if is_private else name)
    return found


def _plain(value: Any) -> Any:
    return {_RANDOM: list(value.get_state(legacy=True))} if isinstance(value, np.random.RandomState) else value


def _thawed(value: Any, live: Any) -> Any:
    """What was stored; a source of random numbers stays the same object."""
    if not isinstance(value, dict) or set(value) != {_RANDOM}:
        return tree.freeze(value)
    source = live if isinstance(live, np.random.RandomState) else np.random.RandomState()
    source.set_state(tuple(value[_RANDOM]))
    return source
