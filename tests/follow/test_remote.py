"""A shadow on another host: the same bytes there, whatever the network does; and nobody in without the token."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from near_shadows import FullLog
from remote_shadows import Proxy, Remote, Training, held, live, must_hold, wait_until

import everstep
from everstep.errors import LinkError, LinkRefused, UnprotectedWarning, UsageError
from everstep.follow import fetch, remote, serve, ship
from everstep.follow.compact import Held
from everstep.follow.shadow import Shadow
from everstep.link import addresses, sockets
from everstep.link.messages import VERSION, Ack, Bytes, Document, Frame, Hello, Resend, Resume
from everstep.link.sockets import Channel
from everstep.restore.apply import public_state
from everstep.store import shared
from everstep.store.runs import RunPath
from support import crash, equal


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="es-", dir="/dev/shm") as folder:
        monkeypatch.setenv("EVERSTEP_SHARED", folder)
        yield Path(folder)


@pytest.fixture
def remotes(tmp_path: Path, shm: Path) -> Iterator[Callable[..., Remote]]:
    made: list[Remote] = []

    def make(**options: Any) -> Remote:
        made.append(Remote(tmp_path / "shadows", **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_it_holds_what_the_trainer_has_and_gives_it_back(remotes: Callable[..., Remote], tmp_path: Path) -> None:
    shadow = remotes()
    first = Training()
    run = first.attach(tmp_path / "run", shadow.address)
    assert run.resume() == 0
    first.train(run, 120)
    must_hold(held(run, shadow.address), first, run)
    crash(run)
    second = Training()
    again = second.attach(tmp_path / "run", shadow.address)
    assert again.resume() == 120
    assert again.stats()["resumed_from"] == "shadow"
    assert not equal(dict(second.model.state_dict()), dict(first.model.state_dict()))
    second.train(again, 140)
    plain = Training()
    for n in range(1, 141):
        plain.step(n)
    assert not equal(dict(second.model.state_dict()), dict(plain.model.state_dict()))
    must_hold(held(again, shadow.address), second, again)
    again.close()


def test_gradients_that_leave_during_backward_are_there_before_their_step_is(
    remotes: Callable[..., Remote], tmp_path: Path
) -> None:
    shadow = remotes()
    training = Training(512)
    run = training.attach(tmp_path / "run", shadow.address, early=True)
    run.resume()
    for n in (6, 12, 18):
        training.train(run, n - 1)
        must_hold(held(run, shadow.address), training, run)
        before = run.stats()["sent_bytes"]
        training.backward(n)
        wait_until(lambda before=before: run.stats()["sent_bytes"] > before + 100_000)
        assert run.stats()["received_step"] == n - 1
        training.update()
        run.commit()
    must_hold(held(run, shadow.address), training, run)
    log = run._capture.offload._log
    assert log.last is not None
    assert run.stats()["sent_bytes"] == log.last.end_offset, "one segment, and nothing of it went twice"
    run.close()


def test_a_base_there_leads_to_the_same_state_after_it_was_started_again(
    remotes: Callable[..., Remote], tmp_path: Path
) -> None:
    shadow = remotes(interval=10)
    training = Training()
    run = training.attach(tmp_path / "run", shadow.address)
    run.resume()
    training.train(run, 35)
    must_hold(held(run, shadow.address), training, run)
    crash(run)
    shadow.close()  # leaves a base at step 35
    remotes(port=shadow.port)
    second = Training()
    again = second.attach(tmp_path / "run", shadow.address)
    again.resume()
    assert again.step <= 35
    second.train(again, 50)
    must_hold(held(again, shadow.address), second, again)
    again.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_leaves_a_base_when_it_is_told_to_end(number: signal.Signals, shm: Path, tmp_path: Path) -> None:
    def train(listener: socket.socket) -> None:
        try:
            training = Training()
            run = training.attach(tmp_path / "run", f"tcp://127.0.0.1:{listener.getsockname()[1]}")
            run.resume()
            training.train(run, 5)
            run.flush()
            wait_until(lambda: run.stats()["folded_step"] == 5)
            crash(run)
        finally:
            signal.pthread_kill(threading.main_thread().ident, number)  # type: ignore[arg-type]

    before = signal.getsignal(signal.SIGTERM)
    try:
        remote.main(
            "127.0.0.1:0", str(tmp_path / "shadows"), token=None, certfile=None, keyfile=None, interval=1000,
            max_bytes=1 << 30, idle_s=100.0, ready=lambda listener: threading.Thread(target=train, args=(listener,)).start(),
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGTERM, before)
    (found,) = (tmp_path / "shadows").iterdir()
    assert everstep.open(found).steps[-1] == 5


def test_cut_connections_lose_nothing(remotes: Callable[..., Remote], tmp_path: Path) -> None:
    shadow = remotes()
    lot = random.Random(5)
    cuts = [lot.randrange(2_000, 400_000) for _ in range(12)]

    def meddle(data: bytes, passed: int) -> bytes | None:
        if cuts and passed + len(data) > cuts[0]:
            at = cuts.pop(0) - passed
            return data[: max(at, 0)] and None
        return data

    proxy = Proxy(shadow.port, meddle)
    training = Training()
    run = training.attach(tmp_path / "run", proxy.address)
    run.resume()
    while cuts or run.step < 60:
        training.train(run, run.step + 5)
        run.flush()
        time.sleep(0.05)
        assert run.step < 3000
    must_hold(held(run, proxy.address), training, run)
    assert proxy.connections > 12
    assert not training.model[0].weight.isnan().any()
    run.close()
    proxy.close()


class Deaf:
    """Trainers that do not hear what shadows say of their progress, while `now`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = True
        hear = ship.RemoteShadow._hear

        def heard(talk: ship.RemoteShadow, channel: Channel, message: Any) -> None:
            if not (self.now and isinstance(message, Ack)):
                hear(talk, channel, message)

        monkeypatch.setattr(ship.RemoteShadow, "_hear", heard)


