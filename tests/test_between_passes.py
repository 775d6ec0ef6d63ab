"""What programs do between passes over their data runs again after a resume: it is undone, or done, exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import everstep
from support import crash, equal
from truth import live_state

EPOCHS = 4
Program = Callable[["Training"], None]


class Killed(Exception):  # noqa: N818
    pass


class Training:
    """Objects of one process. It is killed before its n-th tick, if told so."""

    def __init__(self, path: Path | None, ticks: int | None = None, mode: str = "delta") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.head = nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.05)
        self.aux = torch.optim.SGD(self.head.parameters(), 0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.run: Any = None
        if path is not None:
            self.run = everstep.attach(
                {"model": self.model, "head": self.head}, {"main": self.optimizer, "aux": self.aux}, path,
                extras={"scheduler": self.scheduler}, quiet=True, follower=False, mode=mode,
                **({"snapshot_interval": 1} if mode == "snapshot" else {}),
            )  # fmt: skip
        self._left = ticks

    def steps(self, loader: Any) -> Any:
        return loader if self.run is None else self.run.steps(loader)

    def commit(self) -> None:
        if self.run is not None:
            self.run.commit()

    def tick(self) -> None:
        """A place where it may be killed."""
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise Killed

    def train(self, batch: torch.Tensor) -> None:
        self.tick()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tick()

    def train_aux(self) -> None:
        self.tick()
        self.head(torch.rand(4, 3)).square().mean().backward()
        self.aux.step()
        self.aux.zero_grad()

    def state(self) -> Any:
        models, optimizers = {"model": self.model, "head": self.head}, {"main": self.optimizer, "aux": self.aux}
        return live_state(models, optimizers, {"scheduler": self.scheduler}), torch.get_rng_state()


def data(seed: int, generator: bool = False) -> DataLoader[Any]:
    made = TensorDataset(torch.arange(36.0).reshape(12, 3) / 36 + seed)
    own = torch.Generator().manual_seed(seed) if generator else None
    return DataLoader(made, 4, shuffle=True, generator=own)


def epochs(t: Training, loader: Any) -> Iterator[int]:
    """Trains one after the other; what the caller does comes after each."""
    for epoch in range(EPOCHS):
        for (batch,) in t.steps(loader):
            t.train(batch)
        yield epoch


def shrink(t: Training) -> None:
    with torch.no_grad():
        t.model[0].weight.mul_(0.9)


def edits_and_commits(t: Training) -> None:
    for _ in epochs(t, data(0)):
        shrink(t)
        t.scheduler.step()
        t.tick()
        t.commit()
        t.tick()


def edits_and_commits_twice(t: Training) -> None:
    for _ in epochs(t, data(0)):
        shrink(t)
        t.tick()
        t.commit()
        t.tick()
        with torch.no_grad():
            t.model[3].weight.add_(torch.rand(4))
        t.commit()
        t.tick()


def edits_without_commits(t: Training) -> None:
    for _ in epochs(t, data(0)):
        shrink(t)
        t.scheduler.step()
        t.tick()


def trains_between(t: Training) -> None:
    for _ in epochs(t, data(0)):
        for _ in range(5):
            t.train_aux()


def trains_and_commits_between(t: Training) -> None:
    for _ in epochs(t, data(0)):
        for _ in range(3):
            t.train_aux()
            t.commit()


def two_loaders(t: Training) -> None:
    first, second = data(1, generator=True), data(2, generator=True)
    for _ in range(EPOCHS):
        for (batch,) in t.steps(first):
            t.train(batch)
        for (batch,) in t.steps(second):
            t.train(batch)
        for (batch,) in t.steps(first):  # one batch, committed when the next pass begins
            t.train(batch)
            break


class CountsEpochs(Sampler[int]):
    """Nobody tells it the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        yield from torch.randperm(12, generator=generator).tolist()

    def __len__(self) -> int:
        return 12


def a_sampler_that_counts(t: Training) -> None:
    for _ in epochs(t, DataLoader(data(0).dataset, 4, sampler=CountsEpochs())):
        pass


PROGRAMS: list[Program] = [
    edits_and_commits, edits_and_commits_twice, edits_without_commits, trains_between, trains_and_commits_between,
    two_loaders, a_sampler_that_counts,
]  # fmt: skip


