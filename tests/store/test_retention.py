"""Retention: a pure plan of what may go; and what is left on disk can always be restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import everstep
from everstep.errors import CorruptionError, StepNotFoundError, UsageError
from everstep.options import Options
from everstep.store import files
from everstep.store.files import Event
from everstep.store.retention import Removal, Retention, StoredBase, StoredSegment, execute, plan_removal
from truth import Truth, check_history, crash


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(path: Any, steps: int, **options: Any) -> Truth:
    """Bases every 5 steps, a segment for about every 3."""
    model, optimizer = build()
    options = {"base_interval": 5, "segment_bytes": 20_000, "follower": False, "retention": {}, **options}
    run = everstep.attach(model, optimizer, path, quiet=True, **options)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for _ in range(steps):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.commit(wait=True)
        if run._capture.snapshot is not None:
            run._capture.snapshot.wait()
    crash(run)
    return truth


def bases(path: Any) -> list[int]:
    return sorted(int(p.parent.name) for p in Path(path).glob("timelines/*/bases/????????????/manifest.json"))


def size(path: Any) -> int:
    return sum(p.stat().st_size for p in Path(path).rglob("*") if p.is_file())


def test_the_last_two_bases_and_all_steps_since_are_kept(tmp_path: Path) -> None:
    truth = train(tmp_path / "run", 33)
    kept = bases(tmp_path / "run")
    assert len(kept) == 2
    steps = everstep.open(tmp_path / "run").steps
    assert set(range(kept[0], 34)) <= set(steps)
    assert min(steps) == kept[0]
    check_history(tmp_path / "run", truth, complete=False)


def test_by_default_nothing_of_a_small_run_is_removed(tmp_path: Path) -> None:
    truth = train(tmp_path / "run", 33, retention=Options().retention)
    check_history(tmp_path / "run", truth)


def test_so_many_bases_are_kept_as_asked_for(tmp_path: Path) -> None:
    truth = train(tmp_path / "run", 33, retention={"bases": 4})
    assert len(bases(tmp_path / "run")) == 4
    check_history(tmp_path / "run", truth, complete=False)


def test_every_kth_base_is_kept_without_the_steps_between(tmp_path: Path) -> None:
    truth = train(tmp_path / "run", 48, retention={"bases": 1, "every": 15})
    kept = bases(tmp_path / "run")
    assert len(kept) <= 6
    for mark in (0, 15, 30):
        assert any(mark <= b < mark + 10 for b in kept), kept
    steps = everstep.open(tmp_path / "run").steps
    assert set(kept) <= set(steps)
    assert len(steps) < 25
    check_history(tmp_path / "run", truth, complete=False)


@pytest.mark.parametrize("window", [12, 20])
def test_every_step_of_the_window_is_kept(window: int, tmp_path: Path) -> None:
    truth = train(tmp_path / "run", 41, retention={"bases": 1, "window_steps": window})
    steps = everstep.open(tmp_path / "run").steps
    assert set(range(41 - window, 42)) <= set(steps)
    assert len(steps) < window + 15
    check_history(tmp_path / "run", truth, complete=False)


def test_a_byte_budget_is_kept_to(tmp_path: Path) -> None:
    train(tmp_path / "all", 40, retention={"bases": 100})
    train(tmp_path / "few", 40, retention={"bases": 100, "max_bytes": 150_000})
    assert size(tmp_path / "all") > 300_000
    assert size(tmp_path / "few") < 230_000
    assert len(everstep.open(tmp_path / "few").steps) > 5


def test_a_byte_budget_that_is_too_small_keeps_the_newest_base_and_its_steps(tmp_path: Path) -> None:
    truth = train(tmp_path / "run", 23, retention={"max_bytes": 1})
    assert len(bases(tmp_path / "run")) == 1
    assert max(everstep.open(tmp_path / "run").steps) == 23
    check_history(tmp_path / "run", truth, complete=False)


def test_the_log_does_not_grow_without_bound(tmp_path: Path) -> None:
    train(tmp_path / "short", 25)
    train(tmp_path / "long", 150)
    assert size(tmp_path / "long") < 1.5 * size(tmp_path / "short")


def test_a_step_that_was_removed_is_refused_and_the_kept_ones_are_named(tmp_path: Path) -> None:
    train(tmp_path / "run", 33)
    first = everstep.open(tmp_path / "run").steps[0]
    with pytest.raises(StepNotFoundError, match=f"{first} to 33"):
        everstep.open(tmp_path / "run").state(1)


def test_retention_goes_on_over_generations(tmp_path: Path) -> None:
    truth = dict(train(tmp_path / "run", 17).states)
    for _ in range(3):
        truth.update(train(tmp_path / "run", 11).states)
    assert len(bases(tmp_path / "run")) == 2
    steps = everstep.open(tmp_path / "run").steps
    assert max(steps) == 50 and len(steps) < 20
    check_history(tmp_path / "run", truth, complete=False)


def test_a_fork_keeps_what_it_stands_on(tmp_path: Path) -> None:
    """The parent's base and frames before the fork stay as long as the fork needs them; its own base comes first."""
    train(tmp_path / "run", 12, retention={"bases": 5})
    model, optimizer = build()
    run = everstep.attach(
        model, optimizer, tmp_path / "run", quiet=True, follower=False, base_interval=5, segment_bytes=20_000,
        retention={},
    )
    truth = Truth(run, model, optimizer)
    truth.resume(8)
    for _ in range(20):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.commit(wait=True)
    crash(run)
    history = everstep.open(tmp_path / "run")
    assert max(history.steps) == 28
    for n in (27, 28):
        history.state(n)
    assert max(everstep.open(tmp_path / "run", timeline=1).steps) == 12


