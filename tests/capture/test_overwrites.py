"""Overwrites and audit: whoever changes the state, by whatever means, the steps come back as they were, or are refused."""

from __future__ import annotations

import copy
import itertools
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import everstep
from everstep.capture.auditor import Auditor
from everstep.errors import AuditError, HiddenEditWarning, InexactWarning, StepNotFoundError, UnprovenWarning
from everstep.follow.compact import Compactor
from everstep.store.runs import RunPath
from truth import Truth, check_history, check_resume, crash, different, gate, live_state, slow

Built = tuple[Any, Any]
STEPS = 9


def tiny() -> Built:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def large(dtype: torch.dtype = torch.float32) -> Built:
    """4 MB of parameters in several tensors, 8 MB of moments: a slice of 64 KB covers little of it."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.Tanh(), nn.Linear(1024, 512), nn.Tanh(), nn.Linear(512, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def step(model: nn.Module, optimizer: Any) -> None:
    first = next(p for p in model.parameters() if p.dim() > 1)
    x = torch.randn(2, first.shape[-1], dtype=first.dtype)
    model(x).abs().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(
    path: Any, build: Callable[[], Built], edit: Callable[[int, Any, Any], None], *, steps: int = STEPS,
    before: bool = False, body: Callable[[Any, Any], None] = step, **options: Any,
) -> Truth:  # fmt: skip
    """`edit(t, model, optimizer)` runs after the update of step t, or before its forward."""
    model, optimizer = build()
    run = everstep.attach(model, optimizer, path, quiet=True, follower=False, **options)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for t in range(1, steps + 1):
        if before:
            edit(t, model, optimizer)
        body(model, optimizer)
        if not before:
            edit(t, model, optimizer)
        truth.commit()
    crash(run)
    return truth


def check(path: Any, build: Callable[[], Built], truth: Truth, last: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprovenWarning)  # whether there was time for all of a larger state is chance
        check_history(path, truth)
        warnings.simplefilter("ignore", InexactWarning)
        check_resume(path, build, truth, last)


def check_never_wrong(path: Any, truth: Truth) -> list[int]:
    """Every step is right, or refused, or it is said what of it is not proven and the rest is right.

    Returns the refused ones. A proven step that is offered instead is right in full, and nothing is said of it.
    """
    history = everstep.open(path)
    refused = []
    for n in history.steps:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = history.state(n)
        except AuditError as e:
            refused.append(n)
            assert e.proven_step is not None and e.proven_step < n
            with warnings.catch_warnings():
                warnings.simplefilter("error", UnprovenWarning)
                assert different(truth.states[e.proven_step], history.state(e.proven_step)) == []
            assert any(name in str(e) for name in ("weight", "bias", "exp_avg")), "names the tensor"
        else:
            expected = copy.deepcopy(truth.states[n])
            if any(issubclass(w.category, UnprovenWarning) for w in caught):
                del expected["optimizer"]["state"], found["optimizer"]["state"]
            assert different(expected, found) == [], f"step {n}"
    return refused


@pytest.fixture
def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is done for small models only is not done: as it is with billions of parameters in hundreds of tensors."""
    monkeypatch.setattr("everstep.capture.auditor.ALWAYS_BYTES", -1)
    monkeypatch.setattr("everstep.capture.auditor.UNHURRIED_BYTES", -1)
    monkeypatch.setattr("everstep.capture.watch.SLICE_BYTES", 0)
    monkeypatch.setattr("everstep.capture.watch.SLICED_UP_TO_BYTES", -1)
    monkeypatch.setattr("everstep.capture.watch.LOOK_HERE_TENSORS", 0)
    monkeypatch.setattr("everstep.capture.capture.COPY_AT_ONCE_BYTES", -1)


