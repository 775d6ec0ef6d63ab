from __future__ import annotations

import copy
import gc
import itertools
import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from everstep import data
from everstep.capture.loader import Pass, generator_states, open_pass, set_generator_states
from everstep.data import SeededDataset
from everstep.errors import CursorError, EverstepError, InexactWarning, SlowResumeWarning

# torchdata 0.11 calls it when a StatefulDataLoader is made
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

NUM_SAMPLES = 23
NUM_EPOCHS = 3

Make = Callable[[], Any]


class Samples(Dataset[torch.Tensor]):
    """Each sample is its index and a number from every global generator; loads in this process are counted."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples
        self.num_loads = 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.num_loads += 1
        return torch.tensor([float(index), torch.rand(()).item(), np.random.rand(), random.random()])


# ------------------------------------------------------------------------------ a training loop, with and without us


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def get_rng() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_rng(rng: tuple[Any, ...]) -> None:
    torch.set_rng_state(rng[0])
    np.random.set_state(rng[1])
    random.setstate(rng[2])


def train_on(batch: Any) -> list[float]:
    """What the body of the loop does: it draws random numbers of its own, as dropout would."""
    content = batch.flatten().tolist() if isinstance(batch, torch.Tensor) else [float(batch)]
    return [*content, torch.rand(()).item(), np.random.rand(), random.random()]


def fingerprint(loader: Any) -> list[Any]:
    """Everything that decides what comes next."""
    t, (_, key, *rest), r = get_rng()
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    own = [getattr(part, "generator", None) for part in (loader, sampler, inner)]
    return [t.tolist(), key.tolist(), rest, r, [None if g is None else g.get_state().tolist() for g in own]]


@dataclass
class Position:
    """What a commit keeps: the caller's part and ours."""

    epoch: int
    state: dict[str, Any] | None
    generators: list[torch.Tensor]
    rng: tuple[Any, ...]


@dataclass
class History:
    rows: list[list[float]] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    end: list[Any] = field(default_factory=list)
    num_loads: int = 0


def plain_run(make: Make, num_epochs: int = NUM_EPOCHS, stop_pass_at: int | None = None) -> History:
    """The loop as a user writes it without Everstep."""
    seed_all(5)
    loader = make()
    run = History()
    for epoch in range(num_epochs):
        for part in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        for number, batch in enumerate(loader, 1):
            run.rows.append(train_on(batch))
            if number == stop_pass_at:
                break
    run.end = fingerprint(loader)
    return run


def our_run(
    make: Make,
    position: Position | None = None,
    num_epochs: int = NUM_EPOCHS,
    stop_pass_at: int | None = None,
) -> History:
    """The same loop through open_pass, from the start or from a position, with a commit after every batch."""
    seed_all(5 if position is None else 999)
    loader = make()
    run = History()
    handed_out: list[tuple[Any, Any]] = []

    def commit(state: dict[str, Any] | None, epoch: int) -> None:
        stored = as_stored(state)
        handed_out.append((state, stored))
        run.positions.append(Position(epoch, stored, [g.clone() for g in generator_states(loader)], get_rng()))

    first = 0
    if position is None:
        commit(None, 0)
    else:
        first = position.epoch
        if position.state is None:
            set_generator_states(loader, position.generators)
    for epoch in range(first, num_epochs):
        resumed = position is not None and epoch == first
        if resumed and position.state is None:
            set_rng(position.rng)
        current = open_pass(loader, epoch=epoch, state=position.state if resumed else None)
        if resumed and position.state is not None:
            set_rng(position.rng)
        if current.delivered != stop_pass_at:
            for batch in current:
                run.rows.append(train_on(batch))
                commit(current.state(), epoch)
                if current.delivered == stop_pass_at:
                    break
        del current
    run.end = fingerprint(loader)
    run.num_loads = getattr(getattr(loader, "dataset", None), "num_loads", 0)
    for state, stored in handed_out:
        assert same(state, stored), "a state was changed after it had been handed out"
    return run


