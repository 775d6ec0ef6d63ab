"""Compressors and tapped hooks as DDP communication hooks. One rank here; two and four in the long suites."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compress_training
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import everstep
from everstep.compress import Half, Quantize, TopK, tap
from everstep.compress.agree import check_same
from everstep.errors import MismatchError, NonFiniteWarning, UnsupportedValueError, UsageError
from support import crash


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2])
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
