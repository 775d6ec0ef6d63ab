"""What a restore under another layout takes of a process's memory: what is wanted, and a buffer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep

LAYERS, WIDTH = 32, 512  # of 1 MiB each
NUM_READERS = 4
BATCH_BYTES = 8 << 20
ELSE_BYTES = 32 << 20
"""Gradients that are read ahead, threads, planning: whatever the size of the state."""

READ = """
import json, re, sys, threading
from everstep.restore import join
from everstep.restore.history import History
from msgspec import structs
from everstep.boxes import Box

path, rank, num_readers, join.BATCH_BYTES = sys.argv[1], *map(int, sys.argv[2:])
source = History(path)._source("latest", None)
def part(atom):
    rows = atom.shape[0] // num_readers
    return structs.replace(atom, boxes=((0, Box((rank * rows, 0), (rows, atom.shape[1]))),))

def anonymous():
    with open("/proc/self/status") as f:
        return int(re.search(r"RssAnon:\\s+(\\d+) kB", f.read())[1]) << 10

stop, seen = threading.Event(), [anonymous()]
def watch():
    while not stop.wait(0.001):
        seen.append(anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
found = join.fetch(source, {uid: part(atom) for uid, atom in source.atoms.items()}, rank=rank, world_size=num_readers)
stop.set()
watcher.join()
print(json.dumps([len(found.state.tensors), max(seen) - seen[0]]))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`killed`: a base with moments and a frame after it; `closed`: a base."""
    folder = tmp_path_factory.mktemp("memory")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    for _ in range(2):
        with everstep.attach(model, optimizer, folder / "closed", quiet=True, follower=False, durability="os") as run:
            run.resume()
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.01)
            optimizer.step()
            run.commit()
            run.flush()
            shutil.copytree(folder / "closed", folder / "killed", dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize("name", ["killed", "closed"])
@pytest.mark.sampled(2)
def test_a_part_of_a_state_is_restored_with_little_more_memory_than_it_has_itself(name: str, recorded: Path) -> None:
    state_bytes = 3 * LAYERS * WIDTH * WIDTH * 4
    arguments = [str(recorded / name), "1", str(NUM_READERS), str(BATCH_BYTES)]
    told = subprocess.run([sys.executable, "-c", READ, *arguments], capture_output=True, text=True, check=True).stdout
    num_tensors, used = json.loads(told)
    assert num_tensors == LAYERS
    assert state_bytes / NUM_READERS <= used <= state_bytes / NUM_READERS + BATCH_BYTES + ELSE_BYTES < state_bytes
