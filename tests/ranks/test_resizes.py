"""What may happen around a change of the number of ranks: going back to before it, kills in the middle of it, damage.

Ranks are threads (threaded.py). Gradients are set by hand.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from threaded import Threads
from torch import nn
from workers import World

import everstep
from everstep.errors import CorruptionError, MismatchError, UsageError
from everstep.layout import Pattern, Sharded
from everstep.restore.plan import line_of
from everstep.store.runs import RunPath, read_listing
from support import equal

ROWS = 8


class Model(nn.Module):
    """One parameter that is cut by rows, and some that everybody has."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        full = torch.arange(ROWS * 3.0).reshape(ROWS, 3)
        self.cut = nn.Parameter(full.chunk(size)[rank].clone())
        self.others = nn.ParameterList(nn.Parameter(torch.full((5,), float(i))) for i in range(4))
        self.layout: Sequence[Pattern] = [Sharded("cut", 0, rank, size)] if size > 1 else []
        self.rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)

    def set_gradients(self, step: int) -> None:
        full = torch.sin(torch.arange(ROWS * 3.0).reshape(ROWS, 3) + step)
        self.cut.grad = full[self.rows].clone()
        for p in self.others:
            p.grad = torch.cos(p.detach() + step)


def job(
    path: Path, size: int, steps: int, *, at: Any = "latest", finish: bool = True
) -> Callable[[int], tuple[int, dict[str, Any]]]:
    """Resume and train so many steps; not `finish`: leave as if killed. Where it began, and the state there."""

    def work(rank: int) -> tuple[int, dict[str, Any]]:
        model = Model(rank, size)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        run = everstep.attach(model, optimizer, path, layout=model.layout, quiet=True, follower=False)
        try:
            begun = run.resume(at)
            found = {"cut": model.cut.detach().clone(), "others": [p.detach().clone() for p in model.others]}
            for step in range(begun, begun + steps):
                model.set_gradients(step)
                optimizer.step()
                optimizer.zero_grad()
                run.commit()
            run.flush()
        finally:
            run._close(finish=finish)
        return begun, found

    return work


