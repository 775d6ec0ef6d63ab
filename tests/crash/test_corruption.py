"""Random damage anywhere in a finished run: the right state or a typed error that says where. Never anything else."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from crash_training import OPTIONS, Era, Eras, Training, digest, era_of, wait_for_keeper
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import everstep
from everstep.errors import EverstepError, NotARunError, NothingToRestoreError
from support import crash


@dataclass(repr=False)
class Finished:
    """A run with everything in it, its truth, and its files as they should be."""

    path: str
    eras: Eras
    files: dict[str, bytes]
    newest: Era
    old_line: Era
    """The line of timeline 1."""
    steps: list[int]
    old_steps: list[int]
    slack: int
    """Steps that damage inside a file may take without a word: in a killed run it looks like the torn end of its log."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"<run at {self.path}>")


def make(path: str, *, closed: bool) -> Finished:
    """Three generations on two timelines, several segments and bases each, two layouts."""
    eras = Eras()
    options: dict[str, Any] = {"follower": False, "retention": {"bases": 100}, "segment_bytes": 60_000}
    with era_of(path, eras, **options) as (run, train):
        train(7)
        wait_for_keeper(run)
        crash(run)
    with era_of(path, eras, **options) as (run, train):
        train(5)
        run.close()
    with era_of(path, eras, resume=9, **options) as (run, train):
        train(6)
        if closed:
            run.close()
        else:
            wait_for_keeper(run)
            crash(run)
    os.unlink(f"{path}/lock")
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            full = os.path.join(folder, name)
            with open(full, "rb") as f:
                found[os.path.relpath(full, path)] = f.read()
    history = everstep.open(path)
    steps, old_steps = history.steps, everstep.open(path, timeline=1).steps
    assert steps[-1] == eras.all[2].last == 15 and old_steps[-1] == eras.all[1].last == 12
    return Finished(path, eras, found, eras.all[2], eras.all[1], steps, old_steps, 0 if closed else 2)


@pytest.fixture(scope="module")
def shm() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="everstep-damage-", dir="/dev/shm")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def closed(shm: str) -> Finished:
    return make(f"{shm}/closed", closed=True)


@pytest.fixture(scope="module")
def killed(shm: str) -> Finished:
    return make(f"{shm}/killed", closed=False)


# -- damage -----------------------------------------------------------------------------------------------------------

Damage = Callable[[bytearray, Callable[[int], int]], None]
"""Changes the bytes in place; the function given draws a place: a number below its argument."""


def flip(data: bytearray, place: Callable[[int], int]) -> None:
    for _ in range(1 + place(3)):
        data[place(len(data))] ^= 1 << place(8)


def cut_the_end(data: bytearray, place: Callable[[int], int]) -> None:
    del data[place(len(data)) :]


def cut_out(data: bytearray, place: Callable[[int], int]) -> None:
    begin = place(len(data))
    del data[begin : begin + 1 + place(min(5000, len(data) - begin))]


def zero(data: bytearray, place: Callable[[int], int]) -> None:
    begin = place(len(data))
    end = begin + 1 + place(min(9000, len(data) - begin))
    data[begin:end] = bytes(end - begin)


