"""Random damage anywhere in a run of snapshot mode: a right state for the step that is claimed, or a typed error."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from crash_training import Eras, Training, digest, era_of, wait_for_keeper
from hypothesis import given, settings
from hypothesis import strategies as st
from test_corruption import CHECKED, Asked, Case, Finished, damages, lay_out, names_in
from torch import nn

import everstep
from everstep.errors import CorruptionError, EverstepError, MismatchError, SetBackWarning
from everstep.restore.history import History
from everstep.store import pools
from everstep.store.pool import read_pool
from everstep.store.runs import RunPath, read_listing
from pools import wipe_headers
from support import crash
from truth import tree_hash

OPTIONS: dict[str, Any] = {"mode": "snapshot", "snapshot_interval": 1, "quiet": True, "base_interval": 4}


def make(path: str, **options: Any) -> Finished:
    """Two generations, bases at steps 0, 4 and 8, three slots: 9, 10 and 11. Killed."""
    eras = Eras()
    options = {**OPTIONS, "retention": {"bases": 100}, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "_SPARE_BYTES", 4096)  # so that most of a pool's file is worth damaging
        for num_steps in (3, 8):
            with era_of(path, eras, **options) as (run, train):
                for _ in range(num_steps):
                    train(1)
                    run.flush()
                    wait_for_keeper(run)
                crash(run)
    os.unlink(f"{path}/lock")
    found = {}
    for name in sorted(names_in(path)):
        if os.path.isfile(f"{path}/{name}"):
            with open(f"{path}/{name}", "rb") as f:
                found[name] = f.read()
    steps = everstep.open(path).steps
    assert steps == [0, 4, 8, 9, 10, 11]
    return Finished(path, eras, found, eras.all[1], eras.all[0], steps, [], 0)


@pytest.fixture(scope="module")
def memory() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="es-damage-", dir="/dev/shm")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def killed(memory: str) -> Finished:
    return make(f"{memory}/killed")


@pytest.fixture(scope="module")
def on_disk(memory: str) -> Finished:
    return make(f"{memory}/on-disk", pool_mode="disk")


def told(work: Callable[[], Any]) -> tuple[Any, bool]:
    """What it gives, and whether it said that newer steps may be lost."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = work()
    strange = [w for w in caught if not issubclass(w.category, SetBackWarning)]
    assert not strange, f"unexpected warnings: {[str(w.message) for w in strange]}"
    return found, bool(caught)


def lost_its_header(path: str, step: int) -> bool:
    """A slot whose header is damaged looks like one that was being written, which after a kill is no damage."""
    listing = read_listing(RunPath(path))
    try:
        pool = next(iter(Path(path, "pool").glob("*.pool")))
        steps = [m.step for m in read_pool(str(pool), listing.run.run)]
        return bool(steps) and step not in steps  # one is always there
    except (StopIteration, EverstepError):
        return False


def check(case: Case, path: str) -> None:
    truth, newest = case.run.newest.truth, case.run.steps[-1]
    lay_out(case, path)
    ask = Asked(case, path)

    def may_be_silent() -> bool:
        return not case.single or lost_its_header(path, newest)

    history: History | None = ask("open", lambda: everstep.open(path))
    if history is None:
        return
    report = ask("verify", history.verify)
    for n in ask("steps", lambda: everstep.open(path).steps) or ():
        state = ask(f"state({n})", lambda n=n: everstep.open(path).state(n))
        assert state is None or digest(state) == truth.get(n), f"step {n} is a wrong state"
        assert state is not None or report is None or not report.ok, f"verify() says all good, but {ask.errors[-1]}"
    found = ask("state", lambda: told(history.state))
    if found is not None:
        state, warned = found
        assert digest(state) in truth.values(), "latest is a wrong state"
        assert digest(state) == truth[newest] or warned or may_be_silent(), "latest was set back without a word"


def check_resume(case: Case, path: str) -> None:
    truth, newest = case.run.newest.truth, case.run.steps[-1]
    lay_out(case, path)
    before, training, ask = names_in(path), Training(), Asked(case, path)
    silent = not case.single or (os.path.exists(f"{path}/run.json") and ask("look", lambda: lost_its_header(path, newest)))
    run = ask("attach", lambda: everstep.attach(training.model, training.optimizer, path, extras=training.extras, **OPTIONS))
    if run is not None:
        found = ask("resume", lambda: told(run.resume))
        state = digest(training.public())
        (run.close if found is None else lambda: crash(run))()
        if found is not None:
            at, warned = found
            assert state == truth.get(at), f"resumed at step {at} with a wrong state"
            assert at == newest or warned or silent, f"set back to step {at} without a word"
            return
        assert state == digest(Training().public()), "a failed resume has changed the live objects"
    assert names_in(path) - {"lock"} == before, "a failed resume has left something on disk"


