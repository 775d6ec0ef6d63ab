"""Training programs with a shadow that tests kill, stop and lead: trainers forked from one warm process, and their journals.

As a program (`python shadow_training.py SOCKET`) it is the warm process: it has torch imported and no threads, and forks a
trainer or a shadow for each line of JSON that comes over its socket. So these are real processes, strangers to each other,
and they start in a few milliseconds. (Shadows of runs in the test's own process start as they always do.) It also forks
hosts of shadows for trainers of other hosts, as `everstep shadow` would start them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "exactness"))

import torch
from harness import SEED, everything, hand_batch
from models import Options, Training, build

import everstep
from everstep.follow import local, remote, serve
from everstep.follow.serve import LOCK
from everstep.link import addresses, sockets
from everstep.link.messages import VERSION, Hello, Status, StatusReply
from everstep.link.sockets import Channel
from everstep.store import shared
from everstep.store.runs import RunPath

SMALL = {"setup": "mlp", "family": "adamw-fused"}
OPTIONS: dict[str, Any] = {"base_interval": 1000, "shadow_idle_s": 100.0}
TOLD = (
    "step", "received_step", "folded_step", "shadow_pid", "shadows", "spilled_steps", "stall_s", "unprotected_since",
    "base_step", "durable_step",
)  # fmt: skip


def turn(t: Training) -> None:
    """One turn of the loop; its batch follows from how many there were."""
    t.turn(hand_batch(t, t.progress.batches))


def plain_options() -> Options:
    """Of a Training that a test makes itself."""
    return Options()


# ------------------------------------------------------------------------------------------ in the trainer


def main(order: dict[str, Any]) -> None:
    """Train as far as the orders in a file say, and write down what happens, a line at a time."""
    folder = Path(order["folder"])
    torch.set_num_threads(1)
    warnings.simplefilter("always")
    t = build(**order["case"], seed=order["seed"])
    run = everstep.attach(t.model, t.optimizer, folder / "run", extras=t.extras, **{"mode": "shadow", **order["attach"]})
    journal = os.open(folder / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(**line: Any) -> None:
        os.write(journal, (json.dumps({"pid": os.getpid(), **line}) + "\n").encode())

    note(resumed=run.resume(order["resume"]))
    told: dict[str, Any] = {}
    while True:
        until, then = json.loads((folder / "orders").read_text())
        if t.progress.batches < until:
            turn(t)
            run.commit()
            time.sleep(order["pause_s"])
        elif then == "wait":
            run.flush()  # the last step's gradients are the user's until the next one begins
            time.sleep(0.005)
        else:
            break
        stats = run.stats()
        now = {"batches": t.progress.batches, **{k: stats.get(k) for k in TOLD}}
        if now != told:
            told = now
            note(**now)
    run.flush()
    torch.save(everything(t), folder / "result.new")
    os.rename(folder / "result.new", folder / "result")
    if then == "close":
        run.close()
    note(ended=True)
    if then == "save":  # alive, until it is killed
        while True:
            time.sleep(1)


class Forked:
    """What subprocess.Popen is for a shadow, but the warm process makes it."""

    def __init__(self, command: list[str], *, stdout: Any, env: dict[str, str], **rest: Any) -> None:
        assert command[1:3] == ["-m", "everstep.follow.serve"] and rest["start_new_session"]
        self.returncode: int | None = None
        while os.path.exists(os.environ["HOLD"]):
            time.sleep(0.005)
        self.pid = ask(os.environ["WARM"], {"shadow": command[3:], "output": stdout.name, "environment": env})

    def poll(self) -> int | None:
        if self.returncode is None and not alive(self.pid):
            self.returncode = 1
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("shadow", timeout)
            time.sleep(0.005)
        return 1

    def kill(self) -> None:
        kill(self.pid)


class _Subprocess:
    Popen = Forked

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def ask(address: str, order: dict[str, Any]) -> int:
    """Have the warm process fork; the pid."""
    with socket.socket(socket.AF_UNIX) as warm:
        warm.connect(address)
        warm.sendall((json.dumps(order) + "\n").encode())
        return int(warm.makefile().readline())


def fork(order: dict[str, Any], warm: list[socket.socket]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in warm:
            each.close()
        os.setsid()
        output = os.open(order["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for theirs, ours in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(theirs, ours)
        faulthandler.enable(all_threads=True)
        os.environ.update(order["environment"])
        if "shadow" in order:
            status = serve.main(order["shadow"])
        elif "host" in order:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            torch.set_num_threads(1)
            remote.main(
                order["host"], order["folder"], token=None, certfile=None, keyfile=None, interval=1000, max_bytes=1 << 30,
                idle_s=100.0, ready=lambda listener: Path(order["ready"]).write_text(f"{listener.getsockname()[1]}\n"),
            )  # fmt: skip
            status = 0
        else:
            local.subprocess = _Subprocess()  # type: ignore[assignment]
            main(order)
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def be_warm(address: str) -> None:
    """Fork for whoever asks, until stdin ends. Children that end are buried at once."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.environ["WARM"] = address
    for optimizer in build("gan", "adamw-fused", 1).optimizers.values():  # torch imports half of itself at the first step
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(32)
        print("warm", flush=True)
        while True:
            readable, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in readable:
                return
            client, _ = listener.accept()
            with client, contextlib.suppress(OSError):
                line = client.makefile().readline()
                if line.endswith("\n"):  # else who asked has been killed
                    client.sendall(b"%d\n" % fork(json.loads(line), [listener, client]))


