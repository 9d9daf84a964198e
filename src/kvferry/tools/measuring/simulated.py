"""Simulate engines without a model: only KV cache memory, and the block tables of one request.

Pages, KV cache groups and block sizes are those that an engine would choose. A sliding-window group has only
the blocks that the next token attends to.
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
from kvferry.tools.plan.find import find_config
from kvferry.tools.plan.side import EngineSide, shape
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan, needed_tokens

ORDERS = ("scattered", "contiguous")


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedEngine:
    """An engine without a model: its memory layout, and the block tables of one request.

    Attributes:
        name: unique in its process.
        tokens: length of the request.
        tables: block table of each KV cache group, int64 of shape (blocks,). The id is 0 (the null block) if
            no block is needed at this position.
        device: torch device of the KV cache, such as ``cpu`` or ``cuda:0``.
    """

    name: str
    model: ModelCache
    shape: EngineShape
    tokens: int
    tables: tuple[Int64s, ...]
    device: str = "cpu"

    @property
    def span(self) -> LoadSpan:
        return span_of(self.tokens)

    @property
    def blocks(self) -> int:
        """Number of blocks of the request, over all KV cache groups."""
        return self.shape.num_blocks - 1

    def rank_bytes(self, rank: int) -> int:
        """Return the number of useful bytes (without padding) in the request's blocks on one rank."""
        geometry = lay_out(self.model, self.shape)[rank]
        return sum(
            int((table > 0).sum()) * sum(layer.page.content_bytes for layer in group.layers)
            for group, table in zip(geometry.groups, self.tables, strict=True)
        )

    def allocated(self, rank: int) -> OwnedCache:
        """Allocate the KV cache of one rank, filled with zeros.

        Raises:
            ConfigError: there is not enough memory.
        """
        try:
            return allocate(self.model, self.shape, rank, self.device)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"memory for {self.blocks:,} blocks of {self.model.name} cannot be had ({error}); "
                "choose fewer --tokens"
            ) from error


def span_of(tokens: int) -> LoadSpan:
    """Return the range of tokens to load for a prompt of ``tokens + 1`` tokens, none of which is cached."""
    # The engine must compute the last token of a prompt.
    return LoadSpan(0, tokens, tokens + 1)


def read_geometry(name: str, changes: Mapping[str, int] | None = None, dtype: str = "auto") -> ModelReading:
    """Return the description of a model's KV cache, read from the model's ``config.json``.

    Args:
        name: name or path of the model, in any form that `kvferry plan` accepts.
        changes: fields of ``config.json`` to replace, with their new values.

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
    """Return an engine without a model, whose blocks hold one request. Allocates no memory yet.

    Args:
        order: order of block ids: "scattered", as in an engine that has run for a while, or "contiguous", as
            in a new engine.

    Raises:
        GeometryError: the engine cannot hold this model's KV cache.
    """
    made = shape(reading, side, 1)
    layers = reading.cache.layers
    parts = [_positions(layers[each.layers[0]], each.block_tokens, tokens) for each in made.groups]
    # The groups of a request share one pool, so their ids differ.
    blocks = sum(last - first for first, last in parts)
    ids = block_ids(blocks, order, seed)
    tables = []
    for first, last in parts:
        tables.append(np.concatenate([np.zeros(first, np.int64), ids[: last - first]]))
        ids = ids[last - first :]
    found = SimulatedEngine(name, reading.cache, replace(made, num_blocks=blocks + 1), tokens, tuple(tables))
    # Raises the error here, not in a process that was started for the engine.
    lay_out(found.model, found.shape)
    return found


def plain_engine(name: str, size: int, device: str = "cpu", layout: str = "BLHNC") -> SimulatedEngine:
    """Return an engine without a model, with one rank, whose request has about `size` bytes of KV."""
    reading = read_geometry("Llama-3.1-8B", {"num_hidden_layers": 8})
    tokens = max(16, size // reading.cache.layers[0].whole_bytes // len(reading.cache.layers))
    return replace(simulate_engine(name, reading, EngineSide(layout=layout), tokens), device=device)


def block_ids(blocks: int, order: str, seed: int) -> Int64s:
    """Return the block ids 1 to `blocks` of a pool, int64 of shape (blocks,), scattered or contiguous."""
    ids = np.arange(1, blocks + 1, dtype=np.int64)
    return np.random.default_rng(seed).permutation(ids) if order == "scattered" else ids


def _positions(cache: LayerCache, block_tokens: int, tokens: int) -> tuple[int, int]:
    """Return the range of positions in a group's block table at which a load needs blocks."""
    if cache.kind is GroupKind.STATE:
        return 0, 1
    low, high = needed_tokens(cache, span_of(tokens))
    return low // block_tokens, -(-high // block_tokens)
