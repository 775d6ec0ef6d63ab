"""Random generators, the global ones and the loader's own: found, read, set, and watched for draws."""

from __future__ import annotations

import ctypes
import itertools
import json
import random
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from everstep.capture.loader.anatomy import parts
from everstep.errors import CursorError

State: TypeAlias = dict[str, Any]
"""A position in a pass, or random numbers at one, as values that the cursor can hold."""

OwnGenerator: TypeAlias = "torch.Generator | np.random.Generator | np.random.RandomState | random.Random"


def global_rng() -> State:
    """The states of the global generators of torch (CPU), numpy and random."""
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "random": _random_state(random.getstate()),
    }


def set_global_rng(rng: State) -> None:
    """Set those global generators that have a state in `rng`."""
    if "torch" in rng:
        torch.set_rng_state(rng["torch"])
    if "numpy" in rng:
        np.random.set_state(rng["numpy"])
    if "random" in rng:
        state = rng["random"]
        random.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))


def _random_state(state: tuple[Any, ...]) -> State:
    version, words, gauss = state
    return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}


def all_rngs(own: list[OwnGenerator]) -> State:
    """The states of the global generators and of the loader's own."""
    return global_rng() | {"generators": states_of(own)}


def set_all_rngs(rngs: State, own: list[OwnGenerator]) -> None:
    set_global_rng(rngs)
    set_states_of(own, rngs["generators"])


class Watch:
    """Tells which global generators have moved since it was made, and what they were.

    numpy's is looked at in place, because its get_state takes 40 µs. The normal deviate that numpy may hold back is
    not seen that way; it matters only to a sampler that draws normal deviates.
    """

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._random = random.getstate()
        self._numpy = _numpy_words()

    def moved(self) -> State:
        moved: State = {}
        if not np.array_equal(self._torch.numpy(), torch.get_rng_state().numpy()):
            moved["torch"] = self._torch
        if self._random != random.getstate():
            moved["random"] = _random_state(self._random)
        if self._numpy != _numpy_words():
            words = np.frombuffer(self._numpy, np.uint32)
            state = {"key": words[:624].copy(), "pos": int(words[624])}
            moved["numpy"] = {"bit_generator": "MT19937", "state": state, "has_gauss": 0, "gauss": 0.0}
        return moved


def _numpy_words() -> bytes:
    """The 624 words and the position of numpy's global MT19937; nothing if another generator was put in."""
    generator = np.random.mtrand.get_bit_generator()
    if not isinstance(generator, np.random.MT19937):
        return b""
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


def own_generators(loader: Any) -> list[OwnGenerator]:
    """Every generator that the loader, its samplers and its datasets hold as attributes, in a fixed order."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    known = [torch.default_generator, np.random.mtrand._rand, vars(random)["_inst"]]
    num_global = len(known)
    for part in itertools.chain.from_iterable(parts(loader)):
        for value in getattr(part, "__dict__", {}).values():
            if isinstance(value, kinds) and not isinstance(value, random.SystemRandom):
                known += [] if any(value is other for other in known) else [value]
    return known[num_global:]


def states_of(generators: list[OwnGenerator]) -> list[Tensor]:
    return [_state_of(generator) for generator in generators]


def _state_of(generator: OwnGenerator) -> Tensor:
    """Its state as bytes: torch's own, or JSON."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    state: Any
    if isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
    elif isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
    else:
        state = generator.getstate()
    text = json.dumps(state, default=lambda array: array.tolist())
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def set_states_of(generators: list[OwnGenerator], states: list[Tensor]) -> None:
    if len(generators) != len(states):
        raise CursorError(
            f"the loader, its samplers and its dataset had {len(states)} random generators of their own when the step "
            f"was committed, and have {len(generators)} now; build them with the same generators"
        )
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
            continue
        value = json.loads(state.numpy().tobytes())
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = _with_arrays(value)
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(_with_arrays(value))
        else:
            generator.setstate((value[0], tuple(value[1]), value[2]))


def _with_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_arrays(part) for key, part in value.items()}
    return np.array(value, np.uint64) if isinstance(value, list) else value
