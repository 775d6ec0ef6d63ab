"""Every optimizer family in every set-up: a run that crashed twice equals one that never used Everstep, in everything."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from harness import Kill, must_have_history, run_plainly, run_through
from models import FAMILIES, SETUPS, SPARSE_FAMILIES, Training, build

import everstep
from everstep.errors import ReplayError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
NOT_POSSIBLE = {
    # torch's fused SGD cannot take a parameter that gets its first gradient later than others of its group.
    ("lstm", "sgd-momentum-fused"),
    ("lstm", "sgd-nesterov-fused"),
}
# The default run sees every family in one or two set-ups; `make test-all` sees the whole product.
PRODUCT = [
    (s, f) if (i + j) % 4 == 0 else pytest.param(s, f, marks=pytest.mark.long)
    for i, s in enumerate(SETUPS)
    for j, f in enumerate(FAMILIES)
    if (s, f) not in NOT_POSSIBLE
]
MOMENTS = ("fetched", "backward", "step", "end")


def thinned(cases: Iterable[Any], *, one_in: int) -> list[Any]:
    """Every `one_in`-th case in the default run, all of them in `make test-all`."""
    found = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*c, marks=[pytest.mark.long] if i % one_in else []) for i, c in enumerate(found)]


def crash_and_compare(
    path: Path, setup: str, family: str, *, style: str = "nested", sparse: str = "", kills: list[Kill] | None = None,
    attach: dict[str, Any] | None = None, **options: Any,
) -> list[Any]:  # fmt: skip
    """The whole experiment; where and how it is killed depends on the case's name."""
    choose = random.Random(f"{setup} {family} {style} {sparse} {sorted(options)}")

    def make(seed: int) -> Training:
        return build(setup, family, seed, sparse, **options)

    truth = run_plainly(make, style)
    if kills is None:
        kills = [
            Kill(choose.randint(low, high), choose.choice(MOMENTS), choose.randint(1, 2)) for low, high in ((2, 5), (6, 12))
        ]
    if attach is None:
        attach = choose.choice([{}, {"base_interval": 3, "follower": False}, {"audit": "full"}])
        attach = {**attach, "durability": choose.choice(["os", "os", "step", "batch"])}
    warnings = run_through(make, path, truth, list(kills), style=style, **attach)
    must_have_history(path, truth, make, choose, offline=family != "own")
    return warnings


@pytest.mark.parametrize(("setup", "family"), PRODUCT, ids=lambda v: str(v))
@pytest.mark.sampled(3)
def test_a_run_that_crashed_twice_equals_one_that_never_used_everstep(setup: str, family: str, tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", setup, family)


@pytest.mark.parametrize("sparse", SPARSE_FAMILIES)
def test_sparse_gradients_are_replayed_as_they_were_consumed(sparse: str, tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", "embedding", "adamw", sparse=sparse)


@pytest.mark.parametrize("family", ["adam", "rmsprop-foreach", "adamw-fused", "sgd-momentum-fused", "own-registered"])
def test_a_wgan_that_clamps_through_data_crashes_twice_and_stays_exact(family: str, tmp_path: Path) -> None:
    kills = [Kill(3, "clamp", 2), Kill(9, "clamp", 1)]
    crash_and_compare(tmp_path / "run", "gan", family, clamp=True, kills=kills)


def test_a_class_that_is_not_registered_cannot_be_replayed_offline_and_says_so(tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", "mlp", "own", attach={"base_interval": 200, "follower": False})
    history = everstep.open(tmp_path / "run")
    with pytest.raises(ReplayError, match="register"):
        history.state(3)
