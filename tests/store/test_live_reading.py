"""Reading a run while it is written: what retention removes, or the writer adds, in the meantime is no damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import CorruptionError, StepNotFoundError
from everstep.follow.keeper import stored
from everstep.format.documents import KeptDocument
from everstep.restore import history, plan
from everstep.store import files, retention, runs
from everstep.store.retention import Retention
from everstep.store.runs import RunPath
from everstep.store.segments import Segment
from support import crash
from truth import different


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Bases at 0, 5, 10 and 15, a segment for about every 3 of 17 steps. Nothing has been removed."""
    torch.manual_seed(1)
    model = nn.Linear(32, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = everstep.attach(
        model, optimizer, tmp_path / "run", quiet=True, follower=False, base_interval=5, segment_bytes=20_000,
        retention={"bases": 100},
    )  # fmt: skip
    run.resume()
    for _ in range(17):
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.commit(wait=True)
        assert run._capture is not None and run._capture.snapshot is not None
        run._capture.snapshot.wait()
    crash(run)
    return str(tmp_path / "run")


def retain(run: str) -> None:
    """As the keeper of a run that keeps one base."""
    path = RunPath(run)
    removal = retention.plan_removal(Retention(bases=1), *stored(path, 1), 17)
    assert len(removal.bases) == 3 and len(removal.segments) > 2
    path.write_kept(1, KeptDocument(removal.horizon))
    retention.execute(removal)


def before(monkeypatch: Any, where: Any, name: str, act: Callable[[], None]) -> list[str]:
    """Something happens when this is called for the first time."""
    done: list[str] = []
    really = getattr(where, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not done:
            done.append(name)
            act()
        return really(*args, **kwargs)

    monkeypatch.setattr(where, name, call)
    return done


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    ("where", "name"),
    [(runs.bases, "read_manifest"), (Segment, "scan"), (history, "check_base"), (history, "_verify_frame")],
    ids=lambda each: each if isinstance(each, str) else "in",
)
@pytest.mark.sampled(2)
def test_what_retention_removes_while_a_run_is_read_is_not_missed(
    where: Any, name: str, deep: bool, run: str, monkeypatch: Any
) -> None:
    assert everstep.open(run).verify(deep=deep).ok
    done = before(monkeypatch, where, name, lambda: retain(run))
    assert everstep.open(run).verify(deep=deep).problems == []
    assert done
    assert everstep.open(run).steps == [15, 16, 17]


def test_what_retention_removes_while_a_run_is_replayed_is_not_missed(run: str, monkeypatch: Any) -> None:
    done = before(monkeypatch, history, "_verify_deep", lambda: retain(run))
    report = everstep.open(run).verify(deep=True)
    assert report.problems == [] and done
    assert report.replayed_step == 17


def test_a_step_that_retention_removes_while_it_is_restored_is_not_there(run: str, monkeypatch: Any) -> None:
    before(monkeypatch, history, "fetch", lambda: retain(run))
    with pytest.raises(StepNotFoundError, match=r"15.* to 17"):
        everstep.open(run).state(12)


def test_what_still_is_there_after_that_comes_back(run: str, monkeypatch: Any) -> None:
    expected = everstep.open(run).state(16)
    done = before(monkeypatch, history, "fetch", lambda: retain(run))
    assert different(everstep.open(run).state(16), expected) == [] and done


def test_what_somebody_else_removes_meanwhile_is_missed(run: str, monkeypatch: Any) -> None:
    def remove() -> None:
        next(Path(run).glob("timelines/0001/log/rank-00000/*.frames")).unlink()

    before(monkeypatch, history, "check_base", remove)
    assert not everstep.open(run).verify().ok


def test_the_last_segment_is_missed_where_it_makes_no_sense(run: str, monkeypatch: Any) -> None:
    newest = max(files.listing(RunPath(run).log(1)))
    scan = Segment.scan

    def fail(self: Segment) -> Segment:
        if self.path.endswith(newest):
            raise CorruptionError(f"{self.path}: a Footer cannot be decoded")
        return scan(self)

    monkeypatch.setattr(Segment, "scan", fail)
    with pytest.raises(CorruptionError, match=r"may be lost.* cannot be decoded"):
        everstep.open(run).state()


def test_a_segment_that_is_younger_than_the_listing_is_not_missed(run: str, monkeypatch: Any) -> None:
    listing = files.listing
    newest = max(listing(RunPath(run).log(1)))
    monkeypatch.setattr(files, "listing", lambda path: [n for n in listing(path) if n != newest])
    assert everstep.open(run).verify().problems == []
    assert everstep.open(run).state()["model"]


@pytest.mark.parametrize("step", ["latest", 12])
@pytest.mark.parametrize("where", [runs.bases, plan], ids=["listing", "line"])
def test_a_generation_that_begins_while_a_run_is_read_is_no_damage(
    where: Any, step: Any, run: str, monkeypatch: Any
) -> None:
    model = nn.Linear(32, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    begun: list[Any] = []

    def begin() -> None:
        begun.append(everstep.attach(model, optimizer, run, quiet=True, follower=False))
        begun[0].resume(step)
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        begun[0].commit(wait=True)

    history = everstep.open(run)
    before(monkeypatch, where, "read_manifest" if where is runs.bases else "_check_no_newer_damaged", begin)
    assert history.state(10)["model"] and begun
    begun[0].close()


def test_a_pool_that_is_removed_while_a_run_is_verified_is_no_damage(tmp_path: Path, monkeypatch: Any) -> None:
    model = nn.Linear(32, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = everstep.attach(
        model, optimizer, tmp_path / "run", quiet=True, mode="snapshot", snapshot_interval=1, pool=str(tmp_path / "pool")
    )
    run.resume()
    for _ in range(4):
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.commit(wait=True)
    done = before(monkeypatch, history, "_replay", run.close)
    assert everstep.open(tmp_path / "run").verify(deep=True).problems == [] and done