# ------------------------------------------------------------------------------------------ in the test


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill(pid: int) -> None:
    """SIGKILL, and it is gone on return."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < deadline, f"{pid} survives SIGKILL"
        time.sleep(0.002)


def folder_of(path: Path) -> Path:
    """The run's folder in memory."""
    return Path(shared.shared_folder(RunPath(path).read_run().run, str(path)))


def shadows_in(memory: Path) -> list[int]:
    """Processes that keep a shadow in this folder, or are about to."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                process = Path("/proc", name)
                words = process.joinpath("cmdline").read_bytes().split(b"\0")
                held = [os.readlink(fd) for fd in process.joinpath("fd").iterdir()]
                if any(w.startswith(str(memory).encode()) for w in words) or any(
                    link.startswith(str(memory)) and LOCK in link for link in held
                ):
                    found.append(int(name))
    return [pid for pid in found if alive(pid)]


class Launcher:
    """The warm process."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="es-")
        self._address = os.path.join(self._folder, "warm")
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"warm\n"

    def start(self, order: dict[str, Any]) -> int:
        return ask(self._address, order)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        shutil.rmtree(self._folder)


@dataclass
class ShadowHost:
    """A process that keeps shadows for trainers of other hosts; it has its own disk, and always the same port."""

    launcher: Launcher
    folder: Path
    port: int = 0
    pid: int = 0

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def start(self) -> ShadowHost:
        ready = self.folder / "port"
        ready.unlink(missing_ok=True)
        self.pid = self.launcher.start({
            "host": f"127.0.0.1:{self.port}", "folder": str(self.folder / "runs"), "ready": str(ready),
            "output": str(self.folder / "output"),
            "environment": {k: v for k, v in os.environ.items() if k.startswith("EVERSTEP")},
        })  # fmt: skip
        deadline = time.monotonic() + 60
        while not ready.exists() or not ready.read_text().endswith("\n"):
            assert alive(self.pid) and time.monotonic() < deadline, (self.folder / "output").read_text()
            time.sleep(0.005)
        self.port = int(ready.read_text())
        return self

    def status(self, run: Path) -> dict[str, Any]:
        """What the shadow of this run says of itself."""
        with Channel(addresses.connect(self.address), serve.no_payload) as channel:
            sockets.introduce(channel, Hello(VERSION, RunPath(run).read_run().run, "", 0, 0, 0, "status", {}))
            channel.send(Status())
            (received,) = channel.receive(10)
        assert isinstance(received.message, StatusReply)
        return dict(json.loads(received.message.text))


