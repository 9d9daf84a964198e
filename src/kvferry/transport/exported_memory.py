"""The memory of a worker that peers read: its KV cache, its lease words, its outgoing staging area.

A lease word is an integer that changes before the leased blocks are freed. One NIXL agent serves all readers.
NIXL's progress thread does its work.
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
    """The memory of a worker that peers can read, and the server that packs cells for peers.

    A cell is the part of a block that moves as one unit. The server packs cells into a staging area, which is
    part of the memory.

    Attributes:
        card: description of this worker, which the scheduler sends to peers.
    """

    def __init__(
        self, geometry: RankGeometry, words: LeaseWords, settings: TransferSettings, agent: Agent
    ) -> None:
        """Register KV cache, staging area and lease words with NIXL, and start the server that packs cells.

        The server packs cells (parts of blocks) into the staging area when peers ask for it.

        Args:
            geometry: addresses and layout of this worker's KV cache.
            words: lease words of this worker: integers that change before leased blocks are freed. The
                constructor appends one word for each `UNIT_BYTES` of the staging area, so that readers can
                detect that packed cells have been overwritten.
            settings: settings of transfers, such as the size of the staging area. Without a staging area, no
                server is started.
            agent: NIXL agent that nothing else uses. `close` closes the agent.

        Raises:
            ConfigError: `settings.host` cannot be bound, or the installed NIXL writes transport metadata that
                peers cannot validate.
        """
        self._agent = agent
        outgoing = StagingArea(settings.staging_bytes, geometry.regions[0])
        size = outgoing.units * UNIT_BYTES
        self._shared = shared = make_outgoing_file(size, geometry.regions[0]) if size else None
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
            self._gatherer = GatherServer(
                host=settings.host,
                geometry=geometry,
                area=outgoing,
                words=words,
                first_word=first_word,
                keys=settings.keys,
                peers=settings.peers,
                ports=settings.ports,
                shared=shared.area if shared else None,
            )
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
        """Stop the server that packs cells (parts of blocks) for peers, and close the NIXL agent."""
        if self._gatherer is not None:
            self._gatherer.close()
            self._gatherer = None
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        self._agent.close()
