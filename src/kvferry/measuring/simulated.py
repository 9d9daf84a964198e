"""Engines reduced to their memory: shape, block tables and tokens of one request.

Pages, groups of layers and block sizes are those that an engine would choose (`plan.side`). Each rank has one
allocation (`memory.owned`). Every group of the request has its own blocks of the one pool; a sliding-window
group has only the blocks that the next token sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvferry.errors import ConfigError
from kvferry.geometry import GroupKind
from kvferry.geometry.layout import EngineShape, lay_out
from kvferry.geometry.models import ModelReading, read_model
from kvferry.geometry.store import LayerCache, ModelCache
from kvferry.memory.owned import OwnedCache, allocate
from kvferry.plan.find import find_config
from kvferry.plan.side import EngineSide, shape
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan, needed_tokens

ORDERS = ("scattered", "contiguous")


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedEngine:
    """All ranks of an engine, and the blocks of one request.

    Attributes:
        name: name of the engine, unique in its process.
        model, shape: layers of the model, and their layout in memory.
        tokens: length of the request.
        tables: one int64 array of block ids per group, by position; 0 where no block is needed.
    """

    name: str
    model: ModelCache
    shape: EngineShape
    tokens: int
    tables: tuple[Int64s, ...]

    @property
    def span(self) -> LoadSpan:
        """The tokens to move: all of the request, with one more to compute."""
        return span_of(self.tokens)

    @property
    def blocks(self) -> int:
        """Number of blocks of the request, over all groups."""
        return self.shape.num_blocks - 1

    def rank_bytes(self, rank: int) -> int:
        """Return the bytes of the request's blocks on one rank."""
        geometry = lay_out(self.model, self.shape)[rank]
        return sum(
            int((table > 0).sum()) * sum(layer.page.content_bytes for layer in group.layers)
            for group, table in zip(geometry.groups, self.tables, strict=True)
        )

    def allocated(self, rank: int) -> OwnedCache:
        """Allocate the memory of one rank, filled with zeros.

        Raises:
            ConfigError: there is not enough memory.
        """
        try:
            return allocate(self.model, self.shape, rank, "cpu")
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"memory for {self.blocks:,} blocks of {self.model.name} cannot be had ({error}); "
                "choose fewer --tokens"
            ) from error


def span_of(tokens: int) -> LoadSpan:
    """Return the span that loads `tokens` tokens of a prompt with one more, none of them cached."""
    return LoadSpan(0, tokens, tokens + 1)


def read_geometry(name: str, changes: Mapping[str, int] | None = None, dtype: str = "auto") -> ModelReading:
    """Read the KV cache of a model.

    Args:
        name: model, as `kvferry plan` takes it.
        changes: values that replace those of its ``config.json``.
        dtype: element type, as `kvferry plan` takes it.

    Raises:
        ConfigError: there is no such model, or its configuration cannot be read.
    """
    found, config = find_config(name)
    if changes:
        found, config = f"{found}, changed", {**config, **changes}
    return read_model(config, dtype, name=found)


def simulate_engine(
    name: str,
    reading: ModelReading,
    side: EngineSide,
    tokens: int,
    *,
    order: str = "scattered",
    seed: int = 1,
) -> SimulatedEngine:
    """Describe an engine with room for one request and the null block.

    Args:
        name: name of the engine, unique in its process.
        reading: the model's KV cache.
        side: parallel sizes, layout and block size of the engine.
        tokens: length of the request.
        order: order of block ids: "scattered", as in an engine that has run for a while, or "contiguous", as
            in a fresh one.
        seed: seed of the scattered order.

    Raises:
        GeometryError: the engine cannot keep the model.
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
    found = SimulatedEngine(name, reading.cache, replace(made, num_blocks=blocks + 1), tokens, tuple(tables))
    lay_out(found.model, found.shape)
    return found


def plain_engine(name: str, size: int) -> SimulatedEngine:
    """Describe an engine of full attention that holds a request of about `size` bytes."""
    reading = read_geometry("Llama-3.1-8B", {"num_hidden_layers": 8})
    tokens = max(16, size // reading.cache.layers[0].whole_bytes // len(reading.cache.layers))
    return simulate_engine(name, reading, EngineSide(layout="BLHNC"), tokens)


def block_ids(blocks: int, order: str, seed: int) -> Int64s:
    """Return the ids of a pool without the null block, int64 of shape (blocks,)."""
    ids = np.arange(1, blocks + 1, dtype=np.int64)
    return np.random.default_rng(seed).permutation(ids) if order == "scattered" else ids


def _positions(store: LayerCache, block_tokens: int, tokens: int) -> tuple[int, int]:
    """Return the range of positions in a group's table that are needed, the end excluded."""
    if store.kind is GroupKind.STATE:
        return 0, 1
    low, high = needed_tokens(store.kind, store.attention_span, span_of(tokens))
    return low // block_tokens, -(-high // block_tokens)
