"""DDP with layerwise=True, killed again and again: python layers_training.py FOLDER KILLS SEED.

Both ranks train, store every step, and are killed, each at a moment of its own; then they go on, until they have come to the
end. Every time what they resumed is compared with training that never saw Everstep. Prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
import torch._dynamo  # optimizers and DDP import it when they are first made: here, so once for all ranks
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import everstep
from everstep.capture.layerwise import Layerwise
from everstep.capture.states import States

RANKS = 2
WIDTH = 120
BUCKET_MB = 0.05
"""One layer's weight in each."""
Kill = tuple[int, float]
"""So many seconds after so many steps are stored."""


def build(rank: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(1)
    body = [m for _ in range(5) for m in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.1))]
    ddp = DDP(nn.Sequential(*body), bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, weight_decay=0.1)
    torch.manual_seed(100 + rank)  # dropout differs between ranks
    return ddp, optimizer


def train(ddp: Any, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(RANKS * step + rank))
    ddp(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def digest(ddp: Any, optimizer: torch.optim.Optimizer, rank: int) -> str:
    """Of every bit of parameters and optimizer state; buffers are those of the first rank, as DDP has it."""
    found = hashlib.sha256()
    for p in ddp.parameters():
        for tensor in (p.detach(), *(v for _, v in sorted(optimizer.state.get(p, {}).items()))):
            found.update(tensor.numpy().tobytes())
    for buffer in ddp.buffers() if rank == 0 else ():
        found.update(buffer.numpy().tobytes())
    return found.hexdigest()


def plain(rank: int, folder: Path, num_steps: int) -> None:
    """What each step is without Everstep."""
    ddp, optimizer = build(rank)
    digests = [digest(ddp, optimizer, rank)]
    for step in range(num_steps):
        train(ddp, optimizer, step, rank)
        digests.append(digest(ddp, optimizer, rank))
    (folder / f"truth-{rank}.json").write_text(json.dumps(digests))


def go_on(rank: int, folder: Path, name: str, num_steps: int, options: dict[str, Any], kill: Kill | None) -> None:
    """Resume, and train until killed, or to the end."""
    ddp, optimizer = build(rank)
    ddp.register_comm_hook(None, everstep.early_hook())
    run = everstep.attach(
        ddp, optimizer, folder / "run", mode="snapshot", layerwise=True, snapshot_interval=1, quiet=True, **options
    )
    report: dict[str, Any] = {"resumed": run.resume(), "digest": digest(ddp, optimizer, rank)}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(report))
    try:
        timer = None
        for step in range(run.step, num_steps):
            if kill is not None and timer is None and run.durable_step >= report["resumed"] + kill[0]:
                timer = threading.Timer(kill[1], os.kill, (os.getpid(), signal.SIGKILL))
                timer.start()
            train(ddp, optimizer, step, rank)
            run.commit()
    except RuntimeError:
        if kill is None:
            raise
        time.sleep(kill[1])  # the other rank is dead, and this one has some time left
    if kill is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    states = run._capture
    assert isinstance(states, States)
    report |= {
        "end": digest(ddp, optimizer, rank), "in_backward": states.layers[0].stats.in_backward, "early": states.num_early
    }  # fmt: skip
    run.close()
    (folder / f"{name}-{rank}.json").write_text(json.dumps(report))


def ranks(folder: Path, name: str, work: Callable[[int], None]) -> list[int]:
    """How each ended, in processes of their own."""
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                store = dist.FileStore(str(folder / f"{name}-store"), RANKS)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
                work(rank)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    return [os.waitpid(pid, 0)[1] for pid in pids]


def main(folder: Path, num_kills: int, seed: int) -> None:
    warnings.simplefilter("ignore")  # torch's own
    Layerwise.__init__.__kwdefaults__["batch_bytes"] = 1  # so that this small model is updated in backward many times
    rng, num_steps = random.Random(seed), 20 + 8 * num_kills
    assert ranks(folder, "plain", lambda rank: plain(rank, folder, num_steps)) == [0] * RANKS
    truth = [json.loads((folder / f"truth-{rank}.json").read_text()) for rank in range(RANKS)]
    reports = []
    for i in range(num_kills + 1):
        is_last = i == num_kills
        name, options = f"life-{i}", {"pool_mode": rng.choice([None, "direct", "staged"])}
        first = 0 if i else 3  # a rank that has stored three steps has waited for the other to store one
        kills = [None if is_last else (rng.randrange(first, 9), 0.05 * rng.random()) for _ in range(RANKS)]
        ended = ranks(folder, name, lambda rank: go_on(rank, folder, name, num_steps, options, kills[rank]))  # noqa: B023
        assert ended == [0 if is_last else signal.SIGKILL] * RANKS, f"{name}: {ended}"
        lives = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)]
        reports.append({
            "resumed": [life["resumed"] for life in lives],
            "is_right": [life["digest"] == truth[rank][life["resumed"]] for rank, life in enumerate(lives)],
        })  # fmt: skip
    print(json.dumps({
        "lives": reports, "is_right": [life["end"] == truth[rank][num_steps] for rank, life in enumerate(lives)],
        "in_backward": [life["in_backward"] for life in lives], "early": [life["early"] for life in lives],
    }))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
