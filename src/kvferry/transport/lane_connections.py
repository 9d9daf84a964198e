"""A lane's connections to its peers, with all that is prepared to plan and execute reads from each.

    ASKED ─passed─▶ UP ─the transport fails─▶ DOWN ─an order after a pause─▶ ASKED
      └─refused, or no connection can be made─▶ DOWN, for a longer pause each time

In state ASKED, a child process tries the peer's transport metadata (`transport.metadata_validation`).

If a read still uses a connection, the connection is closed when the read has ended. Until then the lane opens
no other connection to that peer, because the transport identifies a peer by its name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvferry.common.errors import KVFerryError, TransferError
from kvferry.memory.copies import StagingCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.prepared_lists import DescriptorIndices, TransferCounts, join_indices
from kvferry.planning.select import (
    needed_cells,
    needed_tokens,
    take_cells,
    unfilled_cells,
    unwritten_blocks_needed,
)
from kvferry.planning.strategy import Strategy
from kvferry.planning.template import absent_layers, build_templates
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import RankCard
from kvferry.transport.prepared_routes import SourceRank, page_clearings, prepare_source
from kvferry.transport.read_plan import LoadFigures, ReadOrder
from kvferry.transport.segmented_read import SegmentedRead
from kvferry.transport.staging import LaneResources
from kvferry.transport.verification import Verification

logger = logging.getLogger(__name__)

MAX_SOURCES = 256  # maximum number of ranks of a peer
_LONGEST_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The plan of a lane's share of an order."""

    sources: list[SourceRank]  # ranks that supply anything
    direct: list[tuple[SourceRank, DescriptorIndices]]  # cells that one READ brings straight into blocks
    segmented: list[SegmentedRead]  # the lane removes those that have ended
    verifications: list[Verification]  # the lane removes those that have ended
    clears: list[tuple[StagingCopies, Int64s, Int64s]]  # blocks and cells that are zeroed before the read
    # KV cache group, strategy and size of each route's share
    moved: list[tuple[int, Strategy, TransferCounts]]
    groups: int  # number of this engine's KV cache groups
    seconds: float  # time that planning took

    def figures(self, transfer_seconds: float = 0.0, check_seconds: float = 0.0) -> LoadFigures:
        sizes = [0] * self.groups
        strategies: list[tuple[str, ...]] = [()] * self.groups
        pages = descriptors = largest = 0
        for group, strategy, counts in self.moved:
            sizes[group] += counts.bytes
            if strategy not in strategies[group]:
                strategies[group] += (strategy,)
            pages += counts.pages
            descriptors += counts.descriptors
            largest = max(largest, counts.largest_run)
        speed, not_shared = 0.0, ""
        for source in self.sources:
            speed = min(filter(None, (speed, source.speed.bytes_per_second)), default=0.0)
            not_shared = not_shared or source.not_shared
        return LoadFigures(
            bytes_by_group=tuple(sizes),
            strategies_by_group=tuple(strategies),
            reads=1,
            pages=pages,
            descriptors=descriptors,
            run_bytes=largest,
            plan_seconds=self.seconds,
            transfer_seconds=transfer_seconds,
            check_seconds=check_seconds,
            read_bytes_per_second=speed,
            not_shared=not_shared,
        )


