"""The states of all random number generators that training draws from."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from everstep import native


def capture() -> dict[str, Any]:
    """torch (CPU and every accelerator in use), numpy's global one, random. Cheap; values are immutable or copies, and
    nobody writes to what is returned: it may be returned again."""
    with _lock:
        look, state, _Seen.state = _Seen.look, _Seen.state, None  # if this is interrupted, nothing is known
        if state is None or look is None or _rand._bit_generator is not _Numpy.generator:
            state = _all()
        else:
            moved = look()
            if moved or state["numpy"][3] or _Random.gauss_next is not state["random"][2]:
                state = _moved(state, moved)
        _Seen.state = state
    return {**state, "device": _device_states()} if _has_accelerator() else state


_lock = threading.Lock()
"""What was seen last is one thing for all threads."""


class _Seen:
    """What capture() found last. With `_lock`."""

    state: dict[str, Any] | None = None
    look: Callable[[], int] | None = None
    """Which generators have moved since it was called last: by the native part, all three at once."""


def _all() -> dict[str, Any]:
    """Every generator is asked; what the native part sees from now on is compared with what it sees now."""
    if _Seen.look is None or _rand._bit_generator is not _Numpy.generator:
        _numpy_state()
        words, of_numpy, found = _random_words(), _Numpy.words, native.part()
        _Seen.look = None
        if found is not None and words is not None and of_numpy is not None:
            _Seen.look = functools.partial(
                found.generators, torch.default_generator, of_numpy.address, words.address,
                bytearray(found.GENERATORS_BYTES),
            )  # fmt: skip
    if _Seen.look is not None:
        _Seen.look()
    return {"torch": torch.default_generator.get_state(), "numpy": _numpy_state(), "random": _random_state()}


def _moved(state: dict[str, Any], moved: int) -> dict[str, Any]:
    """A new state, of which only what has moved is asked. (numpy's words stay when a deviate held back is used up.)"""
    state = dict(state)
    if moved & 1:
        state["torch"] = torch.default_generator.get_state()
    if moved & 2 or state["numpy"][3]:
        state["numpy"] = _numpy_state()
    if moved & 4 or _Random.gauss_next is not state["random"][2]:
        state["random"] = _random_state()
    return state


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


_WORDS = 624
"""Of a Mersenne Twister; with them goes the position of the next one."""
_STATE_BYTES = 4 * (_WORDS + 1)


class _Words:
    """The words and position of a Mersenne Twister, looked at in place."""

    def __init__(self, address: int) -> None:
        self.address = address
        memory: Any = (ctypes.c_char * _STATE_BYTES).from_address(address)
        self._now = memoryview(memory).cast("B").cast("I")
        self._last = memoryview(b"").cast("I")
        self.bytes = b""

    def look(self) -> bool:
        """Whether they are the same as at the last look; if not, `bytes` are what they are now."""
        if self._now == self._last:
            return True
        self.bytes = self._now.tobytes()
        self._last = memoryview(self.bytes).cast("I")
        return False


_rand: Any = np.random.mtrand._rand


class _Numpy:
    """numpy's global generator as it was when it was last asked."""

    generator: Any = None
    words: _Words | None = None
    state: Any = None


def _numpy_state() -> Any:
    """np.random.get_state(), which takes 40 µs, only if it can have changed since the last call.

    The words and position of its Mersenne Twister stay the same when a normal deviate that numpy held back is used up, so
    that a state that holds one is always read anew.
    """
    generator = _rand._bit_generator
    if generator is not _Numpy.generator:
        is_twister = type(generator) is np.random.MT19937
        _Numpy.generator, _Numpy.state = generator, None
        _Numpy.words = _Words(generator.ctypes.state_address) if is_twister else None
    same, state = _Numpy.words is not None and _Numpy.words.look(), _Numpy.state
    if same and state is not None and not state[3]:
        return state
    _Numpy.state = np.random.get_state(legacy=True)
    return _Numpy.state


def _random_state() -> tuple[int, Any, float | None]:
    """random.getstate(), but with the position and the words as bytes where they can be read in place."""
    words = _random_words()
    if words is None:
        return random.getstate()
    words.look()
    return _Random.VERSION, words.bytes, _Random.gauss_next


_Random: Any = random._inst


@functools.cache
def _random_words() -> _Words | None:
    """Where CPython keeps the position and the words of random's generator; None if they are not there."""
    start, size = object.__basicsize__, _Random.__class__.__base__.__basicsize__
    if sys.implementation.name != "cpython" or size < start + _STATE_BYTES:
        return None
    words = _Words(id(_Random) + start)
    words.look()
    return words if tuple(_in_order(words.bytes)) == _Random.getstate()[1] else None


def _in_order(words: bytes) -> npt.NDArray[np.uint32]:
    """As getstate() has them: the position last."""
    return np.roll(np.frombuffer(words, np.uint32), -1)


def to_plain(state: dict[str, Any]) -> dict[str, Any]:
    """In a form that tree.pack stores compactly."""
    version, words, gauss = state["random"]
    name, keys, position, has_gauss, cached = state["numpy"]
    return {
        "torch": state["torch"],
        "numpy": [str(name), np.asarray(keys, np.uint32), int(position), int(has_gauss), float(cached)],
        "random": [version, _in_order(words) if isinstance(words, bytes) else np.array(words, np.uint32), gauss],
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
