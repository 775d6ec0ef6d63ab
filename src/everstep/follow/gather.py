"""From the shadows of all ranks of a run back into its trainers: at one step, each what it needs of whichever has it.

A rank's shadow holds what that rank stored, which under DDP is a part of the parameters. So a trainer takes from all of
them, as it would from the ranks' files: restore/join.py cuts and joins, whatever the layout is now.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from everstep.atoms import Layout
from everstep.errors import LinkError
from everstep.fold import Live, Ranges, State
from everstep.follow import recover
from everstep.follow.arena import DamagedStateError
from everstep.follow.compact import Held
from everstep.follow.fetch import NUM_STREAMS, Generations, find_all, layout_at, standing
from everstep.follow.recover import Offer
from everstep.format.documents import GenerationDocument
from everstep.restore.execute import Place, Restored
from everstep.restore.join import Era, Source
from everstep.store import files
from everstep.store.runs import RunPath


@dataclass
class Shadows:
    """Of the ranks of a run: on this host, or at these addresses."""

    path: RunPath
    run: str
    where: Sequence[str] = ()
    token: bytes | None = None
    tls: ssl.SSLContext | None = None
    num_streams: int = NUM_STREAMS

    def standings(self, line: Generations) -> list[int | str]:
        """For each rank of the newest generation, the greatest step that its shadow has received, or why there is none."""
        found: list[int | str] = []
        for rank in range(line[0].world_size):
            path = self.path.part(rank)
            where = self.where or [recover.address_of(path, self.run)]
            try:
                found.append(standing(where, path, self.run, line, self.token, self.tls))
            except LinkError as e:
                found.append(str(e))
        return found

    def layout(self, rank: int, step: int) -> Layout:
        """Of what the shadows at `where` hold for this rank. LinkError if it cannot be had."""
        return layout_at(self.where, self.path.part(rank), self.run, step, self.token, self.tls)

    def find(self, rank: int, step: int) -> Offer:
        """What the shadow of this rank holds, at this step. LinkError if it cannot be had."""
        path = self.path.part(rank)
        said: list[str] = []
        if self.where:
            offer = find_all(
                self.where, path, self.run, token=self.token, tls=self.tls, num_streams=self.num_streams, step=step,
                say=said.append,
            )  # fmt: skip
        else:
            offer = recover.find(path, self.run, step)
        if offer is None or offer.step != step:
            raise LinkError(said[0] if said else f"the shadow of rank {rank} does not give step {step}")
        return offer


Told = Sequence[Sequence[int | str]]
"""What each trainer was told by the shadow of each rank: the step that it has, or why it has none for this trainer."""


def common_step(told: Told) -> tuple[int, str]:
    """The step that the shadows of all ranks can give to some trainer; or -1, and why. Pure."""
    found = []
    for rank, answers in enumerate(zip(*told, strict=True)):
        steps = [answer for answer in answers if isinstance(answer, int)]
        if not steps:
            return -1, f"rank {rank}: {answers[0]}"
        found.append(min(steps))
    return min(found), ""


def reaches_all(told: Told) -> bool:
    """Whether every trainer can reach the shadows of all ranks: not so where each is on its own host. Pure."""
    return all(isinstance(answer, int) for answers in told for answer in answers)


def writes_for(told: Told, trainer: int) -> list[int]:
    """The ranks whose shadows' states this trainer writes to disk: those that it is the first to reach. Pure."""
    first = [
        min(i for i, answer in enumerate(answers) if isinstance(answer, int)) for answers in zip(*told, strict=True)
    ]
    return [rank for rank, writer in enumerate(first) if writer == trainer]


def leave_bases(shadows: Shadows, newest: GenerationDocument, step: int, ranks: Sequence[int]) -> None:
    """Write what the shadows of these ranks hold at this step as bases of theirs. Durable on return; LinkError if one does
    not give it."""
    for rank in ranks:
        offer = shadows.find(rank, step)
        try:
            path = shadows.path.part(rank)
            held = Held(path, newest.timeline, newest.generation)
            held.take(_fetch(offer), dict(offer.fingerprint))
            held.write_base(direct=files.supports_direct(path.bases(newest.timeline)))
        finally:
            offer.release()


def _fetch(offer: Offer, only: set[int] | None = None) -> State:
    """What a shadow holds. If that is damaged, the shadow is told, so that nobody goes on with it."""
    try:
        return offer.fetch(only=only)
    except DamagedStateError as e:
        offer.is_damaged(str(e))
        raise


class ShadowSource(Source):
    """One step, from the memory of the ranks' shadows. Those that are asked stay where they are until close()."""

    reads_at_once = False

    def __init__(self, era: Era, step: int, shadows: Shadows) -> None:
        self._shadows = shadows
        self._offers: dict[int, Offer] = {}
        super().__init__(era, step)

    def read_layouts(self) -> list[Layout]:
        if self._shadows.where:  # a state is brought here when something of it is needed
            return [self._shadows.layout(rank, self.step) for rank in range(self.era.world_size)]
        return [self.offer(rank).manifest.layout for rank in range(self.era.world_size)]

    def offer(self, rank: int) -> Offer:
        if rank not in self._offers:
            self._offers[rank] = self._shadows.find(rank, self.step)
        return self._offers[rank]

    def part(
        self, rank: int, only: Mapping[int, Ranges] | None, live: Live | None, *, flat: Set[int] = frozenset(),
        num_workers: int | None = None, place: Place | None = None,
    ) -> Restored:  # fmt: skip
        """Of what is wanted all elements: they are in memory."""
        offer = self.offer(rank)
        state = _fetch(offer, None if only is None else set(only))
        return Restored(state, None, offer.proven, dict(offer.fingerprint))

    def is_fine(self, rank: int) -> bool | None:
        return None

    def cursor(self, rank: int) -> bytes:
        return self.part(rank, {}, None).state.cursor

    def close(self) -> None:
        """The shadows may go on."""
        for offer in self._offers.values():
            offer.release()
        self._offers.clear()
