"""everstep.data.Sampler: one order for any number of ranks, and a position that counts samples."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset

import everstep
from everstep.data import Sampler
from everstep.errors import CursorError, UsageError
from support import crash, equal


def order_of(num_samples: int, seed: int = 0, epoch: int = 0) -> list[int]:
    sampler = Sampler(num_samples, seed=seed, rank=0, world_size=1)
    sampler.set_epoch(epoch)
    return list(sampler)


def ranks(num_samples: int, world_size: int, state: dict[str, Any] | None = None, **options: Any) -> list[Sampler]:
    samplers = [Sampler(num_samples, rank=r, world_size=world_size, **options) for r in range(world_size)]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
    return samplers


def as_global_batch(batches: tuple[list[int], ...]) -> list[int]:
    """The ranks' batches, put together in the global order."""
    return [index for sample in zip(*batches, strict=True) for index in sample]


# -- the order --------------------------------------------------------------------------------------------------------


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    orders = {(seed, epoch): tuple(order_of(50, seed, epoch)) for seed in (-1, 0, 1) for epoch in (0, 1)}
    assert len(set(orders.values())) == 6
    torch.manual_seed(torch.initial_seed() + 1)
    for (seed, epoch), order in orders.items():
        assert tuple(order_of(50, seed, epoch)) == order
        assert sorted(order) == list(range(50))


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    assert order_of(12, seed=3, epoch=2) == [10, 9, 2, 6, 11, 5, 8, 3, 0, 4, 1, 7]


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    assert [list(s) for s in ranks(7, 2, shuffle=False)] == [[0, 2, 4, 6], [1, 3, 5, 0]]


def test_reading_the_order_draws_no_random_numbers_of_the_program() -> None:
    before = torch.get_rng_state()
    order_of(50)
    assert torch.equal(torch.get_rng_state(), before)


def test_global_batch_k_is_the_k_th_stretch_of_the_order_and_ranks_alternate_in_it() -> None:
    order = order_of(24)
    batches = [list(BatchSampler(s, 4, False)) for s in ranks(24, 3)]
    for k, parts in enumerate(zip(*batches, strict=True)):
        assert list(parts) == [order[12 * k + r : 12 * (k + 1) : 3] for r in range(3)]


