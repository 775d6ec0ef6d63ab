"""Ownership of gradients: for each way in which their memory is used again, what was consumed is what is logged.

Every test trains with a disk so slow that the writer thread reads gradients late, and compares every step with copies
that were taken on the training thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import everstep
from everstep import native
from everstep.capture import held, tap, usual, watch
from everstep.errors import AuditError, InexactWarning
from truth import Truth, check_history, check_resume, crash, different, equal, gate, slow

CLEAN = 7
"""Steps in which gradients are let go, so that later ones are held by reference."""
STEPS = 13


def mlp() -> nn.Sequential:
    """One gradient of 36 KB, which is written by itself, and smaller ones, which are packed."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 5), nn.Tanh(), nn.Linear(5, 3))


def sgd() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw_fused() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(4, 96)).square().mean()


class Trainer:
    """One iteration of each pattern; the commit is the caller's."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.params = list(model.parameters())
        self.kept: list[torch.Tensor] = []
        self.flat = torch.zeros(sum(p.numel() for p in self.params))

    def backward(self) -> None:
        loss_of(self.model).backward()

    def released(self) -> None:
        """The pattern that allows references."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_in_place_after_step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def zero_in_place_before_backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.backward()
        self.optimizer.step()

    def zero_in_place_by_the_model(self) -> None:
        self.backward()
        self.optimizer.step()
        self.model.zero_grad(set_to_none=False)

    def zero_by_hand(self) -> None:
        self.backward()
        self.optimizer.step()
        for p in self.params:
            p.grad.zero_()

    def zero_by_hand_before_backward(self) -> None:
        for p in self.params:
            if p.grad is not None:
                p.grad.zero_()
        self.backward()
        self.optimizer.step()

    def zero_by_foreach(self) -> None:
        self.backward()
        self.optimizer.step()
        torch._foreach_zero_([p.grad for p in self.params])

    def accumulate_for_ever(self) -> None:
        self.backward()
        self.optimizer.step()

    def own_buffers(self) -> None:
        """The user's own gradient memory, filled anew at every step."""
        if not self.kept:
            self.kept = [torch.empty_like(p) for p in self.params]
        for p, g in zip(self.params, self.kept, strict=True):
            p.grad = g
            g.normal_()
        self.optimizer.step()

    def views_of_a_flat_buffer(self) -> None:
        """As with DDP's gradient_as_bucket_view: new views at every step, of one buffer that is overwritten."""
        self.flat.normal_()
        offset = 0
        for p in self.params:
            p.grad = self.flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.flat.fill_(7.0)

    def detached_views_of_a_flat_buffer(self) -> None:
        """As before, but the views do not know their base, and the buffer is written through its storage."""
        self.flat.normal_()
        offset = 0
        for p in self.params:
            p.grad = self.flat.data[offset : offset + p.numel()].view_as(p).detach()
            offset += p.numel()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.flat.data.fill_(7.0)

    def upstream_alias(self) -> None:
        """z.backward(up) makes p.grad an alias of `up`, which is used again."""
        if not self.kept:
            self.kept = [torch.empty_like(p) for p in self.params]
        for p, up in zip(self.params, self.kept, strict=True):
            up.normal_()
            p.view_as(p).backward(up)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for up in self.kept:
            up.fill_(3.0)

    def function_returning_its_own_memory(self) -> None:
        """A custom Function whose backward returns a tensor that it overwrites next time."""
        if not self.kept:
            self.kept = [torch.empty_like(p) for p in self.params]
        total = sum(Reusing.apply(p, g) for p, g in zip(self.params, self.kept, strict=True))
        total.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for g in self.kept:
            g.fill_(5.0)

    def keeps_references(self) -> None:
        self.backward()
        self.optimizer.step()
        self.kept = [p.grad for p in self.params]
        self.optimizer.zero_grad()
        for g in self.kept:
            g.mul_(0.25)

    def keeps_references_over_the_commit(self) -> None:
        for g in self.kept:
            g.mul_(0.25)
        self.backward()
        self.optimizer.step()
        self.kept = [p.grad for p in self.params]
        self.optimizer.zero_grad()

    def keeps_detached_aliases(self) -> None:
        """p.grad.detach() is another tensor on the same memory."""
        self.backward()
        self.optimizer.step()
        self.kept = [p.grad.detach() for p in self.params]
        self.optimizer.zero_grad()
        for g in self.kept:
            g.zero_()

    def keeps_detached_aliases_over_the_commit(self) -> None:
        for g in self.kept:
            g.zero_()
        self.backward()
        self.optimizer.step()
        self.kept = [p.grad.detach() for p in self.params]
        self.optimizer.zero_grad()

    def keeps_views(self) -> None:
        self.backward()
        self.optimizer.step()
        self.kept = [p.grad.view(-1)[1:] for p in self.params]
        self.optimizer.zero_grad()
        for g in self.kept:
            g.fill_(2.0)

    def keeps_numpy_arrays(self) -> None:
        self.backward()
        self.optimizer.step()
        arrays = [p.grad.numpy() for p in self.params]
        self.optimizer.zero_grad()
        for a in arrays:
            a[...] = 4.0

    def scales_after_the_step(self) -> None:
        self.backward()
        self.optimizer.step()
        for p in self.params:
            p.grad.mul_(0.5)
        self.optimizer.zero_grad()

    def clips_in_place(self) -> None:
        self.backward()
        nn.utils.clip_grad_norm_(self.params, 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def closure(self) -> None:
        def once() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = loss_of(self.model)
            loss.backward()
            return loss

        self.optimizer.step(once)

    def closure_in_place(self) -> None:
        def once() -> torch.Tensor:
            self.optimizer.zero_grad(set_to_none=False)
            loss = loss_of(self.model)
            loss.backward()
            return loss

        self.optimizer.step(closure=once)

    def two_updates(self) -> None:
        """Two updates in one commit, the gradient of the first being reused by the second."""
        self.backward()
        self.optimizer.step()
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def hook_of_others_after_ours(self) -> None:
        """A hook that is new at every step runs between ours and the step, and changes what is consumed."""

        def scale(optimizer: Any, args: Any, kwargs: Any) -> None:
            for p in self.params:
                p.grad.mul_(0.5)

        self.backward()
        handle = self.optimizer.register_step_pre_hook(scale)
        self.optimizer.step()
        handle.remove()
        self.optimizer.zero_grad()

    def step_that_raises(self) -> None:
        """The first attempt fails after our hook; other gradients are consumed by the second."""

        def fail(optimizer: Any, args: Any, kwargs: Any) -> None:
            raise RuntimeError("not now")

        self.backward()
        handle = self.optimizer.register_step_pre_hook(fail)
        with pytest.raises(RuntimeError, match="not now"):
            self.optimizer.step()
        handle.remove()
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def swaps_gradients(self) -> None:
        """Two sets of memory that take turns."""
        if not self.kept:
            self.kept = [torch.empty_like(p) for p in self.params for _ in range(2)]
        half = self.kept[::2]
        self.kept = self.kept[1::2] + half
        self.kept = [g for pair in zip(self.kept[: len(half)], half, strict=True) for g in pair]
        for p, g in zip(self.params, self.kept[::2], strict=True):
            g.normal_()
            p.grad = g
        self.optimizer.step()
        for p in self.params:
            p.grad = None


class Reusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        ctx.memory = memory
        return p.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.memory.normal_(), None


PATTERNS = [name for name in vars(Trainer) if not name.startswith("_") and name not in ("backward", "released")]


def train(
    path: Any, build: Callable[[], Any], pattern: str, *, clean: int, steps: int = STEPS, **options: Any
) -> Truth:
    model, optimizer = build()
    trainer = Trainer(model, optimizer)
    run = everstep.attach(model, optimizer, path, quiet=True, follower=False, **options)
    truth = Truth(run, model, optimizer)
    truth.resume()
    with slow():
        for t in range(steps):
            getattr(trainer, "released" if t < clean else pattern)()
            truth.commit()
    crash(run)
    return truth


@pytest.mark.parametrize("clean", [0, CLEAN], ids=["from-the-start", "in-mid-run"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.sampled(3)
def test_gradients_are_logged_as_consumed(pattern: str, clean: int, tmp_path: Any) -> None:
    truth = train(tmp_path / "run", sgd, pattern, clean=clean)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", sgd, truth, STEPS)


@pytest.fixture
def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done for models of many tensors, with few."""
    monkeypatch.setattr(tap, "LOOK_AT_ONCE", 0)
    monkeypatch.setattr(held, "SHARE", 2)
    monkeypatch.setattr(watch, "LOOK_HERE_TENSORS", 0)
    monkeypatch.setattr(watch, "SLICE_BYTES", 0)
    monkeypatch.setattr(watch, "SLICED_UP_TO_BYTES", 0)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.sampled(3)
def test_gradients_of_a_model_of_many_tensors_are_logged_as_consumed(
    pattern: str, as_if_large: None, tmp_path: Any
) -> None:
    truth = train(tmp_path / "run", sgd, pattern, clean=CLEAN)
    check_history(tmp_path / "run", truth)


def test_updates_that_are_like_those_before_them_are_taken_without_a_second_look(
    as_if_large: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    taken: list[bool] = []
    plain = tap.Tap._take_as_usual
    monkeypatch.setattr(tap.Tap, "_take_as_usual", lambda self: taken.append(plain(self)) or taken[-1])
    truth = train(tmp_path / "run", adamw_fused, "released", clean=0, steps=20)
    check_history(tmp_path / "run", truth)
    assert any(taken)


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("make", [sgd, adamw_fused])
def test_commits_of_steps_that_are_like_those_before_them_take_one_look(
    make: Any, is_native: bool, as_if_large: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    part, num_looks = native.part(), 0
    if is_native and part is None:
        pytest.skip("everstep native has not been run, or there is no C++ compiler")

    def counted(tensors: list[torch.Tensor]) -> bytes:
        nonlocal num_looks
        num_looks += 1
        assert part is not None
        return part.look(tensors)

    own = part and SimpleNamespace(look=counted, generators=part.generators, same_groups=part.same_groups)
    monkeypatch.setattr(native, "part", lambda: own if is_native else None)
    held_so: list[bool] = []
    plain = usual.Usual.holds
    monkeypatch.setattr(usual.Usual, "holds", lambda self: held_so.append(plain(self)) or held_so[-1])
    model, optimizer = make()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    trainer = Trainer(model, optimizer)
    params = list(model.parameters())
    edits: dict[int, Callable[[], object]] = {
        33: lambda: params[0].requires_grad_(False),
        36: lambda: params[0].requires_grad_(True),
        39: lambda: setattr(params[1], "data", params[1].data * 0.5),
        42: lambda: optimizer.param_groups[0].update(lr=0.01),
    }
    for t in range(45):
        trainer.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if t == 27:
                params[0].mul_(0.5)
            if t in edits:
                edits[t]()
        truth.commit()
        run.flush()
    crash(run)
    check_history(tmp_path / "run", truth)
    assert any(held_so)
    for t in (27, 33, 36, 39, 42):
        assert not held_so[t], t
    assert (num_looks > 10) is (is_native and make is adamw_fused)  # its kernel moves no version counters


@pytest.mark.parametrize("is_writer_free", [True, False])
def test_a_fused_step_looks_at_gradients_before_the_writer_or_the_hook_after_it_does(
    is_writer_free: bool, as_if_large: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The hook before it leaves them where they are; whoever comes first takes them, and some parameters have none."""
    gathered: list[str] = []
    plain = held.Held.gather

    def gather(self: held.Held) -> None:
        if not self.is_gathered:
            gathered.append(threading.current_thread().name)
        plain(self)

    fused = torch._fused_adamw_

    def leisurely(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.02 if is_writer_free else 0.0)
        fused(*args, **kwargs)

    monkeypatch.setattr(held.Held, "gather", gather)
    monkeypatch.setattr(torch, "_fused_adamw_", leisurely)
    model, optimizer = adamw_fused()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    trainer = Trainer(model, optimizer)
    with contextlib.nullcontext() if is_writer_free else slow():
        for t in range(STEPS):
            trainer.backward()
            if t == STEPS - 2:
                trainer.params[1].grad = None
            optimizer.step()
            optimizer.zero_grad()
            truth.commit()
            if is_writer_free:
                run.flush()
    crash(run)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", adamw_fused, truth, STEPS)
    assert ("everstep-write" if is_writer_free else threading.current_thread().name) in gathered


@pytest.mark.parametrize("is_large", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_fused_step_that_raises_before_anybody_has_taken_its_gradients_is_stored_as_it_left_the_state(
    set_to_none: bool, is_large: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Any
) -> None:
    if is_large:
        request.getfixturevalue("as_if_large")
    fused, fails = torch._fused_adamw_, [False]

    def failing(params: Any, *args: Any, **kwargs: Any) -> None:
        if fails.pop():
            fails.append(False)
            params[0].mul_(1.5)
            raise RuntimeError("out of memory")
        fails.append(False)
        fused(params, *args, **kwargs)

    monkeypatch.setattr(torch, "_fused_adamw_", failing)
    model, optimizer = adamw_fused()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    trainer = Trainer(model, optimizer)
    with slow():
        for t in range(STEPS):
            trainer.backward()
            fails[0] = t == STEPS - 3
            with contextlib.suppress(RuntimeError):
                optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", adamw_fused, truth, STEPS)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.sampled(3)
def test_gradients_of_a_fused_optimizer_of_many_tensors_are_logged_as_consumed(
    pattern: str, as_if_large: None, tmp_path: Any
) -> None:
    truth = train(tmp_path / "run", adamw_fused, pattern, clean=CLEAN)
    check_history(tmp_path / "run", truth)


@pytest.mark.parametrize("pattern", ["zero_in_place_after_step", "views_of_a_flat_buffer", "keeps_references"])
def test_gradients_of_a_fused_optimizer_are_logged_as_consumed(pattern: str, tmp_path: Any) -> None:
    truth = train(tmp_path / "run", adamw_fused, pattern, clean=CLEAN)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", adamw_fused, truth, STEPS)


class Moody(torch.optim.SGD):
    """From some step on it writes into the gradients that it consumes."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if group.get("moody"):
                for p in group["params"]:
                    p.grad.mul_(0.5)
        return super().step(closure)


def test_an_optimizer_that_begins_to_write_into_gradients_is_noticed(tmp_path: Any) -> None:
    """Gradients are handed over before the step: here the writer reads them when the step has changed them."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, Moody(model.parameters(), lr=0.05, momentum=0.9)

    model, optimizer = build()
    trainer = Trainer(model, optimizer)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    with slow():
        for t in range(STEPS):
            optimizer.param_groups[0]["moody"] = t >= CLEAN
            trainer.released()
            truth.commit()
    crash(run)
    check_resume(tmp_path / "run", build, truth, STEPS)


class Remembering(torch.optim.Optimizer):
    """Keeps the last gradient itself, not a copy: it is its own after zero_grad(set_to_none=True)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                p.add_(p.grad + 0.5 * state.get("previous", torch.zeros_like(p)), alpha=-group["lr"])
                state["previous"] = p.grad


def test_an_optimizer_that_keeps_gradients_is_replayed_with_memory_of_its_own(tmp_path: Any) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, Remembering(model.parameters())

    truth = train(tmp_path / "run", build, "released", clean=STEPS)
    check_resume(tmp_path / "run", build, truth, STEPS)


def test_gradients_that_are_let_go_are_not_copied(tmp_path: Any) -> None:
    model, optimizer = sgd()
    trainer = Trainer(model, optimizer)
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False) as run:
        run.resume()
        copied = []
        for _ in range(12):
            trainer.released()
            run.commit()
            copied.append(run.stats()["copied_gradient_bytes"])
    assert copied[0] > 0
    assert copied[-1] == copied[5]


@pytest.mark.parametrize("clean", [0, CLEAN])
def test_zeroing_through_data_is_never_logged_as_a_gradient(clean: int, tmp_path: Any) -> None:
    """p.grad.data.zero_() moves no version counter: right, or refused with the last proven step, never wrong."""
    model, optimizer = sgd()
    trainer = Trainer(model, optimizer)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    with slow():
        for t in range(STEPS):
            if t < clean:
                trainer.released()
            else:
                trainer.backward()
                optimizer.step()
                for p in trainer.params:
                    p.grad.data.zero_()
            truth.commit()
    crash(run)
    history = everstep.open(tmp_path / "run")
    refused = []
    for n in history.steps:
        try:
            found = history.state(n)
        except AuditError as e:
            refused.append(n)
            assert e.proven_step is not None and e.proven_step < n
        else:
            assert torch.equal(found["model"]["0.weight"], truth.states[n]["model"]["0.weight"]), n
    if clean == 0:
        assert refused == []


@pytest.mark.parametrize("nesterov_written", ["from-the-start", "in-mid-run"])
def test_foreach_nesterov_that_writes_into_gradients_is_logged_as_consumed(
    nesterov_written: str, tmp_path: Any
) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=True)

    model, optimizer = build()
    trainer = Trainer(model, optimizer)
    if nesterov_written == "in-mid-run":
        optimizer.param_groups[0]["foreach"] = False
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    with slow():
        for t in range(STEPS):
            optimizer.param_groups[0]["foreach"] = nesterov_written == "from-the-start" or t >= CLEAN
            trainer.released()
            truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", build, truth, STEPS)


@pytest.mark.parametrize("scale", [2.0**10, 3.0])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clean", [0, CLEAN])
@pytest.mark.sampled(2)
def test_a_scaler_that_unscales_in_place_is_logged_as_consumed(
    clean: int, fused: bool, scale: float, tmp_path: Any
) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        return model, optimizer, {"scaler": torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)}

    model, optimizer, extras = build()
    scaler = extras["scaler"]
    run = everstep.attach(model, optimizer, tmp_path / "run", extras=extras, quiet=True, follower=False)
    truth = Truth(run, model, optimizer, extras)
    truth.resume()
    overflow = 9
    with slow():
        for t in range(STEPS):
            if t < clean:
                loss_of(model).backward()
                optimizer.step()
            else:
                loss = loss_of(model)
                scaler.scale(loss * (float("inf") if t == overflow else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            truth.commit()
    assert run.step == (STEPS if fused else STEPS - 1)
    crash(run)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", build, truth, STEPS if fused else STEPS - 1)


@pytest.mark.parametrize("clean", [0, CLEAN])
def test_a_closure_that_is_called_twice_is_logged_as_consumed(clean: int, tmp_path: Any) -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if closure is not None:
                with torch.enable_grad():
                    closure()
            return super().step(closure)

    everstep.register(Twice)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, Twice(model.parameters(), lr=0.05, momentum=0.9)

    model, optimizer = build()
    trainer = Trainer(model, optimizer)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    with slow():
        for t in range(STEPS):
            (trainer.released if t < clean else trainer.closure_in_place)()
            truth.commit()
    crash(run)
    check_resume(tmp_path / "run", build, truth, STEPS)
    check_history(tmp_path / "run", truth)


@pytest.mark.parametrize("at", [0, CLEAN])
def test_a_gradient_replaced_by_a_later_hook_is_logged_as_consumed(at: int, tmp_path: Any) -> None:
    model, optimizer = sgd()
    trainer = Trainer(model, optimizer)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()

    def replace(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in trainer.params:
            p.grad = p.grad * 3.0

    def edit(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in trainer.params:
            p.grad.add_(1.0)

    with slow():
        for t in range(STEPS):
            if t == at:
                optimizer.register_step_pre_hook(replace)
            if t == at + 4:
                optimizer.register_step_pre_hook(edit)
            trainer.released()
            truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", sgd, truth, STEPS)


@pytest.mark.filterwarnings("ignore:.*cannot be replayed:everstep.errors.InexactWarning")
@pytest.mark.parametrize("at", [0, CLEAN])
def test_a_gradient_edited_through_data_by_a_later_hook_is_never_logged_wrong(at: int, tmp_path: Any) -> None:
    """Such a hook runs after Everstep's only once; what it did shows in no version counter."""
    model, optimizer = sgd()
    trainer = Trainer(model, optimizer)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()

    def edit(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in trainer.params:
            p.grad.data.mul_(2.0)

    with slow():
        for t in range(STEPS):
            if t == at:
                optimizer.register_step_pre_hook(edit)
            trainer.released()
            truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)


def test_a_post_hook_that_writes_into_gradients_is_logged_as_consumed(tmp_path: Any) -> None:
    model, optimizer = sgd()
    trainer = Trainer(model, optimizer)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()

    def zero(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in trainer.params:
            p.grad.zero_()

    with slow():
        for t in range(STEPS):
            if t == CLEAN:
                optimizer.register_step_post_hook(zero)
            trainer.released()
            truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", sgd, truth, STEPS)


@pytest.fixture
def one_process_group(monkeypatch: pytest.MonkeyPatch) -> Any:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch")
@pytest.mark.parametrize("bucket_view", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_ddp_is_logged_as_consumed(set_to_none: bool, bucket_view: bool, one_process_group: Any, tmp_path: Any) -> None:
    model = mlp()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    run = everstep.attach(wrapped, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    with slow():
        for _ in range(STEPS):
            wrapped(torch.randn(4, 96)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        fresh = mlp()
        return fresh, torch.optim.AdamW(fresh.parameters(), lr=1e-3)

    check_resume(tmp_path / "run", build, truth, STEPS)


@pytest.mark.long
def test_a_pattern_that_changes_and_changes_back_is_logged_as_consumed(tmp_path: Any) -> None:
    model, optimizer = sgd()
    trainer = Trainer(model, optimizer)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    order = ["zero_by_hand", "keeps_references", "accumulate_for_ever", "released", "views_of_a_flat_buffer"]
    with slow():
        for t in range(48):
            getattr(trainer, "released" if t < 20 or t % 11 < 6 else order[t % len(order)])()
            truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", sgd, truth, 48)


def test_the_writer_really_reads_late_in_these_tests(tmp_path: Any) -> None:
    """The tests above prove something: at a commit, gradients of that step are still unread."""
    model, optimizer = sgd()
    trainer = Trainer(model, optimizer)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    run.resume()
    for _ in range(CLEAN):
        trainer.released()
        run.commit()
    run.flush()
    with gate() as disk:
        disk.close()
        trainer.released()
        run.commit()
        assert disk.reached.wait(10)
        trainer.released()
        run.commit()
        assert run.stats()["inflight_bytes"] > 30_000
        assert run.durable_step <= CLEAN
        disk.open()
        run.flush()
    assert run.durable_step == CLEAN + 2
    crash(run)


def test_gradients_left_on_the_parameters_go_on_after_a_resume(tmp_path: Any) -> None:
    """Accumulation over commits that begins in mid-run: the resumed run adds to the same gradients."""
    model, optimizer = sgd()
    trainer = Trainer(model, optimizer)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    run.resume()
    for t in range(STEPS):
        (trainer.released if t < CLEAN else trainer.accumulate_for_ever)()
        run.commit()
    crash(run)
    expected = [p.grad.clone() for p in trainer.params]
    model, optimizer = sgd()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    assert run.resume() == STEPS
    for p, g in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None and torch.equal(p.grad, g)
    crash(run)


def grads_of(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def test_gradients_that_go_in_the_first_step_after_a_resume_do_not_come_back(tmp_path: Any) -> None:
    """They are in the state that was resumed: the next one must say that it has none."""
    for stop in range(1, 9):
        model, optimizer = sgd()
        run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
        start = run.resume()
        assert (model[0].weight.grad is not None) == (start in (3, 6))
        for at in range(start + 1, stop + 1):
            loss_of(model).backward()
            optimizer.step()
            if at not in (3, 6):
                optimizer.zero_grad()
            run.commit()
        run.flush()
        crash(run)
    plain, optimizer = sgd()
    for at in range(1, 9):
        loss_of(plain).backward()
        optimizer.step()
        if at not in (3, 6):
            optimizer.zero_grad()
    assert not equal([p.detach() for p in plain.parameters()], [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("mode", ["delta", "snapshot"])
@pytest.mark.parametrize("in_base", [False, True])
def test_gradients_of_parameters_in_no_optimizer_go_on_after_a_resume(mode: str, in_base: bool, tmp_path: Any) -> None:
    """Nobody clears them, and clipping sees them; then one step does, and another gives them to the optimizer."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, torch.optim.SGD(model[4].parameters(), lr=0.05, momentum=0.9)

    def turn(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if at == 4:
            model.zero_grad()
        if at == 6:
            optimizer.add_param_group({"params": [model[0].weight]})

    plain, optimizer = make()
    truth = {0: grads_of(plain)}
    for at in range(1, 10):
        turn(plain, optimizer, at)
        truth[at] = grads_of(plain)
    for stop in range(1, 10):
        model, optimizer = make()
        run = everstep.attach(model, optimizer, tmp_path / "run", mode=mode, quiet=True)
        start = run.resume()
        assert not equal(truth[start], grads_of(model)), start
        for at in range(start + 1, stop + 1):
            turn(model, optimizer, at)
            run.commit()
        run.flush()
        if in_base:
            run.close()
        else:
            crash(run)
    assert not equal([p.detach() for p in plain.parameters()], [p.detach() for p in model.parameters()])


def test_gradients_of_parameters_in_no_optimizer_are_stored_when_they_change(tmp_path: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.05)
    loss_of(model).backward()
    model[0].requires_grad_(False)  # keeps its gradient of 36 KB
    sizes = []
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    run.resume()
    for at in range(8):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        if at == 5:
            model[0].weight.grad.mul_(2.0)
        before = run.stats()["log_bytes"]
        run.commit(wait=True)
        sizes.append(run.stats()["log_bytes"] - before)
    crash(run)
    assert sizes[5] > 36_000 and max(sizes[4], sizes[6], sizes[7]) < 30_000
    grad = model[0].weight.grad.clone()
    model[0].weight.grad = None
    everstep.open(tmp_path / "run").restore(model, optimizer)
    assert torch.equal(model[0].weight.grad, grad)


def test_large_gradients_of_parameters_in_no_optimizer_are_warned_of_once(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.05)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    run.resume()
    with pytest.warns(everstep.errors.CostWarning, match="in no optimizer") as told:
        for _ in range(3):
            model(torch.randn(2, 600)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
    assert len(told) == 1 and told[0].filename == __file__
    run.close()


def test_gradients_zeroed_in_place_in_mid_run_are_zeros_after_a_resume(tmp_path: Any) -> None:
    model, optimizer = sgd()
    trainer = Trainer(model, optimizer)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    run.resume()
    for t in range(STEPS):
        (trainer.released if t < CLEAN else trainer.zero_in_place_after_step)()
        run.commit()
    crash(run)
    model, optimizer = sgd()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    run.resume()
    for p in model.parameters():
        assert p.grad is not None and not p.grad.any()
    crash(run)


@pytest.mark.parametrize("pattern", ["released", "zero_in_place_before_backward"])
def test_training_in_a_forked_child_is_left_alone(pattern: str, tmp_path: Any) -> None:
    """A child that trains a copy on its own neither hangs nor writes to the run."""
    model, optimizer = sgd()
    trainer = Trainer(model, optimizer)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, model, optimizer)
    truth.resume()
    with slow(0.1):
        for _ in range(6):
            getattr(trainer, pattern)()
            truth.commit()
        pid = os.fork()
        if pid == 0:  # pragma: no cover - the child
            try:
                for _ in range(2):
                    for p in trainer.params:
                        p.grad = torch.ones_like(p)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
                os._exit(0)
            except BaseException:
                os._exit(1)
        for _ in range(200):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            time.sleep(0.05)
        else:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    trainer.released()
    truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)


def test_a_parameter_that_is_exchanged_within_its_group_is_stored_at_the_commit(as_if_large: None, tmp_path: Any) -> None:
    """The list stays the same, and the old parameter still has a gradient: only the commit compares the two."""
    model = mlp()
    loose = torch.nn.Parameter(torch.randn(40))
    optimizer = torch.optim.AdamW([*model.parameters(), loose], lr=1e-2, fused=True)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    run.resume()
    for t in range(STEPS):
        if t == STEPS - 3:
            old, loose = loose, torch.nn.Parameter(torch.randn(40))
            optimizer.param_groups[0]["params"][-1] = loose
            old.grad = torch.ones(40)
        (loss_of(model) + loose.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.commit()
        run.flush()
        state = everstep.open(tmp_path / "run").state()
        found = [v for values in state["model"].values() for v in ([values] if torch.is_tensor(values) else [])]
        held = [*found, *(v for s in state["optimizer"]["state"].values() for v in s.values())]
        wanted = [*model.parameters(), *optimizer.state[loose].values()]
        for tensor in wanted:
            assert any(h.shape == tensor.shape and torch.equal(h, tensor.detach()) for h in held), t
    crash(run)


@pytest.mark.parametrize("edit", ["parameter", "memory", "state", "nothing"])
def test_results_that_are_stored_late_in_place_of_gradients_are_not_taken_for_what_they_were_before_an_edit(
    edit: str, tmp_path: Any
) -> None:
    """Gradients stay after a step, seem to be about to be dropped, and are added to before the writer has read them: what
    the step led to is stored instead. If that was edited since, nobody has it: the step is refused, later ones are right.
    """
    model, optimizer = sgd()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False, base_interval=1000)
    truth = Truth(run, model, optimizer)
    truth.resume()
    trainer = Trainer(model, optimizer)
    last = 2 * STEPS
    with slow(0.03), torch.no_grad():
        for t in range(1, last + 4):
            if t == last + 1 and edit == "parameter":
                trainer.params[0].mul_(1.5)
            elif t == last + 1 and edit == "memory":
                trainer.params[0].data = trainer.params[0].data * 1.5
            elif t == last + 1 and edit == "state":
                optimizer.state[trainer.params[0]]["momentum_buffer"].mul_(0.5)
            if t != last + 1:
                optimizer.zero_grad()
            with torch.enable_grad():
                trainer.backward()
            optimizer.step()
            truth.commit()
    crash(run)
    history = everstep.open(tmp_path / "run")
    refused = []
    for step in history.steps:
        try:
            assert different(truth.states[step], history.state(step)) == [], step
        except AuditError:
            refused.append(step)
    assert refused in ([], [last])
    assert edit != "nothing" or not refused


@pytest.mark.parametrize("is_large", [True, False])
@pytest.mark.parametrize("build", [sgd, adamw_fused])
def test_gradients_that_were_to_be_carried_and_were_added_to_before_they_were_read_are_lost_and_nothing_else(
    build: Callable[[], Any], is_large: bool, request: pytest.FixtureRequest, tmp_path: Any
) -> None:
    """Gradients are dropped after each step; then twice before it, and then not at all. (That step, and all until the next
    base, were called damaged.)"""
    if is_large:
        request.getfixturevalue("as_if_large")
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False, base_interval=1000)
    truth = Truth(run, model, optimizer)
    truth.resume()
    trainer = Trainer(model, optimizer)
    with slow():
        for t in range(2 * STEPS):
            if t in (STEPS + 5, STEPS + 6):
                optimizer.zero_grad()
                trainer.backward()
                optimizer.step()
            else:
                trainer.released()
            truth.commit()
    run.flush()
    crash(run)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", build, truth, 2 * STEPS)


@pytest.mark.parametrize("build", [sgd, adamw_fused])
@pytest.mark.parametrize("stay", [True, False])
def test_gradients_that_are_there_when_the_trainer_takes_a_base_are_in_it(
    stay: bool, build: Callable[[], Any], tmp_path: Any
) -> None:
    """They have always been cleared before the next backward, so that no frame tells of them; and then they are not."""

    def train(model: Any, optimizer: Any, steps: range) -> Iterator[int]:
        for t in steps:
            if t != STEPS or not stay:
                optimizer.zero_grad()
            torch.manual_seed(t)
            loss_of(model).backward()
            optimizer.step()
            yield t

    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False, base_interval=1000)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for t in train(model, optimizer, range(STEPS)):
        if t == STEPS - 1:
            run._rebase = True  # as after an edit
        truth.commit()
    for _ in train(model, optimizer, range(STEPS, STEPS + 4)):
        truth.commit()
    run.flush()
    run._capture.snapshot.wait()
    crash(run)
    base = everstep.open(tmp_path / "run").plan(STEPS).base
    assert (base.step, len(base.carried)) == (STEPS, len(list(model.parameters())))
    check_history(tmp_path / "run", truth)
    again, its_optimizer = build()
    assert everstep.open(tmp_path / "run").restore(again, its_optimizer, step=STEPS) == STEPS
    assert all(p.grad is not None for p in again.parameters())
    for _ in train(again, its_optimizer, range(STEPS, STEPS + 4)):
        pass
    assert not equal([p.detach() for p in again.parameters()], [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("build", [sgd, adamw_fused])
def test_gradients_in_a_base_of_which_some_go_and_others_stay_are_told_one_by_one(
    build: Callable[[], Any], tmp_path: Any
) -> None:
    """What a base has, and what is no longer there at the next commit, does not come back."""
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False, base_interval=1000)
    truth = Truth(run, model, optimizer)
    truth.resume()
    expected: dict[int, list[Any]] = {}
    first = next(model.parameters())
    for t in range(STEPS + 4):
        if t < STEPS:
            optimizer.zero_grad()
        elif t == STEPS:
            first.grad = None
            first.requires_grad_(False)
        loss_of(model).backward()
        optimizer.step()
        run._rebase = t == STEPS - 1  # as after an edit
        truth.commit()
        expected[t + 1] = grads_of(model)
    run.flush()
    run._capture.snapshot.wait()
    crash(run)
    check_history(tmp_path / "run", truth)
    for step in range(STEPS, STEPS + 5):
        again, its_optimizer = build()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", InexactWarning)
            everstep.open(tmp_path / "run").restore(again, its_optimizer, step=step)
        found = grads_of(again)
        assert not equal(expected[step], found) or (step == STEPS and said), step
        assert step == STEPS or found[0] is None


class Sparse(nn.Module):
    """An embedding with sparse gradients, and what is on top of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 4, sparse=True)
        self.out = nn.Linear(4, 1)

    def forward(self, t: int) -> torch.Tensor:
        return self.out(self.embedding(torch.tensor([t % 20, 3, (7 * t) % 20]))).square().sum()


def sparse_and_dense() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = Sparse()
    dense = torch.optim.SGD(model.out.parameters(), lr=0.1)
    return model, {"dense": dense, "sparse": torch.optim.SparseAdam(model.embedding.parameters(), lr=0.1)}


def train_sparse(
    model: Any, optimizers: dict[str, Any], steps: Iterable[int], *, every: int, clear_first: bool
) -> Iterator[int]:
    """The embedding is updated at every so many steps only, by what has been added up."""
    for t in steps:
        if clear_first:
            for optimizer in optimizers.values():
                optimizer.zero_grad()
        model(t).backward()
        optimizers["dense"].step()
        optimizers["dense"].zero_grad()
        if (t + 1) % every == 0:
            optimizers["sparse"].step()
            if not clear_first:
                optimizers["sparse"].zero_grad()
        yield t


@pytest.mark.parametrize("mode", ["delta", "base", "snapshot"])
def test_sparse_gradients_that_are_added_up_over_commits_are_not_stored_and_a_resume_says_so(
    mode: str, tmp_path: Any
) -> None:
    options: dict[str, Any] = {"quiet": True, "follower": False, "base_interval": 1 if mode == "base" else 1000}
    if mode == "snapshot":
        options = {"quiet": True, "mode": "snapshot", "snapshot_interval": 1}
    for stop in range(1, 13):
        model, optimizers = sparse_and_dense()
        path = tmp_path / f"run-{stop}"
        run = everstep.attach(model, optimizers, path, **options)
        run.resume()
        for _ in train_sparse(model, optimizers, range(stop), every=3, clear_first=False):
            run.commit()
        run.flush()
        if mode == "base":
            assert run._capture.snapshot is not None
            run._capture.snapshot.wait()
        crash(run)
        model, optimizers = sparse_and_dense()
        run = everstep.attach(model, optimizers, path, **options)
        with pytest.warns(InexactWarning, match="sparse") if stop % 3 else contextlib.nullcontext():
            assert run.resume() == stop
        for _ in train_sparse(model, optimizers, range(stop, 15), every=3, clear_first=False):
            run.commit()
        crash(run)
        plain, others = sparse_and_dense()
        list(train_sparse(plain, others, range(15), every=3, clear_first=False))
        if stop % 3 == 0:
            assert not equal([p.detach() for p in plain.parameters()], [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("mode", ["delta", "snapshot"])
def test_sparse_gradients_that_are_cleared_before_the_next_backward_are_nothing_to_warn_of(mode: str, tmp_path: Any) -> None:
    options: dict[str, Any] = {"mode": mode, "quiet": True, **({"snapshot_interval": 1} if mode == "snapshot" else {})}
    model, optimizers = sparse_and_dense()
    run = everstep.attach(model, optimizers, tmp_path / "run", **options)
    run.resume()
    for _ in train_sparse(model, optimizers, range(8), every=1, clear_first=True):
        run.commit()
    run.flush()
    crash(run)
    model, optimizers = sparse_and_dense()
    run = everstep.attach(model, optimizers, tmp_path / "run", **options)
    assert run.resume() == 8  # warnings are errors
    for _ in train_sparse(model, optimizers, range(8, 12), every=1, clear_first=True):
        run.commit()
    crash(run)
    plain, others = sparse_and_dense()
    list(train_sparse(plain, others, range(12), every=1, clear_first=True))
    assert not equal([p.detach() for p in plain.parameters()], [p.detach() for p in model.parameters()])
