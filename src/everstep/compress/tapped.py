"""tap: communication hooks of others (torch's PowerSGD, fp16, the user's own), made visible.

What such a hook makes of a bucket is the gradient that the optimizer consumes, and that is what frames store. A tap sees to
what the hook itself does not: all ranks have the same one, its result fits the bucket, and what it remembers from step to
step (PowerSGD's P, Q, errors and random numbers) is state, which `everstep.attach(..., compress=tapped)` stores with every
step.
"""

# No `from __future__ import annotations`: DDP looks at the annotations of hooks, and wants classes.

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.futures import Future

from everstep import tree
from everstep.compress.agree import agree
from everstep.errors import UsageError

_RANDOM = "numpy.random.RandomState"


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
        if key not in self._checked:
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
        return {"state": {k: _frozen(v, k) for k, v in _attributes(state).items()}}

    def set_position(self, position: Mapping[str, Any]) -> None:
        """The inverse of position()."""
        if callable(getattr(self.state, "load_state_dict", None)):
            self.state.load_state_dict(tree.freeze(position["state"]))
            return
        for name, value in position["state"].items():
            if isinstance(value, dict) and set(value) == {_RANDOM}:
                getattr(self.state, name).set_state(tuple(value[_RANDOM]))
            else:
                setattr(self.state, name, tree.freeze(value))


def _attributes(state: Any) -> dict[str, Any]:
    """Those of an object that are its own, without process groups: each process has its own."""
    if state is None or isinstance(state, dist.ProcessGroup):
        return {}
    slots = [name for cls in type(state).__mro__ for name in getattr(cls, "__slots__", ())]
    found = {name: getattr(state, name) for name in slots if hasattr(state, name)}
    found.update(getattr(state, "__dict__", {}))
    return {k: v for k, v in found.items() if not isinstance(v, dist.ProcessGroup)}


def _frozen(value: Any, name: str) -> Any:
    if isinstance(value, np.random.RandomState):
        return {_RANDOM: list(value.get_state(legacy=True))}
    return tree.freeze(value, path=f"compress.state.{name}")
