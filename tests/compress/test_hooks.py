"""Compressors and tapped hooks as DDP communication hooks. One rank here; two and four in the long suites."""

from __future__ import annotations

import collections
import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compress_training
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import everstep
from everstep.compress import Half, Quantize, TopK, tap
from everstep.compress.agree import check_same
from everstep.errors import MismatchError, NonFiniteWarning, UnsupportedValueError, UsageError
from support import crash, equal


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_killed_run_with_top_k_goes_on_bit_for_bit(world: int, tmp_path: Path) -> None:
    assert spawned(tmp_path, world, "topk") == [{"topk": []}] * world


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_killed_run_goes_on_bit_for_bit_with_every_compressor_and_tapped_hook(world: int, tmp_path: Path) -> None:
    found = spawned(tmp_path, world, *compress_training.CASES)
    assert found == [{case: [] for case in compress_training.CASES}] * world


def test_ranks_with_different_compressors_are_told_so_and_write_nothing(tmp_path: Path) -> None:
    for found in spawned(tmp_path, 2, "different"):
        assert "MismatchError: ranks compress differently" in found["different"][0]
        assert found["different"][1:] == ["no step was committed"]


@pytest.mark.long
def test_all_ranks_consume_the_same_and_nan_of_one_rank_reaches_all_without_a_message_of_its_own(tmp_path: Path) -> None:
    for found in spawned(tmp_path, 3, "alike", "largest"):
        assert found == {"alike": [], "largest": []}


@pytest.mark.long
def test_under_another_number_of_ranks_residuals_stay_with_ranks_that_hold_the_same_elements(tmp_path: Path) -> None:
    spawned(tmp_path, 2, "resized")
    shutil.copytree(tmp_path, tmp_path / "three")
    replicated, sharded = "topk: 6 as they were, 0 zero, told: False", "topk-fsdp2: 0 as they were, 6 zero, told: True"
    new = "topk: 0 as they were, 6 zero, told: True"
    found = spawned(tmp_path / "three", 3, "resized")
    assert [f["resized"] for f in found] == [[replicated, sharded], [replicated, sharded], [new, sharded]]
    assert [f["resized"] for f in spawned(tmp_path, 1, "resized")] == [[replicated, sharded]]


def spawned(folder: Path, world: int, *cases: str) -> list[dict[str, Any]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, compress_training.__file__, folder, str(world), *cases], env=env, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(world)]


def model_with(hooked: Any, **options: Any) -> DDP:
    model = DDP(nn.Linear(40, 30), **options)
    model.register_comm_hook(hooked.state, hooked.hook)
    return model


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "wrong",
    [lambda b: b.buffer()[:-1], lambda b: b.buffer().double(), lambda b: [b.buffer(), b.buffer()], lambda b: None],
    ids=["shape", "dtype", "two", "nothing"],
)
def test_a_hook_that_returns_something_else_is_refused_at_the_first_step(wrong: Any, tmp_path: Path) -> None:
    def hook(state: object, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(wrong(bucket))
        return future

    tapped = tap(hook)
    model = model_with(tapped)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = everstep.attach(model, optimizer, tmp_path, compress=tapped, quiet=True, follower=False)
    run.resume()
    with pytest.raises(UsageError, match="must return a tensor of the bucket's shape and dtype"):
        model(torch.randn(2, 40)).sum().backward()
    assert run.commit() == 0
    crash(run)
    assert everstep.open(tmp_path).steps == [0]


@pytest.mark.usefixtures("alone")
def test_a_hook_that_returns_no_future_is_refused_at_the_first_step() -> None:
    model = model_with(tap(lambda state, bucket: bucket.buffer()))
    with pytest.raises(UsageError, match="returned a Tensor"):
        model(torch.randn(2, 40)).sum().backward()


@pytest.mark.usefixtures("alone")
def test_a_hook_whose_state_cannot_be_stored_is_refused_at_attach(tmp_path: Path) -> None:
    class State:
        def __init__(self) -> None:
            self.file = sys.stderr

    tapped = tap(lambda state, bucket: bucket.buffer(), State())
    model = model_with(tapped)
    with pytest.raises(UnsupportedValueError, match=r"compress\.state\.file"):
        everstep.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path, compress=tapped, quiet=True)
    assert not (tmp_path / "run.json").exists()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("make", [lambda: TopK(0.1), lambda: Quantize(), lambda: Half()], ids=["topk", "quantize", "half"])
