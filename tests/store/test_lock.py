"""One writer: a second one is refused, a dead one's lock is free at once, forked children do nothing of ours."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import everstep
from everstep.errors import RunBusyError
from everstep.store import runs as store_runs
from truth import tree_hash


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Other:
    """Another process: a fork that runs `body(say)`. What it says comes line by line."""

    def __init__(self, body: Callable[[Callable[[Any], None]], None]) -> None:
        self._out, out = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            try:
                body(lambda text: os.write(out, f"{text}\n".encode()))  # type: ignore[arg-type,return-value]
            except BaseException as e:
                os.write(out, f"{type(e).__name__}: {e}\n".encode())
            os._exit(0)
        os.close(out)
        self._said = b""
        self._dead = False

    def line(self, timeout: float = 60) -> str:
        while b"\n" not in self._said:
            ready, _, _ = select.select([self._out], [], [], timeout)
            assert ready, "the other process says nothing"
            part = os.read(self._out, 4096)
            assert part, f"the other process ended; it said {self._said!r}"
            self._said += part
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        if not self._dead:
            self._dead = True
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def close(self) -> None:
        self.kill()
        os.close(self._out)


@pytest.fixture
def others() -> Any:
    started: list[Other] = []

    def start(body: Callable[[Callable[[Any], None]], None]) -> Other:
        started.append(Other(body))
        return started[-1]

    yield start
    for other in started:
        other.close()


def hold(others: Any, path: Any, then: Callable[[Any, Any], None] = lambda run, say: time.sleep(120)) -> Any:
    """A process that has attached and committed three steps."""

    def body(say: Any) -> None:
        model, optimizer = build()
        run = everstep.attach(model, optimizer, path, quiet=True, follower=False)
        run.resume()
        for _ in range(3):
            step(model, optimizer)
            run.commit(wait=True)
        say("holding")
        then(run, say)

    other = others(body)
    assert other.line() == "holding"
    return other


def can_attach(others: Any, path: Any) -> str:
    """What another process is told that tries."""

    def body(say: Any) -> None:
        store_runs._held.clear()  # a fork of the holder would refuse by itself
        try:
            everstep.attach(*build(), path, quiet=True)
            say("attached")
        except RunBusyError:
            say("busy")

    return str(others(body).line())


def test_a_second_process_is_refused_and_told_who_holds_the_run(others: Any, tmp_path: Path) -> None:
    other = hold(others, tmp_path / "run")
    before = tree_hash(tmp_path / "run")
    model, optimizer = build()
    with pytest.raises(RunBusyError) as caught:
        everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    assert str(other.pid) in str(caught.value)
    assert os.uname().nodename in str(caught.value)
    assert tree_hash(tmp_path / "run") == before
    with pytest.raises(RunBusyError):
        everstep.attach(model, optimizer, tmp_path / "run", quiet=True)


def test_a_live_run_can_be_read_by_others(others: Any, tmp_path: Path) -> None:
    hold(others, tmp_path / "run")
    history = everstep.open(tmp_path / "run")
    assert history.steps == [0, 1, 2, 3]
    history.state(2)


def test_the_lock_of_a_killed_process_is_free_at_once(others: Any, tmp_path: Path) -> None:
    other = hold(others, tmp_path / "run")
    other.kill()
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True) as run:
        assert run.resume() == 3


def forked() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(120)
        os._exit(0)
    return pid


def inheriting_subprocess() -> int:
    return subprocess.Popen(["sleep", "120"], close_fds=False).pid


def data_loader_worker() -> int:
    """A worker that is stopped, so that it cannot notice that its parent is gone."""
    loader: Any = DataLoader(list(range(50)), num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
    batches = iter(loader)
    next(batches)
    keep.append(batches)
    pid = int(batches._workers[0].pid)
    os.kill(pid, signal.SIGSTOP)
    return pid


keep: list[Any] = []


@pytest.mark.parametrize("child", [forked, inheriting_subprocess, data_loader_worker])
def test_the_lock_is_free_although_children_of_the_killed_process_live_on(
    child: Any, others: Any, tmp_path: Path
) -> None:
    def then(run: Any, say: Any) -> None:
        say(child())
        time.sleep(120)

    other = hold(others, tmp_path / "run", then)
    pid = int(other.line())
    other.kill()
    try:
        model, optimizer = build()
        with everstep.attach(model, optimizer, tmp_path / "run", quiet=True) as run:
            assert run.resume() == 3
            os.kill(pid, 0)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_run_that_is_closed_is_free(others: Any, tmp_path: Path) -> None:
    def then(run: Any, say: Any) -> None:
        run.close()
        say("closed")
        time.sleep(120)

    other = hold(others, tmp_path / "run", then)
    assert other.line() == "closed"
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True) as run:
        assert run.resume() == 3


def test_a_run_that_is_closed_is_free_although_a_child_was_being_forked_just_then(tmp_path: Path) -> None:
    """It has the descriptors of its parent until its first own instruction: here a copy stands for them."""
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    run.resume()
    childs = os.dup(run._opened.lock._fd)
    run.close()
    try:
        everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False).close()
    finally:
        os.close(childs)


def test_a_second_attach_in_the_same_process_is_refused(tmp_path: Path) -> None:
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True) as run:
        run.resume()
        with pytest.raises(RunBusyError, match="this process"):
            everstep.attach(*build(), tmp_path / "run", quiet=True)
        step(model, optimizer)
        assert run.commit(wait=True) == 1
    with everstep.attach(*build(), tmp_path / "run", quiet=True) as run:
        assert run.resume() == 1


def test_a_refused_attach_in_the_same_process_does_not_give_the_lock_away(others: Any, tmp_path: Path) -> None:
    """POSIX locks are lost when any descriptor of the file is closed."""
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True) as run:
        run.resume()
        with pytest.raises(RunBusyError):
            everstep.attach(*build(), tmp_path / "run", quiet=True)
        assert can_attach(others, tmp_path / "run") == "busy"


def test_reading_all_files_of_a_live_run_does_not_give_the_lock_away(others: Any, tmp_path: Path) -> None:
    """A backup made by the trainer itself opens and closes every file, the lock among them."""
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True) as run:
        run.resume()
        run.flush()
        tree_hash(tmp_path / "run")
        everstep.open(tmp_path / "run").state()
        assert can_attach(others, tmp_path / "run") == "busy"


def test_a_failed_resume_keeps_the_lock_until_close(others: Any, tmp_path: Path) -> None:
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True) as run:
        run.resume()
    wrong = nn.Linear(4, 4)
    run = everstep.attach(wrong, torch.optim.SGD(wrong.parameters(), lr=0.1), tmp_path / "run", quiet=True)
    with pytest.raises(everstep.errors.MismatchError):
        run.resume()
    run.close()
    with everstep.attach(model, optimizer, tmp_path / "run", quiet=True) as run:
        assert run.resume() == 0


def test_a_moved_run_is_still_locked(others: Any, tmp_path: Path) -> None:
    hold(others, tmp_path / "run")
    os.rename(tmp_path / "run", tmp_path / "elsewhere")
    with pytest.raises(RunBusyError):
        everstep.attach(*build(), tmp_path / "elsewhere", quiet=True)


@pytest.mark.long
def test_forked_children_run_nothing_of_ours_at_exit(tmp_path: Path) -> None:
    """A child that leaves in the ordinary way, with exit handlers, neither commits nor closes nor hangs."""
    code = f"""
        import os, sys
        sys.path[:0] = {[p for p in sys.path if p]!r}
        import torch
        import everstep
        from test_lock import build, step

        model, optimizer = build()
        run = everstep.attach(model, optimizer, {str(tmp_path / "run")!r}, quiet=True)
        run.resume()
        for _ in range(3):
            step(model, optimizer)
            run.commit(wait=True)
        step(model, optimizer)

        def fail():
            raise RuntimeError("child")

        for leave in (sys.exit, fail, run.close, run.commit, run.flush):
            if os.fork() == 0:
                sys.stderr = open(os.devnull, "w")
                try:
                    leave()
                except everstep.EverstepError:
                    pass
                sys.exit(7)
            _, status = os.wait()
            print(os.waitstatus_to_exitcode(status), run.step, flush=True)
        print(run.commit(wait=True), run.durable_step, flush=True)
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["0 3", "1 3", "7 3", "7 3", "7 3", "4 4"], done.stderr
    assert everstep.open(tmp_path / "run").steps == [0, 1, 2, 3, 4]


