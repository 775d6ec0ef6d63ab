"""The pools of a rank: new files, and what is left of old ones."""

from __future__ import annotations

import os
from pathlib import Path

from everstep.store.medium import Mapped
from everstep.store.pools import Pools, read_pools, remove_pools
from pools import LAYOUT, RUN, SMALL, fields, fill


def pools_of(folder: Path, rank: int = 0, generation: int = 1, world_size: int = 1) -> Pools:
    return Pools(
        str(folder), run=RUN, rank=rank, generation=generation, world_size=world_size, num_slots=2, medium=Mapped
    )


def commit(pools: Pools, step: int, generation: int = 1) -> None:
    writer = pools.begin(step, LAYOUT, SMALL)
    fill(writer, SMALL, step)
    writer.finish(**fields(step, generation=generation))
    pools.committed(step)


def test_pools_that_a_killed_process_was_making_go_when_the_next_one_is_made(tmp_path: Path) -> None:
    mine, others = "rank-00000-g000001-0.pool.77-0.tmp", "rank-00001-g000001-0.pool.78-0.tmp"
    for name in (mine, others, "notes.tmp"):
        (tmp_path / name).write_bytes(bytes(100))
    pools = pools_of(tmp_path, world_size=2)
    commit(pools, 1)
    assert sorted(os.listdir(tmp_path)) == ["notes.tmp", "rank-00000-g000001-0.pool", others]
    (tmp_path / mine).write_bytes(bytes(100))
    pools.close()
    remove_pools(str(tmp_path), 0)
    assert sorted(os.listdir(tmp_path)) == ["notes.tmp", others]


def test_the_first_rank_clears_away_what_ranks_that_are_gone_have_left(tmp_path: Path) -> None:
    for name in ("rank-00001-g000001-0.pool.78-0.tmp", "rank-00002-g000001-0.pool", "notes.tmp"):
        (tmp_path / name).write_bytes(bytes(100))
    pools = pools_of(tmp_path, generation=2)
    commit(pools, 1, generation=2)
    assert sorted(os.listdir(tmp_path)) == ["notes.tmp", "rank-00000-g000002-0.pool"]
    pools.close()


def test_the_old_pool_goes_when_the_new_one_holds_a_step(tmp_path: Path) -> None:
    old = pools_of(tmp_path)
    commit(old, 1)
    old.close()
    new = pools_of(tmp_path, generation=2)
    writer = new.begin(2, LAYOUT, SMALL)
    assert [m.step for m in read_pools(str(tmp_path), RUN, 0)[0]] == [1]
    fill(writer, SMALL, 2)
    writer.finish(**fields(2, generation=2))
    new.committed(2)
    assert os.listdir(tmp_path) == ["rank-00000-g000002-0.pool"]
    assert [m.step for m in read_pools(str(tmp_path), RUN, 0)[0]] == [2]
    new.close()