def damage_and_check(data: st.DataObject, run: Finished, memory: str) -> None:
    pool = next(name for name in run.files if name.endswith(".pool"))
    if data.draw(st.booleans()):
        content = bytearray(run.files[pool])
        draw = random.Random(data.draw(st.integers(0, 1 << 30)))
        for _ in range(draw.choice((1, 1, 2, 5))):
            at = draw.randrange(len(content))
            size = draw.choice((1, 8, 600, 5000, 70_000))
            content[at : at + size] = draw.choice((bytes, draw.randbytes))(len(content[at : at + size]))
        case = Case(run, {pool: bytes(content)}, f"overwritten: {pool}")
    else:
        case = data.draw(damages(run))
    try:
        check(case, f"{memory}/case")
        if data.draw(st.booleans()):
            check_resume(case, f"{memory}/case")
    except AssertionError as e:
        raise AssertionError(f"{case.story}: {e}") from e


@settings(CHECKED, max_examples=40)
@given(data=st.data())
def test_damage_gives_a_right_state_or_a_typed_error(data: st.DataObject, killed: Finished, memory: str) -> None:
    damage_and_check(data, killed, memory)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["mapped", "disk"])
@settings(CHECKED, max_examples=1000)
@given(data=st.data())
def test_a_thousand_damages_give_a_right_state_or_a_typed_error(
    data: st.DataObject, how: str, killed: Finished, on_disk: Finished, memory: str
) -> None:
    damage_and_check(data, killed if how == "mapped" else on_disk, memory)


@pytest.mark.long
@pytest.mark.parametrize("share", [None, 0.0, 0.5], ids=["gone", "empty", "cut"])
def test_any_one_file_may_be_gone(share: float | None, killed: Finished, memory: str) -> None:
    for name, content in sorted(killed.files.items()):
        case = Case(killed, {name: None if share is None else content[: int(share * len(content))]}, name)
        try:
            check(case, f"{memory}/case")
            check_resume(case, f"{memory}/case")
        except AssertionError as e:
            raise AssertionError(f"{name}: {e}") from e


def spoil(path: str, *steps: int) -> None:
    """Damage the data of the slots that hold these steps."""
    listing = read_listing(RunPath(path))
    for manifest, folder in listing.slots:
        if manifest.step in steps:
            (name,) = manifest.files
            with open(os.path.join(folder, name), "r+b") as f:
                f.seek(manifest.tensors[0].offset)
                f.write(b"\x7f" * 64)


@pytest.mark.parametrize(("damaged", "left"), [((11,), 10), ((11, 10), 9), ((9, 10, 11), 8)])
def test_a_damaged_slot_sets_back_to_the_one_before_and_then_to_a_base(
    damaged: tuple[int, ...], left: int, killed: Finished, tmp_path: Path
) -> None:
    path = str(tmp_path / "run")
    shutil.copytree(killed.path, path)
    spoil(path, *damaged)
    state, warned = told(lambda: everstep.open(path).state())
    assert warned and digest(state) == killed.newest.truth[left]
    with pytest.raises(CorruptionError, match=r"step 11"):
        everstep.open(path).state(11)
    training = Training()
    run = everstep.attach(training.model, training.optimizer, path, extras=training.extras, **OPTIONS)
    assert told(run.resume) == (left, True)
    expected = killed.eras.after(killed.newest, left, 77, 3)
    for n in range(left + 1, left + 4):
        training.train(77, n)
        run.commit(wait=True)
        assert digest(training.public()) == expected[n - left - 1]
    run.close()
    history = everstep.open(path)
    assert history.steps[-1] == left + 3 and digest(history.state()) == expected[-1]
    assert history.verify().ok


