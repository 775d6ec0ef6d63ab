"""DDP's buckets: read from a run, given to a resumed one. Bits at four ranks; the rest in a group of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.nn.parallel.distributed import _MixedPrecision

from everstep.capture.buckets import BucketOrders, warm

# ------------------------------------------------------------------------------------------ four ranks


def reports(folder: Path, *cases: str) -> dict[str, list[dict[str, Any]]]:
    """Each case trained through in four processes, then resumed from every step in four others; every rank's report."""
    script = Path(__file__).with_name("bucket_training.py")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p])}
    for verb in ("train", "resume"):
        done = subprocess.run(
            [sys.executable, script, verb, folder, "4", *cases], env=env, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in cases}


def assert_warm_is_exact(ranks: list[dict[str, Any]], exact_from: int = 1) -> None:
    """A resume from any step gives every bit of every later step if warmed, and does not otherwise."""
    for report in ranks:
        for first, found in report.items():
            if int(first) >= exact_from:
                assert not all(found["cold"]), (first, found)
                assert all(found["warm"]) and not found["notices"], (first, found)


@pytest.mark.long
def test_a_warmed_resume_has_every_bit_at_four_ranks_and_a_cold_one_has_not(tmp_path: Path) -> None:
    found = reports(tmp_path, "plain", "static")
    assert_warm_is_exact(found["plain"])
    assert_warm_is_exact(found["static"], exact_from=2)
    for report in found["static"]:
        assert not all(report["1"]["warm"]) and "static_graph" in report["1"]["notices"][0]


@pytest.mark.long
def test_every_kind_of_ddp_is_warmed_at_four_ranks(tmp_path: Path) -> None:
    cases = ["views", "one-bucket", "accumulation", "changing", "dtypes", "sparse", "inside", "gan", "fp16-hook"]
    cases += ["built-in-hook"]
    for ranks in reports(tmp_path, *cases).values():
        assert_warm_is_exact(ranks)


@pytest.mark.long
def test_static_graphs_are_warmed_once_they_have_settled(tmp_path: Path) -> None:
    found = reports(tmp_path, "static-views", "static-hook", "static-unused")
    assert_warm_is_exact(found["static-views"], exact_from=2)
    assert_warm_is_exact(found["static-hook"], exact_from=2)
    assert_warm_is_exact(found["static-unused"], exact_from=3)


@pytest.mark.long
def test_ddp_that_finds_unused_parameters_needs_no_warming(tmp_path: Path) -> None:
    for report in reports(tmp_path, "find-unused")["find-unused"]:
        for found in report.values():
            assert all(found["cold"]) and all(found["warm"]) and not found["notices"]


@pytest.mark.long
def test_a_communication_hooks_own_state_meets_the_buckets_it_was_made_for(tmp_path: Path) -> None:
    for report in reports(tmp_path, "power-sgd")["power-sgd"]:
        assert all(all(found["warm"]) for found in report.values())


@pytest.mark.long
def test_a_compiled_ddp_model_is_warmed_like_any_other(tmp_path: Path) -> None:
    assert_warm_is_exact(reports(tmp_path, "compiled")["compiled"])


# ------------------------------------------------------------------------------------------ one rank


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Shuffled(nn.Module):
    """Layers of several types, used in an order of their own."""

    def __init__(self, order: list[int], dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(17, 17, dtype=dtype) for dtype in dtypes)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = self.layers[i](x.to(self.layers[i].weight.dtype))
        return x


ORDER = [2, 0, 4, 1, 3, 5]
DTYPES = [torch.float32, torch.float64, torch.float32, torch.float32, torch.float64, torch.float32]


def ddp(**options: Any) -> DDP:
    return DDP(Shuffled(ORDER, DTYPES), bucket_cap_mb=0.003, **options)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 17)).sum().backward()


def buckets(model: DDP) -> set[tuple[str, ...]]:
    """What is in which bucket, and where: it decides the bits. The order of the buckets does not."""
    names = {id(p): name for name, p in model.module.named_parameters()}
    return {tuple(names[id(p)] for p in bucket.parameters()) for bucket in model.reducer._get_zeros_like_grad_buckets()}


def trained(**options: Any) -> DDP:
    model = ddp(**options)
    for _ in range(4):
        backward(model)
    return model


