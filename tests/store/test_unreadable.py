"""Bytes that the disk does not give back are damage as any other: what does not need them comes back all the same."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import CorruptionError, EverstepError, UnreadableError
from everstep.store import files
from truth import Truth, crash, different


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(32, 8)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.fixture
def trained(tmp_path: Path) -> Truth:
    """Bases at 0, 5 and 10, a log up to 12 in one segment, killed."""
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False, base_interval=5)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for _ in range(12):
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.commit(wait=True)
        run._capture.snapshot.wait()
    crash(run)
    return truth


@contextmanager
def unreadable(*names: str) -> Iterator[None]:
    """Files whose path has one of these in it cannot be read."""

    def fault(op: str, path: str) -> None:
        if op == "read" and any(name in path for name in names):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with files.observe(fault=fault):
        yield


def bad_sectors(monkeypatch: Any, path: Path, first: int, end: int) -> None:
    """These bytes of a file cannot be read."""
    inode = path.stat().st_ino

    def check(fd: int, offset: int, num_bytes: int) -> None:
        if os.fstat(fd).st_ino == inode and offset < end and offset + num_bytes > first:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    pread, preadv = os.pread, os.preadv

    def bad_pread(fd: int, num_bytes: int, offset: int) -> bytes:
        check(fd, offset, num_bytes)
        return pread(fd, num_bytes, offset)

    def bad_preadv(fd: int, buffers: Any, offset: int) -> int:
        check(fd, offset, sum(len(b) for b in buffers))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "pread", bad_pread)
    monkeypatch.setattr(os, "preadv", bad_preadv)


def frames_of(run: str) -> tuple[Path, list[Any]]:
    plan = everstep.open(run).plan(12)
    return Path(plan.frames[-1].path), [everstep.open(run).plan(n).frames for n in range(13)]


@pytest.mark.parametrize("name", ["000000000010/rank-00000.safetensors", "000000000010/manifest.json"])
def test_an_older_base_is_taken_where_the_newest_cannot_be_read(name: str, trained: Truth) -> None:
    run = trained.run.path
    with unreadable(name):
        history = everstep.open(run)
        assert different(trained.states[12], history.state()) == []
        report = history.verify()
        assert not report.ok and name in str(report) and os.strerror(errno.EIO) in str(report)
        model, optimizer = build()
        with everstep.attach(model, optimizer, run, quiet=True) as again:
            assert again.resume() == 12


def test_any_one_file_may_be_unreadable(trained: Truth) -> None:
    run = trained.run.path
    names = [str(p.relative_to(run)) for p in sorted(Path(run).rglob("*")) if p.is_file() and p.name != "lock"]
    assert len(names) > 9
    for name in names:
        with unreadable(name):
            try:
                found = everstep.open(run).state()
            except (CorruptionError, UnreadableError) as e:
                assert name in str(e), f"{name}: {e}"
            else:
                assert different(trained.states[12], found) == [], name
            if name != "run.json" and "layouts" not in name and not name.endswith("log-00000"):  # nothing is read in these
                try:
                    assert name in str(everstep.open(run).verify())
                except CorruptionError as e:
                    assert name in str(e)


def test_a_bad_sector_costs_the_steps_that_need_it(trained: Truth, monkeypatch: Any) -> None:
    run = trained.run.path
    path, frames = frames_of(run)
    hit = frames[8][-1]
    bad_sectors(monkeypatch, path, hit.offset, hit.offset + 1)
    history = everstep.open(run)
    assert history.steps == [n for n in range(13) if n not in (8, 9)]
    assert different(trained.states[12], history.state()) == []
    assert not history.verify().ok
    with pytest.raises(CorruptionError, match=r"step 8 .* Restorable steps: 0 to 7, 10 to 12"):
        history.state(8)


@pytest.mark.parametrize("where", ["footer", "payload", "whole"])
def test_the_last_step_is_not_taken_for_torn_when_it_cannot_be_read(where: str, trained: Truth, monkeypatch: Any) -> None:
    run = trained.run.path
    path, frames = frames_of(run)
    last = frames[12][-1]
    first = {"footer": last.footer_offset, "payload": last.offset + 200, "whole": 0}[where]
    bad_sectors(monkeypatch, path, first, first + 100 if where == "payload" else path.stat().st_size)
    kept = 10 if where == "whole" else 11
    history = everstep.open(run)
    assert history.steps[-1] == kept
    assert not history.verify().ok
    with pytest.raises(CorruptionError, match=os.strerror(errno.EIO)):
        history.state()
    again = everstep.attach(*build(), run, quiet=True)
    with pytest.raises(EverstepError, match=os.strerror(errno.EIO)):
        again.resume()
    again.close()
    assert different(trained.states[kept], history.state(kept)) == []


def test_a_file_that_must_not_be_read_is_damage(trained: Truth, monkeypatch: Any) -> None:
    """As for another user than root."""
    opened = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(".frames"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    history = everstep.open(trained.run.path)
    assert history.steps == [0, 5, 10]
    with pytest.raises(CorruptionError, match=r"from 11 on may be lost.*Permission denied"):
        history.state()


def test_a_segment_may_have_any_number_of_holes(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    options = {"quiet": True, "follower": False, "durability": "os", "base_interval": 10_000}
    run = everstep.attach(model, optimizer, tmp_path / "run", **options)
    run.resume()
    for _ in range(800):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        run.commit()
    run.flush()
    crash(run)
    frames = everstep.open(tmp_path / "run").plan().frames
    assert len({f.path for f in frames}) == 1 and len(frames) == 800
    with open(frames[0].path, "r+b") as file:
        for frame in frames[100::2]:
            file.seek(frame.offset)
            file.write(b"\0")
    history = everstep.open(tmp_path / "run")
    assert history.steps == list(range(101))
    [segment] = history._joint().eras[0].lines[0].segments.values()
    assert [hole[:2] for hole in segment.holes] == [(n, n) for n in range(101, 801, 2)]
    assert [f.step for f in segment.frames] == [*range(1, 101), *range(102, 801, 2)]


@pytest.mark.parametrize("where", ["bases/000000000005/manifest.json", "bases/000000000000/rank-00000.safetensors"])
def test_a_link_that_leads_nowhere_in_an_old_base_does_not_keep_a_run_from_going_on(
    where: str, trained: Truth, tmp_path: Path
) -> None:
    file = tmp_path / "run/timelines/0001" / where
    file.unlink()
    file.symlink_to(tmp_path / "nowhere")
    run = everstep.attach(*build(), tmp_path / "run", quiet=True, follower=False)
    assert run.resume() == 12
    crash(run)


def test_a_generation_whose_document_leads_nowhere_is_damage(trained: Truth, tmp_path: Path) -> None:
    file = tmp_path / "run/timelines/0001/generations/000001.json"
    file.unlink()
    file.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CorruptionError, match=r"000001\.json"):
        everstep.open(tmp_path / "run").state()


def test_a_file_that_is_called_like_a_later_base_is_let_be(trained: Truth, tmp_path: Path) -> None:
    stray = tmp_path / "run/timelines/0001/bases/000000000099"
    stray.write_text("not a base")
    run = everstep.attach(*build(), tmp_path / "run", quiet=True, follower=False)
    assert run.resume() == 12
    crash(run)
    assert stray.exists()
