"""Early hand-over: whatever happens to a gradient between backward and step, what was consumed is what is logged.

`left` stands for a writer that is quick: everything that was handed over has been written when it returns.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import early_training
import numpy as np
import pytest
import reduced_training
import torch
import torch.distributed as dist
from test_ownership import CLEAN, PATTERNS, STEPS, Trainer, adamw_fused, sgd
from torch import nn

import everstep
from everstep.capture import final, sent
from everstep.capture.scaling import find_coefficient, is_product
from everstep.errors import AuditError
from everstep.frame import ScaledUpdate, Update
from everstep.restore.execute import open_frames
from everstep.restore.plan import line_of
from everstep.store.runs import RunPath, read_listing
from truth import Truth, check_history, check_resume, crash, different, live_state, slow

BYTES = 96 * 96 * 4
"""Of the one gradient that is large enough to leave early."""


class Loop:
    """A model in training with early hand-over, and what its state was after each commit."""

    def __init__(self, path: Any, build: Callable[[], Any] = adamw_fused, **options: Any) -> None:
        self.path, self.build = path, build
        self.model, self.optimizer = build()
        options = {"quiet": True, "follower": False, "early": True, **options}
        self.run = everstep.attach(self.model, self.optimizer, path, **options)
        self.truth = Truth(self.run, self.model, self.optimizer)
        self.truth.resume()
        self.params = list(self.model.parameters())
        self.inputs = torch.Generator().manual_seed(5)

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(4, 96, generator=self.inputs).to(self.params[0].dtype)).square().mean()

    def backward(self) -> None:
        self.loss().backward()
        self.left()

    def left(self) -> None:
        self.run._capture.flush()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, num_steps: int, between: Callable[[], Any] = lambda: None) -> dict[str, int]:
        """So many steps with something between backward and step; what was counted in them."""
        before = self.counted()
        for _ in range(num_steps):
            self.backward()
            between()
            self.step()
            self.truth.commit()
        return self.since(before)

    def counted(self) -> dict[str, int]:
        self.left()
        return {k.removeprefix("early_"): v for k, v in self.run.stats().items() if k.startswith("early")}

    def since(self, before: dict[str, int]) -> dict[str, int]:
        return {k: v - before[k] for k, v in self.counted().items()}

    def check(self) -> None:
        """End as a kill would; every step is what it was."""
        if not self.run._closed:
            crash(self.run)
        check_history(self.path, self.truth)
        check_resume(self.path, self.build, self.truth, max(self.truth.states))

    def updates(self) -> list[Update]:
        """Of the frames in the log."""
        line = line_of(read_listing(RunPath(self.path)))
        frames, readers = open_frames(line, line.plans(max(self.truth.states))[-1])
        for reader in readers:
            reader.close()
        return [op for frame in frames for op in frame.ops if isinstance(op, Update)]


def of(dtype: torch.dtype) -> Callable[[], Any]:
    def build() -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(96, 200), nn.Tanh(), nn.Linear(200, 3)).to(dtype)
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    return build


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


# ------------------------------------------------------------------------------------------ what is left alone


def test_gradients_that_nobody_touches_have_left_before_their_step(path: Path) -> None:
    loop = Loop(path)
    assert loop.train(12) == {"bytes": 11 * BYTES, "scaled_bytes": 0, "void_bytes": 0}  # the first teaches
    loop.check()
    assert not any(isinstance(op, ScaledUpdate) for op in loop.updates())


def test_each_gradient_is_in_the_log_once(path: Path, tmp_path: Path) -> None:
    written = []
    for each, is_early in ((path, True), (tmp_path / "late", False)):
        loop = Loop(each, early=is_early)
        loop.train(10)
        written.append(loop.run.stats()["log_bytes"])
        loop.check()
    assert written[0] == written[1]


def test_training_is_what_it_is_without_everstep(path: Path) -> None:
    loop = Loop(path)
    loop.train(10)
    model, optimizer = adamw_fused()
    inputs = torch.Generator().manual_seed(5)
    for _ in range(10):
        model(torch.randn(4, 96, generator=inputs)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert different(live_state(model, optimizer), live_state(loop.model, loop.optimizer)) == []
    loop.check()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.sampled(3)
def test_gradients_are_logged_as_consumed_whoever_owns_them(pattern: str, path: Path) -> None:
    loop = Loop(path, sgd)
    trainer = Trainer(loop.model, loop.optimizer)
    trainer.backward = loop.backward  # type: ignore[method-assign]
    for t in range(STEPS):
        getattr(trainer, "released" if t < CLEAN else pattern)()
        loop.truth.commit()
    assert loop.counted()["bytes"] >= (CLEAN - 1) * BYTES
    loop.check()


@pytest.mark.parametrize("pattern", ["released", "clips_in_place", "zero_in_place_after_step", "keeps_numpy_arrays"])
def test_a_writer_that_is_late_leaves_gradients_to_their_update(pattern: str, path: Path) -> None:
    loop = Loop(path, sgd)
    trainer = Trainer(loop.model, loop.optimizer)
    with slow():
        for _ in range(STEPS):
            getattr(trainer, pattern)()
            loop.truth.commit()
    loop.check()


# ------------------------------------------------------------------------------------------ what is multiplied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_clipped_gradients_are_what_left_times_a_coefficient(dtype: torch.dtype, path: Path) -> None:
    loop = Loop(path, of(dtype))
    found = loop.train(9, lambda: nn.utils.clip_grad_norm_(loop.params, 1e-3))
    size = 96 * 200 * dtype.itemsize
    # The first teaches when gradients are final; the second that they are scaled, so that what left is kept at hand.
    assert found == {"bytes": 7 * size, "scaled_bytes": 7 * size, "void_bytes": size}
    loop.check()
    assert [isinstance(op, ScaledUpdate) for op in loop.updates()] == [False] * 2 + [True] * 7


def test_a_norm_below_the_limit_leaves_gradients_as_they_left(path: Path) -> None:
    loop = Loop(path)
    assert loop.train(6, lambda: nn.utils.clip_grad_norm_(loop.params, 1e6)) == {
        "bytes": 5 * BYTES, "scaled_bytes": 0, "void_bytes": 0,
    }  # fmt: skip
    loop.check()


@pytest.mark.filterwarnings("ignore:a GradScaler scales:everstep.errors.InexactWarning")
@pytest.mark.parametrize("build", [adamw_fused, sgd], ids=["fused", "loop"])
@pytest.mark.parametrize("clips", [False, True], ids=["unscaled", "unscaled-and-clipped"])
def test_a_grad_scaler_is_one_multiplication_and_its_skipped_steps_leave_nothing(
    build: Callable[[], Any], clips: bool, path: Path
) -> None:
    loop = Loop(path, build)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    before = loop.counted()
    for t in range(14):
        loss = loop.loss() * (float("inf") if t in (5, 6, 9) else 1.0)
        scaler.scale(loss).backward()
        loop.left()
        if clips:
            scaler.unscale_(loop.optimizer)
            nn.utils.clip_grad_norm_(loop.params, 1e-2)
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        loop.truth.commit()
    found = loop.since(before)
    assert found["scaled_bytes"] == found["bytes"] >= 7 * BYTES
    loop.check()


def test_multiplying_by_other_numbers_in_each_group_is_found_for_each(path: Path) -> None:
    def build() -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 100))
        return model, torch.optim.Adam(model.parameters(), lr=1e-3)

    loop = Loop(path, build)

    def scale() -> None:
        for i, p in enumerate(loop.params):
            p.grad.mul_(0.7 ** (i + 1))

    loop.train(2, scale)
    found = loop.train(6, scale)
    assert found["bytes"] == found["scaled_bytes"] == 6 * (2 * BYTES + 100 * 96 * 4)
    loop.check()
    coefficients = {g.coefficient for g in loop.updates()[-1].grads}
    assert coefficients == {None, *(float(np.float32(0.7 ** (i + 1))) for i in (0, 2, 4))}


# ------------------------------------------------------------------------------------------ what is changed


def test_a_gradient_that_is_changed_in_any_other_way_is_sent_again_and_soon_not_early_at_all(path: Path) -> None:
    loop = Loop(path)
    found = loop.train(12, lambda: nn.utils.clip_grad_value_(loop.params, 1e-4))
    assert found == {"bytes": 0, "scaled_bytes": 0, "void_bytes": sent.MAX_MISSES * BYTES}
    loop.check()


def hidden_edit(loop: Loop) -> None:
    """As old code does it, and as no version counter shows: a few elements."""
    loop.params[0].grad.data[3, 5:9] += 1.0


def test_an_edit_that_no_version_counter_shows_is_found(path: Path) -> None:
    loop = Loop(path)
    loop.train(8)
    assert loop.train(3, lambda: hidden_edit(loop)) == {"bytes": 0, "scaled_bytes": 0, "void_bytes": 3 * BYTES}
    assert loop.train(3) == {"bytes": 3 * BYTES, "scaled_bytes": 0, "void_bytes": 0}
    loop.check()


def test_without_the_proof_a_stale_gradient_would_be_logged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the tests of this file can fail: and the audit would refuse the step."""
    monkeypatch.setattr(sent.SentEarly, "_is_same", lambda *args: True)
    loop = Loop(path)
    loop.train(8)
    loop.train(1, lambda: hidden_edit(loop))
    with pytest.raises(AuditError, match="step 9"):
        loop.check()


