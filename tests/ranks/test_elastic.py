"""torchrun's elasticity: four ranks, two of them lost, two new ones; the run goes on by itself, sample by sample."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from killing import shadows_in

import everstep

sys.path.insert(0, str(Path(__file__).resolve().parent))
import elastic_training as training

STEPS = 400
Note = tuple[int, int, int, list[int], float]


def agent(
    run: Path, notes: Path, port: int, nodes: str, log: Path, steps: int = STEPS, **options: Any
) -> subprocess.Popen[bytes]:
    """One node of two processes. `options` for attach."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "2", "--max-restarts", "20",
        "--monitor-interval", "0.2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test",
        "--rdzv-conf", "last_call_timeout=8,keep_alive_interval=2,keep_alive_max_attempt=5,is_host=0",
        training.__file__, str(run), str(notes), str(steps), json.dumps(options),
    ]  # fmt: skip
    with log.open("ab") as f:
        # Else restarted ranks share a store with the dead, and gloo connects to those.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return subprocess.Popen(command, stdout=f, stderr=f, start_new_session=True, env=environment)


def kill_node(agent: subprocess.Popen[bytes]) -> None:
    """The agent and its ranks, which are in sessions of their own, at once."""
    if agent.poll() is None:
        ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for pid in (agent.pid, *map(int, ranks)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    agent.wait()


def read_notes(folder: Path) -> dict[int, list[Note]]:
    """What each step was made of, as told by the last generation that made it."""
    found: dict[int, list[Note]] = {}
    for file in sorted(folder.iterdir()):
        for line in file.read_text().splitlines():
            note: Note = tuple(json.loads(line))
            found.setdefault(note[0], []).append(note)
    return {step: [n for n in told if n[2] == max(o[2] for o in told)] for step, told in found.items()}


def wait_for(notes: Path, world: int, after: int, log: Path, timeout_s: float = 150.0) -> int:
    """The newest step, as soon as so many ranks have made ten steps beyond `after`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        made = [n for n, told in read_notes(notes).items() if told[0][1] == world and n > after]
        if len(made) >= 10:
            return max(made)
        time.sleep(0.2)
    raise AssertionError(f"no {world} ranks after step {after}:\n{log.read_text()[-4000:]}")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_four_ranks_down_to_two_and_back_lose_and_repeat_no_sample(tmp_path: Path) -> None:
    run, notes, log = tmp_path / "run", tmp_path / "notes", tmp_path / "log"
    notes.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the rendezvous outlives every node
    agents = [agent(run, notes, store.port, "1:2", log) for _ in range(2)]
    try:
        at = wait_for(notes, 4, 0, log)
        kill_node(agents[1])
        at = wait_for(notes, 2, at - 5, log)
        agents.append(agent(run, notes, store.port, "1:2", log))
        wait_for(notes, 4, at, log)
        assert agents[0].wait(200) == 0, log.read_text()[-4000:]
        agents[2].wait(60)
    finally:
        for each in agents:
            kill_node(each)
    told = check_steps(notes, STEPS)
    assert {told[n][0][1] for n in told} == {2, 4}, "there were steps of both sizes"
    assert everstep.open(run).steps[-1] == STEPS
    report = everstep.open(run).verify(deep=True)
    assert report.ok, str(report)


def check_steps(notes: Path, steps: int) -> dict[int, list[Note]]:
    """The notes, if all these steps were made of the samples of one process, and gave its losses."""
    told = read_notes(notes)
    assert sorted(told) == list(range(1, steps + 1))
    order = everstep.data.Sampler(training.NUM_SAMPLES, seed=3, rank=0, world_size=1)
    model, optimizer = training.build()
    samples: list[int] = []
    for epoch in range(steps * training.GLOBAL_BATCH // training.NUM_SAMPLES + 1):
        order.set_epoch(epoch)
        samples += list(order)
    for step in range(1, steps + 1):
        wanted = samples[(step - 1) * training.GLOBAL_BATCH : step * training.GLOBAL_BATCH]
        assert sorted(i for note in told[step] for i in note[3]) == sorted(wanted), f"step {step}"
        loss = training.loss_of(model, torch.stack([training.Numbers()[i][0] for i in wanted]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert sum(note[4] for note in told[step]) == pytest.approx(loss.item(), rel=1e-6), f"step {step}"
    return told


@pytest.mark.long
@pytest.mark.timeout(600)
def test_after_a_rank_was_killed_all_restart_and_go_on_from_the_memory_of_their_shadows(
    memory: Path, tmp_path: Path
) -> None:
    notes, log, steps = tmp_path / "notes", tmp_path / "log", 60
    notes.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    node = agent(tmp_path / "run", notes, store.port, "1", log, steps, mode="shadow", base_interval=1000)
    try:
        at = 0
        for _ in range(2):
            at = wait_for(notes, 2, at, log)
            os.kill(int(max(notes.iterdir()).name.split("-")[5]), signal.SIGKILL)
        assert node.wait(200) == 0, log.read_text()[-4000:]
    finally:
        kill_node(node)
    check_steps(notes, steps)
    begun = [file.name.split("-") for file in sorted(notes.iterdir())]
    assert [source for *_, source in begun] == ["nothing"] * 2 + ["shadow"] * 4, begun
    assert not shadows_in(memory), "the run is closed"
