"""attach and Run: when steps are committed, what is refused when, and what leaving the `with` does."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everstep
from everstep.errors import EverstepError, NothingToRestoreError, UnsupportedValueError, UsageError
from truth import Truth, check_history, check_resume, crash, different, live_state


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def with_batchnorm() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def backward(model: nn.Module) -> None:
    model(torch.randn(4, 4)).square().mean().backward()


def step(model: nn.Module, optimizer: Any) -> None:
    backward(model)
    optimizer.step()
    optimizer.zero_grad()


def loader(num_batches: int = 6) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(num_batches * 2, 4)), batch_size=2)


# -- before resume ----------------------------------------------------------------------------------------------------


def test_nothing_but_resume_works_before_resume(tmp_path: Any) -> None:
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    for call in (lambda: run.step, run.commit, run.flush):
        with pytest.raises(UsageError, match="resume"):
            call()
    assert run.durable_step == -1
    assert run.resume() == 0
    assert run.step == 0
    run.close()


def test_resume_works_once(tmp_path: Any) -> None:
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True) as run:
        run.resume()
        with pytest.raises(UsageError, match="already"):
            run.resume()


def test_a_closed_run_tells_where_it_ended_and_is_of_no_other_use(tmp_path: Any) -> None:
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    run.resume()
    run.close()
    run.close()
    assert run.step == run.durable_step == run.stats()["step"] == 0
    for call in (run.resume, run.commit, run.flush):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_attach_changes_no_tensor_and_no_rng(tmp_path: Any) -> None:
    model, optimizer = build()
    step(model, optimizer)
    before, state, rng = live_state(model, optimizer), model.state_dict(), torch.get_rng_state()
    pointers = [p.data_ptr() for p in model.parameters()]
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    run.resume()
    assert different(before, live_state(model, optimizer)) == []
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert torch.equal(rng, torch.get_rng_state())
    assert set(state) == set(model.state_dict())
    run.close()


@pytest.mark.parametrize("mode", ["delta", "snapshot"])
def test_the_first_commit_names_what_else_drives_the_optimizer_and_is_not_stored(mode: str, tmp_path: Any) -> None:
    class Own:
        """May hold anything."""

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    def begin(name: str, extras: Callable[[Any, Any], dict[str, Any]]) -> list[Any]:
        model, optimizer = build()
        scheduler, scaler = torch.optim.lr_scheduler.StepLR(optimizer, 2), torch.amp.GradScaler("cpu", init_scale=4.0)
        given = extras(scheduler, scaler)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with everstep.attach(model, optimizer, tmp_path / name, extras=given, quiet=True, mode=mode) as run:
                run.resume()
                for _ in range(3):
                    scaler.scale(model(torch.randn(2, 4)).square().mean()).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    scheduler.step()
                    run.commit()
        return [each for each in told if each.category is everstep.errors.InexactWarning]

    (told,) = begin("forgotten", lambda scheduler, scaler: {})
    assert re.search("a scheduler sets .* of 'optimizer', and a GradScaler scales", str(told.message))
    assert told.filename == __file__
    (told,) = begin("without-scaler", lambda scheduler, scaler: {"scheduler": scheduler})
    assert "a GradScaler" in str(told.message) and "a scheduler sets" not in str(told.message)
    (told,) = begin("without-scheduler", lambda scheduler, scaler: {"scaler": scaler})
    assert "a GradScaler" not in str(told.message) and "a scheduler sets" in str(told.message)
    assert begin("known", lambda scheduler, scaler: {"scheduler": scheduler, "scaler": scaler}) == []
    assert begin("own", lambda scheduler, scaler: {"trainer": Own()}) == []


def test_attach_says_where_and_how_in_one_line(tmp_path: Any, capfd: Any) -> None:
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run")
    told = capfd.readouterr().err.strip()
    assert told.count("\n") == 0
    for word in (str(tmp_path / "run"), "delta", "MB a step", "keeps"):
        assert word in told
    run.close()


def test_quiet_says_nothing(tmp_path: Any, capfd: Any) -> None:
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True) as run:
        run.resume()
        for _ in range(30):
            step(model, optimizer)
            run.commit()
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""


# -- commits ----------------------------------------------------------------------------------------------------------


def test_a_commit_with_nothing_to_commit_commits_nothing(tmp_path: Any) -> None:
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    truth = Truth(run, model, optimizer)
    truth.resume()
    assert [run.commit() for _ in range(3)] == [0, 0, 0]
    step(model, optimizer)
    assert truth.commit(wait=True) == 1
    written = run.stats()["log_bytes"]
    with torch.no_grad():
        model(torch.randn(3, 4))
    model.eval()
    model.train()
    assert [run.commit(wait=True) for _ in range(3)] == [1, 1, 1]
    assert run.stats()["log_bytes"] == written
    crash(run)
    check_history(tmp_path / "run", truth)


def test_an_overwrite_alone_is_a_step(tmp_path: Any) -> None:
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for _ in range(6):
        step(model, optimizer)
        truth.commit()
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        truth.commit()
    assert run.step == 12
    crash(run)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", build, truth, 12)


def test_several_updates_are_one_step(tmp_path: Any) -> None:
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for t in range(8):
        for _ in range(1 + t % 3):
            step(model, optimizer)
        truth.commit()
    assert run.step == 8
    crash(run)
    check_history(tmp_path / "run", truth)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero", ["after-step", "before-accumulation", "after-commit"])
@pytest.mark.parametrize("make", [build, with_batchnorm])
@pytest.mark.sampled(2)
def test_gradient_accumulation_commits_only_at_updates(make: Any, zero: str, set_to_none: bool, tmp_path: Any) -> None:
    """Also where BatchNorm changes buffers in every forward."""
    model, optimizer = make()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    truth = Truth(run, model, optimizer)
    truth.resume()
    steps = []
    for t in range(1, 61):
        if zero == "before-accumulation" and t % 3 == 1:
            optimizer.zero_grad(set_to_none=set_to_none)
        backward(model)
        if t % 3 == 0:
            optimizer.step()
            if zero == "after-step":
                optimizer.zero_grad(set_to_none=set_to_none)
        steps.append(truth.commit())
        if zero == "after-commit" and t % 3 == 0:
            optimizer.zero_grad(set_to_none=set_to_none)
    assert steps == [t // 3 for t in range(1, 61)]
    crash(run)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", make, truth, 20)


def test_an_accumulation_that_was_cut_short_is_done_again(tmp_path: Any) -> None:
    """A crash between two micro-batches: the resumed run begins the accumulation anew, to the same result."""

    def train(path: Any, kill_after: int | None) -> tuple[nn.Module, int]:
        model, optimizer = with_batchnorm()
        torch.manual_seed(7)
        data = loader(12)
        run = everstep.attach(model, optimizer, path, quiet=True)
        for count, (x,) in enumerate(run.steps(data), 1):
            (model(x).square().mean() / 3).backward()
            if count % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if count == kill_after:
                crash(run)
                return model, max(everstep.open(path).steps)
        run.close()
        return model, max(everstep.open(path).steps)

    whole, steps = train(tmp_path / "whole", None)
    assert steps == 4
    assert train(tmp_path / "cut", 8)[1] == 2
    resumed, steps = train(tmp_path / "cut", None)
    assert steps == 4
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


def test_a_commit_that_fails_on_an_extra_loses_no_step(tmp_path: Any) -> None:
    """state_dict raises once in mid-run, the user catches it and commits again."""

    class Flaky:
        def __init__(self) -> None:
            self.fail, self.count = False, 0

        def state_dict(self) -> dict[str, Any]:
            if self.fail:
                raise RuntimeError("not now")
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    model, optimizer = build()
    extras = {"flaky": Flaky()}
    run = everstep.attach(model, optimizer, tmp_path / "run", extras=extras, quiet=True)
    truth = Truth(run, model, optimizer, extras)
    truth.resume()
    for t in range(1, 9):
        step(model, optimizer)
        extras["flaky"].count = t
        if t == 4:
            extras["flaky"].fail = True
            with pytest.raises(RuntimeError, match="not now"):
                run.commit()
            extras["flaky"].fail = False
        assert truth.commit() == t
    crash(run)
    check_history(tmp_path / "run", truth)


def test_an_extra_that_turns_unsupported_in_mid_run_is_named_and_nothing_wrong_is_stored(tmp_path: Any) -> None:
    class Bag:
        value: Any = 1

        def state_dict(self) -> dict[str, Any]:
            return {"deep": [self.value]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["deep"][0]

    model, optimizer = build()
    bag = Bag()
    run = everstep.attach(model, optimizer, tmp_path / "run", extras={"bag": bag}, quiet=True)
    truth = Truth(run, model, optimizer, {"bag": bag})
    truth.resume()
    step(model, optimizer)
    truth.commit()
    step(model, optimizer)
    bag.value = object()
    with pytest.raises(UnsupportedValueError, match=r"bag.*deep.*0.*object"):
        run.commit()
    bag.value = 2
    assert truth.commit() == 2
    step(model, optimizer)
    truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)


# -- leaving the with -------------------------------------------------------------------------------------------------


def test_leaving_the_with_commits_what_is_pending(tmp_path: Any) -> None:
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True) as run:
        truth = Truth(run, model, optimizer)
        truth.resume()
        step(model, optimizer)
        truth.commit()
        step(model, optimizer)
    truth.states[2] = live_state(model, optimizer)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", build, truth, 2)


@pytest.mark.parametrize("num_committed", [0, 5])
def test_an_exception_in_the_with_discards_what_is_pending(num_committed: int, tmp_path: Any) -> None:
    model, optimizer = build()
    with (
        pytest.raises(ZeroDivisionError),
        everstep.attach(model, optimizer, tmp_path / "run", quiet=True) as run,
    ):
        truth = Truth(run, model, optimizer)
        truth.resume()
        for _ in range(num_committed):
            step(model, optimizer)
            truth.commit()
        step(model, optimizer)
        _ = 1 / 0
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", build, truth, num_committed)


def test_an_exception_between_backward_and_step_discards_nothing_that_was_committed(tmp_path: Any) -> None:
    model, optimizer = build()
    with (
        pytest.raises(ZeroDivisionError),
        everstep.attach(model, optimizer, tmp_path / "run", quiet=True) as run,
    ):
        truth = Truth(run, model, optimizer)
        for i, (x,) in enumerate(run.steps(loader())):
            truth.note()
            model(x).sum().backward()
            if i == 3:
                _ = 1 / 0
            optimizer.step()
            optimizer.zero_grad()
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", build, truth, 3)


def test_leaving_the_with_without_resume_writes_no_steps(tmp_path: Any) -> None:
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True):
        pass
    with pytest.raises(NothingToRestoreError):
        everstep.open(tmp_path / "run").state()


def test_close_leaves_a_base_at_the_last_step(tmp_path: Any) -> None:
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True) as run:
        run.resume()
        for _ in range(5):
            step(model, optimizer)
            run.commit()
    assert everstep.open(tmp_path / "run").plan(5).base.step == 5


def test_a_run_that_is_not_closed_is_closed_at_exit(tmp_path: Any) -> None:
    code = f"""
        import sys; sys.path[:0] = {sys.path!r}
        import test_run as t, everstep
        model, optimizer = t.build()
        run = everstep.attach(model, optimizer, {str(tmp_path / "run")!r}, quiet=True)
        run.resume()
        for _ in range(4):
            t.step(model, optimizer)
            run.commit()
        t.step(model, optimizer)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    assert everstep.open(tmp_path / "run").steps == [0, 1, 2, 3, 4, 5]


