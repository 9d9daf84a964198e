"""Chunks of a model whose layers are alike, and ranks that store and load them.

A rank holds a prompt in scattered blocks of an engine's layout; another, empty, takes it. Both are on the
host, whatever memory an engine's are in. Every word of the prompt tells layer, token and head.
"""

from __future__ import annotations

from typing import Self

from kvferry.cache.chunk_routes import ChunkRoutes
from kvferry.errors import ConfigError
from kvferry.geometry.canonical import CanonicalGroup, canonical_of, chunk_pool
from kvferry.geometry.layout import lay_out
from kvferry.geometry.models import ModelReading
from kvferry.measuring import content
from kvferry.measuring.simulated import simulate_engine
from kvferry.plan.side import Side
from kvferry.planning.chunks import Stretch
from kvferry.planning.template import build_templates
from kvferry.tiers.host.arena import Arena

CHUNK_TOKENS = 256


def chunk_group(reading: ModelReading, tokens: int = CHUNK_TOKENS) -> CanonicalGroup:
    """What a chunk of a model holds, of so many tokens.

    Raises:
        ConfigError: its chunks are of several kinds.
    """
    held = simulate_engine("chunk", reading, Side(), tokens)
    groups = canonical_of(lay_out(held.model, held.shape), tokens).groups
    if len(groups) > 1:
        raise ConfigError(
            f"{reading.cache.name} has layers of several kinds; this command measures models whose layers "
            "are alike"
        )
    return groups[0]


class Ranks:
    """A rank that has a prompt, one that has not, and an arena with room for its chunks.

    Attributes:
        layout: of both ranks' memory.
        chunks, chunk_bytes: of the prompt.
        source, destination: memory of both ranks.
        arena: chunk number n lies at ``n * chunk_bytes``.
        span: the whole prompt, for loads.
        tables: its blocks, on either rank.
    """

    def __init__(self, reading: ModelReading, side: Side, chunks: int) -> None:
        """Take the memory: that of all chunks three times.

        Args:
            reading: whose.
            side: what both ranks are like.
            chunks: how many.

        Raises:
            ConfigError: there is not enough.
        """
        held = simulate_engine("holder", reading, side, chunks * CHUNK_TOKENS)
        self.layout, self.chunks = side.layout, chunks
        self.source, self.destination = held.allocated(0), held.allocated(0)
        content.fill_blocks(self.source, held)
        self._canonical = canonical_of([self.source.geometry], CHUNK_TOKENS)
        self.chunk_bytes = self._canonical.groups[0].chunk_bytes
        self.arena = Arena.create(chunks * self.chunk_bytes)
        if self.arena.collapsing is not None:
            self.arena.collapsing.wait()
        self.span = held.span
        self.tables = tuple(Stretch(0, tuple(table.tolist())) for table in held.tables)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.arena.close()

    @property
    def tokens(self) -> int:
        """Of the prompt."""
        return self.chunks * CHUNK_TOKENS

    @property
    def run_bytes(self) -> int:
        """Bytes that are contiguous in a block and in a chunk at once."""
        pool = chunk_pool(self._canonical, 0, 0, self.chunks)
        (template,) = build_templates([self.source.geometry], pool)
        return int(template.routes[0].nests[0].run)

    def routes(self, *, stores: bool) -> ChunkRoutes:
        """For one thread: from the first rank, or to the second."""
        rank = (self.source if stores else self.destination).geometry
        return ChunkRoutes(self._canonical, [rank], (0, 0), self.arena.memory)

    def wipe(self) -> None:
        """Zero the arena and the second rank."""
        self.arena.memory[:] = 0
        self.destination.buffer.zero_()

    def check(self) -> None:
        """See that the second rank has what the first one has.

        Raises:
            TransferError: it has other bytes.
        """
        content.check_memory(self.destination, self.source)
