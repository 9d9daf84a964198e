"""vLLM's prefix cache, where it shares attention blocks although it lacks recurrent state.

With recurrent layers, vLLM can report the prefix that the group with full attention has, and leave it to the
connector to load the recurrent state after that prefix (`supports_divergent_local_hybrid_hits`). If the
connector loads nothing, vLLM looks the prefix up again and takes the one that all groups have.

vLLM looks a prefix up, asks the connector, and takes references to the blocks in one pass of its scheduler.
The connector evicts blocks on the same thread. So no block is evicted between its look-up and its use.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvferry.connector.engine import Request
from kvferry.engines.vllm.compat.requests import VLLMRequest


class VLLMPrefixCache:
    """The prefix cache of vLLM's scheduler, as `connector.engine.PrefixCache` describes it.

    Args:
        coordinator: vLLM's coordinator of the prefix caches of all KV cache groups.
    """

    def __init__(self, coordinator: HybridKVCacheCoordinator) -> None:
        self._coordinator = coordinator
        self._pool: Any = coordinator.block_pool

    @classmethod
    def of(cls, manager: Any) -> VLLMPrefixCache | None:
        """Return the prefix cache of a KVCacheManager if a connector may complete its prefixes; else None."""
        coordinator = manager.coordinator
        # If prefixes may end inside a block, vLLM ignores loads that do not reach beyond it.
        if not isinstance(coordinator, HybridKVCacheCoordinator) or coordinator.enable_partial_hash_hits:
            return None
        specs = [group.spec for group in coordinator.attention_groups]
        attention = [spec for spec in specs if not isinstance(spec, MambaSpec)]
        # With several attention groups, vLLM reports the longest prefix of one, and a load would not bring
        # what the others lack.
        if len(attention) == len(specs) or len(attention) != 1:
            return None
        return cls(coordinator) if isinstance(attention[0], FullAttentionSpec) else None

    def resumable_tokens(self, request: Request) -> int:
        assert isinstance(request, VLLMRequest)
        raw = request.raw
        _, tokens, _ = self._coordinator.find_longest_cache_hit(raw.block_hashes, raw.num_tokens - 1)
        return int(tokens)

    def shorten(self, request: Request, tokens: int) -> None:
        """Evict the attention block that follows the first `tokens` tokens of a request. Mutates the cache.

        Args:
            tokens: number of tokens, a multiple of the block size of the layers with full attention.
        """
        group_id = self._coordinator.full_attention_group_id
        assert isinstance(request, VLLMRequest)
        assert group_id is not None
        size = self._coordinator.single_type_managers[group_id].block_size
        hashes = resolve_block_hashes(request.raw.block_hashes, self._pool.hash_block_size, size)
        if tokens // size >= len(hashes):
            return
        # Several blocks may have the same content.
        while found := self._pool.get_cached_block(hashes[tokens // size], [group_id]):
            self._pool.evict_blocks({block.block_id for block in found})
