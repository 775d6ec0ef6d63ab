"""Whether the live objects still are made of the tensors that they were made of."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from operator import attrgetter, is_
from typing import Any

from everstep import sharding
from everstep.capture.registrations import Registrations
from everstep.naming import Inventory

LOOK_AT_CONTAINERS = 8
"""At least so many of the dicts that modules keep their tensors in are looked at at a time."""
_requires_grad = attrgetter("requires_grad")
_Part = tuple[Any, ...]


class Structure:
    """The inventory of the live objects, and what tells that it is out of date."""

    def __init__(self, take: Callable[[], Inventory]) -> None:
        self._take = take
        self._registrations = Registrations()
        self.take()

    def take(self) -> Inventory:
        """Read the live objects again."""
        inventory = self.inventory = self._take()
        places = [
            *((p.container, p.key, inventory.live[p.uid]) for p in inventory.places),
            *((p.container, p.key, None) for p in inventory.empty),
            *inventory.children,
        ]
        holders, keys, hung = ([place[i] for place in places] for i in range(3))
        containers = [c for c, _ in inventory.containers]
        lengths = [n for _, n in inventory.containers]
        self._whole = (holders, keys, hung, containers, lengths)
        share = max(1, len(containers) // LOOK_AT_CONTAINERS)
        self._parts = cycle([tuple(each[i::share] for each in self._whole) for i in range(share)])
        self._flags_of = list(inventory.live.values())
        self._flags = list(map(_requires_grad, self._flags_of))
        return inventory

    def has_changed(self) -> bool:
        """Whether a tensor was added, replaced, frozen or unfrozen anywhere.

        torch tells of registrations (registrations.py); what goes past them is found by looking at a part of the modules
        each time.
        """
        told, self._registrations.seen = self._registrations.seen, False
        if not self._differs(self._whole if told else next(self._parts)):
            return False
        if not self.inventory.gathering:
            return True
        sharding.let_go(self.inventory.gathering)
        return self._differs(self._whole)

    def _differs(self, part: _Part) -> bool:
        holders, keys, hung, containers, lengths = part
        return (
            not all(map(is_, map(dict.get, holders, keys), hung))
            or list(map(len, containers)) != lengths
            or list(map(_requires_grad, self._flags_of)) != self._flags
        )

    def close(self) -> None:
        self._registrations.close()
