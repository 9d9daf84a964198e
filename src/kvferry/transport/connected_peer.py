"""A connected peer: its prepared descriptor lists, and the plans of reads from it.

When a peer connects, two descriptor lists are prepared for each of its ranks that supplies KV: one of local
memory and one of the rank's memory. A read then needs only an array of indices into each list. Two more lists
cover the lease words, which are integers in registered memory that change before leased blocks are freed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from kvferry.errors import TransferError
from kvferry.geometry import RankGeometry, Region
from kvferry.memory.staging_copies import StagingCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.prepared_lists import DescriptorIndices
from kvferry.planning.select import partly_written_blocks, select_cells, unwritten_blocks_needed
from kvferry.planning.strategy import Strategy
from kvferry.planning.template import Route, absent_layers, build_templates
from kvferry.transport.agent import Agent
from kvferry.transport.gather_client import GatherClient
from kvferry.transport.messages import Outgoing, RankCard
from kvferry.transport.metadata import WORD_BYTES
from kvferry.transport.packed_read import RankLists
from kvferry.transport.prepared_routes import RoutePreparation, page_clearings
from kvferry.transport.read_order import ReadOrder
from kvferry.transport.read_plan import PackedCells, RankRead, ReadPlan, SourceRank, slowest, sum_tallies
from kvferry.transport.read_speed import ReadSpeed
from kvferry.transport.settings import TransferSettings
from kvferry.transport.shared_area import MappedArea
from kvferry.transport.staging import StagingArea

MAX_SOURCES = 256
"""Maximum number of ranks of a peer."""


class ConnectedPeer:
    """A connection to a peer engine, with the descriptor lists that are needed to read the peer's KV cache.

    Attributes:
        sources: all ranks of the peer, including those that have no KV for this rank, in the order in which
            the peer describes its ranks.
        src_groups: number of KV cache groups of the peer.
    """

    def __init__(
        self,
        agent: Agent,
        own_geometry: RankGeometry,
        cards: Sequence[RankCard],
        words: Region,
        landing: StagingArea,
        context: zmq.Context[Any],
        settings: TransferSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the peer's transport metadata, and prepare the NIXL descriptor lists to read from its ranks.

        Args:
            agent: NIXL agent of the lane (reading thread) that owns this connection.
            own_geometry: geometry of this rank.
            cards: descriptions of all ranks of the peer.
            words: registered memory of this rank into which the peer's lease words are read. A lease word is
                an integer in the peer's memory that changes before leased blocks are freed.
            landing: staging area into which packed cells (parts of blocks) are read.
            context: ZeroMQ context for the connections that ask the peer's ranks to pack cells.
            settings: settings of transfers, such as the transfer strategy and the measured costs that decide
                between strategies.
            clock: function that returns the current time in seconds, to measure the speed of READs.

        Raises:
            Incompatible: the peer's ranks lack a layer, or a part of one, that this rank needs.
            TransferError: the peer has more than `MAX_SOURCES` ranks, the transport cannot reach the peer, a
                list would have too many descriptors, or no transfer method can read some part of the KV.
            ProtocolError: the transport metadata of a rank is malformed.
        """
        if len(cards) > MAX_SOURCES:
            raise TransferError(f"the peer has {len(cards)} ranks, at most {MAX_SOURCES} can be read from")
        self._own_geometry, self._settings = own_geometry, settings
        templates = build_templates([card.geometry for card in cards], own_geometry)
        self._absent = page_clearings(absent_layers(templates, own_geometry))
        self.src_groups = len(cards[0].geometry.groups)
        with ExitStack() as made:
            prepare = _RankPreparation(
                agent=agent,
                own_geometry=own_geometry,
                words=words,
                landing=landing,
                context=context,
                settings=settings,
                clock=clock,
                made=made,
            )
            self.sources = tuple(
                prepare.source(card, template.routes) for card, template in zip(cards, templates, strict=True)
            )
            self._made = made.pop_all()

    def plan(self, order: ReadOrder) -> ReadPlan:
        """Plan how to read the KV of one request from the peer.

        For each rank of the peer, the plan contains the cells (parts of blocks) to read, the method, and the
        descriptors (address ranges) to read with. It also contains the bytes of this rank's blocks to set to
        zero.

        Args:
            order: what to read: range of the prompt's tokens, block tables of the peer and of this engine,
                and the peer's lease on its blocks.

        Raises:
            TransferError: the block tables do not match the KV cache groups, a block id is invalid, or the
                peer does not have the lease slot that the order names.
        """
        started = time.perf_counter()
        self._check(order)
        pinned = order.strategy or self._settings.strategy
        by_group = [0] * len(self._own_geometry.groups)
        strategies: list[dict[Strategy, None]] = [{} for _ in by_group]
        ranks, tallies = [], []
        clears = self._absent_layer_clearings(order)
        number = 0
        for source in self.sources:
            direct, packed = list[DescriptorIndices](), list[PackedCells]()
            for prepared in source.routes:
                route = prepared.route
                group = self._own_geometry.groups[route.dst_group]
                dst_table = order.dst_tables[route.dst_group]
                cells = select_cells(
                    route,
                    group,
                    span=order.span,
                    src_table=order.src_tables[route.src_group],
                    dst_table=dst_table,
                )
                cells = order.share.select(cells, route.cell_bytes, number)
                number += 1
                if not len(cells):
                    continue
                method = prepared.choose(len(cells), source.speed.costs, pinned)
                counted = prepared.counts(cells, method)
                by_group[route.dst_group] += counted.bytes
                strategies[route.dst_group][method.method.strategy] = None
                tallies.append(counted)
                if method.method.image is None:
                    direct.append(prepared.direct_indices(cells))
                else:
                    packed.append(PackedCells(prepared, method, cells))
                left = partly_written_blocks(route, group, order.span, dst_table)
                if len(left) and len(left := left[np.isin(left, cells.dst_block)]):
                    clears.append((prepared.clearing, left))
            if direct or packed:
                ranks.append(RankRead(source, _join_indices(direct), tuple(packed)))
        return ReadPlan(
            ranks=tuple(ranks),
            clears=tuple(clears),
            bytes_by_group=tuple(by_group),
            strategy_by_group=tuple("+".join(found) for found in strategies),
            counts=sum_tallies(tallies),
            seconds=time.perf_counter() - started,
            bytes_per_second=slowest(rank.source.speed.bytes_per_second for rank in ranks),
            not_shared=next((rank.source.not_shared for rank in ranks if rank.source.not_shared), ""),
        )

    @property
    def measuring(self) -> bool:
        """True while the speed of READs is being measured and one of them is in flight."""
        return any(source.speed.in_flight for source in self.sources)

    @property
    def measured(self) -> bool:
        """True if the speed of READs is known, or will not be."""
        return all(source.speed.ended for source in self.sources)

    @property
    def speed_pending(self) -> bool:
        """True while orders should wait until the speed of READs is known."""
        return any(source.speed.pending for source in self.sources)

    def measure(self) -> None:
        """Go on measuring the speed of READs, one rank after the other, without waiting."""
        for source in self.sources:
            source.speed.advance()
            if source.speed.pending:
                break  # READs from several ranks at a time would slow each other down

    def close(self) -> None:
        """Release the descriptor lists and remove the peer from NIXL.

        No read from the peer may be in flight.
        """
        self._made.close()

    def _absent_layer_clearings(self, order: ReadOrder) -> list[tuple[StagingCopies, Int64s]]:
        """List the blocks that must be zeroed in draft layers which this rank has and the peer does not have.

        No read fills these layers, and the old content of the blocks may be NaN.

        Args:
            order: what to read, and which share of it this lane (reading thread) reads.

        Returns:
            (operation that zeroes some of these layers in given blocks, int64 ids of the blocks to zero), for
            one or more sets of layers. Empty for all shares but number 0, so that one lane zeroes the blocks.
        """
        if order.share.number:
            return []
        found = []
        for number, loops in self._absent:
            group = self._own_geometry.groups[number]
            table = order.dst_tables[number]
            ids = unwritten_blocks_needed(group, order.span, table)
            found.append((loops, ids))
        return found

    def _check(self, order: ReadOrder) -> None:
        if len(order.src_tables) != self.src_groups or len(order.dst_tables) != len(
            self._own_geometry.groups
        ):
            raise TransferError(
                f"block tables for {len(order.src_tables)} and {len(order.dst_tables)} groups, "
                f"the engines have {self.src_groups} and {len(self._own_geometry.groups)}"
            )
        fewest = min(source.leases for source in self.sources)
        if not 0 <= order.lease.slot < fewest:
            raise TransferError(f"lease slot {order.lease.slot} does not exist, the peer has {fewest}")