@pytest.fixture
def state_seldom_hashed(as_if_large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a state so large that a hash of it is taken at no step after the first three but the fifth."""
    hash_some = Auditor._hash_some
    steps = itertools.count(4)

    def some(auditor: Any, audit: Any, may: Any, step_s: float, *, unhurried: bool) -> bool:
        if not may or next(steps) != 5:
            return not may
        return hash_some(auditor, audit, may, step_s, unhurried=True)

    monkeypatch.setattr(Auditor, "_hash_some", some)


def many() -> Built:
    """More state tensors than the training thread looks at, and so small that it hashes them all."""
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(40)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def forget_all(optimizer: Any) -> None:
    optimizer.state = type(optimizer.state)(dict)


def clear(optimizer: Any) -> None:
    optimizer.state.clear()


def other_moments(optimizer: Any) -> None:
    for p in optimizer.state:
        optimizer.state[p]["exp_avg"] = torch.ones_like(p)


def one_other_moment(optimizer: Any) -> None:
    p = list(optimizer.state)[-1]
    optimizer.state[p]["exp_avg_sq"] = torch.ones_like(p)


def halve(optimizer: Any) -> None:
    for values in optimizer.state.values():
        values["exp_avg"].mul_(0.5)


def forget_one(optimizer: Any) -> None:
    del optimizer.state[next(iter(optimizer.state))]


def as_equal_objects(optimizer: Any) -> None:
    optimizer.state = copy.copy(optimizer.state)
    for p, values in optimizer.state.items():
        optimizer.state[p] = {key: value.clone() for key, value in values.items()}


def at_8(edit: Callable[[Any], None]) -> Callable[[int, Any, Any], None]:
    return lambda t, model, optimizer: edit(optimizer) if t == 8 else None


EDITS_OF_STATE = pytest.mark.parametrize(
    "edit", [forget_all, clear, other_moments, one_other_moment, halve, forget_one, as_equal_objects],
    ids=lambda edit: edit.__name__,
)  # fmt: skip


@pytest.mark.parametrize("before", [False, True], ids=["after-the-update", "before-the-update"])
@EDITS_OF_STATE
def test_optimizer_state_that_is_edited_once_is_right_at_every_step(
    edit: Callable[[Any], None], before: bool, tmp_path: Any
) -> None:
    check(tmp_path / "run", many, train(tmp_path / "run", many, at_8(edit), steps=11, before=before), 11)


@pytest.mark.parametrize("before", [False, True], ids=["after-the-update", "before-the-update"])
@EDITS_OF_STATE
def test_where_it_is_large_the_step_may_be_refused_and_the_next_are_right(
    edit: Callable[[Any], None], before: bool, tmp_path: Any, as_if_large: None
) -> None:
    truth = train(tmp_path / "run", tiny, at_8(edit), steps=11, before=before)
    assert set(check_never_wrong(tmp_path / "run", truth)) <= ({7, 8} if before else {8})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprovenWarning)
        check_resume(tmp_path / "run", tiny, truth, 11)


# -- edits that version counters show ---------------------------------------------------------------------------------


@torch.no_grad()
def clamp(t: int, model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.clamp_(-0.05, 0.05)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("build", [tiny, large])
def test_weights_clamped_without_grad_come_back(build: Any, before: bool, tmp_path: Any) -> None:
    truth = train(tmp_path / "run", build, clamp, before=before)
    check(tmp_path / "run", build, truth, STEPS)


def test_weights_clamped_at_one_step_come_back(tmp_path: Any) -> None:
    truth = train(tmp_path / "run", tiny, lambda t, m, o: clamp(t, m, o) if t == 7 else None)
    check(tmp_path / "run", tiny, truth, STEPS)


@pytest.mark.filterwarnings("ignore::everstep.errors.UnprovenWarning")
def test_weights_clamped_before_every_forward_do_not_keep_the_first_base_from_being_stored(tmp_path: Any) -> None:
    """With a slow disk, the base is still being copied when the weights are clamped."""

    def edit(t: int, model: Any, optimizer: Any) -> None:
        clamp(t, model, optimizer)

    model, optimizer = large()
    with slow(0.02, what=lambda path: path.endswith(".safetensors")):
        run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
        truth = Truth(run, model, optimizer)
        truth.resume()
        for t in range(1, 9):
            edit(t, model, optimizer)
            step(model, optimizer)
            truth.commit()
        run.flush()
        assert run.durable_step == 8
        crash(run)
    assert max(everstep.open(tmp_path / "run").steps) == 8
    check_history(tmp_path / "run", truth, complete=False)


def test_a_model_loaded_in_mid_run_comes_back(tmp_path: Any) -> None:
    other = tiny()[0].state_dict()

    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t in (5, 8):
            model.load_state_dict({k: v * t for k, v in other.items()})

    truth = train(tmp_path / "run", tiny, edit)
    check(tmp_path / "run", tiny, truth, STEPS)


def test_an_optimizer_loaded_in_mid_run_comes_back(tmp_path: Any) -> None:
    saved: dict[str, Any] = {}

    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t == 3:
            saved.update(copy.deepcopy(optimizer.state_dict()))
        if t in (6, 9):
            saved["param_groups"][0]["lr"] = 0.1 / t
            optimizer.load_state_dict(copy.deepcopy(saved))

    truth = train(tmp_path / "run", tiny, edit)
    check(tmp_path / "run", tiny, truth, STEPS)


def test_a_model_loaded_by_assignment_in_mid_run_comes_back(tmp_path: Any) -> None:
    """The optimizer still holds the old parameters, which are then in no model."""
    other = copy.deepcopy(tiny()[0].state_dict())

    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t == 5:
            model.load_state_dict({k: v.clone() for k, v in other.items()}, assign=True)

    def body(model: Any, optimizer: Any) -> None:
        for i, p in enumerate(optimizer.param_groups[0]["params"]):
            p.grad = torch.full_like(p, 0.1 + i)
        optimizer.step()
        optimizer.zero_grad()

    truth = train(tmp_path / "run", tiny, edit, body=body)
    check_history(tmp_path / "run", truth)


@pytest.mark.parametrize(
    "change",
    [
        lambda s, p: s["exp_avg"].mul_(0.5),
        lambda s, p: s.update(exp_avg=s["exp_avg"] * 0.5),
        lambda s, p: s["exp_avg"].zero_(),
        lambda s, p: s["step"].fill_(40.0),
        lambda s, p: s.update(step=torch.tensor(2.0)),
        lambda s, p: s.update(note="set by hand"),
        lambda s, p: s.update(count=3),
        lambda s, p: s.update(extra=torch.arange(5)),
    ],
    ids=["in-place", "assigned", "zeroed", "step-in-place", "step-assigned", "a-string", "a-number", "a-tensor"],
)  # fmt: skip
@pytest.mark.parametrize("fused", [True, False])
def test_optimizer_state_changed_by_hand_comes_back(change: Any, fused: bool, tmp_path: Any) -> None:
    def build() -> Built:
        model, _ = tiny()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)

    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t in (2, 7):
            p = optimizer.param_groups[0]["params"][2]
            change(optimizer.state[p], p)

    truth = train(tmp_path / "run", build, edit)
    check(tmp_path / "run", build, truth, STEPS)


def test_optimizer_state_cleared_by_hand_comes_back(tmp_path: Any) -> None:
    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t == 4:
            optimizer.state.clear()
        if t == 7:
            del optimizer.state[optimizer.param_groups[0]["params"][1]]

    truth = train(tmp_path / "run", tiny, edit)
    check(tmp_path / "run", tiny, truth, STEPS)


def test_one_entry_of_a_state_removed_by_hand_comes_back(tmp_path: Any) -> None:
    def build() -> Built:
        model, _ = tiny()
        return model, torch.optim.SGD(model.parameters(), lr=1e-2)

    def edit(t: int, model: Any, optimizer: Any) -> None:
        p = optimizer.param_groups[0]["params"][0]
        if t == 2:
            optimizer.state[p]["mine"] = torch.ones(3)
            optimizer.state[p]["yours"] = torch.zeros(4)
        if t == 6:
            del optimizer.state[p]["mine"]

    truth = train(tmp_path / "run", build, edit)
    check(tmp_path / "run", build, truth, STEPS)


def test_hyperparameters_changed_in_many_ways_come_back(tmp_path: Any) -> None:
    def edit(t: int, model: Any, optimizer: Any) -> None:
        group = optimizer.param_groups[0]
        group["lr"] = 1e-2 / t
        if t == 3:
            group["betas"] = (0.8, 0.99)
        if t == 4:
            group["mine"] = {"a": [1, 2.5, None]}
        if t == 5:
            group["weight_decay"] = torch.tensor(0.25, dtype=torch.float64).item()
        if t == 6:
            del group["mine"]

    truth = train(tmp_path / "run", tiny, edit, before=True)
    check(tmp_path / "run", tiny, truth, STEPS)


def test_a_learning_rate_held_in_a_tensor_comes_back(tmp_path: Any) -> None:
    def build() -> Built:
        model, _ = tiny()
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))

    def edit(t: int, model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"].mul_(0.9)

    truth = train(tmp_path / "run", build, edit)
    check(tmp_path / "run", build, truth, STEPS)


# -- buffers ----------------------------------------------------------------------------------------------------------


def test_batchnorm_statistics_come_back(tmp_path: Any) -> None:
    def build() -> Built:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    truth = train(tmp_path / "run", build, lambda *a: None)
    assert truth.states[STEPS]["model"]["1.num_batches_tracked"] == STEPS
    check(tmp_path / "run", build, truth, STEPS)


def test_large_batchnorm_statistics_come_back(tmp_path: Any) -> None:
    """More than 64 KB each: not packed with the small ones. BatchNorm moves no version counter."""

    def build() -> Built:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 20_000), nn.BatchNorm1d(20_000), nn.Linear(20_000, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    truth = train(tmp_path / "run", build, lambda *a: None, steps=8)
    check(tmp_path / "run", build, truth, 8)


class Counting(nn.Module):
    """Buffers of many kinds, moved by every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 3)
        self.register_buffer("wave", torch.zeros(4, dtype=torch.complex64))
        self.register_buffer("wide", torch.zeros(2, 2, dtype=torch.complex128))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("byte", torch.zeros(5, dtype=torch.uint8))
        self.register_buffer("flag", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("short", torch.zeros(3, dtype=torch.float16))
        self.register_buffer("brain", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("scalar", torch.tensor(0.0))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.register_buffer("turned", torch.zeros(3, 4).t())
        self.register_buffer("conj", torch.zeros(3, dtype=torch.complex64).conj())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean = x.mean()
            self.wave += torch.complex(mean, -mean)
            self.wide.data.add_(mean.double())
            self.seen.data += 1
            self.byte.numpy()[:] += 7
            self.flag.logical_not_()
            self.short += mean
            self.brain += mean
            self.scalar.data.add_(mean)
            self.hidden.add_(1)
            self.turned.data.add_(mean)
            self.conj += torch.complex(mean, mean)
        return self.lin(x)


def counting() -> Built:
    torch.manual_seed(1)
    model = Counting()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_buffers_of_many_kinds_come_back(tmp_path: Any) -> None:
    truth = train(tmp_path / "run", counting, lambda *a: None)
    check(tmp_path / "run", counting, truth, STEPS)


def test_buffers_that_are_not_in_the_state_dict_come_back_too(tmp_path: Any) -> None:
    truth = train(tmp_path / "run", counting, lambda *a: None)
    assert "hidden" not in truth.states[STEPS]["model"]
    model, optimizer = counting()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    run.resume()
    assert model.hidden.tolist() == [float(STEPS)] * 3
    crash(run)


def test_buffers_replaced_by_new_tensors_come_back(tmp_path: Any) -> None:
    def edit(t: int, model: Any, optimizer: Any) -> None:
        model.seen = model.seen + 2
        model.scalar = torch.tensor(float(t))
        if t == 6:
            model.hidden = torch.full((3,), 5.0)

    truth = train(tmp_path / "run", counting, edit)
    check(tmp_path / "run", counting, truth, STEPS)


def test_buffers_that_grow_come_back(tmp_path: Any) -> None:
    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t in (4, 8):
            model.seen = torch.cat([model.seen, model.seen])
        if t == 6:
            model.scalar = torch.zeros(2, 2)

    truth = train(tmp_path / "run", counting, edit)
    check(tmp_path / "run", counting, truth, STEPS)


@pytest.mark.parametrize("how", ["data", "resize"])
def test_buffers_that_grow_behind_the_module_come_back(how: str, tmp_path: Any) -> None:
    """The tensor object stays, its shape does not; other buffers of the same dtype lie beside it."""

    def build() -> Built:
        torch.manual_seed(1)
        model = nn.Linear(6, 3)
        for i in range(3):
            model.register_buffer(f"queue{i}", torch.full((3,), float(i)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def edit(t: int, model: Any, optimizer: Any) -> None:
        model.queue2.add_(1)
        if t == 5:
            if how == "data":
                model.queue0.data = torch.arange(7.0)
            else:
                model.queue0.resize_(7).copy_(torch.arange(7.0))

    truth = train(tmp_path / "run", build, edit)
    check(tmp_path / "run", build, truth, STEPS)


def test_a_buffer_that_is_expanded_comes_back(tmp_path: Any) -> None:
    """Several elements on one place in memory: nothing may be written through such a tensor."""

    def build() -> Built:
        torch.manual_seed(1)
        model = nn.Linear(6, 3)
        model.register_buffer("ids", torch.arange(4).expand(3, 4))
        model.register_buffer("mask", torch.ones(1).expand(5), persistent=False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    truth = train(tmp_path / "run", build, lambda *a: None)
    check_history(tmp_path / "run", truth)
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    assert run.resume() == STEPS
    assert different(truth.states[STEPS], live_state(model, optimizer)) == []
    crash(run)


# -- structure --------------------------------------------------------------------------------------------------------


def test_a_buffer_registered_in_mid_run_comes_back(tmp_path: Any) -> None:
    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t == 4:
            model[0].register_buffer("late", torch.full((3,), 2.5))
        if t > 4:
            model[0].late.add_(1)

    def build_late() -> Built:
        model, optimizer = tiny()
        model[0].register_buffer("late", torch.zeros(3))
        return model, optimizer

    truth = train(tmp_path / "run", tiny, edit)
    check(tmp_path / "run", build_late, truth, STEPS)


def test_a_parameter_registered_and_optimized_in_mid_run_comes_back(tmp_path: Any) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.lin(x)
            return out + self.late if hasattr(self, "late") else out

    def build() -> Built:
        torch.manual_seed(1)
        model = Growing()
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t == 4:
            model.register_parameter("late", nn.Parameter(torch.full((3,), 2.5)))
        if t == 6:
            optimizer.add_param_group({"params": [model.late], "lr": 0.5})

    def build_late() -> Built:
        model, optimizer = build()
        model.register_parameter("late", nn.Parameter(torch.zeros(3)))
        return model, optimizer

    truth = train(tmp_path / "run", build, edit)
    check(tmp_path / "run", build_late, truth, STEPS)


@pytest.mark.parametrize("variant", [{}, {"foreach": True}, {"fused": True}])
def test_a_parameter_group_added_in_mid_run_comes_back(variant: Any, tmp_path: Any) -> None:
    def build() -> Built:
        model, _ = tiny()
        return model, torch.optim.AdamW(model[2].parameters(), lr=1e-2, **variant)

    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t == 6:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})

    truth = train(tmp_path / "run", build, edit)
    check(tmp_path / "run", build, truth, STEPS)


def test_a_parameter_group_removed_in_mid_run_comes_back(tmp_path: Any) -> None:
    def build() -> Built:
        model, _ = tiny()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]
        return model, torch.optim.AdamW(groups, lr=1e-2)

    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t == 6:
            del optimizer.param_groups[1]
        if t == 9:
            optimizer.param_groups[0]["params"].pop()

    truth = train(tmp_path / "run", build, edit)
    check_history(tmp_path / "run", truth)


def test_frozen_and_unfrozen_parameters_come_back(tmp_path: Any) -> None:
    def build() -> Built:
        model, optimizer = tiny()
        model[0].requires_grad_(False)
        return model, optimizer

    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t == 4:
            model[0].requires_grad_(True)
        if t == 8:
            model[2].weight.requires_grad_(False)

    truth = train(tmp_path / "run", build, edit, before=True)
    check(tmp_path / "run", build, truth, STEPS)
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    run.resume()
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, True]
    crash(run)


@pytest.mark.parametrize("build", [tiny, large])
@pytest.mark.parametrize("before", [True, False])
def test_weights_replaced_by_new_memory_come_back(build: Any, before: bool, tmp_path: Any) -> None:
    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t in (2, 6, 7):
            for p in model.parameters():
                p.data = p.data * 0.5

    truth = train(tmp_path / "run", build, edit, before=before)
    check(tmp_path / "run", build, truth, STEPS)


def test_weights_set_from_a_vector_come_back(tmp_path: Any) -> None:
    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t == 6:
            vector = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(vector * 0.5, model.parameters())

    truth = train(tmp_path / "run", tiny, edit)
    check(tmp_path / "run", tiny, truth, STEPS)


def test_a_parameter_pruned_in_mid_run_keeps_its_moments(tmp_path: Any) -> None:
    """Pruning hangs the same parameter under another name and adds a buffer."""

    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t == 6:
            prune.l1_unstructured(model[0], "weight", amount=0.5)

    def build_pruned() -> Built:
        model, optimizer = tiny()
        prune.identity(model[0], "weight")
        return model, optimizer

    truth = train(tmp_path / "run", tiny, edit)
    check(tmp_path / "run", build_pruned, truth, STEPS)


def test_two_edited_updates_in_one_commit_come_back(tmp_path: Any) -> None:
    """A WGAN clamps between two optimizer steps of one commit."""

    def body(model: Any, optimizer: Any) -> None:
        step(model, optimizer)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)
        step(model, optimizer)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.01)

    truth = train(tmp_path / "run", tiny, lambda *a: None, body=body)
    check(tmp_path / "run", tiny, truth, STEPS)


