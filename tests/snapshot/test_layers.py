"""Layer-wise updates under snapshot mode: states begin to leave in backward, and each is of one step all the same."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture.layerwise import Layerwise
from everstep.capture.leaving import Leaving
from everstep.errors import LayerwiseError, NotARunError, NothingToRestoreError, UsageError
from truth import copied, different, live_state

NUM_STEPS = 30
WIDTH = 96


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(3)
    body = [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1))]
    model = nn.Sequential(*body, nn.Linear(WIDTH, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, WIDTH, generator=generator), torch.randint(0, 4, (16,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, step: int) -> None:
    x, y = batch(step)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that this small model is updated in backward many times."""
    monkeypatch.setitem(Layerwise.__init__.__kwdefaults__, "batch_bytes", WIDTH * WIDTH)


@pytest.fixture(scope="module")
def truth() -> dict[int, Any]:
    """S(n) of training that never saw Everstep."""
    model, optimizer, scheduler = build()
    torch.manual_seed(11)
    found = {0: copied(live_state(model, optimizer, {"scheduler": scheduler}))}
    for step in range(NUM_STEPS):
        train(model, optimizer, scheduler, step)
        found[step + 1] = copied(live_state(model, optimizer, {"scheduler": scheduler}))
    return found


def go_on(path: Path, *, until: int = NUM_STEPS, **options: Any) -> everstep.Run:
    model, optimizer, scheduler = build()
    torch.manual_seed(11)
    run = everstep.attach(
        model, optimizer, path, mode="snapshot", extras={"scheduler": scheduler}, layerwise=True, quiet=True, **options
    )
    run.resume()
    while run.step < until:
        train(model, optimizer, scheduler, run.step)
        run.commit()
    return run