def as_stored(value: Any) -> Any:
    """A copy of a state as an encoder without pickle would bring it back."""
    if isinstance(value, dict):
        assert all(type(key) is str for key in value)
        return {key: as_stored(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(as_stored(part) for part in value)
    if type(value) is torch.Tensor:
        return value.clone()
    if type(value) is np.ndarray:
        return value.copy()
    assert value is None or type(value) in (str, bytes, float, bool, int), type(value)
    assert type(value) is not int or -(2**63) <= value < 2**64
    return value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else a == b


def assert_resumes_exactly(make: Make, stops: Any = None, **loop: Any) -> None:
    """From every position (or those in stops) the rest of the run equals the run without Everstep."""
    reference = plain_run(make, **loop)
    whole = our_run(make, **loop)
    assert whole.rows == reference.rows
    assert whole.end == reference.end
    for step in range(len(whole.positions)) if stops is None else sorted(set(stops)):
        resumed = our_run(make, whole.positions[step], **loop)
        assert resumed.rows == reference.rows[step:], f"resumed at step {step}"
        assert resumed.end == reference.end, f"resumed at step {step}"
        assert len(resumed.positions) == len(reference.rows) - step
        if step == 2 and len(resumed.positions) > 3:  # a second resume, from a position of the resumed run
            again = our_run(make, resumed.positions[2], **loop)
            assert again.rows == reference.rows[step + 3 :], f"resumed at step {step}, and again three steps later"
            assert again.end == reference.end


# ------------------------------------------------------------------------------ map-style loaders


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(77)


KINDS: dict[str, Callable[..., DataLoader[Any]]] = {
    "sequential": lambda d, g, **kw: DataLoader(d, 4, generator=g, **kw),
    "shuffle": lambda d, g, **kw: DataLoader(d, 4, shuffle=True, generator=g, **kw),
    "drop_last": lambda d, g, **kw: DataLoader(d, 4, shuffle=True, drop_last=True, generator=g, **kw),
    "replacement": lambda d, g, **kw: DataLoader(
        d, 4, sampler=RandomSampler(d, replacement=True, num_samples=70, generator=g), generator=g, **kw
    ),
    "several_rounds": lambda d, g, **kw: DataLoader(
        d, 8, sampler=RandomSampler(d, num_samples=50, generator=g), generator=g, **kw
    ),
    "weighted": lambda d, g, **kw: DataLoader(
        d, 4, sampler=WeightedRandomSampler(np.linspace(0.1, 1, len(d)).tolist(), 23, generator=g), **kw
    ),
    "subset": lambda d, g, **kw: DataLoader(d, 4, sampler=SubsetRandomSampler(range(15), generator=g), **kw),
    "batch_sampler": lambda d, g, **kw: DataLoader(
        d, batch_sampler=BatchSampler(RandomSampler(d, generator=g), 5, False), **kw
    ),
    "no_batches": lambda d, g, **kw: DataLoader(d, batch_size=None, shuffle=True, generator=g, **kw),
    "distributed": lambda d, g, **kw: DataLoader(
        d, 4, sampler=DistributedSampler(d, num_replicas=2, rank=1, shuffle=True, seed=3), generator=g, **kw
    ),
    "counted": lambda d, g, **kw: DataLoader(d, 4, sampler=data.Sampler(d, rank=1, world_size=2), generator=g, **kw),
    "counted_drop_last": lambda d, g, **kw: DataLoader(d, 4, drop_last=True, sampler=data.Sampler(d, seed=3), **kw),
    "counted_no_batches": lambda d, g, **kw: DataLoader(
        d, None, sampler=data.Sampler(d, rank=0, world_size=3, drop_last=True), generator=g, **kw
    ),
}


WITH_WORKERS_IN_SHORT = ("shuffle", "several_rounds", "batch_sampler", "no_batches", "counted")
"""Processes take time: the other kinds with workers are for the long run."""


@pytest.mark.parametrize("own_generator", [False, True], ids=["global", "generator"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_map_style_loader_resumes_exactly_at_every_batch(kind: str, own_generator: bool) -> None:
    assert_resumes_exactly(lambda: KINDS[kind](Samples(), generator() if own_generator else None))


@pytest.mark.parametrize("persistent", [False, True], ids=["workers", "persistent_workers"])
@pytest.mark.parametrize("own_generator", [False, True], ids=["global", "generator"])
@pytest.mark.parametrize(
    "kind", [k if k in WITH_WORKERS_IN_SHORT else pytest.param(k, marks=pytest.mark.long) for k in KINDS]
)
@pytest.mark.sampled(3)
def test_a_map_style_loader_with_workers_resumes_exactly(kind: str, own_generator: bool, persistent: bool) -> None:
    def make() -> DataLoader[Any]:
        g = generator() if own_generator else None
        return KINDS[kind](SeededDataset(Samples(), seed=1), g, num_workers=2, persistent_workers=persistent)

    num_batches = len(make())
    assert_resumes_exactly(make, stops=[2, num_batches, 2 * num_batches - 1])


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_pinned_memory_makes_no_difference(num_workers: int) -> None:
    def make() -> DataLoader[Any]:
        return KINDS["shuffle"](SeededDataset(Samples()), None, num_workers=num_workers, pin_memory=True)

    assert_resumes_exactly(make, stops=[0, 4, 6])


@pytest.mark.parametrize("own_generator", [False, True], ids=["global", "generator"])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
@pytest.mark.sampled(2)
def test_passes_broken_off_in_the_middle_resume_exactly(workers: dict[str, Any], own_generator: bool) -> None:
    def make() -> DataLoader[Any]:
        return KINDS["replacement"](SeededDataset(Samples()), generator() if own_generator else None, **workers)

    assert_resumes_exactly(make, stops=[0, 2, 3, 5, 6], stop_pass_at=3)


@pytest.mark.parametrize("kind", ["shuffle", "no_batches"])
def test_a_resumed_pass_loads_only_the_samples_that_are_left(kind: str) -> None:
    make: Make = lambda: KINDS[kind](Samples(), None)  # noqa: E731
    whole = our_run(make, num_epochs=1)
    assert whole.num_loads == NUM_SAMPLES
    batch_size = make().batch_size or 1
    for delivered, position in enumerate(whole.positions):
        assert our_run(make, position, num_epochs=1).num_loads == max(0, NUM_SAMPLES - delivered * batch_size)


def test_prefetched_batches_do_not_count_as_delivered() -> None:
    loader = KINDS["sequential"](SeededDataset(Samples()), None, num_workers=2, prefetch_factor=2)
    current = open_pass(loader, epoch=0, state=None)
    next(current)
    time.sleep(0.2)  # all that may be prefetched has been
    assert current.delivered == 1
    assert current.state()["delivered"] == 1


def test_the_order_stays_exact_with_another_number_of_workers() -> None:
    def make(num_workers: int) -> DataLoader[Any]:
        return KINDS["replacement"](SeededDataset(Samples()), generator(), num_workers=num_workers)

    reference = plain_run(lambda: make(0))
    for before, after in ((0, 2), (2, 0)):
        position = our_run(lambda n=before: make(n)).positions[7]  # type: ignore[misc]
        resumed = our_run(lambda n=after: make(n), position)  # type: ignore[misc]
        assert [row[:16] for row in resumed.rows[:11]] == [row[:16] for row in reference.rows[7:18]]


# ------------------------------------------------------------------------------ samplers of the user's own


class ShufflesInIter(Sampler[int]):
    """Draws when iter() is called, not at its first index; a loader with workers calls iter() twice."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        order = np.random.permutation(self.num_samples).tolist()
        return iter(order)


class ShufflesEveryRound(ShufflesInIter):
    """Goes round its samples several times and draws again for each round, from the global generators in turn."""

    def __len__(self) -> int:
        return 4 * self.num_samples

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.num_samples))
        yield from torch.randperm(self.num_samples).tolist()
        random.shuffle(order)
        yield from order
        yield from np.random.permutation(self.num_samples).tolist()
        yield from torch.randperm(self.num_samples).tolist()


class DrawsEveryIndex(ShufflesInIter):
    def __iter__(self) -> Iterator[int]:
        for _ in range(self.num_samples):
            yield random.randrange(self.num_samples)


class HasNumpyGenerator(ShufflesInIter):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.permutation(self.num_samples).tolist()


class HasRandomState(HasNumpyGenerator):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.RandomState(3)  # type: ignore[assignment]


class HasPythonRandom(ShufflesInIter):
    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        yield from self._random.sample(range(self.num_samples), self.num_samples)


class CountsEpochs(ShufflesInIter):
    """Nobody tells it the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        yield from torch.randperm(self.num_samples, generator=generator).tolist()


class CountsEpochsAtTheEnd(CountsEpochs):
    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(self.num_samples, generator=generator).tolist()
        self.epoch += 1


class HasState(CountsEpochs):
    """Its number is hidden from whoever does not ask for its state."""

    def __init__(self) -> None:
        super().__init__()
        self.past = [0]

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(len(self.past))
        self.past.append(0)
        yield from torch.randperm(self.num_samples, generator=generator).tolist()

    def state_dict(self) -> dict[str, object]:
        return {"past": list(self.past)}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.past = list(state["past"])


OWN_SAMPLERS = [
    ShufflesInIter, ShufflesEveryRound, HasNumpyGenerator, HasRandomState, HasPythonRandom, CountsEpochs,
    CountsEpochsAtTheEnd, HasState,
]  # fmt: skip


@pytest.mark.parametrize("sampler", [*OWN_SAMPLERS, DrawsEveryIndex])
def test_a_sampler_of_the_users_own_resumes_exactly(sampler: type[Sampler[int]]) -> None:
    with warnings.catch_warnings():
        if sampler is DrawsEveryIndex:
            warnings.simplefilter("ignore", InexactWarning)  # more draws than are kept, but old ones do not matter
        assert_resumes_exactly(lambda: DataLoader(Samples(), 4, sampler=sampler()))


@pytest.mark.parametrize(
    "sampler", [*OWN_SAMPLERS[:2], *(pytest.param(s, marks=pytest.mark.long) for s in OWN_SAMPLERS[2:]), DrawsEveryIndex]
)
@pytest.mark.sampled(3)
def test_a_sampler_of_the_users_own_resumes_exactly_with_workers(sampler: type[Sampler[int]]) -> None:
    num_batches = len(sampler()) // 4  # type: ignore[arg-type]
    with warnings.catch_warnings():
        if sampler is DrawsEveryIndex:
            warnings.simplefilter("ignore", InexactWarning)
        assert_resumes_exactly(
            lambda: DataLoader(SeededDataset(Samples()), 4, sampler=sampler(), num_workers=2),
            stops=[1, 4, num_batches - 2, num_batches, num_batches + 7],
        )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_draws_before_it_is_asked_for_an_index_resumes_exactly(num_workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(SeededDataset(Samples()), None, sampler=ShufflesInIter(), num_workers=num_workers)

    assert_resumes_exactly(make, stops=[1, 9, NUM_SAMPLES, NUM_SAMPLES + 5])


def test_a_sampler_that_was_ahead_of_the_loop_resumes_exactly_without_workers() -> None:
    def make(num_workers: int) -> DataLoader[Any]:
        samples = SeededDataset(Samples())
        return DataLoader(samples, 4, sampler=ShufflesEveryRound(), num_workers=num_workers)

    reference = plain_run(lambda: make(2), num_epochs=1)
    whole = our_run(lambda: make(2), num_epochs=1)
    for step in (2, 8, 14):  # a new round is among the four batches that were prefetched
        resumed = our_run(lambda: make(0), whole.positions[step], num_epochs=1)
        assert resumed.rows[:4] == reference.rows[step : step + 4]


def test_a_sampler_that_draws_more_often_than_is_recorded_warns_when_it_resumes() -> None:
    make: Make = lambda: DataLoader(Samples(), 2, sampler=DrawsEveryIndex())  # noqa: E731
    whole = our_run(make)
    our_run(make, whole.positions[3])
    with pytest.warns(InexactWarning, match=r"DrawsEveryIndex\) draws .* again and again .* keeps as an attribute"):
        our_run(make, whole.positions[9])
    assert len(whole.positions[9].state["pass"]["draws"]) <= 5  # type: ignore[index]


def test_a_generator_that_somebody_else_draws_from_resumes_exactly() -> None:
    def make() -> DataLoader[Any]:
        shared = generator()

        def collate(samples: list[Any]) -> torch.Tensor:
            return torch.stack(samples) + torch.rand((), generator=shared)

        return DataLoader(Samples(), 4, shuffle=True, generator=shared, collate_fn=collate)

    assert_resumes_exactly(make)


def test_a_generator_that_belongs_to_the_dataset_resumes_exactly() -> None:
    class Noisy(Samples):
        def __init__(self) -> None:
            super().__init__()
            self.rng = np.random.default_rng(8)

        def __getitem__(self, index: Any) -> torch.Tensor:
            return super().__getitem__(index) + self.rng.random()

    assert_resumes_exactly(lambda: DataLoader(Subset(Noisy(), range(20)), 4, shuffle=True))


# ------------------------------------------------------------------------------ between passes, and at the end


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("own_generator", [False, True], ids=["global", "generator"])
@pytest.mark.parametrize("how", ["ended pass", "generator states"])
def test_a_position_between_passes_resumes_exactly(how: str, own_generator: bool, workers: dict[str, Any]) -> None:
    def make() -> DataLoader[Any]:
        # No batch is left incomplete, so that only the end of the pass makes RandomSampler shuffle once more.
        return KINDS["shuffle"](SeededDataset(Samples(24)), generator() if own_generator else None, **workers)

    reference = plain_run(make)
    seed_all(5)
    loader = make()
    current = open_pass(loader, epoch=0, state=None)
    num_rows = len([train_on(batch) for batch in current])
    if how == "ended pass":
        position = Position(0, as_stored(current.state()), [], get_rng())
    else:
        position = Position(1, None, as_stored(generator_states(loader)), get_rng())
    resumed = our_run(make, position)
    assert resumed.rows == reference.rows[num_rows:]
    assert resumed.end == reference.end


def test_a_pass_resumed_after_its_last_batch_yields_nothing_and_the_next_is_right() -> None:
    make: Make = lambda: KINDS["shuffle"](Samples(), generator())  # noqa: E731
    whole = our_run(make)
    at_end = whole.positions[6]
    assert at_end.epoch == 0
    loader = make()
    assert list(open_pass(loader, epoch=0, state=at_end.state)) == []
    set_rng(at_end.rng)
    assert next(open_pass(loader, epoch=1, state=None)).flatten().tolist() == whole.rows[6][:16]


def test_a_position_before_the_first_batch_resumes_exactly() -> None:
    for kind, num_workers in itertools.product(("shuffle", "replacement"), (0, 2)):

        def make(kind: str = kind, num_workers: int = num_workers) -> DataLoader[Any]:
            return KINDS[kind](SeededDataset(Samples()), None, num_workers=num_workers)

        reference = plain_run(make)
        seed_all(5)
        opened = open_pass(make(), epoch=0, state=None)
        position = Position(0, as_stored(opened.state()), [], get_rng())
        assert our_run(make, position).rows == reference.rows


# ------------------------------------------------------------------------------ what is done to the user's loader


class TellsItsEpoch:
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_set_epoch_is_called_once_on_each_object_that_has_it() -> None:
    class EpochSamples(Samples, TellsItsEpoch):
        def __init__(self) -> None:
            Samples.__init__(self)
            TellsItsEpoch.__init__(self)

    class EpochSampler(ShufflesInIter, TellsItsEpoch):
        def __init__(self) -> None:
            ShufflesInIter.__init__(self)
            TellsItsEpoch.__init__(self)

    class EpochLoader(DataLoader[Any]):
        def set_epoch(self, epoch: int) -> None:
            self.epochs = [*getattr(self, "epochs", []), epoch]

    samples, sampler = EpochSamples(), EpochSampler()
    loader = EpochLoader(samples, 4, sampler=sampler)
    position = None
    for epoch in (0, 1):
        current = open_pass(loader, epoch=epoch, state=None)
        next(current)
        position = current.state()
    open_pass(loader, epoch=1, state=position)
    assert samples.epochs == sampler.epochs == loader.epochs == [0, 1, 1]

    inner, wrapped = EpochSampler(), EpochSamples()
    loader = EpochLoader(Subset(SeededDataset(wrapped), range(9)), batch_sampler=BatchSampler(inner, 2, False))
    open_pass(loader, epoch=4, state=None)
    assert wrapped.epochs == inner.epochs == [4]


def test_the_users_loader_is_not_changed() -> None:
    loader = KINDS["shuffle"](SeededDataset(Samples()), generator(), num_workers=2, persistent_workers=True)
    before = dict(vars(loader))
    current = open_pass(loader, epoch=0, state=None)
    next(current)
    open_pass(loader, epoch=0, state=current.state())
    assert vars(loader) == before


class WorkerOf(Dataset[int]):
    seeded_per_sample = True

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        assert info is not None
        return info.seed


def test_persistent_workers_are_used_again_by_later_passes_and_go_with_the_loader() -> None:
    gc.collect()
    others = torch.multiprocessing.active_children()
    loader = DataLoader(WorkerOf(), 1, num_workers=2, persistent_workers=True)
    seeds = [sorted({int(s) for s in open_pass(loader, epoch=e, state=None)}) for e in range(3)]
    assert seeds[0] == seeds[1] == seeds[2]
    children = [child for child in torch.multiprocessing.active_children() if child not in others]
    assert len(children) == 2
    del loader
    assert not any(child.is_alive() for child in children)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_started_for_a_resumed_pass_have_the_seeds_of_the_first_ones(persistent: bool) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(WorkerOf(), 1, shuffle=True, num_workers=2, persistent_workers=persistent)

    whole = our_run(make)
    resumed = our_run(make, whole.positions[11])
    assert [row[1:] for row in resumed.rows] == [row[1:] for row in whole.rows[11:]]
    for rows in (slice(0, 5), slice(5, 13)):  # the rest of the pass, and the next
        assert {row[0] for row in resumed.rows[rows]} == {row[0] for row in whole.rows[11:][rows]}


# ------------------------------------------------------------------------------ warnings


def resume_in_the_middle(make: Make, delivered: int = 2) -> Pass:
    current = open_pass(make(), epoch=0, state=None)
    for _ in range(delivered):
        next(current)
    return open_pass(make(), epoch=0, state=as_stored(current.state()))


def test_workers_over_a_dataset_that_is_not_seeded_warn_of_what_is_not_reproduced() -> None:
    with pytest.warns(InexactWarning, match=r"2 workers .* random augmentations .*everstep\.data\.SeededDataset"):
        resume_in_the_middle(lambda: KINDS["shuffle"](Samples(), None, num_workers=2))
    with pytest.warns(InexactWarning, match="begun with 0 workers goes on with 2"):
        current = open_pass(KINDS["shuffle"](Samples(), None), epoch=0, state=None)
        next(current)
        open_pass(KINDS["shuffle"](Samples(), None, num_workers=2), epoch=0, state=current.state())


class Deterministic(Samples):
    seeded_per_sample = True


@pytest.mark.parametrize(
    "dataset",
    [
        SeededDataset(Samples()),
        Subset(SeededDataset(Samples()), range(20)),
        ConcatDataset([SeededDataset(Samples()), Deterministic()]),
        Deterministic(),
    ],
    ids=["seeded", "subset of seeded", "all seeded", "says so itself"],
)
def test_workers_over_a_seeded_dataset_do_not_warn(dataset: Dataset[Any]) -> None:
    resume_in_the_middle(lambda: DataLoader(dataset, 4, num_workers=1))


def test_without_workers_nothing_warns() -> None:
    resume_in_the_middle(lambda: KINDS["shuffle"](Samples(), None))


def test_delivery_out_of_order_warns() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(SeededDataset(Samples()), 4, num_workers=1, in_order=False)

    with pytest.warns(InexactWarning, match="in_order=True"):
        resume_in_the_middle(make)


# ------------------------------------------------------------------------------ positions that do not fit


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda: KINDS["shuffle"](Samples(40), None), "num_batches was 6, is 10"),
        (lambda: KINDS["shuffle"](Samples(22), None), "num_samples was 23, is 22"),
        (lambda: DataLoader(Samples(), 4), r"sampler was 'BatchSampler\(RandomSampler\)'"),
        (lambda: DataLoader(Samples(), 5, shuffle=True, drop_last=True), "batch_size was 4, is 5"),
        (lambda: DataLoader(Numbers(23), 4), "kind was 'map', is 'consumed'"),
        (lambda: StatefulDataLoader(Samples(), 4, shuffle=True), "kind was 'map', is 'asked'"),
        (lambda: range(23), "type was 'DataLoader', is 'range'"),
    ],
)
def test_a_position_recorded_with_another_loader_is_refused(other: Make, told: str) -> None:
    current = open_pass(KINDS["shuffle"](Samples(), None), epoch=0, state=None)
    next(current)
    with pytest.raises(CursorError, match=rf"after 1 batches.*{told}.*Build the loader as it was"):
        open_pass(other(), epoch=0, state=current.state())
    assert issubclass(CursorError, EverstepError)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sampler_that_ends_before_the_position_is_refused(num_workers: int) -> None:
    class Stops(SequentialSampler):
        stop = NUM_SAMPLES

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.stop))

    def make() -> DataLoader[Any]:
        samples = SeededDataset(Samples())
        return DataLoader(samples, 4, sampler=Stops(samples), num_workers=num_workers)

    current = open_pass(make(), epoch=0, state=None)
    for _ in range(4):
        next(current)
    Stops.stop = 9
    with pytest.raises(CursorError, match=r"4 batches .* BatchSampler\(Stops\) now ends after 3; give it the data"):
        open_pass(make(), epoch=0, state=current.state())


