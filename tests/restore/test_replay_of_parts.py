"""A reader replays what it wants of what others have written, every bit as it was; one reader checks each hash."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from torch import nn

import everstep
from everstep.atoms import FINE_ELEMENTS, PIECE_ELEMENTS, SMALL_BUFFER_BYTES, Atom, Layout, piece_elements
from everstep.boxes import Box
from everstep.errors import AuditError, CorruptionError
from everstep.fold import State
from everstep.fold.fused import FusedAdam
from everstep.memory import same_bits
from everstep.restore import execute
from everstep.restore.join import Source, fetch
from everstep.restore.parts import BLOCK_ELEMENTS, blocks, has_lot, has_piece

ROWS, COLUMNS = 101, 37
STEPS = 3


@st.composite
def divided(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A number of elements, and where readers divide them among themselves."""
    numel = draw(st.integers(1, 3 * PIECE_ELEMENTS))
    cuts = sorted(draw(st.sets(st.integers(0, numel), max_size=4)) | {0, numel})
    return numel, list(itertools.pairwise(cuts))


@given(st.integers(0, 1 << 24), st.booleans())
def test_fine_pieces_have_a_size_between_bounds(numel: int, fine: bool) -> None:
    size = piece_elements(numel, fine=fine)
    assert size % BLOCK_ELEMENTS == 0
    if fine:
        assert size <= 2 * FINE_ELEMENTS
        assert size < numel or numel <= SMALL_BUFFER_BYTES


@given(st.integers(1, 1 << 5), st.integers(0, 3))
def test_ranks_that_are_twice_as_many_or_more_share_no_fine_piece(rows: int, doublings: int) -> None:
    share = rows * FINE_ELEMENTS
    assert share % piece_elements(share << doublings, fine=True) == 0


@given(divided(), st.sets(st.integers(0, 3)), st.booleans(), st.data())
def test_blocks_hold_what_is_wanted_and_whole_pieces_where_these_are_asked_for(
    parts: tuple[int, list[tuple[int, int]]], pieces: set[int], fine: bool, data: st.DataObject
) -> None:
    numel, ranges = parts
    size = piece_elements(numel, fine=fine)
    wanted = data.draw(st.lists(st.sampled_from(ranges), unique=True))
    found = blocks(wanted, numel, pieces, size)
    assert found
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(found))
    assert all(start % BLOCK_ELEMENTS == 0 and (stop % BLOCK_ELEMENTS == 0 or stop == numel) for start, stop in found)
    assert all(any(a <= start and stop <= b for a, b in found) for start, stop in wanted)
    for piece in pieces:
        if any(start < (piece + 1) * size and stop > piece * size for start, stop in found):
            assert has_piece(found, piece, numel, size)


