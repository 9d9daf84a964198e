"""Values of an order to read from a peer, and of a lane's share of it."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import Cells, LoadSpan
from kvferry.planning.strategy import Strategy
from kvferry.transport.lease import LeaseWord


@dataclass(frozen=True, slots=True)
class Share:
    """The share of an order that lane `number` of `lanes` reads; no share is smaller than `least_bytes`.

    Every cell is in exactly one share, and all cells of a destination block are in the same one. So the lane
    that reads into a block also clears it.
    """

    number: int = 0
    lanes: int = 1
    least_bytes: int = 1

    def select(self, cells: Cells, cell_bytes: int, route: int) -> Cells:
        """Return the cells of a route that this lane reads.

        Args:
            cells: all cells of the route.
            cell_bytes: bytes of one cell.
            route: index of the route, which rotates the lanes, so that few large cells of several routes use
                all lanes.
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
    """Return the index of the first cell of a share, moved to a block boundary."""
    at = len(blocks) * part // parts
    while 0 < at < len(blocks) and blocks[at] == blocks[at - 1]:
        at += 1
    return at


WHOLE_ORDER = Share()


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """An order to read one request's blocks.

    Attributes:
        key: unique name of this attempt.
        peer: name under which the peer was connected.
        span: the tokens of the prompt to read.
        src_tables, dst_tables: block ids by position per group of each side, int64 arrays.
        lease: the word of the producer's lease.
        strategy: the only strategy to use; None for that of the settings.
        share: the share that this lane reads.
    """

    key: str
    peer: str
    span: LoadSpan
    src_tables: tuple[Int64s, ...]
    dst_tables: tuple[Int64s, ...]
    lease: LeaseWord
    strategy: Strategy | None = None
    share: Share = WHOLE_ORDER