@pytest.mark.parametrize("build", [tiny, large])
@pytest.mark.filterwarnings("error")
def test_two_updates_in_one_commit_with_a_hidden_edit_between_come_back(build: Any, tmp_path: Any) -> None:
    def body(model: Any, optimizer: Any) -> None:
        step(model, optimizer)
        for p in model.parameters():
            p.data.clamp_(-0.02, 0.02)
        step(model, optimizer)

    truth = train(tmp_path / "run", build, lambda *a: None, body=body)
    check(tmp_path / "run", build, truth, STEPS)


def test_two_models_and_optimizers_come_back(tmp_path: Any) -> None:
    def build() -> Built:
        torch.manual_seed(1)
        models = {"g": nn.Linear(3, 4), "d": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))}
        optimizers = {
            "g_opt": torch.optim.Adam(models["g"].parameters(), lr=1e-2),
            "d_opt": torch.optim.RMSprop(models["d"].parameters(), lr=1e-2),
        }
        return models, optimizers

    def body(models: Any, optimizers: Any) -> None:
        for _ in range(2):
            optimizers["d_opt"].zero_grad()
            models["d"](models["g"](torch.randn(4, 3)).detach()).sum().backward()
            optimizers["d_opt"].step()
            for p in models["d"].parameters():
                p.data.clamp_(-0.3, 0.3)
        optimizers["g_opt"].zero_grad()
        models["d"](models["g"](torch.randn(4, 3))).mean().backward()
        optimizers["g_opt"].step()

    truth = train(tmp_path / "run", build, lambda *a: None, body=body)
    check(tmp_path / "run", build, truth, STEPS)


