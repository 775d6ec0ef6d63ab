"""Runs under hand-written parallelism go on under another: shards, fused parts, padding, means, what is local, what is tied.

Ranks are threads here: what they say to each other goes over a store, and nothing else is shared. Gradients are set by hand.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from threaded import Threads
from torch import nn

import everstep
from everstep.errors import InexactWarning, MismatchError, UsageError
from everstep.layout import Averaged, Fused, Local, Padded, Pattern, Sharded, Tied
from everstep.run import Run

STEPS = 3


def module(**tensors: torch.Tensor) -> nn.Module:
    """Parameters by name; `_` in front makes it a buffer."""
    made = nn.Module()
    for name, tensor in tensors.items():
        if name.startswith("_"):
            made.register_buffer(name[1:], tensor.clone())
        else:
            made.register_parameter(name, nn.Parameter(tensor.clone()))
    return made


def attach(model: nn.Module, path: Path, layout: Sequence[Pattern] = ()) -> tuple[Run, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return everstep.attach(model, optimizer, path, layout=layout, quiet=True, follower=False), optimizer


Gradient = Callable[[str, int], torch.Tensor]


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, gradient: Gradient) -> None:
    with run:
        start = run.resume()
        for step in range(start, start + STEPS):
            for name, p in model.named_parameters():
                p.grad = gradient(name, step).clone()
            optimizer.step()
            optimizer.zero_grad()
            run.commit()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: p.detach().clone() for name, p in [*model.named_parameters(), *model.named_buffers()]}
    for name, p in model.named_parameters():
        found |= {f"{name}.{key}": value.clone() for key, value in optimizer.state[p].items()}
    return found


def public(history: everstep.History) -> dict[str, torch.Tensor]:
    state = history.state()
    found = dict(state["model"])
    for name, values in state["optimizer"]["state"].items():
        found |= {f"{name}.{key}": value for key, value in values.items()}
    return found


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


# -- what is cut ------------------------------------------------------------------------------------------------------


def chunk(full: torch.Tensor, count: int, index: int, dim: int = 0) -> torch.Tensor:
    chunks = torch.chunk(full, count, dim)
    return chunks[index] if index < len(chunks) else full.narrow(dim, 0, 0)


class Cut:
    """One global tensor of 12 x 3 (attention's, sizes 8 + 2 + 2; an embedding of 11 rows), cut in several ways."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows = -(-11 // (4 * count)) * 4 * count  # padded to a multiple

    def layout(self, index: int) -> list[Pattern]:
        return [
            Fused("qkv", 0, (8, 2, 2), index, self.count),
            Sharded("wide", 1, index, self.count, size=7),
            Sharded("embedding", 0, index, self.count),
            Padded("embedding", 0, 11),
        ]

    def part(self, name: str, full: torch.Tensor, index: int) -> torch.Tensor:
        if name == "qkv":
            return torch.cat([chunk(part, self.count, index) for part in full.split((8, 2, 2))])
        if name == "wide":
            return chunk(full, self.count, index, 1)
        if name == "embedding":
            padded = torch.cat([full, torch.zeros(self.rows - 11, 3)])
            return chunk(padded, self.count, index)
        return full

    def build(self, index: int, full: dict[str, torch.Tensor]) -> nn.Module:
        return module(**{name: self.part(name, tensor, index) for name, tensor in full.items()})


def numbers(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"qkv": (12, 3), "wide": (4, 7), "embedding": (11, 3), "norm": (3,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def gradients(name: str, step: int) -> torch.Tensor:
    return numbers(100 + step)[name]


def trained(cut: Cut, index: int, path: Path) -> dict[str, torch.Tensor]:
    model = cut.build(index, numbers(0))
    run, optimizer = attach(model, path, cut.layout(index))
    train(run, model, optimizer, lambda name, step: cut.part(name, gradients(name, step), index))
    return everything(model, optimizer)


@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2)])
def test_what_is_sharded_fused_and_padded_goes_on_under_another_number_of_ranks(
    threads: Threads, tmp_path: Path, source: int, target: int
) -> None:
    one = Cut(1)
    one.rows = 11
    plain = one.build(0, numbers(0))
    plain_run, plain_optimizer = threads.run(1, lambda _: attach(plain, tmp_path / "plain"))[0]
    threads.run(1, lambda _: train(plain_run, plain, plain_optimizer, gradients))

    first, second = Cut(source), Cut(target)
    threads.run(source, lambda rank: trained(first, rank, tmp_path / "run"))
    assert_same(public(everstep.open(tmp_path / "run")), everything(plain, plain_optimizer))
    parts = threads.run(target, lambda rank: trained(second, rank, tmp_path / "run"))

    plain_run, _ = threads.run(1, lambda _: attach(plain, tmp_path / "plain"))[0]
    plain_optimizer = next(iter(plain_run._opened.training.optimizers.values()))
    threads.run(1, lambda _: train(plain_run, plain, plain_optimizer, gradients))
    expected = everything(plain, plain_optimizer)
    history = everstep.open(tmp_path / "run")
    assert history.steps == list(range(2 * STEPS + 1))
    assert_same(public(history), expected)
    assert history.compare(everstep.open(tmp_path / "plain")).ok
    for rank, part in enumerate(parts):
        for key, value in expected.items():
            name = key.partition(".")[0]
            assert torch.equal(part[key], second.part(name, value, rank) if value.dim() else value), key


