"""Several shadows in processes of their own, over loopback: trainer and shadows killed, stopped, started again."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import must_equal
from shadow_training import Program, ShadowHost, folder_of, kill, without_everstep

from everstep.store.runs import RunPath, read_listing

LARGE = {"setup": "mlp", "family": "adamw-fused", "size": 8}
"""Some of its atoms are large enough to have records of their own."""
Hosts = Callable[[int], list[ShadowHost]]


def where(hosts: list[ShadowHost]) -> str:
    return ",".join(host.address for host in hosts)


def lose_the_host(made: Program) -> None:
    """The next trainer is on another one: the log in memory is gone, the run's folder is there."""
    shutil.rmtree(folder_of(made.run))


@pytest.mark.parametrize(
    "case", [LARGE, pytest.param({"setup": "cnn", "family": "sgd-nesterov-foreach"}, marks=pytest.mark.long)], ids=str
)
@pytest.mark.long
def test_a_trainer_killed_again_and_again_goes_on_from_a_step_that_all_shadows_have(
    case: dict[str, Any], program: Callable[..., Program], hosts: Hosts
) -> None:
    made, choose = program(case, pause_s=0.004, shadow=where(hosts(2)), base_interval=40), random.Random(11)
    made.start(200, "save")
    for _ in range(6):
        goal = made.last.get("batches", 0) + choose.randint(5, 30)
        made.wait_now(lambda line, goal=goal: line["batches"] >= goal and line["folded_step"] >= 0)
        time.sleep(choose.uniform(0, 0.02))
        told, last = len(made.output()), made.kill()
        lose_the_host(made)
        resumed = made.start(200, "save")
        assert resumed >= last["received_step"], f"{last}, but resumed at {resumed}: {made.output()[told:]}"
        assert resumed == 0 or "from the memory of shadows at" in made.output()[told:]
    made.wait_ended()
    must_equal(made.result(), without_everstep(case, 200), "after 200 batches and 6 kills")


@pytest.mark.long
def test_one_shadow_killed_training_goes_on_and_a_new_one_gets_its_share_from_the_trainer(
    program: Callable[..., Program], hosts: Hosts
) -> None:
    _, second = both = hosts(2)
    made = program(LARGE, pause_s=0.004, shadow=where(both))
    made.start(30)
    made.wait_folded(30)
    kill(second.pid)
    shutil.rmtree(second.folder / "runs")  # with its disk
    made.order(60)
    made.wait_now(lambda line: line["batches"] == 60)
    second.start()
    made.order(2000)
    lost = made.wait(lambda line: line.get("unprotected_since") is not None)
    made.wait_now(lambda line: line["unprotected_since"] is None and line["folded_step"] > lost["step"])
    assert "UnprotectedWarning" in made.output() and "has lost what it held" in made.output()
    assert "protected again" in made.output()
    goal = made.last["batches"] + 10
    made.order(goal)
    last = made.wait_folded(goal)
    made.kill()
    lose_the_host(made)
    assert made.start(last["batches"] + 20, "save") == last["step"]
    made.wait_ended()
    must_equal(made.result(), without_everstep(LARGE, last["batches"] + 20), "after the loss of a shadow")


@pytest.mark.long
def test_without_one_of_them_the_state_comes_from_disk_and_it_says_which_and_why(
    program: Callable[..., Program], hosts: Hosts
) -> None:
    _, second = both = hosts(2)
    made = program(LARGE, shadow=where(both))
    made.start(30)
    made.wait_folded(30)
    made.kill()
    lose_the_host(made)
    kill(second.pid)
    told = len(made.output())
    # Shadows that ask before the first base is written make the trainer take a second one.
    newest = max(read_listing(RunPath(made.run)).timelines[1].bases)
    assert made.start(40, "save") == newest < 30, "the base that is on disk"
    assert f"nothing is taken from shadows: no shadow answers at {second.address}" in made.output()[told:]
    second.start()
    made.wait_ended()
    must_equal(made.result(), without_everstep(LARGE, 40), "from disk")


@pytest.mark.parametrize("on_lag", ["spill", pytest.param("wait", marks=pytest.mark.long)])
def test_one_stopped_the_other_keeps_little_and_both_give_the_same_step(
    on_lag: str, program: Callable[..., Program], hosts: Hosts, memory: Path
) -> None:
    first, second = both = hosts(2)
    made = program(LARGE, shadow=where(both), on_lag=on_lag, max_lag_bytes=2 << 20)
    made.start(30)
    made.wait_folded(30)
    os.kill(second.pid, signal.SIGSTOP)
    try:
        made.order(200)
        if on_lag == "wait":
            line = made.wait_now(lambda line: line["batches"] > 40)
            time.sleep(0.5)
            assert made.last["batches"] < 200, "training waits"
        else:
            line = made.wait_now(lambda line: line["batches"] == 200)
            assert line["spilled_steps"] > 20
        found = first.status(made.run)
        assert found["folded"] <= 31, "what the other has not received is not folded"
        assert found["received"] < 80, "and not much of it is kept: 2 MB for frames of which it has 80 KB each"
        made.kill()
    finally:
        os.kill(second.pid, signal.SIGCONT)
    lose_the_host(made)
    resumed = made.start(210, "save")
    assert 30 <= resumed <= found["received"]
    assert "from the memory of shadows at" in made.output()
    made.wait_ended()
    must_equal(made.result(), without_everstep(LARGE, 210), "after one was stopped")
