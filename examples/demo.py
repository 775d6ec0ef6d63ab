"""Train a small GPT, kill it again and again, and prove that nothing was lost.

1. An uninterrupted training that never heard of Everstep: its loss and the hash of all its bits after every step.
2. The same training with every step saved, in a process that is killed with SIGKILL at random moments and started
   again.
3. The proof: every loss that any of the killed processes saw, the final weights, moments, schedule and random numbers,
   and some past steps brought back, each compared bit for bit with the uninterrupted training.
4. What saving every step costs, in alternating blocks of one process.

Ends with a table; exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).resolve().parent
console = Console(highlight=False)


@dataclass
class Killed:
    """The training that was killed again and again."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    """Of every process, in order: a step that was lost is there twice."""
    lost: list[int] = field(default_factory=list)
    """By each kill: steps that had been finished and had to be done again."""
    resume_s: list[float] = field(default_factory=list)


@dataclass
class Cost:
    """Of saving every step."""

    ratios: list[float] = field(default_factory=list)
    bytes_a_step: float = 0.0

    def __str__(self) -> str:
        low, middle, high = statistics.quantiles(self.ratios, n=4)
        return f"{middle - 1:+.1%}  (quartiles {low - 1:+.1%} and {high - 1:+.1%} of {len(self.ratios)} pairs)"


class Worker:
    """A process of its own whose JSON lines are read as they come."""

    def __init__(self, script: str, arguments: list[str], log: Path) -> None:
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / script), *arguments], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._log = log

    def events(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                if line.endswith("\n"):
                    yield json.loads(line)
        code = self.process.wait()
        if code not in (0, -signal.SIGKILL):
            raise SystemExit(f"{' '.join(self.process.args)} failed:\n{self._log.read_text()}")


class Bar:
    """One bar of progress; lines instead where there is no terminal."""

    def __init__(self, progress: Progress, name: str, total: int) -> None:
        self._progress, self._name, self._total = progress, name, total
        self._task = progress.add_task(name, total=total, note="")

    def update(self, done: int, note: str) -> None:
        self._progress.update(self._task, completed=done, note=note)
        if not console.is_terminal and done % max(self._total // 4, 1) == 0:
            console.print(f"  {self._name}: {done} of {self._total}, {note}")


def train_uninterrupted(progress: Progress, options: list[str], steps: int, log: Path) -> dict[int, tuple[float, str]]:
    """(loss, hash of all bits) after every step."""
    bar = Bar(progress, "uninterrupted", steps)
    found = {}
    for event in Worker("train.py", options, log).events():
        found[event["step"]] = event["loss"], event["digest"]
        bar.update(event["step"], f"loss {event['loss']:.4f}")
    return found


def train_killed(progress: Progress, options: list[str], steps: int, kills: int, log: Path) -> Killed:
    """The same, saved at every step, killed at random moments, started again until it is done."""
    bar = Bar(progress, "saved, killed", steps)
    killed = Killed()
    kill_at = sorted(random.sample(range(steps // 8, steps - steps // 6), kills))
    pace, last, reached = 0.05, time.perf_counter(), 0
    while True:
        worker = Worker("train.py", options, log)
        doomed = False
        for event in worker.events():
            now = time.perf_counter()
            if "resumed" in event:
                killed.resume_s.append(event["seconds"])
                if reached:
                    lost = reached - event["resumed"]
                    killed.lost.append(lost)
                    console.print(
                        f"  SIGKILL in step {reached + 1} → resumed at step {event['resumed']} in "
                        f"{event['seconds']:.2f} s ({lost} finished step{'' if lost == 1 else 's'} lost)"
                    )
                last = now
                continue
            pace, last = 0.8 * pace + 0.2 * (now - last), now
            reached = event["step"]
            killed.losses.append((reached, event["loss"]))
            bar.update(reached, f"loss {event['loss']:.4f}")
            if not doomed and kill_at and reached >= kill_at[0]:
                time.sleep(random.random() * pace)  # anywhere inside the next step
                worker.process.kill()
                doomed = True
                kill_at.pop(0)
        if worker.process.returncode == 0:
            return killed


def compare(folder: Path, reference: dict[int, tuple[float, str]], killed: Killed, steps: int) -> list[str]:
    """What differs, in words. Both final states are read here, and past steps by everstep.open."""
    import torch
    from gpt import digest

    import everstep

    wrong = [f"loss of step {s}: {x!r}, not {reference[s][0]!r}" for s, x in killed.losses if x != reference[s][0]]
    if {s for s, _ in killed.losses} != set(range(1, steps + 1)):
        wrong.append("loss: some steps were never trained")
    a, b = (torch.load(folder / f"{name}.pt") for name in ("uninterrupted", "killed"))
    if a["state"].keys() != b["state"].keys():
        wrong.append("final states have other tensors")
    for name, tensor in a["state"].items():
        other = b["state"].get(name)
        if other is None or tensor.dtype != other.dtype or tensor.numpy().tobytes() != other.numpy().tobytes():
            wrong.append(f"final {name}")
    if not torch.equal(a["rng"], b["rng"]):
        wrong.append("the random number generator")
    if a["schedule"] != b["schedule"]:
        wrong.append("the learning rate schedule")
    history = everstep.open(folder / "run")
    for step in sorted({*random.sample(history.steps[1:], min(3, len(history.steps) - 1)), steps}):
        past = history.state(step)
        moments = {f"{p}/{k}": v for p, values in past["optimizer"]["state"].items() for k, v in values.items()}
        found = digest({**past["model"], **moments})
        same = found == reference[step][1]
        console.print(f"  step {step:>3} brought back: hash {found} {'equal' if same else 'DIFFERS'}")
        if not same:
            wrong.append(f"step {step} as everstep.open brings it back")
    return wrong


def measure_cost(progress: Progress, run: Path, size: str, pairs: int, steps: int, log: Path) -> Cost:
    """Blocks with and without saving, in turn."""
    bar = Bar(progress, "overhead", pairs)
    cost = Cost()
    arguments = [str(run), "--size", size, "--pairs", str(pairs), "--steps", str(steps)]
    for event in Worker("overhead.py", arguments, log).events():
        if "on" in event:
            cost.ratios.append(event["on"] / event["off"])
            bar.update(len(cost.ratios), f"{statistics.median(cost.ratios) - 1:+.1%}")
        else:
            cost.bytes_a_step = event["bytes_a_step"]
    return cost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("demo-run"), help="folder to work in; made anew")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps: to test the demo itself")
    args = parser.parse_args()
    size, steps, kills, pairs, block = ("tiny", 40, 2, 2, 4) if args.quick else ("small", 100, 4, 10, 8)
    folder: Path = args.dir
    if folder.exists() and any(folder.iterdir()) and not (folder / "worker.log").exists():
        raise SystemExit(f"{folder} holds something else than an earlier demo: give another --dir")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "worker.log"
    log.touch()
    begun = time.perf_counter()
    columns = (
        TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )  # fmt: skip
    console.print(f"a {size} GPT learns the Python standard library's sources: {steps} steps, {kills} kills")
    with Progress(*columns, console=console) as progress:
        common = ["--size", size, "--steps", str(steps), "--report"]
        reference = train_uninterrupted(progress, [*common, "--final", str(folder / "uninterrupted.pt")], steps, log)
        options = [*common, "--run", str(folder / "run"), "--final", str(folder / "killed.pt")]
        killed = train_killed(progress, options, steps, kills, log)
        wrong = compare(folder, reference, killed, steps)
        cost = measure_cost(progress, folder / "overhead", size, pairs, block, log)
    shutil.rmtree(folder / "overhead")

    resume_s = killed.resume_s[1:] or killed.resume_s
    table = Table(show_header=False)
    for name, value in (
        ("steps", f"{steps}, every one of them saved"),
        ("kills", f"{len(killed.lost)}  (SIGKILL at random moments)"),
        ("steps lost", f"{' + '.join(map(str, killed.lost))}  (at most {max(killed.lost, default=0)} at a kill)"),
        ("loss curve", "DIFFERS" if any(w.startswith("loss") for w in wrong) else "equal, bit for bit"),
        ("final weights", "DIFFER" if any(w.startswith("final") for w in wrong) else "equal, bit for bit"),
        ("hash of all bits", reference[steps][1]),
        ("overhead", f"{cost}"),
        ("bytes a step", f"{cost.bytes_a_step:,.0f}"),
        ("time to resume", f"{statistics.median(resume_s):.2f} s  (longest {max(resume_s):.2f} s)"),
        ("whole demo", f"{time.perf_counter() - begun:.0f} s"),
    ):
        table.add_row(name, value)
    console.print(table)
    for line in wrong[:20]:
        console.print(f"[bold red]differs:[/] {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
