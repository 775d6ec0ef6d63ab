"""Ways to save, behind one interface: Everstep's modes, and what others do. Each is at work on one copy of a model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from everstep.bench import peers
from everstep.bench.background import Follower, until_idle
from everstep.run import attach

FOLLOWER_START_S = 60.0
"""Measuring begins without it if the follower has made no base by then."""
POLL_S = 0.01


class Saver(Protocol):
    """A way to save, at work. Steps are counted from its beginning."""

    def after_step(self) -> None:
        """Save, if it is time to."""

    def newest(self) -> int:
        """The last step that is saved and complete, as far as the next save would have to wait for it."""

    def wait(self) -> None:
        """Return when the next save would not have to wait."""

    def rest(self) -> None:
        """Return when nothing is left to do that could weigh on others; processes of its own are stopped until `go_on`."""

    def go_on(self) -> None: ...

    def close(self) -> None: ...


class Nothing:
    """Training as it is: no step has anything left to do."""

    def __init__(self) -> None:
        self._steps = 0

    def after_step(self) -> None:
        self._steps += 1

    def newest(self) -> int:
        return self._steps

    def wait(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def go_on(self) -> None:
        pass

    def close(self) -> None:
        pass


class Everstep:
    """A run, as `attach` gives it with these options, whose log a follower or a shadow reads."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, path: str, **options: Any) -> None:
        self.run = attach(model, optimizer, path, quiet=True, **options)
        self.run.resume()
        self._follower = Follower(self.run)
        self._base_interval: int = options["base_interval"]
        self._is_up = False

    def after_step(self) -> None:
        self.run.commit()

    def newest(self) -> int:
        return self.run.durable_step

    def wait(self) -> None:
        self.run.flush()

    def rest(self) -> None:
        """The first time also: until the follower has made a base, if one is due by then."""
        self.wait()
        deadline = time.monotonic() + FOLLOWER_START_S
        while not self._is_up and self._awaits_follower() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._is_up = True
        until_idle()
        self._follower.stop()

    def _awaits_follower(self) -> bool:
        stats = self.run.stats()
        return bool(stats["step"] > self._base_interval and not stats["follower_bases"])

    def go_on(self) -> None:
        self._follower.go_on()

    def close(self) -> None:
        self._follower.go_on()
        self.run.close()


class Snapshots(Everstep):
    """A run in snapshot mode. flush() would store one state more than the interval asks for, so it is not called."""

    def wait(self) -> None:
        while self.run.stats()["inflight_steps"]:
            time.sleep(POLL_S / 20)

    def _awaits_follower(self) -> bool:
        return False


class Other:
    """A peer that saves the whole state at the first step and every `interval` steps from there."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, peer: peers.Peer, interval: int) -> None:
        self._state = model, optimizer
        self._peer = peer
        self._interval = interval
        self._steps = 0
        self._newest = 0

    def after_step(self) -> None:
        self._steps += 1
        if (self._steps - 1) % self._interval == 0:
            self._peer.save(*self._state)
            self._newest = self._steps

    def newest(self) -> int:
        return self._newest

    def wait(self) -> None:
        self._peer.wait()

    def rest(self) -> None:
        self._peer.wait()
        for path in self._peer.files():  # what it left in the page cache must not weigh on the block that follows
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)

    def go_on(self) -> None:
        pass

    def close(self) -> None:
        self._peer.wait()


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a saver may write."""

    disk: str
    memory: str
    """A folder in memory."""
    base_interval: int


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to save, by name."""

    name: str
    begin: Callable[[nn.Module, Optimizer, Place, int], Saver]
    """On a copy of a model, every so many steps."""
    hooks: bool
    """It stays attached to its copy of the model, so that training without it needs another."""
    every_step: bool = False
    """It has no interval."""


def _delta(model: nn.Module, optimizer: Optimizer, place: Place, interval: int) -> Saver:
    return Everstep(model, optimizer, os.path.join(place.disk, "run"), base_interval=place.base_interval)


def _shadow(model: nn.Module, optimizer: Optimizer, place: Place, interval: int) -> Saver:
    return Everstep(model, optimizer, os.path.join(place.disk, "run"), mode="shadow", base_interval=place.base_interval)


def _snapshot(pool: Callable[[Place], str]) -> Callable[[nn.Module, Optimizer, Place, int], Saver]:
    def begin(model: nn.Module, optimizer: Optimizer, place: Place, interval: int) -> Saver:
        return Snapshots(
            model, optimizer, os.path.join(place.disk, "run"), mode="snapshot", snapshot_interval=interval, pool=pool(place),
            base_interval=place.base_interval,
        )  # fmt: skip

    return begin


def _dcp(model: nn.Module, optimizer: Optimizer, place: Place, interval: int) -> Saver:
    return Other(model, optimizer, peers.DcpSave(os.path.join(place.disk, "dcp")), interval)


def _torch_save(model: nn.Module, optimizer: Optimizer, place: Place, interval: int) -> Saver:
    return Other(model, optimizer, peers.TorchSave(os.path.join(place.disk, "torch")), interval)


_ALL = (
    Way(name="delta", begin=_delta, hooks=True, every_step=True),
    Way(name="shadow", begin=_shadow, hooks=True, every_step=True),
    Way(name="snapshot-memory", begin=_snapshot(lambda place: place.memory), hooks=True),
    Way(name="snapshot-disk", begin=_snapshot(lambda place: place.disk), hooks=True),
    Way(name="dcp.async_save", begin=_dcp, hooks=False),
    Way(name="torch.save", begin=_torch_save, hooks=False),
)
WAYS: dict[str, Way] = {way.name: way for way in _ALL}