def forked(work: Callable[[], object], *, kill_after_s: float | None = None) -> int:
    """A child that does this, killed after so long unless it ends before."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as e:
            print(repr(e), file=sys.stderr, flush=True)
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def check_all(path: Path, truth: dict[int, Any]) -> list[int]:
    """Every step that is there is what it should be."""
    history = everstep.open(path)
    steps = history.steps
    for step in steps:
        assert not different(truth[step], history.state(step)), f"step {step}"
    return steps


@pytest.mark.parametrize("options", [{}, {"pool_mode": "direct"}, {"pool_mode": "staged"}, {"max_bandwidth": 20e6}])
def test_a_killed_run_goes_on_to_the_same_end(tmp_path: Path, truth: dict[int, Any], options: dict[str, Any]) -> None:
    def child() -> None:
        run = go_on(tmp_path / "run", until=14, snapshot_interval=1, **options)
        run.flush()
        assert run.durable_step == 14
        assert run._capture.layers[0].stats.in_backward > 0  # type: ignore[union-attr]

    assert os.WIFSIGNALED(forked(child))
    assert check_all(tmp_path / "run", truth)[-1] == 14
    with go_on(tmp_path / "run", snapshot_interval=1, **options) as run:
        assert run.stats()["resumed_step"] == 14
    assert check_all(tmp_path / "run", truth)[-1] == NUM_STEPS


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> Iterator[random.Random]:
    """The thread that carries states stops at random moments."""
    rng = random.Random(5)

    def slowed(fill: Callable[..., None]) -> Callable[..., None]:
        def slow(*args: Any) -> None:
            if rng.random() < 0.2:
                time.sleep(rng.random() * 0.004)
            fill(*args)

        return slow

    for name in ("_fill", "_fill_together"):
        monkeypatch.setattr(Leaving, name, slowed(getattr(Leaving, name)))
    yield rng


@pytest.mark.parametrize("num_kills", [6, pytest.param(150, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
@pytest.mark.long
def test_no_state_is_of_two_steps_whenever_the_process_is_killed(
    tmp_path: Path, truth: dict[int, Any], delays: random.Random, num_kills: int
) -> None:
    for i in range(num_kills):
        path = tmp_path / f"run-{i}"
        options: dict[str, Any] = {"pool_mode": delays.choice([None, "direct", "staged"]), "snapshot_interval": 1}
        for _ in range(2):
            delays.seed(delays.random())
            forked(partial(go_on, path, **options), kill_after_s=0.3 + 0.5 * delays.random())
            if _has_steps(path):
                check_all(path, truth)


def _has_steps(path: Path) -> bool:
    try:
        return bool(everstep.open(path).steps)
    except (NothingToRestoreError, NotARunError):
        return False


def test_a_weight_edited_before_the_commit_is_stored_as_edited(tmp_path: Path) -> None:
    model, optimizer, scheduler = build()
    options: dict[str, Any] = {"mode": "snapshot", "layerwise": True, "snapshot_interval": 1, "quiet": True}
    extras = {"scheduler": scheduler}
    with everstep.attach(model, optimizer, tmp_path / "run", extras=extras, **options) as run:
        run.resume()
        for step in range(8):
            train(model, optimizer, scheduler, step)
            if step > 4:
                with torch.no_grad():
                    model[16].weight.clamp_(-0.01, 0.01)
            run.commit(wait=True)
            state = everstep.open(tmp_path / "run").state(run.step)
            assert not different(live_state(model, optimizer, extras), state)


def test_clipping_is_refused_at_the_first_step(tmp_path: Path) -> None:
    model, optimizer, _ = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", mode="snapshot", layerwise=True, quiet=True)
    run.resume()
    x, y = batch(0)
    nn.functional.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(UsageError, match="layerwise"):
        optimizer.step()
    run.close()


def test_what_clipping_leaves_behind_later_is_never_stored(tmp_path: Path, truth: dict[int, Any]) -> None:
    model, optimizer, scheduler = build()
    torch.manual_seed(11)
    run = everstep.attach(
        model, optimizer, tmp_path / "run", mode="snapshot", layerwise=True, extras={"scheduler": scheduler}, quiet=True,
        snapshot_interval=1,
    )  # fmt: skip
    run.resume()
    for step in range(8):
        train(model, optimizer, scheduler, step)
        run.commit()
    x, y = batch(8)
    nn.functional.cross_entropy(model(x), y).backward()
    assert run._capture.layers[0].num_unfinished  # type: ignore[union-attr]
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(LayerwiseError, match="resume"):
        optimizer.step()
    with pytest.raises(LayerwiseError):
        run.commit()
    with pytest.raises(LayerwiseError):
        run.close()
    assert check_all(tmp_path / "run", truth)[-1] == 8


def unmovable(kind: str) -> tuple[nn.Module, Any]:
    """A model and optimizers whose parameters must not be updated in backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if kind == "another parameter":
        return model, torch.optim.LBFGS(model.parameters())
    if kind == "same memory":
        model[1].weight = nn.Parameter(model[0].weight.data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, {"a": optimizer, "b": torch.optim.SGD(model.parameters(), lr=0.1)} if kind == "twice" else optimizer


@pytest.mark.parametrize(
    ("kind", "said"),
    [("another parameter", "LBFGS"), ("same memory", "two parameters in the same memory"), ("twice", "two optimizers")],
)
def test_what_must_not_be_updated_in_backward_is_refused_at_attach(kind: str, said: str, tmp_path: Path) -> None:
    model, optimizer = unmovable(kind)
    with pytest.raises(UsageError, match=f"layerwise=True.*{said}"):
        everstep.attach(model, optimizer, tmp_path / "run", mode="snapshot", layerwise=True, quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_resume_that_is_refused_leaves_no_hooks_and_no_thread(tmp_path: Path) -> None:
    """Gradients of these parameters are watched already."""
    model, optimizer, _ = build()
    other = everstep.attach(model, optimizer, tmp_path / "other", early=True, follower=False, quiet=True)
    other.resume()
    other.flush()

    def left() -> tuple[int, int, int, int]:
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, model._forward_pre_hooks)
        return (*map(len, hooks), threading.active_count())  # type: ignore[return-value]

    before = left()
    run = everstep.attach(model, optimizer, tmp_path / "run", mode="snapshot", layerwise=True, quiet=True)
    with pytest.raises(UsageError, match="watched by another"):
        run.resume()
    assert left() == before
    run.close()
    other.close()
