"""Bases in parts: each holds some of the atoms, all of them together are the base, and less is none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import everstep
from everstep.errors import CorruptionError
from everstep.format import documents, parts
from everstep.format.documents import Manifest
from everstep.store import bases
from everstep.store.bases import manifest_name, part_file, read_manifest
from everstep.store.parts import part_of
from everstep.store.retention import Retention
from support import equal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of which only the base at step 3 is left: with gradients that are carried, buffers, odd strides."""
    torch.manual_seed(1)
    model = nn.ModuleDict({
        "conv": nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), "norm": nn.BatchNorm1d(8),
        "linear": nn.Linear(8, 5),
    })  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    policy = Retention(bases=1)
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False, retention=policy) as run:
        run.resume()
        for _ in range(3):
            model["linear"](model["norm"](model["conv"](torch.randn(4, 3, 6, 6)).mean((2, 3)))).sum().backward()
            optimizer.step()
            run.commit()
    return tmp_path / "run"


def folder_of(run: Path) -> Path:
    return run / "timelines/0001/bases/000000000003"


def split(run: Path, num: int) -> list[Manifest]:
    """Replace the run's base by parts of it."""
    folder = folder_of(run)
    whole = read_manifest(str(folder))
    assert whole is not None
    data = (folder / "rank-00000.safetensors").read_bytes()
    found = []
    files = {}
    for index in range(num):
        uids = {atom.uid for i, atom in enumerate(whole.layout.atoms) if i % num == index}
        manifest, header, tensors = part_of(whole, uids, (index, num))
        files[part_file((index, num))] = header + b"".join(data[t.offset : t.offset + t.num_bytes] for t in tensors)
        assert manifest.files == {part_file((index, num)): len(files[part_file((index, num))])}
        files[manifest_name((index, num))] = documents.encode(manifest)
        found.append(manifest)
    shutil.rmtree(folder)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return found


@pytest.mark.parametrize("num", [1, 2, 3, 9])
def test_all_parts_are_the_base(run: Path, num: int) -> None:
    before = everstep.open(run).state(3)
    split(run, num)
    history = everstep.open(run)
    assert 3 in history.steps
    assert not equal(history.state(3), before)
    assert history.verify().ok


def test_a_run_goes_on_from_a_base_in_parts(run: Path) -> None:
    split(run, 2)
    model = nn.ModuleDict({
        "conv": nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), "norm": nn.BatchNorm1d(8),
        "linear": nn.Linear(8, 5),
    })  # fmt: skip
    with everstep.attach(model, torch.optim.AdamW(model.parameters()), run, quiet=True, follower=False) as again:
        assert again.resume() == 3
        assert folder_of(run).exists(), "it is not taken for litter"


@pytest.mark.parametrize("missing", ["part-00001-of-00002.json", "part-00000-of-00002.json"])
def test_less_than_all_parts_is_no_base_and_it_says_what_is_there(run: Path, missing: str) -> None:
    split(run, 2)
    os.unlink(folder_of(run) / missing)
    assert 3 not in everstep.open(run).steps
    there = "part-00000-of-00002" if "00001" in missing[:10] else "part-00001-of-00002"
    with pytest.raises(everstep.EverstepError, match=f"of step 3 {there}.*put the folders of all shadows"):
        everstep.open(run).state(3)


def test_a_part_whose_file_is_gone_or_damaged_is_damage(run: Path) -> None:
    split(run, 2)
    path = folder_of(run) / part_file((1, 2))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "part-00001" in str(everstep.open(run).verify())
    os.unlink(path)
    with pytest.raises(CorruptionError, match="part-00001"):
        everstep.open(run).state(3)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"cursor": "AA=="}, "cursor"), ({"step": 4}, "step"), ({"tensors": ()}, "not all"), ({"run": "ff"}, "run")],
    ids=["cursor", "step", "tensors", "run"],
)
def test_parts_of_different_states_are_not_joined(run: Path, change: dict[str, Any], said: str) -> None:
    one, two = split(run, 2)
    assert parts.join([one, two], "here").part is None
    with pytest.raises(CorruptionError, match=said):
        parts.join([one, msgspec.structs.replace(two, **change)], "here")
    with pytest.raises(CorruptionError, match="twice"):
        parts.join([one, two, two], "here")


def test_parts_of_different_generations_are_no_base(run: Path) -> None:
    _, two = split(run, 2)
    newer = msgspec.structs.replace(two, generation=two.generation + 1)
    (folder_of(run) / manifest_name((1, 2))).write_bytes(documents.encode(newer))
    assert read_manifest(str(folder_of(run))) is None


def test_the_manifests_go_first(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split(run, 2)
    removed: list[str] = []
    real = bases.files.remove
    monkeypatch.setattr(bases.files, "remove", lambda path: (removed.append(os.path.basename(path)), real(path)))
    bases.remove_base(str(folder_of(run)))
    assert [name[:4] for name in removed[:2]] == ["part", "part"] and not folder_of(run).exists()