@pytest.mark.parametrize("amount", [slice(0, 1), slice(None)], ids=["a row", "all"])
def test_a_sparse_gradient_that_is_changed_while_it_is_encoded_is_not_taken_for_unchanged(
    amount: slice, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A codec reads its input more than once; what counts is what its output decodes to."""

    def build() -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.EmbeddingBag(1000, 96), nn.Linear(96, 3))
        return model, torch.optim.Adam(model.parameters(), lr=1e-3)

    loop = Loop(path, build)
    monkeypatch.setattr(loop, "loss", lambda: loop.model(torch.randint(40, (4, 8), generator=loop.inputs)).square().mean())
    loop.train(6)
    encode = sent.codec.CODECS[(sent.codec.SPARSE, 1)].__class__.encode
    seen = []

    def change_then_tell(self: Any, raw: Any, *args: Any) -> Any:
        payload = encode(self, raw, *args)
        if payload is not None and not seen:
            seen.append(True)
            loop.params[0].grad.data[amount] *= 3.0  # the writer is in the middle of it
        return payload

    monkeypatch.setattr(sent.codec.CODECS[(sent.codec.SPARSE, 1)].__class__, "encode", change_then_tell)
    loop.train(1)
    monkeypatch.undo()
    assert seen
    crash(loop.run)
    check_history(path, loop.truth)


def test_gradients_that_get_other_memory_are_sent_again(path: Path) -> None:
    loop = Loop(path)
    loop.train(8)

    def replace() -> None:
        loop.params[0].grad.data = loop.params[0].grad.data / 3

    assert loop.train(2, replace)["void_bytes"] == 2 * BYTES
    loop.check()


def test_a_hook_that_edits_gradients_right_before_the_step_is_seen(path: Path) -> None:
    loop = Loop(path)
    loop.train(8)

    def edit(*args: Any) -> None:
        for p in loop.params:
            p.grad.clamp_(-1e-4, 1e-4)

    handle = loop.optimizer.register_step_pre_hook(edit)
    loop.train(4)
    handle.remove()
    loop.train(3)
    loop.check()


# ------------------------------------------------------------------------------------------ when it is final


def test_accumulation_over_a_changing_number_of_passes(path: Path) -> None:
    loop = Loop(path)
    before = loop.counted()
    counts = [1, 1, 1, 3, 3, 3, 2, 2, 1, 3, 1, 2, 1, 1]
    for count in counts:
        for _ in range(count):
            loop.backward()
            loop.truth.commit()  # the top of the loop comes here too: nothing happens
        loop.step()
        loop.truth.commit()
    found = loop.since(before)
    # As many as the time before: final when they left. More: what left was added to. Fewer: nothing left.
    pairs = list(itertools.pairwise(counts))
    assert found["bytes"] == sum(a == b for a, b in pairs) * BYTES
    assert found["void_bytes"] == sum(a < b for a, b in pairs) * BYTES
    loop.check()


def test_zero_grad_between_backward_and_step(path: Path) -> None:
    loop = Loop(path)
    loop.train(8)
    for _ in range(3):
        loop.backward()
        loop.optimizer.zero_grad()
        loop.backward()
        loop.step()
        loop.truth.commit()
    loop.backward()
    loop.optimizer.zero_grad()
    loop.optimizer.step()  # without any gradient
    loop.truth.commit()
    loop.train(3)
    loop.check()


def test_backward_twice_through_one_graph(path: Path) -> None:
    loop = Loop(path)
    for t in range(10):
        loss = loop.loss()
        loss.backward(retain_graph=t % 3 == 2)
        loop.left()
        if t % 3 == 2:
            loss.backward()
            loop.left()
        loop.step()
        loop.truth.commit()
    loop.check()


class Branches(nn.Module):
    """Two layers of which one is used at a time, and a weight that is in both."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(96, 96)
        self.branches = nn.ModuleList([nn.Linear(96, 96), nn.Linear(96, 96)])
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        used = self.branches[self.turn % 3 == 0]
        return self.both(torch.tanh(used(torch.tanh(self.both(x)))))


def test_parameters_that_get_no_gradient_this_time(path: Path) -> None:
    def build() -> Any:
        torch.manual_seed(1)
        model = Branches()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    loop = Loop(path, build)
    found = loop.train(12)
    assert found["void_bytes"] == 0
    assert found["bytes"] == (11 + 7 + 3) * BYTES  # all but the first of each
    loop.check()


def test_parameters_that_are_added_leave_early_too(path: Path) -> None:
    loop = Loop(path)
    loop.train(6)
    late = nn.Linear(3, 4000)
    loop.model.append(late)
    loop.optimizer.add_param_group({"params": late.parameters(), "lr": 1e-4})
    loop.params = list(loop.model.parameters())
    loop.train(3)
    found = loop.train(4)
    assert found == {"bytes": 4 * (BYTES + 4000 * 3 * 4), "scaled_bytes": 0, "void_bytes": 0}
    crash(loop.run)
    check_history(path, loop.truth)


def test_two_optimizers_that_take_turns_through_each_others_parameters(path: Path) -> None:
    """A GAN: the generator's backward reaches the discriminator, whose gradients are then dropped."""

    def build() -> Any:
        torch.manual_seed(1)
        models = {"g": nn.Linear(96, 96), "d": nn.Linear(96, 96)}
        return models, {f"{k}-adam": torch.optim.Adam(m.parameters(), lr=1e-3, fused=True) for k, m in models.items()}

    models, optimizers = build()
    run = everstep.attach(models, optimizers, path, quiet=True, follower=False, early=True)
    truth = Truth(run, models, optimizers)
    truth.resume()
    inputs = torch.Generator().manual_seed(5)
    for t in range(12):
        x = torch.randn(8, 96, generator=inputs)
        optimizers["d-adam"].zero_grad()
        (models["d"](x) - models["d"](models["g"](x).detach())).square().mean().backward()
        run._capture.flush()
        optimizers["d-adam"].step()
        optimizers["g-adam"].zero_grad()
        models["d"](models["g"](x)).square().mean().backward()
        run._capture.flush()
        optimizers["g-adam"].step()
        truth.commit()
        run._capture.flush()
        if t == 7:
            before = run.stats()
    after = run.stats()
    assert after["early_bytes"] - before["early_bytes"] == 4 * 2 * BYTES
    assert after["early_void_bytes"] == before["early_void_bytes"]
    crash(run)
    check_history(path, truth)
    check_resume(path, build, truth, 12)


@pytest.fixture
def one_process_group() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _halved_and_rounded(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
    """Stands for a reduction: what the parameters have when their hooks run is not what is consumed."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer().to(torch.bfloat16).float() * 0.3)
    return done


@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch")
@pytest.mark.parametrize("wrap", [lambda hook: hook, everstep.early_hook], ids=["at the end", "by bucket"])
@pytest.mark.parametrize("bucket_view", [True, False])
def test_gradients_that_are_reduced_leave_when_they_have_been(
    bucket_view: bool, wrap: Callable[[Any], Any], one_process_group: Any, path: Path
) -> None:
    loop = Loop(path)
    wrapped = nn.parallel.DistributedDataParallel(loop.model, gradient_as_bucket_view=bucket_view)
    wrapped.register_comm_hook(None, wrap(_halved_and_rounded))
    loop.loss = lambda: wrapped(torch.randn(4, 96, generator=loop.inputs)).square().mean()  # type: ignore[method-assign]
    assert loop.train(10) == {"bytes": 9 * BYTES, "scaled_bytes": 0, "void_bytes": 0}
    loop.check()


@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch")
def test_reduced_gradients_that_are_accumulated_and_clipped_are_sent_once(one_process_group: Any, path: Path) -> None:
    loop = Loop(path)
    wrapped = nn.parallel.DistributedDataParallel(loop.model)
    wrapped.register_comm_hook(None, everstep.early_hook())
    loop.loss = lambda: wrapped(torch.randn(4, 96, generator=loop.inputs)).square().mean()  # type: ignore[method-assign]
    inner = loop.backward

    def accumulate() -> None:
        with wrapped.no_sync():
            inner()
        inner()
        nn.utils.clip_grad_norm_(loop.params, 1e-3)

    loop.backward = accumulate  # type: ignore[method-assign]
    loop.train(3)
    assert loop.train(6) == {"bytes": 6 * BYTES, "scaled_bytes": 6 * BYTES, "void_bytes": 0}
    loop.check()


def test_a_hook_that_lets_gradients_leave_is_copied_with_its_module() -> None:
    hook = pickle.loads(pickle.dumps(everstep.early_hook(_halved_and_rounded)))
    assert copy.deepcopy(hook).hook is _halved_and_rounded


def reduced(folder: Path, ranks: int, *cases: str) -> list[dict[str, Any]]:
    """The reports of all ranks and cases."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p])}
    command = [sys.executable, reduced_training.__file__, str(folder), str(ranks), *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return [report for case in cases for report in json.loads((folder / f"{case}.json").read_text())]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, ["plain"]), *(pytest.param(ranks, list(reduced_training.CASES), marks=pytest.mark.long) for ranks in (2, 4))],
)
def test_buckets_leave_while_backward_goes_on_and_nothing_is_different_for_it(
    ranks: int, cases: list[str], tmp_path: Path
) -> None:
    """Bit for bit: training is what it is without Everstep and without a hook (or with the user's), and so is the run."""
    for report in reduced(tmp_path, ranks, *cases):
        assert min(report["left"][3:]) > 0, report
        assert report["early"][0] >= sum(report["left"]) and report["early"][1:] == [0, 0], report
        assert report["trained"] == report["stored"] == [], report


