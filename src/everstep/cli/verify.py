"""`everstep verify RUN`: check every checksum, or replay everything."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from everstep.cli.output import Json, RunArgument, Told, print_json


def verify(
    run: RunArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Also replay every step against its audit.")] = False,
    json: Json = False,
) -> None:
    """Read a run in full and say what is damaged. Exit code 1 if anything is. Changes nothing."""
    from everstep.restore.history import History

    with Told() as told:
        report = History(run).verify(deep=deep, progress=lambda done, total: told("frames", done, total))
    if json:
        print_json({"run": run, "ok": report.ok, **asdict(report)})
    else:
        print(report)
    if not report.ok:
        raise typer.Exit(1)