def test_leaving_the_with_in_a_forked_child_ends_nothing(others: Any, tmp_path: Path) -> None:
    def body(say: Any) -> None:
        model, optimizer = build()
        with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False) as run:
            run.resume()
            step(model, optimizer)
            run.commit(wait=True)
            step(model, optimizer)
            pid = os.fork()
            if pid:
                os.waitpid(pid, 0)
                say(run.commit(wait=True))
                time.sleep(120)

    other = others(body)
    assert other.line() == "2"
    assert everstep.open(tmp_path / "run").steps == [0, 1, 2]


@pytest.mark.parametrize("attempt", range(5))
def test_the_fastest_of_many_gets_the_lock(attempt: int, others: Any, tmp_path: Path) -> None:
    """Several processes start on a new path at the same time: one writes, the others are told so."""
    go = time.time() + 0.3

    def body(say: Any) -> None:
        model, optimizer = build()
        time.sleep(max(0.0, go - time.time()))
        try:
            run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
            run.resume()
            step(model, optimizer)
            run.commit(wait=True)
            say("attached")
            time.sleep(120)
        except RunBusyError:
            say("busy")

    racers = [others(body) for _ in range(4)]
    assert sorted(r.line() for r in racers) == ["attached", "busy", "busy", "busy"]
    for racer in racers:
        racer.kill()
    with everstep.attach(*build(), tmp_path / "run", quiet=True) as run:
        assert run.resume() == 1
