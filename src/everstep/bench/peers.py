"""What others do every step: save the whole state. Measured as they come, without a sync, which is in their favour."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

State = dict[str, Any]


@contextlib.contextmanager
def their_warnings_silenced() -> Iterator[None]:
    """DCP warns in threads of its own that there is only one process: filters are set for the whole process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed")
        warnings.filterwarnings("ignore", module=r"torch\.storage")
        yield


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The state dicts of both, uncopied."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


class TorchSave:
    """torch.save to one file, replaced each time; torch.load from it."""

    name = "torch.save"

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self._path = os.path.join(folder, "state.pt")

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        temporary = self._path + ".tmp"
        torch.save(whole_state(model, optimizer), temporary)
        os.replace(temporary, self._path)

    def wait(self) -> None:
        """Saved already."""

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Into these objects."""
        state = torch.load(self._path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def files(self) -> list[str]:
        return [self._path]


class DcpSave:
    """torch.distributed.checkpoint.async_save, the one before waited for first, as its documentation shows; and load."""

    name = "dcp.async_save"

    def __init__(self, folder: str) -> None:
        self._folders = [os.path.join(folder, "a"), os.path.join(folder, "b")]
        self._turn = 0
        self._pending: Future[Any] | None = None

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.wait()
        self._turn += 1
        future: Any = async_save(
            whole_state(model, optimizer), checkpoint_id=self._folders[self._turn % 2], no_dist=True
        )
        self._pending = future

    def wait(self) -> None:
        """Return when the last save is complete."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Into these objects, from the last save, also of an object before this one."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        if not optimizer.state:
            get_optimizer_state_dict(model, optimizer)  # makes the state: DCP fills tensors that are there
        state = whole_state(model, optimizer)
        load(state, checkpoint_id=self._newest(), no_dist=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def _newest(self) -> str:
        return max(filter(os.path.exists, self._folders), key=os.path.getmtime)

    def files(self) -> list[str]:
        folder = self._newest()
        return [os.path.join(folder, name) for name in os.listdir(folder)]


Peer = TorchSave | DcpSave
