"""The tuner inside a run: fed by the keeper, its decisions in force, in stats() and in the run's folder."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import everstep
from everstep.codec import MIN_BYTES, Chooser
from everstep.errors import UsageError
from everstep.follow import tuned
from everstep.follow.tuned import Ground, Tuned, choose_mode
from everstep.opening import _refuse
from everstep.options import Options
from everstep.store import files
from everstep.store.runs import RunPath
from everstep.tune import tuner
from everstep.tune.averages import BaseMade, Counters
from everstep.tune.model import RAW, Limits, Setting
from support import crash


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))
    return model, torch.optim.AdamW(model.parameters())


def train(run, model, optimizer, steps):
    for _ in range(steps):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.commit()


class Fed:
    """A Tuned on a folder, with made-up numbers."""

    def __init__(self, path, *, limits=None, rate=1 / 3600, mode=None, generation=1, sync_s=0.001, max_batch=1):
        self.step, self.trained_s, self.sync_s, self._sync_s = 0, 0.0, 0.0, sync_s
        self.applied: list[Setting] = []
        self.fold_s = 0.005
        ground = Ground(limits=limits or Limits(), failure_rate=rate, memory_bytes=1e9, segment_bytes=0)
        self.setting = Setting(base_interval=10, mode="delta" if mode is None else mode.setting.mode)
        self.tuned = Tuned(
            RunPath(path), generation, self.setting, ground, max_batch=max_batch, counters=self.counters,
            apply=self.apply, mode=mode,
        )  # fmt: skip

    def apply(self, setting):
        self.setting = setting
        self.applied.append(setting)

    def counters(self):
        return Counters(
            step=self.step, trained_s=self.trained_s, waited_s=0.0, hook_s=0.0, log_bytes=self.step * 1000,
            write_s=self.sync_s * 2, sync_s=self.sync_s,
        )  # fmt: skip

    def train(self, steps, extra_s=0.0):
        self.step += steps
        self.trained_s += 0.1 * steps + extra_s
        self.sync_s += steps * self._sync_s

    def base(self):
        self.train(self.setting.base_interval)
        self.tuned.base_begins(self.counters())
        self.train(2, extra_s=0.3)
        steps = self.setting.base_interval
        folded_s = steps * self.fold_s
        made = BaseMade(num_bytes=5000, write_s=0.02, num_folded=steps, fold_s=folded_s, fold_cpu_s=folded_s)
        self.tuned.base_made(made, self.counters())


@pytest.fixture(autouse=True)
def no_contention(monkeypatch):
    """Numbers here are made up: what this machine's cores make of them does not matter."""
    monkeypatch.setattr(tuned, "contention_of", lambda num_threads, num_cores: 0.0)


@pytest.fixture
def folder(tmp_path):
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False) as run:
        run.resume()
        train(run, model, optimizer, 2)
    return tmp_path / "run"


def test_decisions_are_applied_and_kept_with_their_reasons(folder):
    fed = Fed(folder)
    for _ in range(8):
        fed.base()
    decisions = RunPath(folder).read_tuning().decisions
    assert [d["setting"]["base_interval"] for d in decisions if d["changed"]] == [s.base_interval for s in fed.applied[1:]]
    assert fed.applied[0].base_interval == 10 and fed.applied[1].base_interval > 10
    assert all(d["reason"] and 0 < d["expected"]["goodput"] <= 1 and d["step"] > 0 for d in decisions)
    assert fed.tuned.stats()["decisions"] == list(decisions)
    assert fed.tuned.stats()["setting"]["base_interval"] == fed.setting.base_interval


def test_the_next_generation_goes_on_with_what_was_learned(folder):
    fed = Fed(folder)
    for _ in range(8):
        fed.base()
    again = Fed(folder, generation=2)
    assert again.setting == fed.setting
    assert again.tuned.stats()["averages"] == fed.tuned.stats()["averages"]


def test_a_generation_that_was_not_closed_is_a_failure(folder):
    Fed(folder).tuned.close()
    assert Fed(folder, generation=2).tuned.stats()["failures"] == 0
    assert Fed(folder, generation=3).tuned.stats()["failures"] == 1
    assert RunPath(folder).read_tuning().up_s > 0


