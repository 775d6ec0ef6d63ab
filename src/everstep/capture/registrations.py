"""torch's own notice that a module got a parameter, a buffer or a child."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as torch_module


class Registrations:
    """`seen` becomes True when any module of this process registers anything."""

    def __init__(self) -> None:
        self.seen = True
        self._handles = [
            torch_module.register_module_parameter_registration_hook(self._on_registration),
            torch_module.register_module_buffer_registration_hook(self._on_registration),
            torch_module.register_module_module_registration_hook(self._on_registration),
        ]

    def _on_registration(self, module: Any, name: str, value: Any) -> None:
        self.seen = True

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