def test_an_average_of_the_weights_as_a_second_model_comes_back(tmp_path: Any) -> None:
    def build() -> Built:
        model, optimizer = tiny()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return {"model": model, "ema": average}, {"opt": optimizer}

    def body(models: Any, optimizers: Any) -> None:
        step(models["model"], optimizers["opt"])
        models["ema"].update_parameters(models["model"])

    def canonical(state: dict[str, Any]) -> dict[str, Any]:
        return state

    truth = train(tmp_path / "run", build, lambda *a: None, body=body)
    history = everstep.open(tmp_path / "run")
    assert history.steps == list(range(STEPS + 1))
    for n in history.steps:
        found = history.state(n)
        expected = truth.states[n]["model"]["ema"]
        for key, value in expected.items():
            name = key if key in found["model"]["ema"] else key.removeprefix("module.")
            assert torch.equal(found["model"]["ema"][name], value), (n, key)
        assert different({**truth.states[n], "model": truth.states[n]["model"]["model"]},
                         {**found, "model": found["model"]["model"]}) == []  # fmt: skip
    check_resume(tmp_path / "run", build, truth, STEPS)


def test_spectral_norm_comes_back(tmp_path: Any) -> None:
    def build() -> Built:
        torch.manual_seed(1)
        model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    def body(model: Any, optimizer: Any) -> None:
        model(torch.randn(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    truth = train(tmp_path / "run", build, lambda *a: None, body=body)
    check(tmp_path / "run", build, truth, STEPS)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("num_rows", [20, 4000])
def test_an_embedding_that_renormalises_its_weight_comes_back(num_rows: int, closure: bool, tmp_path: Any) -> None:
    """Embedding(max_norm) writes to the weight in forward, also in one that runs inside of step(closure)."""

    def build() -> Built:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(num_rows, 8, max_norm=1.0), nn.Linear(8, 1))
        with torch.no_grad():
            model[0].weight.mul_(0.3)
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    def body(model: Any, optimizer: Any) -> None:
        def once() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randint(0, num_rows, (16,))).square().sum() - 3 * model[0].weight.sum()
            loss.backward()
            return loss

        if closure:
            optimizer.step(once)
        else:
            once()
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactWarning)
        truth = train(tmp_path / "run", build, lambda *a: None, body=body)
        check(tmp_path / "run", build, truth, STEPS)


# -- hidden edits -----------------------------------------------------------------------------------------------------


def hidden_clamp(model: Any) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.03, 0.03)


