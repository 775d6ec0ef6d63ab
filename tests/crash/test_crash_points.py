"""Every crash image of a recorded run restores to a step at or after the last one that was reported durable."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from crash_disk import Crash, Disk, Images, Nothing, Recorded, Recorder, Some, Tree, fingerprint_of
from crash_training import Era, Eras, Training, digest, era_of, follower_in_process, wait_for_keeper

import everstep
from everstep.errors import NotARunError, NothingToRestoreError, UnprotectedWarning
from everstep.restore.history import History
from everstep.store import files
from support import crash


@pytest.fixture
def shm() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="everstep-crash-", dir="/dev/shm")
    yield folder
    shutil.rmtree(folder)


@dataclass(repr=False)
class Recording:
    """A run that has been recorded."""

    root: str
    eras: Eras
    events: list[Recorded]
    trusted: bool = True
    """Whether what it reported durable survives the host (durability="os" does not promise that)."""
    batch_steps: int = 0
    """With durability="batch": fewer steps than so many are written and not durable. 0: something else is promised."""


@dataclass(repr=False)
class Promise:
    """What a crash at one point of the event list must leave."""

    eras: Eras
    num_eras: int = 0
    era: int = 0
    step: int = -1
    """The last step reported durable, and in which era; -1: none."""
    began: bool = False
    written: int = -1
    """The last step of this era that was handed to the operating system."""
    is_broken: bool = False
    """The log has failed: what is written from now on stands on a base that is not there yet."""

    def hear(self, note: str, trusted: bool = True) -> None:
        if note == "era":
            self.num_eras += 1
            self.written, self.is_broken = -1, False
        elif note == "failed":
            self.written, self.is_broken = -1, True
        elif m := re.fullmatch(r"written (\d+)", note):
            self.written = -1 if self.is_broken else int(m[1])
        elif m := re.fullmatch(r"durable (-?\d+)", note):
            step = int(m[1])
            self.is_broken = self.is_broken and step <= self.step
            if step >= 0:
                self.began = True
                if trusted and (self.era != self.num_eras or step > self.step):
                    self.era, self.step = self.num_eras, step

    def lines(self, step: int, state: str) -> list[Era]:
        """Eras whose line has this state at this step, among those this crash may leave as the newest."""
        found = []
        for era in self.eras.all[max(self.era, 1) - 1 : self.num_eras]:
            least = self.step if era.number == self.era else era.resumed
            if step >= least and era.truth.get(step) == state:
                found.append(era)
        return found


def record(root: str, name: str = "one", durability: str = "step", **options: Any) -> Recording:
    """A short life: bases of trainer and follower, retention, a kill, a fork, a close, a restart after it."""
    recorder, eras = Recorder(), Eras()
    os.makedirs(root)
    path = f"{root}/{name}"
    options = {"durability": durability, "batch_steps": 3, "retention": {"bases": 2}, "direct_io": False, **options}
    with files.observe(recorder.observe, recorder.begin), follower_in_process():
        with era_of(path, eras, **options) as (run, train):
            for _ in range(6):
                train(2)
                wait_for_keeper(run)
            crash(run)
        with era_of(path, eras, follower=False, **options) as (run, train):
            train(7)
            crash(run)
        with era_of(path, eras, resume=16, **options) as (run, train):
            train(6)
            run.close()
        with era_of(path, eras, **options) as (run, train):
            train(2)
            run.close()
    batch_steps = options["batch_steps"] if durability == "batch" else 0
    return Recording(root, eras, recorder.events, trusted=durability != "os", batch_steps=batch_steps)


@dataclass(repr=False)
class Checker:
    """Checks crash images one after another; equal ones once."""

    shm: str
    name: str = "one"
    seen: dict[bytes, tuple[int, int, int]] = field(default_factory=dict)
    num_images: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    all_steps: bool = False
    verify_every: int = 0
    """Every so many images verify() must have nothing to complain of: a crash is no damage."""

    def __post_init__(self) -> None:
        self.images = Images(f"{self.shm}/image")
        self.random = random.Random(1)

    def check(self, disk: Disk, how: Crash, promise: Promise, *, go_on: bool = False) -> None:
        tree = disk.tree(how)
        key = fingerprint_of(tree)
        written = promise.written if type(how) is Crash else -1  # killed: all that was handed to the system is there
        asked = (promise.era, promise.step, written)
        if key in self.seen and self.seen[key] >= asked:
            return
        self.seen[key] = asked
        self.images.show(tree)
        self.num_images += 1
        outcome = self.look(promise, written)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if go_on:
            self.go_on(promise)

    def look(self, promise: Promise, written: int) -> str:
        path = f"{self.images.root}/{self.name}"
        try:
            history = everstep.open(path)
            newest = history.plan().step
            state = digest(history.state())
        except (NotARunError, NothingToRestoreError) as e:
            assert not promise.began, f"step {promise.step} was durable, and now: {type(e).__name__}: {e}"
            return type(e).__name__
        lines = promise.lines(newest, state)
        assert not promise.began or newest >= written, f"step {written} was written, and latest is step {newest}"
        assert lines, (
            f"latest is step {newest}, which is {self.where(promise, newest, state)}; promised was step {promise.step} of "
            f"era {promise.era} or later"
        )
        self.look_back(history, lines, newest)
        if self.verify_every and self.num_images % self.verify_every == 0:
            report = history.verify()
            assert report.ok, f"a crash is no damage: {report}"
        return "restored"

    def look_back(self, history: History, lines: list[Era], newest: int) -> None:
        """Older steps are those of the same line."""
        steps = history.steps
        assert steps[-1] == newest
        for n in steps if self.all_steps else self.random.sample(steps, min(2, len(steps))):
            got = digest(history.state(n))
            lines = [e for e in lines if e.truth.get(n) == got]
            assert lines, f"step {n} of {steps} is not what it was"

    def where(self, promise: Promise, step: int, state: str) -> str:
        eras = [e.number for e in promise.eras.all if e.truth.get(step) == state]
        return f"that of eras {eras}" if eras else "of no era: a wrong state"

    def go_on(self, promise: Promise) -> None:
        """The job is started again on this image: it resumes, trains two steps, closes, and all are right."""
        copy = f"{self.shm}/copy"
        shutil.rmtree(copy, ignore_errors=True)
        self.images.copy_to(copy)
        path = f"{copy}/{self.name}"
        training = Training()
        run = everstep.attach(
            training.model, training.optimizer, path, extras=training.extras, quiet=True, audit="full", follower=False
        )
        at = run.resume()
        state = digest(training.public())
        if at == 0 and not promise.began:
            era = promise.eras.all[0]
            assert state == era.truth[0]
        else:
            lines = promise.lines(at, state)
            assert lines, f"resumed at step {at}, which is {self.where(promise, at, state)}"
            era = lines[-1]
        expected = promise.eras.after(era, at, 77, 2)
        for n in (at + 1, at + 2):
            training.train(77, n)
            run.commit()
        run.close()
        assert run.durable_step == at + 2
        history = everstep.open(path)
        assert history.steps[-1] == at + 2
        assert [digest(history.state(n)) for n in (at, at + 1, at + 2)] == [era.truth[at], *expected]
        report = history.verify()
        assert report.ok, str(report)
        shutil.rmtree(copy)


def replay(
    recording: Recording, checker: Checker, disk: Disk | None = None, promise: Promise | None = None, *, variants: int,
    go_on_every: int = 0, seed: int = 3,
) -> None:  # fmt: skip
    """All prefixes of the recorded events, each with several fates of what was not synced."""
    disk, promise = disk or Disk(recording.root), promise or Promise(recording.eras)
    seeds = random.Random(seed)
    for index, recorded in enumerate(recording.events):
        disk.feed(recorded)
        if recorded.event.op == "note":
            promise.hear(recorded.event.path, recording.trusted)
            if recording.batch_steps and promise.era == promise.num_eras:
                assert promise.written - promise.step < recording.batch_steps, "more steps than a batch are not durable"
        fates: list[Crash] = [Nothing()]
        if not disk.is_settled:
            fates += [Crash(), *(Some(seeds.randrange(1 << 30), disk.written) for _ in range(variants))]
        for i, how in enumerate(fates):
            count = checker.num_images
            go_on = bool(go_on_every) and (count + i) % go_on_every == 0
            try:
                checker.check(disk, how, promise, go_on=go_on)
            except Exception as e:
                last = [f"{r.event.op} {r.event.path} {r.event.target}" for r in recording.events[: index + 1][-12:]]
                raise AssertionError(
                    f"image {count}: after event {index} ({type(how).__name__} {vars(how).get('seed', '')}): "
                    f"{type(e).__name__}: {e}\nlast events:\n  " + "\n  ".join(last)
                ) from e


def kill_and_go_on(recording: Recording, checker: Checker, at: int, *, variants: int) -> None:
    """The process is killed after so many events (nothing is lost), the job started again; then the host crashes."""
    disk, promise = Disk(recording.root), Promise(recording.eras)
    for recorded in recording.events[:at]:
        disk.feed(recorded)
        if recorded.event.op == "note":
            promise.hear(recorded.event.path, recording.trusted)
    eras = promise.eras = recording.eras.copy()
    del eras.all[promise.num_eras :]
    disk.root = f"{checker.shm}/again"
    shutil.rmtree(disk.root, ignore_errors=True)
    Images(disk.root).show(disk.tree(Crash()))
    recorder = Recorder(at)
    with (
        files.observe(recorder.observe, recorder.begin),
        era_of(f"{disk.root}/{checker.name}", eras, follower=False, direct_io=False) as (run, train),
    ):
        train(2)
        crash(run)
    replay(Recording(disk.root, eras, recorder.events), checker, disk, promise, variants=variants)
    shutil.rmtree(disk.root)


def kill_points(recording: Recording) -> list[int]:
    """Where something is volatile, so that a killed process leaves more than a crashed host does."""
    disk = Disk(recording.root)
    found = []
    for index, recorded in enumerate(recording.events):
        disk.feed(recorded)
        if not disk.is_settled and recorded.event.op not in ("note", "sync"):
            found.append(index + 1)
    return found


def tree_of(folder: str) -> Tree:
    found: Tree = {}
    for top, folders, names in os.walk(folder):
        for name in folders:
            found[os.path.relpath(os.path.join(top, name), folder)] = None
        for name in names:
            full = os.path.join(top, name)
            with open(full, "rb") as f:
                found[os.path.relpath(full, folder)] = f.read()
    return found


def test_every_durable_byte_and_name_goes_through_the_one_module(shm: str) -> None:
    recording = record(f"{shm}/live")
    disk = Disk(recording.root)
    for recorded in recording.events:
        disk.feed(recorded)
    there = tree_of(recording.root)
    del there["one/lock"]
    assert disk.tree(Crash()) == there
    ops = {recorded.event.op for recorded in recording.events}
    assert ops >= {"mkdir", "create", "write", "sync", "syncdir", "rename", "unlink", "rmdir", "note"}


def test_every_crash_point_of_a_short_run_restores_to_a_durable_step(shm: str) -> None:
    recording = record(f"{shm}/live")
    checker = Checker(shm, verify_every=6)
    replay(recording, checker, variants=7, go_on_every=50)
    assert checker.num_images > 400
    assert checker.outcomes["restored"] > 0.8 * checker.num_images


def test_folders_above_a_new_run_are_durable_too(shm: str) -> None:
    recorder, eras = Recorder(), Eras()
    os.makedirs(f"{shm}/live")
    with files.observe(recorder.observe, recorder.begin), era_of(f"{shm}/live/a/b/run", eras) as (run, train):
        train(1)
        crash(run)
    replay(Recording(f"{shm}/live", eras, recorder.events), Checker(shm, "a/b/run"), variants=1)


@pytest.mark.long
def test_steps_after_a_kill_and_a_restart_survive_a_crash_of_the_host(shm: str) -> None:
    recording = record(f"{shm}/live")
    checker = Checker(shm)
    points = kill_points(recording)
    for at in [*points[:8:2], *points[8 :: len(points) // 9]]:
        kill_and_go_on(recording, checker, at, variants=1)
    assert checker.num_images > 200


@pytest.mark.long
def test_of_a_batch_a_kill_loses_no_step_that_was_written_and_a_power_loss_fewer_than_the_batch(shm: str) -> None:
    recording = record(f"{shm}/live", durability="batch")
    notes = [r.event.path for r in recording.events if r.event.op == "note"]
    assert sum(n.startswith("written") for n in notes) > 2 * sum(n.startswith("synced") for n in notes)
    checker = Checker(shm)
    replay(recording, checker, variants=0)
    assert checker.num_images > 50


@pytest.mark.long
@pytest.mark.parametrize("durability", ["batch", "os"])
def test_weaker_durability_never_leads_to_a_wrong_state_or_to_none(shm: str, durability: str) -> None:
    recording = record(f"{shm}/live", durability=durability)
    checker = Checker(shm)
    replay(recording, checker, variants=1, go_on_every=100)  # thousands of them in `make test-all`
    assert checker.num_images > 150


@pytest.mark.long
@pytest.mark.parametrize("operation", ["write", "sync"])
def test_crash_points_around_a_disk_that_fails_for_a_while(shm: str, operation: str) -> None:
    recorder, eras = Recorder(), Eras()
    failing = False

    def fault(op: str, path: str) -> None:
        recorder.begin(op, path)
        if failing and op == operation and path.endswith(".frames"):
            raise OSError(errno.EIO, "injected")

    os.makedirs(f"{shm}/live")
    with (
        warnings.catch_warnings(),
        files.observe(recorder.observe, fault),
        era_of(f"{shm}/live/one", eras, on_error="warn", follower=False, direct_io=False) as (run, train),
    ):
        warnings.simplefilter("ignore", UnprotectedWarning)
        train(5)
        run.flush()
        failing = True
        while run.stats()["unprotected_since"] is None:  # the writer may be behind
            assert run.step < 100
            train(1)
            time.sleep(0.02)
        failing = False
        while run.stats()["unprotected_since"] is not None:
            assert run.step < 200
            time.sleep(0.2)
            train(1)
        train(3)
        run.close()
    checker = Checker(shm, verify_every=5)
    replay(Recording(f"{shm}/live", eras, recorder.events), checker, variants=2, go_on_every=50)
    assert checker.num_images > 100


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("durability", ["step", "batch", "os"])
def test_thousands_of_crash_images_restore_to_a_durable_step(shm: str, durability: str) -> None:
    checker = Checker(shm, all_steps=True, verify_every=3 if durability == "step" else 0)
    policies = ({"bases": 2}, {"bases": 1}, {"bases": 1, "every": 5, "window_steps": 3})
    for seed, policy in enumerate(policies):
        recording = record(f"{shm}/live-{seed}", durability=durability, retention=policy)
        replay(recording, checker, variants=30, go_on_every=20, seed=seed)
    assert checker.num_images > 2000


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("durability", ["step", "os"])
def test_a_kill_at_every_point_and_a_restart_survive_a_crash_of_the_host(shm: str, durability: str) -> None:
    recording = record(f"{shm}/live", durability=durability)
    checker = Checker(shm)
    for at in kill_points(recording):
        kill_and_go_on(recording, checker, at, variants=3)
    assert checker.num_images > 2000
