"""Updates in backward: the bits of training without them, or an error."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import layerwise_training
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from everstep.capture.layerwise import WATCHED_STEPS, Layerwise
from everstep.errors import LayerwiseError, UsageError
from everstep.memory import same_bits

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
O = torch.optim  # noqa: E741


class Tied(nn.Module):
    """A small transformer whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1) for _ in range(2)
        )
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 5)).to(dtype)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip


class Trained:
    """A model, its optimizer, and the usual loop."""

    def __init__(self, build: Callable[[], nn.Module], make: Make, *, layerwise: bool, batch_bytes: int = 1) -> None:
        torch.manual_seed(3)
        self.model = build()
        self.optimizer = make(list(self.model.parameters()))
        self.events: list[tuple[str, list[int]]] = []
        self.layerwise: Layerwise | None = None
        self.inputs = torch.Generator().manual_seed(5)
        if layerwise:
            self.layerwise = Layerwise(
                self.optimizer, list(self.model.parameters()), model=self.model, batch_bytes=batch_bytes,
                before=lambda params: self.events.append(("before", list(map(id, params)))),
                after=lambda params: self.events.append(("after", list(map(id, params)))),
            )  # fmt: skip

    def loss(self) -> torch.Tensor:
        if isinstance(self.model, Tied):
            tokens = torch.randint(11, (2, 6), generator=self.inputs)
            return nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
        dtype = next(self.model.parameters()).dtype
        shape = (4, 3, 6, 6) if isinstance(self.model, nn.Sequential) and isinstance(self.model[0], nn.Conv2d) else (4, 12)
        return self.model(torch.randn(shape, generator=self.inputs, dtype=dtype)).square().mean()  # type: ignore[no-any-return]

    def step(self, between: Callable[[Trained], None] = lambda _: None) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        between(self)
        self.optimizer.step()

    def train(self, num: int) -> Trained:
        for _ in range(num):
            self.step()
        return self

    def grads(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def everything(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict())
        for i, values in self.optimizer.state_dict()["state"].items():
            found.update((f"{i}.{key}", torch.as_tensor(v)) for key, v in values.items() if v is not None)
        return found


def assert_same(a: Trained, b: Trained) -> None:
    left, right = a.everything(), b.everything()
    assert left.keys() == right.keys()
    assert [name for name in left if not same_bits(left[name], right[name])] == []


def both(
    build: Callable[[], nn.Module], make: Make, change: Callable[[Trained, int], None] = lambda t, i: None, *,
    steps: int = 9, batch_bytes: int = 1,
) -> Trained:  # fmt: skip
    """Trains without and with layerwise; `change` is called before each step. All must be the same."""
    plain = Trained(build, make, layerwise=False)
    layered = Trained(build, make, layerwise=True, batch_bytes=batch_bytes)
    for trained in (plain, layered):
        torch.manual_seed(7)  # dropout
        for i in range(steps):
            change(trained, i)
            trained.step()
    assert_same(plain, layered)
    assert layered.layerwise is not None
    return layered


def updated(trained: Trained) -> tuple[int, int]:
    assert trained.layerwise is not None
    return trained.layerwise.stats.in_backward, trained.layerwise.stats.at_step


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: O.SGD(p, lr=0.1),
    "SGD momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD nesterov": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD foreach": lambda p: O.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: O.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: O.Adam(p, amsgrad=True),
    "AdamW": lambda p: O.AdamW(p, foreach=False),
    "AdamW foreach": lambda p: O.AdamW(p, foreach=True, amsgrad=True),
    "AdamW fused": lambda p: O.AdamW(p, fused=True),
    "AdamW tensor lr": lambda p: O.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "RMSprop": lambda p: O.RMSprop(p, momentum=0.5, centered=True),
    "RMSprop foreach": lambda p: O.RMSprop(p, momentum=0.5, foreach=True),
    "Adagrad": lambda p: O.Adagrad(p, lr_decay=0.1),
    "Adagrad fused": lambda p: O.Adagrad(p, fused=True),
    "Adadelta": lambda p: O.Adadelta(p),
    "Adamax": lambda p: O.Adamax(p),
    "ASGD foreach": lambda p: O.ASGD(p, foreach=True),
    "NAdam foreach": lambda p: O.NAdam(p, foreach=True),
    "RAdam": lambda p: O.RAdam(p),
    "Rprop foreach": lambda p: O.Rprop(p, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_in_backward_give_the_bits_of_step(name: str) -> None:
    layered = both(mlp, OPTIMIZERS[name])
    assert updated(layered) == (6 * (9 - WATCHED_STEPS), 6 * WATCHED_STEPS)


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW foreach", "AdamW fused"])
@pytest.mark.parametrize("build", [Tied, cnn])
@pytest.mark.parametrize("batch_bytes", [1, 1000])
def test_models_with_tied_weights_and_buffers_give_the_same_bits(
    build: Callable[[], nn.Module], name: str, batch_bytes: int
) -> None:
    layered = both(build, OPTIMIZERS[name], batch_bytes=batch_bytes)
    in_backward, at_step = updated(layered)
    num = len(list(layered.model.parameters()))
    assert in_backward + at_step == 9 * num
    assert in_backward == 6 * num if batch_bytes == 1 else 0 < in_backward < 6 * num


@pytest.mark.parametrize("name", ["AdamW", "AdamW foreach", "AdamW fused", "SGD momentum"])
def test_sixteen_bits_give_the_same_bits(name: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 4000), nn.Tanh(), nn.Linear(4000, 5)).to(torch.bfloat16)

    assert updated(both(build, OPTIMIZERS[name], steps=6))[0] == 4 * 3


def test_groups_and_schedulers_give_the_same_bits() -> None:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return O.AdamW([{"params": params[:3], "weight_decay": 0.5}, {"params": params[3:], "lr": 0.02}])

    schedulers: dict[int, Any] = {}

    def schedule(trained: Trained, i: int) -> None:
        if i == 0:
            schedulers[id(trained)] = O.lr_scheduler.OneCycleLR(trained.optimizer, 0.05, total_steps=20)
        else:
            schedulers[id(trained)].step()

    assert updated(both(mlp, make, schedule))[0] == 36


def test_parameters_of_two_types_and_two_optimizers_give_the_same_bits() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(12, 20).to(torch.bfloat16), nn.Linear(20, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.first(x.to(torch.bfloat16)).float()))  # type: ignore[no-any-return]

    found = []
    for layerwise in (False, True):
        torch.manual_seed(3)
        models = [Mixed(), Mixed()]
        teacher = Mixed()  # in no optimizer: it may be called at any time
        optimizers = [O.AdamW(model.parameters(), foreach=True) for model in models]
        layered = [
            Layerwise(o, [], model=[m, teacher], before=lambda _: None, after=lambda _: None, batch_bytes=1)
            for o, m in zip(optimizers, models, strict=True)
            if layerwise
        ]
        for _ in range(6):
            loss = (models[0](torch.randn(4, 12)) * models[1](torch.randn(4, 12))).square().mean()
            loss.backward()
            teacher(torch.randn(4, 12))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        found.append([p.detach() for model in models for p in model.parameters()])
        assert [each.stats.in_backward for each in layered] == [4 * 3] * len(layered)
    assert all(map(same_bits, *found))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(12, 12)
        self.branches = nn.ModuleList(nn.Linear(12, 5) for _ in range(2))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.branches[self.calls % 2](self.trunk(x))  # type: ignore[no-any-return]


