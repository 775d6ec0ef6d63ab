"""open(run): time travel, timelines, generations, verify."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import (
    CorruptionError,
    EverstepError,
    NothingToRestoreError,
    StepNotFoundError,
    UsageError,
)
from truth import Truth, check_history, check_resume, crash, different, live_state, tree_hash


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(path: Any, steps: int, *, at: Any = "latest", end: str = "crash", seed: int = 0, **options: Any) -> Truth:
    """Train on from `at`; returns the truth of the steps from there on."""
    model, optimizer = build()
    run = everstep.attach(model, optimizer, path, quiet=True, follower=False, **options)
    truth = Truth(run, model, optimizer)
    truth.resume(at)
    torch.manual_seed(seed)
    for _ in range(steps):
        step(model, optimizer)
        truth.commit()
    if end == "crash":
        crash(run)
    else:
        run.close()
    return truth


@pytest.mark.parametrize("end", ["crash", "close"])
def test_every_step_can_be_brought_back_from_any_generation(end: str, tmp_path: Any) -> None:
    truth: dict[int, Any] = {}
    for i in range(4):
        truth.update(train(tmp_path / "run", 5, end=end, seed=i, retention={"bases": 9}).states)
    assert sorted(truth) == list(range(21))
    check_history(tmp_path / "run", truth)


def test_resuming_an_older_step_opens_a_timeline_and_keeps_the_old_one(tmp_path: Any) -> None:
    path = tmp_path / "run"
    first = train(path, 8).states
    second = train(path, 4, at=3, seed=9).states
    assert sorted(second) == [3, 4, 5, 6, 7]
    assert different(first[3], second[3]) == []
    assert different(first[5], second[5]) != []
    history = everstep.open(path)
    assert history.timelines == [1, 2]
    assert history.steps == list(range(8))
    assert everstep.open(path, timeline=1).steps == list(range(9))
    check_history(path, {**{n: first[n] for n in range(3)}, **second})
    check_history(path, first, timeline=1)
    third = train(path, 2, seed=10)
    assert sorted(third.states) == [7, 8, 9], "latest goes on with the newest line, not with the highest step"


def test_forks_of_forks_keep_all_their_ancestors(tmp_path: Any) -> None:
    path = tmp_path / "run"
    line = dict(train(path, 6).states)
    for at, steps in ((4, 3), (5, 2), (2, 5), (6, 3)):
        grown = train(path, steps, at=at, seed=at).states
        line = {**{n: s for n, s in line.items() if n < at}, **grown}
        check_history(path, line)
    assert everstep.open(path).timelines == [1, 2, 3, 4, 5]


def test_resuming_the_latest_step_by_number_opens_no_timeline(tmp_path: Any) -> None:
    train(tmp_path / "run", 5)
    train(tmp_path / "run", 2, at=5)
    assert everstep.open(tmp_path / "run").timelines == [1]
    assert everstep.open(tmp_path / "run").steps == list(range(8))


def test_a_fork_from_before_the_step_that_its_parent_began_at_stands_for_itself(tmp_path: Any) -> None:
    train(tmp_path / "run", 6)
    train(tmp_path / "run", 0)  # begins at step 6
    train(tmp_path / "run", 2, at=3)
    again = train(tmp_path / "run", 1)
    assert min(again.states) == 5 and everstep.open(tmp_path / "run").steps == [0, 1, 2, 3, 4, 5, 6]
    assert everstep.open(tmp_path / "run").verify(deep=True).ok


def test_resuming_step_zero_begins_again(tmp_path: Any) -> None:
    first = train(tmp_path / "run", 4).states
    second = train(tmp_path / "run", 2, at=0, seed=5).states
    assert different(first[0], second[0]) == []
    assert everstep.open(tmp_path / "run").steps == [0, 1, 2]


def test_resuming_the_same_step_again_gives_that_step(tmp_path: Any) -> None:
    """Outside of torchrun every attach is a launch of its own, also in one process."""
    train(tmp_path / "run", 6)
    for i in range(3):
        again = train(tmp_path / "run", 2, at=3, seed=i).states
        assert sorted(again) == [3, 4, 5]
    assert everstep.open(tmp_path / "run").timelines == [1, 2, 3, 4]


def test_a_restart_of_the_same_launch_goes_on_with_its_fork(tmp_path: Any, monkeypatch: Any) -> None:
    path = tmp_path / "run"
    train(path, 8)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch-a")
    forked = train(path, 2, at=3, seed=1).states
    assert sorted(forked) == [3, 4, 5]
    again = train(path, 2, at=3, seed=2).states
    assert sorted(again) == [5, 6, 7], "the same launch goes on"
    assert different(forked[5], again[5]) == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch-b")
    other = train(path, 1, at=3, seed=3).states
    assert sorted(other) == [3, 4], "another launch forks anew"
    assert everstep.open(path).timelines == [1, 2, 3]


def test_a_restart_goes_on_when_the_launch_began_at_the_latest_step(tmp_path: Any, monkeypatch: Any) -> None:
    """resume(step=5) of a run whose latest step is 5 opens no timeline; its restart must not go back to 5 either."""
    path = tmp_path / "run"
    train(path, 5)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch-a")
    assert sorted(train(path, 3, at=5, seed=1).states) == [5, 6, 7, 8]
    assert sorted(train(path, 2, at=5, seed=2).states) == [8, 9, 10]


def test_a_restart_goes_on_when_the_fork_was_killed_before_its_first_step(tmp_path: Any, monkeypatch: Any) -> None:
    path = tmp_path / "run"
    train(path, 8)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch-a")
    assert sorted(train(path, 0, at=3).states) == [3]
    assert sorted(train(path, 2, at=3).states) == [3, 4, 5]
    assert everstep.open(path).steps == [0, 1, 2, 3, 4, 5]


def segments(path: Any) -> list[Path]:
    return sorted(Path(path).glob("timelines/*/log/rank-00000/*.frames"))


def test_stale_frames_and_bases_of_a_dead_generation_are_ignored(tmp_path: Any) -> None:
    """A zombie's writes appear late: its log is longer than it was when the run was resumed."""
    path = tmp_path / "run"
    first = train(path, 8, base_interval=6).states
    log = segments(path)[0]
    whole = log.read_bytes()
    base = Path(path, "timelines/0001/bases/000000000006")
    assert base.is_dir()
    shutil.move(base, tmp_path / "base6")
    # What the second generation finds: only the first three steps.
    offsets = frame_ends(path)
    log.write_bytes(whole[: offsets[3]])
    second = train(path, 2, seed=5, base_interval=100).states
    assert sorted(second) == [3, 4, 5]
    # Now the zombie's frames 4 to 8 and its base of step 6 turn up.
    log.write_bytes(whole)
    shutil.move(tmp_path / "base6", base)
    line = {**{n: first[n] for n in range(3)}, **second}
    check_history(path, line)
    third = train(path, 3, seed=6).states
    assert sorted(third) == [5, 6, 7, 8]
    check_history(path, {**line, **third})


