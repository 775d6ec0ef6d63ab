"""In the trainer: decides when a base is due, keeps the follower process busy, applies retention."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from everstep import background, fold
from everstep.errors import EverstepError, HiddenEditWarning, ReplayError
from everstep.follow.tuned import Tuned
from everstep.format.documents import KeptDocument
from everstep.format.parts import Part
from everstep.format.segment import parse_name
from everstep.restore.plan import line_to
from everstep.restore.replicas import drifted
from everstep.store import files, retention
from everstep.store.bases import is_there
from everstep.store.retention import Retention, StoredBase, StoredSegment
from everstep.store.runs import RunPath, read_listing
from everstep.store.segments import Segment
from everstep.tune.averages import BaseMade

MAX_LAG = 4
"""In base intervals: when the follower is further behind, the trainer takes the base itself."""
MAX_FOLLOWERS = 3
"""In a row that died without a base: then bases come from the trainer."""
HANGS_AFTER_S = 30.0


class Keeper:
    """Bases and retention of one generation. Its own work is done by one background thread."""

    def __init__(
        self, path: RunPath, timeline: int, generation: int, step: int, policy: Retention, interval: int, *,
        follower: bool, optimizers: Mapping[str, Optimizer], say: Callable[[str], None], world_size: int = 1,
        has_log: bool = True,
    ) -> None:  # fmt: skip
        self._world_size = world_size
        self._has_log = has_log
        self.is_by_number = world_size > 1 and not has_log
        """Bases are due at multiples of the interval, whenever the last one was: without a log only those count that all
        ranks have, and ranks do not talk while they train."""
        self._compared = -1
        self._drift: list[str] = []
        self._told_of_drift: set[str] = set()
        self._say = say
        self._told_of_lag = False
        self._path = path
        self._timeline, self._generation = timeline, generation
        self._policy = policy
        self._interval = interval
        self._register = _importable(optimizers) if follower else None
        self.base_step = _newest_base(path, timeline)
        self._asked = max(self.base_step, 0)
        self._durable = step
        self.proven_step = -1
        self._process: subprocess.Popen[str] | None = None
        self._followers = 0
        self._ready = False
        self._retained = -1
        self._mismatch: str | None = None
        self._removed_bytes = 0
        self._follower_cpu_s = 0.0
        self._follower_bases = 0
        self.tuned: Tuned | None = None
        self._closed = False
        self._kept = threading.Lock()
        self._todo: queue.SimpleQueue[str | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = background.start(self._run, "everstep-keep")

    # -- called by the run --------------------------------------------------------------------------------------------

    def wants_base(self, step: int, durable: int, log_bytes: int) -> str:
        """Why the trainer should take a base now; empty if it need not. Training thread, every step."""
        if self._mismatch is not None:
            message, self._mismatch = self._mismatch, None
            warnings.warn(
                f"{message}. Something changed it without a trace. A new base is being taken; steps from there on are "
                "right, the steps between cannot be restored",
                HiddenEditWarning,
                stacklevel=4,
            )
            return message
        if self._drift:
            drift, self._drift = self._drift, []
            warnings.warn(f"ranks have drifted apart: {'; '.join(drift[:5])}", HiddenEditWarning, stacklevel=4)
        if self.is_by_number:
            is_due = step // self._interval > (step - 1) // self._interval
            return f"all ranks take one at step {step}" if is_due else ""
        since = step - max(self.base_step, 0)
        if since < self._interval:
            return ""
        if self._register is None:
            return f"{since} steps since the last base"
        if since < MAX_LAG * self._interval:
            return ""
        if not self._told_of_lag:
            self._told_of_lag = True
            self._say(
                f"everstep: {self._path.path}: the follower is {since} steps behind, so the trainer takes bases itself. "
                "Raise base_interval or give the host another core"
            )
        return "the follower lags"

    def durable(self, step: int) -> None:
        """Steps up to this one are durable. Writer thread, every step."""
        self._durable = step
        if self._register is not None and step - self._asked >= self._interval:
            self._asked = step
            self._todo.put("compact")

    def written(self, step: int) -> None:
        """The frame of this step is in the log, though perhaps no base before it is. Writer thread, every step."""

    def base_done(self, step: int, log_bytes: int) -> None:
        """A base of this step exists."""
        self.base_step = max(self.base_step, step)
        self._asked = max(self._asked, step)
        self._todo.put("retain")

    def keep(self, interval: int, policy: Retention) -> None:
        """From now on. The keeper's own thread, or before training begins."""
        self._interval, self._policy = interval, policy

    def never_stored(self, first: int, last: int) -> None:
        """Storage had failed: these steps do not exist. Durable on return."""
        with self._kept:
            kept = self._path.read_kept(self._timeline)
            self._path.write_kept(self._timeline, KeptDocument(kept.horizon, (*kept.gaps, (first, last, self._generation))))

    def stats(self) -> dict[str, Any]:
        return {
            "base_step": self.base_step,
            "follower_bases": self._follower_bases,
            "follower_cpu_s": self._follower_cpu_s,
            "removed_bytes": self._removed_bytes,
            "tuner": None if self.tuned is None else {**self.tuned.stats(), "paused": self._not_measured},
        }

    @property
    def _not_measured(self) -> str | None:
        """Why nothing is tuned any more; None: it is."""
        return "bases come from the trainer, which are not measured" if self._register is None else None

    @property
    def unprotected_since(self) -> int | None:
        """Since when a failure would lose steps that were reported durable; None: it would not."""
        return None

    def let_go(self) -> None:
        """The run is about to close: nothing may be waited for that could take long."""

    def close(self, *, finish: bool = False) -> None:
        """Finish what is queued, end the follower."""
        self._closed = True
        self._todo.put(None)
        process = self._process
        if process is not None:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            process.kill()  # whatever it is doing can be done again: the log is there
        self._thread.join()
        self._bury(process)
        if finish and self.tuned is not None:
            try:
                self.tuned.close()
            except (EverstepError, OSError) as e:  # the run is whole without it; this end will be counted as a failure
                print(f"everstep: {self._path.path}: {e}", file=sys.stderr, flush=True)

    def _bury(self, process: subprocess.Popen[str] | None) -> None:
        """End a follower and leave nothing of it behind."""
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._process is process:
            self._process = None

    # -- its thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            job = self._todo.get()
            if job is None:
                return
            try:
                if callable(job):
                    job()
                    continue
                if job == "compact" and not self._closed:
                    self._compact()
                else:
                    self._retain()
                if self._world_size > 1 and self._path.rank == 0 and not self._closed:
                    self._compare_ranks()
            except (EverstepError, OSError) as e:
                # Bases and removals can wait; the log is there. Told, and tried again at the next base.
                print(f"everstep: {self._path.path}: {e}", file=sys.stderr, flush=True)

    def _compact(self) -> None:
        """Ask the follower for a base and wait for it."""
        process = self._follower()
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        step = self._durable
        if self.tuned is not None:
            self.tuned.base_begins(self.tuned.counters())
        try:
            process.stdin.write(json.dumps({"base": step}) + "\n")
            process.stdin.flush()
            line = self._answer(process, step)
        except (OSError, ValueError):
            line = ""
        if not line:
            self._bury(process)
            return
        event = json.loads(line)
        self._follower_cpu_s = event.get("cpu_s", self._follower_cpu_s)
        if event["event"] == "base":
            self._follower_bases += 1
            self._followers = 0
            self.proven_step = max(self.proven_step, event["proven"])
            self.base_step = max(self.base_step, event["step"])
            self._retain()
            if self.tuned is not None:
                made = BaseMade(
                    num_bytes=event["num_bytes"], write_s=event["seconds"] - event["fold_s"],
                    num_folded=event["num_folded"], fold_s=event["fold_s"], fold_cpu_s=event["fold_cpu_s"],
                    num_cores=os.cpu_count() or 1,
                )  # fmt: skip
                self.tuned.base_made(made, self.tuned.counters())
        elif event["event"] == "mismatch":
            self._mismatch = event["message"]
        elif event["event"] == "error" and not self._closed:
            print(f"everstep: {self._path.path}: follower: {event['message']}", file=sys.stderr, flush=True)

    def _answer(self, process: subprocess.Popen[str], step: int) -> str:
        """The follower's answer; empty if it is dead, or hangs while the trainer has had to go past it."""
        assert process.stdout is not None
        passed: float | None = None
        while not self._closed:
            if select.select([process.stdout], [], [], 0.5)[0]:
                line = process.stdout.readline()
                if not line or json.loads(line)["event"] != "ready":
                    return line
                self._ready = True
                continue
            if self.base_step > step and self._ready:
                passed = time.monotonic() if passed is None else passed
                if time.monotonic() - passed > HANGS_AFTER_S:
                    return ""
            if self.base_step > self._retained:
                self._retain()
        return ""

    def _follower(self) -> subprocess.Popen[str] | None:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._bury(self._process)
        if self._followers >= MAX_FOLLOWERS:
            self._register = None  # it keeps dying: bases come from the trainer
            return None
        self._followers += 1
        command = [
            sys.executable, "-m", "everstep.follow", self._path.path, "--timeline", str(self._timeline),
            "--generation", str(self._generation), "--rank", str(self._path.rank),
        ]  # fmt: skip
        if files.supports_direct(self._path.bases(self._timeline)):
            command.append("--direct")
        for name in self._register or ():
            command += ["--register", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._ready = False
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
        )
        return self._process

    def _retain(self) -> None:
        self._retained = self.base_step
        bases, segments = stored(self._path, self._timeline)
        if self._world_size > 1:
            complete = self._complete()
            bases = [b for b in bases if b.step <= complete]  # what the others lack could still be asked of this rank
        removal = retention.plan_removal(self._policy, bases, segments, self._durable)
        if not removal.num_bytes:
            return
        with self._kept:
            kept = self._path.read_kept(self._timeline)
            if removal.horizon > kept.horizon:
                gaps = tuple(g for g in kept.gaps if g[1] >= removal.horizon)
                self._path.write_kept(self._timeline, KeptDocument(removal.horizon, gaps))
        retention.execute(removal)
        self._removed_bytes += removal.num_bytes

    def _complete(self) -> int:
        """A step that every rank has, or can make."""
        if not self._has_log:
            return common_base(self._path, self._timeline, self._world_size)
        return complete_step(self._path, self._timeline, self._generation, self._world_size)

    def _compare_ranks(self) -> None:
        """Whether the ranks' copies of parameters are still equal, as far as their logs tell."""
        listings = [read_listing(self._path.part(rank)) for rank in range(self._world_size)]
        lines = [line_to(listing, self._generation, check_tail=False) for listing in listings]
        for problem in drifted(lines, self._compared):
            if problem.split(", seen at")[0] not in self._told_of_drift:
                self._told_of_drift.add(problem.split(", seen at")[0])
                self._drift.append(problem)
        self._compared = max(self._compared, min((max(line.frames, default=-1) for line in lines), default=-1))


