"""Functions that read and check the connector's settings in vLLM's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvferry.connector.choices import check_keys, parse_settings
from kvferry.connector.config import NODE, ConnectorConfig, check_host_buffer, parse_config
from kvferry.engines.vllm.version import minor_release, vllm_version
from kvferry.errors import ConfigError

UNUSED_PORT = 14579
"""vLLM's default of ``kv_port``, which kvferry does not use."""

_GONE = {
    "kv_ip": ", and set host in kv_connector_extra_config",
    "kv_rank": "",
    "kv_parallel_size": "",
    "kv_buffer_size": ", and set staging_mib in kv_connector_extra_config",
}
"""Keys that vLLM has dropped, and that kvferry has never read. The value says what to set instead."""
_RELEASES_WITH_GONE = ("0.31",)
"""Supported minor releases of vLLM that still take these keys. Later ones refuse them."""


class TransferConfig(msgspec.Struct, frozen=True):
    """Settings of vLLM's ``KVTransferConfig``: the value of ``--kv-transfer-config``.

    Attributes are vLLM's, with its default values.
    """

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
    """Check the keys of a value of ``--kv-transfer-config``, as vLLM does.

    Args:
        where: name of the object, for messages.
        given: the object, as parsed from JSON.

    Raises:
        ConfigError: a key is unknown or missing, or a value has a wrong type.
    """
    check_transfer_keys(where, given)
    return parse_settings(where, given, TransferConfig, tuple(_GONE))


def check_transfer_keys(where: str, given: Mapping[str, Any], beside: tuple[str, ...] = ()) -> None:
    """Check that an object has only keys of ``--kv-transfer-config``.

    Args:
        where: name of the object, for messages.
        given: the object, as parsed from JSON.
        beside: further keys that the object may have.

    Raises:
        ConfigError: a key is unknown, or the installed vLLM has dropped it. The message names the nearest
            known one.
    """
    release = vllm_version()
    if release is not None and minor_release(release) not in _RELEASES_WITH_GONE:
        for text in gone_keys(where, given):
            raise ConfigError(text)
    check_keys(where, given, (*TRANSFER_KEYS, *_GONE, *beside))


def gone_keys(where: str, given: Mapping[str, Any]) -> list[str]:
    """Return a sentence about each key of an object that vLLM has dropped and kvferry never used.

    Args:
        where: name of the object.
        given: the object, as parsed from JSON.
    """
    return [
        f"{where} has the key {key!r}, which vLLM has dropped and kvferry never used; leave it out{instead}"
        for key, instead in _GONE.items()
        if key in given
    ]


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
    check_failure_policy(transfer.kv_load_failure_policy)
    if config.host == NODE:
        from kvferry.engines.vllm.compat.process import node_address  # noqa: PLC0415 - loads the engine; settings are read without

        config = msgspec.structs.replace(config, host=node_address())
    if config.host_buffer is None:
        on_host = transfer.kv_buffer_device == "cpu" and vllm_config.device_config.device_type != "cpu"
        config = msgspec.structs.replace(config, host_buffer=on_host)
    if config.host_buffer:
        check_host_buffer(config)
    return config


def keep_transfer(vllm_config: Any, config: ConnectorConfig) -> None:
    """Write the setting `transfer` into vLLM's configuration, if it is set or follows from the role.

    The scheduler's half changes the role (`compat.frees`), and settings are read again after that.

    Args:
        vllm_config: the engine's configuration. Mutated.
        config: the connector's settings, as read before the change.
    """
    if config.transfer is not None:
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        transfer.kv_connector_extra_config = {**extra, "transfer": config.transfer}


def check_failure_policy(policy: str) -> None:
    """Check that vLLM is configured to recompute a request if its load fails, instead of failing the request.

    Args:
        policy: value of ``kv_load_failure_policy``.

    Raises:
        ConfigError: the policy for failed loads is not ``recompute``.
    """
    if policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {policy!r}, so a request whose load fails would fail too; it must be "
            "'recompute'"
        )


def unused_keys(kv_port: int) -> str:
    """Return a sentence about a key of ``--kv-transfer-config`` that is set and has no effect; empty if none.

    Args:
        kv_port: value of ``kv_port``.
    """
    if kv_port == UNUSED_PORT:
        return ""
    return (
        f"kv_port is {kv_port}, which kvferry does not use; leave it out, and set port in "
        "kv_connector_extra_config for a fixed port"
    )