def frame_ends(path: Any) -> dict[int, int]:
    from everstep.restore.plan import line_of
    from everstep.store.runs import RunPath, read_listing

    return {n: f.end_offset for n, f in line_of(read_listing(RunPath(path))).frames.items()}


def test_never_another_step_than_asked_for(tmp_path: Any) -> None:
    train(tmp_path / "run", 5)
    history = everstep.open(tmp_path / "run")
    for wrong in (6, 99, 10**12):
        with pytest.raises(StepNotFoundError, match="0 to 5"):
            history.state(wrong)
    for wrong in (-1, "first", 2.0, None):
        with pytest.raises(UsageError):
            history.state(wrong)
    with pytest.raises(StepNotFoundError, match="timeline"):
        history.state(1, timeline=7)
    model, optimizer = build()
    before = live_state(model, optimizer)
    with pytest.raises(StepNotFoundError):
        history.restore(model, optimizer, step=6)
    assert different(before, live_state(model, optimizer)) == []


def test_restore_puts_any_step_into_live_objects(tmp_path: Any) -> None:
    truth = train(tmp_path / "run", 5).states
    history = everstep.open(tmp_path / "run")
    for n in (3, 0, 5, 1):
        model, optimizer = build()
        step(model, optimizer)
        assert history.restore(model, optimizer, step=n) == n
        assert different(truth[n], live_state(model, optimizer)) == []
    assert history.restore(model, optimizer) == 5


