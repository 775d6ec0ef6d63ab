"""`everstep`: look at runs, check them, measure.

Nothing here imports torch before a verb runs, so that help is instant.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from everstep.cli import bench, native, plan, plan_restore, shadow, steps, tune, verify
from everstep.errors import EverstepError


class _Group(TyperGroup):
    """Errors that Everstep raises on purpose are one line on stderr and exit code 2, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EverstepError as e:
            print(f"everstep: {e}", file=sys.stderr)
            ctx.exit(2)


app = typer.Typer(
    cls=_Group,
    help="Every optimizer step of a PyTorch training run, durable and recoverable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(version("everstep"))
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command("steps")(steps.steps)
app.command("plan-restore")(plan_restore.plan_restore)
app.command("verify")(verify.verify)
app.command("plan")(plan.plan)
app.command("tune")(tune.tune)
app.command("native")(native.native)
app.command("shadow")(shadow.shadow)
app.add_typer(bench.app, name="bench")

if __name__ == "__main__":
    app()
