"""Chunks of a model whose layers are alike, and a pair of ranks that stores and loads them.

One rank holds a prompt in scattered blocks of an engine's layout, the other takes it. Both are in host
memory. The prompt's content is that of `measuring.content`.
"""

from __future__ import annotations

from typing import Self

from kvferry.connector.worker.chunk_routes import ChunkRoutes
from kvferry.errors import ConfigError
from kvferry.geometry.canonical import CanonicalGroup, canonical_form_of, chunk_pool
from kvferry.geometry.layout import lay_out
from kvferry.geometry.models import ModelReading
from kvferry.measuring import content
from kvferry.measuring.simulated import simulate_engine
from kvferry.plan.side import EngineSide
from kvferry.planning.chunk_cells import TableSlice
from kvferry.planning.template import build_templates
from kvferry.tiers.host.arena import Arena

CHUNK_TOKENS = 256


def chunk_group(reading: ModelReading, tokens: int = CHUNK_TOKENS) -> CanonicalGroup:
    """Return the form of a model's chunks of `tokens` tokens.

    Raises:
        ConfigError: the model has chunks of several kinds.
    """
    held = simulate_engine("chunk", reading, EngineSide(), tokens)
    groups = canonical_form_of(lay_out(held.model, held.shape), tokens).groups
    if len(groups) > 1:
        raise ConfigError(
            f"{reading.cache.name} has layers of several kinds; this command measures models whose layers "
            "are alike"
        )
    return groups[0]


class RankPair:
    """A rank that holds a prompt, an empty rank, and an arena for the prompt's chunks.

    Attributes:
        layout: memory layout of both ranks.
        chunks, chunk_bytes: number of chunks of the prompt, and the size of each.
        source, destination: memory of the rank that holds the prompt, and of the empty one.
        arena: memory for the chunks; chunk n is at ``n * chunk_bytes``.
        span: the whole prompt, for loads.
        store_tables, load_tables: blocks of the prompt, the same on both ranks.
    """

    def __init__(self, reading: ModelReading, side: EngineSide, chunks: int) -> None:
        """Allocate three times the memory of all chunks.

        Args:
            reading: model of the chunks.
            side: set-up of both ranks.
            chunks: number of chunks.

        Raises:
            ConfigError: there is not enough memory.
        """
        held = simulate_engine("holder", reading, side, chunks * CHUNK_TOKENS)
        self.layout, self.chunks = side.layout, chunks
        self.source, self.destination = held.allocated(0), held.allocated(0)
        content.fill_blocks(self.source, held)
        self._canonical = canonical_form_of([self.source.geometry], CHUNK_TOKENS)
        self.chunk_bytes = self._canonical.groups[0].chunk_bytes
        self.arena = Arena.create(chunks * self.chunk_bytes)
        if self.arena.collapsing is not None:
            self.arena.collapsing.wait()
        self.span = held.span
        self.load_tables = held.tables
        self.store_tables = tuple(TableSlice(0, tuple(table.tolist())) for table in held.tables)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.arena.close()

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return self.chunks * CHUNK_TOKENS

    @property
    def run_bytes(self) -> int:
        """Bytes that are contiguous both in a block and in a chunk."""
        pool = chunk_pool(self._canonical, 0, 0, self.chunks)
        (template,) = build_templates([self.source.geometry], pool)
        return int(template.routes[0].nests[0].run)

    def routes(self, *, stores: bool) -> ChunkRoutes:
        """Return routes for one thread, from the source or to the destination."""
        rank = (self.source if stores else self.destination).geometry
        return ChunkRoutes(self._canonical, [rank], (0, 0), self.arena.memory)

    def clear(self) -> None:
        """Fill the arena and the destination with zeros."""
        self.arena.memory[:] = 0
        self.destination.buffer.zero_()

    def check(self) -> None:
        """Compare the destination with the source.

        Raises:
            TransferError: the destination has other bytes.
        """
        content.check_memory(self.destination, self.source)
