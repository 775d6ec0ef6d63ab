"""States that begin to leave in backward, before they are committed: whatever happens until then, and whoever fails."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everstep
import everstep.capture.leaving as leaving_module
from everstep.capture.layerwise import Layerwise
from everstep.capture.leaving import Leaving, Room, Staging
from everstep.capture.live import Described
from everstep.capture.states import States
from everstep.errors import HiddenEditWarning, LayerwiseError, StorageError, UnprotectedWarning
from everstep.store.pools import Pools
from truth import copied, different, live_state

WIDTH = 48
OPTIONS: dict[str, Any] = {"mode": "snapshot", "layerwise": True, "snapshot_interval": 1, "quiet": True}
AFTER = 3
"""Steps, after which parameters are updated in backward."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small model is updated in backward many times."""
    monkeypatch.setitem(Layerwise.__init__.__kwdefaults__, "batch_bytes", WIDTH * WIDTH)


def build(**options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """No buffers: all of it is updated."""
    torch.manual_seed(3)
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def backward(model: nn.Module, step: int) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    backward(model, step)
    optimizer.step()
    optimizer.zero_grad()


def states_of(run: everstep.Run) -> States:
    assert isinstance(run._capture, States)
    return run._capture


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def attached(tmp_path: Path) -> Iterator[tuple[everstep.Run, nn.Sequential, torch.optim.Optimizer]]:
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", **OPTIONS)
    run.resume()
    yield run, model, optimizer
    if not run._closed:
        run.close()


def check(run: everstep.Run, path: Path, model: nn.Module, optimizer: Any) -> None:
    """The step that was committed last is stored as it is."""
    run.flush()
    assert run.durable_step == run.step
    assert not different(live_state(model, optimizer), everstep.open(path).state(run.step))


def test_a_state_that_has_left_before_its_commit_waits_for_it(attached: Any, tmp_path: Path) -> None:
    run, model, optimizer = attached
    for step in range(AFTER + 4):
        train(model, optimizer, step)
        if step >= AFTER:
            job = states_of(run)._ahead.job
            assert job is not None
            until(lambda: job.leaving.early_bytes == job.live.num_bytes)  # noqa: B023
            time.sleep(0.01)
        run.commit()
        check(run, tmp_path / "run", model, optimizer)
    assert states_of(run).num_early == 4


@pytest.mark.parametrize("first", [0, AFTER + 3])
def test_weights_clamped_without_a_trace_before_the_commit_are_stored_as_clamped(
    attached: Any, tmp_path: Path, first: int
) -> None:
    run, model, optimizer = attached
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(AFTER + 7):
            train(model, optimizer, step)
            job = states_of(run)._ahead.job
            if job is not None:
                until(lambda: job.leaving.early_bytes == job.live.num_bytes)  # noqa: B023
            if step >= first:
                for p in model.parameters():
                    p.data.clamp_(-0.01, 0.01)
            run.commit()
            check(run, tmp_path / "run", model, optimizer)
    assert [w.category for w in told] == ([HiddenEditWarning] if first else [])
    assert states_of(run).num_early == max(0, first - AFTER)


def test_what_is_edited_before_each_commit_leaves_after_it_and_the_rest_early(attached: Any, tmp_path: Path) -> None:
    run, model, optimizer = attached
    for step in range(AFTER + 5):
        train(model, optimizer, step)
        with torch.no_grad():
            model[0].weight.clamp_(-0.01, 0.01)
        run.commit()
        check(run, tmp_path / "run", model, optimizer)
    assert states_of(run).num_early == 4  # all but the one at which that was learned


def test_gradients_that_are_left_on_their_parameters_keep_no_state_from_leaving_early(attached: Any, tmp_path: Path) -> None:
    run, model, optimizer = attached
    for step in range(AFTER + 4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        run.commit()
        check(run, tmp_path / "run", model, optimizer)
    assert states_of(run).num_early == 4


def test_two_updates_before_a_commit_are_one_step(attached: Any, tmp_path: Path) -> None:
    run, model, optimizer = attached
    for step in range(AFTER + 4):
        for part in range(2):
            train(model, optimizer, 2 * step + part)
        run.commit()
        check(run, tmp_path / "run", model, optimizer)
    assert states_of(run).num_early


def test_parameters_without_a_gradient_and_buffers_are_those_of_the_commit(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
    optimizers = {
        "first": torch.optim.AdamW(model[:2].parameters(), fused=True),
        "second": torch.optim.SGD(model[2:].parameters(), lr=0.1, momentum=0.9),
    }
    with everstep.attach(model, optimizers, tmp_path / "run", **{**OPTIONS, "snapshot_interval": 2}) as run:
        run.resume()
        for step in range(AFTER + 9):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
            y = model[1](model[0](x))
            for layer in model[2:] if step % 3 else model[2:3]:
                y = layer(y)
            y.square().mean().backward()
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            run.commit()
            if step % 2:
                check(run, tmp_path / "run", model, optimizers)
        assert states_of(run).num_early


def test_a_backward_that_fails_is_taken_back_by_a_resume(attached: Any, tmp_path: Path) -> None:
    run, model, optimizer = attached
    for step in range(AFTER + 2):
        train(model, optimizer, step)
        run.commit(wait=True)
    expected = copied(live_state(model, optimizer))

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("in backward")

    handle = model[0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="in backward"):
        backward(model, 99)
    handle.remove()
    assert states_of(run)._ahead.job is not None
    with pytest.raises(LayerwiseError):
        run.commit()
    with pytest.raises(LayerwiseError):
        run.close()
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", **OPTIONS) as run:
        assert run.resume() == AFTER + 2
        assert not different(expected, live_state(model, optimizer))


def test_storage_that_fails_in_backward_is_told_by_the_commit_and_not_by_backward(
    attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, model, optimizer = attached
    for step in range(AFTER + 2):
        train(model, optimizer, step)
        run.commit(wait=True)

    def fail(*_: Any) -> None:
        raise StorageError("no room")

    monkeypatch.setattr(Pools, "begin", fail)
    states = states_of(run)
    model[0].weight.register_hook(lambda _: until(lambda: states.error is not None))
    train(model, optimizer, 99)
    with pytest.raises(StorageError, match="no room"):
        run.commit()
    with pytest.raises(StorageError, match="no room"):
        run.close()


def test_storage_that_is_back_stores_the_next_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", on_error="warn", **OPTIONS)
    run.resume()
    for step in range(AFTER + 2):
        train(model, optimizer, step)
        run.commit(wait=True)
    states = states_of(run)
    with monkeypatch.context() as patched, pytest.warns(UnprotectedWarning):

        def fail(*_: Any) -> None:
            raise StorageError("no room")

        patched.setattr(Pools, "begin", fail)
        train(model, optimizer, 99)
        until(lambda: states.error is not None)
        run.commit()
    backward(model, 100)  # some of this state is ready before the pool is begun anew
    run._next_retry = 0.0
    optimizer.step()
    optimizer.zero_grad()
    run.commit()
    train(model, optimizer, 101)
    run.commit()
    check(run, tmp_path / "run", model, optimizer)
    run.close()


def test_a_commit_that_fails_leaves_no_state_behind_that_close_waits_for(
    attached: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, model, optimizer = attached
    for step in range(AFTER + 2):
        train(model, optimizer, step)
        run.commit(wait=True)
    train(model, optimizer, 99)
    assert states_of(run)._ahead.job is not None
    with monkeypatch.context() as patched:

        def fail(*_: Any) -> None:
            raise StorageError("no layout")

        patched.setattr(States, "_state_now", fail)
        with pytest.raises(StorageError, match="no layout"):
            run.commit()
    thread = states_of(run)._thread
    run.close()
    assert not thread.is_alive()
    assert everstep.open(tmp_path / "run").steps[-1] == AFTER + 3  # the same step, once more


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors of 64 elements are in two pieces, and none is small."""
    monkeypatch.setattr(leaving_module, "PIECE_ELEMENTS", 32)
    monkeypatch.setattr(leaving_module, "SMALL_BYTES", 0)


# -- one state by itself ----------------------------------------------------------------------------------------------


class Written:
    """A writer that keeps everything; `hold` stops it before a tensor."""

    def __init__(self, live: Described) -> None:
        self.order = list(range(len(live.slots)))
        self._live = live
        self.data: dict[int, Any] = {}
        self._next = 0
        self.may_go_on = threading.Semaphore(1000)

    def add_pieces(self, fill: Callable[[Any, int], None]) -> None:
        self.may_go_on.acquire()
        index = self.order[self._next]
        self._next += 1
        region = np.zeros(self._live.slots[index].num_bytes, np.uint8)
        size = leaving_module.PIECE_ELEMENTS * self._live.slots[index].dtype.itemsize
        for start in range(0, len(region), size):
            fill(region[start : start + size], start)
        self.data[index] = region


def described(num: int) -> tuple[Described, list[torch.Tensor]]:
    live, tensors = Described(), [torch.full((64,), float(i)) for i in range(num)]
    for i, tensor in enumerate(tensors):
        live.add(i, "param", f"p{i}", tensor, settled=False)
    return live, tensors


def carried(leaving: Leaving, writer: Any) -> threading.Thread:
    thread = threading.Thread(target=leaving.carry, args=(writer,))
    thread.start()
    return thread


@pytest.mark.usefixtures("small_pieces")
def test_a_piece_waits_while_gradients_are_reduced_and_goes_on_when_they_have_been(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.capture.leaving.GIVE_WAY_S", 60.0)
    reducing = threading.Event()
    reducing.set()
    live, _ = described(3)
    writer = Written(live)
    leaving = Leaving(live, Room(), give_way=reducing.is_set)
    thread = carried(leaving, writer)
    time.sleep(0.05)
    assert not writer.data  # it gives way after the first of its pieces
    reducing.clear()
    thread.join(20)
    assert sorted(writer.data) == [0, 1, 2]
    assert leaving.gave_way_s > 0.04


@pytest.mark.parametrize("indices", [None, [2, 1]])
@pytest.mark.usefixtures("small_pieces")
def test_a_piece_that_training_waits_for_gives_no_way(monkeypatch: pytest.MonkeyPatch, indices: list[int] | None) -> None:
    """The reduction may be waiting for this very process."""
    from everstep.capture.leaving import NoRoom

    monkeypatch.setattr("everstep.capture.leaving.GIVE_WAY_S", 60.0)
    live, tensors = described(3)
    writer = Written(live)
    is_over = threading.Event()
    leaving = Leaving(live, NoRoom(), give_way=lambda: not is_over.is_set())
    thread = carried(leaving, writer)
    until(lambda: bool(leaving._bytes[0] is not None))
    leaving.guard(indices)
    for tensor in tensors:
        tensor.fill_(-1.0)
    is_over.set()
    thread.join(20)
    assert [writer.data[i].view(np.float32)[0] for i in range(3)] == [0.0, 1.0, 2.0]


@pytest.mark.usefixtures("small_pieces")
def test_what_is_ready_first_leaves_first() -> None:
    live, _ = described(4)
    writer = Written(live)
    leaving = Leaving(live, Room(), is_ready=False)
    thread = carried(leaving, writer)
    for index in (2, 0):
        leaving.make_ready([index])
        until(lambda: index in writer.data)  # noqa: B023
    assert leaving.complete(live)
    thread.join(20)
    assert writer.order == [2, 0, 1, 3] and leaving.left_at is not None


@pytest.mark.usefixtures("small_pieces")
def test_a_state_that_is_cancelled_ends_and_its_guard_returns() -> None:
    live, _ = described(4)
    leaving = Leaving(live, Room(), pace=lambda _: 60.0)
    thread = carried(leaving, Written(live))
    until(lambda: bool(leaving._bytes[0] is not None))
    leaving.cancel()
    thread.join(20)
    assert not thread.is_alive()
    leaving.forget()
    leaving.guard()
    leaving.guard([1])
    leaving.make_ready([1])
    assert not leaving.complete(live)


@pytest.mark.usefixtures("small_pieces")
def test_a_state_that_was_given_up_gives_back_only_its_own_copies() -> None:
    room = Staging(4 * 256)
    (old, _), (new, tensors) = described(2), described(3)
    given_up, kept = Leaving(old, room), Leaving(new, room)
    given_up.guard([0])
    kept.guard([0])
    given_up.cancel()
    given_up.forget()
    kept.guard()
    for tensor in tensors:
        tensor.fill_(-1.0)
    writer = Written(new)
    kept.carry(writer)
    assert [writer.data[i].view(np.float32)[0] for i in range(3)] == [0.0, 1.0, 2.0]
    kept.forget()
    assert room.take(4 * 256) is not None
