"""The classes of vLLM's connector interface."""

from __future__ import annotations

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

from kvferry.tiers.names import FILE, HOST, OBJECT, PEER

__all__ = [
    "HITS",
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
]

HITS = {
    PEER: CacheHitSource.P2P,
    HOST: CacheHitSource.HOST,
    FILE: CacheHitSource.DISK,
    OBJECT: CacheHitSource.EXTERNAL_UNSPECIFIED,
}
"""How vLLM's own counters label tokens, by where they came from."""