def test_padding_is_kept_under_the_same_layout_and_zero_under_another(threads: Threads, tmp_path: Path) -> None:
    def build(rows: int) -> tuple[nn.Module, Run, torch.optim.Optimizer]:
        model = module(e=torch.arange(rows * 2.0).reshape(rows, 2) + 1)
        return model, *threads.run(1, lambda _: attach(model, tmp_path / "run", [Padded("e", 0, 3)]))[0]

    model, run, optimizer = build(4)
    threads.run(1, lambda _: train(run, model, optimizer, lambda n, s: torch.ones(4, 2)))
    before = everything(model, optimizer)
    assert bool(before["e"][3].all())
    assert public(everstep.open(tmp_path / "run"))["e"].shape == (3, 2)
    model, run, optimizer = build(4)
    with run:
        assert run.resume() == STEPS
        assert_same(everything(model, optimizer), before)
    model, run, optimizer = build(6)
    with run:
        assert run.resume() == STEPS
        after = everything(model, optimizer)
    for key in ("e", "e.exp_avg", "e.exp_avg_sq"):
        assert torch.equal(after[key][:3], before[key][:3])
        assert not after[key][3:].any()
    assert len(everstep.open(tmp_path / "run").timelines) == 2


def test_a_history_is_restored_into_a_shard(threads: Threads, tmp_path: Path) -> None:
    threads.run(2, lambda rank: trained(Cut(2), rank, tmp_path / "run"))
    expected = public(everstep.open(tmp_path / "run"))
    cut = Cut(4)
    model = cut.build(3, numbers(1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    assert everstep.open(tmp_path / "run").restore(model, optimizer, layout=cut.layout(3)) == STEPS
    for key, value in everything(model, optimizer).items():
        full = expected[key]
        assert torch.equal(value, cut.part(key.partition(".")[0], full, 3) if full.dim() else full), key


# -- what each rank has for itself ------------------------------------------------------------------------------------


def own(
    threads: Threads, tmp_path: Path, num_ranks: int, layout: list[Pattern], seed: float = 0.0
) -> list[dict[str, torch.Tensor]]:
    def work(rank: int) -> dict[str, torch.Tensor]:
        model = module(w=torch.full((5,), seed + rank), _residual=torch.full((2,), seed + 10.0 * rank))
        run, optimizer = attach(model, tmp_path / "run", layout)
        with run:
            run.resume()
            found = everything(model, optimizer)
            for _ in range(2):
                model.w.grad = torch.linspace(-1, 1, 5) * (rank + 1)  # type: ignore[union-attr]
                optimizer.step()
                model.residual += 1 + rank  # type: ignore[operator]
                run.commit()
            return found | {f"then.{k}": v for k, v in everything(model, optimizer).items()}

    return threads.run(num_ranks, work)


def test_what_is_averaged_is_kept_by_as_many_ranks_and_else_the_mean_of_all(threads: Threads, tmp_path: Path) -> None:
    layout: list[Pattern] = [Averaged("w"), Local("residual")]
    first = own(threads, tmp_path, 3, layout)
    assert not torch.equal(first[0]["then.w"], first[2]["then.w"])
    second = own(threads, tmp_path, 3, layout, seed=77.0)
    for before, after in zip(first, second, strict=True):
        for key in ("w", "residual", "w.exp_avg", "w.exp_avg_sq"):
            assert torch.equal(after[key], before[f"then.{key}"])
    third = own(threads, tmp_path, 2, layout, seed=77.0)
    for after in third:
        for key in ("w", "w.exp_avg", "w.exp_avg_sq"):
            mean = sum(part[f"then.{key}"].double() for part in second) / 3  # type: ignore[union-attr]
            assert torch.equal(after[key], mean.float())
        assert after["w.step"] == 4
    assert torch.equal(third[1]["residual"], second[1]["then.residual"])


def test_what_is_local_stays_with_its_rank_and_a_new_rank_keeps_what_it_has(threads: Threads, tmp_path: Path) -> None:
    layout: list[Pattern] = [Averaged("w"), Local("residual")]
    first = own(threads, tmp_path, 2, layout)
    with pytest.warns(InexactWarning, match="residual"):
        second = own(threads, tmp_path, 3, layout, seed=77.0)
    for rank in (0, 1):
        assert torch.equal(second[rank]["residual"], first[rank]["then.residual"])
    assert torch.equal(second[2]["residual"], torch.full((2,), 97.0))


def test_replicas_that_differ_are_refused_unless_they_are_declared(threads: Threads, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="other values on rank 1"):
        own(threads, tmp_path, 2, [])


# -- what is one tensor on several ranks ------------------------------------------------------------------------------


def test_a_tied_weight_is_stored_once_and_goes_on_in_one_process(threads: Threads, tmp_path: Path) -> None:
    weight = numbers(0)["embedding"]

    def stage(rank: int) -> int:
        model = module(**{"head" if rank else "embedding": weight, f"own{rank}": torch.ones(2)})
        run, optimizer = attach(model, tmp_path / "run", [Tied("head", "embedding")])
        train(run, model, optimizer, lambda name, step: torch.ones(2) if "own" in name else gradients("embedding", step))
        return len(run._opened.inventory().tensors)

    assert sum(threads.run(2, stage)) == 3
    state = everstep.open(tmp_path / "run").state()
    assert state["model"].keys() == {"embedding", "head", "own0", "own1"}

    tied = module(embedding=weight, own0=torch.ones(2), own1=torch.ones(2))
    tied.head = tied.embedding
    optimizer = torch.optim.AdamW(tied.parameters(), 0.01)
    assert everstep.open(tmp_path / "run").restore(tied, optimizer) == STEPS
    assert torch.equal(tied.embedding, state["model"]["head"])  # type: ignore[arg-type]


# -- groups -----------------------------------------------------------------------------------------------------------


def grouped(model: nn.Module, groups: list[list[str]]) -> torch.optim.Optimizer:
    """Each parameter's learning rate is told by its name."""
    return torch.optim.AdamW([{"params": [getattr(model, name) for name in names], "lr": rate(names)} for names in groups])


def rate(names: list[str]) -> float:
    return 0.1 if names[0].startswith("fast") else 0.001


@pytest.mark.parametrize("stages", [([["fast_a"], ["slow_b"]], [["slow_c"]]), ([["slow_c"]], [["fast_a"], ["slow_b"]])])
def test_a_parameter_keeps_its_hyperparameters_whatever_the_groups_of_each_rank(
    threads: Threads, tmp_path: Path, stages: tuple[list[list[str]], list[list[str]]]
) -> None:
    def stage(rank: int) -> None:
        model = module(**{name: torch.ones(3) for group in stages[rank] for name in group})
        optimizer = grouped(model, stages[rank])
        run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
        train(run, model, optimizer, lambda name, step: torch.ones(3))

    threads.run(2, stage)
    model = module(fast_a=torch.zeros(3), slow_b=torch.zeros(3), slow_c=torch.zeros(3))
    for groups in ([["slow_c", "slow_b"], ["fast_a"]], [["slow_b"], ["fast_a"], ["slow_c"]]):
        optimizer = grouped(model, groups)
        for given in optimizer.param_groups:
            given["lr"] = 7.0
        everstep.open(tmp_path / "run").restore(model, optimizer)
        assert [g["lr"] for g in optimizer.param_groups] == [rate(names) for names in groups]
        assert all(int(values["step"]) == STEPS for values in optimizer.state.values())
    optimizer = grouped(model, [["slow_b", "slow_c", "fast_a"]])
    with pytest.raises(MismatchError, match="group 0"):
        everstep.open(tmp_path / "run").restore(model, optimizer)


class Running(torch.optim.Optimizer):
    """State of other kinds than Adam's: names, numbers, a tensor of the parameter's shape in another type."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["mood"] = "good"
                state["times"] = state.get("times", 0) + 1
                state["peak"] = torch.maximum(state.get("peak", torch.zeros_like(p).double()), p.grad.double().abs())
                p.sub_((p.grad / (1 + state["peak"].float())), alpha=group["lr"])


def test_any_optimizer_s_state_is_cut_and_joined_by_name(threads: Threads, tmp_path: Path) -> None:
    everstep.register(Running)
    full = numbers(0)["qkv"]

    def shard(rank: int) -> None:
        model = module(w=full.chunk(2)[rank])
        optimizer = Running(model.parameters())
        run = everstep.attach(
            model, optimizer, tmp_path / "run", quiet=True, follower=False, layout=[Sharded("w", 0, rank, 2)]
        )
        train(run, model, optimizer, lambda name, step: gradients("qkv", step).chunk(2)[rank])

    threads.run(2, shard)
    model = module(w=torch.zeros(4, 3))
    optimizer = Running(model.parameters())
    everstep.open(tmp_path / "run").restore(model, optimizer, layout=[Sharded("w", 0, 1, 3)])
    peak = torch.stack([gradients("qkv", step).double().abs() for step in range(STEPS)]).amax(0)
    state = optimizer.state[model.w]  # type: ignore[index]
    assert torch.equal(state["peak"], peak[4:8])
    assert (state["mood"], state["times"]) == ("good", STEPS)


@pytest.fixture(autouse=True)
def _no_other_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("default", category=InexactWarning)
        yield