def test_restore_hands_extras_back(tmp_path: Any) -> None:
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run = everstep.attach(model, optimizer, tmp_path / "run", extras={"sched": scheduler}, quiet=True)
    run.resume()
    for _ in range(4):
        step(model, optimizer)
        scheduler.step()
        run.commit()
    crash(run)
    history = everstep.open(tmp_path / "run")
    assert history.state(2)["extras"]["sched"]["last_epoch"] == 2
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert history.restore(model, optimizer, step=2, extras={"sched": scheduler}) == 2
    assert scheduler.last_epoch == 2
    assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.25


def test_states_are_copies_of_their_own(tmp_path: Any) -> None:
    truth = train(tmp_path / "run", 3).states
    history = everstep.open(tmp_path / "run")
    state = history.state(2)
    for tensor in state["model"].values():
        tensor.zero_()
    assert different(truth[2], history.state(2)) == []


def test_reading_changes_nothing_on_disk_and_no_rng(tmp_path: Any) -> None:
    train(tmp_path / "run", 6)
    before = tree_hash(tmp_path / "run")
    rng = torch.get_rng_state()
    history = everstep.open(tmp_path / "run")
    repr(history)
    str(history.plan(4))
    for n in history.steps:
        history.state(n)
    assert history.verify().ok and history.verify(deep=True).ok
    assert tree_hash(tmp_path / "run") == before
    assert torch.equal(rng, torch.get_rng_state())


def test_a_live_run_can_be_read_by_its_own_process_and_stays_locked(tmp_path: Any) -> None:
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for _ in range(4):
        step(model, optimizer)
        truth.commit(wait=True)
        check_history(tmp_path / "run", truth)
    run.close()


def test_a_plan_can_be_printed(tmp_path: Any) -> None:
    train(tmp_path / "run", 6)
    text = str(everstep.open(tmp_path / "run").plan(4))
    for word in ("step 4", "base", "frames", "4 steps to replay"):
        assert word in text


def test_verify_finds_a_flipped_bit_in_the_log_and_in_a_base(tmp_path: Any) -> None:
    train(tmp_path / "run", 12, base_interval=5)
    history = everstep.open(tmp_path / "run")
    assert history.verify(deep=True).ok
    assert history.verify(deep=True).proven_step == 12
    log = segments(tmp_path / "run")[0]
    good = log.read_bytes()
    ends = frame_ends(tmp_path / "run")
    bad = bytearray(good)
    bad[ends[7] + 200] ^= 1
    log.write_bytes(bad)
    report = everstep.open(tmp_path / "run").verify()
    assert not report.ok
    assert str(log) in str(report) and "8" in str(report)
    log.write_bytes(good)
    base = next(Path(tmp_path, "run").glob("timelines/0001/bases/*5/*.safetensors"))
    data = bytearray(base.read_bytes())
    data[-3] ^= 1
    base.write_bytes(data)
    report = everstep.open(tmp_path / "run").verify()
    assert not report.ok and str(base) in str(report)


def test_a_damaged_base_is_replaced_by_an_older_one_and_its_frames(tmp_path: Any) -> None:
    truth = train(tmp_path / "run", 12, base_interval=5).states
    base = sorted(Path(tmp_path, "run").glob("timelines/0001/bases/*/*.safetensors"))[-1]
    data = bytearray(base.read_bytes())
    data[-3] ^= 1
    base.write_bytes(data)
    check_history(tmp_path / "run", truth, complete=False)
    assert different(truth[12], everstep.open(tmp_path / "run").state(12)) == []


def test_a_lost_step_that_was_durable_is_an_error_that_says_what_is_left(tmp_path: Any) -> None:
    train(tmp_path / "run", 6, end="close")
    shutil.rmtree(Path(tmp_path, "run/timelines/0001/bases/000000000006"))
    log = segments(tmp_path / "run")[0]
    ends = frame_ends(tmp_path / "run")
    data = bytearray(log.read_bytes())
    for i in range(ends[4] + 64, ends[4] + 600):
        data[i] ^= 1
    log.write_bytes(data)
    with pytest.raises(CorruptionError, match="0 to 4"):
        everstep.open(tmp_path / "run").state()
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    with pytest.raises(CorruptionError, match="0 to 4"):
        run.resume()
    crash(run)
    assert sorted(train(tmp_path / "run", 2, at=4).states) == [4, 5, 6]


