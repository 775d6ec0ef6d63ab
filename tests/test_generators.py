"""Generators' states are read in place, and are those that the generators would tell."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from everstep import native, rng

DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "random": random.random,
    "random, a normal deviate held back": lambda: random.gauss(0, 1),
    "random, all words used up": lambda: [random.random() for _ in range(312)],
    "numpy": np.random.rand,
    "numpy, a normal deviate held back": np.random.randn,
    "numpy, all words used up": lambda: np.random.bytes(4 * 624),
    "torch": lambda: torch.rand(1),
    "torch, a normal deviate held back": lambda: torch.randn(1),
    "torch, all words used up": lambda: torch.rand(624),
    "all": lambda: (torch.rand(1), np.random.rand(), random.random()),
    "random, a deviate put there": lambda: random.setstate((*random.getstate()[:2], 0.5)),
}


@pytest.fixture(params=["native", "python"])
def anew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process, with the native part or without."""
    if request.param == "python":
        monkeypatch.setattr(native, "part", lambda: None)
    elif native.part() is None:
        pytest.skip("everstep native has not been run, or there is no C++ compiler")
    monkeypatch.setattr(rng._Seen, "look", None)
    monkeypatch.setattr(rng._Seen, "state", None)


@pytest.mark.parametrize("name", DRAWS)
def test_a_captured_state_is_the_one_that_the_generator_tells(name: str, anew: None) -> None:
    for _ in range(3):
        rng.capture()
        DRAWS[name]()
        found = rng.to_plain(rng.capture())
        version, words, gauss = random.getstate()
        assert (found["random"][0], tuple(found["random"][1]), found["random"][2]) == (version, words, gauss)
        kind, keys, *rest = np.random.get_state()
        assert found["numpy"][0] == kind and np.array_equal(found["numpy"][1], keys) and found["numpy"][2:] == rest
        assert torch.equal(found["torch"], torch.get_rng_state())


def test_what_is_captured_after_an_exchange_of_generators_is_what_there_is(anew: None) -> None:
    before = np.random.get_bit_generator()
    start = torch.get_rng_state()
    rng.capture()
    rng.capture()
    try:
        np.random.set_bit_generator(np.random.MT19937(5))
        torch.rand(1)
        rng.capture()
        np.random.set_bit_generator(before)
        torch.set_rng_state(start)  # what the native part saw last
        for _ in range(2):
            found = rng.capture()
            assert torch.equal(found["torch"], start)
            assert np.array_equal(found["numpy"][1], np.random.get_state()[1])
            np.random.rand()
    finally:
        np.random.set_bit_generator(before)


def test_a_capture_that_is_interrupted_leaves_nothing_behind(anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng.capture()
    rng.capture()
    torch.rand(1)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rng, "_moved", interrupt)
        patch.setattr(rng, "_random_state", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rng.capture()
    assert torch.equal(rng.capture()["torch"], torch.get_rng_state())
