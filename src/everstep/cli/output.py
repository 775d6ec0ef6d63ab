"""What all verbs print with: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Path of a run.", show_default=False)]


def console() -> Console:
    """For results. Never cuts a path in two."""
    return Console(soft_wrap=True, highlight=False)


def print_json(document: Any) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


@dataclass(frozen=True)
class Table:
    """Headings, and rows of as many cells."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def print_shown(shown: Iterable[Table | str], *, markdown: bool = False) -> None:
    """Tables and sentences, for people or for a document."""
    from rich.table import Table as Drawn

    for each in shown:
        if markdown:
            sys.stdout.write((each if isinstance(each, str) else "\n" + each.markdown()) + "\n")
        elif isinstance(each, str):
            console().print(each, markup=False)
        else:
            drawn = Drawn(*each.headings)
            for row in each.rows:
                drawn.add_row(*row)
            console().print(drawn)


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


class Told:
    """A progress bar on stderr for calls `(what, done, total)`; without a terminal a line every few seconds."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self._console,
        )  # fmt: skip
        self._what: str | None = None
        self._task: TaskID | None = None
        self._next = 0.0

    def __enter__(self) -> Told:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._console.is_terminal:
            if what != self._what or self._task is None:
                self._task = self._bars.add_task(what, total=total)
            self._bars.update(self._task, completed=done, total=total)
        elif what != self._what or done == total or time.monotonic() >= self._next:
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)
            self._next = time.monotonic() + 5.0
        self._what = what
