"""`everstep verify RUN`: check every checksum, replay everything, or compare with another run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from everstep.cli.output import Json, RunArgument, Told, print_json


def verify(
    run: RunArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Also replay every step against its audit.")] = False,
    against: Annotated[
        str | None, typer.Option(help="Compare states with those of this run, bit by bit, whatever their layouts.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="With --against: which; without it the latest of each.")] = None,
    json: Json = False,
) -> None:
    """Read a run in full and say what is damaged, or differs. Exit code 1 if anything is. Changes nothing."""
    from everstep.restore.history import History

    if against is not None:
        found = History(run).compare(History(against), "latest" if step is None else step)
        if json:
            print_json({"run": run, "against": against, "ok": found.ok, **asdict(found)})
        else:
            print(found)
        if not found.ok:
            raise typer.Exit(1)
        return
    with Told() as told:
        report = History(run).verify(deep=deep, progress=lambda done, total: told("frames", done, total))
    if json:
        print_json({"run": run, "ok": report.ok, **asdict(report)})
    else:
        print(report)
    if not report.ok:
        raise typer.Exit(1)
