"""A pair of ranks that store and load the chunks of a prompt, for a model whose layers are all alike.

A chunk holds the KV of a fixed number of tokens. One rank holds the prompt in scattered blocks of an engine's
layout, and the other loads it. Both are in host memory. The test values are those of `measuring.content`.
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
    """Return the format in which chunks of a model's KV are stored.

    Args:
        reading: description of the model's KV cache.
        tokens: number of tokens per chunk.

    Raises:
        ConfigError: the model has layers of several kinds, whose chunks have different formats.
    """
    engine = simulate_engine("chunk", reading, EngineSide(), tokens)
    groups = canonical_form_of(lay_out(engine.model, engine.shape), tokens).groups
    if len(groups) > 1:
        raise ConfigError(
            f"{reading.cache.name} has layers of several kinds; this command measures models whose layers "
            "are alike"
        )
    return groups[0]


class RankPair:
    """A rank that holds the KV of a prompt, an empty rank, and host memory (the arena) for the KV's chunks.

    Attributes:
        layout: name of the memory layout of both ranks.
        chunks: number of chunks of the prompt.
        chunk_bytes: size of a chunk, in bytes.
        source: memory of the rank that holds the prompt's KV.
        destination: memory of the rank that loads the prompt's KV.
        arena: host memory for the chunks; chunk n is at byte ``n * chunk_bytes``.
        span: range of tokens to load: the whole prompt.
        store_tables: block table of the prompt for each KV cache group, in the form that `StoreOrder` takes
            (`TableSlice`). The block ids are the same on both ranks.
        load_tables: the same block tables in the form that `ChunkRoutes.load` takes (arrays).
    """

    def __init__(self, reading: ModelReading, side: EngineSide, chunks: int) -> None:
        """Allocate the KV caches of both ranks and the arena, and fill the first rank's cache.

        The two caches and the arena each hold all chunks once.

        Args:
            reading: description of the model's KV cache.
            side: layout and block size of both ranks.
            chunks: number of chunks of the prompt.

        Raises:
            ConfigError: this machine has too little memory for the caches and the arena.
        """
        engine = simulate_engine("holder", reading, side, chunks * CHUNK_TOKENS)
        self.layout, self.chunks = side.layout, chunks
        self.source, self.destination = engine.allocated(0), engine.allocated(0)
        content.fill_blocks(self.source, engine)
        self._canonical = canonical_form_of([self.source.geometry], CHUNK_TOKENS)
        self.chunk_bytes = self._canonical.groups[0].chunk_bytes
        self.arena = Arena.create(chunks * self.chunk_bytes)
        if self.arena.collapsing is not None:
            self.arena.collapsing.wait()
        self.span = engine.span
        self.load_tables = engine.tables
        self.store_tables = tuple(TableSlice(0, tuple(table.tolist())) for table in engine.tables)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.arena.close()

    @property
    def tokens(self) -> int:
        """Return the length of the prompt, in tokens."""
        return self.chunks * CHUNK_TOKENS

    @property
    def run_bytes(self) -> int:
        """Return the length, in bytes, of the runs that are contiguous both in a block and in a chunk."""
        pool = chunk_pool(self._canonical, 0, 0, self.chunks)
        (template,) = build_templates([self.source.geometry], pool)
        return int(template.routes[0].copies[0].run)

    def routes(self, *, stores: bool) -> ChunkRoutes:
        """Return a new object that copies chunks between one rank's blocks and host memory.

        Only one thread may use the object.

        Args:
            stores: True to copy from the source rank to host memory, False to copy from host memory to the
                destination rank.
        """
        rank = (self.source if stores else self.destination).geometry
        return ChunkRoutes(self._canonical, [rank], (0, 0), self.arena.memory)

    def clear(self) -> None:
        """Fill the host memory for chunks and the memory of the destination rank with zeros."""
        self.arena.memory[:] = 0
        self.destination.buffer.zero_()

    def check(self) -> None:
        """Check that the destination rank's memory equals the source rank's memory.

        Raises:
            TransferError: a byte differs.
        """
        content.check_memory(self.destination, self.source)
