"""Parts of ranks are read into their place and replayed there, side by side: what comes of it is what they had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from threaded import Threads
from torch import nn

import everstep
from everstep.errors import CorruptionError
from everstep.layout import Pattern, Sharded
from everstep.restore import join
from support import crash, equal

ROWS, COLUMNS = 90, 1024
NAMES = ("columns", "plain", "rows", "uneven")


@pytest.fixture(params=["side by side", "one after another"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "ALONE_BYTES", 0 if request.param == "side by side" else 1 << 40)
    monkeypatch.setattr(join.os, "cpu_count", lambda: 2)


def full(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"rows": (ROWS, COLUMNS), "uneven": (7, 300), "columns": (40, 66), "plain": (5,)}
    return {name: torch.randn(shapes[name], generator=generator) for name in NAMES}


def cut(tensors: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    dims = {"rows": 0, "uneven": 0, "columns": 1}
    return {n: t.chunk(size, dims[n])[rank] if n in dims else t for n, t in tensors.items()}


def layout(rank: int, size: int) -> list[Pattern]:
    return [
        Sharded("rows", 0, rank, size, size=ROWS),
        Sharded("uneven", 0, rank, size, size=7),
        Sharded("columns", 1, rank, size, size=66),
    ]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01, momentum=0.9)


def record(threads: Threads, path: Path, build: Callable[[Any], Any], *, bases: int, size: int = 2) -> dict[str, Any]:
    """A run of several ranks that was killed, and what they had at last. `bases`: how often it was closed before."""

    models = [
        nn.ParameterDict({name: nn.Parameter(t.clone()) for name, t in cut(full(0), rank, size).items()})
        for rank in range(size)
    ]
    optimizers = [build(model.parameters()) for model in models]

    def work(rank: int, is_last: bool) -> None:
        model, optimizer = models[rank], optimizers[rank]
        run = everstep.attach(model, optimizer, path, layout=layout(rank, size), quiet=True, follower=False, audit="full")
        start = run.resume()
        for step in range(start, start + 3):
            for name, grad in cut(full(100 + step), rank, size).items():
                model[name].grad = grad.clone()
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
        run.flush()
        (crash if is_last else type(run).close)(run)

    for launch in range(bases + 1):
        threads.run(size, lambda rank, is_last=launch == bases: work(rank, is_last))
    parts = [
        {
            "model": {n: p.detach().clone() for n, p in model.items()},
            "state": {n: {k: v for k, v in optimizer.state[p].items() if v is not None} for n, p in model.items()},
        }
        for model, optimizer in zip(models, optimizers, strict=True)
    ]

    def whole(name: str, of: Callable[[dict[str, Any]], torch.Tensor]) -> torch.Tensor:
        found = [of(part) for part in parts]
        dim = {"rows": 0, "uneven": 0, "columns": 1}.get(name)
        return found[0] if dim is None or not found[0].dim() else torch.cat(found, dim)

    return {
        "model": {n: whole(n, lambda part, n=n: part["model"][n]) for n in NAMES},
        "state": {
            n: {k: whole(n, lambda part, n=n, k=k: part["state"][n][k]) for k in parts[0]["state"][n]} for n in NAMES
        },
    }


def assert_same(expected: dict[str, Any], state: dict[str, Any]) -> None:
    assert not equal(expected["model"], {name: state["model"][name] for name in NAMES})
    assert not equal(expected["state"], {name: state["optimizer"]["state"][name] for name in NAMES})


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many elements were read straight into what is joined: of parameters, and by names of optimizer state."""
    counts: dict[str, int] = {}
    original = join._Joiner.place

    def place(self: Any, rank: int, uid: int, slot: Any, dtype: torch.dtype, first: int, end: int) -> Any:
        found = original(self, rank, uid, slot, dtype, first, end)
        if found is not None:
            counts[slot[1]] = counts.get(slot[1], 0) + end - first
        return found

    monkeypatch.setattr(join._Joiner, "place", place)
    return counts


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("build", [adamw, fused, sgd])
@pytest.mark.parametrize("bases", [0, 1])
def test_parts_are_joined_into_what_the_ranks_had(
    threads: Threads, tmp_path: Path, placed: dict[str, int], build: Callable[[Any], Any], bases: int
) -> None:
    """What is cut by rows is read and replayed in its place. With a base of step 0 optimizer state comes to be in the
    replay, and is joined afterwards."""
    expected = record(threads, tmp_path / "run", build, bases=bases)
    num_threads = torch.get_num_threads()
    state = everstep.open(tmp_path / "run").state()
    assert_same(expected, state)
    assert torch.get_num_threads() == num_threads
    assert placed["value"] == ROWS * COLUMNS + 7 * 300
    assert all(count == placed["value"] for count in placed.values()) and (len(placed) > 1) == bool(bases)


@pytest.mark.usefixtures("way")
def test_a_part_that_is_damaged_is_an_error_and_no_state(threads: Threads, tmp_path: Path) -> None:
    record(threads, tmp_path / "run", adamw, bases=1)
    (log,) = (tmp_path / "run").glob("timelines/*/log/rank-00001/g000002-*.frames")
    data = bytearray(log.read_bytes())
    data[20_000] ^= 1
    log.write_bytes(data)
    with pytest.raises(CorruptionError, match="rank-00001"):
        everstep.open(tmp_path / "run").state()


@pytest.mark.usefixtures("way")
def test_what_a_damaged_base_has_led_to_is_not_what_is_joined(
    threads: Threads, tmp_path: Path, placed: dict[str, int]
) -> None:
    """The older base is taken, and what has been read into its place by then is read over."""
    expected = record(threads, tmp_path / "run", fused, bases=2)
    newest = sorted((tmp_path / "run").glob("timelines/*/bases/rank-00001/0*/*.safetensors"))[-1]
    data = bytearray(newest.read_bytes())
    data[-40] ^= 1  # in the last tensor
    newest.write_bytes(data)
    state = everstep.open(tmp_path / "run").state()
    assert_same(expected, state)
    assert placed["value"] > ROWS * COLUMNS + 7 * 300


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_of_many_ranks_no_more_than_there_are_cores_are_read_at_once(
    threads: Threads, tmp_path: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "ALONE_BYTES", 0)
    monkeypatch.setattr(join.os, "cpu_count", lambda: 2)
    expected = record(threads, tmp_path / "run", fused, bases=1, size=num_ranks)
    reading, most = [0], [0]
    original = join.Source.part

    def part(self: Any, *args: Any, **options: Any) -> Any:
        reading[0] += 1
        most[0] = max(most[0], reading[0])
        try:
            assert options["num_workers"] == 1
            return original(self, *args, **options)
        finally:
            reading[0] -= 1

    monkeypatch.setattr(join.Source, "part", part)
    state = everstep.open(tmp_path / "run").state()
    assert most[0] <= 2
    assert_same(expected, state)
