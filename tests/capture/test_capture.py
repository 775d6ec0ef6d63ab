"""Capture: gradients as consumed and hyperparameters as used, in order, whatever the loop looks like."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everstep
from everstep.errors import InexactWarning
from truth import Truth, check_history, check_resume, crash, slow

STEPS = 9
Built = tuple[Any, Any]


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(4, 6)).square().mean()


def train(path: Any, build: Any, body: Any, *, steps: int = STEPS, extras: Any = None) -> Truth:
    model, optimizer, *rest = build()
    extras = rest[0] if rest else None
    run = everstep.attach(model, optimizer, path, extras=extras, quiet=True, follower=False)
    truth = Truth(run, model, optimizer, extras)
    truth.resume()
    with slow():
        for t in range(steps):
            body(t, model, optimizer, *rest)
            truth.commit()
    crash(run)
    return truth


def check(path: Any, build: Any, truth: Truth) -> None:
    check_history(path, truth)
    check_resume(path, build, truth, max(truth.states))


OPTIMIZERS = {
    "Adadelta": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {}, "Adamax": {}, "ASGD": {}, "NAdam": {},
    "RAdam": {}, "RMSprop": {"momentum": 0.9, "centered": True}, "Rprop": {}, "SGD": {"momentum": 0.9, "nesterov": True},
    "Adafactor": {},
}  # fmt: skip
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")


@pytest.mark.parametrize("variant", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sampled(2)
def test_every_optimizer_in_every_variant_comes_back(name: str, variant: str, tmp_path: Any) -> None:
    if variant == "fused" and name not in FUSED:
        pytest.skip("torch has no fused kernel for it")
    kind = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[variant]

    def build() -> Built:
        model = mlp()
        return model, getattr(torch.optim, name)(model.parameters(), lr=1e-2, **OPTIMIZERS[name], **kind)

    def body(t: int, model: Any, optimizer: Any) -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    check(tmp_path / "run", build, train(tmp_path / "run", build, body))


def adamw() -> Built:
    model = mlp()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_a_scheduler_inside_of_the_loop_is_recorded_as_used(tmp_path: Any) -> None:
    def build() -> tuple[Any, ...]:
        model, optimizer = adamw()
        return model, optimizer, {"sched": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)}

    def body(t: int, model: Any, optimizer: Any, extras: Any) -> None:
        loss_of(model).backward()
        optimizer.step()
        extras["sched"].step()
        optimizer.zero_grad()

    check(tmp_path / "run", build, train(tmp_path / "run", build, body))


def test_hyperparameters_changed_by_somebody_elses_pre_hook_are_recorded_as_used(tmp_path: Any) -> None:
    def build() -> Built:
        model, optimizer = adamw()

        def warm_up(optimizer: Any, args: Any, kwargs: Any) -> None:
            optimizer.param_groups[0]["lr"] *= 0.9

        optimizer.register_step_pre_hook(warm_up)
        return model, optimizer

    def body(t: int, model: Any, optimizer: Any) -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    check(tmp_path / "run", build, train(tmp_path / "run", build, body))


def test_hyperparameters_changed_by_a_later_pre_hook_are_recorded_as_used(tmp_path: Any) -> None:
    """It is registered after Everstep's; from the second step on Everstep's is the last again."""
    model, optimizer = adamw()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()

    def warm_up(optimizer: Any, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.9

    for t in range(STEPS):
        if t == 5:
            optimizer.register_step_pre_hook(warm_up)
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)


def test_special_hyperparameters_keep_their_bits(tmp_path: Any) -> None:
    values = [0.1, 1e-300, math.nextafter(1e-2, 1), 0.0, 1 / 3, 5e-324, 1e-2]

    def body(t: int, model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = values[t % len(values)]
        optimizer.param_groups[0]["weight_decay"] = -0.0
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    check(tmp_path / "run", adamw, train(tmp_path / "run", adamw, body))


def test_parameters_without_a_gradient_are_recorded_as_such(tmp_path: Any) -> None:
    """Whether there is state, and whether weight decay applies, depends on it."""

    def body(t: int, model: Any, optimizer: Any) -> None:
        loss_of(model).backward()
        if t % 3:
            model[2].weight.grad = None
        if t < 4:
            model[4].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()

    truth = train(tmp_path / "run", adamw, body)
    assert "4.bias" not in truth.states[4]["optimizer"]["state"]
    check(tmp_path / "run", adamw, truth)


def test_an_update_without_any_gradient_is_a_step(tmp_path: Any) -> None:
    def body(t: int, model: Any, optimizer: Any) -> None:
        if t % 2:
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    truth = train(tmp_path / "run", adamw, body)
    assert max(truth.states) == STEPS
    check(tmp_path / "run", adamw, truth)


def test_clipping_and_noise_are_recorded_as_consumed(tmp_path: Any) -> None:
    def body(t: int, model: Any, optimizer: Any) -> None:
        (loss_of(model) * 100).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
        optimizer.step()
        optimizer.zero_grad()

    check(tmp_path / "run", adamw, train(tmp_path / "run", adamw, body))


def halve(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def test_tensor_hooks_and_post_accumulate_hooks_are_recorded_as_consumed(tmp_path: Any) -> None:
    def build() -> Built:
        model, optimizer = adamw()
        model[0].weight.register_hook(lambda g: g * 2)
        model[2].weight.register_post_accumulate_grad_hook(halve)
        return model, optimizer

    def body(t: int, model: Any, optimizer: Any) -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    check(tmp_path / "run", build, train(tmp_path / "run", build, body))


def test_optimizers_that_step_in_backward_hooks_come_back(tmp_path: Any) -> None:
    """One optimizer a parameter, stepped as soon as its gradient is there; no gradient is left at the commit."""

    def build() -> Built:
        model = mlp()
        optimizers = {
            f"o{i}": torch.optim.SGD([p], lr=0.05, momentum=0.9) for i, p in enumerate(model.parameters())
        }
        return model, optimizers

    def body(t: int, model: Any, optimizers: Any) -> None:
        if t == 0:
            for p, optimizer in zip(model.parameters(), optimizers.values(), strict=True):

                def hook(p: Any, optimizer: Any = optimizer) -> None:
                    optimizer.step()
                    optimizer.zero_grad()

                p.register_post_accumulate_grad_hook(hook)
        loss_of(model).backward()

    check(tmp_path / "run", build, train(tmp_path / "run", build, body))


def test_autocast_with_a_scaler_comes_back_over_skipped_steps(tmp_path: Any) -> None:
    def build() -> tuple[Any, ...]:
        model, optimizer = adamw()
        return model, optimizer, {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)}

    def body(t: int, model: Any, optimizer: Any, extras: Any) -> None:
        scaler = extras["scaler"]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model)
        if t in (1, 6):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    truth = train(tmp_path / "run", build, body)
    assert max(truth.states) == STEPS - 2, "a skipped step is none"
    check(tmp_path / "run", build, truth)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_fused_step_that_is_skipped_by_its_kernel_comes_back(name: str, tmp_path: Any) -> None:
    """found_inf reaches the kernel: the hooks fire, state is made, nothing is updated."""

    def build() -> tuple[Any, ...]:
        model = mlp()
        options = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, fused=True, **options)
        return model, optimizer, {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)}

    def body(t: int, model: Any, optimizer: Any, extras: Any) -> None:
        scaler = extras["scaler"]
        loss = loss_of(model) * (float("inf") if t in (0, 5) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    truth = train(tmp_path / "run", build, body)
    assert max(truth.states) == STEPS
    check(tmp_path / "run", build, truth)


def test_several_optimizers_in_changing_order_come_back(tmp_path: Any) -> None:
    def build() -> Built:
        model = mlp()
        return model, {
            "a": torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9),
            "b": torch.optim.Adam(model[2].parameters(), lr=1e-2, foreach=True),
            "c": torch.optim.AdamW(model[4].parameters(), lr=1e-2, fused=True),
        }

    def body(t: int, model: Any, optimizers: Any) -> None:
        for key in ("abc", "ca", "b", "cbacb")[t % 4]:
            loss_of(model).backward()
            optimizers[key].step()
            model.zero_grad()

    check(tmp_path / "run", build, train(tmp_path / "run", build, body))


def test_an_optimizer_with_several_groups_comes_back(tmp_path: Any) -> None:
    def build() -> Built:
        model = mlp()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 0.1, "betas": (0.5, 0.6)},
            {"params": []},
        ]
        return model, torch.optim.AdamW(groups, lr=1e-2)

    def body(t: int, model: Any, optimizer: Any) -> None:
        optimizer.param_groups[t % 2]["lr"] *= 0.5
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    check(tmp_path / "run", build, train(tmp_path / "run", build, body))


def test_closures_come_back(tmp_path: Any) -> None:
    """Lightning runs forward and backward inside of step(closure)."""

    def body(t: int, model: Any, optimizer: Any) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        result = optimizer.step(closure) if t % 2 else optimizer.step(closure=closure)
        assert isinstance(result, torch.Tensor), "the closure's result is handed through"

    check(tmp_path / "run", adamw, train(tmp_path / "run", adamw, body))


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -0.0, 1e-45])
def test_special_gradients_come_back(special: float, tmp_path: Any) -> None:
    def build() -> Built:
        model = mlp()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def body(t: int, model: Any, optimizer: Any) -> None:
        loss_of(model).backward()
        if t >= 3:
            model[0].weight.grad[t % 40] = special
        optimizer.step()
        optimizer.zero_grad()

    check(tmp_path / "run", build, train(tmp_path / "run", build, body))


def test_a_large_parameter_in_several_pieces_comes_back(tmp_path: Any) -> None:
    """More than half a million elements, not a multiple of anything."""

    def build() -> Built:
        torch.manual_seed(1)
        model = nn.ParameterDict({"w": nn.Parameter(torch.randn(1_100_003)), "b": nn.Parameter(torch.randn(70))})
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def body(t: int, model: Any, optimizer: Any) -> None:
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.zero_grad()

    truth = train(tmp_path / "run", build, body, steps=5)
    check_history(tmp_path / "run", truth)


def test_many_small_parameters_come_back(tmp_path: Any) -> None:
    def build() -> Built:
        torch.manual_seed(1)
        model = nn.ParameterList([nn.Parameter(torch.randn(i % 7 + 1)) for i in range(300)])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

    def body(t: int, model: Any, optimizer: Any) -> None:
        sum(p.square().sum() for p in list(model)[t % 3 :]).backward()
        optimizer.step()
        optimizer.zero_grad()

    check(tmp_path / "run", build, train(tmp_path / "run", build, body, steps=6))


def test_muon_comes_back(tmp_path: Any) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")

    def build() -> Built:
        model = mlp()
        weights = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        return model, {"m": torch.optim.Muon(weights, lr=1e-2), "a": torch.optim.AdamW(others, lr=1e-2)}

    def body(t: int, model: Any, optimizers: Any) -> None:
        loss_of(model).backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()

    check(tmp_path / "run", build, train(tmp_path / "run", build, body))


def test_training_with_everstep_gives_the_bits_of_training_without(tmp_path: Any) -> None:
    def go(attached: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        model, optimizer = adamw()
        torch.manual_seed(5)
        run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True) if attached else None
        if run is not None:
            run.resume()
        losses = []
        for _ in range(12):
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if run is not None:
                run.commit()
        if run is not None:
            crash(run)
        return losses, model.state_dict()

    (a, model_a), (b, model_b) = go(False), go(True)
    assert a == b
    assert all(torch.equal(model_a[k], model_b[k]) for k in model_a)


def test_an_unknown_optimizer_that_cannot_be_replayed_is_said_to_cost_more(tmp_path: Any) -> None:
    class Noisy(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn_like(p), alpha=0.01)

    def build() -> Built:
        model = mlp()
        return model, Noisy(model.parameters(), lr=0.1)

    def body(t: int, model: Any, optimizer: Any) -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.warns(InexactWarning, match="Noisy"):
        truth = train(tmp_path / "run", build, body)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", build, truth, STEPS)


def test_an_optimizer_that_draws_random_numbers_draws_the_same_with_everstep(tmp_path: Any) -> None:
    class Noisy(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.add_(torch.randn_like(p), alpha=0.01 * (1 + random.random() + float(np.random.rand())))

    def go(attached: bool) -> tuple[torch.Tensor, ...]:
        model = mlp()
        optimizer = Noisy(model.parameters(), lr=0.1)
        random.seed(5)
        np.random.seed(5)
        run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False) if attached else None
        if run is not None:
            run.resume()
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
            if run is not None:
                run.commit()
        if run is not None:
            crash(run)
        return (*model.parameters(), torch.get_rng_state(), torch.tensor([random.random(), np.random.rand()]))

    alone = go(False)
    with pytest.warns(InexactWarning, match="Noisy"):
        assert all(map(torch.equal, alone, go(True)))


def test_a_counter_outside_of_an_optimizers_state_is_named(tmp_path: Any) -> None:
    class Counting(torch.optim.SGD):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.num_updates = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            self.num_updates += 1

    def build() -> Built:
        model = mlp()
        return model, Counting(model.parameters(), lr=0.1)

    def body(t: int, model: Any, optimizer: Any) -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.warns(InexactWarning, match="num_updates.*not stored"):
        train(tmp_path / "run", build, body)