def test_other_generators_than_were_recorded_are_refused() -> None:
    recorded = generator_states(KINDS["shuffle"](Samples(), generator()))
    with pytest.raises(CursorError, match=r"had 1 random generators of their own .* and have 0 now"):
        set_generator_states(KINDS["shuffle"](Samples(), None), recorded)


# ------------------------------------------------------------------------------ loaders that are asked

ASKED: dict[str, Callable[..., Any]] = {
    "sequential": lambda d, g, **kw: StatefulDataLoader(d, 4, generator=g, **kw),
    "shuffle": lambda d, g, **kw: StatefulDataLoader(d, 4, shuffle=True, generator=g, **kw),
    "drop_last": lambda d, g, **kw: StatefulDataLoader(d, 4, shuffle=True, drop_last=True, generator=g, **kw),
    "subset": lambda d, g, **kw: StatefulDataLoader(
        d, 4, sampler=SubsetRandomSampler(range(15), generator=g), generator=g, **kw
    ),
    "batch_sampler": lambda d, g, **kw: StatefulDataLoader(
        d, batch_sampler=BatchSampler(RandomSampler(d, generator=g), 5, False), generator=g, **kw
    ),
    "no_batches": lambda d, g, **kw: StatefulDataLoader(
        d, batch_size=None, sampler=SubsetRandomSampler(range(9), generator=g), generator=g, **kw
    ),
    "own_sampler": lambda d, g, **kw: StatefulDataLoader(d, batch_size=None, sampler=ShufflesInIter(9), generator=g, **kw),
    "counted": lambda d, g, **kw: StatefulDataLoader(d, 4, sampler=data.Sampler(d, rank=1, world_size=2), generator=g, **kw),
    "counted_no_batches": lambda d, g, **kw: StatefulDataLoader(d, batch_size=None, sampler=data.Sampler(9), **kw),
}