# -- steps ------------------------------------------------------------------------------------------------------------


def test_steps_resumes_by_itself_and_commits_every_turn(tmp_path: Any) -> None:
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True) as run:
        truth = Truth(run, model, optimizer)
        for (x,) in run.steps(loader(), epochs=2):
            truth.note()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    truth.states[12] = live_state(model, optimizer)
    check_history(tmp_path / "run", truth)


@pytest.mark.parametrize("where", ["before the update", "after the update"])
def test_a_pass_that_was_left_by_break_goes_on_after_the_run_was_closed(where: str, tmp_path: Any) -> None:
    seen: list[int] = []
    for stop in (3, 5, 100):
        model, optimizer = build()
        with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False) as run:
            for batch in run.steps(range(8)):
                if where == "before the update" and run.step == stop:
                    break
                seen.append(batch)
                model(torch.randn(3, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if where == "after the update" and run.step + 1 == stop:
                    break
    assert seen == list(range(8)) and run.step == 8


def test_a_loop_over_epochs_with_a_scheduler_per_epoch_comes_back(tmp_path: Any) -> None:
    def objects() -> tuple[Any, ...]:
        model, optimizer = build()
        extras = {"sched": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}
        return model, optimizer, extras

    def train(path: Any, kill_at: int | None) -> tuple[Any, list[float], list[int]]:
        model, optimizer, extras = objects()
        torch.manual_seed(3)
        data = loader(5)
        run = everstep.attach(model, optimizer, path, extras=extras, quiet=True)
        losses, epochs = [], []
        for _ in range(3):
            for (x,) in run.steps(data):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                epochs.append(run.epoch)
                if len(losses) == kill_at:
                    crash(run)
                    return live_state(model, optimizer, extras), losses, epochs
            extras["sched"].step()
        run.close()
        return live_state(model, optimizer, extras), losses, epochs

    whole, losses, epochs = train(tmp_path / "whole", None)
    assert epochs == [0] * 5 + [1] * 5 + [2] * 5
    for first, second in ((3, 4), (5, 6), (7, 2)):
        path = tmp_path / f"cut{first}"
        _, a, ea = train(path, first)
        _, b, eb = train(path, second)
        final, c, ec = train(path, None)
        # The step that a kill interrupts is not committed: it is done again.
        assert a[:-1] + b[:-1] + c == losses
        assert ea[:-1] + eb[:-1] + ec == epochs
        assert different(whole, final) == []


def test_extras_of_every_kind_come_back(tmp_path: Any) -> None:
    value = {
        "tensor": torch.randn(3, 2), "array": np.arange(6.0).reshape(2, 3), "scalar": np.float32(1.5), "int": 3,
        "big": 2**70, "float": 0.1, "nan": float("nan"), "text": "ü", "bytes": b"\0\xff", "none": None, "flag": True,
        "list": [1, [2, 3]], "tuple": (1, (2,)), "numbers": {1: "a", 2: {3: "b"}}, "counter": Counter({5: 2, 9: 1}),
        "ordered": OrderedDict(b=1, a=2), "default": defaultdict(list, {"x": [1]}), "complex": 1 + 2j,
    }  # fmt: skip

    class Bag:
        def __init__(self, value: Any) -> None:
            self.value = value

        def state_dict(self) -> Any:
            return self.value

        def load_state_dict(self, state: Any) -> None:
            self.value = state

    model, optimizer = build()
    try:
        run = everstep.attach(model, optimizer, tmp_path / "run", extras={"bag": Bag(value)}, quiet=True)
    except UnsupportedValueError:
        del value["complex"]
        run = everstep.attach(model, optimizer, tmp_path / "run", extras={"bag": Bag(value)}, quiet=True)
    truth = Truth(run, model, optimizer, {"bag": Bag(value)})
    truth.resume()
    step(model, optimizer)
    truth.commit()
    crash(run)
    check_history(tmp_path / "run", truth)
    model, optimizer = build()
    bag = Bag(None)
    run = everstep.attach(model, optimizer, tmp_path / "run", extras={"bag": bag}, quiet=True)
    run.resume()
    for key, expected in value.items():
        assert type(bag.value[key]) is type(expected), key
    assert bag.value["default"].default_factory is list
    crash(run)


def test_real_schedulers_come_back(tmp_path: Any) -> None:
    schedule = torch.optim.lr_scheduler

    def objects() -> tuple[Any, ...]:
        model, optimizer = build()
        extras = {
            "multi": schedule.MultiStepLR(optimizer, [2, 4, 4, 7]),
            "plateau": schedule.ReduceLROnPlateau(optimizer, patience=1),
            "lambda": schedule.LambdaLR(optimizer, lambda t: 0.9**t),
            "chain": schedule.SequentialLR(
                optimizer, [schedule.ConstantLR(optimizer), schedule.CosineAnnealingLR(optimizer, 5)], [3]
            ),
        }
        return model, optimizer, extras

    def train(truth: Truth, objects: tuple[Any, ...], count: int) -> None:
        model, optimizer, extras = objects
        for _ in range(count):
            step(model, optimizer)
            for name in ("multi", "lambda", "chain"):
                extras[name].step()
            extras["plateau"].step(0.5)
            truth.commit()

    first = objects()
    run = everstep.attach(first[0], first[1], tmp_path / "run", extras=first[2], quiet=True)
    truth = Truth(run, *first)
    truth.resume()
    train(truth, first, 9)
    crash(run)
    check_history(tmp_path / "run", truth)
    check_resume(tmp_path / "run", objects, truth, 9)


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "fast"}, {"durability": "maybe"}, {"on_error": "ignore"}, {"audit": "none"}, {"max_inflight_steps": 0},
        {"base_interval": 0}, {"unknown": 1}, {"retention": {"bases": 0}}, {"retention": {"max_bytes": -1}},
        {"base_interval": "often"}, {"batch_steps": None}, {"retention": {"bases": "two"}}, {"rename": 5}, {"layout": 5},
        {"mode": "snapshot", "pool": 5}, {"mode": "snapshot", "pool": b"/tmp"}, {"mode": "shadow", "shadow": 5},
        {"mode": "shadow", "max_lag_bytes": "2 GB"}, {"mode": "shadow", "shadow_idle_s": None},
        {"tune": "yes"}, {"follower": 0}, {"base_interval": 2.5}, {"batch_steps": float("nan")},
        {"segment_bytes": float("nan")},
        {"retention": {"bases": 1.5}}, {"retention": {"max_bytes": float("nan")}}, {"rename": {"": 1}}, {"rename": len},
        {"retention": {"steps": 3}}, {"retention": 3}, {"extras": {"x": 3}}, {"extras": {1: None}}, {"extras": [3]},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_options_are_refused_before_anything_is_written(options: Any, tmp_path: Any) -> None:
    model, optimizer = build()
    with pytest.raises(UsageError):
        everstep.attach(model, optimizer, tmp_path / "run", quiet=True, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "objects",
    [
        lambda m, o: (o, m), lambda m, o: (m, None), lambda m, o: ({}, o), lambda m, o: (m, {}),
        lambda m, o: ({1: m}, o), lambda m, o: (m, [o]),
    ],
)  # fmt: skip
def test_wrong_objects_are_refused_before_anything_is_written(objects: Any, tmp_path: Any) -> None:
    with pytest.raises(EverstepError):
        everstep.attach(*objects(*build()), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", [None, 3, b"run", "s3://bucket/run"])
def test_what_is_no_path_of_a_folder_is_refused(path: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="path of a folder"):
        everstep.attach(*build(), path, quiet=True)
    with pytest.raises(UsageError, match="path of a folder"):
        everstep.open(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", [nn.LazyLinear(3), nn.Linear(2, 2, device="meta")], ids=["lazy", "meta"])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_models_without_values_are_refused_before_anything_is_written(model: Any, tmp_path: Any) -> None:
    _, optimizer = build()
    with pytest.raises(UsageError, match="weight"):
        everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("wrong", [(5,), (None,), (len,), ([1], 1.5), ([1], "2"), ([1], None), ([1], -1)], ids=str)
def test_steps_takes_what_can_be_iterated_and_a_number_of_passes(wrong: Any, tmp_path: Any) -> None:
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False) as run, pytest.raises(UsageError):
        next(run.steps(*wrong))


def test_resume_takes_only_steps(tmp_path: Any) -> None:
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    for wrong in (-1, "newest", 1.5, True, None):
        with pytest.raises(UsageError):
            run.resume(wrong)
    assert run.resume() == 0
    run.close()


def test_the_public_names_are_these() -> None:
    assert set(everstep.__all__) >= {"EverstepError", "History", "Run", "attach", "open"}
    for name in everstep.__all__:
        assert hasattr(everstep, name)