@pytest.mark.filterwarnings("error::everstep.errors.HiddenEditWarning")
@pytest.mark.parametrize("disk", ["fast", "slow"])
@pytest.mark.parametrize("before", [True, False], ids=["before-forward", "after-step"])
@pytest.mark.parametrize("build", [tiny, large])
@pytest.mark.sampled(2)
def test_weights_clamped_through_data_at_every_step_simply_work(
    build: Any, before: bool, disk: str, tmp_path: Any
) -> None:
    with slow(0.0 if disk == "fast" else 0.02, what=lambda path: True):
        truth = train(tmp_path / "run", build, lambda t, m, o: hidden_clamp(m), before=before)
    check(tmp_path / "run", build, truth, STEPS)


def train_with_one_hidden_edit(
    path: Any, build: Any, hide: Callable[[Any, Any], None], *, at: int, steps: int, before: bool = False, **options: Any
) -> tuple[Truth, list[str]]:
    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t == at:
            hide(model, optimizer)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        truth = train(path, build, edit, steps=steps, before=before, **options)
    return truth, [str(w.message) for w in caught if issubclass(w.category, HiddenEditWarning)]


@pytest.mark.parametrize("before", [True, False], ids=["before-forward", "after-step"])
def test_weights_clamped_through_data_at_one_late_step_are_caught_and_named(before: bool, tmp_path: Any) -> None:
    at = random.Random(3).randint(6, 15)
    truth, told = train_with_one_hidden_edit(
        tmp_path / "run", tiny, lambda m, o: m[0].weight.data.clamp_(-0.03, 0.03), at=at, steps=20, before=before
    )
    assert len(told) == 1 and "0.weight" in told[0]
    assert any(str(n) in told[0] for n in (at - 1, at, at + 1))
    check(tmp_path / "run", tiny, truth, 20)


def test_a_hidden_edit_makes_the_trainer_take_a_new_base(tmp_path: Any) -> None:
    train_with_one_hidden_edit(tmp_path / "run", tiny, lambda m, o: m[0].weight.data.clamp_(-0.03, 0.03), at=9, steps=14)
    assert 9 <= everstep.open(tmp_path / "run").plan(14).base.step <= 11


@pytest.mark.parametrize("what", ["exp_avg", "exp_avg_sq", "step"])
def test_moments_edited_through_data_at_one_late_step_are_caught_and_named(what: str, tmp_path: Any) -> None:
    def hide(model: Any, optimizer: Any) -> None:
        optimizer.state[model[2].weight][what].data.add_(1.0)

    truth, told = train_with_one_hidden_edit(tmp_path / "run", tiny, hide, at=9, steps=16)
    assert len(told) == 1 and what in told[0] and "2.weight" in told[0]
    check(tmp_path / "run", tiny, truth, 16)


def one_element(model: Any, optimizer: Any) -> None:
    """One element of half a million, through numpy."""
    array = model[0].weight.detach().numpy()
    array[500, 300] += 1.0


@pytest.mark.parametrize("before", [True, False], ids=["before-forward", "after-step"])
def test_one_element_of_a_large_model_edited_through_numpy_is_never_restored_wrong(before: bool, tmp_path: Any) -> None:
    truth, _ = train_with_one_hidden_edit(tmp_path / "run", large, one_element, at=8, steps=12, before=before)
    refused = check_never_wrong(tmp_path / "run", truth)
    assert all(n >= 7 for n in refused)
    assert refused == list(range(refused[0], 13)) if refused else True


@pytest.mark.filterwarnings("ignore::everstep.errors.UnprovenWarning")
def test_the_follower_finds_a_hidden_edit_and_a_new_base_is_taken(tmp_path: Any) -> None:
    model, optimizer = large()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, base_interval=30)
    truth = Truth(run, model, optimizer)
    run.resume()
    edited = told_at = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(1, 400):
            step(model, optimizer)
            if not edited and run.stats()["follower_bases"]:
                one_element(model, optimizer)
                edited = t
            run.commit(wait=True)
            time.sleep(0.02)
            if not told_at and any(issubclass(w.category, HiddenEditWarning) for w in caught):
                told_at = t
            if told_at:
                truth.note()
            if told_at and t >= told_at + 3:
                break
        run.flush()
    crash(run)
    told = [str(w.message) for w in caught if issubclass(w.category, HiddenEditWarning)]
    assert told and "0.weight" in told[0] and f"step {edited}" in told[0]
    last = max(truth.states)
    history = everstep.open(tmp_path / "run")
    assert max(history.steps) == last
    assert different(truth.states[last], history.state(last)) == []
    with pytest.raises((AuditError, StepNotFoundError)):
        history.state(edited)


@pytest.mark.filterwarnings("ignore::everstep.errors.UnprovenWarning")
@pytest.mark.parametrize("last", range(3))
@pytest.mark.parametrize("build", [tiny, large])
def test_a_hidden_edit_in_the_last_steps_is_restored_right_or_refused(build: Any, last: int, tmp_path: Any) -> None:
    def hide(model: Any, optimizer: Any) -> None:
        model[2].weight.data.view(-1)[-5:].clamp_(-0.001, 0.001)
        model[0].weight.data.view(-1)[70_000 % model[0].weight.numel()] += 1.0

    truth, _ = train_with_one_hidden_edit(tmp_path / "run", build, hide, at=10 - last, steps=10)
    refused = check_never_wrong(tmp_path / "run", truth)
    model, optimizer = build()
    before = live_state(model, optimizer)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    try:
        at = run.resume()
    except AuditError as e:
        assert 10 in refused
        assert different(before, live_state(model, optimizer)) == [], "the live model is untouched"
        proven = e.proven_step
        crash(run)
        run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InexactWarning)
            at = run.resume(step=proven)
        assert at == proven
    else:
        assert at == 10
    assert different(truth.states[at], live_state(model, optimizer)) == []
    crash(run)


@pytest.mark.parametrize("build", [tiny, large])
def test_moments_edited_in_the_last_step_are_never_wrong_without_a_word(build: Any, tmp_path: Any) -> None:
    def hide(model: Any, optimizer: Any) -> None:
        optimizer.state[model[2].weight]["exp_avg"].data.view(-1)[-3:] += 1.0

    truth, _ = train_with_one_hidden_edit(tmp_path / "run", build, hide, at=10, steps=10)
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.resume()
        right = different(truth.states[10], live_state(model, optimizer)) == []
        assert right or any(issubclass(w.category, UnprovenWarning) for w in caught)
    except AuditError as e:
        assert e.proven_step is not None and e.proven_step <= 9
    finally:
        crash(run)


LAST = 10


def edit_weights(model: Any, optimizer: Any) -> None:
    model[0].weight.data.view(-1)[3] += 1.0


def edit_moments(model: Any, optimizer: Any) -> None:
    optimizer.state[model[2].weight]["exp_avg"].data.view(-1)[-3:] += 1.0