def swap_ranges(data: bytearray, place: Callable[[int], int]) -> None:
    size = 1 + place(min(4096, len(data)))
    unit = 4096 if len(data) > 8192 and place(2) else 1
    a, b = (place(max(1, (len(data) - size) // unit)) * unit for _ in range(2))
    if abs(a - b) >= size:
        data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def duplicate(data: bytearray, place: Callable[[int], int]) -> None:
    unit = 4096 if len(data) > 8192 and place(2) else 1
    begin = place(max(1, len(data) // unit)) * unit
    part = data[begin : begin + unit * (1 + place(64))]
    data[begin:begin] = part


def append(data: bytearray, place: Callable[[int], int]) -> None:
    data += bytes(place(256) for _ in range(1 + place(20))) * (1 + place(500))


def append_itself(data: bytearray, place: Callable[[int], int]) -> None:
    data += data[place(len(data)) :]


WITHIN: list[Damage] = [flip, flip, cut_the_end, cut_out, zero, swap_ranges, duplicate, append, append_itself]


KINDS = [".frames", ".safetensors", "manifest.json", "generations/", "layouts/", "timeline.json", "run.json", ""]


@dataclass(repr=False)
class Case:
    """A copy of a run in which `changed` files have other contents (None: gone)."""

    run: Finished
    changed: dict[str, bytes | None]
    story: str
    folder: str = ""
    """This one is gone, with all that was in it."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"<{self.story}>")

    @property
    def single(self) -> bool:
        return len(self.changed) == 1

    @property
    def slack(self) -> int:
        """How many of the last steps may be missing from "latest"."""
        if not self.single:
            return 1_000_000  # several files gone can look like a run that never got that far
        return 0 if None in self.changed.values() else self.run.slack


@st.composite
def damages(draw: st.DrawFn, run: Finished) -> Case:
    names = sorted(run.files)
    changed: dict[str, bytes | None] = {}
    story = []
    count = draw(st.sampled_from([1, 1, 1, 2, 3]))

    def place(below: int) -> int:
        return draw(st.integers(0, max(0, below - 1)))

    for _ in range(count):
        kind = draw(st.sampled_from([*KINDS, KINDS[0], KINDS[0]]))
        among = [n for n in names if kind in n] or names
        name = draw(st.sampled_from(among))
        now = changed.get(name, run.files[name])
        how = draw(st.sampled_from(["within"] * 6 + ["delete", "swap", "copy"]))
        if how == "within" and now:
            damage = draw(st.sampled_from(WITHIN))
            data = bytearray(now)
            damage(data, place)
            changed[name] = bytes(data)
            story.append(f"{damage.__name__} {name}")
        elif how in ("swap", "copy"):
            like = [n for n in names if n != name and os.path.splitext(n)[1] == os.path.splitext(name)[1]]
            same = [n for n in like if os.path.basename(os.path.dirname(n)) == os.path.basename(os.path.dirname(name))]
            other = draw(st.sampled_from(same or like or names))
            theirs = changed.get(other, run.files[other])
            changed[name] = theirs
            if how == "swap":
                changed[other] = now
            story.append(f"{how} {name} and {other}")
        else:
            changed[name] = None
            story.append(f"delete {name}")
    changed = {n: c for n, c in changed.items() if c != run.files[n]}
    return Case(run, changed, "; ".join(story))


def lay_out(case: Case, path: str) -> None:
    """A copy of the run by hard links, damaged files apart."""
    shutil.rmtree(path, ignore_errors=True)
    for folder, _, names in os.walk(case.run.path):
        target = os.path.join(path, os.path.relpath(folder, case.run.path))
        os.makedirs(target, exist_ok=True)
        for name in names:
            relative = os.path.relpath(os.path.join(folder, name), case.run.path)
            if relative not in case.changed:
                os.link(os.path.join(folder, name), os.path.join(target, name))
    for relative, content in case.changed.items():
        if content is not None:
            with open(os.path.join(path, relative), "wb") as f:
                f.write(content)
    if case.folder:
        shutil.rmtree(os.path.join(path, case.folder))


# -- what must hold ---------------------------------------------------------------------------------------------------


class Asked:
    """Calls that may fail, but only in the way they should."""

    def __init__(self, case: Case, path: str) -> None:
        self.case, self.path = case, path
        self.errors: list[str] = []

    def __call__(self, what: str, work: Callable[[], Any]) -> Any:
        """The result, or None after a typed error that names a file or a step."""
        try:
            return work()
        except EverstepError as e:
            text = str(e)
            assert self.path in text or re.search(r"\bsteps? \d+", text), f"{what}: names no file and no step: {text}"
            if self.case.single:
                # A job that is started again would take these for "begin from nothing".
                assert not isinstance(e, (NotARunError, NothingToRestoreError)), f"{what}: {type(e).__name__}: {text}"
            self.errors.append(f"{what}: {type(e).__name__}: {text}")
            return None
        except BaseException as e:
            raise AssertionError(f"{what}: untyped {type(e).__name__}: {e}") from e


def check(case: Case, path: str, asked_steps: list[int], *, old_line: bool, deep: bool = False) -> None:
    run = case.run
    lay_out(case, path)
    ask = Asked(case, path)
    history = ask("open", lambda: everstep.open(path))
    if history is None:
        return
    report = ask("verify", lambda: history.verify(deep=deep))
    fine = report is not None and report.ok
    steps = ask("steps", lambda: history.steps)
    if fine:
        least = run.steps[: len(run.steps) - run.slack]
        assert steps is not None and run.steps[: len(steps)] == steps and len(steps) >= len(least), (
            f"verify() says all good, but steps are {steps}"
        )
    plan = ask("plan", history.plan)
    if plan is not None:
        str(plan)
        assert plan.step >= run.steps[-1] - case.slack, f"latest is {plan.step}, without a word about what is lost"
        state = ask("state", history.state)
        if state is not None:
            assert digest(state) == run.newest.truth.get(plan.step), f"latest (step {plan.step}) is a wrong state"
        assert state is not None or not fine, f"verify() says all good, but latest: {ask.errors[-1]}"
    else:
        assert not fine, f"verify() says all good, but there is no latest: {ask.errors}"
    for n in asked_steps:
        state = ask(f"state({n})", lambda n=n: history.state(n))
        if state is not None:
            assert digest(state) == run.newest.truth.get(n), f"step {n} is a wrong state"
        elif fine and n in steps:
            raise AssertionError(f"verify() says all good, but {ask.errors[-1]}")
        if old_line:
            state = ask(f"state({n}, timeline=1)", lambda n=n: history.state(n, timeline=1))
            if state is not None:
                assert digest(state) == run.old_line.truth.get(n), f"step {n} of timeline 1 is a wrong state"


CHECKED = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
    phases=[Phase.explicit, Phase.generate],  # the story of a case is short already
)


def check_resume(case: Case, path: str) -> None:
    """The job is started again on the damaged run: it goes on from a right step, or is told why not and writes nothing."""
    lay_out(case, path)
    before = names_in(path)
    ask = Asked(case, path)
    training = Training()
    run = ask("attach", lambda: everstep.attach(training.model, training.optimizer, path, extras=training.extras, **OPTIONS))
    if run is not None:
        at = ask("resume", run.resume)
        state = digest(training.public())
        (run.close if at is None else lambda: crash(run))()
        if at is not None:
            assert state == case.run.newest.truth.get(at), f"resumed at step {at} with a wrong state"
            assert at >= case.run.steps[-1] - case.slack, f"resumed at {at}, without a word about what is lost"
            return
        assert state == digest(Training().public()), "a failed resume has changed the live objects"
    assert names_in(path) - {"lock"} == before, "a failed resume has left something on disk"


def names_in(path: str) -> set[str]:
    return {os.path.relpath(os.path.join(top, n), path) for top, folders, names in os.walk(path) for n in folders + names}


def _damage_and_check(data: st.DataObject, run: Finished, shm: str, *, all_steps: bool) -> None:
    case = data.draw(damages(run))
    some = range(16) if all_steps else data.draw(st.lists(st.integers(0, 15), min_size=2, max_size=3, unique=True))
    old_line = data.draw(st.booleans())
    resume = data.draw(st.integers(0, 3)) == 0
    try:
        check(case, f"{shm}/case", sorted(some), old_line=old_line, deep=all_steps and resume)
        if resume:
            check_resume(case, f"{shm}/case")
    except AssertionError as e:
        raise AssertionError(f"{case.story}: {e}") from e


@settings(CHECKED, max_examples=90)
@given(data=st.data())
def test_damage_of_a_closed_run_gives_the_right_state_or_a_typed_error(
    data: st.DataObject, closed: Finished, shm: str
) -> None:
    _damage_and_check(data, closed, shm, all_steps=False)


@settings(CHECKED, max_examples=70)
@given(data=st.data())
def test_damage_of_a_killed_run_gives_the_right_state_or_a_typed_error(
    data: st.DataObject, killed: Finished, shm: str
) -> None:
    _damage_and_check(data, killed, shm, all_steps=False)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["closed", "killed"])
@settings(CHECKED, max_examples=1000)
@given(data=st.data())
def test_a_thousand_damages_give_the_right_state_or_a_typed_error(
    data: st.DataObject, how: str, closed: Finished, killed: Finished, shm: str
) -> None:
    _damage_and_check(data, closed if how == "closed" else killed, shm, all_steps=True)


def _each(run: Finished, shm: str, contents: Callable[[bytes], bytes | None]) -> None:
    for name, content in sorted(run.files.items()):
        case = Case(run, {name: contents(content)}, name)
        try:
            check(case, f"{shm}/case", [0, 4, 5, 9, 12, 15], old_line=True)
            check_resume(case, f"{shm}/case")
        except AssertionError as e:
            raise AssertionError(f"{name}: {e}") from e


@pytest.mark.long
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_any_one_file_may_be_deleted(how: str, closed: Finished, killed: Finished, shm: str) -> None:
    _each(closed if how == "closed" else killed, shm, lambda content: None)


def test_any_one_folder_may_be_deleted(closed: Finished, shm: str) -> None:
    folders = {parent for name in closed.files for parent in map(str, Path(name).parents)}
    for folder in sorted(folders - {".", "timelines", "timelines/0002"}):  # without these it is a run that never got so far
        gone = {name: None for name in closed.files if name.startswith(f"{folder}/")}
        case = Case(closed, dict(gone), folder, folder)
        try:
            check(case, f"{shm}/case", [0, 5, 15], old_line=True)
            check_resume(case, f"{shm}/case")
        except AssertionError as e:
            raise AssertionError(f"{folder}: {e}") from e


@pytest.mark.long
def test_any_one_file_may_be_emptied(closed: Finished, shm: str) -> None:
    _each(closed, shm, lambda content: b"")


@pytest.mark.long
def test_any_one_file_may_have_a_bit_flipped_in_its_middle(closed: Finished, shm: str) -> None:
    def flipped(content: bytes) -> bytes:
        data = bytearray(content)
        data[len(data) // 2] ^= 4
        return bytes(data)

    _each(closed, shm, flipped)


def test_reading_a_damaged_run_changes_nothing_on_disk(closed: Finished, killed: Finished) -> None:
    """All cases above share files with these two by hard links."""
    for run in (closed, killed):
        for name, content in run.files.items():
            with open(os.path.join(run.path, name), "rb") as f:
                assert f.read() == content, name
