from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from everstep.data import SeededDataset


class Noise(Dataset[torch.Tensor]):
    """Each sample is its index and a number from every global generator, Gaussians included."""

    color = "white"

    def __init__(self, num_samples: int = 12) -> None:
        self.num_samples = num_samples
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, int) and index >= self.num_samples:
            raise IndexError(index)
        drawn = [torch.rand(()).item(), torch.randn(()).item(), np.random.rand(), np.random.randn()]
        return torch.tensor([*drawn, random.random(), random.gauss(0, 1)])

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def rng() -> list[Any]:
    _, key, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), key.tolist(), rest, random.getstate()]


def rows(loader: DataLoader[Any]) -> list[list[float]]:
    return [row for batch in loader for row in batch.tolist()]


def test_a_sample_depends_on_seed_epoch_and_index_alone() -> None:
    seen = {}
    for seed in (0, 1):
        dataset = SeededDataset(Noise(), seed=seed)
        for epoch in (0, 1):
            dataset.set_epoch(epoch)
            for index in (0, 5):
                torch.manual_seed(random.getrandbits(30))
                seen[seed, epoch, index] = tuple(dataset[index].tolist())
                assert tuple(dataset[index].tolist()) == seen[seed, epoch, index]
    assert len(set(seen.values())) == 8
    for position in range(6):  # every generator differs, not just one of them
        assert len({numbers[position] for numbers in seen.values()}) == 8


def test_the_numbers_are_the_same_on_every_machine_and_in_every_version() -> None:
    dataset = SeededDataset(Noise(), seed=3)
    dataset.set_epoch(2)
    expected = [0.3096461296, 0.3568890393, 0.3814500272, -0.4062329233, 0.3311007917, -1.1499605179]
    torch.testing.assert_close(dataset[7], torch.tensor(expected), rtol=1e-6, atol=0)


def test_the_surrounding_random_numbers_are_left_exactly_as_they_were() -> None:
    dataset = SeededDataset(Noise())
    torch.randn(1), np.random.randn(), random.gauss(0, 1)  # each holds a second Gaussian back now
    before = rng()
    dataset[3]
    dataset.__getitems__([1, 2, 3])
    assert rng() == before
    with pytest.raises(IndexError):
        dataset[99]
    with pytest.raises(IndexError):
        dataset.__getitems__([1, 99])
    assert rng() == before


def test_samples_fetched_together_equal_samples_fetched_alone() -> None:
    dataset = SeededDataset(Noise())
    together = dataset.__getitems__([4, 0, 11])
    assert [s.tolist() for s in together] == [dataset[i].tolist() for i in (4, 0, 11)]


def test_a_dataset_with_getitems_of_its_own_is_still_seeded_per_sample() -> None:
    class Batched(Noise):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            raise AssertionError("one call for many samples cannot be seeded for each")

    alone = [SeededDataset(Noise())[i].tolist() for i in range(12)]
    assert rows(DataLoader(SeededDataset(Batched()), batch_size=5)) == alone


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_and_batches_make_no_difference(num_workers: int) -> None:
    dataset = SeededDataset(Noise())
    alone = [dataset[i].tolist() for i in range(12)]
    assert rows(DataLoader(dataset, batch_size=4)) == alone
    assert rows(DataLoader(dataset, batch_size=3, num_workers=num_workers)) == alone


def test_the_epoch_reaches_persistent_workers() -> None:
    dataset = SeededDataset(Noise())
    loader = DataLoader(dataset, batch_size=3, num_workers=2, persistent_workers=True)
    expected, seen = [], []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        expected.append([dataset[i].tolist() for i in range(12)])
        seen.append(rows(loader))
    assert seen == expected
    assert seen[0] != seen[1]


def test_the_epoch_reaches_processes_that_were_sent_the_dataset() -> None:
    dataset = SeededDataset(Noise())
    sent = pickle.loads(ForkingPickler.dumps(dataset))  # what spawn does
    dataset.set_epoch(6)
    assert sent.epoch == 6
    assert sent[2].tolist() == dataset[2].tolist()


def test_a_copy_has_an_epoch_of_its_own() -> None:
    dataset = SeededDataset(Noise(), seed=4)
    dataset.set_epoch(1)
    for other in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert (other.seed, other.epoch) == (4, 1)
        other.set_epoch(2)
        assert dataset.epoch == 1


def test_the_epoch_is_passed_on_to_the_wrapped_dataset() -> None:
    inner = Noise()
    SeededDataset(inner).set_epoch(3)
    assert inner.epochs == [3]


def test_length_and_attributes_are_those_of_the_wrapped_dataset() -> None:
    dataset = SeededDataset(Noise(9))
    assert len(dataset) == 9
    assert dataset.color == "white"
    with pytest.raises(AttributeError, match="no attribute 'flavour'"):
        _ = dataset.flavour


def test_an_index_counts_by_its_value_not_by_its_type() -> None:
    dataset = SeededDataset(Noise())
    expected = dataset[3].tolist()
    assert dataset[np.int64(3)].tolist() == dataset[torch.tensor(3)].tolist() == expected
    keys: list[Any] = ["3", b"3", 3.0, (3,), (3, 1), ("3", 1), (31,)]
    assert len({tuple(dataset[key].tolist()) for key in [3, *keys]}) == 8


def test_an_index_that_has_no_lasting_value_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot seed from an index of type object"):
        SeededDataset(Noise())[object()]


def test_an_iterable_dataset_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(TypeError, match=r"map-style dataset .* not Stream"):
        SeededDataset(Stream())


def test_a_list_can_be_wrapped() -> None:
    assert SeededDataset([5, 6, 7])[1] == 6