def edit_moments_openly(model: Any, optimizer: Any) -> None:
    """Version counters show it, but of a large state they are read late."""
    optimizer.state[model[2].weight]["exp_avg"].mul_(0.5)


@pytest.mark.usefixtures("state_seldom_hashed")
@pytest.mark.parametrize("before", [True, False], ids=["before-forward", "after-step"])
@pytest.mark.parametrize("at", [4, 5, 8, 9, LAST])
@pytest.mark.parametrize("hide", [edit_weights, edit_moments, edit_moments_openly])
@pytest.mark.sampled(3)
def test_no_edit_of_a_large_model_is_restored_wrong_without_a_word(hide: Any, at: int, before: bool, tmp_path: Any) -> None:
    truth, _ = train_with_one_hidden_edit(tmp_path / "run", tiny, hide, at=at, steps=LAST, before=before)
    check_never_wrong(tmp_path / "run", truth)
    model, optimizer = tiny()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run.resume()
        except AuditError as e:
            assert e.proven_step is not None and e.proven_step < LAST
        else:
            right = different(truth.states[LAST], live_state(model, optimizer)) == []
            assert right or any(issubclass(w.category, UnprovenWarning) for w in caught)
    crash(run)


@pytest.mark.usefixtures("state_seldom_hashed")
def test_a_step_whose_moments_were_not_hashed_comes_back_with_a_warning_that_offers_a_proven_one(tmp_path: Any) -> None:
    train(tmp_path / "run", tiny, lambda *a: None)
    model, optimizer = tiny()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    with pytest.warns(UnprovenWarning, match=r"step 9 .* exp_avg of .* proven whole is 5\."):
        assert run.resume() == STEPS
    assert run.stats()["resumed_proven"] is False
    crash(run)
    everstep.open(tmp_path / "run").state(5)
    report = everstep.open(tmp_path / "run").verify(deep=True)
    assert report.ok and (report.proven_step, report.replayed_step) == (5, STEPS)
    assert "proven up to step 5, but for some optimizer state up to step 9" in str(report)


@pytest.mark.usefixtures("state_seldom_hashed")
def test_a_base_folded_where_moments_were_not_hashed_is_not_taken_for_proven(tmp_path: Any) -> None:
    truth, _ = train_with_one_hidden_edit(tmp_path / "run", tiny, edit_moments, at=STEPS, steps=STEPS)
    compactor = Compactor(RunPath(str(tmp_path / "run")), 1, 1)
    compactor.advance(5)
    assert compactor.write_base(direct=False).audit == "folded"
    compactor.advance(STEPS)
    assert compactor.write_base(direct=False).audit == "folded-in-part"
    history = everstep.open(tmp_path / "run")
    assert different(truth.states[5], history.state(5)) == []
    assert history.plan(STEPS).frames == ()
    with pytest.warns(UnprovenWarning, match="some of the optimizer state"):
        assert different(truth.states[STEPS], history.state(STEPS)) != []


@pytest.mark.parametrize("build", [tiny, large])
def test_a_full_audit_refuses_moments_edited_in_the_last_step(build: Any, tmp_path: Any) -> None:
    def hide(model: Any, optimizer: Any) -> None:
        optimizer.state[model[2].weight]["exp_avg"].data.view(-1)[-3:] += 1.0

    truth, _ = train_with_one_hidden_edit(tmp_path / "run", build, hide, at=10, steps=10, audit="full")
    assert set(check_never_wrong(tmp_path / "run", truth)) <= {10}


def test_a_hidden_edit_while_the_first_base_is_being_copied_never_spoils_it(tmp_path: Any) -> None:
    """Step 0 is what the model was when the run began, or is refused."""
    model, optimizer = large()
    with gate(ops=("create",), what=lambda path: path.endswith(".safetensors")) as disk:
        disk.close()
        run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
        truth = Truth(run, model, optimizer)
        truth.resume()
        assert disk.reached.wait(10)
        one_element(model, optimizer)
        disk.open()
        for _ in range(5):
            step(model, optimizer)
            truth.commit()
        run.flush()
        crash(run)
    check_never_wrong(tmp_path / "run", truth)
    assert 5 in everstep.open(tmp_path / "run").steps


def test_a_hidden_edit_while_a_later_base_is_being_copied_never_spoils_it(tmp_path: Any) -> None:
    model, optimizer = large()
    with gate(ops=("create",), what=lambda path: path.endswith(".safetensors")) as disk:
        run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False, base_interval=6)
        truth = Truth(run, model, optimizer)
        truth.resume()
        run.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HiddenEditWarning)
            for t in range(1, 10):
                if t == 6:
                    disk.close()
                step(model, optimizer)
                truth.commit()
                if t == 6:
                    assert disk.reached.wait(10)
                    model[0].weight.detach().numpy()[700:, :] *= 1.5
                    disk.open()
        run.flush()
        crash(run)
    check_never_wrong(tmp_path / "run", truth)


# -- odd parameters ---------------------------------------------------------------------------------------------------

VARIANTS = [{"foreach": False}, {"foreach": True}, {"fused": True}]


@pytest.mark.filterwarnings("ignore:.*cannot be replayed:everstep.errors.InexactWarning")
@pytest.mark.parametrize("variant", VARIANTS, ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_channels_last_parameters_come_back(name: str, variant: Any, tmp_path: Any) -> None:
    def build() -> Built:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 2)).to(
            memory_format=torch.channels_last
        )
        options = {"momentum": 0.9} if name == "SGD" else {}
        return model, getattr(torch.optim, name)(model.parameters(), lr=1e-2, **options, **variant)

    def body(model: Any, optimizer: Any) -> None:
        x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    truth = train(tmp_path / "run", build, lambda *a: None, body=body)
    check(tmp_path / "run", build, truth, STEPS)