def test_a_pool_that_is_gone_is_told_of_and_the_base_goes_on(killed: Finished, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    shutil.copytree(killed.path, path)
    shutil.rmtree(f"{path}/pool")
    with pytest.warns(SetBackWarning, match="pool of generation 2 in .* is gone"):
        assert digest(everstep.open(path).state()) == killed.newest.truth[8]
    training = Training()
    run = everstep.attach(training.model, training.optimizer, path, extras=training.extras, **OPTIONS)
    with pytest.warns(SetBackWarning, match="is gone"):
        assert run.resume() == 8
    training.train(77, 9)
    run.commit(wait=True)
    crash(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert everstep.open(path).state() is not None, "once is enough"
        assert everstep.open(path).steps == [0, 4, 8, 9]


def test_a_base_that_is_gone_with_the_pool_is_told_of(killed: Finished, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    shutil.copytree(killed.path, path)
    shutil.rmtree(f"{path}/pool")
    manifest = f"{path}/timelines/0001/bases/{8:012d}/manifest.json"
    Path(manifest).write_text("{}")
    with pytest.warns(SetBackWarning, match="manifest.json"):
        assert digest(everstep.open(path).state()) == killed.newest.truth[4]
    training = Training()
    run = everstep.attach(training.model, training.optimizer, path, extras=training.extras, **OPTIONS)
    with pytest.warns(SetBackWarning):
        assert run.resume() == 4
    for n in range(5, 9):  # over the step of the base that was lost
        training.train(77, n)
        run.commit()
    run.close()
    assert digest(everstep.open(path).state()) == digest(training.public())


def test_a_pool_that_has_lost_all_its_headers_is_told_of(killed: Finished, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    shutil.copytree(killed.path, path)
    (pool,) = Path(path, "pool").iterdir()
    wipe_headers(pool, keep=[10])
    assert told(lambda: digest(everstep.open(path).state())) == (killed.newest.truth[10], False), "as after a kill"
    wipe_headers(pool)
    with pytest.warns(SetBackWarning, match="pool of generation 2 in .* none of its slots has a valid header"):
        assert digest(everstep.open(path).state()) == killed.newest.truth[8]
    training = Training()
    run = everstep.attach(training.model, training.optimizer, path, extras=training.extras, **OPTIONS)
    assert told(run.resume) == (8, True)
    training.train(77, 9)
    run.commit(wait=True)
    crash(run)
    assert told(lambda: everstep.open(path).state())[1] is False, "once is enough"


@pytest.mark.parametrize("what", ["damaged", "of another step"])
def test_a_damaged_base_that_was_newer_than_the_pool_is_told_of(what: str, tmp_path: Path) -> None:
    training, path = Training(), str(tmp_path / "run")
    options = {**OPTIONS, "snapshot_interval": 4, "base_interval": 100}
    run = everstep.attach(training.model, training.optimizer, path, extras=training.extras, **options)
    run.resume()
    truth = {}
    for n in range(1, 7):
        training.train(1, n)
        run.commit()
        truth[n] = digest(training.public())
    run.close()
    assert everstep.open(path).steps == [0, 4, 6]
    manifest = Path(path, f"timelines/0001/bases/{6:012d}/manifest.json")
    if what == "damaged":
        manifest.write_text("{}")
    else:
        shutil.copy(Path(path, f"timelines/0001/bases/{0:012d}/manifest.json"), manifest)
    with pytest.warns(SetBackWarning, match="step 4 is the newest.*000006"):
        assert digest(everstep.open(path).state()) == truth[4]
    training = Training()
    run = everstep.attach(training.model, training.optimizer, path, extras=training.extras, **options)
    with pytest.warns(SetBackWarning, match="step 4 is the newest.*000006"):
        assert run.resume() == 4
    crash(run)
    assert told(lambda: digest(everstep.open(path).state())) == (truth[4], False), "once is enough"


def test_a_pool_of_another_run_is_not_taken_for_this_ones(killed: Finished, on_disk: Finished, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    shutil.copytree(killed.path, path)
    (own,) = Path(path, "pool").iterdir()
    (other,) = Path(on_disk.path, "pool").iterdir()
    shutil.copy(other, own)
    with pytest.warns(SetBackWarning, match="a pool of another run"):
        assert digest(everstep.open(path).state()) == killed.newest.truth[8]


def test_another_model_is_refused_and_nothing_changes(killed: Finished, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    shutil.copytree(killed.path, path)
    before = tree_hash(path)
    for width in (64, 256):
        training = Training(width)
        state = digest(training.public())
        run = everstep.attach(training.model, training.optimizer, path, extras=training.extras, **OPTIONS)
        with pytest.raises(MismatchError, match=r"0\.weight"):
            run.resume()
        run.close()
        assert digest(training.public()) == state
        after = tree_hash(path)
        after.pop("lock", None)
        assert after == before
    model = nn.Linear(3, 3)
    run = everstep.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), path, **OPTIONS)
    with pytest.raises(MismatchError):
        run.resume()
    run.close()


def test_a_copy_of_a_run_and_the_original_keep_to_their_own_pools(shm: Path, tmp_path: Path) -> None:
    """Both go on from the same step, with pools in the same place outside of their folders."""
    options = {**OPTIONS, "pool": str(shm)}
    training = Training()
    run = everstep.attach(training.model, training.optimizer, tmp_path / "a", extras=training.extras, **options)
    run.resume()
    for n in range(1, 4):
        training.train(1, n)
        run.commit(wait=True)
    crash(run)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    truth = {}
    for era, name in ((2, "a"), (3, "b"), (4, "a"), (5, "b")):
        training = Training()
        run = everstep.attach(training.model, training.optimizer, tmp_path / name, extras=training.extras, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SetBackWarning)  # the original's pool may be gone when the copy looks for it
            at = run.resume()
        assert (name, at) not in truth or digest(training.public()) == truth[name, at]
        for n in range(at + 1, at + 4):
            training.train(era, n)
            run.commit(wait=True)
            truth[name, n] = digest(training.public())
        crash(run)
    for name in "ab":
        history = everstep.open(tmp_path / name)
        for n in history.steps:
            assert (name, n) not in truth or digest(history.state(n)) == truth[name, n], f"{name}: step {n} is another's"
        assert (name, history.steps[-1]) in truth
