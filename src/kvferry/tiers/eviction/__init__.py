"""Eviction policies, which choose the chunk to evict when the host tier is full.

Each module has one policy. All implement the base class in `base`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvferry.tiers.eviction.arc import ARC
from kvferry.tiers.eviction.base import EvictionPolicy
from kvferry.tiers.eviction.lru import LRU
from kvferry.tiers.eviction.s3fifo import S3FIFO

__all__ = ["EVICTION_POLICIES", "EvictionPolicy"]

EVICTION_POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {"lru": LRU, "arc": ARC, "s3fifo": S3FIFO}
)
"""Policy classes by their name in a configuration. The argument of each is the capacity in bytes."""
