"""What failures cost a run with a shadow: each is made to happen to real processes that train the overhead benchmark's
model.

    longest step    of those from the failure until all was as before, over the median of the ten before it
    back            seconds from the failure (or from its end, if it lasts) until all is as before: a killed trainer has
                    completed its next step; else the shadow holds what was newest then, and nothing is unprotected (0: so it
                    was when the failure ended)
    lost            steps that a killed trainer had said it had made, and which the next one did not go on from
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from everstep.bench.hosts import Network, ShadowHost
from everstep.bench.progress import Progress, silent
from everstep.bench.workloads import Workload
from everstep.errors import LinkError
from everstep.follow.recover import address_of, dismiss
from everstep.link import addresses, sockets
from everstep.link.messages import VERSION, Hello
from everstep.link.sockets import Channel
from everstep.store import shared
from everstep.store.runs import RunPath

_TRAINER = """
import json, sys
from everstep.bench.failures import train
train(**json.loads(sys.argv[1]))
"""
_TOLD = (
    "folded_step", "unprotected_since", "spilled_steps", "log_memory_bytes", "shadow_pid", "resumed_from", "base_step",
)  # fmt: skip
_WARM_STEPS = 14
_BEFORE = 10
_PATIENCE_S = 180.0
_LAG_FRAMES = 4
"""Frames that may wait (`max_lag_bytes`) where a shadow is stopped."""
_LEFT_BYTES = 100 << 20
"""Of shared memory that is nearly full."""


def train(*, folder: str, workload: dict[str, Any], options: dict[str, Any]) -> None:
    """In the trainer: train until killed, and tell of each step."""
    torch.set_num_threads(1)
    from everstep.bench import workloads
    from everstep.run import attach

    w = Workload(**workload)
    model, optimizer = workloads.build(w)
    batches = workloads.endless(workloads.batches(w))
    run = attach(model, optimizer, folder, mode="shadow", quiet=True, base_interval=1000, **options)

    def tell(**more: Any) -> None:
        stats = run.stats()
        told = {"step": run.step, "now": time.time(), **{key: stats.get(key) for key in _TOLD}, **more}
        print(json.dumps(told), flush=True)

    tell(resumed=run.resume())
    while True:
        workloads.train_step(model, optimizer, next(batches))
        run.commit()
        tell()


@dataclass(frozen=True)
class Cost:
    step_s: float
    """The median of the steps before."""
    back_s: float
    longest_step_s: float | None = None
    lost_steps: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class _Trainer:
    """A trainer process, and what it has told since it was started."""

    def __init__(self, folder: str, workload: Workload, options: dict[str, Any]) -> None:
        self.path = RunPath(os.path.join(folder, "run"))
        self._errors = os.path.join(folder, "errors")
        self._arguments = json.dumps({"folder": self.path.path, "workload": asdict(workload), "options": options})
        self.start()

    def start(self) -> None:
        self.told: list[dict[str, Any]] = []
        with open(self._errors, "w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _TRAINER, self._arguments], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._reader = threading.Thread(target=self._read, args=(self._process, self.told), daemon=True)
        self._reader.start()

    @staticmethod
    def _read(process: subprocess.Popen[str], told: list[dict[str, Any]]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith("\n"):
                told.append(json.loads(line))

    @property
    def last(self) -> dict[str, Any]:
        return self.told[-1]

    def wait(self, true: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        """The first that it tells from now on of which this is true."""
        seen, deadline = max(len(self.told) - 1, 0), time.monotonic() + _PATIENCE_S
        while True:
            while seen < len(self.told):
                if true(self.told[seen]):
                    return self.told[seen]
                seen += 1
            if time.monotonic() > deadline or self._process.poll() is not None:
                with open(self._errors) as f:
                    raise AssertionError(f"no {what}: {self.told[-1:]} {f.read()[-2000:]}")
            time.sleep(0.002)

    def train(self) -> None:
        """Until a shadow has caught up, and what follows can be compared."""
        first = self.wait(lambda told: True, "step")["step"]
        self.wait(lambda told: told["step"] >= first + _WARM_STEPS and _is_level(told, told["step"] - 6), "shadow")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def cost(self, failed: float, from_: float, back: float, **facts: Any) -> Cost:
        """Of what failed then, of which all was over at `back`."""
        nows = [told["now"] for told in self.told]
        steps = [(b, b - a) for a, b in itertools.pairwise(nows)]
        before = [s for now, s in steps if now < failed][-_BEFORE:]
        during = [s for now, s in steps if failed <= now <= back]
        return Cost(statistics.median(before), max(back - from_, 0.0), max(during, default=None), facts=facts)


def _is_level(told: dict[str, Any], step: int) -> bool:
    return (told["folded_step"] or 0) >= step and told["unprotected_since"] is None


@dataclass(frozen=True)
class Stage:
    """Where a failure is to happen."""

    workload: Workload
    folder: str
    frame_bytes: int

    @contextlib.contextmanager
    def training(self, **options: Any) -> Iterator[_Trainer]:
        """A run that has trained for a while. In the end nothing is left of it."""
        folder = tempfile.mkdtemp(prefix="everstep-bench-", dir=self.folder)
        trainer = _Trainer(folder, self.workload, options)
        try:
            trainer.train()
            yield trainer
        finally:
            trainer.kill()
            if trainer.path.exists():
                run = trainer.path.read_run().run
                dismiss(trainer.path, run, 1 << 30)
                shared.remove(shared.shared_folder(run, trainer.path.path), (), everything=True)
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def hosts(self, count: int) -> Iterator[list[ShadowHost]]:
        with contextlib.ExitStack() as opened:
            made = []
            for _ in range(count):
                made.append(ShadowHost(self.folder, 1000))
                opened.callback(made[-1].end)
            yield made


def _trainer_killed(stage: Stage, *, shadow_too: bool = False, **options: Any) -> Cost:
    with stage.training(**options) as trainer:
        before = trainer.cost(time.time(), 0.0, 0.0).step_s
        time.sleep(before / 2)
        killed = time.time()
        if shadow_too:
            os.kill(trainer.last["shadow_pid"], signal.SIGKILL)
        trainer.kill()
        said = trainer.last["step"]
        trainer.start()
        first = trainer.wait(lambda told: "resumed" in told, "resumption")
        again = trainer.wait(lambda told: told["step"] > first["resumed"], "step")
        facts = {"said": said, "went on from": first["resumed"], "source": first["resumed_from"]}
        return Cost(before, again["now"] - killed, lost_steps=max(said - first["resumed"], 0), facts=facts)


def _trainer_killed_remote(stage: Stage, count: int) -> Cost:
    with stage.hosts(count) as hosts:
        return _trainer_killed(stage, shadow=",".join(host.address for host in hosts))


def _shadow_killed(stage: Stage, **options: Any) -> Cost:
    with stage.training(**options) as trainer:
        dead, failed = trainer.last["shadow_pid"], time.time()
        step = trainer.last["step"]
        os.kill(dead, signal.SIGKILL)
        trainer.wait(lambda told: told["shadow_pid"] not in (dead, None), "new shadow")
        back = trainer.wait(lambda told: _is_level(told, step), "protection")
        return trainer.cost(failed, failed, back["now"], **_unprotected(trainer, failed))


def _host_killed(stage: Stage, count: int) -> Cost:
    with stage.hosts(count) as hosts, stage.training(shadow=",".join(host.address for host in hosts)) as trainer:
        failed, step = time.time(), trainer.last["step"]
        hosts[-1].kill()
        trainer.wait(lambda told: told["unprotected_since"] is not None, "warning")
        restarted = time.time()
        hosts[-1].start()
        back = trainer.wait(lambda told: _is_level(told, step), "protection")
        return trainer.cost(failed, restarted, back["now"], **_unprotected(trainer, failed))


def _unprotected(trainer: _Trainer, failed: float) -> dict[str, Any]:
    during = [told for told in trainer.told if told["now"] >= failed and told["unprotected_since"] is not None]
    seconds = during[-1]["now"] - during[0]["now"] if during else 0.0
    return {"unprotected steps": len(during), "unprotected s": round(seconds, 3)}


def _shadow_stopped(stage: Stage, on_lag: str) -> Cost:
    limit = _LAG_FRAMES * stage.frame_bytes
    with stage.training(on_lag=on_lag, max_lag_bytes=limit) as trainer:
        pid, failed = trainer.last["shadow_pid"], time.time()
        os.kill(pid, signal.SIGSTOP)
        try:
            if on_lag == "spill":
                trainer.wait(lambda told: told["spilled_steps"] >= 5, "spilled step")
            else:
                while time.time() - trainer.last["now"] < 2.0:
                    time.sleep(0.01)
        finally:
            os.kill(pid, signal.SIGCONT)
        resumed, step = time.time(), trainer.last["step"]
        back = trainer.wait(lambda told: _is_level(told, step), "shadow")
        during = [told for told in trainer.told if failed <= told["now"] <= back["now"]]
        most = max(told["log_memory_bytes"] for told in during)
        facts = {
            "limit MB": round(limit / 1e6), "most in memory MB": round(most / 1e6),
            "spilled steps": trainer.last["spilled_steps"], "lasted s": round(resumed - failed, 3),
        }  # fmt: skip
        return trainer.cost(failed, resumed, back["now"], **facts)


def _on_the_way(stage: Stage, order: str) -> Cost:
    with stage.hosts(1) as hosts:
        network = Network(hosts[0].port)
        try:
            with stage.training(shadow=network.address) as trainer:
                network.do(order, _PATIENCE_S)
                failed, step = time.time(), trainer.last["step"]
                back = trainer.wait(lambda told: _is_level(told, step + 1), "shadow")
                return trainer.cost(failed, failed, back["now"], **_unprotected(trainer, failed))
        finally:
            network.close()


def _strangers(stage: Stage) -> Cost:
    """A trainer of another run, of an older generation, and of the same one."""
    with stage.training() as trainer:
        run, failed = trainer.path.read_run().run, time.time()
        seconds = []
        for of_run, generation in (("0" * 32, 9), (run, 0), (run, 1)):
            begun = time.perf_counter()
            with Channel(addresses.connect(address_of(trainer.path, run), timeout=5.0), lambda m, n: None) as channel:
                try:
                    sockets.introduce(channel, Hello(VERSION, of_run, trainer.path.path, 1, generation, 0, "train", {}))
                except LinkError:
                    seconds.append(time.perf_counter() - begun)
        if len(seconds) < 3:
            raise AssertionError("a stranger was let in")
        step = trainer.last["step"]
        back = trainer.wait(lambda told: _is_level(told, step + 1), "shadow")
        return trainer.cost(failed, failed, back["now"], **{"refused within ms": round(1e3 * max(seconds), 2)})


def _memory_full(stage: Stage) -> Cost | None:
    """In a small file system of its own; None where none can be mounted."""
    with tempfile.TemporaryDirectory(prefix="es-") as made:
        size = 10 * stage.frame_bytes + (512 << 20)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", made]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            return None
        before = os.environ.get("EVERSTEP_SHARED")
        os.environ["EVERSTEP_SHARED"] = made
        try:
            with stage.training() as trainer:
                failed = time.time()
                spilled = trainer.last["spilled_steps"]
                with open(os.path.join(made, "ballast"), "wb") as f:
                    free = os.statvfs(made)
                    os.posix_fallocate(f.fileno(), 0, free.f_bavail * free.f_frsize - _LEFT_BYTES)
                told = trainer.wait(lambda told: told["spilled_steps"] >= spilled + 5, "spilled step")
                os.unlink(f.name)
                emptied, step = time.time(), told["step"]
                back = trainer.wait(lambda told: _is_level(told, step), "shadow")
                return trainer.cost(failed, emptied, back["now"], **{"spilled steps": trainer.last["spilled_steps"]})
        finally:
            if before is None:
                del os.environ["EVERSTEP_SHARED"]
            else:
                os.environ["EVERSTEP_SHARED"] = before
            subprocess.run(["umount", "-l", made], check=True)


FAILURES: dict[str, Callable[[Stage], Cost | None]] = {
    "trainer killed": _trainer_killed,
    "trainer killed, shadow over TCP": lambda stage: _trainer_killed_remote(stage, 1),
    "trainer killed, two shadows over TCP": lambda stage: _trainer_killed_remote(stage, 2),
    "shadow killed": _shadow_killed,
    "shadow killed, log on disk": lambda stage: _shadow_killed(stage, log="disk"),
    "both killed, log on disk": lambda stage: _trainer_killed(stage, shadow_too=True, log="disk"),
    "both killed": lambda stage: _trainer_killed(stage, shadow_too=True),
    "shadow stopped, spill": lambda stage: _shadow_stopped(stage, "spill"),
    "shadow stopped, wait": lambda stage: _shadow_stopped(stage, "wait"),
    "shared memory nearly full": _memory_full,
    "connection cut in a record": lambda stage: _on_the_way(stage, "cut"),
    "record damaged on the way": lambda stage: _on_the_way(stage, "damage"),
    "shadow over TCP killed and started again": lambda stage: _host_killed(stage, 1),
    "one of two shadows killed and started again": lambda stage: _host_killed(stage, 2),
    "strangers and second trainers": _strangers,
}
"""By name."""


def measure(
    workload: Workload, *, names: list[str] | None = None, num_repetitions: int = 3, folder: str | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:  # fmt: skip
    """Each so often, as a plain dict: medians, the most that was lost, and all."""
    chosen = names or list(FAILURES)
    found: dict[str, Any] = {}
    top = tempfile.mkdtemp(prefix="everstep-bench-", dir=folder)
    stage = Stage(workload, top, _frame_bytes(workload))
    try:
        for done, name in enumerate(chosen):
            costs = []
            for repetition in range(num_repetitions):
                progress(name, done * num_repetitions + repetition, len(chosen) * num_repetitions)
                costs.append(FAILURES[name](stage))
            found[name] = _summary([cost for cost in costs if cost is not None])
        progress("done", len(chosen) * num_repetitions, len(chosen) * num_repetitions)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    return {"workload": asdict(workload), "num_repetitions": num_repetitions, "failures": found}


def _summary(costs: list[Cost]) -> dict[str, Any]:
    if not costs:
        return {"all": []}
    pauses = [cost.longest_step_s / cost.step_s for cost in costs if cost.longest_step_s is not None]
    lost = [cost.lost_steps for cost in costs if cost.lost_steps is not None]
    return {
        "step_s": statistics.median(cost.step_s for cost in costs),
        "back_s": statistics.median(cost.back_s for cost in costs),
        "longest_step": statistics.median(pauses) if pauses else None, "lost_steps": max(lost) if lost else None,
        "all": [asdict(cost) for cost in costs],
    }  # fmt: skip


def _frame_bytes(workload: Workload) -> int:
    from everstep.bench import workloads

    model, _ = workloads.build(workload)
    return sum(p.numel() * p.element_size() for p in model.parameters())