def test_parameters_without_a_gradient_are_left_alone() -> None:
    assert updated(both(Branches, OPTIMIZERS["AdamW"], steps=12)) == (2 * 9 + 2 * 6, 2 * 3 + 4 * 3)


def test_frozen_unfrozen_and_added_parameters_are_learned() -> None:
    def change(trained: Trained, i: int) -> None:
        first, last = trained.model[0], trained.model[4]  # type: ignore[index]
        if i == 4:
            first.weight.requires_grad_(True)
        if i == 6:
            trained.optimizer.add_param_group({"params": [last.weight, last.bias], "lr": 0.5})
        if i == 14:
            trained.model[2].weight.requires_grad_(False)  # type: ignore[index]

    def frozen() -> nn.Module:
        model = mlp()
        model[0].weight.requires_grad_(False)  # type: ignore[index,union-attr]
        return model

    layered = both(frozen, lambda p: O.SGD(p[:4], lr=0.1, momentum=0.9), change, steps=16)
    # 3 of 4 from the fourth step on; the unfrozen one is first seen at its second step, as are the added ones
    assert updated(layered)[0] == 2 * 13 + 11 + (16 - 4 - 1 - 3) + 2 * (16 - 6 - 1 - 3)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_segments_give_the_same_bits(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=use_reentrant)

    assert updated(both(Checkpointed, OPTIMIZERS["AdamW fused"]))[0] == 36