def test_two_models_come_back_under_their_own_keys(tmp_path: Any) -> None:
    torch.manual_seed(1)
    models = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 2)}
    optimizers = {k + "_opt": torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for k, m in models.items()}
    run = everstep.attach(models, optimizers, tmp_path / "run", quiet=True)
    truth = Truth(run, models, optimizers)
    truth.resume()
    for _ in range(3):
        for m, o in zip(models.values(), optimizers.values(), strict=True):
            m(torch.randn(3, 2)).sum().backward()
            o.step()
            o.zero_grad()
        truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)
    state = everstep.open(tmp_path / "run").state()
    assert set(state["model"]) == {"g", "d"} and set(state["optimizer"]) == {"g_opt", "d_opt"}
    assert set(state["optimizer"]["g_opt"]["state"]) == {"weight", "bias"}


def test_a_model_and_an_optimizer_may_have_the_same_name(tmp_path: Any) -> None:
    def build_two() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
        torch.manual_seed(1)
        models = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 2)}
        stray = nn.Parameter(torch.zeros(3))  # of an optimizer, and in no model
        return models, {k: torch.optim.Adam([*m.parameters(), *([stray] if k == "g" else [])]) for k, m in models.items()}

    models, optimizers = build_two()
    run = everstep.attach(models, optimizers, tmp_path / "run", quiet=True, follower=False)
    truth = Truth(run, models, optimizers)
    truth.resume()
    for _ in range(3):
        for name, optimizer in optimizers.items():
            loss = models[name](torch.randn(3, 2)).sum() + optimizers["g"].param_groups[0]["params"][-1].sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", build_two, truth, 3)
    state = everstep.open(tmp_path / "run").state()
    assert {name: set(values) for name, values in state["model"].items()} == {k: {"weight", "bias"} for k in "gd"}
    assert set(state["optimizer"]["g"]["state"]) == {"weight", "bias", "param_groups.0.2"}


def test_one_optimizers_parameters_of_the_same_name_in_two_models_are_told_apart(tmp_path: Any) -> None:
    models = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    optimizer = torch.optim.Adam([p for m in models.values() for p in m.parameters()])
    with everstep.attach(models, optimizer, tmp_path / "run", quiet=True, follower=False) as run:
        run.resume()
        models["b"](models["a"](torch.randn(3, 2))).sum().backward()
        optimizer.step()
        run.commit()
    found = everstep.open(tmp_path / "run").state()["optimizer"]
    assert list(found["state"]) == found["param_groups"][0]["params"] == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert torch.equal(found["state"]["b.bias"]["exp_avg"], optimizer.state[models["b"].bias]["exp_avg"])


def test_a_run_with_no_step_yet_says_so(tmp_path: Any) -> None:
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    with pytest.raises(NothingToRestoreError):
        everstep.open(tmp_path / "run").state()
    with pytest.raises(EverstepError, match="no steps yet"):
        run.resume(step=3)
    assert run.resume() == 0
    run.close()


def test_a_history_needs_no_pickle(tmp_path: Any, monkeypatch: Any) -> None:
    import pickle

    train(tmp_path / "run", 3)

    def refuse(*a: Any, **k: Any) -> Any:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler", "dump", "dumps", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    everstep.open(tmp_path / "run").state(2)


def test_a_run_can_be_moved_and_copied(tmp_path: Any) -> None:
    truth = dict(train(tmp_path / "run", 4).states)
    os.rename(tmp_path / "run", tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    truth.update(train(tmp_path / "moved", 2, seed=1).states)
    check_history(tmp_path / "moved", truth)
    check_history(tmp_path / "copy", {n: truth[n] for n in range(5)})


def test_what_comes_back_lies_in_memory_as_torch_would_have_put_it(tmp_path: Any) -> None:
    """Some kernels give other bits where memory is not aligned, and an optimizer may use any of them."""
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False) as run:
        run.resume()
        for _ in range(4):
            model(torch.randn(4, 7)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
    history = everstep.open(tmp_path / "run")
    for n in (0, 3, 4):
        state = history.state(n)
        found = [*state["model"].values(), *(v for s in state["optimizer"]["state"].values() for v in s.values())]
        assert all(t.data_ptr() % 64 == 0 for t in found)
    expected = model.state_dict()
    assert all(torch.equal(state["model"][k], v) for k, v in expected.items())