def cut(shadow: Remote) -> None:
    """The connection of the trainer."""
    (hosted,) = shadow.host._runs.values()
    channel = hosted.server._trainer
    if channel is not None:
        channel.close()


@pytest.mark.parametrize("segment_bytes", [1, 100_000], ids=["one frame a segment", "several"])
@pytest.mark.parametrize("is_told", [True, False], ids=["", "all is sent again"])
@pytest.mark.sampled(2)
def test_steps_that_were_folded_before_a_connection_was_cut_do_not_upset_what_is_received(
    is_told: bool, segment_bytes: int, remotes: Callable[..., Remote], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.MemoryPlace, "segment_bytes", segment_bytes)
    deaf = Deaf(monkeypatch)
    shadow = remotes()
    training = Training()
    run = training.attach(tmp_path / "run", shadow.address)
    run.resume()
    training.train(run, 22)
    run.flush()
    (hosted,) = shadow.host._runs.values()
    wait_until(lambda: hosted.shadow.progress.folded == 22)
    if not is_told:  # as if the welcome had said nothing
        before = ship.RemoteShadow._before_resume

        def all_again(talk: ship.RemoteShadow, channel: Channel, welcome: Any) -> None:
            before(talk, channel, msgspec.structs.replace(welcome, step=-1))

        monkeypatch.setattr(ship.RemoteShadow, "_before_resume", all_again)
    deaf.now = False
    cut(shadow)
    if is_told:
        wait_until(lambda: run.stats()["folded_step"] == 22)
    for until in (25, 26, 60):
        training.train(run, until)
        must_hold(held(run, shadow.address), training, run)
    run.close()


def test_bytes_that_change_on_the_way_are_noticed_and_sent_again(remotes: Callable[..., Remote], tmp_path: Path) -> None:
    shadow = remotes()
    lot = random.Random(7)
    damaged = 0

    def meddle(data: bytes, passed: int) -> bytes | None:
        nonlocal damaged
        if passed > 5_000 and damaged < 15 and len(data) > 1000 and lot.random() < 0.2:
            damaged += 1
            at = lot.randrange(len(data))
            return data[:at] + bytes([data[at] ^ (1 << lot.randrange(8))]) + data[at + 1 :]
        return data

    proxy = Proxy(shadow.port, meddle)
    training = Training()
    run = training.attach(tmp_path / "run", proxy.address)
    run.resume()
    while damaged < 15 or run.step < 60:
        training.train(run, run.step + 5)
        run.flush()
        time.sleep(0.02)
        assert run.step < 3000
    deadline = time.monotonic() + 30
    while run.stats()["folded_step"] < run.step - 2:  # a base that was damaged is replaced at a later commit
        assert time.monotonic() < deadline
        training.train(run, run.step + 1)
        time.sleep(0.01)
    must_hold(held(run, proxy.address), training, run)
    run.close()
    proxy.close()