def test_late_layers_are_updated_before_backward_reaches_early_ones() -> None:
    trained = Trained(mlp, OPTIMIZERS["AdamW fused"], layerwise=True).train(WATCHED_STEPS)
    first: Any = trained.model[0]
    last: Any = trained.model[4]
    before = last.weight.detach().clone()
    seen: list[bool] = []

    def reached(grad: torch.Tensor) -> None:
        seen.append(("after", [id(last.weight)]) in trained.events and not torch.equal(before, last.weight))

    first.register_forward_hook(lambda module, args, output: output.register_hook(reached) and None)
    trained.events.clear()
    trained.loss().backward()
    assert seen == [True]
    # each by itself, before and after, in the order of backward; nothing is left for step()
    params = list(map(id, trained.model.parameters()))
    assert [what for what, _ in trained.events] == ["before", "after"] * 6
    assert sorted(i for _, ids in trained.events[::2] for i in ids) == sorted(params)
    assert {ids[0] for _, ids in trained.events[:4]} == set(params[4:])
    num_events = len(trained.events)
    trained.optimizer.step()
    assert len(trained.events) == num_events


def test_what_is_not_updated_in_backward_is_told_at_the_step() -> None:
    trained = Trained(mlp, OPTIMIZERS["SGD"], layerwise=True, batch_bytes=1 << 20).train(5)
    params = list(map(id, trained.model.parameters()))
    assert trained.events == [("before", params), ("after", params)] * 5


def test_gradients_stay_and_hooks_of_others_run_once() -> None:
    trained = Trained(mlp, OPTIMIZERS["AdamW"], layerwise=True)
    norms: list[float] = []
    for register in (trained.optimizer.register_step_pre_hook, trained.optimizer.register_step_post_hook):
        register(lambda *_: norms.append(float(nn.utils.get_total_norm(trained.grads()))))  # type: ignore[arg-type]
    for i in range(6):
        if i == 5:  # late, and yet before ours
            trained.optimizer.register_step_pre_hook(lambda *_: norms.append(len(trained.grads())))
        trained.step(lambda t: norms.append(float(nn.utils.get_total_norm(t.grads()))))
    assert [norms[i] == norms[i + 1] == norms[i + 2] for i in range(0, 15, 3)] == [True] * 5
    assert len(norms) == 5 * 3 + 4 and norms[17] == 6
    assert len(trained.grads()) == 6


def test_step_without_backward_updates_with_the_same_gradients_again() -> None:
    plain, layered = (Trained(mlp, OPTIMIZERS["AdamW"], layerwise=on).train(5) for on in (False, True))
    for trained in (plain, layered):
        trained.optimizer.step()
        trained.train(2)
    assert_same(plain, layered)


def test_gradients_that_are_never_zeroed_give_the_same_bits() -> None:
    plain, layered = (Trained(mlp, OPTIMIZERS["SGD"], layerwise=on) for on in (False, True))
    for trained in (plain, layered):
        for _ in range(6):
            trained.loss().backward()
            trained.optimizer.step()
    assert_same(plain, layered)


