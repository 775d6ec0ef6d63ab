"""The follower process: commands in on stdin, events out on stdout, a JSON object a line.

    {"fold": n}   bring the state to step n and check it        -> {"event": "folded", ...} or {"event": "mismatch", ...}
    {"base": n}   the same, then write a base of step n         -> {"event": "base", ...}

The first event is {"event": "ready"}.

Ends when stdin does, that is, when the trainer is gone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import threading
import time
from typing import Any

from everstep.background import only_when_idle


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="everstep-follow", description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--timeline", type=int, required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0, help="whose part of the run")
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--register", action="append", default=[], help="module:Class of an optimizer to import")
    args = parser.parse_args(argv)
    only_when_idle()
    _leave_with(os.getppid())

    import torch

    from everstep.errors import AuditError, EverstepError
    from everstep.fold import register
    from everstep.follow.compact import Compactor
    from everstep.store.runs import RunPath

    torch.set_num_threads(1)
    for name in args.register:
        module, _, qualname = name.partition(":")
        register(getattr(importlib.import_module(module), qualname))
    compactor = Compactor(RunPath(args.run, args.rank), args.timeline, args.generation)
    print(json.dumps({"event": "ready"}), flush=True)
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        step: int = command["base"] if "base" in command else command["fold"]
        begun, begun_cpu = time.perf_counter(), time.process_time()
        before = compactor.step
        try:
            compactor.advance(step)
            folded_s, folded_cpu_s = time.perf_counter() - begun, time.process_time() - begun_cpu
            event: dict[str, Any] = {"event": "folded", "step": step, "proven": compactor.proven}
            if "base" in command:
                manifest = compactor.write_base(direct=args.direct)
                event = {
                    "event": "base", "step": manifest.step, "proven": compactor.proven, "fold_s": folded_s,
                    "fold_cpu_s": folded_cpu_s, "num_folded": 0 if before is None else step - before,
                    "num_bytes": manifest.num_bytes,
                }  # fmt: skip
        except AuditError as e:
            event = {"event": "mismatch", "step": e.step, "message": str(e)}
        except EverstepError as e:
            event = {"event": "error", "message": f"{type(e).__name__}: {e}"}
            compactor.forget()
        cpu = time.process_time()
        print(json.dumps({**event, "seconds": time.perf_counter() - begun, "cpu_s": cpu}), flush=True)
    return 0


def _leave_with(parent: int) -> None:
    """End when the trainer does, even if a child of its that outlives it keeps our pipe open."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the trainer is dead: nobody is left to be told anything
        os._exit(0)
