"""Early hand-over changes nothing: runs that crash after backward, with gradients of every size sent early."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from harness import Kill
from models import SETUPS
from test_exact_product import NOT_POSSIBLE, crash_and_compare, thinned

from everstep.capture import early

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
FAMILIES = ("adamw-fused", "sgd-nesterov-foreach", "adam", "adafactor", "own-registered")
CASES = [(s, f) for s in SETUPS for f in FAMILIES if (s, f) not in NOT_POSSIBLE]


@pytest.fixture(autouse=True)
def all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models are small: let every gradient leave, by itself."""
    monkeypatch.setattr(early, "MIN_BYTES", 1)
    monkeypatch.setattr(early, "BATCH_BYTES", 1)


@pytest.mark.parametrize(("setup", "family"), thinned(CASES, one_in=4))
@pytest.mark.sampled(2)
def test_a_run_with_early_hand_over_equals_one_that_never_used_everstep(setup: str, family: str, tmp_path: Path) -> None:
    choose = random.Random(f"{setup} {family}")
    kills = [Kill(choose.randint(3, 6), "backward", choose.randint(1, 2)), Kill(choose.randint(7, 12), "step", 1)]
    attach: dict[str, Any] = {"early": True, "durability": choose.choice(["os", "step", "batch"])}
    crash_and_compare(tmp_path / "run", setup, family, kills=kills, attach=attach)
