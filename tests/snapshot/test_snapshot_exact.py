"""Snapshot mode: a run that crashed equals one that never used Everstep, in everything."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SEED, Build, Kill, copied, everything, loop, must_equal, run_plainly, run_through
from models import Training, build
from torch import nn
from torch.optim import Optimizer

import everstep
from everstep.capture.leaving import Leaving
from everstep.errors import HiddenEditWarning, UnprotectedWarning
from support import crash
from truth import Truth, check_history, different, live_state

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
EVERY_STEP: dict[str, Any] = {"mode": "snapshot", "snapshot_interval": 1, "quiet": True}
MODES = (None, "direct", "staged", "disk")
KILLS: list[Kill | None] = [Kill(3, "step"), Kill(6, "backward"), Kill(10, "end")]
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mlp": ("mlp", "adamw-fused", {"style": "hand"}),
    "sgd": ("mlp", "sgd", {"schedule": "plateau"}),
    "batch norm, channels last": ("cnn", "sgd-momentum", {"channels_last": True}),
    "passes that are left early": ("cnn", "adam", {"style": "broken", "kills": [Kill(3), Kill(5, "step"), Kill(7)]}),
    "dropout, tied weights": ("transformer", "adamw-fused", {"style": "flat"}),
    "two optimizers, clamped by .data": ("gan", "adam", {"clamp": True}),
    "buffers that forward moves": ("gan", "rmsprop", {"spectral": True}),
    "sparse": ("embedding", "adagrad", {"sparse": "sparse-adam", "zero": "before"}),
    "closure": ("mlp", "lbfgs", {}),
    "own class": ("mlp", "own", {"zero": "after-zeros"}),
    "frozen, then thawed": ("lstm", "adamw", {}),
    "scaler": ("mlp", "adam", {"scale": 1024.0, "infs": (3, 4, 8), "schedule": ""}),
    "accumulation": ("cnn", "adamw-fused", {"accumulate": 3}),
    "accumulation, cleared before": ("cnn", "adamw", {"accumulate": 2, "zero": "before-zeros"}),
    "muon": ("mlp", "muon", {"schedule": "cycle"}),
    "sixteen bits": ("mlp", "adafactor", {"dtype": torch.bfloat16}),
    "a second model": ("mlp", "adamw", {"average": True, "loose": True, "hooks": "early"}),
    "loader's workers": ("cnn", "adam", {"num_workers": 2}),
}
QUICK = {
    ("mlp", "disk"), ("batch norm, channels last", "staged"), ("passes that are left early", None),
    ("dropout, tied weights", "direct"),
    ("two optimizers, clamped by .data", None), ("sparse", None), ("closure", "direct"), ("own class", "staged"),
    ("frozen, then thawed", None), ("scaler", "disk"), ("accumulation, cleared before", None),
}  # fmt: skip


def crash_and_compare(
    path: Path, setup: str, family: str, *, attach: dict[str, Any], style: str = "nested", sparse: str = "",
    kills: list[Kill | None] = KILLS, **options: Any,
) -> list[int]:  # fmt: skip
    """Returns the steps that are left; each is what the run that was never interrupted had."""

    def make(seed: int) -> Training:
        return build(setup, family, seed, sparse, **options)

    truth = run_plainly(make, style)
    run_through(make, path, truth, kills, style=style, **{**EVERY_STEP, **attach})
    history = everstep.open(path)
    for n in history.steps:
        state = history.state(n)
        must_equal(copied(state), truth.public[state["extras"]["progress"]["batches"]], f"state({n})")
    assert history.verify(deep=True).ok
    return history.steps


@pytest.mark.parametrize(
    ("case", "pool_mode"),
    [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.long) for c in product(CASES, MODES)],
)
def test_a_run_that_crashed_three_times_equals_one_that_never_used_everstep(
    case: str, pool_mode: str | None, tmp_path: Path, shm: Path
) -> None:
    setup, family, options = CASES[case]
    place = {} if pool_mode in (None, "disk") else {"pool": str(shm)}
    steps = crash_and_compare(tmp_path / "run", setup, family, attach={"pool_mode": pool_mode, **place}, **options)
    assert len(steps) > 1
    assert list(shm.iterdir()) == [], "nothing is left in memory"


@pytest.mark.long
@pytest.mark.parametrize("pool_mode", MODES)
def test_chosen_intervals_lose_steps_but_no_bit(pool_mode: str | None, tmp_path: Path) -> None:
    """Where the interval is ours, a resume is at some earlier step, and goes on exactly from there."""

    def make(seed: int) -> Training:
        return build("cnn", "adam", seed)

    truth = run_plainly(make)
    for process in range(4):
        t = make(SEED + process)
        run = everstep.attach(
            t.model, t.optimizer, tmp_path / "run", extras=t.extras, mode="snapshot", pool_mode=pool_mode, quiet=True,
            max_bandwidth=3e5,
        )  # fmt: skip
        for k, _ in enumerate(loop(t, run, "nested")):
            must_equal(everything(t), truth.after[t.progress.batches], f"after batch {t.progress.batches}")
            if k == 4 and process < 3:
                break
        if process < 3:
            crash(run)
        else:
            run.close()
    must_equal(everything(t), truth.end, "after the loop")


class Remembering(Optimizer):
    """Keeps numbers, text, and lists of tensors: the last gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["seen"] = [*state.get("seen", [])[-2:], p.grad.clone()]
                state["norms"] = [*state.get("norms", [])[-4:], float(p.grad.norm())]
                state["kind"] = "even" if state["count"] % 2 == 0 else "odd"
                p.data.sub_(sum(state["seen"]) / len(state["seen"]), alpha=group["lr"])  # type: ignore[arg-type]


