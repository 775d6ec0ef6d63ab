"""A tiny training run whose every step is known bit for bit, and the truth S(n) of each of its eras."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import everstep
from everstep.errors import AuditError, EverstepError
from everstep.follow.compact import Compactor
from everstep.follow.keeper import Keeper
from everstep.memory import plain, view_bytes
from everstep.store import files


def digest(value: Any) -> str:
    """A hash of a nested state: every bit of every tensor and number, its types and names."""
    h = hashlib.blake2b(digest_size=12)
    _feed(h.update, value)
    return h.hexdigest()


def _feed(put: Callable[[bytes], None], value: Any) -> None:
    if isinstance(value, torch.Tensor):
        put(f"<{value.dtype} {tuple(value.shape)}>".encode())
        put(view_bytes(plain(value)).tobytes())
    elif isinstance(value, Mapping):
        put(b"{")
        for key in sorted(value, key=repr):
            put(repr(key).encode())
            _feed(put, value[key])
        put(b"}")
    elif isinstance(value, (list, tuple)):
        put(f"[{type(value).__name__}".encode())
        for each in value:
            _feed(put, each)
        put(b"]")
    elif isinstance(value, float):
        put(np.float64(value).tobytes())
    else:
        put(f"{type(value).__name__} {value!r};".encode())


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {k: _clone(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_clone(v) for v in value)
    return value


class Training:
    """Model, optimizer, scheduler, and one step of training with randomness of its own."""

    def __init__(self, width: int = 128) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.9)
        self.extras = {"sched": self.scheduler}

    def train(self, era: int, step: int) -> None:
        """One step; its data depends on the era, so that frames of different eras are never alike."""
        if step == 5:
            # From here on another layout: the run then has more than one.
            self.model[0].bias.requires_grad_(era % 2 == 0)
        data = torch.Generator().manual_seed(era * 1000 + step)
        loss = self.model(torch.randn(4, 6, generator=data)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def public(self) -> dict[str, Any]:
        """What History.state must return now."""
        names = {p: n for n, p in self.model.named_parameters()}
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": {
                "state": {names[p]: dict(s) for p, s in self.optimizer.state.items()},
                "param_groups": [{**g, "params": [names[p] for p in g["params"]]} for g in self.optimizer.param_groups],
            },
            "extras": {"sched": self.scheduler.state_dict()},
        }

    def saved(self) -> dict[str, Any]:
        """Everything needed to go on from here in other objects."""
        return {
            "model": _clone(self.model.state_dict()),
            "frozen": [not p.requires_grad for p in self.model.parameters()],
            "optimizer": _clone(self.optimizer.state_dict()),
            "sched": _clone(self.scheduler.state_dict()),
            "rng": torch.get_rng_state(),
        }

    @classmethod
    def going_on_from(cls, saved: dict[str, Any], width: int = 128) -> Training:
        made = cls(width)
        made.model.load_state_dict(saved["model"])
        for p, frozen in zip(made.model.parameters(), saved["frozen"], strict=True):
            p.requires_grad_(not frozen)
        made.optimizer.load_state_dict(_clone(saved["optimizer"]))
        made.scheduler.load_state_dict(_clone(saved["sched"]))
        torch.set_rng_state(saved["rng"])
        return made


@dataclass
class Era:
    """One generation as it was trained: the truth of its whole line, ancestors included."""

    number: int
    resumed: int = 0
    truth: dict[int, str] = field(default_factory=dict)
    saved: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def last(self) -> int:
        return max(self.truth)


class Eras:
    """All generations of a run, and which line a state belongs to."""

    def __init__(self) -> None:
        self.all: list[Era] = []
        self._oracle: dict[tuple[int, int, int, int], list[str]] = {}

    def copy(self) -> Eras:
        other = Eras()
        other.all = list(self.all)
        return other

    def begin(self, training: Training, resumed: int, state: str) -> Era:
        """A new era that goes on at this step of whichever line has this state there."""
        era = Era(len(self.all) + 1, resumed)
        before = [e for e in self.all if e.truth.get(resumed) == state]
        if self.all:
            assert before, f"resumed at step {resumed} with a state that no era had there"
            era.truth = {n: h for n, h in before[-1].truth.items() if n <= resumed}
            era.saved = {n: s for n, s in before[-1].saved.items() if n <= resumed}
        else:
            era.truth[0], era.saved[0] = state, training.saved()
        self.all.append(era)
        return era

    def after(self, era: Era, step: int, as_era: int, num_steps: int) -> list[str]:
        """Oracle: the states when training goes on from S(step) of an era for so many steps."""
        key = (era.number, step, as_era, num_steps)
        if key not in self._oracle:
            found = self._oracle[key] = []
            with torch.random.fork_rng(devices=[]):
                training = Training.going_on_from(era.saved[step])
                for n in range(step + 1, step + num_steps + 1):
                    training.train(as_era, n)
                    found.append(digest(training.public()))
        return self._oracle[key]


OPTIONS: dict[str, Any] = {"quiet": True, "audit": "full", "base_interval": 4, "segment_bytes": 40_000}


@contextmanager
def era_of(
    path: str, eras: Eras, *, resume: int | str = "latest", **options: Any
) -> Iterator[tuple[Any, Callable[[int], None]]]:
    """Attach, resume, and hand out the Run and a function that trains and commits so many steps. Does not close."""
    training = Training()
    files.note("era")
    run = everstep.attach(training.model, training.optimizer, path, extras=training.extras, **{**OPTIONS, **options})
    at = run.resume(resume)
    era = eras.begin(training, at, digest(training.public()))
    files.note(f"resumed {at}")
    files.note(f"durable {run.durable_step}")

    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            n = run.step + 1
            training.train(era.number, n)
            era.truth[n], era.saved[n] = digest(training.public()), training.saved()
            assert run.commit() == n
            files.note(f"durable {run.durable_step}")

    yield run, train


class _Follower:
    """The follower process's loop in a thread of this process, behind real pipes: what it writes is then observed too."""

    def __init__(self, keeper: Any) -> None:
        self._compactor = Compactor(keeper._path, keeper._timeline, keeper._generation)
        commands, theirs = os.pipe(), os.pipe()
        self._commands, self.stdin = os.fdopen(commands[0]), os.fdopen(commands[1], "w")
        self.stdout, self._answers = os.fdopen(theirs[0]), os.fdopen(theirs[1], "w")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._commands, self._answers:
            for line in self._commands:
                self._answers.write(json.dumps(self._answer(json.loads(line)["base"])) + "\n")
                try:
                    self._answers.flush()
                except OSError:  # the keeper is gone
                    return

    def _answer(self, step: int) -> dict[str, Any]:
        try:
            self._compactor.advance(step)
            manifest = self._compactor.write_base(direct=False)
            return {"event": "base", "step": manifest.step, "proven": self._compactor.proven}
        except AuditError as e:
            return {"event": "mismatch", "step": e.step, "message": str(e)}
        except EverstepError as e:
            self._compactor.forget()
            return {"event": "error", "message": f"{type(e).__name__}: {e}"}

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join()
        return 0

    def kill(self) -> None:
        """What it is doing goes on to its end (a thread cannot be killed); then it ends."""
        with contextlib.suppress(OSError):
            self.stdin.close()


@contextmanager
def follower_in_process() -> Iterator[None]:
    """Within this, followers of new runs are threads (the keeper's) of this process."""
    before = Keeper._follower

    def follower(keeper: Any) -> Any:
        if keeper._process is None or keeper._process.poll() is not None:
            keeper._process = _Follower(keeper)
        return keeper._process

    Keeper._follower = follower  # type: ignore[method-assign]
    try:
        yield
    finally:
        Keeper._follower = before  # type: ignore[method-assign]


def wait_for_keeper(run: Any) -> None:
    """Return when compaction and retention have done what was asked of them so far."""
    done = threading.Event()
    keeper = run._keeper
    real = keeper._retain

    def retain() -> None:
        keeper._retain = real
        real()
        done.set()

    run.flush()
    keeper._retain = retain
    keeper._todo.put("retain")
    assert done.wait(30)
