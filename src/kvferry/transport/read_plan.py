"""Values: the plan of a read, computed from an order and the prepared lists of a peer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class PackedCells:
    """Cells of one route that move as images, by one method of the route."""

    route: PreparedRoute
    method: PreparedMethod
    cells: Cells


@dataclass(frozen=True, slots=True)
class RankRead:
    """The part of a read that comes from one rank. `direct` is None if nothing goes straight into blocks."""

    source: SourceRank
    direct: DescriptorIndices | None
    packed: tuple[PackedCells, ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The plan of a read of KV from a peer, for one order.

    Attributes:
        ranks: one entry for each rank of the peer that supplies anything.
        clears: pairs (copies, int64 ids of blocks) whose bytes are zeroed before the read.
        bytes_by_group: bytes of KV to read, by KV cache group of this engine, without gaps of an over-read.
        strategy_by_group: names of the strategies, joined by "+"; empty for a group without reads.
        seconds: duration of planning.
        bytes_per_second: speed of READs from the slowest rank; 0 if it was not measured.
        not_shared: why the peer's host memory is not mapped here; empty if it is.
    """

    ranks: tuple[RankRead, ...]
    clears: tuple[tuple[StagingCopies, Int64s], ...]
    bytes_by_group: tuple[int, ...]
    strategy_by_group: tuple[str, ...]
    counts: TransferCounts
    seconds: float
    bytes_per_second: float = 0.0
    not_shared: str = ""

    def clear(self) -> None:
        """Zero the blocks that the read does not fill completely: their stale bytes may be NaN."""
        for copies, blocks in self.clears:
            copies.clear(blocks)


def join_plans(plans: Sequence[ReadPlan]) -> ReadPlan:
    """Join the plans of the lanes that share an order. `seconds` becomes that of the slowest lane."""
    return ReadPlan(
        ranks=tuple(rank for plan in plans for rank in plan.ranks),
        clears=tuple(clear for plan in plans for clear in plan.clears),
        bytes_by_group=tuple(map(sum, zip(*(plan.bytes_by_group for plan in plans), strict=True))),
        strategy_by_group=tuple(
            "+".join(dict.fromkeys(name for names in group if names for name in names.split("+")))
            for group in zip(*(plan.strategy_by_group for plan in plans), strict=True)
        ),
        counts=sum_counts([plan.counts for plan in plans]),
        seconds=max(plan.seconds for plan in plans),
        bytes_per_second=slowest(plan.bytes_per_second for plan in plans),
        not_shared=next((plan.not_shared for plan in plans if plan.not_shared), ""),
    )


def slowest(speeds: Iterable[float]) -> float:
    """Return the lowest of several speeds in bytes per second; those that were not measured are 0."""
    return min(filter(None, speeds), default=0.0)  # 0 stands for "not measured"


def sum_counts(counts: Sequence[TransferCounts]) -> TransferCounts:
    """Return the sums, and of `largest_run` the maximum."""
    return TransferCounts(
        sum(one.bytes for one in counts),
        sum(one.pages for one in counts),
        sum(one.descriptors for one in counts),
        max((one.largest_run for one in counts), default=0),
    )


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a read order that one lane executes.

    Every cell is in exactly one share. All cells of a route and destination block are in the same share, so
    that a single lane fills the block and zeroes its unfilled bytes.

    Attributes:
        number: index of the share, which is not that of the lane.
        lanes: number of shares.
        least_bytes: approximate minimum number of bytes of a route in a share. A small route is split into
            fewer shares, or not at all.
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
        size = len(cells) * cell_bytes
        parts = min(self.lanes, size // self.least_bytes)
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


WHOLE_ORDER = Share()


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
    share: Share = WHOLE_ORDER


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of a read order. None of the order's transfers is in flight any more.

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


def join_results(parts: Sequence[ReadResult]) -> ReadResult:
    """Join the results of all shares of an order."""
    plans = [part.plan for part in parts if part.plan is not None]
    return ReadResult(
        key=parts[0].key,
        failure=next((part.failure for part in parts if part.failure is not None), None),
        plan=join_plans(plans) if plans else None,
        transfer_seconds=max(part.transfer_seconds for part in parts),
        check_seconds=max(part.check_seconds for part in parts),
        peer_lost=any(part.peer_lost for part in parts),
    )