def states(path: Path, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Whole states; in which order names come depends on the ranks that wrote them."""
    found = [everstep.open(path).state(n) for n in steps]
    for state in found:
        state["optimizer"]["state"] = dict(sorted(state["optimizer"]["state"].items()))
        for group in state["optimizer"]["param_groups"]:
            group["params"].sort()
    return found


def damage(path: Path, rank: int, step: int) -> None:
    """The footer of one rank's frame, in a segment that was not finished."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frames = line_of(read_listing(RunPath(path).part(rank))).frames
    frame = frames[step]
    with open(frame.path, "r+b") as f:
        f.truncate(max(each.end_offset for each in frames.values()))  # without an index
        f.seek(frame.footer_offset)
        f.write(bytes(64))


def forget_bases(path: Path, rank: int) -> None:
    """As if the process had been killed before the first base of the newest timeline was finished."""
    newest = max((path / "timelines").iterdir())
    folders = [p for p in newest.rglob(f"bases/rank-{rank:05d}") if p.is_dir()]
    assert folders, list(newest.rglob("*"))
    for folder in folders:
        for each in folder.iterdir():
            shutil.rmtree(each)


@pytest.mark.parametrize(("first", "second"), [(4, 2), (2, 4), (2, 1)])
@pytest.mark.sampled(2)
def test_back_to_before_a_resize(threads: Threads, tmp_path: Path, first: int, second: int) -> None:
    path = tmp_path / "run"
    threads.run(first, job(path, first, 6))
    threads.run(second, job(path, second, 4))
    before = states(path, range(7))
    began = threads.run(second, job(path, second, 3, at=4))
    assert [n for n, _ in began] == [4] * second
    cut = torch.cat([found["cut"] for _, found in began])
    assert torch.equal(cut, before[4]["model"]["cut"])
    assert everstep.open(path).steps == list(range(8))
    after = states(path, range(5))
    assert not [d for a, b in zip(after, before, strict=False) for d in equal(a, b)]
    assert everstep.open(path).verify(deep=True).ok
    assert [n for n, _ in threads.run(second, job(path, second, 1))] == [7] * second


def test_back_under_the_layout_of_then(threads: Threads, tmp_path: Path) -> None:
    path = tmp_path / "run"
    threads.run(2, job(path, 2, 6))
    threads.run(4, job(path, 4, 4))
    before = states(path, range(7))
    assert [n for n, _ in threads.run(2, job(path, 2, 3, at=4))] == [4, 4]
    assert everstep.open(path).steps == list(range(8))
    assert not [d for a, b in zip(states(path, range(5)), before, strict=False) for d in equal(a, b)]


@pytest.mark.parametrize("kills", [1, 2, 3])
def test_a_resize_that_is_killed_again_and_again(threads: Threads, tmp_path: Path, kills: int) -> None:
    path = tmp_path / "run"
    threads.run(4, job(path, 4, 5))
    before = states(path, [5])
    for _ in range(kills):
        assert [n for n, _ in threads.run(2, job(path, 2, 0, finish=False))] == [5, 5]
        forget_bases(path, 1)
    assert not equal(states(path, [5]), before)
    assert [n for n, _ in threads.run(2, job(path, 2, 2))] == [5, 5]
    assert everstep.open(path).steps[-1] == 7


def test_damage_before_a_resize_that_was_killed_is_told(threads: Threads, tmp_path: Path) -> None:
    path = tmp_path / "run"
    threads.run(4, job(path, 4, 5, finish=False))
    threads.run(2, job(path, 2, 0, finish=False))
    damage_step = 3
    newest = max((path / "timelines").iterdir())
    shutil.move(newest, tmp_path / "aside")  # where the damage is found, there is one timeline
    damage(path, 2, damage_step)
    shutil.move(tmp_path / "aside", newest)
    forget_bases(path, 1)
    with pytest.raises(CorruptionError, match="step 5 was durable"):
        threads.run(2, job(path, 2, 1))


def test_back_to_before_damage(threads: Threads, tmp_path: Path) -> None:
    path = tmp_path / "run"
    threads.run(2, job(path, 2, 8, finish=False))
    damage(path, 1, 6)
    with pytest.raises(CorruptionError):
        threads.run(2, job(path, 2, 1))
    assert [n for n, _ in threads.run(2, job(path, 2, 3, at=5))] == [5, 5]
    assert [n for n, _ in threads.run(2, job(path, 2, 1))] == [8, 8]


def test_buffers_of_other_shapes_on_every_rank(threads: Threads, tmp_path: Path) -> None:
    def work(rank: int) -> torch.Tensor:
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        model.register_buffer("counts", torch.full((3 - rank,), float(rank)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False) as run:
            run.resume()
            found = model.counts.clone()  # type: ignore[operator]
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            model.counts.add_(1)  # type: ignore[operator]
            run.commit()
        return found

    threads.run(2, work)
    zero, one = threads.run(2, work)
    assert torch.equal(zero, torch.tensor([1.0, 1.0, 1.0]))
    assert torch.equal(one, torch.tensor([2.0, 2.0]))


def test_state_that_a_part_of_a_parameter_does_not_have_yet(threads: Threads, tmp_path: Path) -> None:
    path = tmp_path / "run"

    def work(rank: int) -> None:
        model = Model(rank, 2)
        optimizer = torch.optim.AdamW([model.cut], 0.01)
        with everstep.attach(model, optimizer, path, layout=model.layout, quiet=True, follower=False) as run:
            run.resume()
            model.set_gradients(0)
            if rank == 1:  # its experts got no tokens
                model.cut.grad = None
            optimizer.step()
            run.commit()

    threads.run(2, work)
    with pytest.raises(MismatchError, match="rank 1 had no"):
        everstep.open(path).state()
    threads.run(2, work)  # as it was written it goes on


def test_tensors_of_other_shapes_that_are_called_the_same(threads: Threads, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        model = nn.Linear(3, 3 + rank)  # two stages of a pipeline, without rename=
        everstep.attach(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run", quiet=True).resume()

    with pytest.raises(UsageError, match=r"weight is \(4, 3\) on rank 1 and \(3, 3\) on rank 0"):
        threads.run(2, work)


@pytest.mark.parametrize("edited", [False, True])
def test_copies_of_parts_are_compared_with_their_own_part(threads: Threads, tmp_path: Path, edited: bool) -> None:
    """As in HSDP: two parts, and two ranks that have each."""

    def work(rank: int) -> None:
        model = Model(rank // 2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        with everstep.attach(model, optimizer, tmp_path / "run", layout=model.layout, quiet=True, follower=False) as run:
            run.resume()
            for step in range(3):
                model.set_gradients(step)
                if edited and step == 1 and rank == 3:
                    model.cut.grad = model.cut.grad * 2  # type: ignore[operator]
                optimizer.step()
                run.commit()

    threads.run(4, work)
    problems = everstep.open(tmp_path / "run").verify(deep=True).problems
    assert len(problems) == edited
    assert not edited or "model: cut is not what rank" in problems[0]


def test_zero_with_a_scheduler(world: World, tmp_path: Path) -> None:
    """Schedulers set learning rates in the outer optimizer, between its steps."""
    first = world.run("jobs:train_zero", str(tmp_path / "run"), ranks=2)
    again = world.run("jobs:train_zero", str(tmp_path / "run"), ranks=2)
    for rank in range(2):
        assert first[rank]["begun"] == 0 and again[rank]["begun"] == 3
        assert again[rank]["rate"] == first[rank]["rate_after"]


@pytest.mark.parametrize("mode", ["delta", "snapshot"])
def test_fsdp_with_a_forward_that_has_no_backward(world: World, tmp_path: Path, mode: str) -> None:
    """After it the outermost module still has the whole parameters that it has gathered."""
    first = world.run("jobs:evaluate_fsdp", str(tmp_path / "run"), mode, ranks=2)
    again = world.run("jobs:evaluate_fsdp", str(tmp_path / "run"), mode, ranks=2)
    for rank in range(2):
        assert first[rank]["begun"] == 0 and again[rank]["begun"] == 3
        assert again[rank]["loss"] == first[rank]["loss_after"]
