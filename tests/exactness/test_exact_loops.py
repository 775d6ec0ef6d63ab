"""Ways to write a training loop, each with optimizers that treat gradients differently: exact through crashes."""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    Build,
    Kill,
    Truth,
    copied,
    everything,
    loop,
    must_equal,
    public,
    run_plainly,
    run_through,
)
from models import Training, build
from test_exact_product import crash_and_compare, thinned

import everstep
from everstep.errors import InexactWarning
from support import crash

# A loop, a foreach that writes into gradients, and two fused ones: the four ways in which gradients are consumed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"), pytest.mark.sampled(2),
]  # fmt: skip
FOUR = ["adam", "sgd-nesterov-foreach", "adamw-fused", "sgd-momentum-fused"]
SCALES = [2.0**12, 1000.0]
SPARSE = ["sparse-adam", "sparse-sgd-momentum", "sparse-adagrad"]
ZERO = ["after", "before", "after-zeros", "before-zeros", "model", "model-zeros", "by-hand", "detach"]


@pytest.mark.parametrize(("zero", "family"), thinned(product(ZERO, FOUR), one_in=5))
def test_gradients_may_be_cleared_in_any_way(zero: str, family: str, tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", "mlp", family, zero=zero)


@pytest.mark.parametrize(("zero", "setup"), thinned(product(ZERO, ["lstm", "gan", "mlp"]), one_in=4))
def test_cleared_gradients_of_frozen_and_shared_parameters_come_back(setup: str, zero: str, tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", setup, "sgd-momentum", zero=zero)


@pytest.mark.parametrize(("sparse", "zero"), thinned(product(SPARSE, ["before", *ZERO[2:4], "by-hand"]), one_in=3))
def test_sparse_gradients_may_be_cleared_in_any_way(sparse: str, zero: str, tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", "embedding", "sgd", sparse=sparse, zero=zero)


@pytest.mark.parametrize(
    ("setup", "accumulate", "zero"), thinned(product(["cnn", "transformer"], [2, 3], ZERO[:4]), one_in=3)
)
def test_gradients_accumulate_over_batches(setup: str, accumulate: int, zero: str, tmp_path: Path) -> None:
    family = {"cnn": "adamw-fused", "transformer": "sgd-nesterov-foreach"}[setup]
    kills = [Kill(2 * accumulate + 1, "backward"), Kill(3 * accumulate, "step")]
    crash_and_compare(tmp_path / "run", setup, family, accumulate=accumulate, zero=zero, kills=kills)


def test_an_accumulation_over_a_parameter_that_only_some_batches_use(tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", "embedding", "adam", accumulate=2, sparse="sparse-sgd")


@pytest.mark.parametrize(("clip", "family"), thinned(product(["norm", "value"], FOUR), one_in=3))
def test_clipped_gradients_are_recorded_as_clipped(family: str, clip: str, tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", "transformer", family, clip=clip)


@pytest.mark.parametrize(
    ("family", "scale", "clip"),
    thinned(
        product(["adam", "adamw-foreach", "adam-fused", "sgd-momentum-fused", "adagrad-fused"], SCALES, ["", "norm"]),
        one_in=3,
    ),
)
def test_a_scaler_may_skip_steps(family: str, clip: str, scale: float, tmp_path: Path) -> None:
    crash_and_compare(
        tmp_path / "run", "mlp", family, scale=scale, infs=(3, 4, 8), clip=clip, schedule="", kills=SCALER_KILLS
    )  # fmt: skip


SCALER_KILLS = [Kill(4, "end"), Kill(9, "backward")]


@pytest.mark.parametrize(
    ("setup", "family"), thinned(product(["cnn", "gan", "lstm", "embedding"], ["adamw", "adamw-fused"]), one_in=3)
)
def test_a_scaler_skips_steps_of_any_model(setup: str, family: str, tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", setup, family, scale=2.0**10, infs=(2, 7), schedule="", kills=SCALER_KILLS)


WIDTH_FAMILIES = [
    "sgd-momentum", "sgd-nesterov-foreach", "adam", "adamw-foreach", "adamw-fused", "adam-amsgrad-fused",
    "adagrad-fused", "nadam", "asgd", "radam-foreach", "rprop", "adafactor", "muon", "adam-tensor-lr", "own",
]  # fmt: skip
WIDTHS = [torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("family", "dtype"), thinned(product(WIDTH_FAMILIES, WIDTHS), one_in=5), ids=str)
def test_parameters_of_any_width(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", "mlp", family, dtype=dtype)


@pytest.mark.parametrize(("dtype", "scale"), thinned(product(WIDTHS[1:], [300.0, 2.0**6]), one_in=3), ids=str)
def test_scaled_sixteen_bit_gradients_inside_a_fused_step(dtype: torch.dtype, scale: float, tmp_path: Path) -> None:
    crash_and_compare(
        tmp_path / "run", "mlp", "adamw-fused", dtype=dtype, scale=scale, infs=(3, 8), clip="", schedule="",
        kills=SCALER_KILLS,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("setup", "dtype"), thinned(product(["transformer", "lstm", "cnn"], WIDTHS[:2]), one_in=3), ids=str
)
def test_models_of_any_width(setup: str, dtype: torch.dtype, tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", setup, "adamw", dtype=dtype)


def test_autocast_leaves_full_width_gradients(tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", "transformer", "adamw-fused", autocast=True)


@pytest.mark.parametrize(
    ("setup", "family"),
    thinned(product(["mlp", "cnn", "embedding", "gan", "lstm"], [*FOUR[:3], "own-registered"]), one_in=5),
)
def test_backward_may_run_in_a_closure_inside_the_step(setup: str, family: str, tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", setup, family, closure=True)


@pytest.mark.parametrize(
    ("schedule", "family"),
    thinned(product(["step", "cycle", "plateau", "epoch"], ["adamw-fused", "sgd-momentum", "adam-tensor-lr"]), one_in=2),
)
def test_schedulers_of_every_rhythm(family: str, schedule: str, tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", "cnn", family, schedule=schedule, zero="before")


@pytest.mark.parametrize(
    ("setup", "style", "generator"),
    thinned(product(["cnn", "transformer"], ["nested", "flat", "hand"], [True, False]), one_in=3),
)
def test_loops_in_three_styles(setup: str, style: str, generator: bool, tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", setup, "adamw-fused", style=style, generator=generator)


@pytest.mark.parametrize(
    ("batch", "moment"), thinned(product([1, 4, 5, 8, 12], ["fetched", "backward", "step", "end"]), one_in=3)
)
def test_a_kill_next_to_the_end_of_a_pass(batch: int, moment: str, tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", "cnn", "sgd-momentum", kills=[Kill(batch, moment)])


@pytest.mark.parametrize(
    "family", thinned(["adamw", "sgd-nesterov", "rmsprop-centered-foreach", "adafactor"], one_in=2)
)
def test_weights_in_channels_last(family: str, tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", "cnn", family, channels_last=True)


@pytest.mark.parametrize(
    ("setup", "family"),
    thinned(
        [("transformer", "adamw-fused"), ("mlp", "adam-foreach"), ("gan", "sgd-momentum"), ("lstm", "rmsprop"),
         ("mlp", "own")], one_in=3,
    ),
)
def test_models_too_large_to_be_compared_at_every_step(setup: str, family: str, tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", setup, family, size=5)


@pytest.mark.parametrize("family", thinned(["adam", "rmsprop-foreach", "adamw-fused"], one_in=3))
def test_a_large_wgan_that_clamps_through_data(family: str, tmp_path: Path) -> None:
    kills = [Kill(4, "clamp", 2), Kill(10, "clamp", 1)]
    crash_and_compare(tmp_path / "run", "gan", family, clamp=True, kills=kills, size=8)


def test_workers_and_prefetched_batches(tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", "cnn", "adamw-fused", num_workers=2)


@pytest.mark.parametrize(
    ("setup", "kills"),
    thinned(product(["mlp", "lstm"], [[1], [2, 3], [3, 3, 3], [12, 12], [5, 6, 7, 8]]), one_in=3), ids=str,
)  # fmt: skip
def test_kills_that_follow_each_other_closely(setup: str, kills: list[int], tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", setup, "adam", kills=[Kill(n, "step") for n in kills])


@pytest.mark.parametrize("family", ["adam", "own"])
def test_flush_in_the_middle_of_a_step_makes_committed_steps_durable(family: str, tmp_path: Path) -> None:
    t = build("mlp", family, 3)
    with everstep.attach(t.model, t.optimizer, tmp_path / "run", extras=t.extras, durability="batch", quiet=True) as run:
        for batch in run.steps(t.loader):
            t.turn(batch)
            run.flush()
            assert run.durable_step == run.step == t.progress.batches - 1


@pytest.mark.parametrize(
    ("setup", "kills"), thinned(product(["mlp", "cnn"], [[2, 5], [3, 4], [6, 7]]), one_in=4), ids=str
)
def test_passes_that_are_left_early(setup: str, kills: list[int], tmp_path: Path) -> None:
    for moment in ("fetched", "end"):
        crash_and_compare(
            tmp_path / moment, setup, "adam", style="broken", schedule="epoch", kills=[Kill(n, moment) for n in kills]
        )  # fmt: skip


HABITS: list[dict[str, Any]] = [
    {"average": True}, {"loose": True}, {"reload": 5, "schedule": ""}, {"hooks": "early"}, {"hooks": "late"},
    {"shared": True}, {"compiled": True},
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options"),
    thinned(product(["adamw-fused", "sgd-momentum-foreach", "own-registered"], HABITS), one_in=4), ids=str,
)  # fmt: skip
def test_what_else_users_do(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "run", "mlp", family, **options)


@pytest.mark.parametrize("family", ["adamw-fused", "sgd-momentum"])
def test_forward_passes_that_move_weights_and_buffers(family: str, tmp_path: Path) -> None:
    crash_and_compare(tmp_path / "spectral", "gan", family, spectral=True)
    if not family.endswith("fused"):
        crash_and_compare(tmp_path / "max norm", "lstm", family, max_norm=True)


@pytest.mark.parametrize(
    ("setup", "family", "options"),
    [
        # torch's own arithmetic is not reproducible here: the restored state must be what this run had.
        ("mlp", "sgd-momentum-fused", {"dtype": torch.bfloat16}),
        ("mlp", "sgd-nesterov-fused", {"dtype": torch.float16}),
        ("mlp", "sgd-momentum-fused", {"scale": 1000.0, "infs": (1, 3), "schedule": ""}),
        ("mlp", "adam-fused", {"scale": 1000.0, "infs": (1, 2, 6), "schedule": ""}),
        ("lstm", "adamw", {}),
    ],
    ids=["sixteen_bit_sgd", "sixteen_bit_nesterov", "first_step_skipped", "first_steps_skipped", "lstm"],
)
def test_every_step_is_restored_as_it_was_in_this_run(
    setup: str, family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    t = build(setup, family, 3, **options)
    run = everstep.attach(t.model, t.optimizer, tmp_path / "run", extras=t.extras, quiet=True)
    had = {}
    program = loop(t, run, "nested")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactWarning)
        for _ in program:
            had[t.progress.batches] = public(t)
            if t.progress.batches == 10:
                break
    crash(run)
    program.close()
    history = everstep.open(tmp_path / "run")
    looked_at = set()
    for n in history.steps[1:]:
        state = history.state(n)
        looked_at.add(state["extras"]["progress"]["batches"])
        must_equal(copied(state), had[state["extras"]["progress"]["batches"]], f"state({n})")
    assert looked_at == set(range(1, 10))


@pytest.mark.parametrize(
    ("style", "setup"), thinned(product(["nested", "flat", "hand"], ["lstm", "cnn", "gan"]), one_in=4)
)
def test_going_back_to_any_step_and_on_from_there_is_exact(style: str, setup: str, tmp_path: Path) -> None:
    family = {"lstm": "adamw", "cnn": "sgd-momentum-fused", "gan": "rmsprop-foreach"}[setup]

    def make(seed: int) -> Training:
        return build(setup, family, seed)

    truth = run_plainly(make, style)
    run_through(make, tmp_path / "run", truth, [Kill(7)], style=style)
    for step in (10, 3, 0):
        fork_and_compare(make, tmp_path / "run", truth, step, style)


def fork_and_compare(make: Build, path: Path, truth: Truth, step: int, style: str) -> None:
    t = make(77 + step)
    with everstep.attach(t.model, t.optimizer, path, extras=t.extras, quiet=True) as run:
        assert run.resume(step=step) == step
        must_equal(t.progress.batches, step, "batches so far")
        for _ in loop(t, run, style):
            n = t.progress.batches
            if n in (step + 1, 12):
                must_equal(everything(t), truth.after[n], f"after batch {n}, from step {step}")
    must_equal(t.turns, truth.turns[step:], f"turns from step {step}")
    must_equal(everything(t), truth.end, f"the end, from step {step}")


def test_two_training_threads_and_sixteen_bit_tensors_that_both_share(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    try:
        crash_and_compare(tmp_path / "run", "mlp", "adam", dtype=torch.bfloat16, size=9, kills=[Kill(5)])
    finally:
        torch.set_num_threads(1)