def linear(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def turn(model: nn.Module, optimizer: Optimizer, n: int, *, zero: bool = True) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(n))
    model(x).square().mean().backward()
    optimizer.step()
    if zero:
        optimizer.zero_grad()


def noted(path: Path, model: nn.Module, optimizer: Optimizer, **options: Any) -> Truth:
    truth = Truth(everstep.attach(model, optimizer, path, **{**EVERY_STEP, **options}), model, optimizer)
    truth.resume()
    return truth


def resumed(path: Path, model: nn.Module, optimizer: Optimizer, truth: Truth, step: int, **options: Any) -> Any:
    """A Run in fresh objects, which are as they were at that step."""
    run = everstep.attach(model, optimizer, path, **{**EVERY_STEP, **options})
    assert run.resume() == step
    assert different(truth.states[step], live_state(model, optimizer)) == []
    return run


@pytest.mark.parametrize("pool_mode", ["direct", "staged"])
def test_numbers_text_and_lists_in_optimizer_state(pool_mode: str, tmp_path: Path) -> None:
    model = linear()
    truth = noted(tmp_path / "run", model, Remembering(model.parameters()), pool_mode=pool_mode)
    for n in range(7):
        turn(model, truth._objects[1], n)
        truth.commit()
    crash(truth.run)
    check_history(tmp_path / "run", truth, complete=False)
    model = linear(8)
    crash(resumed(tmp_path / "run", model, Remembering(model.parameters()), truth, 7))


def test_parameters_whose_memory_is_replaced_are_stored_as_they_are(tmp_path: Path) -> None:
    """By `p.data = …`: the same parameters, and the same version, elsewhere in memory."""
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    truth = noted(tmp_path / "run", model, optimizer)
    for n in range(6):
        turn(model, optimizer, n)
        if n > 2:
            for p in model.parameters():
                p.data = p.data.clamp(-0.1, 0.1)
                optimizer.state[p]["exp_avg"].data = optimizer.state[p]["exp_avg"].data * 0.5
        truth.commit(wait=True)
        check_history(tmp_path / "run", truth, complete=False)
    truth.run.close()
    assert truth.run.stats()["hidden_edits"] == 0


