"""A world runs jobs on the ranks asked for, tells what failed, and leaves nothing behind."""

from __future__ import annotations

import os

import pytest
from workers import JobFailed, World


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_job_runs_on_the_ranks_asked_for_in_the_same_processes(world: World) -> None:
    four = world.run("jobs:say", "a", ranks=4)
    two = world.run("jobs:say", word="b", ranks=2)
    alone = world.run("jobs:say", "c", ranks=1)
    pids = [pid for _, _, pid in four]
    assert len(set(pids)) == 4
    assert four == [["a", rank, pids[rank]] for rank in range(4)]
    assert two == [["b", rank, pids[rank]] for rank in range(2)]
    assert alone == [["c", None, pids[0]]]


@pytest.mark.long
def test_a_rank_that_raises_is_quoted_and_the_next_job_runs_in_new_processes() -> None:
    with World(2) as world:
        before = [pid for _, _, pid in world.run("jobs:say", "a")]
        with pytest.raises(JobFailed, match="ValueError: a rank that fails"):
            world.run("jobs:fail_on", 1)
        assert all(gone(pid) for pid in before)
        after = [pid for _, _, pid in world.run("jobs:say", "a")]
        assert not set(before) & set(after)
    assert all(gone(pid) for pid in after)


@pytest.mark.long
def test_a_job_that_does_not_end_is_killed() -> None:
    with World(2) as world:
        pids = [pid for _, _, pid in world.run("jobs:say", "a")]
        with pytest.raises(JobFailed, match="rank 0: no answer"):
            world.run("jobs:wait_for_ever", timeout_s=1.0)
        assert all(gone(pid) for pid in pids)