class ConnectedPeer:
    """A connection of a lane to a peer engine, with all that is prepared to read the peer's KV cache.

    `sources` are all ranks of the peer, also those without KV for this rank, in the order of its cards.
    """

    def __init__(self, lane: LaneResources, cards: Sequence[RankCard]) -> None:
        """Load the peer's transport metadata, and prepare to read from its ranks, or raise a KVFerryError."""
        if len(cards) > MAX_SOURCES:
            raise TransferError(f"the peer has {len(cards)} ranks, at most {MAX_SOURCES} can be read from")
        self._lane = lane
        templates = build_templates([card.geometry for card in cards], lane.geometry)
        self._absent = page_clearings(absent_layers(templates, lane.geometry))
        self._leases = min(card.leases for card in cards)
        # Each step adds what undoes it, so that a peer that cannot be connected leaves nothing behind.
        with ExitStack() as made:
            self.sources = tuple(
                prepare_source(lane, card, template.routes, made)
                for card, template in zip(cards, templates, strict=True)
            )
            self._made = made.pop_all()
        # Routes whose blocks a load may fill only in part.
        self._of_cells = [
            prepared
            for source in self.sources
            for prepared in source.routes
            if prepared.route.dst_block_cells > 1
        ]

    def plan(self, order: ReadOrder) -> ReadPlan:
        """Plan the read of one request's KV. Raise TransferError if the order does not fit both engines."""
        started = time.perf_counter()
        self._check(order)
        settings, groups, span = self._lane.settings, self._lane.geometry.groups, order.span
        sources, direct = list[SourceRank](), list[tuple[SourceRank, DescriptorIndices]]()
        segmented = list[SegmentedRead]()
        clears = self._clears(order)
        moved, number = list[tuple[int, Strategy, TransferCounts]](), 0
        needed = [needed_tokens(group, span) for group in groups]
        for source in self.sources:
            indices, moved_before = list[DescriptorIndices](), len(moved)
            for prepared in source.routes:
                route = prepared.route
                at, table = route.dst_group, order.dst_tables[route.dst_group]
                first, last = needed_cells(route, groups[at].kind, span, needed[at])
                size = (last - first) * route.cell_bytes
                first, last = order.take_share(
                    (first, last), route.dst_block_cells, size, settings.lane_bytes, number
                )
                number += 1
                if first == last:
                    continue
                cells = take_cells(route, first, last, order.src_tables[route.src_group], table)
                if not (count := len(cells)):  # all are other ranks'
                    continue
                method = prepared.cheapest(count, source.speed.costs, order.strategy or settings.strategy)
                moved.append((at, method.method.strategy, method.counts(route, cells)))
                if method.method.image is None and not settings.verify:
                    indices.append(method.indices(cells, 0, 0))
                else:
                    segmented.append(SegmentedRead(self._lane, source, prepared, method, cells, order.lease))
            if indices:
                direct.append((source, join_indices(indices)))
            if len(moved) > moved_before:
                sources.append(source)
        verifications = self._verifications(segmented, order.lease)
        seconds = time.perf_counter() - started
        return ReadPlan(sources, direct, segmented, verifications, clears, moved, len(groups), seconds)

    def _clears(self, order: ReadOrder) -> list[tuple[StagingCopies, Int64s, Int64s]]:
        """Return the cells that no read fills in blocks that the load writes: old content may be NaN."""
        found = list[tuple[StagingCopies, Int64s, Int64s]]()
        if not (self._absent or self._of_cells):
            return found
        groups, span = self._lane.geometry.groups, order.span
        # One lane is enough, and it may be any. Draft layers that the peer lacks have one cell per page.
        for at, copies in self._absent if order.share == 0 else ():
            blocks = unwritten_blocks_needed(groups[at], span, order.dst_tables[at])
            found.append((copies, blocks, np.zeros_like(blocks)))
        for prepared in self._of_cells[order.share :: order.shares]:
            at = prepared.route.dst_group
            blocks, cells = unfilled_cells(prepared.route, groups[at], span, order.dst_tables[at])
            if len(blocks):
                found.append((prepared.clearing, blocks, cells))
        return found

    @property
    def measuring(self) -> bool:
        return any(source.speed.in_flight for source in self.sources)

    @property
    def measured(self) -> bool:
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
        """Release the lists, and remove the peer from NIXL. No read from the peer may be in flight."""
        self._made.close()

    def _verifications(self, reads: Sequence[SegmentedRead], lease: LeaseWord) -> list[Verification]:
        if not self._lane.settings.verify:
            return []
        return [Verification(self._lane.clock, each, lease) for each in reads]

    def _check(self, order: ReadOrder) -> None:
        theirs, ours = len(self.sources[0].card.geometry.groups), len(self._lane.geometry.groups)
        if len(order.src_tables) != theirs or len(order.dst_tables) != ours:
            raise TransferError(
                f"block tables for {len(order.src_tables)} and {len(order.dst_tables)} groups, "
                f"the engines have {theirs} and {ours}"
            )
        if not 0 <= order.lease.slot < self._leases:
            raise TransferError(f"lease slot {order.lease.slot} does not exist, the peer has {self._leases}")


def pause_seconds(failures: int) -> float:
    """Return the seconds to wait before a retry, after a number of failures in succession.

    >>> [pause_seconds(failures) for failures in (1, 2, 3, 4, 100)]
    [0.0, 1.0, 2.0, 4.0, 60.0]
    """
    return 0.0 if failures < 2 else min(2.0 ** min(failures - 2, 10), _LONGEST_SECONDS)


@dataclass(slots=True)
class _Link:
    """A peer and its connection: UP if `peer` is set, ASKED if `refusal` is set, DOWN if neither is."""

    name: str
    cards: tuple[RankCard, ...]
    peer: ConnectedPeer | None = None
    refusal: Future[str] | None = None  # result of `MetadataValidator.validate`
    reason: str = ""  # why there is no connection; only used in state DOWN
    failures: int = 0  # to connect to the peer or to read from it, in succession
    retry_at: float = 0.0  # time before which the peer is not connected again


