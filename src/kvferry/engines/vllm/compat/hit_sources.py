"""Labels of cache hits by the medium that the KV came from. vLLM 0.31 has none and never asks for them."""

from __future__ import annotations

from typing import Any

from kvferry.tiers.names import Medium

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ModuleNotFoundError:  # vLLM 0.31
    # It never calls the hook that needs them, `get_external_cache_hit_sources`.
    CacheHitSource = None

Label = Any
"""A member of vLLM's `CacheHitSource`."""


_NAMES = {
    Medium.PEER: "P2P",
    Medium.HOST: "HOST",
    Medium.DISK: "DISK",
    Medium.NETWORK: "EXTERNAL_UNSPECIFIED",
}


def hit_source(medium: Medium) -> Label:
    """Return vLLM's label for cache hits whose KV came from a medium. Not for vLLM 0.31."""
    return CacheHitSource[_NAMES[medium]]
