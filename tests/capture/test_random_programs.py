"""Training programs made by lot, which do now one thing and now another: every step of them comes back as it was.

A step may be refused, by an AuditError, only where optimizer state of many tensors was edited by hand (decision 0008), or
where gradients of a step were added to and a parameter was edited before the writer had read them: nobody has that state.
"""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture import held, tap, watch
from everstep.errors import AuditError
from truth import Truth, crash, different, equal, live_state, slow

STEPS = 24
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "fused Adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, maximize=True, fused=True),
    "fused SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    "fused Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, fused=True),
    "foreach SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


class Program:
    """One model, and what may be done in a step of its training."""

    def __init__(self, optimizer: str, lot: random.Random) -> None:
        self.lot = lot
        self.model, self.optimizer = build(optimizer)
        self.params = list(self.model.parameters())
        self.kept: list[torch.Tensor] = []
        self.may_be_refused = False

    def one(self) -> torch.Tensor:
        return self.params[self.lot.randrange(len(self.params))]

    def backward(self) -> None:
        (self.model(torch.randn(4, 24)).square().mean() * 10).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    # -- what a step can be ---------------------------------------------------------------------------------------------

    def usual(self) -> None:
        self.backward()
        self.update()

    def zero_first(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def zero_in_place(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def zero_by_hand(self) -> None:
        self.backward()
        self.optimizer.step()
        for p in self.params:
            p.grad = None

    def twice(self) -> None:
        self.usual()
        self.usual()

    def accumulate(self) -> None:
        self.backward()
        self.backward()
        self.update()

    def clip(self) -> None:
        self.backward()
        nn.utils.clip_grad_norm_(self.params, 0.1)
        self.update()

    def leave_one_out(self) -> None:
        self.backward()
        self.one().grad = None
        self.update()

    def no_gradients(self) -> None:
        self.optimizer.zero_grad()
        self.optimizer.step()

    def keep_and_write(self) -> None:
        """Somebody has a gradient, and writes to it when the step is over."""
        self.backward()
        kept = self.one().grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        if kept is not None:
            kept.mul_(3.0)
            self.kept = [kept]

    def replace_gradient(self) -> None:
        self.backward()
        p = self.one()
        p.grad = torch.ones_like(p)
        self.update()

    def edit_before(self) -> None:
        self.may_be_refused |= any(p.grad is not None for p in self.params)
        with torch.no_grad():
            self.one().mul_(1.01)
        self.usual()

    def edit_after(self) -> None:
        self.usual()
        with torch.no_grad():
            self.one().clamp_(-0.1, 0.1)

    def new_memory(self) -> None:
        self.usual()
        p = self.one()
        p.data = p.data.clone()

    def edit_state(self) -> None:
        self.usual()
        state = self.optimizer.state.get(self.one(), {})
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                self.may_be_refused = True
                value.mul_(0.5)

    def load_state(self) -> None:
        self.usual()
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def learning_rate(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.9
        self.usual()

    def freeze(self) -> None:
        p = self.one()
        p.requires_grad_(not p.requires_grad)
        if not any(p.requires_grad for p in self.params):
            p.requires_grad_(True)
        self.usual()

    def hook(self) -> None:
        """Somebody's hook is last for one step."""

        def scale(*args: Any) -> None:
            for p in self.params:
                if p.grad is not None:
                    p.grad.mul_(0.5)

        self.backward()
        handle = self.optimizer.register_step_pre_hook(scale)
        self.update()
        handle.remove()

    def fail(self) -> None:
        """A step raises, and the program goes on."""

        def refuse(*args: Any) -> None:
            raise RuntimeError("not today")

        self.backward()
        handle = self.optimizer.register_step_pre_hook(refuse)
        with contextlib.suppress(RuntimeError):
            self.optimizer.step()
        handle.remove()
        self.optimizer.zero_grad()
        self.usual()

    def rest(self) -> None:
        self.usual()
        time.sleep(0.03)


ACTIONS = [name for name in vars(Program) if not name.startswith("_") and name not in ("one", "backward", "update")]


def build(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    body = nn.Sequential(nn.Linear(24, 96), nn.BatchNorm1d(96), nn.Tanh(), nn.Linear(96, 96), nn.Dropout(0.1))
    model = nn.Sequential(body, nn.Linear(96, 5))
    return model, OPTIMIZERS[optimizer](model.parameters())


@pytest.mark.filterwarnings("ignore::everstep.errors.HiddenEditWarning")  # a fused update after one that raised
@pytest.mark.parametrize("seed", range(144))
@pytest.mark.sampled(11)
def test_every_step_of_a_program_made_by_lot_comes_back(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    lot = random.Random(seed)
    optimizer = list(OPTIMIZERS)[seed % len(OPTIMIZERS)]
    if seed // len(OPTIMIZERS) % 2:
        for module, name in (
            (tap, "LOOK_AT_ONCE"), (watch, "LOOK_HERE_TENSORS"), (watch, "SLICE_BYTES"), (watch, "SLICED_UP_TO_BYTES"),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, 0)
        monkeypatch.setattr(held, "SHARE", 2)
    program = Program(optimizer, lot)
    run = everstep.attach(program.model, program.optimizer, tmp_path / "run", quiet=True, follower=False, base_interval=1000)
    truth = Truth(run, program.model, program.optimizer)
    truth.resume()
    done = []
    with slow(0.003) if lot.random() < 0.5 else contextlib.nullcontext():
        while run.step < STEPS:
            done.append(lot.choice(ACTIONS) if run.step > 6 and lot.random() < 0.4 else "usual")
            getattr(program, done[-1])()
            truth.commit()
    run.flush()
    crash(run)
    told = f"{optimizer}: {', '.join(f'{t} {name}' for t, name in enumerate(done, 1) if name != 'usual')}"
    history = everstep.open(tmp_path / "run")
    assert history.steps == sorted(truth.states), told
    refused = []
    for step in history.steps:
        try:
            found = history.state(step)
        except AuditError:
            refused.append(step)
            continue
        wrong = different(truth.states[step], found)
        assert wrong == [], f"step {step}: {wrong[:4]}; {told}"
    assert program.may_be_refused or not refused, f"refused: {refused}; {told}"
    if STEPS not in refused:
        _check_resumed(program, build(optimizer), tmp_path / "run", told)


def _check_resumed(program: Program, fresh: tuple[nn.Module, torch.optim.Optimizer], path: Any, told: str) -> None:
    """All is as it was, gradients that are carried over included, unless it is said that they are lost."""
    run = everstep.attach(*fresh, path, quiet=True, follower=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert run.resume() == STEPS
    crash(run)
    assert different(live_state(program.model, program.optimizer), live_state(*fresh)) == [], told
    if not any("being accumulated" in str(each.message) for each in said):
        now, then = ([p.grad for p in model.parameters()] for model in (fresh[0], program.model))
        assert equal(now, then) == [], f"gradients: {told}"
