"""Eviction policies, which choose the chunk to evict when the host tier is full. `base` is their contract."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvferry.tiers.eviction.base import EvictionPolicy
from kvferry.tiers.eviction.density import HitDensity
from kvferry.tiers.eviction.policies import ARC, LRU, S3FIFO

__all__ = ["EVICTION_POLICIES", "EvictionPolicy"]

# Called with a capacity in bytes.
EVICTION_POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {"lru": LRU, "arc": ARC, "s3fifo": S3FIFO, "density": HitDensity}
)
