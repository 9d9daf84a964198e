"""The classes of vLLM's connector interface."""

from __future__ import annotations

from typing import assert_never

from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvferry.tiers.names import Medium

__all__ = [
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorKVEvents",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "hit_source",
]


def hit_source(medium: Medium) -> CacheHitSource:
    """Return vLLM's label for cache hits whose KV came from a medium, such as a peer or host memory."""
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
