"""Ranks that are threads: what they say to each other goes over a store, and nothing else is shared."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from everstep import ranks
from everstep.ranks import Ranks


class Threads:
    """A job of several ranks in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = self._here = threading.local()
        monkeypatch.setattr(Ranks, "current", classmethod(lambda cls: cls(here.rank, here.size, here.store)))
        monkeypatch.setattr(ranks, "_WAIT", timedelta(seconds=10))  # for a rank that has failed

    def run(self, size: int, work: Callable[[int], Any]) -> list[Any]:
        """What `work(rank)` returns on each rank; the first exception of any."""
        store = torch.distributed.HashStore()
        results: list[Any] = [None] * size
        errors: list[BaseException] = []

        def job(rank: int) -> None:
            self._here.rank, self._here.size, self._here.store = rank, size, store
            try:
                results[rank] = work(rank)
            except BaseException as e:
                errors.append(e)

        threads = [threading.Thread(target=job, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results
