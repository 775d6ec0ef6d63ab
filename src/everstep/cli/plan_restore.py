"""`everstep plan-restore RUN`: how a step would be restored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.cli.output import Json, RunArgument, print_json

if TYPE_CHECKING:
    from everstep.restore.plan import Plan


def plan_restore(
    run: RunArgument,
    step: Annotated[int | None, typer.Option(min=0, help="Which step; without it the latest.")] = None,
    timeline: Annotated[int | None, typer.Option(min=1, help="Of which timeline; without it the newest.")] = None,
    json: Json = False,
) -> None:
    """Print the base and the frames that restoring a step would read. Reads no tensor."""
    from everstep.restore.history import History

    plans = History(run).plans("latest" if step is None else step, timeline=timeline)
    if json:
        told = describe(plans[0])
        print_json(told if len(plans) == 1 else {**told, "ranks": [describe(plan) for plan in plans]})
        return
    for rank, plan in enumerate(plans):
        print(plan if len(plans) == 1 else f"rank {rank}: {plan}")


def describe(plan: Plan) -> dict[str, Any]:
    """The plan as a plain dict."""
    return {
        "step": plan.step,
        "timeline": plan.timeline,
        "generation": plan.generation,
        "base": {
            "step": plan.base.step,
            "folder": plan.base_folder,
            "bytes": plan.base.num_bytes,
        },
        "frames": [
            {"step": f.step, "path": f.path, "offset": f.offset, "bytes": f.end_offset - f.offset} for f in plan.frames
        ],
        "num_bytes": plan.num_bytes,
    }