@dataclass
class Program:
    """One run, trained by one process after the other."""

    launcher: Launcher
    folder: Path
    case: dict[str, Any]
    attach: dict[str, Any] = field(default_factory=dict)
    pause_s: float = 0.0
    pid: int = 0
    starts: int = 0
    _read: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def hold(self) -> Path:
        """While this file is there, no shadow starts."""
        return self.folder / "hold"

    def order(self, until: int, then: str = "wait") -> None:
        """Train to so many batches, then `wait` for other orders, `close` the run and end, or `save` and stay."""
        (self.folder / "orders.new").write_text(json.dumps([until, then]))
        os.rename(self.folder / "orders.new", self.folder / "orders")

    def start(self, until: int, then: str = "wait", *, resume: Any = "latest", **attach: Any) -> int:
        """A trainer; the step at which it resumed. Another seed each time, so that nothing is right by chance."""
        self.order(until, then)
        order = {
            "folder": str(self.folder), "case": self.case, "attach": {**self.attach, **attach}, "pause_s": self.pause_s,
            "output": str(self.folder / "output"), "resume": resume, "seed": SEED + 17 * self.starts,
            "environment": {**{k: v for k, v in os.environ.items() if k.startswith("EVERSTEP")}, "HOLD": str(self.hold)},
        }  # fmt: skip
        self.starts += 1
        self.pid = self.launcher.start(order)
        return int(self.wait(lambda line: "resumed" in line)["resumed"])

    def read(self) -> list[dict[str, Any]]:
        """Lines that the trainer of now has written."""
        path = self.folder / "journal"
        if path.exists():
            with open(path) as f:
                f.seek(self._read)
                text = f.read()
            whole = text[: text.rfind("\n") + 1]
            self._read += len(whole)
            self.lines += [json.loads(line) for line in whole.splitlines()]
        return [line for line in self.lines if line["pid"] == self.pid]

    @property
    def last(self) -> dict[str, Any]:
        """The newest numbers of the trainer of now."""
        return next((line for line in reversed(self.read()) if "batches" in line), {})

    def wait(self, true: Any, seconds: float = 60.0) -> dict[str, Any]:
        """Until a line of the trainer of now, newest first, is so."""
        deadline = time.monotonic() + seconds
        while True:
            ended = not alive(self.pid)
            for line in reversed(self.read()):
                if true(line):
                    return line
            assert not ended, f"the trainer has ended: {self.output()[-3000:]}"
            assert time.monotonic() < deadline, f"waited in vain; {self.last}; {self.output()[-3000:]}"
            time.sleep(0.002)

    def wait_now(self, true: Any, seconds: float = 60.0) -> dict[str, Any]:
        """Until the newest numbers are so."""
        return self.wait(lambda line: line is self.last and true(line), seconds)

    def wait_folded(self, batches: int) -> dict[str, Any]:
        """Until all is trained that was ordered, and the shadow holds it."""
        return self.wait_now(lambda line: line["batches"] == batches and line["folded_step"] == line["step"])

    def wait_ended(self) -> None:
        self.wait(lambda line: "ended" in line)

    def wait_gone(self) -> None:
        self.wait_ended()
        deadline = time.monotonic() + 30
        while alive(self.pid):
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def kill(self) -> dict[str, Any]:
        """SIGKILL the trainer; what it had said last."""
        kill(self.pid)
        return self.last

    def output(self) -> str:
        path = self.folder / "output"
        return path.read_text() if path.exists() else ""

    def result(self) -> dict[str, Any]:
        """Everything that the trainer had when it had done what was ordered."""
        return torch.load(self.folder / "result", weights_only=False)


_plain: dict[tuple[str, int], dict[str, Any]] = {}


def without_everstep(case: dict[str, Any], batches: int) -> dict[str, Any]:
    """Everything after so many batches of a run that was never interrupted."""
    key = (json.dumps(case, sort_keys=True), batches)
    if key not in _plain:
        t = build(**case, seed=SEED)
        for _ in range(batches):
            turn(t)
        _plain[key] = everything(t)
    return _plain[key]


if __name__ == "__main__":
    be_warm(sys.argv[1])