def test_a_parameter_that_is_transposed_in_place_keeps_its_new_strides(tmp_path: Path) -> None:
    model = nn.Linear(5, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    truth = noted(tmp_path / "run", model, optimizer)
    for n in range(4):
        model(torch.randn(3, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if n == 2:
            model.weight.data = model.weight.data.t()
        truth.commit(wait=True)
        check_history(tmp_path / "run", truth, complete=False)
    truth.run.close()


def test_gradients_that_come_and_go_stay_in_one_pool(tmp_path: Path) -> None:
    """Some batches use only one of two branches; gradients are cleared before each backward."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    truth = noted(tmp_path / "run", model, optimizer)
    pools = set()
    for n in range(8):
        optimizer.zero_grad()
        model[n % 2](torch.randn(2, 3)).sum().backward()
        optimizer.step()
        truth.commit(wait=True)
        pools |= {p.name for p in (tmp_path / "run/pool").iterdir()}
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    assert len(pools) <= 3, "one when the first branch had none, one with both"
    check_history(tmp_path / "run", truth, complete=False)
    crash(truth.run)
    other = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    crash(resumed(tmp_path / "run", other, torch.optim.SGD(other.parameters(), lr=0.1), truth, 8))
    for p, grad in zip(other.parameters(), grads, strict=True):
        assert (p.grad is None) == (grad is None) and (grad is None or torch.equal(p.grad, grad))


def test_a_scheduler_that_steps_after_the_last_commit_is_not_in_the_last_base(tmp_path: Path) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    truth = noted(tmp_path / "run", model, optimizer)
    turn(model, optimizer, 0)
    truth.commit()
    optimizer.param_groups[0]["lr"] = 0.5
    truth.run.close()
    check_history(tmp_path / "run", truth, complete=False)
    assert everstep.open(tmp_path / "run").plan(1).base.in_pool is False


def norm_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def test_a_forward_after_the_last_commit_is_a_step_of_its_own(tmp_path: Path) -> None:
    """As in delta mode: buffers have changed, so the next state is another."""
    found = {}
    for mode in ("delta", "snapshot"):
        model = norm_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = EVERY_STEP if mode == "snapshot" else {"quiet": True}
        run = everstep.attach(model, optimizer, tmp_path / mode, **options)
        truth = Truth(run, model, optimizer)
        truth.resume()
        turn(model, optimizer, 0)
        truth.commit()
        model(torch.randn(4, 6))
        truth.states[2] = live_state(model, optimizer)
        run.close()
        check_history(tmp_path / mode, truth, complete=False)
        found[mode] = run.step
    assert found == {"delta": 2, "snapshot": 2}


def test_an_unfinished_backward_is_in_no_base(tmp_path: Path) -> None:
    """close() in the middle of a step: what is stored is the state of the commit."""
    model = norm_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    truth = noted(tmp_path / "run", model, optimizer)
    turn(model, optimizer, 0)
    truth.commit()
    model(torch.randn(4, 6)).sum().backward()
    truth.run.close()
    assert truth.run.step == truth.run.durable_step == 1
    check_history(tmp_path / "run", truth, complete=False)
    model = norm_model()
    crash(resumed(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1), truth, 1))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("pool_mode", MODES)
def test_edits_in_place_after_a_commit_are_noticed_and_then_copied(pool_mode: str | None, tmp_path: Path) -> None:
    """A forward that edits a weight: states that it hits are discarded, later ones are whole. Never a wrong one."""
    model = linear(200)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    truth = noted(tmp_path / "run", model, optimizer, pool_mode=pool_mode, max_bandwidth=3e6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(6):
            turn(model, optimizer, n)
            truth.commit()
            with torch.no_grad():
                model[2].weight.mul_(0.5)
        for n in range(6, 9):
            turn(model, optimizer, n)
            truth.commit(wait=True)
    assert {w.category for w in caught} <= {HiddenEditWarning}
    crash(truth.run)
    check_history(tmp_path / "run", truth, complete=False)
    assert everstep.open(tmp_path / "run").steps[-3:] == [7, 8, 9]


@pytest.mark.parametrize("late", [False, True])
def test_edits_by_data_after_a_commit_are_noticed(late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No version counter shows them; before the tensor has left the first look finds them, after it the second."""
    from everstep.capture.leaving import Leaving

    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    truth = noted(tmp_path / "run", model, optimizer, pool_mode="direct", base_interval=1000)
    for n in range(3):
        turn(model, optimizer, n)
        truth.commit(wait=True)
    carry, look = Leaving.carry, Leaving.second_look

    def edit() -> None:
        model[0].weight.data.add_(1.0)

    def edited_first(self: Leaving, writer: Any) -> None:
        if not late:
            edit()
        carry(self, writer)

    def edited_then(self: Leaving, sums: Any, turn: int) -> None:
        if late:
            edit()
        look(self, sums, turn)

    monkeypatch.setattr(Leaving, "carry", edited_first)
    monkeypatch.setattr(Leaving, "second_look", edited_then)
    turn(model, optimizer, 3)
    truth.commit()
    truth.run._capture._job.done.wait()
    monkeypatch.undo()
    assert everstep.open(tmp_path / "run").steps[-1] == 3
    turn(model, optimizer, 4)
    with pytest.warns(HiddenEditWarning, match="0.weight"):
        truth.commit(wait=True)
    check_history(tmp_path / "run", truth, complete=False)
    truth.run.close()


def test_edits_by_data_after_a_commit_are_in_no_base_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the base's thread is late for: what it then reads twice is the same both times."""
    carry = Leaving.carry

    def late(self: Leaving, *args: Any) -> None:
        time.sleep(0.05)
        carry(self, *args)

    monkeypatch.setattr(Leaving, "carry", late)
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    truth = noted(tmp_path / "run", model, optimizer, base_interval=1, snapshot_interval=100)
    for n in range(4):
        turn(model, optimizer, n)
        truth.commit()
        model[0].weight.data.mul_(1.01)
        truth.run._capture.snapshot.wait()
    crash(truth.run)
    assert len(everstep.open(tmp_path / "run").steps) > 3
    check_history(tmp_path / "run", truth, complete=False)


def test_parameters_and_groups_that_are_added_get_another_pool_and_the_old_one_goes(tmp_path: Path) -> None:
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    truth = noted(tmp_path / "run", model, optimizer)
    for n in range(3):
        turn(model, optimizer, n)
        truth.commit(wait=True)
    before = {p.name for p in (tmp_path / "run/pool").iterdir()}
    model.append(nn.Linear(3, 3))
    optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.1})
    for n in range(3, 6):
        turn(model, optimizer, n)
        truth.commit(wait=True)
    after = {p.name for p in (tmp_path / "run/pool").iterdir()}
    assert len(after) == 1 and not after & before
    crash(truth.run)
    check_history(tmp_path / "run", truth, complete=False)
    model = linear().append(nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model[:3].parameters(), lr=0.01)
    optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.1})
    crash(resumed(tmp_path / "run", model, optimizer, truth, 6))