@dataclass(frozen=True, slots=True)
class _RankPreparation:
    """Prepares reads from a new peer, one rank of the peer after the other.

    Attributes:
        agent: NIXL agent of the lane (reading thread) that owns the connection.
        own_geometry: geometry of this rank.
        words: registered memory of this rank into which the peer's lease words are read. A lease word is an
            integer that changes before leased blocks are freed.
        landing: staging area into which packed cells (parts of blocks) are read.
        context: ZeroMQ context for the connections that ask the peer's ranks to pack cells.
        settings: settings of transfers.
        clock: function that returns the current time in seconds.
        made: exit stack to which each step of the preparation adds a callback that undoes the step.
    """

    agent: Agent
    own_geometry: RankGeometry
    words: Region
    landing: StagingArea
    context: zmq.Context[Any]
    settings: TransferSettings
    clock: Callable[[], float]
    made: ExitStack

    def source(self, card: RankCard, routes: Sequence[Route]) -> SourceRank:
        agent = self.agent
        shared, not_shared = _map(card.outgoing, self.own_geometry.regions[0])
        if shared is not None:
            self.made.callback(shared.close)
        preparation = RoutePreparation(
            self.own_geometry, self.landing, card, self.settings.costs, shared=shared
        )
        for route in routes:
            preparation.add(route)
        src, dst = preparation.src, preparation.dst
        client = None
        if preparation.gathers and card.outgoing is not None:
            there_host, port = card.outgoing.host, card.outgoing.port
            client = GatherClient(self.context, there_host, port, preparation.gathers, self.settings.keys)
            self.made.callback(client.close)
        name = agent.add_peer(card.agent)
        self.made.callback(agent.drop_peer, name)
        there = Region(card.words_address, card.words * WORD_BYTES)
        lists = RankLists(
            local=self._list(None, self.own_geometry.regions[0], dst.table()) if dst.entries else None,
            remote=self._list(name, card.geometry.regions[0], src.table()) if src.entries else None,
            local_words=self._list(None, self.words, _word_rows(self.words)),
            remote_words=self._list(name, there, _word_rows(there)),
            incarnation=card.incarnation,
            area_words=range(card.leases, card.words),
        )
        size, costs = self.settings.timed_read_bytes if src.entries else 0, self.settings.costs
        speed = ReadSpeed(agent, name, card.geometry.regions[0], self.landing, size, costs, self.clock)
        self.made.callback(speed.close)
        return SourceRank(name, tuple(preparation.routes), lists, client, card.leases, speed, not_shared)

    def _list(self, owner: str | None, region: Region, rows: Int64s) -> Any:
        handle = self.agent.prepare(owner, region, rows)
        self.made.callback(self.agent.release_list, handle)
        return handle


def _map(outgoing: Outgoing | None, like: Region) -> tuple[MappedArea | None, str]:
    """Map the outgoing file of a peer's rank; return None and the reason if that is not possible.

    Args:
        outgoing: the peer's description of its staging memory.
        like: region of this worker's KV cache.
    """
    if outgoing is None or outgoing.file is None or outgoing.file.size != outgoing.bytes:
        return None, "the peer offers no memory that engines of its machine can map; its log says why"
    try:
        return MappedArea(outgoing.file, like), ""
    except TransferError as error:
        return None, str(error)


def _word_rows(region: Region) -> Int64s:
    return np.array([[region.address, WORD_BYTES, WORD_BYTES, region.length // WORD_BYTES]], np.int64)


def _join_indices(parts: Sequence[DescriptorIndices]) -> DescriptorIndices | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return DescriptorIndices(np.concatenate([p.src for p in parts]), np.concatenate([p.dst for p in parts]))
