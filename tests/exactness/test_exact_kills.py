"""Real processes, really killed, at random moments: the run that comes out is the one that was never interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SEED, copied, must_equal, run_plainly
from models import Training, build

import everstep
from everstep.store.bases import BaseWriter

WORKER = Path(__file__).with_name("worker.py")
MAX_INFLIGHT_STEPS = 3
BATCHES_A_PASS = 4
CASES: dict[str, dict[str, Any]] = {
    "mlp by hand": {"setup": "mlp", "family": "adam-foreach", "style": "hand"},
    "cnn with workers": {"setup": "cnn", "family": "sgd-nesterov-foreach", "style": "nested", "num_workers": 2},
    "transformer": {"setup": "transformer", "family": "adamw-fused", "style": "flat", "size": 2},
    "sparse embedding": {"setup": "embedding", "family": "adagrad", "style": "nested", "sparse": "sparse-adam"},
    "wgan": {"setup": "gan", "family": "rmsprop", "style": "flat", "clamp": True},
    "lstm that thaws": {"setup": "lstm", "family": "adamw", "style": "nested", "schedule": ""},
}


@dataclass
class Journal:
    """What all processes of a run wrote down."""

    path: Path
    lines: list[list[str]] = field(default_factory=list)

    def read(self) -> list[list[str]]:
        if self.path.exists():
            self.lines = [line.split() for line in self.path.read_text().splitlines()]
        return self.lines

    def turns(self) -> list[tuple[int, int, float]]:
        return [
            (int(words[1]), int(words[2]), struct.unpack("<d", bytes.fromhex(words[3]))[0])
            for words in self.read()
            if words[0] == "turn"
        ]


@contextlib.contextmanager
def process(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in a session of its own; nothing of it is left behind."""
    with open(log, "ab") as output:
        worker = subprocess.Popen(
            [sys.executable, str(WORKER), *arguments], stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield worker
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def train_under_fire(
    folder: Path, case: dict[str, Any], choose: random.Random, num_kills: int, num_batches: int
) -> tuple[Journal, int]:
    """Start the worker until it ends; kill it `num_kills` times, after random numbers of turns. (Journal, kills)"""
    journal = Journal(folder / "journal")
    kills, generation, log = 0, 0, folder / "output"
    left_over = contextlib.ExitStack()
    with left_over:
        while True:
            # Another seed each time, so that nothing is right by chance; but a run without a base yet begins anew.
            seed = SEED + 100 * generation if list(folder.glob("run/timelines/*/bases/*/manifest.json")) else SEED
            arguments = [str(folder / "run"), str(journal.path), str(folder / "result"), json.dumps(case), str(seed)]
            seen = len(journal.read())
            share = (num_batches - seen_batches(journal)) / (num_kills - kills + 1)
            patience = choose.uniform(1, max(2.0, 1.5 * share)) if kills < num_kills else float("inf")
            # Processes are left to themselves until the end of the test: forked loader workers outlive a kill.
            worker = left_over.enter_context(process(arguments, log))
            deadline = time.monotonic() + 60
            while worker.poll() is None:
                assert time.monotonic() < deadline, f"the worker hangs: {log.read_text()[-2000:]}"
                if len(journal.read()) - seen > patience:
                    time.sleep(choose.uniform(0, 0.02))
                    os.kill(worker.pid, signal.SIGKILL)
                    worker.wait()
                    break
                time.sleep(0.003)
            generation += 1
            if worker.returncode == 0:
                return journal, kills
            assert worker.returncode == -signal.SIGKILL, log.read_text()[-4000:]
            kills += 1


def seen_batches(journal: Journal) -> int:
    return max((n for n, _, _ in journal.turns()), default=0)


def check_losses(journal: Journal, expected: dict[int, float]) -> None:
    """Every loss that any process ever computed is that of the uninterrupted run, and none is missing."""
    turns = journal.turns()
    for batch, _, loss in turns:
        must_equal(loss, expected[batch], f"loss of batch {batch}")
    assert {batch for batch, _, _ in turns} == set(expected)


def check_steps_lost(journal: Journal) -> int:
    """Between what was committed at a kill and where the next process began lie at most the steps in flight."""
    committed = lost = 0
    for words in journal.lines:
        if words[0] == "resumed":
            resumed = int(words[1])
            assert committed - resumed <= MAX_INFLIGHT_STEPS, f"step {committed} was committed, resumed at {resumed}"
            lost = max(lost, committed - resumed)
        elif words[0] == "turn":
            committed = int(words[2])
    return lost


@dataclass
class Fight:
    """One run and what became of it."""

    folder: Path
    case: dict[str, Any]
    num_kills: int
    epochs: int
    choose: random.Random
    attach: dict[str, Any] = field(default_factory=dict)
    journal: Journal | None = None
    kills: int = 0

    def make(self, seed: int) -> Training:
        t = build(**{k: v for k, v in self.case.items() if k != "style"}, seed=seed)
        t.epochs = self.epochs
        return t

    def run(self) -> Fight:
        """Train until the end, through all kills. In any thread."""
        attach = {"max_inflight_steps": MAX_INFLIGHT_STEPS, **self.attach}
        case = {**self.case, "epochs": self.epochs, "pause_s": 0.004, "attach": attach}
        num_batches = self.epochs * BATCHES_A_PASS
        self.journal, self.kills = train_under_fire(self.folder, case, self.choose, self.num_kills, num_batches)
        return self

    def check(self) -> None:
        """Everything that any process did or left behind is that of a run without kills and without Everstep."""
        truth = run_plainly(self.make, self.case["style"])
        losses = {n: loss for n, _, loss in truth.turns}
        assert self.journal is not None and self.kills >= 3
        check_losses(self.journal, losses)
        check_steps_lost(self.journal)
        result = torch.load(self.folder / "result", weights_only=False)
        must_equal(result, truth.end, "everything at the end")
        state = everstep.open(self.folder / "run").state()
        must_equal(copied(state), truth.public[len(losses)], "the last step")


@pytest.fixture(scope="module")
def fights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Fight]]]:
    """All runs, two at a time: most of their time is the start of processes."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(Fight(tmp_path_factory.mktemp("fight"), case, 3, 12, random.Random(name)).run)
            for name, case in CASES.items()
        }


@pytest.mark.parametrize("name", CASES)
def test_a_run_killed_at_random_moments_ends_as_if_it_never_was(
    name: str, fights: dict[str, Future[Fight]]
) -> None:
    fights[name].result().check()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_a_run_killed_ten_times_ends_as_if_it_never_was(name: str, seed: int, tmp_path: Path) -> None:
    attach = {"durability": ["step", "os", "batch"][seed], "base_interval": 10, "batch_steps": MAX_INFLIGHT_STEPS}
    Fight(tmp_path, CASES[name], 10, 25, random.Random(f"{name} {seed}"), attach).run().check()


def test_what_a_kill_may_cost_is_bounded_before_the_first_base_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = BaseWriter.finish

    def slowly(self: BaseWriter, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return finish(self, *args, **kwargs)

    monkeypatch.setattr(BaseWriter, "finish", slowly)
    t = build("mlp", "sgd", 1)
    with everstep.attach(
        t.model, t.optimizer, tmp_path / "run", extras=t.extras, quiet=True, max_inflight_steps=MAX_INFLIGHT_STEPS
    ) as run:  # fmt: skip
        for batch in run.steps(t.loader, epochs=2):
            assert run.step - max(run.durable_step, 0) <= MAX_INFLIGHT_STEPS
            t.turn(batch)
        assert run.stats()["stall_s"] > 0
