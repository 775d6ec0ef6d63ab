"""S(step) in memory, and the classes that optimizers are built from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from everstep.atoms import Layout, OptimizerSpec
from everstep.errors import CorruptionError, ReplayError

Ranges = Sequence[tuple[int, int]]
"""Elements [start, stop) of a tensor, each once, in order."""


class Window(NamedTuple):
    """What of a parameter is in memory. Its tensor is flat; elements are counted from the parameter's first everywhere."""

    start: int
    """The element that the memory begins with."""
    numel: int
    """Of the whole parameter, as its rank held it."""


@dataclass
class OptimizerState:
    """One optimizer: its groups and the state of each parameter, by uid."""

    spec: OptimizerSpec
    hyper: list[Any] = field(default_factory=list)
    """tree.pack of each group without its parameters."""
    params: list[tuple[int, ...]] = field(default_factory=list)
    state: dict[int, dict[str, Any]] = field(default_factory=dict)


class Loading(Protocol):
    """Values on their way into the memory of a state's tensors.

    Parts are elements [start, stop); all of a tensor if not told.
    """

    def begin(self, tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> None:
        """Ask for what will be needed soon. Any thread."""
        ...

    def need(self, tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> None:
        """Return when this part of a tensor has its values. Any thread."""
        ...

    def need_all(self) -> None:
        """Return when all have theirs."""
        ...

    def close(self) -> None: ...


@dataclass
class State:
    """S(step): everything but what only the live objects know."""

    step: int
    layout: Layout
    tensors: dict[int, torch.Tensor]
    optimizers: dict[str, OptimizerState]
    carried: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients that the next backward adds to."""
    lost: set[int] = field(default_factory=set)
    """Parameters whose carried gradient could not be stored."""
    cursor: bytes = b""
    loading: Loading | None = None
    """For tensors that have their memory, but perhaps not yet their values."""
    is_part: bool = False
    """Only some of the layout's atoms are here, with their optimizer state. Frames that are folded hold no others."""
    needed: Mapping[int, Ranges] = field(default_factory=dict)
    """By parameter: elements (flat, cut at multiples of 64) that somebody wants. Others need not get their values."""
    windows: Mapping[int, Window] = field(default_factory=dict)
    """Parameters that have, with all of their optimizer state that is cut with them, no memory for others than those."""

    def here(self, uids: tuple[int, ...]) -> tuple[int, ...]:
        """Those of a group's parameters that are in this state: all, unless it is a part."""
        return tuple(uid for uid in uids if uid in self.tensors) if self.is_part else uids

    def first(self, uid: int) -> int:
        """The element that a parameter's memory begins with."""
        return self.windows[uid].start if uid in self.windows else 0

    def begin(self, tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> None:
        """Ask for what of this tensor of the state will be needed soon. Any thread."""
        if self.loading is not None:
            self.loading.begin(tensor, start, stop)

    def need(self, tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> None:
        """Return when this part of a tensor of the state has its values. Any thread."""
        if self.loading is not None:
            self.loading.need(tensor, start, stop)

    def need_all(self) -> None:
        """Return when all have theirs: all that is needed."""
        if self.loading is not None:
            self.loading.need_all()

    def close(self) -> None:
        """After need_all(), or when the state is given up."""
        if self.loading is not None:
            self.loading.close()
            self.loading = None


Live = Mapping[str, torch.optim.Optimizer]


def optimizer_of(state: State, name: str) -> OptimizerState:
    try:
        return state.optimizers[name]
    except KeyError:
        raise CorruptionError(f"a frame updates the optimizer {name!r}, which the layout does not have") from None




_registered: dict[str, type[torch.optim.Optimizer]] = {}


def class_name(cls: type) -> str:
    """`torch.optim.AdamW` for torch's own, `module:Qualname` for others."""
    if getattr(torch.optim, cls.__name__, None) is cls:
        return f"torch.optim.{cls.__name__}"
    return f"{cls.__module__}:{cls.__qualname__}"


def register(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Let this optimizer class be replayed without a live optimizer: by History, the command line and followers.

    Its update must depend on nothing but `param_groups`, `state` and the gradients. Usable as a decorator.
    """
    _registered[class_name(cls)] = cls
    return cls


def find_class(name: str) -> type[torch.optim.Optimizer]:
    """The class a layout names. Nothing is imported because a file says so."""
    if name in _registered:
        return _registered[name]
    if name.startswith("torch.optim.") and name != "torch.optim.LBFGS":
        cls = getattr(torch.optim, name.removeprefix("torch.optim."), None)
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
            return cls
    raise ReplayError(
        f"the optimizer class {name} cannot be built here. Call everstep.register(YourOptimizer) first, or resume with "
        "the live optimizer"
    )
