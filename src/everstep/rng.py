"""The states of all random number generators that training draws from."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """torch (CPU and every accelerator in use), numpy's global one, random. Cheap; values are immutable or copies."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": _numpy_state(),
        "random": random.getstate(),
    }
    if _has_accelerator():
        state["device"] = _device_states()
    return state


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


_last_numpy: tuple[bytes, Any] | None = None


def _numpy_state() -> Any:
    """np.random.get_state(), which takes 40 µs, only if it can have changed since the last call.

    The words and position of its Mersenne Twister are looked at in place. They stay the same when a normal deviate that
    numpy held back is used up, so that a state that holds one is always read anew.
    """
    global _last_numpy
    generator = np.random.mtrand._rand._bit_generator
    words = b""
    if type(generator) is np.random.MT19937:
        words = ctypes.string_at(generator.ctypes.state_address, 625 * 4)
        if _last_numpy is not None and _last_numpy[0] == words and not _last_numpy[1][3]:
            return _last_numpy[1]
    state = np.random.get_state(legacy=True)
    _last_numpy = (words, state) if words else None
    return state


def to_plain(state: dict[str, Any]) -> dict[str, Any]:
    """In a form that tree.pack stores compactly."""
    version, words, gauss = state["random"]
    name, keys, position, has_gauss, cached = state["numpy"]
    return {
        "torch": state["torch"],
        "numpy": [str(name), np.asarray(keys, np.uint32), int(position), int(has_gauss), float(cached)],
        "random": [version, np.array(words, np.uint32), gauss],
        "device": state.get("device"),
    }


def install(plain: dict[str, Any]) -> None:
    """Set every generator to a captured state (after to_plain and a round trip)."""
    torch.set_rng_state(plain["torch"])
    name, keys, position, has_gauss, cached = plain["numpy"]
    np.random.set_state((name, keys, position, has_gauss, cached))
    version, words, gauss = plain["random"]
    random.setstate((version, tuple(int(w) for w in words), gauss))
    if plain.get("device") is not None and torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        for index, state in enumerate(plain["device"]):
            module.set_rng_state(state, index)


def seed_in(plain: dict[str, Any]) -> int:
    """The number that torch's generator was seeded with, from a recorded state."""
    generator = torch.Generator()
    generator.set_state(plain["torch"])
    return generator.initial_seed()


def derived(seed: int, step: int, rank: int) -> dict[str, Any]:
    """Streams for a rank that has no past: what install() takes, a function of (seed, step, rank) and nothing else.

    For a run that goes on under another number of ranks. There the recorded streams belong to no rank of now: to keep
    some would repeat numbers on two ranks or leave others out. So every rank begins new ones, which differ between
    ranks and steps, and are the same each time that this step is resumed.
    """
    digest = hashlib.blake2b(b"rank/%d/%d/%d" % (seed, step, rank), digest_size=48).digest()
    torch_seed = int.from_bytes(digest[:8], "little")
    plain = to_plain({
        "torch": torch.Generator().manual_seed(torch_seed).get_state(),
        "numpy": np.random.RandomState(np.frombuffer(digest[8:24], "<u4")).get_state(legacy=True),
        "random": random.Random(int.from_bytes(digest[24:], "little")).getstate(),
    })  # fmt: skip
    if _has_accelerator():
        kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
        devices = [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
        plain["device"] = [torch.Generator(device).manual_seed(torch_seed).get_state() for device in devices]
    return plain


def _device_states() -> list[torch.Tensor]:
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return [module.get_rng_state(i) for i in range(torch.accelerator.device_count())]
