"""A training that test_elastic.py runs under torchrun: python elastic_training.py RUN NOTES STEPS [JSON].

JSON: more options for attach; with shadows, training begins when they hold the state. The global batch is 8 samples whatever
the number of ranks. Every rank notes what each step was made of, in a file whose name tells from where it went on.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import everstep

GLOBAL_BATCH = 8
NUM_SAMPLES = 320


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    """Sample i is drawn from i."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), index


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Summed over samples: the same for any division of the batch, but for the order of sums."""
    return ((model(x.double()).squeeze(-1) - x.double().sum(-1)) ** 2).sum() / GLOBAL_BATCH


def main() -> None:
    path, notes, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = build()
    wrapped = DistributedDataParallel(model)
    sampler = everstep.data.Sampler(NUM_SAMPLES, seed=3)
    loader = DataLoader(Numbers(), batch_size=GLOBAL_BATCH // world, sampler=sampler)
    options = {"quiet": True, "base_interval": 10, **json.loads(sys.argv[4] if len(sys.argv) > 4 else "{}")}
    with everstep.attach(wrapped, optimizer, path, **options) as run:
        at = run.resume()
        generation = run._live().generation
        while options.get("mode") == "shadow" and run.stats()["folded_step"] < at:
            time.sleep(0.01)
        source = run.stats()["resumed_from"] or "nothing"
        with open(os.path.join(notes, f"{time.time_ns()}-{rank}-of-{world}-{at}-{os.getpid()}-{source}"), "w") as f:
            for x, indices in run.steps(loader, epochs=100):
                loss = loss_of(wrapped, x)
                (loss * world).backward()  # DDP takes the mean over ranks
                optimizer.step()
                optimizer.zero_grad()
                at += 1
                f.write(json.dumps([at, world, generation, indices.tolist(), loss.item()]) + "\n")
                f.flush()
                time.sleep(0.1)
                if at >= steps:
                    break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