@pytest.mark.parametrize("interval", [1, 100])
def test_groups_that_change_between_a_commit_and_close_are_a_step_of_their_own(interval: int, tmp_path: Path) -> None:
    """As they are where gradients are logged. What is stored of the step before has the groups that it had."""
    model = linear()
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.01)
    truth = noted(tmp_path / "run", model, optimizer, snapshot_interval=interval)
    turn(model, optimizer, 0)
    model.zero_grad()
    truth.commit()
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
    truth.states[2] = live_state(model, optimizer)
    truth.run.close()
    assert truth.run.step == truth.run.durable_step == 2
    check_history(tmp_path / "run", truth, complete=False)
    model = linear()
    crash(resumed(tmp_path / "run", model, torch.optim.AdamW(model[0].parameters(), lr=0.01), truth, 2))


def test_a_parameter_that_changes_its_group_takes_on_its_learning_rate(tmp_path: Path) -> None:
    """The parameters of all groups, one after the other, stay the same."""
    model = linear()
    groups = [{"params": list(model[i].parameters()), "lr": lr} for i, lr in ((0, 0.01), (2, 0.1))]
    optimizer = torch.optim.AdamW(groups)
    truth = noted(tmp_path / "run", model, optimizer)
    for n in range(4):
        turn(model, optimizer, n)
        if n == 2:
            optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
        truth.commit(wait=True)
    check_history(tmp_path / "run", truth, complete=False)
    truth.run.close()
    check_history(tmp_path / "run", truth, complete=False)


