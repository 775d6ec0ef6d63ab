"""A run recorded under any layout goes on under any other: every bit of the state, then the losses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from layouts import KINDS, LAYOUTS
from workers import JobFailed, World

STEPS = 3
TOLERANCE = 1e-5
"""Another order of sums moves losses (of about 6) by less in so few steps."""


class Matrix:
    """Cells of the matrix, run one after another; `problems` collects what they find."""

    def __init__(self, world: World, kind: str, folder: Path) -> None:
        self.world = world
        self.kind = kind
        self.folder = folder
        self.losses: dict[str, list[float]] = {}
        self.problems: list[str] = []

    def record(self, source: str) -> None:
        """Once for all that ask."""
        if (self.folder / source).exists():
            return
        (self.folder / source).mkdir()
        try:
            losses = self._run(source, "jobs:record", str(self.folder / source))
        except JobFailed as e:
            self.problems.append(f"{source}: {e}")
        else:
            self.losses[source] = losses[0]

    def go_on(self, source: str, target: str) -> None:
        if source not in self.losses:
            self.problems.append(f"{source} -> {target}: {source} could not be recorded")
            return
        run = self.folder / f"{source} to {target}"
        shutil.copytree(self.folder / source / "killed", run)
        try:
            results = self._run(target, "jobs:go_on", str(run), str(self.folder / source), source == target)
        except JobFailed as e:
            self.problems.append(f"{source} -> {target}: {e}")
            return
        self.problems += [f"{source} -> {target}: {found}" for problems, _ in results for found in problems]
        losses, wanted = results[0][1], self.losses[source][STEPS:]
        if losses != (wanted if source == target else pytest.approx(wanted, rel=0, abs=TOLERANCE)):
            self.problems.append(f"{source} -> {target}: losses {losses} instead of {wanted}")

    def _run(self, layout: str, job: str, *args: object) -> list[list[object]]:
        return self.world.run(job, layout, self.kind, *args, ranks=LAYOUTS[layout].ranks)


def layouts(kind: str, family: str) -> list[str]:
    return [name for name, way in LAYOUTS.items() if kind in way.kinds and way.family == family]


@pytest.fixture(scope="module")
def matrices(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Matrix]:
    """By kind of optimizer. Several tests go on from what one process has recorded."""
    return {kind: Matrix(world, kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["adamw", pytest.param("sgd", marks=pytest.mark.long)])
@pytest.mark.sampled(3)
def test_every_layout_goes_on_under_itself_and_as_one_process_and_back(
    kind: str, layout: str, matrices: dict[str, Matrix]
) -> None:
    if kind not in LAYOUTS[layout].kinds:
        pytest.skip("torch has no such optimizer in this layout")
    matrix = matrices[kind]
    matrix.problems.clear()
    one = layouts(kind, LAYOUTS[layout].family)[0]
    matrix.record(layout)
    matrix.go_on(layout, layout)
    if layout != one:
        matrix.record(one)
        matrix.go_on(layout, one)
        matrix.go_on(one, layout)
    assert not matrix.problems, "\n".join(matrix.problems)


@pytest.mark.long
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_goes_on_under_every_other(kind: str, source: str, world: World, tmp_path: Path) -> None:
    if kind not in LAYOUTS[source].kinds:
        pytest.skip("torch has no such optimizer in this layout")
    matrix = Matrix(world, kind, tmp_path)
    matrix.record(source)
    for target in layouts(kind, LAYOUTS[source].family):
        matrix.go_on(source, target)
    assert not matrix.problems, "\n".join(matrix.problems)
