"""Data classes: an order to read KV from a peer, and the share of an order that one lane reads.

A lane is a thread that reads. A cell is the unit of transfer: the largest number of tokens that divides the
block sizes of both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import Cells, LoadSpan
from kvferry.planning.strategy import Strategy
from kvferry.transport.lease import LeaseWord


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a read order that one lane (reading thread) executes.

    Every cell (part of a block) is in exactly one share. For each route (set of layers that are read
    together), all cells of a destination block are in the same share. So a single lane fills the block, and
    zeroes the bytes of the block that the read does not fill.

    Attributes:
        number: index of the share, from 0. It is not the index of the lane: with each order, another lane
            gets share 0, so that the load is even.
        lanes: number of lanes, which is the number of shares.
        least_bytes: approximate minimum number of bytes of a route in a share. A small route is split into
            fewer shares, or not at all.
    """

    number: int = 0
    lanes: int = 1
    least_bytes: int = 1

    def select(self, cells: Cells, cell_bytes: int, route: int) -> Cells:
        """Select the cells (parts of blocks) of a route that belong to this share of a read order.

        Args:
            cells: all cells of the route to read.
            cell_bytes: size of a cell in bytes.
            route: index of the route (set of layers that are read together). The first cells of the route are
                in share ``route % lanes``; a route with less than `least_bytes` is in share 0.

        Returns:
            Selected cells; empty if the share contains none of the route.
        """
        size = len(cells) * cell_bytes
        parts = min(self.lanes, size // self.least_bytes)
        if parts < 1:
            return cells if self.number == 0 else cells[:0]
        part = (self.number - route) % self.lanes
        if part >= parts:
            return cells[:0]
        return cells[_cut(cells.dst_block, part, parts) : _cut(cells.dst_block, part + 1, parts)]


def _cut(blocks: Int64s, part: int, parts: int) -> int:
    """Return the index of a share's first cell (part of a block), if cells are split into about equal shares.

    The boundary is moved to the next destination block, so that all cells of a block are in the same share.
    A share may be empty: then the result is the same for it and for the next share.

    Args:
        blocks: destination block id of each cell, int64 of shape (n,); equal ids are adjacent.
        part: index of the share, from 0. If `part` equals `parts`, the result is the number of cells.
        parts: number of shares.
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
        span: range of the prompt's tokens to read.
        src_tables, dst_tables: block tables of the peer and of this engine: one int64 array of block ids per
            KV cache group, in the order of the tokens.
        lease: index and valid value of the lease word, an integer in the peer's memory. The word shows
            whether the producer's lease on its blocks is valid.
        strategy: transfer strategy to use; None for the strategy in `TransferSettings`.
        share: share of the order that one lane (reading thread) reads.
    """

    key: str
    peer: str
    span: LoadSpan
    src_tables: tuple[Int64s, ...]
    dst_tables: tuple[Int64s, ...]
    lease: LeaseWord
    strategy: Strategy | None = None
    share: Share = WHOLE_ORDER