def test_a_gradient_that_somebody_keeps_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    truth = noted(tmp_path / "run", model, optimizer, snapshot_interval=5)
    turn(model, optimizer, 0, zero=False)
    truth.commit()
    kept = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    assert truth.run.commit() == 1, "an accumulation has begun"
    with pytest.warns(UnprotectedWarning, match="step 1 is not stored"):
        truth.run.flush()
    with pytest.warns(UnprotectedWarning, match="step 1 is not stored"):
        truth.run.close()
    assert len(kept) == 6


def test_a_forked_child_trains_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a state is on its way, which nobody carries on in the child."""
    go, fill = threading.Event(), Leaving._fill_together
    go.set()
    monkeypatch.setattr(Leaving, "_fill_together", lambda self, *args: go.wait(60) and fill(self, *args))
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = everstep.attach(model, optimizer, tmp_path / "run", pool_mode="direct", **EVERY_STEP)
    run.resume()
    run.flush()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    go.clear()
    optimizer.step()
    run.commit()
    pid = os.fork()
    if pid == 0:
        optimizer.step()
        os._exit(0)
    ended, deadline = 0, time.monotonic() + 20
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    go.set()
    if not ended:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert ended and status == 0, "it waits for a thread that it does not have"
    run.close()
    assert everstep.open(tmp_path / "run").steps[-1] == 1


def test_extras_that_outgrow_the_pool_get_a_larger_one(tmp_path: Path) -> None:
    class Growing:
        data = b""

        def state_dict(self) -> dict[str, Any]:
            return {"data": self.data.hex()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.data = bytes.fromhex(state["data"])

    model, extra = linear(), Growing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = everstep.attach(model, optimizer, tmp_path / "run", extras={"it": extra}, **EVERY_STEP)
    run.resume()
    for n in range(4):
        turn(model, optimizer, n)
        extra.data = bytes(10 ** (2 * n))
        assert run.commit(wait=True) == run.durable_step == n + 1
        assert everstep.open(tmp_path / "run").plan().base.in_pool
    assert len(list((tmp_path / "run/pool").iterdir())) == 1
    crash(run)
    extra.data = b""
    run = everstep.attach(model, optimizer, tmp_path / "run", extras={"it": extra}, **EVERY_STEP)
    assert run.resume() == 4 and extra.data == bytes(10**6)
    crash(run)


def test_flush_between_two_stored_states_stores_the_last_one(tmp_path: Path) -> None:
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    truth = noted(tmp_path / "run", model, optimizer, snapshot_interval=5)
    for n in range(7):
        turn(model, optimizer, n)
        truth.commit()
    truth.run._capture._job.done.wait()
    assert truth.run.durable_step == 5
    truth.run.flush()
    assert truth.run.durable_step == 7
    turn(model, optimizer, 7)
    truth.commit(wait=True)
    assert truth.run.durable_step == 8
    crash(truth.run)
    check_history(tmp_path / "run", truth, complete=False)
    assert everstep.open(tmp_path / "run").steps[-1] == 8


def test_a_state_that_has_changed_before_it_could_be_stored_is_told_of(tmp_path: Path) -> None:
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    truth = noted(tmp_path / "run", model, optimizer, snapshot_interval=5)
    for n in range(7):
        turn(model, optimizer, n)
        truth.commit()
    model(torch.randn(4, 6)).sum().backward()
    with pytest.warns(UnprotectedWarning, match="step 7 is not stored.*Step 5 is"):
        truth.run.flush()
    with pytest.warns(UnprotectedWarning, match="step 7 is not stored"):
        truth.run.close()
    assert truth.run.durable_step == 5 == everstep.open(tmp_path / "run").steps[-1]
    check_history(tmp_path / "run", truth, complete=False)


def test_an_exception_right_after_a_commit_loses_no_committed_step(tmp_path: Path) -> None:
    """As Ctrl-C while the next batch is loaded: the last step was not due, but its state is still there."""
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    truth = noted(tmp_path / "run", model, optimizer, snapshot_interval=100)
    with pytest.raises(KeyboardInterrupt), truth.run:
        for n in range(5):
            turn(model, optimizer, n)
            truth.commit()
        raise KeyboardInterrupt
    model = linear()
    crash(resumed(tmp_path / "run", model, torch.optim.AdamW(model.parameters(), lr=0.01), truth, 5))


def test_an_exception_in_mid_step_tells_which_committed_step_is_not_stored(tmp_path: Path) -> None:
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    truth = noted(tmp_path / "run", model, optimizer, snapshot_interval=100)
    with pytest.warns(UnprotectedWarning, match="step 5 is not stored"), pytest.raises(ZeroDivisionError), truth.run:
        for n in range(5):
            turn(model, optimizer, n)
            truth.commit()
        turn(model, optimizer, 5)
        _ = 1 / 0
    assert everstep.open(tmp_path / "run").steps == [0]


def _make(seed: int) -> Training:
    return build("lstm", "adamw", seed)


MAKE: Build = _make


def test_going_back_to_a_slot_or_base_forks_and_is_exact(tmp_path: Path) -> None:
    truth = run_plainly(MAKE)
    run_through(MAKE, tmp_path / "run", truth, [Kill(9)], base_interval=4, **EVERY_STEP)
    steps = everstep.open(tmp_path / "run").steps
    assert {0, 11, 12} <= set(steps)
    stored = [n for n in (4, 8) if n in steps]  # the one of 8 may not have been ready when the kill came
    assert stored
    for step in (11, stored[0]):
        t = MAKE(77 + step)
        with everstep.attach(t.model, t.optimizer, tmp_path / "run", extras=t.extras, **EVERY_STEP) as run:
            assert run.resume(step=step) == step
            for _ in loop(t, run, "nested"):
                pass
        must_equal(t.turns, truth.turns[step:], f"turns from step {step}")
        must_equal(everything(t), truth.end, f"the end, from step {step}")
    assert len(everstep.open(tmp_path / "run").timelines) == 3


ORDERS = [
    ["delta", "snapshot", "delta", "snapshot in memory", "snapshot", "delta"],
    pytest.param(["snapshot in memory", "shadow", "snapshot", "shadow", "snapshot in memory"], marks=pytest.mark.long),
]


@pytest.mark.parametrize("order", ORDERS, ids=["disk", "shadow"])
def test_modes_may_follow_each_other_in_any_order(
    order: list[str], tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, or closed where there is a shadow: exact each time; pools go when others have taken over."""
    monkeypatch.setenv("EVERSTEP_SHARED", str(shm))
    (shm / "pools").mkdir()
    kinds: dict[str, dict[str, Any]] = {
        "delta": {"quiet": True, "follower": False}, "shadow": {"mode": "shadow", "quiet": True}, "snapshot": EVERY_STEP,
        "snapshot in memory": {**EVERY_STEP, "pool": str(shm / "pools")},
    }  # fmt: skip
    truth = run_plainly(MAKE)
    turns = {n: (indices, loss) for n, indices, loss in truth.turns}
    committed = 0
    for process, mode in enumerate(order):
        t = MAKE(SEED + process)
        is_last = process == len(order) - 1
        run = everstep.attach(t.model, t.optimizer, tmp_path / "run", extras=t.extras, **kinds[mode])
        for k, _ in enumerate(loop(t, run, "nested")):
            n, *rest = t.turns[-1]
            must_equal(tuple(rest), turns[n], f"turn {n}")
            must_equal(everything(t), truth.after[n], f"after batch {n} in mode {mode}")
            if k == 2 and not is_last:
                break
        assert run.stats()["resumed_step"] == committed
        run.flush()
        if not mode.startswith("snapshot"):  # by the thread that has stored the base
            while list(tmp_path.rglob("*.pool")) + list(shm.rglob("*.pool")):
                time.sleep(0.01)
        if is_last or mode == "shadow":
            run.close()
        else:
            crash(run)
        committed = run.step
        history = everstep.open(tmp_path / "run")
        assert history.steps[-1] == committed
        for n in history.steps:
            state = history.state(n)
            must_equal(copied(state), truth.public[state["extras"]["progress"]["batches"]], f"state({n})")