@pytest.mark.filterwarnings("ignore:.*cannot be replayed:everstep.errors.InexactWarning")
@pytest.mark.parametrize("variant", VARIANTS, ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("contiguous_grad", [True, False])
def test_parameters_that_are_not_contiguous_come_back(contiguous_grad: bool, variant: Any, tmp_path: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter(torch.randn(5, 7).t())
            self.every_other = nn.Parameter(torch.randn(20)[::2])
            self.plain = nn.Parameter(torch.randn(3))

    def build() -> Built:
        torch.manual_seed(1)
        model = Odd()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **variant)

    def body(model: Any, optimizer: Any) -> None:
        for p in model.parameters():
            g = torch.randn(p.shape)
            p.grad = g if contiguous_grad else torch.empty_strided(p.shape, p.stride()).copy_(g)
        optimizer.step()
        optimizer.zero_grad()

    truth = train(tmp_path / "run", build, lambda *a: None, body=body)
    if variant.get("fused") and contiguous_grad:
        # The fused kernel mixes up elements (or writes elsewhere) here; whatever it does, it is what comes back.
        check_history(tmp_path / "run", truth)
    else:
        check(tmp_path / "run", build, truth, STEPS)


@pytest.mark.parametrize("variant", VARIANTS, ids=["loop", "foreach", "fused"])
def test_scalar_and_empty_parameters_come_back(variant: Any, tmp_path: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.one = nn.Parameter(torch.ones(1, 1, 1))
            self.vector = nn.Parameter(torch.ones(70))
            self.unused = nn.Parameter(torch.ones(4))

    def build() -> Built:
        torch.manual_seed(1)
        model = Odd()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **variant)

    def body(model: Any, optimizer: Any) -> None:
        (model.scalar * model.vector.sum() * model.one.sum() + model.empty.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    truth = train(tmp_path / "run", build, lambda *a: None, body=body)
    check(tmp_path / "run", build, truth, STEPS)


def test_parameters_of_the_optimizer_that_are_in_no_model_come_back(tmp_path: Any) -> None:
    def build() -> Built:
        model, _ = tiny()
        temperature = nn.Parameter(torch.tensor(1.5))
        bias = nn.Parameter(torch.randn(3))
        return model, torch.optim.AdamW([*model.parameters(), temperature, bias], lr=1e-2)

    def body(model: Any, optimizer: Any) -> None:
        *_, temperature, bias = optimizer.param_groups[0]["params"]
        ((model(torch.randn(2, 6)) + bias) * temperature).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    truth = train(tmp_path / "run", build, lambda *a: None, body=body)
    check(tmp_path / "run", build, truth, STEPS)
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    run.resume()
    torch.manual_seed(5)
    body(model, optimizer)
    crash(run)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("variant", VARIANTS, ids=["loop", "foreach", "fused"])
def test_parameters_of_other_dtypes_come_back(variant: Any, dtype: torch.dtype, tmp_path: Any) -> None:
    if dtype.is_complex and variant.get("fused"):
        pytest.skip("torch has no fused kernel for complex parameters")

    def build() -> Built:
        torch.manual_seed(1)
        model = nn.ParameterDict({"w": nn.Parameter(torch.randn(7, 9, dtype=dtype)), "b": torch.zeros(3, dtype=dtype)})
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **variant)

    def body(model: Any, optimizer: Any) -> None:
        for p in model.parameters():
            p.grad = torch.randn(p.shape, dtype=dtype)
        optimizer.step()
        optimizer.zero_grad()

    truth = train(tmp_path / "run", build, lambda *a: None, body=body)
    check(tmp_path / "run", build, truth, STEPS)


@pytest.mark.filterwarnings("ignore:.*cannot be replayed:everstep.errors.InexactWarning")
def test_fused_sgd_in_bf16_comes_back_although_torch_cannot_replay_it(tmp_path: Any) -> None:
    def build() -> Built:
        torch.manual_seed(1)
        model = nn.ParameterDict({"w": nn.Parameter(torch.randn(130, 9, dtype=torch.bfloat16))})
        return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)

    def body(model: Any, optimizer: Any) -> None:
        for p in model.parameters():
            p.grad = torch.randn(p.shape, dtype=torch.bfloat16)
        optimizer.step()
        optimizer.zero_grad()

    truth = train(tmp_path / "run", build, lambda *a: None, body=body)
    check(tmp_path / "run", build, truth, STEPS)


def test_a_model_converted_in_mid_run_comes_back(tmp_path: Any) -> None:
    """model.double(): the parameters stay the same objects with other bytes."""

    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t == 6:
            model.double()

    def build_double() -> Built:
        model, _ = tiny()
        model.double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def build() -> Built:
        model, _ = tiny()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    truth = train(tmp_path / "run", build, edit)
    check(tmp_path / "run", build_double, truth, STEPS)