@pytest.mark.parametrize("own_generator", [False, True], ids=["global", "generator"])
@pytest.mark.parametrize("kind", ASKED)
def test_a_stateful_loader_resumes_exactly_at_every_batch(kind: str, own_generator: bool) -> None:
    assert_resumes_exactly(lambda: ASKED[kind](Samples(), generator() if own_generator else None))


@pytest.mark.parametrize("persistent", [False, True], ids=["workers", "persistent_workers"])
@pytest.mark.parametrize("own_generator", [False, True], ids=["global", "generator"])
@pytest.mark.parametrize(
    "kind", ["shuffle", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("batch_sampler", "counted"))]
)
@pytest.mark.sampled(2)
def test_a_stateful_loader_with_workers_resumes_exactly(kind: str, own_generator: bool, persistent: bool) -> None:
    def make() -> Any:
        g = generator() if own_generator else None
        return ASKED[kind](SeededDataset(Samples()), g, num_workers=2, persistent_workers=persistent)

    num_batches = len(make())
    assert_resumes_exactly(make, stops=[0, 2, num_batches, num_batches + 1, 2 * num_batches])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_over_a_stateful_iterable_resumes_exactly(num_workers: int) -> None:
    assert_resumes_exactly(
        lambda: StatefulDataLoader(CountingNumbers(23), 4, num_workers=num_workers), stops=[0, 2, 5, 6, 9, 12]
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_asked_after_the_end_of_a_pass_resumes_exactly(num_workers: int) -> None:
    make: Make = lambda: ASKED["shuffle"](SeededDataset(Samples()), None, num_workers=num_workers)  # noqa: E731
    reference = plain_run(make)
    for asked_before_the_end in (False, True):
        seed_all(5)
        current = open_pass(make(), epoch=0, state=None)
        for batch in current:
            train_on(batch)
            if asked_before_the_end:
                current.state()
        resumed = our_run(make, Position(0, as_stored(current.state()), [], get_rng()))
        assert resumed.rows == reference.rows[6:]
        assert resumed.end == reference.end


def test_a_stateful_loader_with_workers_over_a_dataset_that_is_not_seeded_warns() -> None:
    with pytest.warns(InexactWarning, match="SeededDataset"):
        resume_in_the_middle(lambda: ASKED["shuffle"](Samples(), None, num_workers=1))


def test_a_stateful_loader_that_refuses_its_state_is_named() -> None:
    class Refuses:
        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

        def state_dict(self) -> dict[str, Any]:
            return {"at": 3}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("at")

    with pytest.raises(CursorError, match=r"Refuses refused the state that it gave \(KeyError: 'at'\)"):
        resume_in_the_middle(Refuses)


class Scripted:
    """A loader of the user's own that can be asked. It writes to the dict that it gave."""

    def __init__(self) -> None:
        self.live: dict[str, Any] = {"at": 0, "epoch": -1, "noise": torch.zeros(1)}
        self.resumed = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.resumed:
            self.live["at"] = 0
            self.live["epoch"] += 1
        self.resumed = False
        while self.live["at"] < 7:
            self.live["at"] += 1
            self.live["noise"] += 1
            yield torch.tensor([self.live["epoch"], self.live["at"]]) + self.live["noise"]

    def state_dict(self) -> dict[str, Any]:
        return self.live

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.live, self.resumed = state, True


def test_any_loader_with_state_dict_and_load_state_dict_is_asked() -> None:
    assert_resumes_exactly(Scripted)


def test_a_loader_asked_after_the_end_gives_the_state_it_had_before() -> None:
    reference = plain_run(Scripted)
    seed_all(5)
    current = open_pass(Scripted(), epoch=0, state=None)
    for batch in current:
        train_on(batch)
        current.state()
    assert our_run(Scripted, Position(0, as_stored(current.state()), [], get_rng())).rows == reference.rows[7:]


# ------------------------------------------------------------------------------ loaders that are consumed


class Numbers(IterableDataset[int]):
    """Numbers with noise, shared out among workers."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.num_samples, step):
            yield torch.tensor([number, torch.rand(()).item()])


class CountingNumbers(IterableDataset[int]):
    """Numbers whose position can be asked for; at its end too."""

    seeded_per_sample = True

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.at = 0
        self.resumed = False

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        self.at, self.resumed = self.at if self.resumed else first, False
        return self.numbers(step)

    def numbers(self, step: int) -> Iterator[Any]:
        while self.at < self.num_samples:
            self.at += step
            yield torch.tensor([float(self.at - step)])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.resumed = state["at"], True


class Shuffled:
    """A plain iterable with an order that is drawn when it starts."""

    def __iter__(self) -> Iterator[Any]:
        for number in torch.randperm(9).tolist():
            yield torch.tensor([number, torch.rand(()).item()])


@pytest.mark.filterwarnings("ignore::everstep.errors.SlowResumeWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Numbers(23), 4),
        lambda: DataLoader(Numbers(23), 4, num_workers=2),
        lambda: DataLoader(Numbers(23), 4, generator=generator()),
        lambda: DataLoader(CountingNumbers(23), 4, generator=generator(), num_workers=2, persistent_workers=True),
        Shuffled,
        lambda: [torch.tensor([i]) for i in range(5)],
        lambda: range(5),
    ],
    ids=[
        "iterable dataset",
        "with workers",
        "with a generator",
        "with persistent workers",
        "plain iterable",
        "list",
        "range",
    ],
)
@pytest.mark.sampled(2)
def test_a_consumed_loader_resumes_exactly(make: Make) -> None:
    assert_resumes_exactly(make, stops=[0, 2, 4, 5, 6, 9])


@pytest.mark.filterwarnings("ignore::everstep.errors.SlowResumeWarning")
def test_a_bare_iterator_resumes_exactly_over_several_passes() -> None:
    def numbers() -> Iterator[Any]:
        for number in itertools.count():
            yield torch.tensor([number, torch.rand(()).item()])

    assert_resumes_exactly(numbers, stop_pass_at=4)


@pytest.mark.parametrize(
    ("make", "faster"),
    [
        (lambda: DataLoader(Numbers(23), 4), "a map-style dataset, or torchdata's StatefulDataLoader"),
        (Shuffled, "a DataLoader over a map-style dataset"),
        (lambda: iter(Shuffled()), "a DataLoader over a map-style dataset"),
        (lambda: OverridesIter(Samples(), 4), "does not override __iter__"),
    ],
)
def test_a_consumed_loader_says_what_would_be_faster(make: Make, faster: str) -> None:
    with pytest.warns(SlowResumeWarning, match=f"2 batches are fetched and dropped .*Faster: .*{faster}"):
        resume_in_the_middle(make)


class OverridesIter(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([batch + 1 for batch in super().__iter__()])


def test_a_list_is_positioned_without_a_warning() -> None:
    assert list(resume_in_the_middle(lambda: [1, 2, 3, 4])) == [3, 4]


def test_a_consumed_loader_that_ends_before_the_position_is_refused() -> None:
    def numbers(stop: int) -> Iterator[int]:
        yield from range(stop)

    current = open_pass(numbers(9), epoch=0, state=None)
    for _ in range(5):
        next(current)
    with (
        pytest.warns(SlowResumeWarning),
        pytest.raises(CursorError, match="after 5 batches, but generator now ends after 3"),
    ):
        open_pass(numbers(3), epoch=0, state=current.state())


def test_an_iterator_that_is_past_the_position_is_refused() -> None:
    numbers = (n for n in range(9))
    current = open_pass(numbers, epoch=0, state=None)
    next(current)
    early = current.state()
    next(current)
    with pytest.raises(CursorError, match=r"2 batches were taken .* after 1; an iterator cannot go back"):
        open_pass(numbers, epoch=0, state=early)


# ------------------------------------------------------------------------------ cost


def test_recording_a_position_costs_microseconds_and_repeats_what_does_not_change() -> None:
    loader = DataLoader(Samples(), 1, shuffle=True)
    current = open_pass(loader, epoch=0, state=None)
    next(current)
    first = current.state()
    next(current)
    assert current.state()["pass"] is first["pass"]
    costs_s = []
    for _ in range(200):
        start = time.perf_counter()
        current.state()
        costs_s.append(time.perf_counter() - start)
    assert min(costs_s) < 20e-6


def test_skipping_a_hundred_thousand_samples_takes_a_moment() -> None:
    make: Make = lambda: DataLoader(Samples(100_000), 8, shuffle=True)  # noqa: E731
    current = open_pass(make(), epoch=0, state=None)
    next(current)
    state = current.state()
    state = copy.copy(state) | {"delivered": 12_400}
    start = time.perf_counter()
    assert next(open_pass(make(), epoch=0, state=state)).shape == (8, 4)
    assert time.perf_counter() - start < 2
