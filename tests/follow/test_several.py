"""Several shadows that share a run's atoms: each has its own, all can serve one step, and together they give it back."""

from __future__ import annotations

import copy
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_shadows import Proxy, Remote, Training, held, must_hold, wait_until
from torch import nn

import everstep
from everstep.atoms import Layout
from everstep.follow import fetch, ship
from everstep.store.runs import RunPath
from support import crash, equal

pytestmark = pytest.mark.long


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Remote]]:
    """Makes hosts of shadows, each with a disk of its own."""
    made: list[Remote] = []

    def make(name: str, **options: Any) -> Remote:
        made.append(Remote(tmp_path / name, **options))
        return made[-1]

    with tempfile.TemporaryDirectory(prefix="es-", dir="/dev/shm") as folder:
        monkeypatch.setenv("EVERSTEP_SHARED", folder)
        yield make
        for each in made:
            each.close()


def progress(host: Remote) -> Any:
    (hosted,) = host.host._runs.values()
    return hosted.shadow.progress


@pytest.mark.parametrize(("num", "early"), [(2, False), (3, False), (2, True)])
def test_together_they_hold_what_the_trainer_has_and_give_it_back(
    num: int, early: bool, hosts: Callable[..., Remote], tmp_path: Path
) -> None:
    where = ",".join(hosts(f"host{i}").address for i in range(num))
    first = Training(512)
    run = first.attach(tmp_path / "run", where, early=early)
    assert run.resume() == 0
    first.train(run, 60)
    must_hold(held(run, where), first, run)
    crash(run)
    second = Training(512)
    again = second.attach(tmp_path / "run", where, early=early)
    assert again.resume() == 60
    assert again.stats()["resumed_from"] == "shadow"
    second.train(again, 80)
    plain = Training(512)
    for n in range(1, 81):
        plain.step(n)
    assert not equal(dict(second.model.state_dict()), dict(plain.model.state_dict()))
    must_hold(held(again, where), second, again)
    again.close()


def test_what_is_sent_is_one_frame_and_a_hundredth(hosts: Callable[..., Remote], tmp_path: Path) -> None:
    where = ",".join(hosts(f"host{i}").address for i in range(2))
    training = Training(1 << 15)
    run = training.attach(tmp_path / "run", where)
    run.resume()
    training.train(run, 12)
    must_hold(held(run, where), training, run)
    stats = run.stats()
    assert stats["sent_bytes"] <= 1.01 * stats["log_bytes"]
    run.close()


def test_no_shadow_is_ahead_of_what_all_have_received(
    hosts: Callable[..., Remote], tmp_path: Path
) -> None:
    first, second = hosts("first"), hosts("second")
    gate = threading.Event()
    gate.set()

    def meddle(data: bytes, passed: int) -> bytes | None:
        gate.wait()
        return data

    proxy = Proxy(second.port, meddle)
    training = Training(512)
    run = training.attach(tmp_path / "run", f"{first.address},{proxy.address}", max_lag_bytes=1)
    run.resume()
    training.train(run, 10)
    must_hold(held(run, f"{first.address},{proxy.address}"), training, run)
    gate.clear()
    training.train(run, 40)
    run.flush()
    wait_until(lambda: progress(first).received >= 10 + ship.MIN_STAGED)
    time.sleep(0.2)
    assert progress(first).folded <= progress(second).received <= 11
    assert progress(first).received <= progress(first).folded + ship.MIN_STAGED, "and it is not sent all that there is"
    gate.set()
    must_hold(held(run, f"{first.address},{proxy.address}"), training, run)
    run.close()
    proxy.close()


@pytest.mark.parametrize("what", ["cut", "damaged"])
def test_one_bad_connection_loses_nothing(what: str, hosts: Callable[..., Remote], tmp_path: Path) -> None:
    first, second = hosts("first"), hosts("second")
    lot = random.Random(3)
    times = 0

    def meddle(data: bytes, passed: int) -> bytes | None:
        nonlocal times
        if passed < 5_000 or times == 8 or len(data) < 1000 or lot.random() > 0.2:
            return data
        times += 1
        at = lot.randrange(len(data))
        return None if what == "cut" else data[:at] + bytes([data[at] ^ (1 << lot.randrange(8))]) + data[at + 1 :]

    proxy = Proxy(second.port, meddle)
    where = f"{first.address},{proxy.address}"
    training = Training(512)
    run = training.attach(tmp_path / "run", where)
    run.resume()
    while times < 8 or run.step < 40:
        training.train(run, run.step + 2)
        run.flush()
        time.sleep(0.02)
        assert run.step < 3000
    deadline = time.monotonic() + 30
    while run.stats()["folded_step"] < run.step - 2:  # a base that was damaged is replaced at a later commit
        assert time.monotonic() < deadline
        training.train(run, run.step + 1)
        time.sleep(0.1)
    must_hold(held(run, where), training, run)
    run.close()
    proxy.close()