def test_a_backward_that_raises_leaves_what_the_loop_means() -> None:
    """Whoever goes on with the gradients that there are, goes on with them; whoever leaves out the step is told."""
    plain, layered = (Trained(mlp, OPTIMIZERS["AdamW fused"], layerwise=on).train(5) for on in (False, True))
    for trained in (plain, layered):
        weight: Any = trained.model[2].weight  # type: ignore[index,union-attr]
        handle = weight.register_hook(lambda _: 1 / 0)
        trained.optimizer.zero_grad()
        with pytest.raises(ZeroDivisionError):
            trained.loss().backward()
        handle.remove()
        trained.optimizer.step()
        trained.train(2)
    assert_same(plain, layered)
    weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layered.step()
    layered.optimizer.zero_grad()
    with pytest.raises(LayerwiseError, match=r"step\(\) was left out"):
        layered.loss()


def test_copies_of_the_model_and_a_detached_optimizer_are_plain() -> None:
    trained = Trained(mlp, OPTIMIZERS["AdamW"], layerwise=True).train(4)
    copied = copy.deepcopy(trained.model)
    pickle.loads(pickle.dumps(trained.model))
    num_events = len(trained.events)
    copied(torch.randn(4, 12)).sum().backward()
    assert trained.layerwise is not None
    trained.layerwise.detach()
    trained.train(2)
    assert len(trained.events) == num_events
    Layerwise(trained.optimizer, [], before=lambda _: None, after=lambda _: None)


