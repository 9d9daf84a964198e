"""Orders about chunks in host memory to the ranks of an engine, and their reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.connector.load import Load
from kvferry.geometry import RankGeometry
from kvferry.planning.chunk_cells import TableSlice
from kvferry.tiers.host.arena import ArenaHandle


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of one group, and where it is in the arena.

    Attributes:
        group: number of the canonical group.
        number: of the chunk in the prompt.
        offset: bytes from the start of the arena.
    """

    group: int
    number: int
    offset: int


@dataclass(frozen=True, slots=True)
class ArenaCard:
    """Facts that a rank needs before the first order.

    Attributes:
        name: of the arena.
        ranks: geometry of all ranks of the engine.
        chunk_tokens: tokens of a chunk.
    """

    name: ArenaHandle
    ranks: tuple[RankGeometry, ...]
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Copy chunks from blocks to the arena; every rank does its part, and says when.

    Attributes:
        key: names the order.
        pieces: by group, then by number.
        tables: the blocks that hold them, per group of the engine; None for groups that are no part of it.
        available: tokens of the prompt that the blocks hold; where they begin or end inside a chunk, the rest
            of it becomes zero.
    """

    key: str
    pieces: tuple[Piece, ...]
    tables: tuple[TableSlice | None, ...]
    available: range


@dataclass(frozen=True, slots=True)
class LoadPart:
    """Copy chunks that are in the arena now to blocks, as part of a load.

    Attributes:
        key: names the part.
        load: the load.
        pieces: by group, then by number.
        first: no part of this load came before.
    """

    key: str
    load: Load
    pieces: tuple[Piece, ...]
    first: bool


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """No more parts will follow.

    Attributes:
        key: of the load.
        failure: why it is not whole, None if it is.
    """

    key: str
    failure: str | None


@dataclass(slots=True)
class ChunkOrders:
    """All orders about chunks of one step, in the order in which ranks carry them out.

    Attributes:
        arena: in the first step.
        stores, parts, ends: see each.
    """

    arena: ArenaCard | None = None
    stores: list[StoreOrder] = field(default_factory=list)
    parts: list[LoadPart] = field(default_factory=list)
    ends: list[LoadEnd] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether there is any order."""
        return bool(self.arena or self.stores or self.parts or self.ends)


@dataclass(frozen=True, slots=True)
class Moved:
    """A rank's report of an order, carried out or failed; nothing of it is in flight.

    Attributes:
        key: of a store or a part of a load.
        failure: None if it is done.
        bytes_by_group: that this rank copied, per canonical group.
        seconds: that it took.
    """

    key: str
    failure: str | None
    bytes_by_group: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class MovedByAll:
    """The reports of all ranks of an order.

    Attributes:
        key, failure: as of `Moved`.
        bytes_by_group: over all ranks.
        seconds: the slowest rank's.
        ranks: how many have said so.
    """

    key: str
    failure: str | None
    bytes_by_group: tuple[int, ...]
    seconds: float
    ranks: int = 1

    @classmethod
    def of(cls, moved: Moved) -> MovedByAll:
        """Return the report of one rank."""
        return cls(moved.key, moved.failure, moved.bytes_by_group, moved.seconds)

    def with_other(self, other: MovedByAll) -> MovedByAll:
        """Return these reports with those of other ranks of the same order."""
        ours, theirs = self.bytes_by_group, other.bytes_by_group
        return MovedByAll(
            self.key,
            self.failure or other.failure,
            tuple(a + b for a, b in zip(ours, theirs, strict=True)) if ours and theirs else ours or theirs,
            max(self.seconds, other.seconds),
            self.ranks + other.ranks,
        )