@pytest.mark.usefixtures("alone")
def test_an_order_is_known_after_the_backward_that_decides_it_and_stays_the_same() -> None:
    model = DDP(Shuffled([1, 2, 0], [torch.float32] * 3))
    orders = BucketOrders({"model": model})
    with model.no_sync():
        backward(model)
    assert not orders.look() and orders.value == {}
    backward(model)
    assert orders.look()
    assert orders.value["model"][0] == [f"layers.{i}.{name}" for i in (0, 2, 1) for name in ("bias", "weight")]
    backward(model)
    assert model._has_rebuilt_buckets
    assert not orders.look()
    assert BucketOrders({"model": model}).value == orders.value


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("last_bucket_small", [False, True])
@pytest.mark.parametrize("static_graph", [False, True])
def test_warming_makes_the_buckets_that_were_recorded(
    static_graph: bool, last_bucket_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if last_bucket_small:
        monkeypatch.setenv("DDP_SET_LAST_BUCKET_CAP", "1")
    old = trained(static_graph=static_graph)
    orders = BucketOrders({"model": old}).value
    new = ddp(static_graph=static_graph)
    assert buckets(new) != buckets(old)
    assert warm({"model": new}, orders) == []
    assert buckets(new) == buckets(old)
    for _ in range(3):
        backward(new)
        assert buckets(new) == buckets(old)
    newest = ddp(static_graph=static_graph)
    warm({"model": newest}, BucketOrders({"model": new}).value)
    assert buckets(newest) == buckets(old)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("static_graph", [False, True])
def test_a_communication_hook_sees_no_bucket_before_training_and_all_of_them_in_it(static_graph: bool) -> None:
    seen: dict[int, tuple[str, ...]] = {}
    last: list[bool] = []

    def hook(state, bucket):  # torch does not take annotations that are strings
        names = {id(p): name for name, p in new.module.named_parameters()}
        assert [p.shape for p in bucket.parameters()] == [g.shape for g in bucket.gradients()]
        assert bucket.index() not in seen
        seen[bucket.index()] = tuple(names[id(p)] for p in bucket.parameters())
        last.append(bucket.is_last())
        return allreduce_hook(state, bucket)

    old = trained(static_graph=static_graph)
    new = ddp(static_graph=static_graph)
    new.register_comm_hook(None, hook)
    warm({"model": new}, BucketOrders({"model": old}).value)
    assert seen == {}
    assert new._comm_hooks == [(hook, None)]
    for _ in range(3):
        backward(new)
        assert set(seen.values()) == buckets(old) and len(seen) == len(buckets(old)) == len(last)
        assert sum(last) == 1
        seen.clear()
        last.clear()


@pytest.mark.usefixtures("alone")
def test_a_module_that_learned_another_order_takes_the_one_that_is_given() -> None:
    old, new = trained(), DDP(Shuffled(ORDER[::-1], DTYPES), bucket_cap_mb=0.003)
    for _ in range(2):
        backward(new)
    assert buckets(new) != buckets(old)
    warm({"model": new}, BucketOrders({"model": old}).value)
    assert buckets(new) == buckets(old)
    backward(new)


@pytest.mark.usefixtures("alone")
def test_a_step_before_any_order_was_known_is_resumed_with_provisional_buckets() -> None:
    model = trained()
    assert warm({"model": model}, {}) == []
    assert buckets(model) == buckets(ddp())
    for _ in range(2):
        backward(model)
    assert buckets(model) == buckets(trained())


@pytest.mark.usefixtures("alone")
def test_models_are_told_apart_and_those_without_ddp_are_passed_over() -> None:
    one, other, bare = trained(), DDP(Shuffled(ORDER[::-1], DTYPES), bucket_cap_mb=0.003), Shuffled(ORDER, DTYPES)
    for _ in range(2):
        backward(other)
    orders = BucketOrders({"one": one, "other": other, "bare": bare}).value
    assert set(orders) == {"one", "other"}
    fresh = {"bare": DDP(bare, bucket_cap_mb=0.003), "other": ddp(), "one": ddp(), "plain": Shuffled(ORDER, DTYPES)}
    assert warm(fresh, orders) == []
    assert buckets(fresh["one"]) == buckets(one)
    assert buckets(fresh["other"]) == buckets(other)
    assert buckets(fresh["bare"]) == buckets(ddp())


@pytest.mark.usefixtures("alone")
def test_parameters_frozen_after_the_wrapping_leave_the_order_unknown() -> None:
    model = trained(static_graph=True)
    model.module.layers[0].bias.requires_grad_(False)
    assert BucketOrders({"model": model}).value == {}


@pytest.mark.usefixtures("alone")
def test_ddps_own_mixed_precision_is_left_alone_and_told_of() -> None:
    orders = BucketOrders({"model": trained()}).value
    model = ddp()
    model.mixed_precision = _MixedPrecision()  # as an argument it needs an accelerator
    before = model.reducer
    (notice,) = warm({"model": model}, orders)
    assert "mixed_precision" in notice and model.reducer is before
