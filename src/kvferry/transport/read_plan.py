"""Values of a read of KV from a peer: the order, its report, and the figures of a load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest

from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan
from kvferry.planning.strategy import Strategy
from kvferry.transport.lease import LeaseWord


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """An order to read the KV blocks of one request from a peer, or the share of one lane in it.

    Reads keep views of the block tables until they have ended, so nothing may change the arrays.
    """

    key: str  # unique name of this order; a retry of the same read gets a new one
    peer: str  # name under which the peer was connected
    span: LoadSpan
    src_tables: tuple[Int64s, ...]  # ids of the peer's blocks per KV cache group, in the order of the tokens
    dst_tables: tuple[Int64s, ...]  # likewise of this engine's blocks
    lease: LeaseWord
    strategy: Strategy | None = None  # None for that of `TransferSettings`
    share: int = 0  # index, which is not that of the lane
    shares: int = 1

    def take_share(
        self, cells: tuple[int, int], cells_per_block: int, size: int, least: int, route: int
    ) -> tuple[int, int]:
        """Return the range ``[first, last)`` of a route's `cells` that belongs to this share.

        Every cell is in exactly one share. All cells of a route and destination block are in the same share.

        Args:
            cells: range ``[first, last)`` of all cells to read. `cells_per_block` is for destination blocks.
            size, least: bytes of these cells, and approximate minimum number of bytes in a share.
            route: index of the route. Its first cells are in share ``route % shares``; a route with less than
                `least` bytes is in share 0.
        """
        first, last = cells
        parts = min(self.shares, size // least)
        # Routes that are split into few parts begin at different shares, so that share 0 does not get all.
        part = (self.share - route) % self.shares if parts else self.share
        if part >= max(parts, 1):
            return last, last
        if parts > 1:
            # Parts begin at the start of a block.
            length, end = last - first, last
            if part + 1 < parts:
                last = _round_up(first + length * (part + 1) // parts, cells_per_block, end)
            if part > 0:
                first = _round_up(first + length * part // parts, cells_per_block, end)
        return first, last


def _round_up(cell: int, cells_per_block: int, end: int) -> int:
    return min(end, -(-cell // cells_per_block) * cells_per_block)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """Bytes, descriptors, and seconds of each stage, of a load from a peer or of a copy of chunks.

    Groups are KV cache groups, and for chunks those of the storage format. Times are those of the slowest
    lane and worker. The check is that the peer had not reused the blocks, and if reads are verified, that
    the bytes are the peer's.
    """

    bytes_by_group: tuple[int, ...] = ()  # without gaps that are discarded; empty if no read was planned
    strategies_by_group: tuple[tuple[str, ...], ...] = ()  # names
    reads: int = 0  # more than 1 if the peer was still computing the KV when the load began
    pages: int = 0  # contiguous runs of bytes
    descriptors: int = 0  # merged pages
    run_bytes: int = 0  # of the largest descriptor
    plan_seconds: float = 0.0
    transfer_seconds: float = 0.0
    check_seconds: float = 0.0
    read_bytes_per_second: float = 0.0  # measured, from the slowest rank; 0 if not measured
    not_shared: str = ""  # why a worker cannot map host memory of the peer; empty if all do

    def with_other(self, other: LoadFigures) -> LoadFigures:
        """Return these figures merged with those of another lane or worker for the same load.

        Numbers of bytes and descriptors are added. For the largest run and for times the larger value is
        kept, for the speed the smaller.
        """
        # A lane or worker that planned no read has neither bytes nor strategies of any group.
        sizes = zip_longest(self.bytes_by_group, other.bytes_by_group, fillvalue=0)
        names = zip_longest(self.strategies_by_group, other.strategies_by_group, fillvalue=())
        speeds = self.read_bytes_per_second, other.read_bytes_per_second
        return LoadFigures(
            bytes_by_group=tuple(map(sum, sizes)),
            strategies_by_group=tuple(tuple(dict.fromkeys((*a, *b))) for a, b in names),
            reads=max(self.reads, other.reads),
            pages=self.pages + other.pages,
            descriptors=self.descriptors + other.descriptors,
            run_bytes=max(self.run_bytes, other.run_bytes),
            plan_seconds=max(self.plan_seconds, other.plan_seconds),
            transfer_seconds=max(self.transfer_seconds, other.transfer_seconds),
            check_seconds=max(self.check_seconds, other.check_seconds),
            read_bytes_per_second=min(filter(None, speeds), default=0.0),
            not_shared=self.not_shared or other.not_shared,
        )

    def with_next(self, part: LoadFigures) -> LoadFigures:
        """Return these figures merged with those of the load's next part, whose reads and times are added."""
        return replace(
            self.with_other(part),
            reads=self.reads + part.reads,
            plan_seconds=self.plan_seconds + part.plan_seconds,
            transfer_seconds=self.transfer_seconds + part.transfer_seconds,
            check_seconds=self.check_seconds + part.check_seconds,
        )


NO_FIGURES = LoadFigures()
"""Figures of a load that moved nothing, or that came from tiers."""


@dataclass(frozen=True, slots=True)
class Report:
    """The end of a load, of a store, or of a part that reads or copies, from one worker or several.

    Nothing of a part, or of a lane's share of it, is in flight any more when it is reported. `late` is the
    number of workers that report a load before it has ended, because its deadline passed or it was given up.
    They may still write to its blocks.
    """

    failure: str | None = None  # None if all bytes arrived and are valid
    figures: LoadFigures = NO_FIGURES
    peer_lost: bool = False  # the peer cannot be read from, or has restarted: other orders will fail too
    corrupt: bool = False  # the bytes that arrived are not the peer's
    late: int = 0
    workers: int = 1  # number of workers whose reports these are

    def with_other(self, other: Report) -> Report:
        """Return this report merged with that of another worker."""
        figures = self.figures.with_other(other.figures)
        return self._merged(other, figures, self.late + other.late, self.workers + other.workers)

    def with_lane(self, other: Report) -> Report:
        """Return this report merged with that of another lane of the same worker."""
        return self._merged(other, self.figures.with_other(other.figures), self.late, self.workers)

    def with_next(self, part: Report) -> Report:
        """Return the report of a load's parts so far, merged with that of its next part."""
        figures = self.figures if part.figures is NO_FIGURES else self.figures.with_next(part.figures)
        return self._merged(part, figures, self.late, self.workers)

    def _merged(self, other: Report, figures: LoadFigures, late: int, workers: int) -> Report:
        # The first failure is the cause. Later ones often follow from it.
        failure = other.failure if self.failure is None else self.failure
        peer_lost, corrupt = self.peer_lost or other.peer_lost, self.corrupt or other.corrupt
        return Report(failure, figures, peer_lost, corrupt, late, workers)