@pytest.mark.filterwarnings("ignore::everstep.errors.UnprotectedWarning")
@pytest.mark.parametrize("num", [1, 2], ids=["one", "two shadows"])
@pytest.mark.parametrize("segment_bytes", [1, 1 << 22], ids=["one frame a segment", "several"])
def test_a_base_that_comes_while_a_frame_is_asked_for_again_leads_on(
    segment_bytes: int, num: int, remotes: Callable[..., Remote], shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frame itself does not come any more then."""
    monkeypatch.setattr(shared.MemoryPlace, "segment_bytes", segment_bytes)
    problem = remote.Inbox.problem
    shadows = [remotes(), *(Remote(tmp_path / "other") for _ in range(num - 1))]
    damaged: list[int] = []

    def damaged_once(inbox: remote.Inbox, entry: Any) -> str | None:
        (hosted,) = shadows[-1].host._runs.values()
        if entry.step != 3 or hosted.inbox is not inbox or damaged:
            return problem(inbox, entry)
        damaged.append(entry.step)
        lost = threading.Event()
        hosted.shadow.do(lambda: hosted.shadow._failed(ValueError("lost by the test")), lost)
        assert lost.wait(10)
        return inbox._again("damaged by the test")

    monkeypatch.setattr(remote.Inbox, "problem", damaged_once)
    where = ",".join(shadow.address for shadow in shadows)
    training = Training()
    run = training.attach(tmp_path / "run", where)
    run.resume()
    training.train(run, 2)
    run.flush()
    wait_until(lambda: run.stats()["folded_step"] == 2)
    training.train(run, 3)
    deadline = time.monotonic() + 20
    while run.stats()["folded_step"] < max(run.step - 2, 8):
        assert time.monotonic() < deadline, run.stats()
        training.train(run, run.step + 1)
        time.sleep(0.05)
    assert damaged
    must_hold(held(run, where), training, run)
    run.close()
    for shadow in shadows[1:]:
        shadow.close()


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "changed"])
def test_a_state_is_asked_for_again_when_it_does_not_arrive(
    is_cut: bool, remotes: Callable[..., Remote], tmp_path: Path
) -> None:
    shadow = remotes()
    training = Training()
    run = training.attach(tmp_path / "run", shadow.address)
    run.resume()
    training.train(run, 5)
    left = [3]

    def meddle(data: bytes, passed: int) -> bytes | None:
        if passed + len(data) < 3000 or not left[0]:
            return data
        left[0] -= 1
        return None if is_cut else bytes([data[0] ^ 1]) + data[1:]

    proxy = Proxy(shadow.port, None, meddle)
    must_hold(held(run, proxy.address, num_streams=1), training, run)
    assert not left[0]
    run.close()
    proxy.close()


def test_a_shadow_that_lost_everything_gets_a_new_base_and_says_that_there_was_a_gap(
    tmp_path: Path, shm: Path
) -> None:
    first = Remote(tmp_path / "one")
    training = Training()
    run = training.attach(tmp_path / "run", first.address)
    run.resume()
    training.train(run, 20)
    must_hold(held(run, first.address), training, run)
    port = first.port
    first.close()
    for hosted in first.host._runs.values():
        if hosted.server._trainer is not None:
            hosted.server._trainer.close()
    second = Remote(tmp_path / "two", port=port)  # another disk: it knows nothing
    try:
        with pytest.warns(UnprotectedWarning, match="has lost what it held"):
            deadline = time.monotonic() + 30
            while run.stats()["folded_step"] < 25 and time.monotonic() < deadline:
                training.train(run, run.step + 1)
                time.sleep(0.02)
        must_hold(held(run, second.address), training, run)
        wait_until(lambda: run.stats()["unprotected_since"] is None)
        run.close()
    finally:
        second.close()


@pytest.mark.filterwarnings("ignore::everstep.errors.UnprotectedWarning")
@pytest.mark.parametrize("num", [1, 2], ids=["one", "two shadows"])
def test_a_shadow_that_comes_back_with_an_old_base_asks_for_one_when_it_sees_what_is_missing(
    num: int, tmp_path: Path, shm: Path
) -> None:
    """It loads that base before a frame has arrived that tells of the gap: the trainer has none left to send."""
    shadows = [Remote(tmp_path / f"shadow{i}") for i in range(num)]
    training = Training()
    where = ",".join(shadow.address for shadow in shadows)
    run = training.attach(tmp_path / "run", where)
    run.resume()
    training.train(run, 20)
    must_hold(held(run, where), training, run)
    first = shadows.pop()
    first.close()
    for base in (tmp_path / f"shadow{num - 1}").glob("*/timelines/*/bases/*"):
        if int(base.name) > 0:
            shutil.rmtree(base)
    for hosted in first.host._runs.values():
        if hosted.server._trainer is not None:
            hosted.server._trainer.close()
    shadows.append(Remote(tmp_path / f"shadow{num - 1}", port=first.port))
    try:
        wait_until(lambda: run.stats()["folded_step"] == 0)
        deadline = time.monotonic() + 30
        while run.stats()["folded_step"] < 25:
            assert time.monotonic() < deadline, run.stats()
            training.train(run, run.step + 1)
            time.sleep(0.02)
        must_hold(held(run, where), training, run)
        assert run.stats()["unprotected_since"] is None
        run.close()
    finally:
        for shadow in shadows:
            shadow.close()


@pytest.mark.filterwarnings("ignore::everstep.errors.HiddenEditWarning")
def test_after_a_mismatch_it_gets_a_new_base(
    remotes: Callable[..., Remote], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = ["a weight"]
    fold = Held.fold

    def meddled(held: Held, frames: Any, fingerprint: Any) -> list[str]:
        found = fold(held, frames, fingerprint)
        return [once.pop()] if once and frames[-1].step > 10 else found

    monkeypatch.setattr(Held, "fold", meddled)
    shadow = remotes()
    training = Training()
    run = training.attach(tmp_path / "run", shadow.address)
    run.resume()
    training.train(run, 10)
    must_hold(held(run, shadow.address), training, run)
    deadline = time.monotonic() + 20
    while once or run.stats()["folded_step"] < 15:
        assert time.monotonic() < deadline, (run.stats(), shadow.said)
        training.train(run, run.step + 1)
        time.sleep(0.02)
    must_hold(held(run, shadow.address), training, run)
    run.close()


def test_it_gets_over_steps_that_the_trainer_could_not_store(
    remotes: Callable[..., Remote], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = FullLog(monkeypatch)
    shadow = remotes()
    training = Training()
    run = training.attach(tmp_path / "run", shadow.address, on_error="warn")
    run.resume()
    training.train(run, 5)
    must_hold(held(run, shadow.address), training, run)
    full.lose_steps(training, run)
    for _ in range(2):
        training.train(run, run.step + 5)
        must_hold(held(run, shadow.address), training, run)
        cut(shadow)
    run.close()


def test_who_comes_while_a_shadow_ends_gets_the_base_that_it_left(
    remotes: Callable[..., Remote], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow = remotes()
    training = Training()
    run = training.attach(tmp_path / "run", shadow.address)
    run.resume()
    training.train(run, 7)
    must_hold(held(run, shadow.address), training, run)
    expected = live(training, run)
    crash(run)
    (hosted,) = shadow.host._runs.values()
    close, is_closing = Shadow._close, threading.Event()

    def slow(ending: Shadow) -> None:
        is_closing.set()
        time.sleep(0.5)
        close(ending)

    monkeypatch.setattr(Shadow, "_close", slow)
    hosted.shadow.end(base=True)
    assert is_closing.wait(30)
    offer = fetch.find_all([shadow.address], RunPath(run.path), run._opened.run)
    assert offer is not None and offer.step == 7
    assert not equal(dict(public_state(offer.fetch(), {})["model"]), expected["model"])
    offer.release()


def test_without_the_token_nobody_is_let_in(remotes: Callable[..., Remote], tmp_path: Path) -> None:
    shadow = remotes(token=b"a token of some length")
    training = Training()
    run = training.attach(tmp_path / "run", shadow.address, shadow_token="a token of some length")
    run.resume()
    training.train(run, 5)
    must_hold(held(run, shadow.address, token=b"a token of some length"), training, run)
    path, run_id = RunPath(run.path), run._opened.run
    with pytest.raises(LinkRefused):
        fetch.find_all([shadow.address], path, run_id, token=b"another token")
    with pytest.raises(LinkError):
        fetch.find_all([shadow.address], path, run_id)
    run.close()


def test_strangers_take_few_places_and_only_until_they_go(
    remotes: Callable[..., Remote], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_MAX_STRANGERS", 4)
    shadow = remotes(token=b"a token of some length")
    training = Training()
    run = training.attach(tmp_path / "run", shadow.address, shadow_token="a token of some length")
    run.resume()
    training.train(run, 3)
    must_hold(held(run, shadow.address, token=b"a token of some length"), training, run)
    strangers = [socket.create_connection(("127.0.0.1", shadow.port)) for _ in range(10)]
    wait_until(lambda: sum(is_closed(each) for each in strangers) == 6)
    training.train(run, 5)  # who is known is not concerned
    run.flush()
    wait_until(lambda: run.stats()["folded_step"] == 5)
    for each in strangers:
        each.close()
    wait_until(lambda: shadow.host._strangers._value == 4)
    must_hold(held(run, shadow.address, token=b"a token of some length"), training, run)
    run.close()


def is_closed(sock: socket.socket) -> bool:
    """By the other end."""
    try:
        return sock.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


class Listener:
    """A socket on which connections cannot be taken, until it is closed."""

    def __init__(self) -> None:
        self.errors = [errno.EMFILE, errno.ECONNABORTED, errno.EMFILE, errno.EBADF]

    def accept(self) -> Any:
        code = self.errors.pop(0)
        raise OSError(code, os.strerror(code))

    def fileno(self) -> int:
        return 7 if self.errors else -1


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_connection_that_cannot_be_taken_does_not_end_a_shadow(where: str, tmp_path: Path) -> None:
    def none(rank: int) -> Any:
        raise AssertionError

    host: Any = serve.LocalHost("ab" * 16, none)
    if where == "elsewhere":
        host = remote.Host(str(tmp_path), token=None, tls=None, interval=1, max_bytes=1, idle_s=1.0, say=print)
    listener = Listener()
    host.accept(listener)
    assert not listener.errors


def test_it_does_not_listen_beyond_this_machine_without_a_token(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="token"):
        remote.main(
            "0.0.0.0:0", str(tmp_path), token=None, certfile=None, keyfile=None, interval=1, max_bytes=1, idle_s=1.0
        )
    assert not os.listdir(tmp_path)


def test_names_that_lead_elsewhere_and_sizes_out_of_bounds_are_refused(
    remotes: Callable[..., Remote], tmp_path: Path, shm: Path
) -> None:
    shadow = remotes(max_bytes=1 << 20)
    training = Training()
    run = everstep.attach(training.model, training.optimizer, tmp_path / "run", mode="delta", quiet=True)
    run.resume()
    run.close()
    attempts: list[tuple[Any, int]] = [
        (Document("run.json/x"), 10),
        (Document("timelines/0001/log/rank-00000/g000001-000000000001.frames"), 10),
        (Document("lock"), 10),
        (Bytes("memory/other.frames", 0), 10),
        (Bytes("disk/g000001-000000000001.frames", 0), 10),
        (Bytes("memory/g000002-000000000001.frames", 0), 10),  # of another generation
        (Bytes("memory/g000001-000000000001.frames", 4096), 10),  # a hole
        (Bytes("memory/g000001-000000000001.frames", 0), 2 << 20),  # beyond what may wait in memory
        (Bytes("base/0001/000000000005/../../x", 0), 10),
    ]
    for message, size in attempts:
        with contextlib.ExitStack() as stack:
            channel = stack.enter_context(Channel(addresses.connect(shadow.address), lambda m, n: None))
            sockets.introduce(channel, Hello(VERSION, run._opened.run, "somewhere", 1, 1, 0, "train", {}))
            for name in ("run.json", "timelines/0001/timeline.json", "timelines/0001/generations/000001.json"):
                channel.send(Document(name), (tmp_path / "run" / name).read_bytes())
            channel.send(Resume(1, 1, 0))
            with pytest.raises(LinkError):
                channel.send(message, bytes(size))
                while channel.receive(10.0):
                    pass
                raise AssertionError(f"{message} was taken")
        wait_until(lambda: all(h.server._trainer is None for h in shadow.host._runs.values()))
    assert sum(f.stat().st_size for f in shm.rglob("*") if f.is_file()) <= 1 << 20


def test_a_second_trainer_and_an_older_generation_are_refused(remotes: Callable[..., Remote], tmp_path: Path) -> None:
    shadow = remotes()
    training = Training()
    run = training.attach(tmp_path / "run", shadow.address)
    run.resume()
    training.train(run, 3)
    must_hold(held(run, shadow.address), training, run)
    for generation in (0, 1):
        with Channel(addresses.connect(shadow.address), lambda m, n: None) as channel, pytest.raises(LinkRefused):
            sockets.introduce(channel, Hello(VERSION, run._opened.run, run.path, 1, generation, 0, "train", {}))
    training.train(run, 6)
    must_hold(held(run, shadow.address), training, run)
    run.close()


def test_who_says_that_he_is_of_a_later_generation_and_brings_nothing_of_it_changes_nothing(
    remotes: Callable[..., Remote], tmp_path: Path
) -> None:
    shadow = remotes()
    training = Training()
    run = training.attach(tmp_path / "run", shadow.address)
    run.resume()
    training.train(run, 4)
    must_hold(held(run, shadow.address), training, run)
    # A shadow that connects before the first base is there asks for another, which may be taken at the commit after.
    training.train(run, 5)
    must_hold(held(run, shadow.address), training, run)
    run._capture.snapshot.wait()
    base = run.stats()["base_step"]
    (hosted,) = shadow.host._runs.values()
    late = Hello(VERSION, run._opened.run, run.path, 1, 10**9, 0, "train", {})
    segment = f"memory/{hosted.inbox._name}"
    claims: list[Any] = [
        Resume(10**9, 1, 5), Resume(1, 1, 5), Frame(6, segment, 0, 0, 0, 6), (Bytes(segment, hosted.inbox._got), b"0000"),
    ]  # fmt: skip
    for claim in claims:
        with Channel(addresses.connect(shadow.address), lambda m, n: None) as channel:
            sockets.introduce(channel, late)
            channel.send(*(claim if isinstance(claim, tuple) else (claim,)))
            with pytest.raises(LinkError):
                while channel.receive(10.0):
                    pass
    with Channel(addresses.connect(shadow.address), lambda m, n: None) as channel:
        sockets.introduce(channel, late)  # and stays
        training.train(run, 8)
        must_hold(held(run, shadow.address), training, run)
        cut(shadow)
        training.train(run, 12)
        must_hold(held(run, shadow.address), training, run)
    assert run.stats()["base_step"] == base, "nothing was forgotten"
    run.close()


def test_a_frame_that_is_said_to_be_of_another_step_is_not_taken(remotes: Callable[..., Remote], tmp_path: Path) -> None:
    shadow = remotes()
    training = Training()
    run = training.attach(tmp_path / "run", shadow.address)
    run.resume()
    training.train(run, 5)
    must_hold(held(run, shadow.address), training, run)
    (hosted,) = shadow.host._runs.values()
    last = run._capture.offload._log.last
    assert last is not None
    path = os.path.join(hosted.inbox._place().folder, os.path.basename(last.path))
    assert hosted.inbox.problem(last._replace(path=path)) == "", "said twice"
    wrong = hosted.inbox.problem(last._replace(path=path, step=2**62))
    assert wrong
    assert hosted.server._trainer is not None
    hosted.server._trainer.send(Resend(*hosted.inbox.good, wrong))
    training.train(run, 12)
    must_hold(held(run, shadow.address), training, run)
    run.close()


def test_a_trainer_whose_shadow_is_not_there_goes_on_and_is_told(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ship, "TELL_AFTER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    training = Training()
    run = training.attach(tmp_path / "run", f"tcp://127.0.0.1:{port}")
    run.resume()
    deadline = time.monotonic() + 30
    with pytest.warns(UnprotectedWarning, match="no shadow answers"):
        while run.stats()["unprotected_since"] is None or run._keeper._warnings:
            assert time.monotonic() < deadline
            training.train(run, run.step + 1)
            time.sleep(0.02)
    shadow = Remote(tmp_path / "shadows", port=port)
    try:
        must_hold(held(run, shadow.address), training, run)
        wait_until(lambda: run.stats()["unprotected_since"] is None)
        run.close()
    finally:
        shadow.close()


@pytest.mark.parametrize(
    "options",
    [{"shadow": "nonsense"}, {"shadow": "tcp://a:1,tcp://a:1"}, {"shadow": "tcp://a:1,"}, {"mode": "delta"}],
    ids=str,
)
def test_a_shadow_that_cannot_be_meant_is_refused_at_attach(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        Training().attach(tmp_path / "run", "tcp://127.0.0.1:1", **options)
    assert not (tmp_path / "run").exists()
