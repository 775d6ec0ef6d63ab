"""A world of processes that run one job after another: started once, because starting is what costs.

    with World(4) as world:
        results = world.run("jobs:train", "fsdp4", steps=3, ranks=4)     # one result a rank

Processes are forked from one that has imported torch. A job is `module:function`, called with JSON arguments on the
first `ranks` processes between init_process_group (gloo) and destroy_process_group; what it returns comes back as
JSON. One rank alone has no process group. When a rank raises or the time is up, all processes are killed, JobFailed
tells what every rank said, and the next job starts a new world. Processes whose parent is gone end by themselves.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOOPBACK = "127.0.0.1"
GRACE_S = 3.0
"""After a failure the other ranks have so long to say what they know; they mostly wait for the one that failed."""


class JobFailed(Exception):  # noqa: N818
    """A job that raised on some rank or took too long, with every rank's traceback and output."""


class World:
    """`size` processes on this host. Use it from one thread."""

    def __init__(self, size: int, timeout_s: float = 100.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: list[tuple[int, int]] = []
        self._output: Any = None
        self._store: Any = None
        self._jobs = 0

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self, job: str, *args: Any, ranks: int | None = None, timeout_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """What `job` returned on each of the first `ranks` processes (None: all). JobFailed if one did not."""
        ranks = self.size if ranks is None else ranks
        if self._process is None:
            self._start()
        self._jobs += 1
        order = {"job": job, "args": args, "kwargs": kwargs, "world": ranks, "number": self._jobs, "port": self._store.port}
        for _, to_worker in self._pipes[:ranks]:
            os.write(to_worker, json.dumps(order).encode() + b"\n")
        answers = self._collect(ranks, self.timeout_s if timeout_s is None else timeout_s)
        if len(answers) < ranks or any("error" in a for a in answers.values()):
            said = self._what_was_said(answers, ranks)
            self.close()
            raise JobFailed(f"{job} {args} {kwargs} on {ranks} rank(s)\n{said}")
        return [answers[rank]["result"] for rank in range(ranks)]

    def close(self) -> None:
        """Kill all processes and wait until they are gone."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            _close(self._pipes)
            self._output.close()
        self._process, self._pipes, self._store = None, [], None

    def _start(self) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        theirs = []
        for _ in range(self.size):
            from_us, to_worker = os.pipe()
            from_worker, to_us = os.pipe()
            self._pipes.append((from_worker, to_worker))
            theirs.append((from_us, to_us))
        ends = [end for pair in theirs for end in pair]
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "workers.py"), json.dumps(theirs)],
            pass_fds=ends, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output, start_new_session=True,
        )  # fmt: skip
        _close(theirs)

    def _collect(self, ranks: int, timeout_s: float) -> dict[int, dict[str, Any]]:
        """One answer a rank; fewer when the time is up, a process ends, or a rank failed and the others wait for it."""
        answers: dict[int, dict[str, Any]] = {}
        parts = dict.fromkeys(range(ranks), b"")
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank in range(ranks):
                selector.register(self._pipes[rank][0], selectors.EVENT_READ, rank)
            while len(answers) < ranks and time.monotonic() < deadline:
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    data = os.read(key.fd, 1 << 16)
                    parts[key.data] += data
                    if parts[key.data].endswith(b"\n"):
                        answers[key.data] = json.loads(parts[key.data])
                    if not data:
                        answers[key.data] = {"error": "the process ended"}
                    if key.data in answers:
                        selector.unregister(key.fd)
                        if "error" in answers[key.data]:
                            deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _what_was_said(self, answers: dict[int, dict[str, Any]], ranks: int) -> str:
        said = [f"rank {r}: {answers.get(r, {'error': 'no answer'}).get('error', 'done')}" for r in range(ranks)]
        self._output.seek(0)
        return "\n".join([*said, "output:", self._output.read()[-4000:].decode(errors="replace")])


# ------------------------------------------------------------------------------------------ in the processes


def _serve(rank: int, from_parent: int, to_parent: int) -> None:
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        with open(from_parent) as lines:
            for line in lines:
                orders.put(json.loads(line))
        os._exit(0)  # the parent is gone

    threading.Thread(target=listen, daemon=True).start()
    while True:
        order = orders.get()
        try:
            answer = {"result": _perform(rank, order)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        left = memoryview(json.dumps(answer).encode() + b"\n")
        while left:
            left = left[os.write(to_parent, left) :]


def _perform(rank: int, order: dict[str, Any]) -> Any:
    import torch.distributed as dist

    module, _, name = order["job"].partition(":")
    job = getattr(importlib.import_module(module), name)
    if order["world"] == 1:
        return job(*order["args"], **order["kwargs"])
    environment = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order["world"], "LOCAL_WORLD_SIZE": order["world"],
        "MASTER_ADDR": LOOPBACK, "MASTER_PORT": order["port"],
    }  # fmt: skip
    os.environ.update({key: str(value) for key, value in environment.items()})
    store = dist.PrefixStore(f"job-{order['number']}", dist.TCPStore(LOOPBACK, order["port"], is_master=False))
    dist.init_process_group("gloo", rank=rank, world_size=order["world"], store=store, timeout=timedelta(seconds=60))
    try:
        return job(*order["args"], **order["kwargs"])
    finally:
        dist.destroy_process_group()
        for key in environment:
            del os.environ[key]


def _main(pipes: list[tuple[int, int]]) -> None:
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.path[:0] = [str(HERE.parent), str(HERE)]
    import builders  # noqa: F401  (torch and all that the jobs need, before the fork)
    import torch

    torch.set_num_threads(1)
    children = []
    for rank, ends in enumerate(pipes):
        children.append(os.fork())
        if children[-1] == 0:
            _close([other for other in pipes if other is not ends])
            _serve(rank, *ends)
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(child, signal.SIGKILL) for child in children])
    _close(pipes)
    for child in children:
        os.waitpid(child, 0)  # only now may its number go to another process


def _close(pipes: list[tuple[int, int]]) -> None:
    for ends in pipes:
        for end in ends:
            os.close(end)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
