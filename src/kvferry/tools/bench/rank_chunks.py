"""A pair of ranks that store and load the chunks of a prompt, for a model whose layers are all alike.

One rank holds the prompt in scattered blocks of an engine's layout, and the other loads it.
"""

from __future__ import annotations

from typing import Self

from kvferry.common.errors import ConfigError
from kvferry.connector import ChunkRoutes
from kvferry.geometry.canonical import CanonicalGroup, canonical_form_of, chunk_pool
from kvferry.planning import TableSlice, build_templates
from kvferry.tiers import Arena
from kvferry.tools.measuring import simulated as content
from kvferry.tools.measuring.simulated import simulate_engine
from kvferry.tools.models import ModelReading
from kvferry.tools.models.layout import lay_out
from kvferry.tools.plan.side import EngineSide

# The default of the setting ``chunk_tokens``.
CHUNK_TOKENS = 256


def chunk_group(reading: ModelReading, tokens: int = CHUNK_TOKENS) -> CanonicalGroup:
    """Return the format of a model's chunks. Raise ConfigError if its layers are of several kinds."""
    engine = simulate_engine("chunk", reading, EngineSide(), tokens)
    groups = canonical_form_of(lay_out(engine.model, engine.shape), tokens).groups
    if len(groups) > 1:
        raise ConfigError(
            f"{reading.cache.name} has layers of several kinds; this command measures models whose layers "
            "are alike"
        )
    return groups[0]


class RankPair:
    """A rank that holds the KV of a prompt, an empty rank, and host memory for the KV's chunks.

    Attributes:
        arena: host memory for the chunks; chunk n is at byte ``n * chunk_bytes``.
        store_tables, load_tables: block table of the prompt for each KV cache group, in the forms that
            `StoreOrder` and `ChunkRoutes.load` take. The block ids are the same on both ranks.
    """

    def __init__(self, reading: ModelReading, side: EngineSide, chunks: int) -> None:
        engine = simulate_engine("holder", reading, side, chunks * CHUNK_TOKENS)
        self.layout, self.chunks = side.layout, chunks
        self.source, self.destination = engine.allocated(0), engine.allocated(0)
        content.fill_blocks(self.source, engine)
        self._canonical = canonical_form_of([self.source.geometry], CHUNK_TOKENS)
        self.chunk_bytes = self._canonical.groups[0].chunk_bytes
        self.arena = Arena.create(chunks * self.chunk_bytes)
        self.arena.wait_allocated()
        self.span = engine.span
        self.load_tables = engine.tables
        self.store_tables = tuple(TableSlice(0, tuple(table.tolist())) for table in engine.tables)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.arena.close()

    @property
    def tokens(self) -> int:
        return self.chunks * CHUNK_TOKENS

    @property
    def run_bytes(self) -> int:
        """Bytes of the runs that are contiguous both in a block and in a chunk."""
        pool = chunk_pool(self._canonical, 0, 0, self.chunks)
        (template,) = build_templates([self.source.geometry], pool)
        return int(template.routes[0].copies[0].run)

    def routes(self, *, stores: bool) -> ChunkRoutes:
        """Return an object for one thread that copies from the source rank, or to the destination rank."""
        rank = (self.source if stores else self.destination).geometry
        return ChunkRoutes(self._canonical, [rank], (0, 0), self.arena.memory)

    def clear(self) -> None:
        self.arena.memory[:] = 0
        self.destination.buffer.zero_()

    def check(self) -> None:
        content.check_memory(self.destination, self.source)
