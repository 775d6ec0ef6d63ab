"""What decides the bits of a computation, apart from its input."""

from __future__ import annotations

from typing import Any

import torch


def fingerprint() -> dict[str, Any]:
    """Of this process, now."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "torch": str(torch.__version__),
        "device": "cpu" if accelerator is None else accelerator.type,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def differences(recorded: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`torch 2.6.0 then, 2.13.0 now` for each that differs; empty if equal."""
    keys = dict.fromkeys((*recorded, *now))
    return [f"{k} {recorded.get(k)} then, {now.get(k)} now" for k in keys if recorded.get(k) != now.get(k)]