# -- any sequence of world sizes, batch sizes and positions -----------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    num_samples=st.integers(0, 90),
    phases=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(0, 4)), max_size=5),
    last=st.tuples(st.integers(1, 6), st.integers(1, 5)),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_after_any_resizes_each_sample_is_read_once_in_the_same_global_order(
    num_samples: int, phases: list[tuple[int, int, int]], last: tuple[int, int], drop_last: bool, epoch: int
) -> None:
    order = order_of(num_samples, epoch=epoch)
    state = {**Sampler(num_samples).state_dict(), "epoch": epoch}
    seen: list[int] = []
    for world_size, batch_size, num_batches in [*phases, (*last, 1000)]:
        samplers = ranks(num_samples, world_size, state, drop_last=drop_last)
        all_batches = [list(BatchSampler(s, batch_size, False)) for s in samplers]
        assert len({len(b) for b in all_batches}) == 1, "ranks would make different numbers of steps"
        for parts in itertools.islice(zip(*all_batches, strict=True), num_batches):
            seen += as_global_batch(parts)
            for sampler in samplers:
                sampler.advance(batch_size)
        states = [s.state_dict() for s in samplers]
        assert all(s == states[0] for s in states)
        state = states[0]
        # Padding comes at the end of the epoch only, and nothing comes after it.
        assert seen[:num_samples] == order[: len(seen)]
        assert state["consumed"] == num_samples or state["consumed"] == len(seen) or drop_last
    # What was left over or read twice at the end is less than one sample a rank, of the phase that got there.
    assert abs(len(seen) - num_samples) < max(w for w, *_ in [*phases, last])
    assert seen[num_samples:] == [order[i % num_samples] for i in range(len(seen) - num_samples)]
    if drop_last:
        assert max(Counter(seen).values(), default=1) == 1


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("num_samples", "world_size"), [(12, 4), (13, 4), (15, 4), (2, 5), (0, 3), (1, 1)])
def test_every_rank_gets_as_many_indices_as_len_says(num_samples: int, world_size: int, drop_last: bool) -> None:
    samplers = ranks(num_samples, world_size, drop_last=drop_last)
    assert {len(list(s)) for s in samplers} == {len(s) for s in samplers} == {samplers[0].num_left}
    read = Counter(index for s in samplers for index in s)
    assert len(s := samplers[0]) == (num_samples // world_size if drop_last else -(-num_samples // world_size)), s
    if not drop_last:
        assert sorted(read) == list(range(num_samples))
    assert sum(read.values()) - len(read) == (0 if drop_last else len(s) * world_size - num_samples)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_samples", [48, 49, 50, 55])
def test_a_constant_global_batch_stays_the_same_under_any_number_of_ranks(num_samples: int, drop_last: bool) -> None:
    def global_batches(world_size: int, consumed: int) -> list[list[int]]:
        state = {**Sampler(num_samples).state_dict(), "consumed": consumed}
        samplers = ranks(num_samples, world_size, state, drop_last=drop_last)
        batches = [list(BatchSampler(s, 8 // world_size, drop_last)) for s in samplers]
        return [as_global_batch(parts) for parts in zip(*batches, strict=True)]

    whole = global_batches(4, 0)
    for world_size in (1, 2, 4, 8):
        rest = global_batches(world_size, 24)
        assert rest[:3] == whole[3:6]
        assert len(rest) == len(whole) - 3


# -- in a loop of one's own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_of_ones_own_counts_what_it_was_given_not_what_workers_have_asked_for(num_workers: int) -> None:
    sampler = Sampler(range(20), rank=1, world_size=2)
    loader = DataLoader(range(20), batch_size=3, sampler=sampler, num_workers=num_workers)  # type: ignore[arg-type]
    batches = iter(loader)
    first = [next(batches).tolist() for _ in range(2)]
    sampler.advance(6)
    assert sampler.state_dict()["consumed"] == 12
    resumed = Sampler(range(20), rank=1, world_size=2)
    resumed.load_state_dict(sampler.state_dict())
    rest = list(BatchSampler(resumed, 3, False))
    assert first + rest == list(BatchSampler(Sampler(20, rank=1, world_size=2), 3, False))


def test_another_epoch_starts_at_its_beginning_and_the_same_one_goes_on() -> None:
    sampler = Sampler(10)
    sampler.set_epoch(2)
    sampler.advance(4)
    sampler.set_epoch(2)
    assert list(sampler) == order_of(10, epoch=2)[4:]
    sampler.set_epoch(3)
    assert list(sampler) == order_of(10, epoch=3)


def test_the_position_never_passes_the_end() -> None:
    (sampler,) = [s for s in ranks(10, 4) if s.rank == 3]
    sampler.advance(8)
    assert sampler.consumed == 10
    assert list(sampler) == []


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (Sampler(10, seed=1), "seed was 0, is 1"),
        (Sampler(11), "num_samples was 10, is 11"),
        (Sampler(10, shuffle=False), "shuffle was True, is False"),
    ],
)
def test_a_position_in_another_order_is_refused(other: Sampler, told: str) -> None:
    with pytest.raises(CursorError, match=told):
        other.load_state_dict(Sampler(10).state_dict())


@pytest.mark.parametrize("place", [(0, None), (None, 2), (2, 2), (-1, 2)])
def test_a_place_that_cannot_be_is_refused(place: tuple[int | None, int | None]) -> None:
    with pytest.raises(UsageError, match="rank"):
        Sampler(10, rank=place[0], world_size=place[1])


def test_rank_and_world_size_come_from_the_process_group_also_if_it_is_made_later(monkeypatch: Any) -> None:
    sampler = Sampler(10)
    assert (sampler.rank, sampler.world_size) == (0, 1)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 3)
    assert list(sampler) == list(Sampler(10, rank=2, world_size=3))


def test_one_of_many_processes_without_a_process_group_is_not_taken_for_the_only_one(monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    sampler = Sampler(10)
    with pytest.raises(UsageError, match=r"WORLD_SIZE is 4.*init_process_group first"):
        list(sampler)
    assert len(Sampler(10, rank=1, world_size=4)) == 3


# -- in a run ---------------------------------------------------------------------------------------------------------

NUM_SAMPLES, NUM_EPOCHS = 26, 2


class Samples(Dataset[Any]):
    """Each sample is its index and a vector of its own."""

    seeded_per_sample = True

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, torch.sin(torch.arange(4) + float(index))


def train(
    path: Any, *, batch_size: int, num_workers: int = 0, stop_after: int | None = None, kept: bool = False, **place: int
) -> tuple[list[Any], Any]:
    """(epoch, indices, loss) of every step up to the end or a crash, and all state at the end."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = Sampler(NUM_SAMPLES, seed=7, **place)  # type: ignore[arg-type]
    loader = DataLoader(Samples(), batch_size, sampler=sampler, num_workers=num_workers)
    steps: list[Any] = []
    extras = {"sampler": sampler} if kept else {}
    run = everstep.attach(model, optimizer, path, extras=extras, quiet=True, follower=False, durability="os")
    for indices, x in run.steps(loader, epochs=NUM_EPOCHS):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append((run.epoch, indices.tolist(), loss.item()))
        if run.step == stop_after:  # a step more than that is under way, and is lost
            crash(run)
            return steps[:-1], None
    run.close()
    return steps, [model.state_dict(), optimizer.state_dict(), sampler.state_dict(), torch.get_rng_state()]


@pytest.mark.parametrize(("num_workers", "kept"), [(0, False), (2, False), (0, True)], ids=["alone", "workers", "in extras"])
def test_a_run_over_a_sampler_goes_on_bit_for_bit_after_a_crash(tmp_path: Any, num_workers: int, kept: bool) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers, "kept": kept}
    whole, end = train(tmp_path / "whole", **options)
    assert [i for epoch, indices, _ in whole for i in indices if epoch == 1] == order_of(NUM_SAMPLES, 7, 1)
    for stops in ([3], [7, 9]):  # an epoch has 7 steps
        path = tmp_path / f"crashed after {stops}"
        steps = [step for stop in stops for step in train(path, stop_after=stop, **options)[0]]
        rest, found = train(path, **options)
        assert steps + rest == whole
        assert equal(end, found) == []


def test_a_run_over_a_sampler_goes_on_at_the_same_sample_on_other_ranks_and_batches(tmp_path: Any) -> None:
    path = tmp_path / "run"
    first, _ = train(path, batch_size=2, stop_after=3, rank=1, world_size=4)
    second, _ = train(path, batch_size=1, stop_after=4, rank=0, world_size=2)
    third, _ = train(path, batch_size=5, rank=0, world_size=1)
    order = order_of(NUM_SAMPLES, 7, 0)
    assert [indices for _, indices, _ in first] == [order[1 + 8 * k : 8 + 8 * k : 4] for k in range(3)]
    assert [indices for _, indices, _ in second] == [[order[24]]]
    assert third == [step for step in third if step[0] == 1], "every sample of the first epoch had been read"
    assert [i for _, indices, _ in third for i in indices] == order_of(NUM_SAMPLES, 7, 1)
