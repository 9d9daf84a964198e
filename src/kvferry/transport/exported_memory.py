"""The memory of a worker that peers read: its KV cache, its lease words, its outgoing staging area.

One NIXL agent serves all readers. NIXL's progress thread does its work.
"""

from __future__ import annotations

from kvferry.geometry import RankGeometry, Region
from kvferry.memory.huge_pages import request_huge_pages
from kvferry.transport.agent import Agent
from kvferry.transport.gather_server import GatherServer
from kvferry.transport.lease import LeaseWords
from kvferry.transport.messages import Outgoing, RankCard
from kvferry.transport.settings import TransferSettings
from kvferry.transport.shared_area import make_outgoing_file
from kvferry.transport.staging import UNIT_BYTES, StagingArea


class ExportedMemory:
    """The memory of a worker that peers can read, and the server that gathers for them.

    Attributes:
        card: description of this worker, which the scheduler sends to peers.
    """

    def __init__(
        self, geometry: RankGeometry, words: LeaseWords, settings: TransferSettings, agent: Agent
    ) -> None:
        """Register KV cache, staging area and lease words with NIXL, and start the server that gathers.

        Args:
            words: lease words of this worker. Words that protect the staging area are appended.
            settings: without a staging area, no server is started.
            agent: NIXL agent that nothing else uses. `close` closes it.

        Raises:
            ConfigError: `settings.host` cannot be bound, or the installed NIXL writes transport metadata that
                peers cannot validate.
        """
        self._agent = agent
        outgoing = StagingArea(settings.staging_bytes, geometry.regions[0])
        size = outgoing.units * UNIT_BYTES
        self._shared = shared = make_outgoing_file(size, geometry.regions[0]) if size else None
        # Before registration, because the words move to a new array.
        first_word = words.add(outgoing.units)
        if shared is not None:
            words.add(shared.area.units)
        areas = [outgoing.region] if outgoing.units else []
        for region in geometry.regions:
            request_huge_pages(region, touched=True)
        for region in areas:
            request_huge_pages(region, touched=False)
        agent.register([*geometry.regions, *areas, Region(words.address, words.array.nbytes)])
        self._gatherer: GatherServer | None = None
        offered = None
        if outgoing.units:
            area = shared.area if shared else None
            self._gatherer = GatherServer(geometry, outgoing, words, first_word, settings, shared=area)
            region = outgoing.region
            offered = Outgoing(
                host=settings.advertise_host,
                port=self._gatherer.port,
                address=region.address,
                bytes=region.length,
                words=len(words.array) - first_word,
                file=shared.file if shared else None,
            )
        self.card = RankCard(
            geometry=geometry,
            agent=agent.metadata(),
            words_address=words.address,
            words=len(words.array),
            incarnation=words.incarnation,
            outgoing=offered,
        )

    def close(self) -> None:
        if self._gatherer is not None:
            self._gatherer.close()
            self._gatherer = None
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        self._agent.close()
