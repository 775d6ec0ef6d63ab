"""The shadow: real processes, killed, stopped and found again. What it holds is what the trainer has, bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shadow_training
import torch
from harness import SEED, everything, must_equal
from models import Training, build
from shadow_training import Launcher, Program, alive, kill, turn, without_everstep
from torch import nn

import everstep
from everstep import cursor as cursors
from everstep.errors import LinkRefused, RunBusyError, UsageError
from everstep.follow import recover
from everstep.follow.serve import SOCKET, no_payload
from everstep.link import addresses, sockets
from everstep.link.messages import Hello, Status, StatusReply
from everstep.link.protocol import encode
from everstep.link.sockets import Channel
from everstep.restore.apply import apply
from everstep.store import shared
from everstep.store.bases import read_manifest
from everstep.store.runs import RunPath, read_listing
from support import crash

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
    # A weight that reaches the clamp of a WGAN for the first time late in the run is reported.
    pytest.mark.filterwarnings("default::everstep.errors.HiddenEditWarning"),
]
SMALL = {"setup": "mlp", "family": "adamw-fused"}
OPTIONS: dict[str, Any] = {"base_interval": 1000, "shadow_idle_s": 100.0}


# ------------------------------------------------------------------------------------------ what every test needs


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.close()


def shadows_in(memory: Path) -> list[int]:
    """Processes that keep a shadow in this folder."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                words = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
                if any(w.startswith(str(memory).encode()) for w in words) and alive(int(name)):
                    found.append(int(name))
    return found


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in shared memory of this test's own; neither it nor a shadow in it is left."""
    made = Path(tempfile.mkdtemp(prefix="es-", dir="/dev/shm"))
    monkeypatch.setenv("EVERSTEP_SHARED", str(made))
    yield made
    deadline = time.monotonic() + 30
    while left := shadows_in(made):  # a trainer that still lives starts another
        for pid in left:
            kill(pid)
        assert time.monotonic() < deadline, "shadows come back again and again"
    shutil.rmtree(made)


@pytest.fixture
def program(launcher: Launcher, memory: Path, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Makes Programs; their trainers are not left behind."""
    made: list[Program] = []

    def make(case: dict[str, Any] = SMALL, pause_s: float = 0.0, **attach: Any) -> Program:
        folder = tmp_path / f"program-{len(made)}"
        folder.mkdir()
        made.append(Program(launcher, folder, case, {**OPTIONS, **attach}, pause_s))
        return made[-1]

    yield make
    for each in made:
        if each.pid:
            kill(each.pid)


def wait_for(true: Callable[[], Any], what: str = "", seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited in vain {what}"
        time.sleep(0.005)


def folder_of(path: Path) -> Path:
    """The run's folder in memory."""
    return Path(shared.shared_folder(RunPath(path).read_run().run, str(path)))


def used_bytes(folder: Path, pattern: str = "**/*") -> int:
    """Memory, not sizes: the file that holds the state is larger than what is in it."""
    total = 0
    for file in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            if file.is_file():
                total += file.stat().st_blocks * 512
    return total


def status_of(path: Path) -> dict[str, Any]:
    """What the shadow says of itself."""
    run = RunPath(path).read_run().run
    with Channel(addresses.connect(f"unix://{folder_of(path)}/{SOCKET}"), no_payload) as channel:
        sockets.introduce(channel, Hello(1, run, str(path), 0, 0, 0, "status", {}))
        channel.send(Status())
        (received,) = channel.receive(10)
        assert isinstance(received.message, StatusReply)
        return json.loads(received.message.text)


def must_hold(path: Path, step: int, expected: dict[str, Any], case: dict[str, Any]) -> int:
    """The shadow hands out the state of this step, with all that `everything` sees; its pid."""
    found = recover.find(RunPath(path), RunPath(path).read_run().run)
    assert found is not None, "no shadow, or it holds nothing"
    try:
        assert found.step == step
        state = found.fetch()
        t = build(**case, seed=SEED - 1)
        apply(state, t.models, t.optimizers)
        cursor = cursors.decode(state.cursor)
        cursors.load_extras(t.extras, cursor["extras"])
        apply(state, t.models, t.optimizers)  # schedulers touch groups
        got = everything(t)
        for part in (got, expected := dict(expected)):
            part.pop("random")
        must_equal(got, expected, f"the shadow's step {step}")
        return found.pid
    finally:
        found.release()


def manifests(path: Path) -> dict[int, Any]:
    return {n: m for t in read_listing(RunPath(path)).timelines.values() for n, m in t.bases.items()}


# ------------------------------------------------------------------------------------------ 1. bit for bit


CASES: dict[str, dict[str, Any]] = {
    "fused AdamW, clipped, scheduled": {"setup": "transformer", "family": "adamw-fused", "schedule": "cycle"},
    "SGD that writes into gradients, scaler that skips, BatchNorm": {
        "setup": "cnn", "family": "sgd-nesterov-foreach", "scale": 2.0**10, "infs": tuple(range(3, 400, 4)), "size": 8,
    },
    "sparse and dense": {"setup": "embedding", "family": "adamw-foreach", "sparse": "sparse-adam"},
    "two models, a clamp through .data": {"setup": "gan", "family": "rmsprop", "clamp": True},
}  # fmt: skip
MORE_CASES: dict[str, dict[str, Any]] = {
    "foreach AdamW": {"setup": "mlp", "family": "adamw-foreach", "clip": "value", "schedule": "plateau"},
    "Adam, scaler that skips": {"setup": "mlp", "family": "adam", "scale": 2.0**10, "infs": (5, 6, 40, 90)},
    "fused SGD with momentum, BatchNorm, channels last": {
        "setup": "cnn", "family": "sgd-momentum-fused", "channels_last": True,
    },
    "layers that thaw": {"setup": "lstm", "family": "adamw"},
    "gradients kept": {"setup": "mlp", "family": "adamw-fused", "zero": "before-zeros", "accumulate": 2},
    "moving average": {"setup": "mlp", "family": "adam-amsgrad-foreach", "average": True},
    "Muon": {"setup": "mlp", "family": "muon"},
    "Adafactor": {"setup": "transformer", "family": "adafactor-foreach"},
    "bfloat16": {"setup": "mlp", "family": "adamw-foreach", "dtype": torch.bfloat16},
    "load_state_dict in mid-run": {"setup": "mlp", "family": "nadam", "reload": 77},
    "spectral norm": {"setup": "gan", "family": "adam", "spectral": True},
    "registered": {"setup": "mlp", "family": "own-registered"},
}  # fmt: skip


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(n, marks=pytest.mark.long) for n in MORE_CASES)])
def test_the_shadow_holds_what_the_trainer_has_after_200_steps(name: str, memory: Path, tmp_path: Path) -> None:
    case = {**CASES, **MORE_CASES}[name]
    t = build(**case, seed=SEED)
    options = {**OPTIONS, "base_interval": 60, "quiet": True}
    run = everstep.attach(t.model, t.optimizer, tmp_path / "run", mode="shadow", extras=t.extras, **options)
    run.resume()
    for goal in (120, 230):
        while t.progress.batches < goal:
            turn(t)
            run.commit()
        run.flush()
        wait_for(lambda: run.stats()["folded_step"] == run.step, f"for the shadow: {run.stats()}")
        must_hold(tmp_path / "run", run.step, everything(t), case)
    assert run.stats()["shadows"] == 1, "the same all the time"
    told = (folder_of(tmp_path / "run") / "shadow.log").read_text()
    assert "Error" not in told, told
    run.close()
    assert run._keeper is not None and "folded" in {m.audit for m in manifests(tmp_path / "run").values()}
