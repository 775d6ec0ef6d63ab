"""What the processes of a world are asked to do."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from builders import one, whole_state
from killing import shadows_in
from layouts import LAYOUTS
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from transformer import TIED, global_batch

import everstep
from everstep.errors import LinkError
from everstep.follow.gather import Shadows
from everstep.restore import join
from support import equal

join.ALONE_BYTES = 0  # parts of these small models are read side by side, too
STEPS = 3
OPTIONS: dict[str, Any] = {"quiet": True, "audit": "full", "durability": "os"}
SHADOWED: dict[str, Any] = {"quiet": True, "mode": "shadow", "shadow_idle_s": 60.0}


def train_plainly(layout: str, optimizer: str, steps: int) -> list[float]:
    """Train without Everstep; the losses. What the ranks hold at the start is one model, put together again, and
    replicas agree at the end (whole_state sees to that)."""
    way = LAYOUTS[layout]
    training = way.build(optimizer)
    begun = whole_state(training)
    if begun is not None:
        whole = one(optimizer, way.family)
        names = sorted([*whole.model.named_parameters(), *whole.model.named_buffers()])
        assert not equal(begun["model"], dict(names))
    losses = [training.step(global_batch(i)) for i in range(steps)]
    whole_state(training)
    return losses


def record(layout: str, kind: str, folder: str) -> list[float]:
    """Train STEPS steps with Everstep and as many more without it; the losses.

    Leaves in `folder`: `killed`, the run as a kill after the last of those steps would leave it; `closed`, the run after
    close(); `state.pt`, the state that both must lead to; `later.pt`, the state after all steps.
    """
    training = LAYOUTS[layout].build(kind)
    path, first = Path(folder), is_first()
    losses = []
    with everstep.attach(training.model, training.optimizer, path / "closed", **OPTIONS) as run:
        assert run.resume() == 0
        for i in range(STEPS):
            losses.append(training.step(global_batch(i)))
            assert run.commit() == i + 1
        state = whole_state(training)
        run.flush()
        together()
        if first:
            shutil.copytree(path / "closed", path / "killed")
            torch.save(state, path / "state.pt")
        together()
    losses += [training.step(global_batch(STEPS + i)) for i in range(STEPS)]
    later = whole_state(training)
    if first:
        torch.save(later, path / "later.pt")
    return losses


def go_on(layout: str, kind: str, run_path: str, source: str, same: bool) -> tuple[list[str], list[float]]:
    """Resume a run and train STEPS more steps; what differs (on rank 0) from what was recorded in `source`; the losses.

    With `same`, the later state must have the same bits too: the layout is the source's. The run itself is asked before
    and after: whatever the layout, it gives whole tensors.
    """
    training = LAYOUTS[layout].build(kind)
    first = is_first()
    recorded = torch.load(Path(source) / "state.pt") if first else None
    problems = differences(recorded, stored(run_path), "in the run") if first else []
    losses = []
    with everstep.attach(training.model, training.optimizer, run_path, **OPTIONS) as run:
        assert run.resume() == STEPS
        problems += differences(recorded, whole_state(training), "restored")
        for i in range(STEPS, 2 * STEPS):
            losses.append(training.step(global_batch(i)))
            assert run.commit() == i + 1
    now = whole_state(training)
    together()
    if first:
        problems += differences(now, stored(run_path), f"in the run after {STEPS} more steps")
        if same:
            problems += differences(torch.load(Path(source) / "later.pt"), now, f"after {STEPS} more steps")
    return problems, losses


def leave_to_shadows(layout: str, kind: str, run_path: str, memory: str, **options: Any) -> list[float]:
    """Train STEPS steps with shadows in this folder, and leave without closing when they have all of it; the losses."""
    os.environ["EVERSTEP_SHARED"] = memory
    training = LAYOUTS[layout].build(kind)
    run = everstep.attach(training.model, training.optimizer, run_path, **{**SHADOWED, **options})
    assert run.resume() == 0
    losses = [train_and_commit(run, training, i) for i in range(STEPS)]
    wait_for_shadows(run)
    together()
    run._close(finish=False)
    return losses


def go_on_from_shadows(
    layout: str, kind: str, run_path: str, memory: str, source: str, **options: Any
) -> tuple[list[str], list[float], str]:
    """Resume what leave_to_shadows has left and train STEPS more steps; where the run differs from the state at the end (on
    rank 0); the losses; what Everstep said. `source`: from where it must come."""
    os.environ["EVERSTEP_SHARED"] = memory
    training = LAYOUTS[layout].build(kind)
    options = {**SHADOWED, "quiet": False, **options}
    with (
        contextlib.redirect_stderr(io.StringIO()) as said,
        everstep.attach(training.model, training.optimizer, run_path, **options) as run,
    ):
        assert run.resume() == STEPS
        assert run.stats()["resumed_from"] == source, (run.stats(), said.getvalue())
        losses = [train_and_commit(run, training, i) for i in range(STEPS, 2 * STEPS)]
        if options["mode"] == "shadow":
            wait_for_shadows(run)  # the new layout's, if it is another
    now = whole_state(training)
    together()
    problems = differences(now, stored(run_path), f"in the run after {STEPS} more steps") if is_first() else []
    return problems, losses, said.getvalue()


def resume_while_shadows_end(layout: str, kind: str, run_path: str, memory: str) -> list[int]:
    """Three times two steps; where each began. The third time the shadows end when they have said what they have."""
    os.environ["EVERSTEP_SHARED"] = memory

    def find(shadows: Shadows, rank: int, step: int) -> Any:
        while pids := shadows_in(Path(memory)):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            time.sleep(0.05)
        raise LinkError("it has just ended")

    begun = []
    for i in range(3):
        training = LAYOUTS[layout].build(kind)
        run = everstep.attach(training.model, training.optimizer, run_path, **SHADOWED)
        with mock.patch.object(Shadows, "find", find) if i == 2 else contextlib.nullcontext():
            begun.append(run.resume())
        for _ in range(2):
            train_and_commit(run, training, run.step)
        wait_for_shadows(run)
        together()
        run._close(finish=False)
        together()
    return begun


def train_and_commit(run: everstep.Run, training: Any, step: int) -> float:
    loss: float = training.step(global_batch(step))
    run.commit()
    return loss


def wait_for_shadows(run: everstep.Run) -> None:
    run.flush()
    deadline = time.monotonic() + 60
    while run.stats()["folded_step"] < run.step:
        assert time.monotonic() < deadline, run.stats()
        time.sleep(0.005)


def stored(run_path: str | Path) -> dict[str, Any]:
    """What a run says about its newest step, in the form of whole_state."""
    state = everstep.open(run_path).state()
    optimizer = state["optimizer"]
    groups = {
        name: {k: group[k] for k in sorted(group) if k != "params"}
        for group in optimizer["param_groups"]
        for name in group["params"]
    }
    model = {name: tensor for name, tensor in state["model"].items() if name != TIED}
    return {"model": model, "state": optimizer["state"], "groups": groups}


def differences(wanted: dict[str, Any] | None, found: dict[str, Any] | None, where: str) -> list[str]:
    """Where two whole states differ; order of names apart."""
    if wanted is None or found is None:
        return []
    return [
        f"{where}: {difference}"
        for part, entries in wanted.items()
        for difference in equal(entries, dict(sorted(found[part].items())), part)
    ]


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


# ------------------------------------------------------------------------------------------ of the world itself


def say(word: str) -> list[object]:
    return [word, dist.get_rank() if dist.is_initialized() else None, os.getpid()]


def fail_on(rank: int) -> None:
    """Raise on one rank while the others wait for it."""
    if dist.get_rank() == rank:
        raise ValueError("a rank that fails")
    dist.barrier()


def wait_for_ever() -> None:
    dist.barrier()
    time.sleep(1000)


# ------------------------------------------------------------------------------------------ what layouts do not show


def train_zero(run_path: str) -> dict[str, Any]:
    """Three steps with a scheduler; the learning rates that the first and the next step have."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with everstep.attach(model, optimizer, run_path, extras={"scheduler": scheduler}, quiet=True) as run:
        begun = run.resume()
        rate = optimizer.param_groups[0]["lr"]
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            run.commit()
    return {"begun": begun, "rate": rate, "rate_after": optimizer.param_groups[0]["lr"]}


def evaluate_fsdp(run_path: str, mode: str) -> dict[str, Any]:
    """Three steps, each followed by an evaluation; the losses there before and after."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def loss() -> float:
        with torch.no_grad():
            return float(model(torch.ones(2, 8)).square().sum())

    loss()
    with everstep.attach(model, optimizer, run_path, mode=mode, quiet=True) as run:
        begun = run.resume()
        before = loss()
        for _ in range(3):
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            loss()
            run.commit()
        after = loss()
    return {"begun": begun, "loss": before, "loss_after": after}