def test_a_hook_and_a_transform_give_the_optimizer_the_same(make: Any) -> None:
    plain, compressor = nn.Linear(40, 30), make()
    model = model_with(make())
    model.module.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
    compressor.attach(optimizer)
    for at in range(4):  # buckets are rebuilt after the first
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(at))
        for each in (plain, model):
            each.zero_grad()
            each(x).pow(2).sum().backward()
        optimizer.step()
        for p, q in zip(plain.parameters(), model.module.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_nan_goes_through_a_hook_as_it_is(options: Any) -> None:
    compressor = TopK(0.1)
    model = model_with(compressor, **options)
    x = torch.ones(1, 40)
    x[0, 3] = float("nan")
    with pytest.warns(NonFiniteWarning):
        model(x).sum().backward()
    grad = model.module.weight.grad
    assert isinstance(grad, torch.Tensor) and grad.isnan().sum() == 30 and bool((grad[:, 4] == 1).all())
    assert compressor.nonfinite_gradients == 1  # the bias has none
    assert all(r.isfinite().all() for r in compressor.state_dict()["residuals"])


def residuals_of(compressor: Any) -> list[torch.Tensor]:
    return [r.clone() for r in compressor.state_dict()["residuals"]]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", ["delta", "snapshot"])
@pytest.mark.parametrize("residual", ["base", "log"])
def test_a_backward_without_a_step_is_not_in_the_base_that_close_leaves(residual: str, mode: str, tmp_path: Path) -> None:
    """A hook makes new residuals in backward; S(n) has those of step n."""

    def begin() -> tuple[DDP, torch.optim.Optimizer, TopK, everstep.Run]:
        torch.manual_seed(0)
        compressor = TopK(0.1, residual=residual)
        model = model_with(compressor)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = everstep.attach(model, optimizer, tmp_path, mode=mode, compress=compressor, quiet=True, follower=False)
        return model, optimizer, compressor, run

    model, optimizer, compressor, run = begin()
    run.resume()
    at: dict[int, Any] = {}
    for _ in range(3):
        model(torch.randn(4, 40)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        at[run.commit()] = residuals_of(compressor), compressor.position()
    for _ in range(2):
        model(torch.randn(4, 40)).pow(2).sum().backward()
        optimizer.zero_grad()
    assert equal(at[3][0], residuals_of(compressor))
    at[4] = residuals_of(compressor), compressor.position()  # snapshots take a change of buffers for a step
    run.close()
    assert run.step == (3 if mode == "delta" else 4)
    _, _, compressor, again = begin()
    assert again.resume() == run.step
    assert not equal(at[run.step], (residuals_of(compressor), compressor.position()))
    crash(again)


@pytest.mark.usefixtures("alone")
def test_the_residual_of_a_parameter_that_backward_does_not_come_to_waits() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(40, 30), nn.Linear(40, 30)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.one(x) + self.other(x) if both else self.one(x)

    compressor = TopK(0.1)
    model = DDP(Either(), find_unused_parameters=True)
    model.register_comm_hook(compressor.state, compressor.hook)
    compressor.bind(dict(model.module.named_parameters()))
    for both in (True, False, False):
        before = {n: r.clone() for n, r in compressor.residuals.named_buffers()}
        model.zero_grad()
        model(torch.randn(4, 40), both).pow(2).sum().backward()
        assert (model.module.other.weight.grad is not None) == both
        for name, residual in compressor.residuals.named_buffers():
            assert torch.equal(residual, before[name]) == (not both and name.startswith("other"))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("make", [lambda: TopK(0.1), lambda: Quantize(), lambda: Half()], ids=["topk", "quantize", "half"])
def test_a_sparse_gradient_and_an_empty_parameter_go_through_a_hook(make: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3)
            self.empty = nn.Parameter(torch.zeros(0, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(x)).sum() + self.empty.sum()

    plain = Model()
    model = DDP(copy.deepcopy(plain))
    compressor = make()
    model.register_comm_hook(compressor.state, compressor.hook)
    for _ in range(3):
        x = torch.randint(50, (6,))
        for each in (plain, model):
            each.zero_grad()
            each(x).backward()
        found, expected = model.module.table.weight.grad, plain.table.weight.grad
        assert found is not None and expected is not None and found.is_sparse
        assert torch.equal(found.to_dense(), expected.to_dense())
        assert model.module.empty.grad is not None and model.module.out.weight.grad is not None


def test_what_a_hook_keeps_in_a_dict_is_stored() -> None:
    random = np.random.RandomState(3)
    state: dict[Any, Any] = collections.OrderedDict(count=1, error=torch.ones(3), random=random)
    tapped = tap(lambda state, bucket: None, state)
    stored = tapped.position()
    expected = random.randint(1 << 30)
    state["error"].add_(1)
    state.update(count=5, more=[2])
    state[7] = torch.zeros(2)
    later = tapped.position()
    tapped.set_position(stored)
    assert tapped.state is state and list(state) == ["count", "error", "random"] and state["random"] is random
    assert state["count"] == 1 and torch.equal(state["error"], torch.ones(3)) and random.randint(1 << 30) == expected
    tapped.set_position(later)
    assert state["count"] == 5 and state["more"] == [2] and torch.equal(state[7], torch.zeros(2))
    new = tap(lambda state, bucket: None, {})
    new.set_position(stored)
    assert new.state["random"].randint(1 << 30) == expected


@pytest.mark.usefixtures("alone")
def test_a_killed_run_goes_on_with_what_a_hook_kept_in_a_dict(tmp_path: Path) -> None:
    def counting(state: Any, bucket: Any) -> Any:
        state["calls"] += 1
        state.setdefault("seen", torch.zeros(2)).add_(1)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def begin() -> tuple[DDP, torch.optim.Optimizer, Any, everstep.Run]:
        tapped = tap(counting, {"calls": 0, "group": dist.group.WORLD})
        model = model_with(tapped)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = everstep.attach(model, optimizer, tmp_path, compress=tapped, quiet=True, follower=False)
        run.resume()
        return model, optimizer, tapped, run

    model, optimizer, tapped, run = begin()
    for _ in range(3):
        model(torch.randn(2, 40)).sum().backward()
        optimizer.step()
        run.commit(wait=True)
    crash(run)
    _, _, tapped, again = begin()
    assert again.step == 3 and tapped.state["calls"] == 3 and tapped.state["seen"].tolist() == [3, 3]
    assert tapped.state["group"] is dist.group.WORLD
    crash(again)


class _Slotted:
    __slots__ = ("__hidden", "plain")

    def __init__(self) -> None:
        self.__hidden, self.plain = 0, 0

    def count(self) -> int:
        self.__hidden += 1
        self.plain += 1
        return self.__hidden


class _OneSlot:
    __slots__ = "word"


def test_slots_are_stored_whatever_they_are_called() -> None:
    first, second = _Slotted(), _Slotted()
    first.count()
    tap(lambda state, bucket: None, second).set_position(tap(lambda state, bucket: None, first).position())
    assert second.count() == 2 and second.plain == 2
    one = _OneSlot()
    one.word = 3
    assert tap(lambda state, bucket: None, one).position() == {"state": {"word": 3}}


class _DictWithMore(dict[str, int]):
    pass


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("what", ["list", "tensor", "object", "dict with attributes", "tuple", "keys"])
def test_a_state_that_cannot_be_looked_into_is_refused_at_attach(what: str, tmp_path: Path) -> None:
    more = _DictWithMore()
    more.own = 3  # type: ignore[attr-defined]
    states: dict[str, Any] = {
        "list": [0], "tensor": torch.zeros(3), "object": object(), "dict with attributes": more, "tuple": ([],),
        "keys": {(1, 2): 3},
    }  # fmt: skip
    tapped = tap(lambda state, bucket: bucket.buffer(), states[what])
    model = model_with(tapped)
    with pytest.raises(UnsupportedValueError, match=r"compress\.state"):
        everstep.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path, compress=tapped, quiet=True)
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("state", [None, 3, 0.5, "name", (1, None), torch.float16])
def test_what_a_hook_cannot_change_is_no_state(state: Any) -> None:
    assert tap(lambda state, bucket: None, state).position() == {"state": {}}


@pytest.mark.long
def test_what_two_ranks_make_of_odd_gradients_is_alike_and_right(tmp_path: Path) -> None:
    cases = ("static", "sparse", "range", "buckets")
    assert spawned(tmp_path, 2, *cases) == [{case: [] for case in cases}] * 2


@pytest.mark.usefixtures("alone")
def test_a_hook_outside_of_a_backward_pass_is_refused() -> None:
    model = model_with(TopK(0.1))
    model(torch.ones(1, 40)).sum().backward()
    with pytest.raises(UsageError, match="outside of a backward pass"):
        model._match_all_reduce_for_bwd_pass()


def test_descriptions_of_ranks_must_be_equal() -> None:
    check_same(["a", "a"])
    with pytest.raises(MismatchError, match="rank 0 by a, rank 1 by b"):
        check_same(["a", "b"])
