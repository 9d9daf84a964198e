"""Simulate engines without a model: only KV cache memory, and the block tables of one request.

Pages, KV cache groups and block sizes are those that an engine would choose. A sliding-window group has only
the blocks that the next token attends to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import gcd, prod

import numpy as np
import torch

from kvferry.common.errors import ConfigError, TransferError
from kvferry.geometry import Group, GroupKind, Layer
from kvferry.memory import finish_stream
from kvferry.planning import Int64s, LoadSpan, needed_tokens
from kvferry.tools.measuring.owned import OwnedCache, allocate
from kvferry.tools.models import ModelReading, read_model
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.tools.models.store import LayerCache, ModelCache
from kvferry.tools.plan.find import find_config
from kvferry.tools.plan.side import EngineSide, shape

ORDERS = ("scattered", "contiguous")


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedEngine:
    """An engine without a model: its memory layout, and the block tables of one request.

    Attributes:
        name: unique in its process.
        tables: block table of each KV cache group, int64 of shape (blocks,). The id is 0 (the null block) if
            no block is needed at this position.
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
    """Return the reading of a ``config.json``, with `changes` of fields. `name` is as for `kvferry plan`."""
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
    """Return an engine whose blocks hold one request. Allocates no memory yet.

    Block ids are "scattered", as in an engine that has run for a while, or "contiguous", as in a new engine.
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
    if cache.kind is GroupKind.STATE:
        return 0, 1
    low, high = needed_tokens(cache, span_of(tokens))
    return low // block_tokens, -(-high // block_tokens)


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Large odd numbers without meaning, so that products differ in all bytes modulo 2**64.
_HEAD, _TOKEN, _WORD, _LAYER, _FIELD, _MIX = (
    0x1B873593CC9E2D51, 0x27D4EB2F165667C5, 0x369DEA0F31A53F85, 0x2545F4914F6CDD1D, 0x41C64E6DA3BC0075,
    0x5851F42D4C957F2D,
)  # fmt: skip


def fill_blocks(memory: OwnedCache, engine: SimulatedEngine) -> None:
    """Write test values into the blocks of an engine's request on one rank. Mutates `memory`."""
    pages, states = memory.views(guarded=False), memory.states(guarded=False)
    for group, table in zip(memory.geometry.groups, engine.tables, strict=True):
        for layer in group.layers:
            number = int(layer.name.rpartition(".")[2])
            if group.kind is GroupKind.STATE:
                _fill_state(states[layer.name], layer, number, int(table[0]))
            else:
                _fill_pages(pages[layer.name], group, layer, number, table.tolist())
    finish_stream(memory.buffer.device)


def check_memory(memory: OwnedCache, expected: OwnedCache) -> None:
    """Raise TransferError if a rank's memory differs from the expected memory in any byte."""
    found, wanted = memory.buffer.cpu().numpy(), expected.buffer.cpu().numpy()
    if np.array_equal(found, wanted):
        return
    wrong = int((found != wanted).sum())
    raise TransferError(
        f"{wrong:,} of {len(found):,} bytes are not what they must be after a move: please report this"
    )


def _fill_pages(pages: torch.Tensor, group: Group, layer: Layer, number: int, table: list[int]) -> None:
    _, heads, tokens, content = pages.shape
    # Writing words is quicker than bytes. The largest that divides a head's bytes.
    word = gcd(8, content)
    words = pages.view(_WORDS[word])
    axis = layer.page.fields[0].axis("head")
    base = _base(axis.start if axis else 0, (heads, tokens, content // word))
    for position, block in enumerate(table):
        if block:
            first = position * group.block_tokens
            words[block].copy_(_mix_bits(base + _wrap(first * _TOKEN + number * _LAYER)).to(_WORDS[word]))


def _fill_state(fields: dict[str, torch.Tensor], layer: Layer, number: int, block: int) -> None:
    for index, (field, elements) in enumerate(fields.items()):
        axis = next(f for f in layer.page.fields if f.name == field).axis("head")
        heads, inner = elements.shape[1], elements.shape[2:]
        base = _base(axis.start if axis else 0, (heads, 1, prod(inner)))
        value = _mix_bits(base + _wrap(number * _LAYER + (index + 1) * _FIELD))
        elements[block].copy_(value.reshape(heads, *inner).to(elements.dtype))


@cache
def _base(first_head: int, counts: tuple[int, int, int]) -> torch.Tensor:
    """Return the test values that all blocks and layers share, int64 of shape (heads, tokens, words)."""
    head, token, word = (torch.arange(count, dtype=torch.int64) for count in counts)
    return ((head + first_head) * _HEAD)[:, None, None] + (token * _TOKEN)[None, :, None] + word * _WORD


def _mix_bits(value: torch.Tensor) -> torch.Tensor:
    """Mix the bits of each element of an int64 tensor, which is mutated and returned."""
    # So that each bit depends on many of the original ones: a swapped byte is then a wrong one.
    value ^= value >> 29
    value *= _MIX
    return value.__ixor__(value >> 32)


def _wrap(value: int) -> int:
    """Return `value` modulo 2**64 as a signed integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
