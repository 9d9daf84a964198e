"""The arenas of an engine: one on each machine that its ranks run on.

    this machine's arena created ─▶ card to all ranks ─▶ (on every other machine, the first rank creates one)
      ─▶ reports ─▶ card with all handles ─▶ (the other ranks attach)

The last two steps are for several machines. All arenas have the same slots. A slot has the shares of one
chunk, and the host tier, in this process, decides what is in it. So a chunk has all its shares when all ranks
have reported their copies, and leaves all machines at once. If another machine's arena cannot be reached any
more, the engine uses no tier from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvferry.common.errors import TransferError
from kvferry.connector.messages import ArenaCard, MachineRanks, StepReports
from kvferry.geometry import RankGeometry
from kvferry.geometry.canonical import CanonicalForm
from kvferry.tiers.host.arena import Arena
from kvferry.tiers.shares.arena import FarArena
from kvferry.tiers.shares.exchange import ShareExchange
from kvferry.transport.addresses import PortRange

logger = logging.getLogger(__name__)


class Arenas:
    """The arenas of an engine's machines, in the scheduler's process. Only the engine's thread uses it.

    Attributes:
        own: the arena of this machine.
        exchange: between the arenas of several machines and storage; None if there is one machine, or no
            storage.
        cards: what the ranks are still to be told. Mutated.
    """

    def __init__(
        self,
        size: int,
        machines: Sequence[Sequence[RankGeometry]],
        canonical: CanonicalForm,
        shares: Sequence[CanonicalForm],
        *,
        buffers: int,
        host: str,
        ports: PortRange | None,
        wake: Callable[[], None],
    ) -> None:
        """Begin to allocate the arena of this machine.

        Args:
            size: bytes of each arena.
            machines: ranks of each machine, those of this one first.
            shares: forms of their shares of a chunk.
            buffers: number of whole chunks that the tiers in storage have in memory at a time.
            wake: makes the engine run a step soon.

        Raises:
            ConfigError: the memory cannot be allocated, or NIXL does not start.
        """
        self.own = Arena.create(size, wake)
        found = [
            MachineRanks(tuple(ranks), share, None if number else self.own.handle)
            for number, (ranks, share) in enumerate(zip(machines, shares, strict=True))
        ]
        self._card = ArenaCard(tuple(found), self.own.region.length)
        self.cards = [self._card]
        self._on_gpu = any(
            region.memory == "VRAM" for ranks in machines for rank in ranks for region in rank.regions
        )
        self._far: dict[int, FarArena] = {}
        self._failure = ""
        self.exchange: ShareExchange | None = None
        # Without storage, no chunk leaves the arenas.
        if len(found) > 1 and buffers:
            self.exchange = ShareExchange(
                self.own,
                canonical,
                shares,
                [machine.name for machine in found[1:]],
                buffers=buffers,
                host=host,
                ports=ports,
            )

    @property
    def lost(self) -> str:
        """Why the arenas must not be used any more; empty if they may."""
        return self._failure or ("" if self.exchange is None else self.exchange.lost)

    @property
    def can_attach(self) -> bool:
        """Whether there is a card that the ranks can use now."""
        # A rank with a GPU registers all of the arena, and would allocate the rest of it, page by page.
        return bool(self.cards) and (not self._on_gpu or self.own.is_allocated)

    @property
    def busy(self) -> bool:
        """Whether the engine must run steps, until all ranks know the arenas."""
        return self.can_attach or (not self.cards and self._missing > 0 and not self.lost)

    def ready_bytes(self) -> int:
        """Return how much of each arena chunks may use now."""
        if self._missing or (self.cards and (self._on_gpu or self._far)):
            return 0
        return min([self.own.ready_bytes, *(one.region.length for one in self._far.values())])

    def take_reports(self, reports: StepReports) -> None:
        """Connect to the arenas of other machines when all are there."""
        for number, found in reports.arenas.items():
            if isinstance(found, str):
                self._fail(f"{self._card.machines[number].name} has no host memory for tiers: {found}")
            else:
                self._far[number] = found
        if not reports.arenas or self._missing or self.lost:
            return
        if self.exchange is not None:
            try:
                self.exchange.connect([found for _, found in sorted(self._far.items())])
            except TransferError as error:
                self._fail(f"host memory of other machines cannot be used: {error}")
                return
        machines = list(self._card.machines)
        for number, arena in self._far.items():
            machines[number] = replace(machines[number], arena=arena.handle)
        self.cards.append(replace(self._card, machines=tuple(machines)))

    def close(self) -> None:
        if self.exchange is not None:
            self.exchange.close()
        self.own.close()

    @property
    def _missing(self) -> int:
        """Number of machines whose arenas are still to be created."""
        return len(self._card.machines) - 1 - len(self._far)

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why
