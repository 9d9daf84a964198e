"""Functions that read and check the connector's settings in vLLM's configuration."""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.connector.config import NODE, ConnectorConfig, check_host_buffer, parse_config
from kvferry.errors import ConfigError


def read_settings(vllm_config: Any) -> ConnectorConfig:
    """Read the connector's settings from vLLM's configuration, and fill in those that depend on the engine.

    The value ``node`` of the setting `host` is replaced by this machine's IP address. If `host_buffer` is not
    set, it becomes True if vLLM's `kv_buffer_device` is ``cpu`` and the model runs on another device.

    Raises:
        ConfigError: a setting is invalid, or the settings contradict each other or vLLM's settings.
    """
    transfer = vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config
    # A child of another connector has a name. It shares the role, but another child may do the transfers.
    config = parse_config(extra, None if extra.get("name") else transfer.kv_role)
    check_failure_policy(transfer)
    if config.host == NODE:
        from kvferry.engines.vllm.compat.process import node_address  # noqa: PLC0415 - loads the engine; settings are read without

        config = msgspec.structs.replace(config, host=node_address())
    if config.host_buffer is None:
        on_host = transfer.kv_buffer_device == "cpu" and vllm_config.device_config.device_type != "cpu"
        config = msgspec.structs.replace(config, host_buffer=on_host)
    if config.host_buffer:
        check_host_buffer(config)
    return config


def check_failure_policy(transfer: Any) -> None:
    """Check that vLLM is configured to recompute a request if its load fails, instead of failing the request.

    Args:
        transfer: vLLM's KVTransferConfig.

    Raises:
        ConfigError: the policy for failed loads is not ``recompute``.
    """
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}, it must be 'recompute': a "
            "request whose load fails is loaded from elsewhere or computed, not failed"
        )
