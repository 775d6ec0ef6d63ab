"""Every way in which ranks share one transformer here. Only names: builders.py makes them, where torch is imported."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

KINDS = ("adamw", "adamw-fused", "sgd")
PLAIN = ("adamw", "sgd")
"""torch's fused implementations do not take DTensors and plain tensors together."""


@dataclass(frozen=True)
class Way:
    ranks: int
    builder: str
    options: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = KINDS
    """Optimizers that torch can run in this layout."""

    @property
    def family(self) -> str:
        """Runs go on under layouts of the same family: one model."""
        return self.options.get("family", "dense")  # type: ignore[no-any-return]

    def build(self, kind: str) -> Any:
        """This rank's builders.Training, with the optimizer asked for."""
        return getattr(importlib.import_module("builders"), self.builder)(kind, **self.options)


LAYOUTS: dict[str, Way] = {
    "one": Way(1, "one"),
    "ddp2": Way(2, "ddp"),
    "ddp4": Way(4, "ddp"),
    "zero2": Way(2, "zero1"),
    "fsdp2": Way(2, "fsdp"),
    "fsdp4": Way(4, "fsdp"),
    "hsdp2x2": Way(4, "hsdp"),
    "tp2": Way(2, "tp", kinds=PLAIN),
    "tp4": Way(4, "tp", kinds=PLAIN),
    "sp2": Way(2, "tp", {"sequence": True}),
    "fsdp2xtp2": Way(4, "fsdp_tp"),
    "pp2": Way(2, "pp"),
    "pp2xdp2": Way(4, "pp"),
    "one-stack": Way(1, "one", {"family": "stack"}),
    "ep2-stack": Way(2, "ep", {"family": "stack"}, PLAIN),
    "one-modules": Way(1, "one", {"family": "modules"}),
    "ep2-modules": Way(2, "ep", {"family": "modules"}),
}
