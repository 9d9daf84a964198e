"""vLLM's cache manager alone, and KV cache specs of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvferry.engines.vllm.scheduler import cache_group

BLOCK, STEP = 16, 64


def full(block_tokens: int = BLOCK) -> FullAttentionSpec:
    return FullAttentionSpec(**_attention(block_tokens))


def window(span: int, block_tokens: int = BLOCK, **more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(sliding_window=span, **_attention(block_tokens), **more)


def chunked(span: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(attention_chunk_size=span, **_attention(BLOCK))


def state(block_tokens: int = BLOCK, drafts: int = 0, mode: str = "align") -> MambaSpec:
    return MambaSpec(
        block_size=block_tokens,
        shapes=((16, 16),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
        num_speculative_blocks=drafts,
    )


def _attention(block_tokens: int) -> dict[str, Any]:
    return {"block_size": block_tokens, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


KINDS = {
    "full": full(),
    "window": window(20),
    "wide window": window(50),
    "chunked": chunked(48),
    "state": state(),
}


class VllmCache:
    """vLLM's cache manager with a layer per group.

    Attributes:
        manager: vLLM's.
        groups: kvferry's description of the groups.
    """

    def __init__(
        self,
        specs: Sequence[Any],
        blocks: int,
        *,
        longest: int,
        unit: int = BLOCK,
        common: int = BLOCK,
        in_flight: int = STEP,
        caching: bool = True,
        retention: int | None = None,
        **more: Any,
    ) -> None:
        """Create an empty cache.

        Args:
            specs: specs of the groups.
            blocks: number of blocks in the pool.
            longest: maximum number of tokens of a request.
            unit: tokens that a block hash covers.
            common: multiple of all groups' block sizes, in tokens.
            in_flight: maximum number of tokens in all steps in flight.
            caching: whether there is a prefix cache.
            retention: distance in tokens of the blocks that the prefix cache keeps; None for all.
            more: arguments of vLLM's manager.
        """
        groups = [KVCacheGroupSpec([f"layer {n}"], spec) for n, spec in enumerate(specs)]
        self.groups = tuple(map(cache_group, groups))
        config = KVCacheConfig(
            blocks, [], groups, hash_block_size=unit, prefix_cache_retention_interval=retention
        )
        self.manager = KVCacheManager(
            config, longest, common, unit, max_in_flight_tokens=in_flight, enable_caching=caching, **more
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(unit, sha256) if caching else None

    @property
    def pool(self) -> Any:
        return self.manager.block_pool

    def request(self, name: str, tokens: Sequence[int], answer: int = 1) -> Request:
        return Request(name, list(tokens), SamplingParams(max_tokens=answer), None, block_hasher=self._hasher)

    def tables(self, request: Request) -> tuple[list[int], ...]:
        """Return the request's block ids by group."""
        return self.manager.get_block_ids(request.request_id)
