"""Values: an order to read KV from a peer, the share of it that one lane reads, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import Cells, LoadSpan
from kvferry.planning.strategy import Strategy
from kvferry.transport.lease import LeaseWord
from kvferry.transport.read_plan import ReadPlan, join_plans


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
