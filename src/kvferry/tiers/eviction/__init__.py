"""Which chunk leaves when there is no more room; one policy per module, all under one contract."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvferry.tiers.eviction.arc import ARC
from kvferry.tiers.eviction.base import EvictionPolicy
from kvferry.tiers.eviction.lru import LRU
from kvferry.tiers.eviction.s3fifo import S3FIFO

__all__ = ["EVICTION_POLICIES", "EvictionPolicy"]

EVICTION_POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {"arc": ARC, "lru": LRU, "s3fifo": S3FIFO}
)
"""By the name that a configuration uses; each is made with the capacity in bytes."""
