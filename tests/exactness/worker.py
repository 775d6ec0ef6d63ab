"""A training program that is killed: trains a set-up with Everstep and writes down what it does as it goes.

Every line is one write, so that a kill never tears one:
    resumed STEP            where this process began
    turn BATCH STEP LOSS    the loss (its bits) of this batch; STEP is the last committed one by then
    ended

As a program it is a server: for each line of JSON on its input ({"arguments": [...], "output": file}) it forks a process
that does that, and prints its pid. Importing torch takes longer than such a training; so it is done once.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
import traceback
import warnings

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from harness import everything, loop
from models import build

import everstep
import everstep.run


def main(run_path: str, journal_path: str, result_path: str, case: str, seed: str) -> None:
    torch.set_num_threads(1)
    asked = json.loads(case)
    style, epochs, pause_s = asked.pop("style"), asked.pop("epochs"), asked.pop("pause_s")
    attach = asked.pop("attach")
    warnings.simplefilter("error")
    warnings.filterwarnings("default", category=everstep.errors.InexactWarning)
    if asked.get("clamp"):  # a weight that reaches the clamp for the first time late in the run is reported
        warnings.filterwarnings("default", category=everstep.errors.HiddenEditWarning)
    warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
    t = build(**asked, seed=int(seed))
    t.epochs = epochs
    journal = os.open(journal_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    first = True
    with everstep.attach(t.model, t.optimizer, run_path, extras=t.extras, quiet=True, **attach) as run:
        for _ in loop(t, run, style):
            batch, _, loss = t.turns[-1]
            if first:
                os.write(journal, b"resumed %d\n" % run.stats()["resumed_step"])
                first = False
            os.write(journal, b"turn %d %d %s\n" % (batch, run.step, struct.pack("<d", loss).hex().encode()))
            time.sleep(pause_s)
    torch.save(everything(t), f"{result_path}.new")
    os.rename(f"{result_path}.new", result_path)
    os.write(journal, b"ended\n")


def serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who end
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            become(order["arguments"], order["output"])
        print(pid, flush=True)


def become(arguments: list[str], output: str) -> None:
    """In the forked process: a session of its own, as a program started by a shell would be."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(0)
        os.open(os.devnull, os.O_RDONLY)
        log = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        main(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
