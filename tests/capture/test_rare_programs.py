"""Programs that do something only now and then, after Everstep has learned what they do otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from support import crash, equal
from truth import live_state

STEPS = 30
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Training:
    def __init__(self, path: Path | None, make: Make, width: int = 4) -> None:
        torch.manual_seed(0)
        body = nn.Sequential(*(nn.Linear(3, 3) for _ in range(width)))
        self.model = nn.ModuleDict({"head": nn.Linear(3, 1), "body": body})
        self.optimizers = {name: make(list(part.parameters())) for name, part in self.model.items()}
        self.prepare()
        self.run: Any = None
        if path is not None:
            self.run = everstep.attach(self.model, self.optimizers, path, quiet=True, follower=False)
            self.start = self.run.resume()

    def prepare(self) -> None:
        """Before attach."""

    def backward(self, t: int) -> None:
        x = torch.linspace(-1, 1, 12).reshape(4, 3) + t / STEPS
        self.model["head"](self.model["body"](x)).square().mean().backward()

    def step(self, t: int) -> None:
        self.backward(t)
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()

    def state(self) -> Any:
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in self.model.named_parameters()}
        return live_state(self.model, self.optimizers), grads


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, 0.01)


def check(kind: type[Training], make: Make, path: Path, **kw: Any) -> None:
    """Every step of a run that crashes comes back with everything, gradients included."""
    plain = kind(None, make, **kw)
    truth = [plain.state()]
    for t in range(STEPS):
        plain.step(t)
        truth.append(plain.state())
    written = kind(path, make, **kw)
    for t in range(STEPS):
        written.step(t)
        written.run.commit()
        if t == STEPS // 2:
            written.run.flush()
    written.run.flush()
    crash(written.run)
    for n in (STEPS, STEPS - 3, 20, 13, 7):
        again = kind(None, make, **kw)
        with everstep.attach(again.model, again.optimizers, path, quiet=True, follower=False) as run:
            assert run.resume(step=n) == n
            assert not equal(truth[n], again.state()), n
            for t in range(n, min(n + 4, STEPS)):
                again.step(t)
                run.commit()
            assert not equal(truth[min(n + 4, STEPS)], again.state()), n


class Accumulates(Training):
    """One of two optimizers goes over to accumulating after a while."""

    def step(self, t: int) -> None:
        self.backward(t)
        self.optimizers["head"].step()
        self.optimizers["head"].zero_grad()
        if t < 12 or t % 4 == 3:
            self.optimizers["body"].step()
            self.optimizers["body"].zero_grad()


class LeavesGradients(Training):
    """From a certain step on there is another backward after the gradients were cleared."""

    def step(self, t: int) -> None:
        super().step(t)
        if t >= 12 and t % 3:
            self.backward(t + 1)


class StepsNowAndThen(Training):
    """One of two optimizers steps at every third commit (a GAN's), and clears its gradients only before that."""

    def step(self, t: int) -> None:
        for p in self.model["body"].parameters():
            p.requires_grad_(t % 3 == 0)
        if t % 3 == 0:
            self.optimizers["body"].zero_grad()
        self.backward(t)
        self.optimizers["head"].step()
        self.optimizers["head"].zero_grad()
        if t % 3 == 0:
            self.optimizers["body"].step()
        for p in self.model["body"].parameters():
            p.requires_grad_(True)


class EditsInAHook(Training):
    """A hook that was there before attach edits weights at every tenth update."""

    def prepare(self) -> None:
        self.count = 0

        def edit(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.count += 1
            if self.count % 10 == 0:
                with torch.no_grad():
                    self.model["body"][0].weight.clamp_(-0.1, 0.1)

        self.optimizers["body"].register_step_post_hook(edit)

    def step(self, t: int) -> None:
        self.count = t
        super().step(t)


class ChangesInPlace(Training):
    """Hyperparameters in a list and a dict."""

    def prepare(self) -> None:
        group = self.optimizers["body"].param_groups[0]
        group["mine"], group["betas"] = {"n": 0}, list(group["betas"])

    def step(self, t: int) -> None:
        group = self.optimizers["body"].param_groups[0]
        group["mine"]["n"] += 1
        if t == 8:
            group["betas"][0] = 0.5
        super().step(t)


class SharesWithOneThatIsNotReplayed(Training):
    """A parameter that two optimizers move one after the other; what the first does is stored by its results."""

    def prepare(self) -> None:
        shared = [*self.model["head"].parameters(), *self.model["body"][0].parameters()]
        body = torch.optim.ASGD(self.model["body"].parameters(), 0.01, t0=4)
        self.optimizers = {"drawn": Drawing(shared, 0.01), "body": body}

    def step(self, t: int) -> None:
        self.backward(t)
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.model.zero_grad()


class Drawing(torch.optim.SGD):
    """Moves parameters by chance: no replay gives the same."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p), alpha=0.01)
        return result


class Counting(torch.optim.SGD):
    """Keeps a number beside what it keeps of its parameters, and acts on it now and then."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        state = self.state["global"]  # type: ignore[index]
        state["n"] = state.get("n", 0) + 1
        if state["n"] % 9 == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.9)
        return result


@pytest.mark.parametrize("width", [4, 40])
@pytest.mark.sampled(2)
def test_an_optimizer_that_begins_to_accumulate(tmp_path: Path, width: int) -> None:
    check(Accumulates, adam, tmp_path / "run", width=width)


@pytest.mark.parametrize("width", [4, 40])
@pytest.mark.sampled(2)
def test_gradients_that_stay_from_a_certain_step_on(tmp_path: Path, width: int) -> None:
    check(LeavesGradients, adam, tmp_path / "run", width=width)


@pytest.mark.parametrize("width", [4, 40])
@pytest.mark.sampled(2)
def test_gradients_that_stay_while_another_optimizer_steps(tmp_path: Path, width: int) -> None:
    check(StepsNowAndThen, adam, tmp_path / "run", width=width)


def test_a_hook_that_edits_weights_now_and_then(tmp_path: Path) -> None:
    check(EditsInAHook, adam, tmp_path / "run")


def test_hyperparameters_that_are_changed_in_place(tmp_path: Path) -> None:
    check(ChangesInPlace, adam, tmp_path / "run")


@pytest.mark.filterwarnings("ignore::everstep.errors.InexactWarning")
def test_an_optimizer_that_keeps_a_number_of_its_own(tmp_path: Path) -> None:
    check(Training, lambda params: Counting(params, 0.01), tmp_path / "run")


@pytest.mark.filterwarnings("ignore::everstep.errors.InexactWarning")
def test_a_parameter_of_two_optimizers_of_which_one_is_not_replayed(tmp_path: Path) -> None:
    check(SharesWithOneThatIsNotReplayed, adam, tmp_path / "run")
