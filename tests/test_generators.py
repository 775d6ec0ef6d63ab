"""Generators' states are read in place, and are those that the generators would tell."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from everstep import rng

DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "random": random.random,
    "random, a normal deviate held back": lambda: random.gauss(0, 1),
    "random, all words used up": lambda: [random.random() for _ in range(312)],
    "numpy": np.random.rand,
    "numpy, a normal deviate held back": np.random.randn,
    "numpy, all words used up": lambda: np.random.bytes(4 * 624),
    "torch": lambda: torch.rand(1),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_captured_state_is_the_one_that_the_generator_tells(name: str) -> None:
    for _ in range(3):
        rng.capture()
        DRAWS[name]()
        found = rng.to_plain(rng.capture())
        version, words, gauss = random.getstate()
        assert (found["random"][0], tuple(found["random"][1]), found["random"][2]) == (version, words, gauss)
        kind, keys, *rest = np.random.get_state()
        assert found["numpy"][0] == kind and np.array_equal(found["numpy"][1], keys) and found["numpy"][2:] == rest
        assert torch.equal(found["torch"], torch.get_rng_state())
