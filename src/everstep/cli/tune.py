"""`everstep tune RUN`: what a run's tuner has measured and decided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from everstep.cli.output import Json, RunArgument, console, print_json

if TYPE_CHECKING:
    from everstep.store.runs import RunPath


def tune(run: RunArgument, json: Json = False) -> None:
    """Print the decisions of a run's tuner, with their reasons."""
    from everstep.store.runs import RunPath

    path = RunPath(run)
    path.must_exist()
    found = {"run": path.path, "ranks": [describe(path.part(rank)) for rank in _ranks(path)]}
    if json:
        print_json(found)
    else:
        _print(found)


def _ranks(path: RunPath) -> list[int]:
    """Those that have been tuned; each tunes its own part."""
    import os
    import re

    found = (re.fullmatch(r"tuning(?:-(\d{5,}))?\.json", name) for name in sorted(os.listdir(path.path)))
    return sorted(int(match[1] or 0) for match in found if match)


def describe(path: RunPath) -> dict[str, Any]:
    """One rank's, as a plain dict. CorruptionError if it cannot be read."""
    document = path.read_tuning()
    return {
        "rank": path.rank,
        "failures": document.num_failures,
        "up_s": document.up_s,
        "averages": {name: value for name, (value, _) in sorted(document.averages.items())},
        "decisions": list(document.decisions),
    }


def _print(found: dict[str, Any]) -> None:
    from everstep.tune.choice import seconds
    from everstep.tune.model import RAW

    out = console()
    if not found["ranks"]:
        out.print(f"{found['run']}: not tuned. attach(..., tune=True) or mode='auto' does that", markup=False)
    for rank in found["ranks"]:
        who = f"{found['run']}, rank {rank['rank']}" if len(found["ranks"]) > 1 else found["run"]
        out.print(f"{who}: {rank['failures']} failures in {seconds(rank['up_s'])}", markup=False)
        told = (f"{name} {value:,.0f}" if name.endswith("bytes") else _average(name, value)
                for name, value in rank["averages"].items())  # fmt: skip
        out.print(f"averages: {', '.join(told) or 'none yet'}", markup=False)
        for d in rank["decisions"]:
            setting, expected = d["setting"], d["expected"]
            out.print(
                f"step {d['step']:,} ({d['time']}, generation {d['generation']}): {'changed' if d['changed'] else 'kept'}: "
                f"mode {setting['mode']}, a base every {setting['base_interval']:,} steps, {setting['bases']} kept, "
                f"a sync every {setting['batch_steps']}, "
                f"{'frames as they are' if setting['codec'] == RAW else 'lossless codecs'}; "
                f"expected: overhead {expected['overhead']:.2%}, lost work "
                f"{seconds(expected['lost_s'])}, recovery {seconds(expected['recovery_s'])}, goodput "
                f"{expected['goodput']:.2%}. Why: {d['reason']}",
                markup=False,
            )
        if not rank["decisions"]:
            out.print("no decision yet: it takes a few bases", markup=False)


def _average(name: str, value: float) -> str:
    from everstep.tune.choice import seconds

    return f"{name} {'-' if value < 0 else ''}{seconds(abs(value))}"
