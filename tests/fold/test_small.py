"""Models of many small tensors: what shares a record is read once, and gradients are used where they are only if nobody
writes into them."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep import tree
from everstep.atoms import OptimizerSpec
from everstep.fold import OptimizerState
from everstep.follow.shadow import _only_reads
from everstep.store.segments import StoredFrame


def test_buffers_that_share_a_record_are_read_with_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(8, 8), nn.BatchNorm1d(8))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    run.resume()
    for _ in range(4):
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.commit()
    run.flush()
    loads: Counter[tuple[int, int]] = Counter()
    load = StoredFrame._load

    def counted(self: StoredFrame, ordinals: Any, *args: Any, **kwargs: Any) -> Any:
        loads.update((self.step, ordinal) for ordinal in ordinals)
        return load(self, ordinals, *args, **kwargs)

    monkeypatch.setattr(StoredFrame, "_load", counted)
    state = everstep.open(tmp_path / "run").state(4)
    for key, value in model.state_dict().items():
        assert torch.equal(state["model"][key], value), key
    assert max(loads.values()) <= 2, "once more where it is verified that the newest frame is whole"
    run.close()


GROUPS = [
    {"momentum": momentum, "weight_decay": weight_decay, "maximize": maximize, "nesterov": nesterov}
    for momentum, weight_decay, maximize, nesterov in itertools.product((0, 0.9), (0, 0.1), (False, True), (False, True))
    if momentum or not nesterov
]


def state_of(optimizer: torch.optim.Optimizer) -> OptimizerState:
    hyper = [tree.pack({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]
    return OptimizerState(OptimizerSpec("optimizer", f"torch.optim.{type(optimizer).__name__}", ""), hyper, [])


@pytest.mark.parametrize("variant", [{}, {"foreach": False}, {"fused": True}], ids=["", "loop", "fused"])
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_sgd_that_is_said_to_only_read_gradients_leaves_them_as_they_are(
    group: dict[str, Any], variant: dict[str, Any]
) -> None:
    params = [nn.Parameter(torch.randn(n)) for n in (1, 7, 64, 40_000)]
    optimizer = torch.optim.SGD(params, lr=0.1, **group, **variant)
    assert _only_reads(state_of(optimizer))
    for _ in range(3):
        grads = [torch.randn_like(p) for p in params]
        then = [g.clone() for g in grads]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
        assert all(torch.equal(g, h) and g._version == 0 for g, h in zip(grads, then, strict=True))
        assert all(g.data_ptr() not in [s.data_ptr() for s in optimizer.state.get(p, {}).values() if s is not None]
                   for p, g in zip(params, grads, strict=True))  # fmt: skip


def test_other_optimizers_are_not_said_to_only_read_gradients() -> None:
    params = [nn.Parameter(torch.zeros(3))]
    assert not _only_reads(state_of(torch.optim.SGD(params, lr=0.1, foreach=True)))
    assert not _only_reads(state_of(torch.optim.Adam(params)))
    assert not _only_reads(state_of(torch.optim.RMSprop(params)))
    assert _only_reads(state_of(torch.optim.AdamW(params, fused=True)))
