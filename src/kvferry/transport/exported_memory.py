"""What peers read from a worker: its cache, its lease words, and what it gathers for them.

One agent serves them all, with a thread of the transport that does its share while nobody looks.
"""

from __future__ import annotations

from kvferry.geometry import RankGeometry, Region
from kvferry.memory.huge_pages import request_huge_pages
from kvferry.transport.agent import Agent
from kvferry.transport.gather_server import GatherServer
from kvferry.transport.lease import LeaseWords
from kvferry.transport.messages import Outgoing, RankCard
from kvferry.transport.settings import TransferSettings
from kvferry.transport.staging import StagingArea


class ExportedMemory:
    """See the module.

    Attributes:
        card: what a peer needs to read it.
    """

    def __init__(
        self, geometry: RankGeometry, words: LeaseWords, settings: TransferSettings, agent: Agent
    ) -> None:
        """Register everything, and gather for whoever asks.

        Args:
            geometry: our rank.
            words: our lease words; words for what is gathered are added to them.
            settings: staging memory, addresses.
            agent: of our own; closed with us.

        Raises:
            ConfigError: the address cannot be bound, or the memory cannot be registered.
        """
        self._agent = agent
        outgoing = StagingArea(settings.staging_bytes, geometry.regions[0])
        first_word = words.add(outgoing.units)
        areas = [outgoing.region] if outgoing.units else []
        for region in geometry.regions:
            request_huge_pages(region, touched=True)
        for region in areas:
            request_huge_pages(region, touched=False)
        agent.register([*geometry.regions, *areas, Region(words.address, words.array.nbytes)])
        self._gatherer: GatherServer | None = None
        offered = None
        if outgoing.units:
            self._gatherer = GatherServer(
                settings.host, geometry, outgoing, words, first_word, settings.keys, settings.peers
            )
            region = outgoing.region
            offered = Outgoing(
                settings.advertise_host, self._gatherer.port, region.address, region.length, outgoing.units
            )
        self.card = RankCard(
            geometry, agent.metadata(), words.address, len(words.array), words.incarnation, offered
        )

    def close(self) -> None:
        """Serve no more."""
        if self._gatherer is not None:
            self._gatherer.close()
            self._gatherer = None
        self._agent.close()
