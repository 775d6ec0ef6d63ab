"""A data position under another number of ranks. Ranks are simulated: each has a loader and a pass of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from everstep import rng
from everstep.capture.loader import Pass, check_resizable, open_pass, open_resized_pass, resized_position
from everstep.data import Sampler, SeededDataset
from everstep.errors import CursorError, InexactWarning

# torchdata 0.11 calls it when a StatefulDataLoader is made
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Numbers(Dataset[int]):
    seeded_per_sample = True

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(num_samples: int, rank: int, world_size: int, batch_size: int | None, **options: Any) -> DataLoader[Any]:
    drop_last = options.get("drop_last", False)
    sampler = Sampler(num_samples, seed=3, drop_last=drop_last, rank=rank, world_size=world_size)
    return DataLoader(Numbers(num_samples), batch_size, sampler=sampler, **options)


def passes(
    num_samples: int, world_size: int, batch_size: int | None, state: dict[str, Any] | None, **options: Any
) -> list[Pass]:
    loaders = [loader_of(num_samples, r, world_size, batch_size, **options) for r in range(world_size)]
    if state is None:
        return [open_pass(loader, epoch=2, state=None) for loader in loaders]
    return [open_resized_pass(loader, epoch=2, state=state) for loader in loaders]


def read(ranks: list[Pass], num_batches: int) -> list[int]:
    """So many global batches, each in the global order; fewer if the pass ends."""
    seen: list[int] = []
    for _ in range(num_batches):
        batches = [next(current, None) for current in ranks]
        if any(batch is None for batch in batches):
            assert batches == [None] * len(ranks), "ranks make different numbers of steps"
            break
        rows = [torch.as_tensor(batch).reshape(-1).tolist() for batch in batches]
        seen += [index for sample in zip(*rows, strict=True) for index in sample]
    return seen


def agreed(ranks: list[Pass]) -> dict[str, Any]:
    """The position; every rank records the same."""
    states = [current.state() for current in ranks]
    assert all((s["sampler"], s["delivered"]) == (states[0]["sampler"], states[0]["delivered"]) for s in states)
    return states[-1]


def order_of(num_samples: int) -> list[int]:
    sampler = Sampler(num_samples, seed=3)
    sampler.set_epoch(2)
    return list(sampler)


@settings(deadline=None, max_examples=40)
@given(
    num_samples=st.integers(1, 60),
    phases=st.lists(
        st.tuples(st.integers(1, 5), st.one_of(st.none(), st.integers(1, 4)), st.integers(0, 4)), min_size=1, max_size=4
    ),
    last=st.integers(1, 5),
)
def test_passes_resized_any_number_of_times_read_each_sample_once(
    num_samples: int, phases: list[tuple[int, int | None, int]], last: int
) -> None:
    state = None
    seen: list[int] = []
    for world_size, batch_size, num_batches in [*phases, (last, 3, 1000)]:
        ranks = passes(num_samples, world_size, batch_size, state)
        seen += read(ranks, num_batches)
        state = agreed(ranks)
    order = order_of(num_samples)
    assert seen[:num_samples] == order
    num_twice = len(seen) - num_samples
    assert num_twice < max(w for w, *_ in [*phases, (last,)])
    assert seen[num_samples:] == [order[i % num_samples] for i in range(num_twice)]


@pytest.mark.parametrize("persistent", [False, True])
def test_what_workers_have_prefetched_is_not_lost_in_a_resize(persistent: bool) -> None:
    options: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": persistent}
    ranks = passes(70, 2, 4, None, **options)
    seen = read(ranks, 3)
    state = agreed(ranks)
    assert state["sampler"]["consumed"] == 24
    for world_size, batch_size, now in ((3, 2, options), (1, 8, {"num_workers": 0})):
        rest = read(passes(70, world_size, batch_size, state, **now), 1000)
        assert (seen + rest)[:70] == order_of(70)
    del ranks


def test_a_batch_left_out_at_the_end_is_read_where_it_fits_but_not_after_the_pass_has_ended() -> None:
    ranks = passes(30, 4, 2, None, drop_last=True)
    seen = read(ranks, 3)
    over = agreed(ranks)
    assert read(passes(30, 2, 2, over, drop_last=True), 1000) == order_of(30)[24:28]
    assert read(ranks, 1) == []
    ended = agreed(ranks)
    assert read(passes(30, 2, 2, ended, drop_last=True), 1000) == []
    for batch_size in (1, 2):
        again = [open_pass(loader_of(30, r, 4, batch_size, drop_last=True), epoch=2, state=ended) for r in range(4)]
        assert read(again, 1000) == []
    assert seen == order_of(30)[:24]


def test_a_resized_pass_is_recorded_and_resumed_as_any_other() -> None:
    ranks = passes(50, 4, 2, None)
    seen = read(ranks, 2)
    ranks = passes(50, 2, 3, agreed(ranks))
    seen += read(ranks, 2)
    state = agreed(ranks)
    assert state["delivered"] == 4
    ranks = [open_pass(loader_of(50, r, 2, 3), epoch=2, state=state) for r in range(2)]
    assert seen + read(ranks, 1000) == order_of(50)


def test_workers_of_a_resized_pass_are_seeded_from_the_generators_of_their_rank() -> None:
    class Draws(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(())

    def loader(rank: int) -> DataLoader[Any]:
        return DataLoader(Draws(24), 2, sampler=Sampler(24, rank=rank, world_size=2), num_workers=1)

    first = open_pass(loader(0), epoch=0, state=None)
    next(first)
    state = first.state()

    def drawn(rank: int) -> list[float]:
        rng.install(rng.derived(0, 1, rank))
        return list(next(open_resized_pass(loader(rank), epoch=0, state=state)).tolist())

    assert drawn(0) != drawn(1)
    assert drawn(0) == drawn(0)


def test_a_new_pass_starts_at_the_beginning_wherever_the_sampler_was() -> None:
    loader = loader_of(20, 0, 1, 4)
    current = open_pass(loader, epoch=2, state=None)
    assert read([current], 2) == read([open_pass(loader, epoch=2, state=None)], 2) == order_of(20)[:8]


def test_a_sampler_in_the_extras_tells_the_same_position_as_the_pass() -> None:
    loader = loader_of(20, 0, 2, 4, num_workers=1)
    current = open_pass(loader, epoch=2, state=None)
    next(current)
    assert loader.sampler.state_dict() == current.state()["sampler"]
    assert current.state()["sampler"]["consumed"] == 8


@pytest.mark.filterwarnings("error")
def test_the_end_of_a_pass_with_workers_that_leaves_a_batch_out_does_not_warn() -> None:
    def make() -> DataLoader[Any]:
        samples = [torch.zeros(()) for _ in range(10)]
        return DataLoader(samples, 4, drop_last=True, sampler=Sampler(10), num_workers=1)  # type: ignore[arg-type]

    current = open_pass(make(), epoch=0, state=None)
    next(current)
    with pytest.warns(InexactWarning):
        open_pass(make(), epoch=0, state=current.state())
    next(current)
    open_pass(make(), epoch=0, state=current.state())


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "num_samples", "told"),
    [
        (Sampler(20, seed=4), 20, "seed was 3, is 4"),
        (Sampler(21, seed=3), 21, "num_samples was 20, is 21"),
        (Sampler(20, seed=3, shuffle=False), 20, "shuffle was True, is False"),
        (None, 20, "kind was 'counted', is 'map'"),
    ],
)
def test_a_count_in_another_order_is_refused(sampler: Sampler | None, num_samples: int, told: str) -> None:
    current = open_pass(loader_of(20, 0, 1, 4), epoch=0, state=None)
    next(current)
    loader = DataLoader(Numbers(num_samples), 4, sampler=sampler)
    for reopen in (open_pass, open_resized_pass):
        with pytest.raises(CursorError, match=told):
            reopen(loader, epoch=0, state=current.state())


class Backwards(BatchSampler):
    """Takes all indices before it gives any: how many it gave is not how many it took."""

    def __iter__(self) -> Iterator[list[int]]:
        return reversed(list(super().__iter__()))


class Evens(Sampler):
    def __iter__(self) -> Iterator[int]:
        return (index for index in super().__iter__() if index % 2 == 0)


FIXED: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: DataLoader(Numbers(24), 3, shuffle=True),
    "DistributedSampler": lambda: DataLoader(Numbers(24), 3, sampler=DistributedSampler(Numbers(24), 2, 0)),
    "StatefulDataLoader": lambda: StatefulDataLoader(Numbers(24), 3, shuffle=True),
    "range": lambda: range(9),
    "Backwards": lambda: DataLoader(Numbers(24), batch_sampler=Backwards(Sampler(24), 3, False)),
    "Evens": lambda: DataLoader(Numbers(24), 3, sampler=Evens(24)),
}


@pytest.mark.parametrize("kind", FIXED)
def test_a_position_that_depends_on_the_number_of_ranks_is_refused_with_a_way_on(kind: str) -> None:
    loader = FIXED[kind]()
    current = open_pass(loader, epoch=0, state=None)
    next(current)
    state = current.state()
    way_on = r'4 ranks after 1 batches .* On 2 ranks .* cursor="drop": .*sampler=everstep\.data\.Sampler'
    with pytest.raises(CursorError, match=way_on):
        check_resizable(state, loader, 4, 2)
    check_resizable(state, loader, 4, 4)
    check_resizable(None, loader, 4, 2)
    position = {"pass": 5, "state": state, "generators": []}
    assert resized_position(position) == position


@pytest.mark.parametrize("kind", ["Backwards", "Evens"])
def test_a_sampler_whose_indices_are_not_taken_as_they_come_still_resumes_on_as_many_ranks(kind: str) -> None:
    whole = [batch.tolist() for batch in open_pass(FIXED[kind](), epoch=1, state=None)]
    current = open_pass(FIXED[kind](), epoch=1, state=None)
    next(current), next(current)
    assert current.state()["kind"] == "map"
    assert [batch.tolist() for batch in open_pass(FIXED[kind](), epoch=1, state=current.state())] == whole[2:]


def test_a_count_of_samples_is_resizable() -> None:
    loader = loader_of(24, 1, 4, 2)
    current = open_pass(loader, epoch=0, state=None)
    next(current)
    check_resizable(current.state(), loader, 4, 2)
    position = {"pass": 1, "state": current.state(), "generators": []}
    assert resized_position(position) == position


@pytest.mark.parametrize("kind", ["shuffle", "DistributedSampler", "StatefulDataLoader", "range"])
def test_before_a_pass_and_after_it_nothing_depends_on_the_number_of_ranks(kind: str) -> None:
    current = open_pass(FIXED[kind](), epoch=0, state=None)
    begun = {"pass": 3, "state": current.state(), "generators": []}
    assert resized_position(begun) == {"pass": 3, "state": None, "generators": []}
    for _ in current:
        pass
    ended = {"pass": 3, "state": current.state(), "generators": []}
    assert resized_position(ended) == {"pass": 4, "state": None, "generators": []}
    between = {"pass": 3, "state": None, "generators": [torch.zeros(2)]}
    assert resized_position(between) == {"pass": 3, "state": None, "generators": []}


def test_samples_seeded_by_themselves_are_the_same_on_any_number_of_ranks() -> None:
    class Draws(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.stack([torch.tensor(float(index)), torch.rand(())])

    def rows(world_size: int, state: dict[str, Any] | None, num_batches: int) -> tuple[dict[float, float], dict[str, Any]]:
        found: dict[float, float] = {}
        for rank in range(world_size):
            dataset = SeededDataset(Draws(24), seed=1)
            loader = DataLoader(dataset, 2, sampler=Sampler(24, rank=rank, world_size=world_size))
            current = (
                open_pass(loader, epoch=1, state=None)
                if state is None
                else open_resized_pass(loader, epoch=1, state=state)
            )
            for _ in range(num_batches):
                found |= {row[0]: row[1] for row in next(current).tolist()}
        return found, current.state()

    whole, _ = rows(1, None, 12)
    some, state = rows(3, None, 2)
    rest, _ = rows(2, state, 3)
    assert some | rest == whole
