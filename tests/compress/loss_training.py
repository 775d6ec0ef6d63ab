"""How well compressed training learns: python loss_training.py FOLDER. Prints losses as JSON.

A character-level GPT is trained on this repository's documentation: densely, with TopK(0.01), and with TopK(0.01),
residual="base" and five kills (SIGKILL).

The loss that counts is that of text which no step has seen: the last tenth.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import everstep
from everstep.bench.workloads import GPT, Workload
from everstep.compress import TopK

TEXT = "".join(f.read_text() for f in sorted((Path(__file__).parent.parent.parent / "docs").glob("*.md")))
CHARACTERS = {c: i for i, c in enumerate(sorted(set(TEXT)))}
IDS = torch.tensor([CHARACTERS[c] for c in TEXT])
SEEN, UNSEEN = IDS[: len(IDS) * 9 // 10], IDS[len(IDS) * 9 // 10 :]
WORKLOAD = Workload(dim=64, num_layers=2, num_heads=4, vocabulary=len(CHARACTERS), sequence=64, tokens=512)
STEPS, LOOK_EVERY, KILLS = 3200, 400, (531, 1066, 1593, 2134, 2671)
LR, WARM_UP = 3e-3, 100


def rows(text: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    starts = torch.randint(0, len(text) - 65, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return torch.stack([text[s : s + 65] for s in starts])


class Training:
    def __init__(self, compressor: TopK | None) -> None:
        torch.manual_seed(0)
        self.model = GPT(WORKLOAD)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)
        self.compressor = compressor
        if compressor is not None:
            compressor.attach(self.optimizer)

    def step(self, at: int) -> float:
        self.optimizer.param_groups[0]["lr"] = LR * min(1.0, (at + 1) / WARM_UP)
        loss: torch.Tensor = self.model(rows(SEEN, 8, at))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def look(self) -> float:
        with torch.no_grad():
            return float(self.model(rows(UNSEEN, 64, 5)))


def uninterrupted(compressor: TopK | None) -> dict[str, Any]:
    training = Training(compressor)
    seen, unseen = [], {}
    for at in range(STEPS):
        seen.append(training.step(at))
        if (at + 1) % LOOK_EVERY == 0:
            unseen[at + 1] = training.look()
    return {"seen": seen, "unseen": unseen}


def killed(path: Path) -> dict[str, Any]:
    seen: dict[int, float] = {}
    unseen: dict[int, float] = {}
    for end in (*KILLS, STEPS):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _train(path, lambda line, write=write: os.write(write, line))  # type: ignore[misc]
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read) as lines:
            for line in lines:
                at, loss, look = json.loads(line)
                seen[at] = loss
                if look is not None:
                    unseen[at + 1] = look
                if at + 1 >= end:
                    break
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {"seen": [seen[at] for at in range(STEPS)], "unseen": unseen}


def _train(path: Path, tell: Callable[[bytes], int]) -> None:
    training = Training(TopK(0.01, residual="base"))
    run = everstep.attach(
        training.model, training.optimizer, path, compress=training.compressor, quiet=True, follower=False,
        base_interval=50, durability="batch",
    )  # fmt: skip
    for at in range(run.resume(), 10 * STEPS):
        loss = training.step(at)
        run.commit()
        tell(json.dumps([at, loss, training.look() if (at + 1) % LOOK_EVERY == 0 else None]).encode() + b"\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({
        "dense": uninterrupted(None), "topk": uninterrupted(TopK(0.01)), "killed": killed(Path(sys.argv[1])),
    }))  # fmt: skip
