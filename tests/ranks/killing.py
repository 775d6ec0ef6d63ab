"""Starts the ranks of kill_training.py, and sees to it that all are gone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ORDERS = {"kill_at", "kill_in_resume", "kill_in_start"}
"""To ranks, to kill themselves."""


def launch(path: Path, steps: int, world: int = 2, **orders: Any) -> dict[str, Any] | None:
    """What rank 0 printed, or None if it did not live to do so. When one rank dies the others are killed: torchrun does."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(HERE / "kill_training.py"), str(path), str(steps), json.dumps(orders)]
    ranks = [
        subprocess.Popen(
            command, env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    ordered = {int(r) for r in orders.get("kill_at", {})} or {orders[k] for k in ORDERS if k in orders}
    try:
        for _ in range(400):
            codes = [p.poll() for p in ranks]
            if all(code is not None for code in codes):
                break
            killed = [r for r, code in enumerate(codes) if code not in (None, 0)]
            if killed and (ordered <= set(killed) or not ordered & set(killed)):
                break
            try:
                ranks[next(r for r, code in enumerate(codes) if code is None)].wait(0.25)
            except subprocess.TimeoutExpired:
                continue
    finally:
        for p in ranks:
            p.kill()
    said = [p.communicate() for p in ranks]
    if not ORDERS & orders.keys() and any(p.returncode for p in ranks):
        pytest.fail("\n".join(err for _, err in said))
    told = [err for _, err in said]
    print("\n".join(told))  # shown where a test fails
    assert all(ranks[rank].returncode == -signal.SIGKILL for rank in ordered), "they died as ordered, and not otherwise"
    lines = [line for line in said[0][0].splitlines() if line.startswith("{")]
    return {**json.loads(lines[-1]), "said": told} if lines else None


def shadows_in(memory: Path) -> list[int]:
    """Processes that keep shadows in this folder, or are about to."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                words = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
                if any(word.startswith(str(memory).encode()) for word in words):
                    found.append(int(name))
    return found


@contextlib.contextmanager
def listening(folder: Path) -> Iterator[str]:
    """`everstep shadow` in a process of its own; its address."""
    command = [sys.executable, "-m", "everstep.cli.main", "shadow", "--listen", "127.0.0.1:0", "--dir", str(folder)]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        command[5] = f"127.0.0.1:{s.getsockname()[1]}"
    with subprocess.Popen(command) as host:
        try:
            yield f"tcp://{command[5]}"
        finally:
            host.kill()