def stored(path: RunPath, timeline: int, part: Part | None = None) -> tuple[list[StoredBase], list[StoredSegment]]:
    """What a timeline's folder holds (of bases, this part), by names and sizes only. The segment being written is not among
    them."""
    found = []
    for name in files.listing(path.bases(timeline)):
        folder = os.path.join(path.bases(timeline), name)
        if name.isdigit() and is_there(folder, part):
            size = sum(files.size(os.path.join(folder, f)) for f in files.listing(folder))
            found.append(StoredBase(int(name), size, folder))
    names = []
    for name in files.listing(path.log(timeline)):
        parsed = parse_name(name)
        if parsed is not None:
            names.append((*parsed, os.path.join(path.log(timeline), name)))
    names.sort()
    segments = [
        StoredSegment(first, max(first, following - 1), files.size(file), file)
        for (_, first, file), (_, following, _) in itertools.pairwise(names)
    ]
    return found, segments


def complete_step(path: RunPath, timeline: int, generation: int, world_size: int) -> int:
    """A step that every rank's log of this generation has reached; -1 if one has none."""
    found = []
    run = path.read_run().run
    for rank in range(world_size):
        part = path.part(rank)
        parsed = [(*p, n) for n in files.listing(part.log(timeline)) if (p := parse_name(n)) and p[0] == generation]
        if not parsed:
            return -1
        _, first, name = max(parsed)
        segment = Segment(os.path.join(part.log(timeline), name), run, rank, generation, first).scan()
        last = segment.frames[-1].step if segment.frames else first - 1
        found.append(segment.durable_step if segment.durable_step >= 0 else last)
    return min(found)


def common_base(path: RunPath, timeline: int, world_size: int) -> int:
    """The newest step of which every rank has a base; -1 if there is none."""
    steps = [{b.step for b in stored(path.part(rank), timeline)[0]} for rank in range(world_size)]
    return max(set.intersection(*steps), default=-1)


def _newest_base(path: RunPath, timeline: int) -> int:
    return max((b.step for b in stored(path, timeline)[0]), default=-1)


def _importable(optimizers: Mapping[str, Optimizer]) -> list[str] | None:
    """Classes the follower must import, or None if it could not build one of the optimizers."""
    needed = []
    for optimizer in optimizers.values():
        if any(p.device.type != "cpu" for g in optimizer.param_groups for p in g["params"]):
            return None
        name = fold.class_name(type(optimizer))
        try:
            fold.find_class(name)
        except ReplayError:
            if name != "torch.optim.LBFGS":
                return None
            continue
        if not name.startswith("torch.optim."):
            if "<locals>" in name or name.startswith("__main__:"):
                return None
            needed.append(name)
    return needed