def test_tied_weights_come_back_and_stay_tied(tmp_path: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.out = nn.Linear(6, 11, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return self.out(self.embed(i))

    def build() -> Built:
        torch.manual_seed(1)
        model = Tied()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def body(model: Any, optimizer: Any) -> None:
        model(torch.randint(0, 11, (4,))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    truth = train(tmp_path / "run", build, lambda *a: None, body=body)
    check(tmp_path / "run", build, truth, STEPS)
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    run.resume()
    assert model.out.weight is model.embed.weight
    crash(run)


def test_weights_tied_and_untied_in_mid_run_come_back(tmp_path: Any) -> None:
    def build() -> Built:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def edit(t: int, model: Any, optimizer: Any) -> None:
        if t == 4:
            model[1].weight = model[0].weight
        if t == 8:
            model[1].weight = nn.Parameter(model[0].weight.detach().clone())

    truth = train(tmp_path / "run", build, edit)
    check_history(tmp_path / "run", truth)


def test_a_parameter_in_two_optimizers_comes_back(tmp_path: Any) -> None:
    def build() -> Built:
        model, _ = tiny()
        optimizers = {
            "a": torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
            "b": torch.optim.AdamW(model[2].parameters(), lr=1e-2),
        }
        return model, optimizers

    def body(model: Any, optimizers: Any) -> None:
        for key in ("a", "b", "a"):
            model(torch.randn(2, 6)).sum().backward()
            optimizers[key].step()
            model.zero_grad()

    truth = train(tmp_path / "run", build, lambda *a: None, body=body)
    check(tmp_path / "run", build, truth, STEPS)


# -- other people's code ----------------------------------------------------------------------------------------------


class Logged(torch.optim.SGD):
    """A subclass whose step calls the parent's."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.clamp_(-1.0, 1.0)
        return super().step(closure)


@pytest.mark.parametrize("registered", [True, False])
def test_a_subclass_that_calls_its_parents_step_comes_back(registered: bool, tmp_path: Any) -> None:
    cls = type("Registered", (Logged,), {}) if registered else Logged
    if registered:
        everstep.register(cls)

    def build() -> Built:
        model, _ = tiny()
        return model, cls(model.parameters(), lr=1e-2, momentum=0.9)

    truth = train(tmp_path / "run", build, lambda *a: None)
    check_resume(tmp_path / "run", build, truth, STEPS)
    if registered:
        check_history(tmp_path / "run", truth)


def test_an_optimizer_with_state_of_its_own_comes_back(tmp_path: Any) -> None:
    """Attributes beside param_groups and state: a replay differs, so results are stored, and it is said."""

    class Drifting(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            self.calls = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.calls += 1
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-group["lr"] / self.calls)
                        self.state[p]["calls"] = self.calls

    def build() -> Built:
        model, _ = tiny()
        return model, Drifting(model.parameters())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        truth = train(tmp_path / "run", build, lambda *a: None)
        check_resume(tmp_path / "run", build, truth, STEPS)
    assert any(issubclass(w.category, InexactWarning) for w in caught)


def test_lbfgs_comes_back_by_its_results_and_says_so(tmp_path: Any) -> None:
    def build() -> Built:
        model, _ = tiny()
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    x = torch.randn(8, 6)

    def body(model: Any, optimizer: Any) -> None:
        def once() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(once)

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        truth = train(tmp_path / "run", build, lambda *a: None, body=body)
        history = everstep.open(tmp_path / "run")
        for n in history.steps:
            found, expected = history.state(n), truth.states[n]
            assert all(torch.equal(found["model"][k], v) for k, v in expected["model"].items()), n
        check_resume(tmp_path / "run", build, truth, STEPS)


@pytest.mark.parametrize("at", [1, 2, 7])
@pytest.mark.parametrize("keep_grads", [True, False])
def test_an_exception_inside_of_step_that_is_caught_comes_back(keep_grads: bool, at: int, tmp_path: Any) -> None:
    """The step fails half-way, is caught, and is done again."""
    model, _ = tiny()
    optimizer = Failing(model.parameters(), lr=1e-2, momentum=0.9)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for t in range(1, 11):
        optimizer.zero_grad()
        model(torch.randn(2, 6)).sum().backward()
        optimizer.fail = t == at
        if t == at:
            with pytest.raises(RuntimeError, match="half-way"):
                optimizer.step()
            optimizer.fail = False
        optimizer.step()
        if not keep_grads:
            optimizer.zero_grad()
        assert truth.commit() == t
    crash(run)
    check_history(tmp_path / "run", truth)


class Failing(torch.optim.SGD):
    fail = False

    def step(self, closure: Any = None) -> Any:
        if self.fail:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise RuntimeError("half-way")
        return super().step(closure)


everstep.register(Failing)


def test_an_exception_in_somebody_elses_hook_that_is_caught_comes_back(tmp_path: Any) -> None:
    model, optimizer = tiny()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    failing = False

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if failing:
            raise RuntimeError("not now")

    optimizer.register_step_post_hook(hook)
    optimizer.register_step_pre_hook(hook)
    for t in range(1, 11):
        model(torch.randn(2, 6)).sum().backward()
        if t in (2, 6):
            failing = True
            with pytest.raises(RuntimeError, match="not now"):
                optimizer.step()
            failing = False
        optimizer.step()
        optimizer.zero_grad()
        truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)


def test_hooks_of_others_run_as_before(tmp_path: Any) -> None:
    model, optimizer = tiny()
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *a: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *a: calls.append("post"))
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    run.resume()
    optimizer.register_step_pre_hook(lambda *a: calls.append("late pre"))
    optimizer.register_step_post_hook(lambda *a: calls.append("late post"))
    step(model, optimizer)
    run.commit()
    crash(run)
    assert calls == ["pre", "late pre", "post", "late post"]
    step(model, optimizer)
    assert len(calls) == 8


def test_nothing_of_everstep_is_left_on_the_optimizer_after_close(tmp_path: Any) -> None:
    model, optimizer = tiny()
    before = (list(optimizer._optimizer_step_pre_hooks), list(optimizer._optimizer_step_post_hooks), dict(vars(optimizer)))
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True) as run:
        run.resume()
        step(model, optimizer)
    after = (list(optimizer._optimizer_step_pre_hooks), list(optimizer._optimizer_step_post_hooks), dict(vars(optimizer)))
    assert after[:2] == before[:2]
    assert set(after[2]) == set(before[2])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_compiled_module_comes_back_under_its_own_names(backend: str, tmp_path: Any) -> None:
    model, _ = tiny()
    compiled = torch.compile(model, backend=backend)
    try:
        compiled(torch.randn(2, 6)).sum().backward()
    except Exception as e:  # whatever a machine without a compiler raises
        pytest.skip(f"torch.compile does not work here: {type(e).__name__}")
    model.zero_grad()
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    run = everstep.attach(compiled, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for _ in range(8):
        compiled(torch.randn(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", tiny, truth, 8)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_data_parallel_module_comes_back_under_its_own_names(tmp_path: Any) -> None:
    model, _ = tiny()
    wrapped = nn.DataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    run = everstep.attach(wrapped, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for _ in range(5):
        step(wrapped, optimizer)
        truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", tiny, truth, 5)


def test_sparse_gradients_come_back(tmp_path: Any) -> None:
    def build() -> Built:
        torch.manual_seed(1)
        model = nn.Sequential(nn.EmbeddingBag(40, 6, mode="sum", sparse=True), nn.Linear(6, 1))
        optimizers = {
            "sparse": torch.optim.SparseAdam(list(model[0].parameters()), lr=1e-2),
            "dense": torch.optim.Adagrad(model[1].parameters(), lr=1e-2),
        }
        return model, optimizers

    def body(model: Any, optimizers: Any) -> None:
        model(torch.randint(0, 40, (4, 5))).sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()

    truth = train(tmp_path / "run", build, lambda *a: None, body=body)
    check(tmp_path / "run", build, truth, STEPS)


def test_sparse_momentum_that_grows_comes_back(tmp_path: Any) -> None:
    """SGD with momentum keeps an uncoalesced sparse tensor that grows at every step."""

    def build() -> Built:
        torch.manual_seed(1)
        model = nn.EmbeddingBag(40, 6, mode="sum", sparse=True)
        return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.5)

    def body(model: Any, optimizer: Any) -> None:
        model(torch.randint(0, 40, (4, 5))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    truth = train(tmp_path / "run", build, lambda *a: None, body=body)
    check(tmp_path / "run", build, truth, STEPS)


def test_a_gradient_that_is_sometimes_sparse_comes_back(tmp_path: Any) -> None:
    def build() -> Built:
        torch.manual_seed(1)
        model = nn.EmbeddingBag(40, 6, mode="sum")
        return model, torch.optim.SGD(model.parameters(), lr=1e-2)

    count = 0

    def body(model: Any, optimizer: Any) -> None:
        nonlocal count
        count += 1
        model.sparse = count % 3 == 0
        model(torch.randint(0, 40, (4, 5))).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    truth = train(tmp_path / "run", build, lambda *a: None, body=body)
    check(tmp_path / "run", build, truth, STEPS)
