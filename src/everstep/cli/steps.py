"""`everstep steps RUN`: what can be restored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from everstep.cli.output import Json, RunArgument, console, megabytes, print_json

if TYPE_CHECKING:
    from everstep.store.runs import Listing


def steps(run: RunArgument, json: Json = False) -> None:
    """List restorable steps, bases and timelines with their sizes."""
    from everstep.store.runs import RunPath, read_listing

    found = describe(read_listing(RunPath(run)))
    if json:
        print_json(found)
    else:
        _print(found)


def describe(listing: Listing) -> dict[str, Any]:
    """The run as a plain dict; `steps` are those of the newest line, ancestors included."""
    from everstep.restore.plan import line_of

    newest = line_of(listing)
    return {
        "run": listing.path.path,
        "steps": newest.steps(),
        "durable_step": newest.durable_step,
        "timelines": [_timeline(listing, number) for number in sorted(listing.timelines)],
        "problems": newest.problems + listing.pool_problems,
    }


def _timeline(listing: Listing, number: int) -> dict[str, Any]:
    from everstep.restore.plan import line_of

    timeline = listing.timelines[number]
    return {
        "timeline": number,
        "parent": timeline.document.parent,
        "fork_step": timeline.document.fork_step,
        "generations": sorted(timeline.generations),
        "steps": line_of(listing, timeline=number).steps() if timeline.generations else [],
        "bases": [
            {"step": step, "bytes": manifest.num_bytes, "made_by": manifest.audit}
            for step, manifest in sorted(timeline.bases.items())
        ],
        "pool": sorted(m.step for m, _ in listing.slots if m.timeline == number),
        "num_segments": len(timeline.segments),
        "log_bytes": sum(segment.num_bytes for segment in timeline.segments),
    }


def _print(found: dict[str, Any]) -> None:
    from rich.table import Table

    from everstep.restore.plan import describe_steps

    out = console()
    out.print(f"{found['run']}: steps {describe_steps(found['steps']) or 'none yet'}", markup=False)
    has_pool = any(t["pool"] for t in found["timelines"])
    table = Table("timeline", "from", "steps", "bases", "base size", "log size", *["pool"] * has_pool, box=None)
    for t in found["timelines"]:
        origin = "start" if t["parent"] is None else f"timeline {t['parent']}, step {t['fork_step']}"
        table.add_row(
            str(t["timeline"]), origin, describe_steps(t["steps"]) or "none",
            ", ".join(str(b["step"]) for b in t["bases"]) or "none",
            megabytes(sum(b["bytes"] for b in t["bases"])), megabytes(t["log_bytes"]),
            *[describe_steps(t["pool"]) or "none"] * has_pool,
        )  # fmt: skip
    out.print(table)
    for problem in found["problems"]:
        out.print(f"problem: {problem}", markup=False)