# An edit right after a commit spoils a snapshot of it that is on its way: that is said.
@pytest.mark.filterwarnings("ignore::everstep.errors.HiddenEditWarning", "ignore::everstep.errors.UnprotectedWarning")
@pytest.mark.parametrize("mode", ["delta", pytest.param("snapshot", marks=pytest.mark.long)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.sampled(2)
def test_wherever_it_is_killed_it_ends_as_if_it_had_not_been(program: Program, mode: str, tmp_path: Path) -> None:
    plain = Training(None)
    program(plain)
    wanted = plain.state()
    counting = Training(None, 1 << 30)
    program(counting)
    num_ticks = (1 << 30) - (counting._left or 0)
    kills = range(3, num_ticks, 4 if mode == "delta" else 7)
    assert len(kills) > 2
    for first in kills:
        path = tmp_path / str(first)
        for ticks in (first, 7, None):
            training = Training(path, ticks, mode)
            try:
                with training.run:
                    program(training)
            except Killed:
                continue
            break
        problems = equal(wanted, training.state())
        assert not problems, (first, problems)


def test_a_program_that_has_ended_changes_nothing_when_it_is_run_again(tmp_path: Path) -> None:
    for program in (edits_and_commits, trains_and_commits_between):
        ends = []
        for _ in range(3):
            training = Training(tmp_path / program.__name__)
            with training.run:
                program(training)
            ends.append((training.run.step, training.state()))
        assert ends[0][0] == ends[1][0] == ends[2][0]
        assert not equal(ends[0][1][0], ends[1][1][0]) and not equal(ends[0][1][0], ends[2][1][0])


def test_updates_that_were_undone_are_not_in_the_log(tmp_path: Path) -> None:
    """Killed twice: the steps after the first resume must lead to where they led."""
    for ticks in (12, 26, None):
        training = Training(tmp_path / "run", ticks)
        try:
            trains_between(training)
        except Killed:
            training.run.flush()
            crash(training.run)
        else:
            training.run.close()
    assert everstep.open(tmp_path / "run").verify(deep=True).ok


class Turning(Sampler[int]):
    """Another order in each pass, by a count of its own."""

    passes = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([(i * 5 + self.passes) % 6 for i in range(6)])


def test_what_the_sampler_of_another_loader_counts_comes_back(tmp_path: Path) -> None:
    data = torch.arange(6.0)

    def train(path: Path | None, stop: int = 99) -> list[list[float]]:
        seen: list[list[float]] = []
        loaders = [
            DataLoader(data, batch_size=2, sampler=Turning()),
            DataLoader(data, batch_size=3),
        ]
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        run = None if path is None else everstep.attach(model, optimizer, path, quiet=True, follower=False)
        for loader in (loaders[0], loaders[1], loaders[0]):
            for batch in loader if run is None else run.steps(loader):
                seen.append(batch.tolist())
                model(batch[:, None]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if len(seen) == stop and run is not None:
                    run.flush()
                    crash(run)
                    return seen[:-1]
        if run is not None:
            run.close()
        return seen

    first = train(tmp_path / "run", stop=5)
    assert first + train(tmp_path / "run") == train(None)


@pytest.mark.parametrize("how", ["inside", "beside"])
def test_a_pass_that_goes_on_after_another_has_begun_is_refused(how: str, tmp_path: Path) -> None:
    """After a kill nobody could tell which of the two to go on with: batches were left out, without a word."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train, other = [torch.ones(2)] * 4, [torch.ones(2)] * 2
    done = 0
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False)
    with pytest.raises(everstep.errors.UsageError, match="one position at a time"), run:
        for batch, *_ in zip(run.steps(train), *([run.steps(other)] if how == "beside" else []), strict=False):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            for _ in run.steps(other) if how == "inside" else ():
                pass
    assert done == 1


def test_a_loader_whose_workers_are_still_running_begins_again_as_in_a_new_process(tmp_path: Path) -> None:
    """A loader draws a seed for workers that it starts, and none where they are running: the order that follows differs."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    data = TensorDataset(torch.arange(12.0)[:, None])
    loader = DataLoader(data, 4, shuffle=True, num_workers=1, persistent_workers=True)
    seen: list[list[list[int]]] = []
    for _ in range(2):
        seen.append([])
        with everstep.attach(model, optimizer, tmp_path / "run", quiet=True, follower=False) as run:
            if len(seen) > 1:
                run.resume(step=0)
            for (x,) in run.steps(loader, epochs=2):
                seen[-1].append(x.flatten().int().tolist())
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert seen[0] == seen[1]
