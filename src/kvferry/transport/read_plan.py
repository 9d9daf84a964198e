"""Values: an order to read KV from a peer, the plan by which lanes read it, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from kvferry.memory.copies import StagingCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.prepared_lists import DescriptorIndices, TransferCounts
from kvferry.planning.select import Cells, LoadSpan
from kvferry.planning.strategy import Strategy
from kvferry.transport.gather_client import GatherClient
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import RankCard
from kvferry.transport.prepared_routes import PreparedMethod, PreparedRoute
from kvferry.transport.read_speed import ReadSpeed


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a read order that one lane executes.

    Every cell is in exactly one share. All cells of a route and destination block are in the same share, so
    that a single lane fills the block and zeroes its unfilled bytes.

    Attributes:
        number: index of the share, which is not that of the lane.
        lanes: number of shares.
        least_bytes: approximate minimum number of bytes of a route in a share.
    """

    number: int = 0
    lanes: int = 1
    least_bytes: int = 1

    def select(self, cells: Cells, cell_bytes: int, route: int) -> Cells:
        """Select the cells of a route that belong to this share.

        Args:
            cells: all cells of the route to read.
            route: index of the route. Its first cells are in share ``route % lanes``; a route with less than
                `least_bytes` is in share 0.
        """
        parts = min(self.lanes, len(cells) * cell_bytes // self.least_bytes)
        if parts < 1:
            return cells if self.number == 0 else cells[:0]
        # Routes that are split into few parts begin at different shares, so that share 0 does not get all.
        part = (self.number - route) % self.lanes
        if part >= parts:
            return cells[:0]
        return cells[_cut(cells.dst_block, part, parts) : _cut(cells.dst_block, part + 1, parts)]


def _cut(blocks: Int64s, part: int, parts: int) -> int:
    """Return the index of the first cell of a share; for `part` = `parts`, the number of cells.

    Args:
        blocks: destination block of each cell, int64 of shape (n,). Equal ids are adjacent.
    """
    at = len(blocks) * part // parts
    while 0 < at < len(blocks) and blocks[at] == blocks[at - 1]:
        at += 1
    return at


_WHOLE = Share()


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """An order to read the KV blocks of one request from a peer.

    Attributes:
        key: unique name of this order. A retry of the same read gets a new name.
        peer: name under which the peer was connected.
        src_tables, dst_tables: block tables of the peer and of this engine: one int64 array of block ids per
            KV cache group, in the order of the tokens.
        lease: word of the producer's lease on its blocks.
        strategy: None for the strategy in `TransferSettings`.
    """

    key: str
    peer: str
    span: LoadSpan
    src_tables: tuple[Int64s, ...]
    dst_tables: tuple[Int64s, ...]
    lease: LeaseWord
    strategy: Strategy | None = None
    share: Share = _WHOLE


@dataclass(frozen=True, slots=True)
class SourceRank:
    """A rank of a peer, with everything that is prepared to read from it.

    Attributes:
        agent: NIXL's name of the rank.
        local, remote: NIXL's lists of this worker's and of the rank's memory: cells in blocks, and images in
            the staging area. None if the rank supplies no KV.
        local_words, remote_words: NIXL's lists of `LaneResources.words` and of the rank's words.
        client: asks the rank to gather; None if no method needs it.
        not_shared: why the rank's host memory is not mapped here; empty if it is.
    """

    card: RankCard
    agent: str
    routes: tuple[PreparedRoute, ...]
    local: Any
    remote: Any
    local_words: Any
    remote_words: Any
    client: GatherClient | None
    speed: ReadSpeed
    not_shared: str


class PackedCells(NamedTuple):
    """Cells of one route that move as images, by one method of the route."""

    route: PreparedRoute
    method: PreparedMethod
    cells: Cells


class RankRead(NamedTuple):
    """The part of a read that comes from one rank. `direct` is None if nothing goes straight into blocks."""

    source: SourceRank
    direct: DescriptorIndices | None
    packed: list[PackedCells]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The plan of a read of KV from a peer: of a lane's share of an order, or of all shares (`joined`).

    Attributes:
        ranks: one entry for each rank of the peer that supplies anything.
        clears: pairs (copies, int64 ids of blocks) whose bytes are zeroed before the read.
        bytes_by_group: bytes of KV to read, by KV cache group of this engine, without gaps of an over-read.
        strategies_by_group: names of the strategies; empty for a group without reads.
        seconds: duration of planning, on the slowest lane.
        bytes_per_second: speed of READs from the slowest rank; 0 if it was not measured.
        not_shared: why the peer's host memory is not mapped here; empty if it is.
    """

    ranks: tuple[RankRead, ...]
    clears: tuple[tuple[StagingCopies, Int64s], ...]
    bytes_by_group: tuple[int, ...]
    strategies_by_group: tuple[tuple[str, ...], ...]
    counts: TransferCounts
    seconds: float
    bytes_per_second: float = 0.0
    not_shared: str = ""

    def joined(self, other: ReadPlan) -> ReadPlan:
        return ReadPlan(
            self.ranks + other.ranks,
            self.clears + other.clears,
            tuple(map(int.__add__, self.bytes_by_group, other.bytes_by_group)),
            tuple(map(join_names, self.strategies_by_group, other.strategies_by_group)),
            add_counts(self.counts, other.counts),
            max(self.seconds, other.seconds),
            min(filter(None, (self.bytes_per_second, other.bytes_per_second)), default=0.0),
            self.not_shared or other.not_shared,
        )


def add_counts(one: TransferCounts, other: TransferCounts) -> TransferCounts:
    """Return the sums, and of `largest_run` the maximum."""
    return TransferCounts(
        one.bytes + other.bytes,
        one.pages + other.pages,
        one.descriptors + other.descriptors,
        max(one.largest_run, other.largest_run),
    )


def join_names(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """Return the different names of both, in order."""
    return tuple(dict.fromkeys(one + other))


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of a read order, or of one share of it. None of its transfers is in flight any more.

    Attributes:
        failure: None if all bytes arrived and are valid.
        plan: None if the order failed before its read was started.
        transfer_seconds: time until all KV had arrived, or the read failed; 0 if it was not started.
        check_seconds: time for the lease words; 0 if they were not read.
        peer_lost: True if the peer cannot be read from, or has restarted, so that other orders will fail too.
    """

    key: str
    failure: str | None
    plan: ReadPlan | None = None
    transfer_seconds: float = 0.0
    check_seconds: float = 0.0
    peer_lost: bool = False

    def joined(self, other: ReadResult) -> ReadResult:
        """Return the result of this share and of another of the same order, which ended later."""
        plans = [plan for plan in (self.plan, other.plan) if plan is not None]
        return ReadResult(
            self.key,
            other.failure if self.failure is None else self.failure,
            reduce(ReadPlan.joined, plans) if plans else None,
            max(self.transfer_seconds, other.transfer_seconds),
            max(self.check_seconds, other.check_seconds),
            self.peer_lost or other.peer_lost,
        )