def test_removal_goes_in_an_order_that_a_crash_cannot_hurt(tmp_path: Path) -> None:
    """A newer base is whole before anything older goes; a base loses its manifest first."""
    events: list[Event] = []
    with files.observe(events.append):
        train(tmp_path / "run", 33)
    manifests = [i for i, e in enumerate(events) if e.op == "rename" and e.target.endswith("manifest.json")]
    removals = [i for i, e in enumerate(events) if e.op == "unlink" and not e.path.endswith(".tmp")]
    assert len(manifests) > 3 and len(removals) > 5
    assert removals[0] > manifests[2], "nothing goes before there are two newer bases"
    for i in removals:
        if events[i].path.endswith(".safetensors"):
            manifest = events[i].path.rpartition("/")[0] + "/manifest.json"
            gone = [j for j, e in enumerate(events[:i]) if e.op == "unlink" and e.path == manifest]
            assert gone, "the manifest goes first"
            assert any(e.op == "syncdir" for e in events[gone[-1] : i]), "and durably so"


def test_the_name_of_the_newest_segment_is_durable_before_older_ones_go(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"frames")
    events: list[Event] = []
    with files.observe(events.append):
        execute(Removal(5, (StoredSegment(0, 4, 6, str(tmp_path / "old")),), ()))
    assert [(e.op, Path(e.path).name) for e in events] == [
        ("syncdir", tmp_path.name), ("unlink", "old"), ("syncdir", tmp_path.name)
    ]  # fmt: skip