def test_a_closure_is_like_any_other_step(path: Path) -> None:
    loop = Loop(path, sgd)
    for _ in range(10):

        def closure() -> torch.Tensor:
            loop.optimizer.zero_grad()
            loss = loop.loss()
            loss.backward()
            loop.run._capture.offload.flush()
            return loss

        loop.optimizer.step(closure)
        loop.truth.commit()
    loop.check()


def test_gradients_that_are_not_of_the_usual_kind_leave_at_the_step(path: Path) -> None:
    def build() -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.EmbeddingBag(300, 96, sparse=True), nn.Linear(96, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    loop = Loop(path, build)
    loop.loss = lambda: loop.model(torch.randint(300, (4, 8), generator=loop.inputs)).square().mean()  # type: ignore[method-assign]
    assert loop.train(6) == {"bytes": 0, "scaled_bytes": 0, "void_bytes": 0}
    loop.check()


def test_an_optimizer_that_cannot_be_replayed_sends_nothing_early(path: Path) -> None:
    def build() -> Any:
        model, _ = sgd()
        return model, torch.optim.LBFGS(model.parameters(), max_iter=2)

    loop = Loop(path, build)

    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss()
        loss.backward()
        return loss

    for _ in range(4):
        loop.optimizer.step(closure)
        loop.truth.commit()
    assert loop.counted() == {"bytes": 0, "scaled_bytes": 0, "void_bytes": 0}
    loop.check()


# ------------------------------------------------------------------------------------------ steps that do not come


def test_an_exception_between_backward_and_step_leaves_nothing_behind(path: Path) -> None:
    loop = Loop(path)
    loop.train(8)
    with pytest.raises(RuntimeError, match="not now"), loop.run:
        loop.backward()
        raise RuntimeError("not now")
    assert max(loop.truth.states) == 8
    loop.check()


def test_training_goes_on_after_an_exception_that_was_caught(path: Path) -> None:
    loop = Loop(path)
    loop.train(8)
    for _ in range(2):
        loop.backward()  # and then something failed
        loop.optimizer.zero_grad()
    loop.train(4)
    loop.check()


def test_a_backward_pass_that_raises_in_the_middle(path: Path) -> None:
    loop = Loop(path)
    loop.train(8)

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("not now")

    handle = loop.params[0].register_hook(fail)  # the last one of the pass
    with pytest.raises(RuntimeError, match="not now"):
        loop.loss().backward()
    handle.remove()
    loop.optimizer.zero_grad()
    assert loop.train(4)["bytes"] == 4 * BYTES
    loop.check()


def test_a_commit_between_backward_and_step_takes_nothing_along(path: Path) -> None:
    loop = Loop(path)
    loop.train(8)
    for _ in range(3):
        loop.backward()
        loop.optimizer.zero_grad()
        with torch.no_grad():
            loop.params[-1].add_(0.1)
        loop.truth.commit()  # a step that only this edit makes
        loop.train(1)
    loop.check()


def test_many_passes_without_an_update_fill_no_disk(path: Path) -> None:
    loop = Loop(path)
    loop.train(4)
    before = loop.run.stats()["log_bytes"]
    for _ in range(30):
        loop.backward()
        loop.optimizer.zero_grad()
    assert loop.run.stats()["log_bytes"] - before < (final.MAX_TURNS + 1) * (BYTES + 4096)
    loop.train(2)
    loop.check()


@pytest.mark.parametrize("mode", ["delta", pytest.param("shadow", marks=pytest.mark.long)])
def test_a_kill_in_the_middle_of_backward_loses_that_step_only(
    mode: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tempfile.mkdtemp(prefix="es-", dir="/dev/shm")
    monkeypatch.setenv("EVERSTEP_SHARED", memory)
    try:
        killed = subprocess.run([sys.executable, early_training.__file__, str(path), mode, "9"], timeout=100, check=False)
        assert killed.returncode == -signal.SIGKILL
        plain, plain_optimizer = early_training.build()
        early_training.train(plain, plain_optimizer, 0)
        model, optimizer = early_training.build()
        with everstep.attach(model, optimizer, path, mode=mode, early=True, quiet=True) as run:
            assert run.resume() == 9
            assert run.stats()["resumed_from"] == ("shadow" if mode == "shadow" else "disk")
            early_training.train(model, optimizer, 9, run=run)
        assert different(live_state(plain, plain_optimizer), live_state(model, optimizer)) == []
        assert different(live_state(plain, plain_optimizer), everstep.open(path).state()) == []
    finally:
        shutil.rmtree(memory)


def test_closing_takes_the_hooks_away(path: Path) -> None:
    loop = Loop(path)
    loop.train(3)
    assert loop.params[0]._post_accumulate_grad_hooks
    loop.run.close()
    assert not loop.params[0]._post_accumulate_grad_hooks


# ------------------------------------------------------------------------------------------ coefficients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_any_coefficient_is_found_and_proven_in_every_bit(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    for n in range(60):
        k = torch.exp(torch.randn((), generator=random, dtype=torch.float64) * 3).to(torch.float32 if n % 2 else dtype)
        a = (torch.randn(40_001, generator=random, dtype=torch.float64) * 10.0 ** (n % 5 - 2)).to(dtype)
        a[:100] = 0
        b = a.clone()
        torch._foreach_mul_([b], k)
        bits = [t.view(torch.uint8).numpy() for t in (a, b)]
        found = find_coefficient(*bits, dtype)
        assert found is not None, (n, k)
        assert is_product(*bits, dtype, found) or dtype.itemsize == 2, (n, k, found)
        b.view(torch.int16 if dtype.itemsize == 2 else torch.int32)[-1] ^= 1  # the last bit of the last elements
        assert not is_product(*bits, dtype, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_product_is_the_same_in_parts(dtype: torch.dtype) -> None:
    """Fold multiplies tiles, the writer blocks, training whole tensors."""
    a = torch.randn(100_003, generator=torch.Generator().manual_seed(3)).to(dtype)
    whole = torch.mul(a, 0.123456789)
    for size in (64, 1000, 32_000):
        parts = torch.cat([torch.mul(part, 0.123456789) for part in a.split(size)])
        assert torch.equal(whole.view(torch.uint8), parts.view(torch.uint8))


def test_what_is_no_product_has_no_coefficient() -> None:
    a = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    zeros = torch.zeros(1000)
    for b in (a.clamp(-0.1, 0.1), a + 1e-3, a / 3 + 1e-7, zeros, a.flip(0), a * float("nan"), a * float("inf")):
        assert find_coefficient(a.view(torch.uint8).numpy(), b.view(torch.uint8).numpy(), torch.float32) is None
    assert find_coefficient(zeros.view(torch.uint8).numpy(), a.view(torch.uint8).numpy(), torch.float32) is None
