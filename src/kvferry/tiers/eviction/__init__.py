"""Eviction policies: which chunk leaves when a tier is full. One per module, one contract (`base`)."""

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
"""Policies by their name in a configuration; each is made with the capacity in bytes."""
