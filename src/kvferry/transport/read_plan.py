"""Data classes: the plan of a read, computed from an order and the prepared lists of a peer.

A cell is the unit of transfer: the largest number of tokens that divides the block sizes of both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.memory.staging_copies import StagingCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.prepared_lists import DescriptorIndices, TransferCounts
from kvferry.planning.select import Cells
from kvferry.transport.gather_client import GatherClient
from kvferry.transport.packed_read import RankLists
from kvferry.transport.prepared_routes import PreparedMethod, PreparedRoute
from kvferry.transport.read_speed import ReadSpeed


@dataclass(frozen=True, slots=True)
class PackedCells:
    """Cells (parts of blocks) of one route that are packed into contiguous staging memory on the way.

    Attributes:
        route: prepared route (set of layers that are read together) of the cells.
        method: transfer method: over-read (the reader also fetches unneeded bytes between the needed ones)
            or staged (the source packs the cells).
        cells: cells to move.
    """

    route: PreparedRoute
    method: PreparedMethod
    cells: Cells


@dataclass(frozen=True, slots=True)
class RankRead:
    """The part of a read that comes from one rank of the peer.

    Attributes:
        source: rank of the peer.
        direct: indices of the descriptors that are read straight into blocks; None if there are none.
        packed: cells (parts of blocks) that are packed into contiguous staging memory on the way, one entry
            per route (set of layers that are read together).
    """

    source: SourceRank
    direct: DescriptorIndices | None
    packed: tuple[PackedCells, ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The plan of a read of KV from a peer, for one order.

    Attributes:
        ranks: part of the read for each rank of the peer that supplies anything.
        clears: pairs (operation that zeroes bytes of given blocks, int64 ids of the blocks). They are applied
            before the read, to blocks that the read does not fill completely.
        bytes_by_group: number of bytes of KV to read, for each KV cache group of this engine. Unneeded bytes
            that an over-read also fetches are not counted.
        strategy_by_group: names of the transfer strategies, joined by "+", for each KV cache group of this
            engine; an empty text for a group without reads.
        counts: total bytes and descriptors.
        seconds: duration of planning.
        bytes_per_second: speed of READs from the slowest rank, as measured when the peer was connected; 0 if
            it was not measured.
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
        """Zero the blocks that the read does not fill completely, because they hold stale bytes."""
        for loops, blocks in self.clears:
            loops.clear(blocks)


@dataclass(frozen=True, slots=True)
class SourceRank:
    """A rank of a peer, with everything that is prepared to read from the rank.

    Attributes:
        agent: name of the rank's NIXL agent.
        routes: prepared routes (sets of layers that are read together) from the rank, with all their transfer
            methods.
        lists: prepared descriptor lists.
        client: client for requests that ask the rank to pack cells (parts of blocks); None if no method
            needs it.
        leases: number of the rank's lease words (integers in registered memory).
        speed: measured speed of READs from the rank.
        not_shared: why the rank's host memory is not mapped here; empty if it is.
    """

    agent: str
    routes: tuple[PreparedRoute, ...]
    lists: RankLists
    client: GatherClient | None
    leases: int
    speed: ReadSpeed
    not_shared: str

    @property
    def incarnation(self) -> int:
        """Random number that identifies the run of the rank.

        The number is the high half of each of the rank's lease words (integers that show whether leases are
        valid).
        """
        return self.lists.incarnation


def join_plans(plans: Sequence[ReadPlan]) -> ReadPlan:
    """Join the plans of several lanes (reading threads), which share one read order, into one plan.

    The planning time of the joined plan (`seconds`) is that of the slowest lane.
    """
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
        bytes_per_second=slowest(plan.bytes_per_second for plan in plans),
        not_shared=next((plan.not_shared for plan in plans if plan.not_shared), ""),
    )


def slowest(speeds: Iterable[float]) -> float:
    """Return the lowest of several speeds in bytes per second; those that were not measured are 0."""
    return min(filter(None, speeds), default=0.0)


def sum_tallies(tallies: Sequence[TransferCounts]) -> TransferCounts:
    """Return the sum of several transfer counts. `largest_run` of the result is the maximum, not the sum.

    Args:
        tallies: counts to add.
    """
    return TransferCounts(
        sum(t.bytes for t in tallies),
        sum(t.pages for t in tallies),
        sum(t.descriptors for t in tallies),
        max((t.largest_run for t in tallies), default=0),
    )