class LaneConnections:
    """The connections of one lane to its peers, by name of the peer. Only the lane's thread uses it."""

    def __init__(
        self,
        make: Callable[[tuple[RankCard, ...]], ConnectedPeer],
        validate: Callable[[tuple[RankCard, ...]], Future[str]],
        in_use: Callable[[], Collection[ConnectedPeer]],
        clock: Callable[[], float],
    ) -> None:
        """Create an empty collection. `make` connects a peer or raises. `in_use` returns what reads use."""
        self._make, self._validate, self._in_use, self._clock = make, validate, in_use, clock
        self._links: dict[str, _Link] = {}
        # Those in state ASKED and UP, so that polls and reads do not search all peers.
        self._asked: dict[str, _Link] = {}
        self._up: dict[ConnectedPeer, _Link] = {}
        self._leaving: list[tuple[str, ConnectedPeer]] = []

    def connect(self, name: str, cards: tuple[RankCard, ...]) -> None:
        """Start to connect a peer, unless it is connected. Its transport metadata is validated first."""
        link = self._links.get(name)
        if link is None or link.peer is None:
            self._asked.pop(name, None)
            link = self._links[name] = _Link(name, cards)
            self._ask(link)
            self._apply_verdict(link)

    def disconnect(self, name: str) -> None:
        """Forget a peer. Its connection is closed when no read uses it any more."""
        link = self._links.pop(name, None)
        self._asked.pop(name, None)
        if link is not None and link.peer is not None:
            self._leave(link.peer)

    def get(self, name: str) -> ConnectedPeer | str | None:
        """Return the connection to a peer; None while it is being validated, or why there is none.

        If the peer failed and may be retried now, start to connect it again.
        """
        link = self._links.get(name)
        if link is None:
            return f"peer {name} is not connected"
        if link.peer is None and link.refusal is None and self._clock() >= link.retry_at:
            self._ask(link)
        self._apply_verdict(link)
        if link.refusal is not None:
            return None
        return link.reason if link.peer is None else link.peer

    def process_verdicts(self) -> bool:
        """Connect peers whose metadata has passed, mark refused ones as failed; return whether any was."""
        settled = False
        for link in list(self._asked.values()):
            settled |= self._apply_verdict(link)
        return settled

    def mark_failed(self, peer: ConnectedPeer, reason: str) -> None:
        """Record that a connection failed. `get` returns the reason until the pause is over."""
        if peer in self._up:
            link = self._leave(peer)
            link.peer = None
            self._mark_down(link, reason)

    def mark_served(self, peer: ConnectedPeer) -> None:
        if (link := self._up.get(peer)) is not None:
            link.failures = 0

    def close_unused(self) -> None:
        """Close the connections that failed or were disconnected and that no read uses any more."""
        if not self._leaving:  # as usual, and the lane calls this in every round
            return
        in_use, leaving, self._leaving = self._in_use(), self._leaving, []
        for name, peer in leaving:
            if peer in in_use:
                self._leaving.append((name, peer))
                continue
            try:
                peer.close()
            except Exception:
                logger.exception("lane: an error while closing the connection to %s", name)

    def __iter__(self) -> Iterator[ConnectedPeer]:
        return iter([*(peer for _, peer in self._leaving), *self._up])

    def _leave(self, peer: ConnectedPeer) -> _Link:
        link = self._up.pop(peer)
        self._leaving.append((link.name, peer))
        return link

    def _ask(self, link: _Link) -> None:
        self.close_unused()
        # The transport identifies a peer by its name, so it can have only one connection to it.
        if any(link.name == leaving for leaving, _ in self._leaving):
            link.reason = f"peer {link.name} cannot be read from: reads of its last connection are in flight"
            return
        link.refusal = self._validate(link.cards)
        self._asked[link.name] = link

    def _apply_verdict(self, link: _Link) -> bool:
        if link.refusal is None or not link.refusal.done():
            return False
        reason, link.refusal = link.refusal.result(), None
        self._asked.pop(link.name, None)
        try:
            if reason:
                raise TransferError(reason)
            link.peer = self._make(link.cards)
            self._up[link.peer] = link
        except Exception as error:  # noqa: BLE001 - only this peer is DOWN
            log_unexpected(error)
            self._mark_down(link, f"peer {link.name} cannot be read from: {error}")
        return True

    def _mark_down(self, link: _Link, reason: str) -> None:
        link.reason, link.failures = reason, link.failures + 1
        link.retry_at = self._clock() + pause_seconds(link.failures)


def log_unexpected(error: Exception) -> None:
    """Log an error with its traceback, unless it is one of kvferry's own errors."""
    if not isinstance(error, KVFerryError):
        logger.error("lane: unexpected error, please report it: %s", error, exc_info=error)
