"""The model and the engine settings that a replay assumes: the sizes of chunks and of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import NamedTuple

from kvferry.common.errors import ConfigError
from kvferry.common.units import counted, format_bytes, parse_size
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.geometry.layout import lay_out_rank
from kvferry.geometry.models import ModelReading
from kvferry.planning.coverage import widest_group
from kvferry.planning.retention import needed_chunks
from kvferry.planning.select import attends_to_all
from kvferry.tools.plan.kept import KeptSettings, StoredForm, stored_form
from kvferry.tools.plan.side import EngineSide, shape


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """The block tables of an engine that hold the KV of one kind of layers.

    Attributes:
        attention_span: as in `geometry.Attention`.
        block_tokens: number of tokens per block.
        tables: number of block tables. Each has its own blocks of the pool.
    """

    kind: GroupKind
    attention_span: int
    block_tokens: int
    tables: int


@dataclass(frozen=True)
class ServedModel:
    """A model and the settings of the engine that serves it.

    Attributes:
        form: form in which the tiers store the model's KV, and what they store.
        block_groups: the engine's block tables, in the order of the KV cache groups in `form`.
        block_bytes: bytes of a block of the engine's pool on one rank.
    """

    name: str
    form: StoredForm
    block_groups: tuple[BlockGroup, ...]
    block_bytes: int

    @cached_property
    def groups(self) -> tuple[CanonicalGroup, ...]:
        return self.form.canonical.groups

    @cached_property
    def chunk_tokens(self) -> int:
        return self.form.canonical.chunk_tokens

    @cached_property
    def state(self) -> int | None:
        """Index of the KV cache group with recurrent state; None if there is none."""
        return next((n for n, group in enumerate(self.groups) if group.kind is GroupKind.STATE), None)

    @cached_property
    def widest(self) -> int:
        """Index of the group that needs the most chunks to load a prefix."""
        return widest_group(self.groups)

    @cached_property
    def attention(self) -> tuple[int, ...]:
        """Indices of the groups that attend to all tokens."""
        return tuple(n for n, group in enumerate(self.groups) if attends_to_all(group.kind))

    @cached_property
    def has_only_attention(self) -> bool:
        return len(self.attention) == len(self.groups)

    @cached_property
    def has_one_row(self) -> bool:
        """True if the model has one group, which attends to all tokens."""
        return len(self.groups) == 1 and self.has_only_attention

    @cached_property
    def has_cold_chunks(self) -> bool:
        """True if tiers evict some chunks of this model before others."""
        return any(some is not None for some in needed_chunks(self.groups, self.chunk_tokens, [1]))

    @cached_property
    def completes_prefixes(self) -> bool:
        """True if a load can bring the recurrent state after a prefix of the engine's own prefix cache."""
        # vLLM passes such a prefix to the connector if all other layers have full attention.
        return self.state is not None and len(self.groups) == 2 and len(self.attention) == 1

    @cached_property
    def block_tokens(self) -> int:
        """Least common multiple of the tokens per block of all groups."""
        return lcm(*(group.block_tokens for group in self.block_groups))


def served_model(reading: ModelReading, side: EngineSide, settings: KeptSettings) -> ServedModel:
    """Return a model with the settings of the engine that serves it.

    Args:
        settings: settings of the engine and the tiers. `KeptSettings.prompt` has no effect.

    Raises:
        ConfigError: vLLM or the connector would reject the settings.
        GeometryError: the heads cannot be distributed evenly over the ranks, or the KV cannot be stored.
    """
    form = stored_form(reading, side, settings)
    layers = reading.cache.layers
    # Engines may divide layers of one kind among several block tables, and tiers store them in one group.
    tables: dict[tuple[GroupKind, int], list[int]] = {}
    engine = shape(reading, side, num_blocks=1)
    for group in engine.groups:
        cache = layers[group.layers[0]]
        tables.setdefault((cache.kind, cache.attention_span), []).append(group.block_tokens)
    block_groups = []
    for one in form.canonical.groups:
        sizes = tables[one.kind, one.attention_span]
        block_groups.append(BlockGroup(one.kind, one.attention_span, lcm(*sizes), len(sizes)))
    (pool,) = lay_out_rank(reading.cache, engine, 0, 0).geometry.regions
    return ServedModel(reading.cache.name, form, tuple(block_groups), pool.length)


# Memory of a rank for KV cache, if nothing says it: half of a GPU with 80 GB. Weights take the rest.
ASSUMED_KV_CACHE = "40GiB"


class BlockPool(NamedTuple):
    """The block pool of an engine.

    Attributes:
        blocks: number of blocks; 0 for an engine without prefix caching.
        source: origin of this number, in words for the user; empty if the user gave it.
    """

    blocks: int = 0
    source: str = ""

    @property
    def text(self) -> str:
        """The prefix cache that an engine with this pool has, as words after "an engine"."""
        if not self.blocks:
            return "without a prefix cache"
        return f"with a prefix cache of {counted(self.blocks, 'block')}{self.source and f' ({self.source})'}"


# The pool of an engine without prefix caching.
NO_PREFIX_CACHE = BlockPool()


def block_pool(
    model: ServedModel, blocks: int | None, recorded: int | None, kv_cache_memory: str | None
) -> BlockPool:
    """Return the block pool that an engine has.

    Args:
        blocks: number of blocks that the user gave; None to derive it.
        recorded: number of blocks of the engine that recorded the trace; None if no engine did.
        kv_cache_memory: size of the memory of each rank for KV cache, such as ``40GiB``; None for the
            recorded number of blocks, or else `ASSUMED_KV_CACHE`.

    Raises:
        ConfigError: both numbers are given, one of them is not valid, or the memory has no room for a block.
    """
    if blocks is not None and kv_cache_memory is not None:
        raise ConfigError(
            "--engine-blocks and --kv-cache-memory both give the size of the pool; leave one out"
        )
    if blocks is not None:
        return BlockPool(blocks)
    if kv_cache_memory is None and recorded is not None:
        return BlockPool(recorded, "as recorded")
    size = parse_size(kv_cache_memory or ASSUMED_KV_CACHE)
    found = size // model.block_bytes
    if not found:
        block = format_bytes(model.block_bytes)
        raise ConfigError(
            f"--kv-cache-memory {kv_cache_memory} has no room for a block of {block}; give more, or "
            "--engine-blocks 0 for an engine without a prefix cache"
        )
    assumed = "" if kv_cache_memory else ", assumed"
    return BlockPool(found, f"{format_bytes(size)} of KV cache per rank{assumed}")