# -- refused at attach ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: O.LBFGS(p), "LBFGS is not known"),
        (lambda p: O.Adafactor(p), "Adafactor is not known"),
        (lambda p: type("Mine", (O.SGD,), {})(p), "Mine is not known"),
        (lambda p: O.Adam(p, differentiable=True), "part of a graph"),
        (lambda p: O.SGD(p, momentum=0.9, nesterov=True, foreach=True), "writes into the gradients"),
    ],
)
def test_optimizers_that_cannot_be_cut_are_refused(make: Make, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Trained(mlp, make, layerwise=True)


def test_broken_kernels_are_refused() -> None:
    with pytest.raises(UsageError, match="191763"):
        Trained(lambda: mlp(torch.bfloat16), OPTIMIZERS["SGD fused"], layerwise=True)


def test_memory_and_parameters_that_others_have_are_refused() -> None:
    trained = Trained(mlp, OPTIMIZERS["SGD"], layerwise=True)
    with pytest.raises(UsageError, match="another optimizer"):
        Layerwise(O.SGD(trained.model.parameters(), lr=1), [], before=lambda _: None, after=lambda _: None)

    def shared() -> nn.Module:
        model = mlp()
        model[4].weight = nn.Parameter(model[2].weight.data[:5])  # type: ignore[index]
        return model

    with pytest.raises(UsageError, match=r"2\.weight and 4\.weight are two parameters in the same memory"):
        Trained(shared, OPTIMIZERS["SGD"], layerwise=True)


# -- refused while it is learned, and found later -----------------------------------------------------------------------


def _clip(trained: Trained) -> None:
    nn.utils.clip_grad_norm_(trained.model.parameters(), 1e9)  # changes nothing, yet


def _clip_values(trained: Trained) -> None:
    nn.utils.clip_grad_value_(trained.model.parameters(), 1e-6)


def _unscale(trained: Trained) -> None:
    for grad in trained.grads():
        grad.data.mul_(0.5)


def _replace(trained: Trained) -> None:
    for p in trained.model.parameters():
        p.grad = None if p.grad is None else p.grad.clone()


def _drop(trained: Trained) -> None:
    trained.optimizer.zero_grad()


def _accumulate(trained: Trained) -> None:
    trained.loss().backward()


def _evaluate(trained: Trained) -> None:
    with torch.no_grad():
        trained.loss()


def _change_lr(trained: Trained) -> None:
    trained.optimizer.param_groups[0]["lr"] *= 0.5


def _decay(trained: Trained) -> None:
    with torch.no_grad():
        for p in trained.model.parameters():
            p.mul_(0.9)


def _decay_data(trained: Trained) -> None:
    for p in trained.model.parameters():
        p.data.mul_(0.9)


def _load(trained: Trained) -> None:
    trained.optimizer.load_state_dict(trained.optimizer.state_dict())


def _regroup(trained: Trained) -> None:
    trained.optimizer.param_groups[0]["params"].reverse()


DEVIATIONS: dict[str, tuple[Callable[[Trained], None], str]] = {
    "clip": (_clip, "was changed between"),
    "clip values": (_clip_values, "was changed between"),
    "unscale": (_unscale, "GradScaler"),
    "replace": (_replace, "replaced or dropped"),
    "drop": (_drop, "replaced or dropped"),
    "accumulate": (_accumulate, "several backward passes|forward pass"),
    "evaluate": (_evaluate, "forward pass"),
    "lr": (_change_lr, "'lr' of group 0"),
    "decay": (_decay, "itself was changed"),
    "decay .data": (_decay_data, "itself was changed"),
    "load": (_load, "state was replaced"),
    "regroup": (_regroup, "groups were changed"),
}


@pytest.mark.parametrize("name", DEVIATIONS)
@pytest.mark.parametrize("num_before", [0, 2])
def test_what_cannot_be_is_refused_before_anything_is_updated(name: str, num_before: int) -> None:
    between, message = DEVIATIONS[name]
    trained = Trained(mlp, OPTIMIZERS["AdamW fused"], layerwise=True).train(num_before)
    before = copy.deepcopy(trained.model.state_dict())
    with pytest.raises(UsageError, match=message):
        trained.step(between)
    if "decay" not in name:
        assert all(same_bits(v, before[k]) for k, v in trained.model.state_dict().items())
    with pytest.raises(UsageError, match=message):  # also to those who go on
        trained.optimizer.step()


@pytest.mark.parametrize("name", DEVIATIONS)
@pytest.mark.parametrize("variant", ["AdamW foreach", "AdamW fused"])
def test_what_comes_later_raises_and_never_goes_on(name: str, variant: str) -> None:
    between, message = DEVIATIONS[name]
    trained = Trained(mlp, OPTIMIZERS[variant], layerwise=True).train(7)
    with pytest.raises(LayerwiseError, match=f"(?s){message}.*resume"):
        trained.step(between)
    for again in (trained.optimizer.step, trained.loss):
        with pytest.raises(LayerwiseError, match=message):
            again()
    assert trained.layerwise is not None and trained.layerwise.num_unfinished == 6
    trained.layerwise.reset()
    assert trained.layerwise.num_unfinished == 0
    trained.train(2)


def _nothing(trained: Trained) -> None: ...


def _log_norms(trained: Trained) -> None:
    nn.utils.get_total_norm(trained.grads())


def _step_twice(trained: Trained) -> None:
    trained.optimizer.step()


def _freeze(trained: Trained) -> None:
    """For the next backward: in plain training it takes effect then, too."""
    bias: Any = next(p for p in trained.model.parameters() if p.dim() == 1)
    bias.requires_grad_(not bias.requires_grad)


def _add_group(trained: Trained) -> None:
    more = nn.Parameter(torch.ones(3))
    trained.optimizer.add_param_group({"params": [more]})


def _give_away(trained: Trained) -> None:
    trained.optimizer.state.pop(trained.optimizer.param_groups[0]["params"].pop(), None)


HARMLESS = [_nothing, _nothing, _nothing, _log_norms, _freeze, _add_group]


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(20, 400))])
def test_any_loop_has_the_same_bits_or_raises(seed: int) -> None:
    """Whatever is done between backward and step, and wherever a step or a backward is left out or made twice."""
    random = Random(seed)
    variant = random.choice(["AdamW fused", "AdamW", "SGD foreach", "SGD"])
    batch_bytes = random.choice([1, 500, 2000, 1 << 20])
    odd = [between for between, _ in DEVIATIONS.values()] + [_step_twice, _give_away]
    plan = [(random.choice(HARMLESS), random.random() < 0.04, random.random() < 0.5) for _ in range(16)]
    if random.random() < 0.8:
        at = random.randrange(16)
        plan[at] = (random.choice(odd), *plan[at][1:])
    build = random.choice([mlp, Branches])
    plain, layered = (Trained(build, OPTIMIZERS[variant], layerwise=on, batch_bytes=batch_bytes) for on in (False, True))

    def turn(trained: Trained, between: Callable[[Trained], None], leaves_out: bool, drops: bool) -> None:
        trained.loss().backward()
        between(trained)
        if not leaves_out:
            trained.optimizer.step()
        trained.optimizer.zero_grad(set_to_none=drops)

    for step in plan:
        before = copy.deepcopy(plain.model.state_dict())
        turn(plain, *step)
        try:
            turn(layered, *step)
        except UsageError:  # nothing was updated in backward
            if step[0] not in (_decay, _decay_data, _step_twice):
                assert all(map(same_bits, layered.model.state_dict().values(), before.values()))
            return
        except LayerwiseError:
            return
        assert layered.layerwise is not None
        if layered.layerwise.num_unfinished:
            with pytest.raises(LayerwiseError):
                layered.layerwise.check_finished()
            return
        assert_same(plain, layered)


