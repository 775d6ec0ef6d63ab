"""Every crash image of a run in snapshot mode restores to a step at or after the last one that was reported durable."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from crash_disk import Crash, Disk, Nothing, Pages, Recorder, Some
from crash_training import Eras, era_of, follower_in_process, wait_for_keeper
from test_crash_points import Checker, Promise, Recording, tree_of

from everstep.store import files
from support import crash


def record(root: str, **options: Any) -> Recording:
    """A short life: base 0, two pools (the layout changes), bases, retention, kills, a fork, a close, delta mode."""
    recorder, eras = Recorder(), Eras()
    os.makedirs(root)
    path = f"{root}/one"
    options = {
        "mode": "snapshot", "snapshot_interval": 1, "retention": {"bases": 2}, "base_interval": 3, "direct_io": False,
        **options,
    }  # fmt: skip
    with files.observe(recorder.observe, recorder.begin), follower_in_process():
        with era_of(path, eras, **options) as (run, train):
            train(4)
            wait_for_keeper(run)
            train(4)
            crash(run)
        with era_of(path, eras, **options) as (run, train):
            train(3)
            wait_for_keeper(run)
            crash(run)
        with era_of(path, eras, resume=10, **options) as (run, train):
            train(3)
            run.close()
        with era_of(path, eras, **options) as (run, train):
            train(2)
            crash(run)
        with era_of(path, eras, follower=False, direct_io=False) as (run, train):
            train(2)
            run.close()
    return Recording(root, eras, recorder.events)


def replay(recording: Recording, checker: Checker, *, every: int, variants: int, go_on_every: int, seed: int = 3) -> None:
    """Prefixes of the recorded events, each with several fates of what was not synced: torn writes, pages in any order."""
    disk, promise, seeds = Disk(recording.root), Promise(recording.eras), random.Random(seed)
    for index, recorded in enumerate(recording.events):
        disk.feed(recorded)
        if recorded.event.op == "note":
            promise.hear(recorded.event.path)
        if index % every and recorded.event.op not in ("unlink", "rename"):
            continue
        fates: list[Crash] = [Nothing()]
        if not disk.is_settled:
            kinds = [Some(seeds.randrange(1 << 30), disk.written), Pages(seeds.randrange(1 << 30))]
            fates += [Crash(), *(kinds[(index + i) % 2] for i in range(variants))]
        for i, how in enumerate(fates):
            try:
                checker.check(disk, how, promise, go_on=bool(go_on_every) and (checker.num_images + i) % go_on_every == 0)
            except Exception as e:
                last = [f"{r.event.op} {r.event.path} {r.event.target}" for r in recording.events[: index + 1][-12:]]
                raise AssertionError(
                    f"image {checker.num_images}: after event {index} ({type(how).__name__} {vars(how).get('seed', '')}): "
                    f"{type(e).__name__}: {e}\nlast events:\n  " + "\n  ".join(last)
                ) from e


def test_every_durable_byte_and_name_of_snapshot_mode_goes_through_the_one_module(shm: Path) -> None:
    recording = record(f"{shm}/live")
    disk = Disk(recording.root)
    for recorded in recording.events:
        disk.feed(recorded)
    there = tree_of(recording.root)
    del there["one/lock"]
    assert disk.tree(Crash()) == there


@pytest.mark.parametrize("pool_mode", ["direct", "disk"])
@pytest.mark.sampled(2)
def test_crash_points_of_a_short_run_restore_to_a_durable_step(pool_mode: str, shm: Path) -> None:
    recording = record(f"{shm}/live", pool_mode=pool_mode)
    checker = Checker(str(shm), verify_every=9)
    replay(recording, checker, every=8, variants=1, go_on_every=40)
    assert checker.num_images > 100
    assert checker.outcomes["restored"] > 0.8 * checker.num_images


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pool_mode", [None, "direct", "staged", "disk"])
def test_every_crash_point_of_a_short_run_restores_to_a_durable_step(pool_mode: str | None, shm: Path) -> None:
    checker = Checker(str(shm), all_steps=True, verify_every=5)
    seed = 0
    while seed < 2 or checker.num_images <= 1000:  # how much a run does, apart from its steps, depends on the machine
        recording = record(f"{shm}/live-{seed}", pool_mode=pool_mode, pool_slots=2 + seed % 2)
        replay(recording, checker, every=1, variants=6, go_on_every=40, seed=seed)
        seed += 1