def test_what_cannot_be_read_is_learned_again(folder):
    fed = Fed(folder)
    for _ in range(4):
        fed.base()
    with open(RunPath(folder).tuning(), "r+b") as f:
        f.seek(40)
        f.write(b"!!")
    again = Fed(folder, generation=2)
    assert again.tuned.stats()["decisions"] == [] and RunPath(folder).read_tuning().generation == 2


def test_auto_stays_where_it_is_until_another_mode_is_worth_it(folder):
    ground = Ground(limits=Limits(), failure_rate=1 / 60, memory_bytes=1e12, segment_bytes=0)
    assert choose_mode(RunPath(folder), ground, 2) is None
    fed = Fed(folder, rate=1e-9)
    fed.fold_s = 0.08  # nearly as long as a step: replaying is no good
    for _ in range(6):
        fed.base()
    rarely = Ground(limits=Limits(), failure_rate=1e-9, memory_bytes=1e12, segment_bytes=0)
    assert choose_mode(RunPath(folder), rarely, 2).setting.mode == "delta"
    found = choose_mode(RunPath(folder), ground, 2)
    assert found.setting.mode == "shadow"
    assert Fed(folder, generation=2, mode=found).setting.base_interval == found.setting.base_interval
    assert RunPath(folder).read_tuning().decisions[-1]["reason"] == found.reason


def test_a_run_is_tuned_by_its_own_follower(tmp_path, memory):
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, base_interval=5, tune=True, mtbf_s=1e7)
    run.resume()
    end = time.monotonic() + 80
    while not run.stats()["tuner"]["decisions"] and time.monotonic() < end:
        train(run, model, optimizer, 1)
        time.sleep(0.01)
    told = run.stats()["tuner"]
    crash(run)
    kept = RunPath(tmp_path / "run").read_tuning().averages
    assert told["decisions"], told
    assert {"step_s", "frame_bytes", "write_s", "sync_s", "base_s", "fold_s", "base_stall_s"} <= set(told["averages"])
    assert told["averages"]["step_s"] > 0.01 and told["averages"]["frame_bytes"] > 0
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, base_interval=5, mode="auto", mtbf_s=1e7) as run:
        run.resume()
        now = run.stats()["tuner"]
        assert now["failures"] == 1 and now["averages"]["step_s"] == kept["step_s"][0]
        assert "load_s" in now["averages"]
        if now["setting"]["mode"] == "delta":
            assert run._keeper._interval == now["setting"]["base_interval"]
        train(run, model, optimizer, 1)
    assert RunPath(tmp_path / "run").read_tuning().closed


def test_auto_attaches_with_a_shadow_where_measurements_speak_for_one(folder, memory):
    fed = Fed(folder, rate=1e-9)
    fed.fold_s = 0.08
    for _ in range(6):
        fed.base()
    fed.tuned.close()
    model, optimizer = build()
    with everstep.attach(model, optimizer, folder, quiet=True, mode="auto", mtbf_s=60) as run:
        assert run.resume() == 2
        train(run, model, optimizer, 3)
        told = run.stats()
        assert "shadow_pid" in told
        assert told["tuner"]["setting"]["mode"] == "shadow" and told["tuner"]["failures"] == 0
        last = told["tuner"]["decisions"][-1]
        assert last["changed"] and last["setting"]["base_interval"] == run._keeper._interval and "shadow" in last["reason"]
    assert everstep.open(folder).steps[-1] == 5


