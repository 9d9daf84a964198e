"""The number of tokens that a block hash covers. vLLM 0.31 does not store it in the KVCacheConfig."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes


def hash_block_tokens(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Return the number of tokens that each block hash of a request covers; None without prefix caching."""
    if hasattr(kv_cache_config, "hash_block_size"):
        resolved: int | None = kv_cache_config.hash_block_size
        return resolved
    # vLLM 0.31: its scheduler computes the number with the same function.
    _, tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(tokens)
