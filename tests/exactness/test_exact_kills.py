"""Real processes, really killed, at random moments: the run that comes out is the one that was never interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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


class Worker:
    """A process of the server's that trains, in a session of its own."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._fd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = None

    def is_alive(self) -> bool:
        return self._fd is not None and not select.select([self._fd], [], [], 0)[0]

    def kill(self) -> bool:
        """Whether it was still there; returns when it is not."""
        if not self.is_alive():
            return False
        os.kill(self.pid, signal.SIGKILL)
        select.select([self._fd], [], [])
        return True

    def clear_away(self) -> None:
        """Nothing of it is left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._fd is not None:
            os.close(self._fd)


Start = Callable[[list[str], Path], Worker]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts a worker with these arguments and this file for what it says."""
    server = subprocess.Popen([sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None

    def one(arguments: list[str], output: Path) -> Worker:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps({"arguments": arguments, "output": str(output)}) + "\n")
        server.stdin.flush()
        return Worker(int(server.stdout.readline()))

    with server:
        yield one
        server.stdin.close()


def train_under_fire(
    start: Start, folder: Path, case: dict[str, Any], choose: random.Random, num_kills: int, num_batches: int
) -> tuple[Journal, int]:
    """Start the worker until it ends; kill it `num_kills` times, after random numbers of turns. (Journal, kills)"""
    journal = Journal(folder / "journal")
    kills, generation, log = 0, 0, folder / "output"
    left_over = contextlib.ExitStack()
    with left_over:
        while True:
            # Another seed each time, so that nothing is right by chance; but a run without a base yet begins anew.
            seed = SEED + 100 * generation if list(folder.glob("run/timelines/*/bases/????????????/manifest.json")) else SEED
            arguments = [str(folder / "run"), str(journal.path), str(folder / "result"), json.dumps(case), str(seed)]
            seen = len(journal.read())
            share = (num_batches - seen_batches(journal)) / (num_kills - kills + 1)
            patience = choose.uniform(1, max(2.0, 1.5 * share)) if kills < num_kills else float("inf")
            # Processes are left to themselves until the end of the test: forked loader workers outlive a kill.
            worker = start(arguments, log)
            left_over.callback(worker.clear_away)
            deadline = time.monotonic() + 100
            killed = False
            while worker.is_alive():
                assert time.monotonic() < deadline, f"the worker hangs: {log.read_text()[-2000:]}"
                if len(journal.read()) - seen > patience:
                    time.sleep(choose.uniform(0, 0.02))
                    killed = worker.kill()
                    break
                time.sleep(0.003)
            generation += 1
            kills += killed
            if not killed:
                assert journal.read()[-1:] == [["ended"]], log.read_text()[-4000:]
                return journal, kills


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

    def run(self, start: Start) -> Fight:
        """Train until the end, through all kills."""
        attach = {"max_inflight_steps": MAX_INFLIGHT_STEPS, **self.attach}
        case = {**self.case, "epochs": self.epochs, "pause_s": 0.004, "attach": attach}
        num_batches = self.epochs * BATCHES_A_PASS
        self.journal, self.kills = train_under_fire(start, self.folder, case, self.choose, self.num_kills, num_batches)
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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(3)
def test_a_run_killed_at_random_moments_ends_as_if_it_never_was(name: str, start: Start, tmp_path: Path) -> None:
    Fight(tmp_path, CASES[name], 3, 12, random.Random(name)).run(start).check()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_a_run_killed_ten_times_ends_as_if_it_never_was(name: str, seed: int, start: Start, tmp_path: Path) -> None:
    attach = {"durability": ["step", "os", "batch"][seed], "base_interval": 10, "batch_steps": MAX_INFLIGHT_STEPS}
    Fight(tmp_path, CASES[name], 10, 25, random.Random(f"{name} {seed}"), attach).run(start).check()


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
