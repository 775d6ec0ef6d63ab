"""How well compressed training learns, and what kills with residual="base" do to it: a character-level GPT on LICENSE.

`pytest -m long -s tests/compress/test_loss.py` prints the numbers of docs/compression.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import everstep
from everstep.bench.workloads import GPT, Workload
from everstep.compress import TopK
from support import crash

TEXT = (Path(__file__).parent.parent.parent / "LICENSE").read_text()
CHARACTERS = sorted(set(TEXT))
IDS = torch.tensor([CHARACTERS.index(c) for c in TEXT])
WORKLOAD = Workload(dim=64, num_layers=2, num_heads=4, vocabulary=len(CHARACTERS), sequence=64, tokens=512)
STEPS, KILLS = 800, (131, 266, 393, 534, 671)


class Training:
    def __init__(self, compressor: TopK | None) -> None:
        torch.manual_seed(0)
        self.model = GPT(WORKLOAD)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True)
        self.compressor = compressor
        if compressor is not None:
            compressor.attach(self.optimizer)

    def step(self, at: int) -> float:
        starts = torch.randint(0, len(IDS) - 65, (8,), generator=torch.Generator().manual_seed(at)).tolist()
        loss: torch.Tensor = self.model(torch.stack([IDS[s : s + 65] for s in starts]))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def mean(losses: list[float]) -> float:
    return sum(losses[-100:]) / 100


@pytest.mark.long
def test_kills_with_residual_base_do_not_cost_what_was_learned(tmp_path: Path) -> None:
    dense, whole = Training(None), Training(TopK(0.01))
    without = [dense.step(at) for at in range(STEPS)]
    compressed = [whole.step(at) for at in range(STEPS)]
    killed: list[float] = []
    for end in (*KILLS, STEPS):
        training = Training(TopK(0.01, residual="base"))
        run = everstep.attach(
            training.model, training.optimizer, tmp_path, compress=training.compressor, quiet=True, follower=False,
            base_interval=50, durability="os",
        )  # fmt: skip
        for at in range(run.resume(), end):
            killed.append(training.step(at))
            run.commit()
        run.flush()
        crash(run)
    after = [(sum(killed[k : k + 20]) / 20, sum(compressed[k : k + 20]) / 20) for k in KILLS]
    print(f"\nlosses: dense {mean(without):.3f}, TopK(0.01) {mean(compressed):.3f}, after five kills {mean(killed):.3f}")
    print("20 steps after each kill, and without it:", ", ".join(f"{a:.3f} {b:.3f}" for a, b in after))
    assert len(killed) == STEPS
    assert mean(killed) < 1.03 * mean(compressed)
    assert mean(compressed) < compressed[0] / 2
