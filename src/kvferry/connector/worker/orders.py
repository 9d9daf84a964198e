"""Orders to the ranks of an engine to copy chunks between their KV blocks and the arena."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.geometry import RankGeometry
from kvferry.memory.sealed import SharedFile
from kvferry.planning.chunk_cells import TableSlice


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk, and its position in the arena.

    Attributes:
        group: index of the KV cache group in the storage format (`CanonicalForm.groups`).
        number: index of the chunk in the prompt.
        offset: byte offset of the chunk in the arena.
    """

    group: int
    number: int
    offset: int


@dataclass(frozen=True, slots=True)
class ArenaCard:
    """The description of the arena. Ranks need it before the first order.

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
    """The order to copy a part of a load's chunks, which have arrived in host memory, to KV blocks.

    Attributes:
        key: unique name of the order.
        pieces: chunks to copy, sorted by `Piece.group`, then by `Piece.number`.
        first: True for the first part of the load. Blocks that the load fills only in part are zeroed before
            this part is copied.
    """

    key: str
    pieces: tuple[Piece, ...]
    first: bool
