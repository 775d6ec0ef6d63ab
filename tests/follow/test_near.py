"""A shadow whose disk or memory fails: nothing is said to be stored that is not, and it goes on when it can."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from near_shadows import Fault, FullLog, Near, NearTraining, wait_for
from remote_shadows import live

import everstep
from everstep.errors import StepNotFoundError, StorageError
from everstep.follow import arena, local, recover, shadow
from everstep.follow.compact import Held
from everstep.follow.kept import LogCopy
from everstep.format.segment import file_name
from everstep.store import files, shared
from everstep.store.runs import RunPath
from support import crash, equal


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="es-", dir="/dev/shm") as folder:
        monkeypatch.setenv("EVERSTEP_SHARED", folder)
        yield Path(folder)


@pytest.fixture
def near(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Near]:
    made = Near()
    monkeypatch.setattr(local.LocalShadow, "_start", lambda talk: made.start(talk))
    monkeypatch.setattr(shadow, "_AGAIN_S", 0.05)
    yield made
    made.close()


@pytest.fixture
def attach(near: Near) -> Iterator[Callable[..., everstep.Run]]:
    runs: list[everstep.Run] = []

    def make(training: NearTraining, path: Path, **options: Any) -> everstep.Run:
        runs.append(training.attach_near(path, **options))
        return runs[-1]

    yield make
    for run in runs:
        if not run._closed:
            crash(run)


@pytest.fixture
def one_frame_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.MemoryPlace, "segment_bytes", 1)


def is_copy(path: str) -> bool:
    """Of a segment, in the log on disk."""
    return "/log/" in path and ".frames" in path


def held(near: Near) -> int | None:
    now = near.shadow._held if near.shadows else None
    return None if now is None else now.step


def must_have_every_step(run: everstep.Run, near: Near, training: NearTraining, folder: Path) -> None:
    """On disk, if the host is lost at the moment at which all is acknowledged."""
    last, expected = run.step, live(training, run)
    wait_for(lambda: run.stats()["folded_step"] == last, f"for the shadow: {run.stats()}, {near.said}")
    assert near.shadow.progress.durable == last
    shutil.copytree(run.path, folder / "left")
    history = everstep.open(folder / "left")
    assert history.steps == list(range(last + 1))
    assert not equal(dict(history.state(last)["model"]), expected["model"])


# ------------------------------------------------------------------------------------------ the log on disk


@pytest.mark.parametrize("op", ["create", "write", "sync", "rename"])
@pytest.mark.usefixtures("one_frame_a_segment")
def test_frames_that_could_not_be_copied_to_disk_are_not_acknowledged_and_are_copied_later(
    op: str, near: Near, attach: Callable[..., everstep.Run], tmp_path: Path
) -> None:
    training = NearTraining()
    run = attach(training, tmp_path / "run", log="disk")
    run.resume()
    run.flush()
    wait_for(lambda: run.stats()["folded_step"] == 0)  # else it may begin with a later base, and has no steps before that
    training.train(run, 4)
    run.flush()
    wait_for(lambda: run.stats()["folded_step"] == 4)
    assert near.shadow.progress.durable == 4
    fault = Fault((op,), is_copy)
    with files.observe(fault=fault):
        fault.armed = True
        training.train(run, 10)
        run.flush()
        wait_for(lambda: fault.hits and held(near) == 10, "for the shadow to fold all the same")
        assert run.stats()["folded_step"] == 4, "what is not stored is not given up"
        assert near.shadow.progress.durable == 4
        fault.armed = False
        training.train(run, 13)
        run.flush()
        must_have_every_step(run, near, training, tmp_path)


@pytest.mark.usefixtures("one_frame_a_segment")
def test_what_a_killed_shadow_left_unfinished_in_the_log_is_not_in_the_way(
    near: Near, attach: Callable[..., everstep.Run], tmp_path: Path
) -> None:
    training = NearTraining()
    run = attach(training, tmp_path / "run", log="disk")
    run.resume()
    (log,) = (tmp_path / "run").glob("timelines/*/log/*")
    (log / f"{file_name(1, 3)}.tmp").write_bytes(b"half")
    training.train(run, 6)
    run.flush()
    must_have_every_step(run, near, training, tmp_path)
    assert not list(log.glob("*.tmp"))


@pytest.mark.usefixtures("one_frame_a_segment")
def test_frames_are_copied_to_disk_though_there_was_no_memory_for_the_state_that_they_led_to(
    near: Near, attach: Callable[..., everstep.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = False
    real = arena.Home.settle

    def settle(home: arena.Home, state: Any) -> bool:
        if full:
            raise StorageError("no shared memory left for the state")
        return real(home, state)

    monkeypatch.setattr(arena.Home, "settle", settle)
    training = NearTraining()
    run = attach(training, tmp_path / "run", log="disk")
    run.resume()
    training.train(run, 3)
    run.flush()
    wait_for(lambda: run.stats()["folded_step"] == 3)
    full = True
    training.train(run, 7)
    run.flush()
    wait_for(lambda: held(near) == 7)
    assert run.stats()["folded_step"] == 3
    full = False
    must_have_every_step(run, near, training, tmp_path)


def segment(folder: Path, num_bytes: int) -> tuple[Path, np.ndarray[Any, Any]]:
    path = folder / "segment"
    data = np.random.default_rng(1).integers(0, 256, num_bytes).astype(np.uint8)
    path.write_bytes(data.tobytes())
    return path, data


def test_a_copy_replaces_an_older_one_only_when_it_has_more(tmp_path: Path) -> None:
    source, data = segment(tmp_path, 10_000)
    reader = shared.MappedReader(str(source))
    copy = tmp_path / "x.frames"
    copy.write_bytes(data[:6000].tobytes())  # by a shadow that was killed
    kept = LogCopy()
    inode = copy.stat().st_ino
    for end in (2000, 6000):
        kept.keep(str(copy), reader, end)
        assert copy.stat().st_ino == inode
    kept.keep(str(copy), reader, 7000)
    assert copy.stat().st_ino != inode
    assert copy.read_bytes() == data[:7000].tobytes()
    kept.close()
    assert sorted(os.listdir(tmp_path)) == ["segment", "x.frames"]


@pytest.mark.parametrize("op", ["create", "write", "sync", "rename"])
def test_a_copy_that_failed_is_made_anew_and_what_was_stored_stays_meanwhile(op: str, tmp_path: Path) -> None:
    source, data = segment(tmp_path, 10_000)
    reader = shared.MappedReader(str(source))
    copy = tmp_path / "x.frames"
    kept = LogCopy()
    fault = Fault((op,), is_any)
    with files.observe(fault=fault):
        for end in (3000, 5000, 9000):
            fault.armed = True
            if end == 3000 or op in ("write", "sync"):  # later only these are done
                with pytest.raises(StorageError):
                    kept.keep(str(copy), reader, end)
            fault.armed = False
            if end > 3000:
                assert copy.read_bytes()[:3000] == data[:3000].tobytes()
            kept.keep(str(copy), reader, end)
            assert copy.read_bytes() == data[:end].tobytes()
    kept.close()
    assert sorted(os.listdir(tmp_path)) == ["segment", "x.frames"]


def is_any(path: str) -> bool:
    return True


# ------------------------------------------------------------------------------------------ who starts it


def test_a_process_that_was_forked_while_a_shadow_started_does_not_keep_the_next_one_from_starting(tmp_path: Path) -> None:
    talk = local.LocalShadow.__new__(local.LocalShadow)
    talk._folder = str(tmp_path)
    inherited = -1
    with talk._starting() as may_start:
        assert may_start
        with talk._starting() as may_also:
            assert not may_also, "one at a time"
        for number in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{number}"
            if os.path.exists(path) and os.readlink(path).startswith(str(tmp_path)):
                inherited = os.dup(int(number))  # as a worker of a DataLoader has it
    assert inherited >= 0
    with talk._starting() as may_start:
        assert may_start
    os.close(inherited)


# ------------------------------------------------------------------------------------------ steps that were never stored


def test_a_shadow_gets_over_steps_that_the_trainer_could_not_store(
    near: Near, attach: Callable[..., everstep.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = FullLog(monkeypatch)
    training = NearTraining()
    run = attach(training, tmp_path / "run", on_error="warn")
    run.resume()
    for _ in range(2):
        training.train(run, run.step + 5)
        run.flush()
        wait_for(lambda: run.stats()["folded_step"] == run.step, f"for the shadow: {run.stats()}, {near.said}")
        full.lose_steps(training, run)
    training.train(run, run.step + 5)
    run.flush()
    wait_for(lambda: run.stats()["folded_step"] == run.step, f"for the shadow: {run.stats()}, {near.said}")
    assert len(near.shadows) == 1
    assert not any("differs" in text for text in near.said)


# ------------------------------------------------------------------------------------------ a trainer that rather waits


@pytest.mark.filterwarnings("ignore::everstep.errors.HiddenEditWarning")
@pytest.mark.parametrize("what", ["fails", "differs"])
@pytest.mark.usefixtures("one_frame_a_segment")
def test_a_trainer_that_waits_for_its_shadow_goes_on_when_the_shadow_has_to_start_from_a_base(
    what: str, near: Near, attach: Callable[..., everstep.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 3 << 20  # some three frames
    once = [what]
    fold = Held.fold

    def meddled(held: Held, frames: Any, fingerprint: Any) -> list[str]:
        if once and frames[-1].step > 5:
            wait_for(lambda: run._keeper._memory.num_bytes() > limit, "for the trainer to lag")
            time.sleep(0.2)
            if once.pop() == "fails":
                raise RuntimeError("an optimizer of the user's own")
            return ["a weight"]
        return fold(held, frames, fingerprint)

    monkeypatch.setattr(Held, "fold", meddled)
    training = NearTraining()
    run = attach(training, tmp_path / "run", on_lag="wait", max_lag_bytes=limit)
    run.resume()
    training.train(run, 4)
    run.flush()
    wait_for(lambda: run.stats()["folded_step"] == 4)
    worker = threading.Thread(target=lambda: training.train(run, 40))
    worker.start()
    worker.join(15)
    stuck = worker.is_alive()
    run._keeper.let_go()  # so that it ends in any case
    worker.join()
    assert not stuck and not once, near.said
    training.train(run, 45)
    run.flush()
    wait_for(lambda: run.stats()["folded_step"] == 45, f"for the shadow: {run.stats()}, {near.said}")


# ------------------------------------------------------------------------------------------ no memory for the state


def test_a_shadow_that_could_not_load_its_base_tries_again(
    near: Near, attach: Callable[..., everstep.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True
    settle = arena.Home.settle

    def may_settle(home: arena.Home, state: Any) -> bool:
        if full:
            raise StorageError("no shared memory left for the state")
        return settle(home, state)

    monkeypatch.setattr(arena.Home, "settle", may_settle)
    training = NearTraining()
    run = attach(training, tmp_path / "run")
    run.resume()
    training.train(run, 5)
    run.flush()
    wait_for(lambda: any("no shared memory" in text for text in near.said))
    assert run.stats()["folded_step"] == -1
    full = False
    wait_for(lambda: run.stats()["folded_step"] == 5, f"for the shadow: {run.stats()}, {near.said}")


# ------------------------------------------------------------------------------------------ a base that cannot be written


def is_base(path: str) -> bool:
    return "/bases/" in path


def begin(training: NearTraining, run: everstep.Run) -> None:
    """At step 4, and no base of the trainer's is on its way, nor will be soon."""
    run.resume()
    for step in (3, 4):  # the shadow may have asked for a base before the first was there: then there is one of step 4
        training.train(run, step)
        run.flush()
        wait_for(lambda step=step: run.stats()["folded_step"] == step)
    assert run._capture is not None and run._capture.snapshot is not None
    run._capture.snapshot.wait()


