"""Values: the plan of a read, computed from an order and the prepared lists of a peer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.memory.staging_copies import StagingCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.prepared_lists import DescriptorIndices, TransferCounts
from kvferry.planning.select import Cells
from kvferry.transport.gather_client import GatherClient
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
