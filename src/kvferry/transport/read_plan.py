"""Values: what is to be read for one request, what share of it a lane reads, and what that comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.memory.copy import Loops
from kvferry.planning.pieces import Int64s
from kvferry.planning.request import Indices, Tally
from kvferry.planning.select import Cells, Span
from kvferry.planning.strategy import Strategy
from kvferry.transport.gather_client import GatherClient
from kvferry.transport.lease import Ticket
from kvferry.transport.packed import Lists
from kvferry.transport.prepared import PreparedRoute, PreparedWay


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of an order a lane reads: its `number` among `lanes`, none of less than `least_bytes`.

    Every cell is in exactly one share, and all cells of a destination block are in one: what is cleared in a
    block is cleared by whoever reads into it.
    """

    number: int = 0
    lanes: int = 1
    least_bytes: int = 1

    def of(self, cells: Cells, cell_bytes: int, route: int) -> Cells:
        """Its part of the cells of a route.

        Args:
            cells: all of them.
            cell_bytes: of one.
            route: number of the route: large cells of several routes go to lanes in turn.
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
    """Where a part begins: at the cells of another block."""
    at = len(blocks) * part // parts
    while 0 < at < len(blocks) and blocks[at] == blocks[at - 1]:
        at += 1
    return at


ALL = Share()


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """One request's blocks, to be read.

    Attributes:
        key: names this attempt; no other attempt has it.
        peer: name under which the peer was connected.
        span: how much of the prompt.
        src_tables, dst_tables: block ids by position per group of each side, int64 arrays.
        ticket: the producer's promise.
        strategy: pinned for this one; None: as the settings say.
        share: the part of it that this reader reads.
    """

    key: str
    peer: str
    span: Span
    src_tables: tuple[Int64s, ...]
    dst_tables: tuple[Int64s, ...]
    ticket: Ticket
    strategy: Strategy | None = None
    share: Share = ALL


@dataclass(frozen=True, slots=True)
class PackedCells:
    """Cells of one route that do not go direct."""

    route: PreparedRoute
    way: PreparedWay
    cells: Cells


@dataclass(frozen=True, slots=True)
class RankRead:
    """What one read takes from one rank of the peer.

    Attributes:
        source: which rank.
        direct: entries that are read as they are, None if there are none.
        packed: everything else.
    """

    source: SourceRank
    direct: Indices | None
    packed: tuple[PackedCells, ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """All of one read.

    Attributes:
        ranks: per rank of the peer that supplies anything.
        clears: (loops, blocks): what the loops cover of these blocks is zeroed before, since it is read in
            part or not at all.
        bytes_by_group: useful bytes per group of ours.
        strategy_by_group: how they travel; empty for a group of which nothing does.
        tally: totals.
        seconds: what planning took.
    """

    ranks: tuple[RankRead, ...]
    clears: tuple[tuple[Loops, Int64s], ...]
    bytes_by_group: tuple[int, ...]
    strategy_by_group: tuple[str, ...]
    tally: Tally
    seconds: float

    def clear(self) -> None:
        """Zero what the blocks' last owner left where nothing is read."""
        for loops, blocks in self.clears:
            loops.clear(blocks)


@dataclass(frozen=True, slots=True)
class SourceRank:
    """One rank of the peer, prepared.

    Attributes:
        agent: the transport's name for it.
        routes: what we read from it, in every way.
        lists: the prepared lists.
        client: asks it to gather; None if nothing is ever gathered.
        leases: number of its lease words.
    """

    agent: str
    routes: tuple[PreparedRoute, ...]
    lists: Lists
    client: GatherClient | None
    leases: int

    @property
    def incarnation(self) -> int:
        """The high half of its words."""
        return self.lists.incarnation


def joined(plans: Sequence[ReadPlan]) -> ReadPlan:
    """What several lanes read, as one; it took as long as the longest to plan."""
    return ReadPlan(
        tuple(rank for plan in plans for rank in plan.ranks),
        tuple(clear for plan in plans for clear in plan.clears),
        tuple(map(sum, zip(*(plan.bytes_by_group for plan in plans), strict=True))),
        tuple(
            "+".join(dict.fromkeys(name for names in group if names for name in names.split("+")))
            for group in zip(*(plan.strategy_by_group for plan in plans), strict=True)
        ),
        summed([plan.tally for plan in plans]),
        max(plan.seconds for plan in plans),
    )


def summed(tallies: Sequence[Tally]) -> Tally:
    """All of them together."""
    return Tally(
        sum(t.bytes for t in tallies),
        sum(t.pages for t in tallies),
        sum(t.descriptors for t in tallies),
        max((t.largest_run for t in tallies), default=0),
    )
