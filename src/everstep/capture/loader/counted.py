"""A DataLoader over everstep.data.Sampler: the samples that all ranks have had are counted, and it starts behind them."""

from __future__ import annotations

from typing import Any

from everstep.capture.loader.anatomy import counting_sampler
from everstep.capture.loader.generators import State
from everstep.capture.loader.mapped import MapPass
from everstep.capture.loader.passes import Pass
from everstep.data import Sampler


class CountedPass(MapPass):
    kind = "counted"
    _sampler: Sampler
    _batch_size: int

    def __next__(self) -> Any:
        batch = super().__next__()
        self._sampler.advance(self._batch_size)
        return batch

    def state(self) -> State:
        return {**super().state(), "sampler": self._sampler.state_dict()}

    @classmethod
    def open(cls, loader: Any, shape: State, state: State | None) -> Pass:
        sampler = counting_sampler(loader)
        assert sampler is not None
        if state is not None:
            _go_to(sampler, state)
        opened = super().open(loader, shape, state)
        assert isinstance(opened, CountedPass)
        opened._sampler = sampler
        opened._batch_size = 1 if loader.batch_sampler is None else loader.batch_sampler.batch_size
        return opened

    @classmethod
    def open_resized(cls, loader: Any, shape: State, state: State) -> Pass:
        """From a position of another number of ranks: of it, only the count of samples means anything here."""
        sampler = counting_sampler(loader)
        assert sampler is not None
        _go_to(sampler, state)
        opened = cls.open(loader, shape, None)
        opened._delivered = state["delivered"]
        if state["ended"]:
            opened._end()
        return opened

    @staticmethod
    def _num_to_skip(state: State) -> int:
        return 0

    @staticmethod
    def _is_over(loader: Any, state: State) -> bool:
        sampler, batches = counting_sampler(loader), loader.batch_sampler
        assert sampler is not None
        return sampler.num_left < (batches.batch_size if batches is not None and batches.drop_last else 1)


def _go_to(sampler: Sampler, state: State) -> None:
    sampler.load_state_dict(state["sampler"])
    if state["ended"]:
        sampler.consumed = sampler.num_samples  # what drop_last left out then may fit now