@pytest.mark.parametrize("op", ["mkdir", "create", "write", "sync", "rename"])
def test_a_base_that_could_not_be_written_leaves_nothing_behind_and_is_written_later(
    op: str, near: Near, attach: Callable[..., everstep.Run], tmp_path: Path
) -> None:
    training = NearTraining()
    run = attach(training, tmp_path / "run", base_interval=5)
    begin(training, run)
    fault = Fault((op,), is_base)
    with files.observe(fault=fault):
        fault.armed = True
        while len(fault.hits) < 3:
            training.train(run, run.step + 2)
            run.flush()
            wait_for(lambda: run.stats()["folded_step"] == run.step)
            time.sleep(0.06)  # then it is tried again
            assert run.step < 200
        fault.armed = False
        time.sleep(0.06)
        training.train(run, run.step + 2)
        run.flush()
        wait_for(lambda: near.shadow.progress.base > 4, f"for a base: {near.said}")
    assert not list((tmp_path / "run").rglob("*.tmp"))
    links = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    left = [os.readlink(link) for link in links if os.path.islink(link)]
    assert not [path for path in left if path.startswith(str(tmp_path)) and ".tmp" in path]


def test_a_base_that_could_not_be_written_is_not_tried_again_at_once(
    near: Near, attach: Callable[..., everstep.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "_AGAIN_S", 60.0)
    training = NearTraining()
    run = attach(training, tmp_path / "run", base_interval=5)
    begin(training, run)
    fault = Fault(("create",), is_base)
    with files.observe(fault=fault):
        fault.armed = True
        while run.step < 17:
            training.train(run, run.step + 1)
            run.flush()
            wait_for(lambda: near.shadow.progress.received == run.step)
        wait_for(lambda: run.stats()["folded_step"] == run.step)
        assert len(fault.hits) == 1


# ------------------------------------------------------------------------------------------ the end


class Asking:
    """Asks a shadow for its state in a thread of its own."""

    def __init__(self, near: Near) -> None:
        self.found: list[Any] = []

        def ask() -> None:
            try:
                self.found.append(near.shadow.hand_out())
            except StepNotFoundError as e:
                self.found.append(e)

        self._thread = threading.Thread(target=ask, daemon=True)
        self._thread.start()
        wait_for(lambda: near.shadow._jobs or self.found)

    def answer(self) -> Any:
        self._thread.join(5)
        assert self.found, "no answer"
        return self.found[0]


def test_who_asks_a_shadow_that_is_just_ending_is_answered(
    near: Near, attach: Callable[..., everstep.Run], tmp_path: Path
) -> None:
    training = NearTraining()
    run = attach(training, tmp_path / "run")
    run.resume()
    training.train(run, 3)
    run.flush()
    wait_for(lambda: run.stats()["folded_step"] == 3)
    crash(run)
    go_on = threading.Event()

    def be_busy() -> None:
        go_on.wait(30)

    near.shadow.do(be_busy)
    near.shadow.end(base=False)
    asking = Asking(near)
    go_on.set()
    assert isinstance(asking.answer(), StepNotFoundError)
    begun = time.monotonic()
    assert isinstance(Asking(near).answer(), StepNotFoundError)
    near.shadow.count(30.0)
    near.shadow.look_again()
    assert time.monotonic() - begun < 5


def test_a_shadow_that_is_asked_while_it_leaves_a_base_for_want_of_a_trainer_stays(
    near: Near, attach: Callable[..., everstep.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    write_base = Held.write_base

    def slow(held: Held, *, direct: bool) -> Any:
        begun.set()
        go_on.wait(30)
        return write_base(held, direct=direct)

    monkeypatch.setattr(Held, "write_base", slow)
    training = NearTraining()
    run = attach(training, tmp_path / "run")
    run.resume()
    training.train(run, 3)
    run.flush()
    wait_for(lambda: run.stats()["folded_step"] == 3)
    crash(run)
    near.shadow._idle_s = 0.0
    assert begun.wait(30)
    near.shadow._idle_s = 100.0
    asking = Asking(near)
    go_on.set()
    handout = asking.answer()
    assert handout.step == 3
    handout.done()
    assert near.shadow.progress.base == 3


def test_a_trainer_whose_shadow_ends_while_it_resumes_finds_the_base_that_it_left(
    near: Near, attach: Callable[..., everstep.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for begun in (0, 2):  # the frames of the second generation lead on from what only the shadow has
        training = NearTraining()
        run = attach(training, tmp_path / "run")
        assert run.resume() == begun
        training.train(run, begun + 2)
        run.flush()
        wait_for(lambda run=run: run.stats()["folded_step"] == run.step)  # type: ignore[misc]
        crash(run)

    def find(path: RunPath, run: str) -> None:
        near.shadow.end(base=True)
        wait_for(lambda: near.shadow.is_over)

    monkeypatch.setattr(recover, "find", find)
    assert attach(NearTraining(), tmp_path / "run").resume() == 4, near.said


def test_a_shadow_that_was_asked_how_far_it_is_waits_for_who_asked(
    near: Near, attach: Callable[..., everstep.Run], tmp_path: Path
) -> None:
    training = NearTraining()
    run = attach(training, tmp_path / "run")
    run.resume()
    training.train(run, 3)
    run.flush()
    wait_for(lambda: near.shadows and near.shadow.progress.folded == 3, "for the shadow")
    crash(run)
    near.shadow._since = time.monotonic()
    near.shadow._idle_s = 1.0
    near.shadow.count(30.0)
    time.sleep(1.5)
    assert not near.shadow.is_over and near.shadow.progress.base < 3


# ------------------------------------------------------------------------------------------ frames that cannot be read


@pytest.mark.usefixtures("one_frame_a_segment")
@pytest.mark.parametrize("is_spilled", [False, True], ids=["in memory", "on disk"])
def test_a_shadow_that_lags_by_many_segments_reads_them_all(
    is_spilled: bool, near: Near, attach: Callable[..., everstep.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def be_busy() -> None:
        go_on.wait(60)

    training = NearTraining()
    run = attach(training, tmp_path / "run", max_lag_bytes=1 if is_spilled else None)
    run.resume()
    training.train(run, 2)
    run.flush()
    wait_for(lambda: run.stats()["folded_step"] == 2)
    if is_spilled:
        run._keeper._disk.segment_bytes = 1
    near.shadow.do(be_busy)
    training.train(run, 90)
    run.flush()
    wait_for(lambda: near.shadow.progress.received == 90)
    go_on.set()
    wait_for(lambda: run.stats()["folded_step"] == 90, f"for the shadow: {run.stats()}, {near.said}")
    assert (run.stats()["spilled_steps"] > 50) == is_spilled
    assert not any("Error" in text for text in near.said)


def test_a_state_that_was_being_folded_when_a_frame_could_not_be_read_is_given_up(
    near: Near, attach: Callable[..., everstep.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = ["read: Input/output error"]
    fold = Held.fold

    def meddled(held: Held, frames: Any, fingerprint: Any) -> list[str]:
        if once and frames[-1].step > 5:
            next(iter(held.state.tensors.values())).add_(1.0)
            raise StorageError(once.pop())
        return fold(held, frames, fingerprint)

    monkeypatch.setattr(Held, "fold", meddled)
    training = NearTraining()
    run = attach(training, tmp_path / "run")
    run.resume()
    training.train(run, 10)
    run.flush()
    wait_for(lambda: run.stats()["folded_step"] == 10, f"for the shadow: {run.stats()}, {near.said}")
    assert not once and not any("differs" in text for text in near.said)


def test_a_shadow_holds_memory_for_the_next_trainer_while_there_is_none(
    near: Near, attach: Callable[..., everstep.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = NearTraining()
    run = attach(training, tmp_path / "run")
    run.resume()
    training.train(run, 5)
    wait_for(lambda: held(near) == run.step)
    at_hand = near.shadow._at_hand
    assert at_hand is not None and not at_hand.num_bytes, "a trainer is there"
    crash(run)
    wait_for(lambda: at_hand.num_bytes > 0, "for memory to be held")
    assert near.shadow._given is not None
    assert 0 <= at_hand.num_bytes - sum(t.num_bytes for t in near.shadow._given.stored) < len(os.sched_getaffinity(0))
    offer = recover.find(RunPath(str(tmp_path / "run")), near.shadow._run)
    assert offer is not None and not at_hand.num_bytes, "it has been asked for the state"
    offer.release()

    again = NearTraining()
    second = attach(again, tmp_path / "run")
    assert second.resume() == 5 and second.stats()["resumed_from"] == "shadow"
    again.train(second, 7)
    wait_for(lambda: held(near) == 7)
    assert not at_hand.num_bytes
    monkeypatch.setattr(shared, "available_bytes", lambda: 1 << 20)
    crash(second)
    wait_for(lambda: near.shadow._prepared is not None and near.shadow._prepared[2] == 7)
    wait_for(lambda: near.shadow._given is not None and near.shadow._given.key[2] == 7)
    assert not at_hand.num_bytes, "memory is scarce"
