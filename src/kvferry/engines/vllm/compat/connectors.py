"""vLLM's classes of connectors, by name too, and the configurations from which it creates connectors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from vllm.config import (
    KVTransferConfig,
    VllmConfig,
    get_current_vllm_config_or_none as current_config,
    set_current_vllm_config as as_current_config,
)
from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
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


def register_connector(name: str, module: str) -> None:
    """Register a connector class with vLLM, which imports its module when it first needs the class."""
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)


def connector_class(vllm_config: VllmConfig) -> Any:
    """Return the configured connector class. Raise ValueError, ImportError, AttributeError without one."""
    return KVConnectorFactory.get_connector_class(vllm_config.kv_transfer_config)


def class_of_transfer(transfer: Mapping[str, Any]) -> Any:
    """Return the connector class that settings of vLLM's `KVTransferConfig` name, as `connector_class`."""
    return KVConnectorFactory.get_connector_class(KVTransferConfig(**{"kv_role": "kv_both", **transfer}))


def supports_hybrid(vllm_config: VllmConfig) -> bool:
    """Return True if the connector named in a configuration supports the hybrid KV cache manager."""
    return bool(KVConnectorFactory.supports_hma_config(vllm_config.kv_transfer_config))


def with_connector(vllm_config: VllmConfig, transfer: Mapping[str, Any]) -> VllmConfig:
    """Return a copy of an engine's configuration with other settings, or raise ValueError, TypeError."""
    # A shallow copy: all other parts are those of the engine.
    config = copy.copy(vllm_config)
    config.kv_transfer_config = KVTransferConfig(**transfer)
    return config


def with_extra(vllm_config: VllmConfig, more: Mapping[str, Any]) -> VllmConfig:
    """Return a copy of an engine's configuration with entries added to the connector's extra config."""
    config = copy.copy(vllm_config)
    config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    config.kv_transfer_config.kv_connector_extra_config = {
        **config.kv_transfer_config.kv_connector_extra_config,
        **more,
    }
    return config


__all__ = [
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
    "as_current_config",
    "current_config",
]
