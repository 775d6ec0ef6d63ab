"""Two bases of one step: which of them stays, and that there is always one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from crash_disk import Crash, Disk, Nothing, Recorder, Some

from everstep.atoms import Layout
from everstep.errors import CorruptionError, StorageError
from everstep.follow.compact import checked_base
from everstep.format.documents import FOLDED, TRAINER, Manifest
from everstep.store import files
from everstep.store.bases import BaseWriter, Slot, check_base, is_there, read_manifest

STEP = 7


def write(folder: Path, value: float, audit: str, generation: int = 1) -> tuple[BaseWriter, dict[str, Any]]:
    """A base whose one tensor is this value, before it is finished."""
    writer = BaseWriter(str(folder), STEP, [Slot(1, "buffer", "residuals.p", torch.float32, (1000,))], direct=False)
    writer.add(torch.full((1000,), value))
    fields: dict[str, Any] = {
        "run": "00" * 16, "timeline": 1, "generation": generation, "step": STEP, "layout": Layout((), (), ()),
        "optimizers": (), "carried": (), "cursor": b"", "audit": audit, "fingerprint": {},
    }  # fmt: skip
    return writer, fields


def finish(folder: Path, value: float, audit: str, generation: int = 1) -> tuple[str, Manifest]:
    writer, fields = write(folder, value, audit, generation)
    return writer.folder, writer.finish(**fields)


def there(folder: str) -> tuple[str, int]:
    """By whom the base that is there was made, and of which generation; it is whole, and nothing lies beside it."""
    manifest = read_manifest(folder)
    assert manifest is not None
    check_base(folder, manifest)
    assert os.listdir(os.path.dirname(folder)) == [os.path.basename(folder)]
    return manifest.audit, manifest.generation


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        ((1.0, FOLDED, 1), (2.0, TRAINER, 1), (TRAINER, 1)),
        ((1.0, FOLDED, 1), (1.0, TRAINER, 1), (FOLDED, 1)),  # the same, and proven
        ((2.0, TRAINER, 1), (1.0, FOLDED, 1), (TRAINER, 1)),
        ((2.0, TRAINER, 1), (1.0, TRAINER, 1), (TRAINER, 1)),
        ((1.0, TRAINER, 1), (1.0, FOLDED, 2), (FOLDED, 2)),
        ((1.0, TRAINER, 2), (2.0, TRAINER, 1), (TRAINER, 2)),
    ],
)
def test_which_of_two_bases_of_a_step_stays(first: Any, second: Any, left: Any, tmp_path: Path) -> None:
    finish(tmp_path, *first)
    folder, manifest = finish(tmp_path, *second)
    assert there(folder) == left == (manifest.audit, manifest.generation)


@pytest.mark.parametrize("second", [(2.0, TRAINER, 1), (2.0, TRAINER, 2)], ids=["the trainer's", "of the next generation"])
def test_whenever_it_crashes_there_is_one_of_the_two(second: Any, tmp_path: Path) -> None:
    """No other base may lead to this step: a moment without any would lose it."""
    recorder = Recorder()
    with files.observe(recorder.observe, recorder.begin):
        files.make_dir(str(tmp_path / "bases"))
        folder, _ = finish(tmp_path / "bases", 1.0, FOLDED)
        begun = len(recorder.events)
        finish(tmp_path / "bases", *second)
    assert there(folder)[0] == TRAINER
    name = f"bases/{os.path.basename(folder)}"
    disk = Disk(str(tmp_path))
    for recorded in recorder.events[:begun]:
        disk.feed(recorded)
    wholes = {whole_base(disk, Crash(), name)}
    for recorded in recorder.events[begun:]:
        disk.feed(recorded)
        for crash in (Crash(), Nothing(), *(Some(seed, disk.written) for seed in range(8))):
            wholes.add(whole_base(disk, crash, name))
    assert len(wholes) == 2


def whole_base(disk: Disk, crash: Crash, name: str) -> tuple[bytes, bytes]:
    tree = disk.tree(crash)
    manifest, data = tree[f"{name}/manifest.json"], tree[f"{name}/rank-00000.safetensors"]
    assert manifest and data
    return manifest, data


def test_where_names_cannot_be_exchanged_the_followers_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "exchange", lambda one, other: False)
    finish(tmp_path, 1.0, FOLDED)
    folder, manifest = finish(tmp_path, 2.0, TRAINER)
    assert there(folder) == (FOLDED, 1) and manifest.audit == FOLDED
    finish(tmp_path, 2.0, TRAINER, 2)
    assert there(folder) == (TRAINER, 2)


@pytest.mark.parametrize("left", [TRAINER, FOLDED])
def test_both_finish_at_the_same_moment(left: str, tmp_path: Path) -> None:
    """One is quicker after the other has looked."""
    late, quick = write(tmp_path, 2.0 if left == TRAINER else 1.0, TRAINER), write(tmp_path, 1.0, FOLDED)
    is_done: list[bool] = []

    def other_first(op: str, path: str) -> None:
        if op == "rename" and path == late[0].folder and not is_done:
            is_done.append(True)
            quick[0].finish(**quick[1])

    with files.observe(fault=other_first):
        late[0].finish(**late[1])
    assert is_done and read_manifest(late[0].folder).audit == left  # type: ignore[union-attr]


def test_a_name_that_could_not_be_made_durable_is_an_error(tmp_path: Path) -> None:
    writer, fields = write(tmp_path, 1.0, TRAINER)

    def full(op: str, path: str) -> None:
        if op == "sync" and path == str(tmp_path):
            raise OSError(5, "Input/output error")

    with files.observe(fault=full), pytest.raises(StorageError):
        writer.finish(**fields)
    assert is_there(writer.folder)


def test_a_follower_whose_base_was_replaced_while_it_read_it_back_has_the_other(tmp_path: Path) -> None:
    folder, followers = finish(tmp_path, 1.0, FOLDED)
    assert checked_base(folder, followers) is followers
    _, trainers = finish(tmp_path, 2.0, TRAINER)
    assert checked_base(folder, followers).audit == TRAINER
    data = Path(folder, "rank-00000.safetensors")
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptionError):
        checked_base(folder, trainers)
