"""What modules keep beside parameters and buffers, by torch's own get_extra_state() and set_extra_state()."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from everstep import tree
from everstep.errors import InexactWarning, UnsupportedValueError
from everstep.naming import walk

SUFFIX = "_extra_state"
"""Of a module's name in a state_dict(): what torch calls it."""


class ModuleStates:
    """Those of some models. Modules are looked for each time that any have been found: they may be replaced."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        """An InexactWarning names what cannot be stored."""
        self._models = models
        self._refused: set[str] = set()
        said = []
        for key, module in self._found():
            try:
                tree.freeze(module.get_extra_state(), path=key)
            except UnsupportedValueError as e:
                self._refused.add(key)
                said.append(f"{key} ({type(module).__name__}): {e}")
        self.any = any(key not in self._refused for key, _ in self._found())
        if said:
            warnings.warn(
                f"what get_extra_state() gives is not stored of {', '.join(said[:5])}. It begins anew at a resume: "
                "keep it in a buffer, in numbers, strings and tensors, or in an object of extras",
                InexactWarning,
                stacklevel=6,
            )

    def _found(self) -> Iterator[tuple[str, nn.Module]]:
        for name, model in self._models.items():
            for path, module in walk(model):
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    yield f"{name}:{path}{SUFFIX}", module

    def capture(self) -> dict[str, Any]:
        """Copies, for the cursor: by model, a colon, and the name that torch's state_dict() has for it."""
        return {
            key: tree.freeze(module.get_extra_state(), path=key)
            for key, module in self._found()
            if key not in self._refused
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """After parameters and buffers. An InexactWarning names modules that the run has nothing for."""
        lacking = []
        for key, module in self._found():
            if key in saved:
                module.set_extra_state(tree.freeze(saved[key]))
            elif key not in self._refused:
                lacking.append(key)
        if lacking:
            warnings.warn(
                f"the run has nothing for {', '.join(lacking[:5])}, which its module would get by set_extra_state(): it "
                "stays as it is",
                InexactWarning,
                stacklevel=4,
            )
