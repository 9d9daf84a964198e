"""Engines of a model that hold one request, or are to hold it: shape, block tables, tokens.

What a page is, how layers are grouped and how large blocks are is what an engine would decide (`plan.side`);
memory is one allocation per rank (`memory.owned`). Block tables are those of one request: every group has its
own blocks of the one pool, a windowed group only those that the next token sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvferry.errors import ConfigError
from kvferry.geometry import GroupKind
from kvferry.geometry.layout import EngineShape, lay_out
from kvferry.geometry.models import ModelReading, read_model
from kvferry.geometry.store import LayerStore, ModelCache, Stored
from kvferry.memory.owned import OwnedCache, allocate
from kvferry.plan.find import find_config
from kvferry.plan.side import Side, shape
from kvferry.planning.pieces import Int64s
from kvferry.planning.select import Span, needed

ORDERS = ("scattered", "contiguous")


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """All ranks of an engine, and where they keep one request.

    Attributes:
        name: names it among others.
        model, shape: what it keeps, and how.
        tokens: of the request.
        tables: block ids by position and group, int64; 0 where nothing is needed.
    """

    name: str
    model: ModelCache
    shape: EngineShape
    tokens: int
    tables: tuple[Int64s, ...]

    @property
    def span(self) -> Span:
        """All tokens are moved; one more will be computed."""
        return span_of(self.tokens)

    @property
    def blocks(self) -> int:
        """Blocks of the request, of all groups."""
        return self.shape.num_blocks - 1

    def rank_bytes(self, rank: int) -> int:
        """Bytes of the request's blocks on one rank."""
        geometry = lay_out(self.model, self.shape)[rank]
        return sum(
            int((table > 0).sum()) * sum(layer.page.content_bytes for layer in group.layers)
            for group, table in zip(geometry.groups, self.tables, strict=True)
        )

    def allocated(self, rank: int) -> OwnedCache:
        """Memory of one rank, zero.

        Raises:
            ConfigError: there is not enough.
        """
        try:
            return allocate(self.model, self.shape, rank, "cpu")
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"memory for {self.blocks:,} blocks of {self.model.name} cannot be had ({error}); "
                "choose fewer --tokens"
            ) from error


def span_of(tokens: int) -> Span:
    """A prompt of one token more, nothing of it at hand."""
    return Span(0, tokens, tokens + 1)


def read_geometry(name: str, changes: Mapping[str, int] | None = None, dtype: str = "auto") -> ModelReading:
    """What a model keeps.

    Args:
        name: as `kvferry plan` takes it.
        changes: keys of its ``config.json`` that are to have other values.
        dtype: of an element, as `kvferry plan` takes it.

    Raises:
        ConfigError: there is no such model, or it cannot be read.
    """
    found, config = find_config(name)
    if changes:
        found, config = f"{found}, changed", {**config, **changes}
    return read_model(config, dtype, name=found)


def small_pages(reading: ModelReading) -> ModelReading:
    """As many layers, in pages of 512 bytes per block of 16 tokens: what planning and NIXL count stays."""
    stored = tuple(Stored(name, 2, 1, (("content", 4),)) for name in ("k", "v"))
    layers = tuple(LayerStore(GroupKind.FULL, 0, stored) for _ in reading.cache.layers)
    return replace(reading, cache=ModelCache(f"{reading.cache.name}, small pages", layers))


def engine(
    name: str, reading: ModelReading, side: Side, tokens: int, order: str = "scattered", seed: int = 1
) -> Engine:
    """An engine with room for one request and the null block.

    Args:
        name: names it among others.
        reading: what the model keeps.
        side: what is decided about the engine.
        tokens: of the request.
        order: how block tables lie: "scattered" as in an engine that has run for a while, or "contiguous" as
            in a fresh one.
        seed: which scattering.

    Raises:
        GeometryError: the engine cannot keep the model; says why.
    """
    made = shape(reading, side, 1)
    layers = reading.cache.layers
    parts = [_positions(layers[each.layers[0]], each.block_tokens, tokens) for each in made.groups]
    blocks = sum(last - first for first, last in parts)
    ids = block_ids(blocks, order, seed)
    tables = []
    for first, last in parts:
        tables.append(np.concatenate([np.zeros(first, np.int64), ids[: last - first]]))
        ids = ids[last - first :]
    found = Engine(name, reading.cache, replace(made, num_blocks=blocks + 1), tokens, tuple(tables))
    lay_out(found.model, found.shape)
    return found


def block_ids(blocks: int, order: str, seed: int) -> Int64s:
    """All ids of a pool but the null block's, int64 of shape (blocks,)."""
    ids = np.arange(1, blocks + 1, dtype=np.int64)
    return np.random.default_rng(seed).permutation(ids) if order == "scattered" else ids


def _positions(store: LayerStore, block_tokens: int, tokens: int) -> tuple[int, int]:
    """First and last position of a group's table that is needed."""
    if store.kind is GroupKind.STATE:
        return 0, 1
    low, high = needed(store.kind, store.attention_span, span_of(tokens))
    return low // block_tokens, -(-high // block_tokens)