def test_a_step_that_is_left_out_is_found_at_the_next_backward() -> None:
    trained = Trained(mlp, OPTIMIZERS["SGD"], layerwise=True)
    assert trained.layerwise is not None
    trained.train(5)
    x = torch.randn(4, 12)
    graph = trained.model(x).sum()
    other = trained.model(x).sum()
    graph.backward()
    trained.optimizer.zero_grad()
    with pytest.raises((LayerwiseError, RuntimeError), match=r"step\(\) was left out|modified by an inplace operation"):
        other.backward()
    with pytest.raises(LayerwiseError, match=r"replaced or dropped|left out"):
        trained.optimizer.step()


def test_a_commit_before_the_step_is_refused() -> None:
    trained = Trained(mlp, OPTIMIZERS["SGD"], layerwise=True).train(5)
    assert trained.layerwise is not None
    trained.layerwise.check_finished()
    trained.loss().backward()
    for _ in range(2):
        with pytest.raises(LayerwiseError, match="commit"):
            trained.layerwise.check_finished()


@pytest.mark.parametrize("num_before", [0, 5])
def test_a_second_pass_through_a_retained_graph_never_goes_on(num_before: int) -> None:
    trained = Trained(mlp, OPTIMIZERS["AdamW fused"], layerwise=True).train(num_before)
    loss = trained.loss()
    loss.backward(retain_graph=True)
    if num_before:
        with pytest.raises((LayerwiseError, RuntimeError), match=r"several backward|modified by an inplace operation"):
            loss.backward()
    else:
        loss.backward()
        with pytest.raises(UsageError, match="several backward passes"):
            trained.optimizer.step()


@pytest.mark.parametrize("num_before", [0, 5])
def test_a_closure_is_refused(num_before: int) -> None:
    trained = Trained(mlp, OPTIMIZERS["SGD"], layerwise=True).train(num_before)
    with pytest.raises(UsageError, match="closure"):
        trained.optimizer.step(lambda: float(trained.loss()))


