"""Values of the plan of a read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.memory.staging_copies import StagingCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.prepared_lists import DescriptorIndices, TransferCounts
from kvferry.planning.select import Cells
from kvferry.transport.gather_client import GatherClient
from kvferry.transport.packed_read import RankLists
from kvferry.transport.prepared_routes import PreparedMethod, PreparedRoute


@dataclass(frozen=True, slots=True)
class PackedCells:
    """Cells of one route that are transferred packed."""

    route: PreparedRoute
    method: PreparedMethod
    cells: Cells


@dataclass(frozen=True, slots=True)
class RankRead:
    """The part of a read that one rank of the peer supplies.

    Attributes:
        source: the rank.
        direct: descriptors to read directly; None if there are none.
        packed: all other cells.
    """

    source: SourceRank
    direct: DescriptorIndices | None
    packed: tuple[PackedCells, ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The plan of a read.

    Attributes:
        ranks: one entry per rank of the peer that supplies anything.
        clears: (copies, blocks) to zero before the read, because it fills them in part or not at all.
        bytes_by_group: useful bytes per group of this engine.
        strategy_by_group: strategies per group of this engine, joined by "+"; empty if nothing moves.
        tally: totals.
        seconds: duration of planning.
    """

    ranks: tuple[RankRead, ...]
    clears: tuple[tuple[StagingCopies, Int64s], ...]
    bytes_by_group: tuple[int, ...]
    strategy_by_group: tuple[str, ...]
    counts: TransferCounts
    seconds: float

    def clear(self) -> None:
        """Zero the stale bytes in those parts of the blocks that the read does not write."""
        for loops, blocks in self.clears:
            loops.clear(blocks)


@dataclass(frozen=True, slots=True)
class SourceRank:
    """A prepared rank of the peer.

    Attributes:
        agent: its name in the NIXL agent.
        routes: the routes from it, with all their methods.
        lists: the prepared lists.
        client: client of its gather channel; None if no method gathers.
        leases: number of its lease words.
    """

    agent: str
    routes: tuple[PreparedRoute, ...]
    lists: RankLists
    client: GatherClient | None
    leases: int

    @property
    def incarnation(self) -> int:
        """High half of its words."""
        return self.lists.incarnation


def join_plans(plans: Sequence[ReadPlan]) -> ReadPlan:
    """Join the plans of several lanes; `seconds` is the longest."""
    return ReadPlan(
        ranks=tuple(rank for plan in plans for rank in plan.ranks),
        clears=tuple(clear for plan in plans for clear in plan.clears),
        bytes_by_group=tuple(map(sum, zip(*(plan.bytes_by_group for plan in plans), strict=True))),
        strategy_by_group=tuple(
            "+".join(dict.fromkeys(name for names in group if names for name in names.split("+")))
            for group in zip(*(plan.strategy_by_group for plan in plans), strict=True)
        ),
        counts=sum_tallies([plan.counts for plan in plans]),
        seconds=max(plan.seconds for plan in plans),
    )


def sum_tallies(tallies: Sequence[TransferCounts]) -> TransferCounts:
    """Return the sum of some tallies."""
    return TransferCounts(
        sum(t.bytes for t in tallies),
        sum(t.pages for t in tallies),
        sum(t.descriptors for t in tallies),
        max((t.largest_run for t in tallies), default=0),
    )