def test_atoms_that_come_in_mid_run_get_an_owner_and_come_back(hosts: Callable[..., Remote], tmp_path: Path) -> None:
    first, second = hosts("first"), hosts("second")
    where = f"{first.address},{second.address}"

    def grow(training: Training) -> None:
        torch.manual_seed(8)
        training.model.append(nn.Linear(32, 700))
        training.model.append(nn.Linear(700, 32))
        training.optimizer.add_param_group({"params": [*training.model[4].parameters(), *training.model[5].parameters()]})

    training = Training(512)
    run = training.attach(tmp_path / "run", where)
    run.resume()
    training.train(run, 10)
    grow(training)
    training.train(run, 30)
    must_hold(held(run, where), training, run)
    crash(run)
    again = Training(512)
    grow(again)
    run = again.attach(tmp_path / "run", where)
    assert run.resume() == 30
    again.train(run, 40)
    must_hold(held(run, where), again, run)
    assert not [s for h in (first, second) for s in h.said if "needs" in s]
    run.close()


def test_a_layout_is_told_though_its_folder_seems_unchanged(
    hosts: Callable[..., Remote], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's time moves in steps of milliseconds: two layouts may come in one of them, with a listing in between."""
    write = RunPath.write_layout

    def at_once(self: RunPath, timeline: int, layout: Layout) -> None:
        write(self, timeline, layout)
        os.utime(self.layouts(timeline), ns=(1, 1))

    monkeypatch.setattr(RunPath, "write_layout", at_once)
    first = hosts("first")
    training = Training(512)
    run = training.attach(tmp_path / "run", first.address)
    run.resume()
    training.train(run, 10)
    training.model.append(nn.Linear(32, 32))
    training.optimizer.add_param_group({"params": list(training.model[-1].parameters())})
    training.train(run, 20)
    must_hold(held(run, first.address), training, run)
    assert not [s for s in first.said if "missing" in s]
    run.close()


def test_shadows_that_are_asked_for_another_part_begin_anew(hosts: Callable[..., Remote], tmp_path: Path) -> None:
    first, second = hosts("first"), hosts("second")
    orders = [f"{first.address},{second.address}", f"{second.address},{first.address}", first.address, second.address]
    training = Training(512)
    for n, where in enumerate([*orders, orders[0]]):
        run = training.attach(tmp_path / "run", where)
        run.resume()
        training.train(run, 10 * n + 10)
        must_hold(held(run, where), training, run)
        run.close()
    plain = Training(512)
    for n in range(1, 51):
        plain.step(n)
    assert not equal(dict(training.model.state_dict()), dict(plain.model.state_dict()))


def test_parts_of_a_base_that_are_put_together_are_a_base(hosts: Callable[..., Remote], tmp_path: Path) -> None:
    first, second = hosts("first"), hosts("second")
    where = f"{first.address},{second.address}"
    training = Training(512)
    run = training.attach(tmp_path / "run", where, base_interval=10)
    run.resume()
    training.train(run, 20)
    wait_until(lambda: progress(first).base == progress(second).base == 20)
    expected = copy.deepcopy(training.model.state_dict())
    training.train(run, 25)
    (one,), (two,) = (list((tmp_path / name).iterdir()) for name in ("first", "second"))
    with pytest.raises(everstep.EverstepError):
        everstep.open(one).state(20)
    shutil.copytree(two, one, dirs_exist_ok=True)
    history = everstep.open(one)
    assert 20 in history.steps
    assert not equal(history.state(20)["model"], dict(expected))
    run.close()


def test_a_state_comes_over_as_many_connections_as_asked_for(hosts: Callable[..., Remote], tmp_path: Path) -> None:
    shadow = hosts("only")
    proxy = Proxy(shadow.port, lambda data, passed: data)
    training = Training(1 << 16)
    run = training.attach(tmp_path / "run", shadow.address)
    run.resume()
    training.train(run, 3)
    for num in (1, 3, 8):
        before = proxy.connections
        must_hold(held(run, proxy.address, num_streams=num), training, run)
        assert proxy.connections - before == num
    run.close()
    proxy.close()


def test_a_state_that_changes_on_the_way_is_not_taken(hosts: Callable[..., Remote], tmp_path: Path) -> None:
    first, second = hosts("first"), hosts("second")
    training = Training(512)
    run = training.attach(tmp_path / "run", f"{first.address},{second.address}")
    run.resume()
    training.train(run, 5)
    must_hold(held(run, f"{first.address},{second.address}"), training, run)
    proxy = Proxy(second.port, lambda data, passed: data)
    pump = proxy._pump
    proxy._pump = lambda source, target, meddle: pump(  # type: ignore[method-assign]
        source, target, meddle or (lambda data, passed: data[:-1] + bytes([data[-1] ^ 1]) if len(data) > 20_000 else data)
    )
    where = [first.address, proxy.address]
    with pytest.raises(everstep.EverstepError):
        offer = fetch.find_all(where, RunPath(run.path), run._opened.run)
        if offer is None:
            raise everstep.EverstepError("it was noticed on the way")
        offer.fetch()
    run.close()
    proxy.close()
