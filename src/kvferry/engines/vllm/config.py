"""The connector's settings in vLLM's configuration: reading and checking them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvferry.common.errors import ConfigError
from kvferry.common.parse import check_keys, parse_settings
from kvferry.connector.config import NODE, ConnectorConfig, check_host_buffer, parse_config
from kvferry.engines.vllm.version import minor_release, vllm_version

UNUSED_PORT = 14579
"""vLLM's default of ``kv_port``, which kvferry does not use."""

_GONE = {
    "kv_ip": ", and set host in kv_connector_extra_config",
    "kv_rank": "",
    "kv_parallel_size": "",
    "kv_buffer_size": ", and set staging_mib in kv_connector_extra_config",
}
"""Keys that vLLM has dropped, and that kvferry has never read. The value says what to set instead."""
_RELEASE_WITH_GONE = "0.31"
"""The supported minor release of vLLM that still takes these keys. Later ones refuse them."""


class TransferConfig(msgspec.Struct, frozen=True):
    """vLLM's ``KVTransferConfig``: the value of ``--kv-transfer-config``, with vLLM's default values."""

    kv_connector: str
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: dict[str, Any] = {}
    kv_buffer_device: str = ""
    kv_load_failure_policy: Literal["recompute", "fail"] = "fail"
    kv_port: int = UNUSED_PORT
    engine_id: str | None = None
    enable_permute_local_kv: bool = False


TRANSFER_KEYS = TransferConfig.__struct_fields__
"""Keys of vLLM's own ``KVTransferConfig`` that an entry of ``connectors`` may have, too."""


def parse_transfer(where: str, given: Mapping[str, Any]) -> TransferConfig:
    """Check a value of ``--kv-transfer-config``, as vLLM does. Messages call it `where`."""
    check_transfer_keys(where, given)
    return parse_settings(where, given, TransferConfig, tuple(_GONE))


def check_transfer_keys(where: str, given: Mapping[str, Any], beside: tuple[str, ...] = ()) -> None:
    """Raise a ConfigError unless an object has only keys of ``--kv-transfer-config``, and of `beside`."""
    release = vllm_version()
    if release is not None and minor_release(release) != _RELEASE_WITH_GONE:
        for text in gone_keys(where, given):
            raise ConfigError(text)
    check_keys(where, given, (*TRANSFER_KEYS, *_GONE, *beside))


def gone_keys(where: str, given: Mapping[str, Any]) -> list[str]:
    """Return a sentence about each key of an object that vLLM has dropped and kvferry never used."""
    return [
        f"{where} has the key {key!r}, which vLLM has dropped and kvferry never used; leave it out{instead}"
        for key, instead in _GONE.items()
        if key in given
    ]


def read_settings(vllm_config: Any) -> ConnectorConfig:
    """Read the connector's settings from vLLM's configuration, and fill in those that depend on the engine.

    Raises:
        ConfigError: a setting is invalid, or the settings contradict each other or vLLM's.
    """
    transfer = vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config
    # A child of another connector has a name. It shares the role, but another child may do the transfers.
    config = parse_config(extra, None if extra.get("name") else transfer.kv_role)
    check_failure_policy(transfer.kv_load_failure_policy)
    # `node` stands for the address of this machine, which only the engine knows.
    if config.host == NODE:
        from kvferry.engines.vllm.compat.process import node_address  # noqa: PLC0415 - loads the engine; settings are read without

        config = msgspec.structs.replace(config, host=node_address())
    if config.host_buffer is None:
        # vLLM users ask for a buffer in host memory in this way.
        on_host = transfer.kv_buffer_device == "cpu" and vllm_config.device_config.device_type != "cpu"
        config = msgspec.structs.replace(config, host_buffer=on_host)
    if config.host_buffer:
        check_host_buffer(config)
    return config


def keep_transfer(vllm_config: Any, config: ConnectorConfig) -> None:
    """Write the setting `transfer`, if it is set or follows from the role, into vLLM's configuration."""
    # The settings are read again after `defer_frees` has changed the role.
    if config.transfer is not None:
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        transfer.kv_connector_extra_config = {**extra, "transfer": config.transfer}


def check_failure_policy(policy: str) -> None:
    """Raise a ConfigError unless vLLM recomputes a request if its load fails."""
    if policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {policy!r}, so a request whose load fails would fail too; it must be "
            "'recompute'"
        )


def unused_keys(kv_port: int) -> str:
    """Return a sentence about ``kv_port`` if it is set, because it has no effect; else an empty text."""
    if kv_port == UNUSED_PORT:
        return ""
    return (
        f"kv_port is {kv_port}, which kvferry does not use; leave it out, and set port in "
        "kv_connector_extra_config for a fixed port"
    )