@pytest.mark.long
def test_a_shadow_is_tuned_and_writes_bases_as_often_as_its_tuner_says(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(tuner, "is_worth", lambda then, now: then > now)  # a quick machine makes nothing of a base
    model, optimizer = build()
    options = {"quiet": True, "mode": "shadow", "base_interval": 5, "tune": True, "mtbf_s": 1e7}
    run = everstep.attach(model, optimizer, tmp_path / "run", **options)
    run.resume()
    end = time.monotonic() + 80
    while run.stats()["tuner"]["setting"]["base_interval"] < 80 and time.monotonic() < end:
        train(run, model, optimizer, 1)
        time.sleep(0.005)
    told = run.stats()
    asked = told["tuner"]["setting"]["base_interval"]
    assert asked >= 80 and run._keeper._interval == asked and told["tuner"]["paused"] is None, told["tuner"]
    assert {"step_s", "frame_bytes", "base_s", "fold_s", "base_stall_s"} <= set(told["tuner"]["averages"])
    assert told["tuner"]["averages"]["step_s"] > 0.005 and told["tuner"]["averages"]["state_bytes"] > 0
    bases = [told["base_step"]]
    while max([0, *(b - a for a, b in itertools.pairwise(bases))]) < 80 and time.monotonic() < end:
        train(run, model, optimizer, 1)
        if run.stats()["base_step"] > bases[-1]:
            bases.append(run.stats()["base_step"])
    assert bases[-1] - bases[-2] >= 80, bases  # it was started with 5, and folds at most 16 frames at once
    crash(run)
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", **options) as run:
        run.resume()
        now = run.stats()["tuner"]
        assert now["failures"] == 1 and now["setting"]["base_interval"] == run._keeper._interval >= asked
        assert now["averages"]["fetch_s"] > 0
        assert [talk._interval for talk in run._keeper._talks] == [run._keeper._interval]
        train(run, model, optimizer, 1)


def test_a_shadow_that_has_outlived_its_trainer_goes_by_the_interval_of_the_next(tmp_path, memory):
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, mode="shadow", base_interval=1000)
    run.resume()
    train(run, model, optimizer, 3)
    end = time.monotonic() + 80
    while run.stats()["folded_step"] < 3 and time.monotonic() < end:
        time.sleep(0.02)
    crash(run)
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, mode="shadow", base_interval=5) as run:
        begun = run.resume()
        train(run, model, optimizer, 12)  # fewer than the trainer would take one itself after
        while run.stats()["base_step"] < begun + 5 and time.monotonic() < end:
            time.sleep(0.02)
        assert begun + 5 <= run.stats()["base_step"] <= begun + 12 and run.stats()["shadows"] == 0


def test_a_run_whose_bases_are_not_measured_says_so(tmp_path, memory):
    """Its optimizer is this test's own: no follower can build it."""

    class Own(torch.optim.SGD):
        pass

    for mode in ("delta", "shadow"):
        model, _ = build()
        optimizer = Own(model.parameters(), lr=0.1)
        with everstep.attach(model, optimizer, tmp_path / mode, quiet=True, tune=True, mode=mode) as run:
            run.resume()
            train(run, model, optimizer, 2)
            assert "not measured" in run.stats()["tuner"]["paused"]


def test_shadows_of_several_ranks_are_not_tuned_and_that_is_said(tmp_path):
    options = Options(tune=True)
    with pytest.raises(UsageError, match="several ranks"):
        _refuse(None, options, "shadow", SimpleNamespace(size=2))
    assert _refuse(None, options, "shadow", SimpleNamespace(size=1)) == []


def test_frames_are_stored_as_they_are_where_the_tuner_says_so(tmp_path):
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, tune=True) as run:
        run.resume()
        encoder = run._capture.offload._encoder
        assert encoder.lossless and encoder.spent is not None
        run._keeper.tuned._apply(Setting(base_interval=77, codec=RAW))
        assert not encoder.lossless and run._keeper._interval == 77
        run._keeper.tuned._apply(Setting())
        assert encoder.lossless


def test_a_limit_on_bytes_holds_from_the_first_step(tmp_path):
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, tune=True, max_bytes=10_000_000) as run:
        run.resume()
        assert run._keeper._policy.max_bytes == run._keeper._policy.min_bytes == 10_000_000


def test_a_run_that_is_not_tuned_leaves_no_document(folder):
    assert not (folder / "tuning.json").exists()


