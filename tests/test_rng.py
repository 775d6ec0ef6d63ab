"""The states of random number generators: captured, stored, installed, derived."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from everstep import rng


def draw() -> tuple[float, ...]:
    return torch.rand(()).item(), torch.randn(()).item(), np.random.rand(), np.random.randn(), random.random()


def drawn_from(*which: int) -> tuple[float, ...]:
    rng.install(rng.derived(*which))
    return draw()


def test_derived_streams_depend_on_seed_step_and_rank_alone() -> None:
    places = [(seed, step, rank) for seed in (0, 1, -1) for step in (1, 2, 12) for rank in (0, 1, 2)]
    found = {place: drawn_from(*place) for place in places}
    for position in range(5):  # every generator differs, not just one of them
        assert len({numbers[position] for numbers in found.values()}) == len(places)
    torch.manual_seed(99)
    assert {place: drawn_from(*place) for place in reversed(places)} == found


def test_deriving_streams_moves_no_generator() -> None:
    def state() -> list[Any]:
        return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]

    before = state()
    rng.derived(3, 4, 5)
    assert state() == before


def test_derived_streams_are_those_of_a_seed() -> None:
    rng.install(rng.derived(3, 4, 5))
    found = torch.get_rng_state()
    torch.manual_seed(torch.initial_seed())
    assert torch.equal(torch.get_rng_state(), found)


def test_derived_streams_are_the_same_on_every_machine_and_in_every_version() -> None:
    expected = (0.110252142, 0.5234624147, 0.1772461141, -1.066319996, 0.845158163)
    torch.testing.assert_close(drawn_from(7, 100, 3), expected, rtol=1e-6, atol=0)


def test_a_captured_state_comes_back_through_its_plain_form() -> None:
    drawn_from(1, 2, 3)
    plain = rng.to_plain(rng.capture())
    expected = draw()
    draw()
    rng.install(plain)
    assert draw() == expected
