"""Orders to the ranks of an engine to copy chunks, and the reports of the ranks.

A *chunk* is a fixed number of tokens of a KV cache group, as stored. Ranks copy chunks between their KV
blocks and the arena, the host memory that holds chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.geometry import RankGeometry
from kvferry.memory.sealed import SharedFile
from kvferry.planning.chunk_cells import TableSlice


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk (fixed number of tokens of one KV cache group), and its position in host memory.

    Attributes:
        group: index of the KV cache group in the storage format (`CanonicalForm.groups`).
        number: index of the chunk in the prompt.
        offset: byte offset of the chunk in the arena, the host memory that holds chunks.
    """

    group: int
    number: int
    offset: int


@dataclass(frozen=True, slots=True)
class ArenaCard:
    """The description of the arena, the host memory that holds chunks. Ranks need it before the first order.

    Attributes:
        name: handle by which a process attaches the arena's memory.
        ranks: geometry of all ranks of the engine.
        chunk_tokens: number of tokens per chunk.
    """

    name: SharedFile
    ranks: tuple[RankGeometry, ...]
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """The order to copy chunks from KV blocks to host memory. Every rank copies and reports its part.

    Attributes:
        key: unique name of the order.
        pieces: chunks to copy, sorted by `Piece.group`, then by `Piece.number`.
        tables: the slice of the request's block table that contains the blocks to copy, for each KV cache
            group of the engine; None for groups without chunks in this order.
        available: range of prompt tokens that the blocks hold. If this range begins or ends inside a chunk,
            the rest of the chunk is filled with zeros.
    """

    key: str
    pieces: tuple[Piece, ...]
    tables: tuple[TableSlice | None, ...]
    available: range


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """The order to copy a part of a load's chunks from host memory to KV blocks.

    It is sent when these chunks have arrived in host memory.

    Attributes:
        key: unique name of the order.
        pieces: chunks to copy, sorted by `Piece.group`, then by `Piece.number`.
        first: True for the first part of the load. Blocks that the load fills only in part are zeroed before
            this part is copied.
    """

    key: str
    pieces: tuple[Piece, ...]
    first: bool


@dataclass(frozen=True, slots=True)
class CopyReport:
    """One rank's report that it has carried out an order to copy chunks, or has failed to.

    No copy of the order is under way any more.

    Attributes:
        key: unique name of the order (`StoreOrder.key` or `LoadOrder.key`).
        failure: reason for the failure; None if the order was carried out.
        bytes_by_group: number of bytes that this rank copied, per KV cache group of the storage format.
        seconds: seconds that the copy took.
    """

    key: str
    failure: str | None
    bytes_by_group: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class MergedCopyReport:
    """The merged reports of several ranks about the same order to copy chunks.

    Attributes:
        key: unique name of the order (`StoreOrder.key` or `LoadOrder.key`).
        failure: reason for the failure of one of the ranks; None if all of them have carried out the order.
        bytes_by_group: number of bytes that these ranks copied together, per KV cache group of the storage
            format.
        seconds: seconds that the slowest rank took.
        ranks: number of merged reports.
    """

    key: str
    failure: str | None
    bytes_by_group: tuple[int, ...]
    seconds: float
    ranks: int = 1

    @classmethod
    def of(cls, report: CopyReport) -> MergedCopyReport:
        """Convert one rank's report about an order to the form of a merged report."""
        return cls(report.key, report.failure, report.bytes_by_group, report.seconds)

    def with_other(self, other: MergedCopyReport) -> MergedCopyReport:
        """Return these reports merged with the reports of other ranks about the same order."""
        ours, theirs = self.bytes_by_group, other.bytes_by_group
        return MergedCopyReport(
            self.key,
            self.failure or other.failure,
            tuple(a + b for a, b in zip(ours, theirs, strict=True)) if ours and theirs else ours or theirs,
            max(self.seconds, other.seconds),
            self.ranks + other.ranks,
        )