def test_a_step_that_does_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a compiled one does: it is seen by what comes of it."""
    trained = Trained(mlp, OPTIMIZERS["AdamW"], layerwise=True).train(WATCHED_STEPS - 1)
    assert trained.layerwise is not None
    trained.optimizer.param_groups[0]["fused"] = True
    predict = trained.layerwise._part.predict

    def otherwise(due: Any) -> Any:
        trained.optimizer.param_groups[0]["fused"] = None
        try:
            return predict(due)
        finally:
            trained.optimizer.param_groups[0]["fused"] = True

    monkeypatch.setattr(trained.layerwise._part, "predict", otherwise)
    with pytest.raises(UsageError, match=r"something else to \S+ than torch\.optim\.AdamW by itself"):
        trained.step()


@pytest.mark.parametrize("variant", ["AdamW", "AdamW fused"])
@pytest.mark.parametrize("num_before", [0, 5])
def test_a_grad_scaler_is_refused(variant: str, num_before: int) -> None:
    trained = Trained(mlp, OPTIMIZERS[variant], layerwise=True).train(num_before)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trained.optimizer.zero_grad()
    scaler.scale(trained.loss()).backward()
    with pytest.raises(LayerwiseError if num_before else UsageError, match="GradScaler"):
        scaler.step(trained.optimizer)


def test_sparse_gradients_are_refused() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(7, 5, sparse=True))

    trained = Trained(build, OPTIMIZERS["SGD"], layerwise=True)
    trained.model(torch.randint(7, (2, 3))).sum().backward()
    with pytest.raises(UsageError, match=r"0\.weight is sparse"):
        trained.optimizer.step()


@pytest.mark.parametrize("variant", ["SGD momentum", "AdamW fused"])
def test_a_value_that_backward_still_needs_is_not_lost_in_silence(variant: str) -> None:
    """The layer is used twice, once without a gradient: autograd says so, also where kernels move no version counter."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.first(x) @ self.layer.weight.detach())  # type: ignore[no-any-return]

    trained = Trained(Twice, OPTIMIZERS[variant], layerwise=True).train(WATCHED_STEPS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained.step()


def test_what_the_guard_raises_reaches_backward_and_nothing_was_updated() -> None:
    trained = Trained(mlp, OPTIMIZERS["SGD"], layerwise=True).train(4)
    assert trained.layerwise is not None
    before = {k: v.clone() for k, v in trained.everything().items()}

    def full(params: list[torch.Tensor]) -> None:
        raise OSError("full")

    trained.layerwise._before = full
    with pytest.raises(OSError, match="full"):
        trained.step()
    assert all(same_bits(v, before[k]) for k, v in trained.everything().items())


# -- several ranks ------------------------------------------------------------------------------------------------------


def reports(folder: Path, *cases: str) -> dict[str, list[dict[str, Any]]]:
    """Of two ranks, by case."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p])}
    command = [sys.executable, layerwise_training.__file__, str(folder), "2", *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in cases}


def assert_updated_with_the_same_bits(case: str, report: dict[str, Any]) -> None:
    assert report["different"] == [] and report["raised"] == ""
    assert report["reducing"] == [True, False]  # while a bucket is, and after the step
    assert report["updated"][:WATCHED_STEPS] == [0] * WATCHED_STEPS
    if case not in ("unused", "static"):
        assert min(report["updated"][WATCHED_STEPS:]) > 0
    assert sum(report["stats"]) == 80 or case == "unused"


REFUSED = {
    "unhooked": (["UsageError at 0"], "everstep.early_hook"),
    "clipped late": (["LayerwiseError at 6"], "was changed between backward() and step()"),
    "accumulated late": (["UsageError at 6", "LayerwiseError at 6"], "several backward passes"),
}


@pytest.mark.long
def test_buckets_are_updated_when_reduced_and_what_cannot_be_raises_on_every_rank(tmp_path: Path) -> None:
    for case, ranks in reports(tmp_path, "plain", "unused", *REFUSED).items():
        for report in ranks:
            if case in REFUSED:
                errors, message = REFUSED[case]
                assert report["raised"].split(":")[0] in errors and message in report["raised"]
            else:
                assert_updated_with_the_same_bits(case, report)


@pytest.mark.long
def test_buckets_of_other_kinds_give_the_same_bits(tmp_path: Path) -> None:
    for case, ranks in reports(tmp_path, "views", "compressed", "static").items():
        for report in ranks:
            assert_updated_with_the_same_bits(case, report)