@pytest.mark.parametrize(
    "options",
    [{"max_overhead": 0.1}, {"mtbf_s": 5}, {"tune": True, "mtbf_s": 0}, {"tune": True, "max_bytes": -1},
     {"tune": True, "follower": False}, {"tune": True, "mode": "snapshot"},
     {"tune": True, "mode": "shadow", "shadow": "tcp://127.0.0.1:9"}],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(tmp_path, options):
    with pytest.raises(UsageError):
        everstep.attach(*build(), tmp_path / "run", quiet=True, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_slow_disk_and_kills_lead_where_the_model_says(tmp_path):
    """A sync takes longer than a step: after a few bases there are several steps a sync, and training waits less for them. A
    trainer that is killed goes on with what it had learned, and counts the kill."""
    path = RunPath(tmp_path / "run")

    def is_decided(line):  # and stored: a kill just before that would undo it
        decisions = path.read_tuning().decisions
        return bool(decisions) and decisions[-1]["setting"]["batch_steps"] >= 4

    first = trained_until(tmp_path / "run", is_decided)
    second = trained_until(tmp_path / "run", lambda line: line["step"] > first[-1]["step"] + 20)
    third = trained_until(tmp_path / "run", lambda line: True)
    assert first[0]["setting"]["batch_steps"] == 1
    assert second[0]["setting"]["batch_steps"] >= 4 and third[0]["setting"]["batch_steps"] >= 4
    assert [lines[-1]["failures"] for lines in (first, second, third)] == [0, 1, 2]
    untuned = [line["waited_s"] for line in first if line["setting"]["batch_steps"] == 1]
    tuned = [line["waited_s"] for line in second + third]
    assert sum(tuned) / len(tuned) < sum(untuned) / len(untuned)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_codecs_that_take_longer_than_a_step_are_given_up_and_the_run_goes_on_bit_for_bit(tmp_path, monkeypatch):
    quick = Chooser.encode

    def slow(self, key, raw, itemsize, is_float32):
        if self._tries and len(raw) >= MIN_BYTES:
            time.sleep(0.1)
        return quick(self, key, raw, itemsize, is_float32)

    def build_large():
        torch.manual_seed(0)
        model = nn.Linear(8, 20_000)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    monkeypatch.setattr(Chooser, "encode", slow)
    model, optimizer = build_large()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, base_interval=10, tune=True, mtbf_s=1e6)
    run.resume()
    end = time.monotonic() + 200
    while run.stats()["tuner"]["setting"]["codec"] != RAW and time.monotonic() < end:
        train(run, model, optimizer, 1)
        time.sleep(0.01)
    told = run.stats()["tuner"]
    assert told["setting"]["codec"] == RAW and not run._capture.offload._encoder.lossless, told
    [change] = [d for d in told["decisions"] if d["changed"] and d["setting"]["codec"] == RAW][:1]
    assert "frames as they are: lossless codecs would save only" in change["reason"]
    train(run, model, optimizer, 5)
    run.flush()
    step, state = run.step, model.state_dict()
    crash(run)
    model, optimizer = build_large()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, base_interval=10, tune=True, mtbf_s=1e6) as run:
        assert run.resume() == step and not run._capture.offload._encoder.lossless
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def trained_until(path, enough):
    """What a training tells until it is killed."""
    script = os.path.join(os.path.dirname(__file__), "tuned_training.py")
    lines = []
    with subprocess.Popen([sys.executable, script, str(path)], stdout=subprocess.PIPE, text=True) as process:
        for text in process.stdout:
            lines.append(json.loads(text))
            if enough(lines[-1]):
                break
        process.kill()
    return lines


def test_a_document_that_cannot_be_written_at_the_end_keeps_nobody_from_closing(tmp_path, capsys):
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, tune=True)
    run.resume()
    train(run, model, optimizer, 3)

    def fault(op, path):
        if "tuning" in path:
            raise OSError(28, "No space left on device", path)

    with files.observe(fault=fault):
        run.close()
    assert "No space left" in capsys.readouterr().err
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, tune=True) as run:
        assert run.resume() == 3 and run.stats()["tuner"]["failures"] == 1