@given(divided(), st.integers(0, 2**64 - 1), st.booleans())
def test_of_readers_that_divide_an_atom_one_checks_each_piece(
    parts: tuple[int, list[tuple[int, int]]], uid: int, fine: bool
) -> None:
    numel, ranges = parts
    size = piece_elements(numel, fine=fine)
    for piece in range(-(-numel // size)):
        assert sum(has_lot([each], uid, piece, numel, size) for each in ranges) == 1


class ByNorm(torch.optim.Optimizer):
    """Every element of a parameter depends on all others."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["exp_avg"] = state.get("exp_avg", torch.zeros_like(p)) + p.grad / (1 + p.norm())
            state["exp_avg_sq"] = state["exp_avg"].square()
            state["step"] = state.get("step", 0) + 1
            p.sub_(state["exp_avg"], alpha=self.param_groups[0]["lr"])


def record(
    folder: Path, build: Callable[[Any], torch.optim.Optimizer], rows: int = ROWS
) -> tuple[Path, dict[str, Any]]:
    """A run as a kill would leave it, and the weight and its moments at that time."""
    torch.manual_seed(0)
    model = nn.Linear(COLUMNS, rows)
    optimizer = build(model.parameters())
    for steps in (1, STEPS - 1):
        with everstep.attach(model, optimizer, folder / "run", quiet=True, follower=False) as run:
            run.resume()
            for _ in range(steps):
                model(torch.randn(3, COLUMNS)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                run.commit()
            run.flush()
            shutil.copytree(folder / "run", folder / f"killed-{run.step}")
    return folder / f"killed-{STEPS}", {"": model.weight.detach().clone(), **optimizer.state[model.weight]}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return record(tmp_path_factory.mktemp("parts"), lambda params: torch.optim.AdamW(params, 0.01, fused=True))


def wanted(source: Source, low: int, high: int) -> Mapping[int, Atom]:
    """These rows of everything."""
    return {
        uid: structs.replace(
            atom, boxes=((0, Box((low, *[0] * (len(atom.shape) - 1)), (high - low, *atom.shape[1:]))),)
        )
        for uid, atom in source.atoms.items()
    }


def read(path: Path, cuts: list[int], reader: int) -> State:
    source = everstep.open(path)._source("latest", None)
    return fetch(source, wanted(source, *cuts[reader : reader + 2]), rank=reader, world_size=len(cuts) - 1).state


def check(path: Path, state: dict[str, Any], cuts: list[int]) -> None:
    for reader, (low, high) in enumerate(itertools.pairwise(cuts)):
        found = read(path, cuts, reader)
        uid = next(atom.uid for atom in found.layout.atoms if atom.name == "weight")
        values = found.optimizers["optimizer"].state[uid]
        assert same_bits(found.tensors[uid], state[""][low:high])
        assert same_bits(values["exp_avg"], state["exp_avg"][low:high])
        assert same_bits(values["exp_avg_sq"], state["exp_avg_sq"][low:high])
        assert values["step"] == STEPS


@pytest.mark.parametrize("cuts", [[0, 50, ROWS], [0, 1, 2, 99, ROWS], [0, 34, 68, ROWS]])
def test_parts_of_a_replayed_parameter_have_every_bit(recorded: tuple[Path, dict[str, Any]], cuts: list[int]) -> None:
    check(*recorded, cuts)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 0.01, fused=True)


@pytest.mark.parametrize("fine", [False, True])
def test_parts_of_a_parameter_of_several_pieces_have_every_bit_whoever_replays_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fine: bool
) -> None:
    monkeypatch.setattr(Layout, "fine", fine)
    rows = int(2.5 * PIECE_ELEMENTS) // COLUMNS
    check(*record(tmp_path, adamw, rows), [0, rows // 3, rows // 2, rows])


@pytest.mark.parametrize("fine_first", [False, True])
def test_frames_of_one_piece_size_go_on_from_a_base_and_frames_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fine_first: bool
) -> None:
    rows = 3 * FINE_ELEMENTS // COLUMNS
    torch.manual_seed(0)
    model = nn.Linear(COLUMNS, rows)
    optimizer = adamw(model.parameters())
    path = tmp_path / "killed-0"
    for generation, fine in enumerate([fine_first, not fine_first, fine_first]):
        monkeypatch.setattr(Layout, "fine", fine)
        with everstep.attach(model, optimizer, path, quiet=True, follower=False) as run:
            run.resume()
            model(torch.randn(3, COLUMNS)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
            run.flush()
            path = tmp_path / f"killed-{generation + 1}"
            shutil.copytree(run.path, path)
    plan = everstep.open(path).plans()[0]
    frames = execute.open_frames(everstep.open(path)._source("latest", None).era.lines[0], plan)[0]
    assert plan.base.step == 0 and [f.footer.fine for f in frames] == [fine_first, not fine_first, fine_first]
    check(path, {"": model.weight.detach().clone(), **optimizer.state[model.weight]}, [0, rows // 3, rows // 2, rows])


@pytest.mark.parametrize("rows", [ROWS, 3 * PIECE_ELEMENTS // COLUMNS])
def test_what_cannot_be_replayed_in_parts_is_replayed_whole_from_all_of_its_values(tmp_path: Path, rows: int) -> None:
    everstep.register(ByNorm)
    check(*record(tmp_path, ByNorm, rows), [0, rows // 2, rows])


def test_what_is_handed_out_holds_no_more_memory_than_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layout, "fine", True)
    rows = 8 * FINE_ELEMENTS // 64
    torch.manual_seed(0)
    model = nn.Linear(64, rows, bias=False)
    optimizer = adamw(model.parameters())
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False) as run:
        run.resume()
        model(torch.randn(3, 64)).square().sum().backward()
        optimizer.step()
        run.commit()
    for reader in range(3):
        found = read(tmp_path / "run", [0, rows // 4, rows // 2, rows], reader)
        values = found.optimizers["optimizer"].state
        for tensor in (*found.tensors.values(), *(v for state in values.values() for v in state.values() if v.dim())):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            assert tensor.is_contiguous() and tensor.shape[1] == 64


@pytest.mark.parametrize("where", ["base", "frame"])
def test_damage_of_a_fine_piece_is_found_by_the_reader_that_uses_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(Layout, "fine", True)
    rows = 5 * FINE_ELEMENTS // COLUMNS // 256 * 256  # four pieces
    path, _ = record(tmp_path, adamw, rows)
    plan = everstep.open(path).plans()[0]
    shutil.rmtree(Path(plan.base_folder).parent / f"{0:012d}")  # else a damaged base is not needed
    weight = next(t for t in plan.base.tensors if t.role == "param" and len(t.shape) == 2)
    size = piece_elements(rows * COLUMNS, fine=True)
    if where == "base":
        file, at = Path(plan.base_folder) / "rank-00000.safetensors", weight.offset + 4 * (2 * size + 5)
    else:
        frame = execute.open_frames(everstep.open(path)._source("latest", None).era.lines[0], plan)[0][0]
        ordinals = [i for i, h in enumerate(frame.headers) if h.uid == weight.uid and h.start == 2 * size]
        file, at = Path(frame.entry.path), frame._offsets[ordinals[0]] + 128 + 20
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    cuts = [0, rows // 2, 3 * rows // 4, rows]
    read(path, cuts, 0)
    read(path, cuts, 2)
    with pytest.raises(CorruptionError) as found:
        read(path, cuts, 1)
    assert file.name in str(found.value)
    assert f"step {plan.base.step if where == 'base' else plan.base.step + 1}" in str(found.value)


def test_together_readers_replay_what_they_want_and_each_piece_as_a_whole_once(
    recorded: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[int] = []
    needed = execute._needed

    def told(state: State, *rest: Any) -> Any:
        found = needed(state, *rest)
        replayed.append(max(sum(stop - start for start, stop in ranges) for ranges in found.values()))
        return found

    monkeypatch.setattr(execute, "_needed", told)
    for reader in range(4):
        read(recorded[0], [0, 25, 50, 75, ROWS], reader)
    whole = ROWS * COLUMNS
    assert sorted(n == whole for n in replayed) == [False, False, False, True]
    assert all(n < whole / 3 for n in replayed if n != whole)


def test_another_result_is_noticed_by_one_of_the_readers(
    recorded: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = FusedAdam.step

    def other(self: FusedAdam, grads: Sequence[torch.Tensor]) -> bool:
        return step(self, [g + 1 if g.numel() > ROWS else g for g in grads])

    monkeypatch.setattr(FusedAdam, "step", other)
    noticed = 0
    for reader in range(4):
        try:
            read(recorded[0], [0, 25, 50, 75, ROWS], reader)
        except AuditError as e:
            noticed += 1
            assert "weight" in str(e)
    assert noticed == 1