def test_pools_of_a_run_that_was_closed_go_when_another_mode_has_taken_over(tmp_path: Path) -> None:
    model = linear()
    truth = noted(tmp_path / "run", model, torch.optim.AdamW(model.parameters(), lr=0.01))
    turn(model, truth._objects[1], 0)
    truth.commit()
    truth.run.close()
    for is_trained in (False, True):
        pools = tmp_path / "run/pool"
        assert list(pools.glob("*.pool"))
        model = linear()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False) as run:
            assert run.resume() == truth.run.step
            if is_trained:
                turn(model, optimizer, 1)
                run.commit()
            assert list(pools.glob("*.pool")), "until there is a base"
        assert not list(tmp_path.rglob("*.pool"))
        truth = noted(tmp_path / "run", model, optimizer)
        turn(model, optimizer, 2)
        truth.commit()
        truth.run.close()


def left_in_a_pool(path: Path) -> tuple[nn.Module, Optimizer]:
    """What was trained for three steps, and killed."""
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    truth = noted(path, model, optimizer)
    for n in range(3):
        turn(model, optimizer, n)
        truth.commit()
    truth.run.flush()
    crash(truth.run)
    return model, optimizer


@pytest.mark.parametrize("mode", ["delta", "snapshot"])
def test_steps_that_only_a_pool_led_to_are_not_missed_when_it_goes(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots, a kill, delta mode, and a kill before its first base is stored: its frames go on from the pool."""
    model, optimizer = left_in_a_pool(tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(everstep.Run, "_take_base", lambda run: None)
        run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
        assert run.resume() == 3
        for n in (3, 4):
            turn(model, optimizer, n)
            run.commit()
        assert run.durable_step < 3
        crash(run)
    history = everstep.open(tmp_path / "run")
    assert history.steps[-3:] == [3, 4, 5] and history.verify(deep=True).ok
    last = history.state(5)
    options = EVERY_STEP if mode == "snapshot" else {"quiet": True}
    with everstep.attach(model, optimizer, tmp_path / "run", **options) as run:
        assert run.resume() == 5
        must_equal(copied(everstep.open(tmp_path / "run").state(5)), copied(last), "step 5")
        turn(model, optimizer, 5)
        run.commit()
    history = everstep.open(tmp_path / "run")
    assert history.steps[-1] == 6 and 4 not in history.steps
    report = history.verify(deep=True)
    assert report.ok, str(report)


def test_a_base_that_is_gone_is_missed_also_where_a_generation_went_on_from_a_pool(tmp_path: Path) -> None:
    """Once it was there, the steps that stand on it were called durable."""
    model, optimizer = left_in_a_pool(tmp_path / "run")
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False) as run:
        run.resume()
        run.flush()
        for n in (3, 4):
            turn(model, optimizer, n)
            run.commit()
    assert everstep.open(tmp_path / "run").verify().ok
    (base,) = (tmp_path / "run").rglob("bases/000000000003")
    shutil.rmtree(base)
    report = everstep.open(tmp_path / "run").verify()
    assert not report.ok and "4" in str(report)