def test_the_last_segment_is_missed_though_there_are_bases_after_the_resume(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train(path, 13, retention={"bases": 1}, segment_bytes=1 << 20)
    train(path, 14, retention={"bases": 1}, segment_bytes=1 << 20)
    [*_, newest] = sorted(path.glob("timelines/0001/log/rank-00000/*.frames"))
    assert newest.name.startswith("g000002-") and everstep.open(path).verify().ok
    newest.unlink()
    history = everstep.open(path)
    assert history.steps[-1] == 25
    assert not history.verify().ok
    with pytest.raises(CorruptionError, match="from 26 on may be lost"):
        history.state()
    run = everstep.attach(*build(), path, quiet=True)
    with pytest.raises(CorruptionError, match="is missing"):
        run.resume()
    run.close()
    assert history.state(25)["model"]


def test_a_generation_without_a_step_of_its_own_has_no_log_to_miss(tmp_path: Path) -> None:
    train(tmp_path / "run", 13, retention={"bases": 1})
    for _ in range(2):
        with everstep.attach(*build(), tmp_path / "run", quiet=True, follower=False, retention={"bases": 1}) as run:
            assert run.resume() == 13
        assert everstep.open(tmp_path / "run").verify().ok


# -- the plan ---------------------------------------------------------------------------------------------------------


def listed(base_steps: list[int], last: int, per_segment: int) -> tuple[list[StoredBase], list[StoredSegment]]:
    stored = [StoredBase(b, 100, f"b{b}") for b in base_steps]
    segments = [
        StoredSegment(n, min(n + per_segment - 1, last), 10 * per_segment, f"s{n}")
        for n in range(1, last + 1, per_segment)
    ]
    return stored, segments[:-1]


@st.composite
def situations(draw: Any) -> tuple[Retention, list[int], int, int]:
    last = draw(st.integers(1, 200))
    steps = draw(st.sets(st.integers(0, last), max_size=12))
    policy = Retention(
        bases=draw(st.integers(1, 4)), every=draw(st.none() | st.integers(1, 60)),
        window_steps=draw(st.just(0) | st.integers(0, 150)), max_bytes=draw(st.none() | st.integers(1, 4000)),
    )  # fmt: skip
    return policy, sorted({0, *steps}), last, draw(st.integers(1, 30))


@given(situations())
def test_the_newest_base_and_all_steps_since_are_never_removed(situation: Any) -> None:
    policy, base_steps, last, per_segment = situation
    stored, segments = listed(base_steps, last, per_segment)
    removal = plan_removal(policy, stored, segments, last)
    newest = max(base_steps)
    assert all(b.step != newest for b in removal.bases)
    assert all(s.last_step <= newest for s in removal.segments)


@given(situations())
def test_every_step_from_the_oldest_kept_line_on_stays_restorable(situation: Any) -> None:
    policy, base_steps, last, per_segment = situation
    stored, segments = listed(base_steps, last, per_segment)
    removal = plan_removal(policy, stored, segments, last)
    kept = sorted(set(base_steps) - {b.step for b in removal.bases})
    removed = {n for s in removal.segments for n in range(s.first_step, s.last_step + 1)}
    if policy.max_bytes is None:
        line = [b for b in base_steps if b >= sorted(base_steps)[max(0, len(base_steps) - policy.bases)]]
        assert set(line) <= set(kept), "the last bases stay"
        assert not removed & set(range(line[0] + 1, last + 1)), "and all steps since the oldest of them"
        if policy.window_steps:
            for n in range(max(0, last - policy.window_steps), last + 1):
                start = max((b for b in kept if b <= n), default=None)
                assert start is not None and not removed & set(range(start + 1, n + 1)), n
    if policy.every:
        for b in base_steps:
            mark = -(-b // policy.every)
            if b == min(x for x in base_steps if -(-x // policy.every) == mark):
                assert b in kept


@given(situations())
def test_removals_are_in_order_and_repeating_the_plan_removes_nothing_more(situation: Any) -> None:
    policy, base_steps, last, per_segment = situation
    stored, segments = listed(base_steps, last, per_segment)
    removal = plan_removal(policy, stored, segments, last)
    assert list(removal.segments) == sorted(removal.segments, key=lambda s: s.first_step)
    assert list(removal.bases) == sorted(removal.bases, key=lambda b: b.step)
    left_bases = [b for b in stored if b not in removal.bases]
    left_segments = [s for s in segments if s not in removal.segments]
    again = plan_removal(policy, left_bases, left_segments, last)
    assert again.bases == () and again.segments == ()


@pytest.mark.parametrize("wrong", [{"bases": 0}, {"window_steps": -1}, {"every": 0}, {"max_bytes": 0}])
def test_a_policy_that_keeps_nothing_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError):
        Retention(**wrong)
