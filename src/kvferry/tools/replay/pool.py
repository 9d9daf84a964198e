"""The block pool of a simulated engine: how many blocks it has, and how that is known."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.errors import ConfigError
from kvferry.tools.replay.model import ServedModel
from kvferry.tiers.sizes import parse_size
from kvferry.units import counted, format_bytes

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
