"""Labels of cache hits by the medium that the KV came from. vLLM 0.31 has none and never asks for them."""

from __future__ import annotations

from typing import Any, assert_never

from kvferry.tiers.names import Medium

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ModuleNotFoundError:  # vLLM 0.31
    CacheHitSource = None

Label = Any
"""A member of vLLM's `CacheHitSource`."""


def hit_source(medium: Medium) -> Label:
    """Return vLLM's label for cache hits whose KV came from a medium, such as a peer or host memory.

    Only `get_external_cache_hit_sources` needs it, a hook that vLLM calls since 0.32.
    """
    match medium:
        case Medium.PEER:
            return CacheHitSource.P2P
        case Medium.HOST:
            return CacheHitSource.HOST
        case Medium.DISK:
            return CacheHitSource.DISK
        case Medium.NETWORK:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        case _:
            assert_never(medium)
