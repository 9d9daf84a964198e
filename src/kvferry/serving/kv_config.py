"""The value of vLLM's ``--kv-transfer-config`` that loads kvferry's connector."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvferry.engines.vllm.config import parse_config
from kvferry.engines.vllm.multi.settings import parse_multi
from kvferry.errors import ConfigError
from kvferry.serving.role import Role
from kvferry.transport.costs_file import load_costs
from kvferry.transport.key_file import existing_keys

_VLLM_ROLE = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}


def kv_transfer_config(
    role: Role, settings: Mapping[str, Any] | None = None, *, alone: bool = True
) -> dict[str, Any]:
    """The object for an engine of this role on this machine: what it would refuse at start is refused here.

    Args:
        role: of the engine.
        settings: keys of `ConnectorConfig`; a key whose value is None is left out.
        alone: the engine has no other connector, so this one exchanges KV if the role says so; that is
            written out where tiers would say otherwise.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range; or a file of secrets or costs that
            cannot be used.
    """
    extra = {key: value for key, value in (settings or {}).items() if value is not None}
    config = parse_config(extra, _VLLM_ROLE[role] if alone else None)
    if config.transfer and config.tiers:
        extra["transfer"] = True
    if config.transfers:
        existing_keys(config.secret_file)
    load_costs(config.costs)
    return {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.engines.vllm.connector",
        "kv_role": _VLLM_ROLE[role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def beside(config: Mapping[str, Any], others: Any) -> dict[str, Any]:
    """The object for an engine with other connectors, before ours: a `FerryMultiConnector` of all.

    Args:
        config: ours, see `kv_transfer_config`; its ``policy`` and ``patience_seconds`` choose between all.
        others: entries of ``connectors``.

    Raises:
        ConfigError: they are no such entries; see `parse_multi`.
    """
    extra = config["kv_connector_extra_config"]
    own = {
        key: config[key] for key in ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config")
    }
    shared = {key: extra[key] for key in ("policy", "patience_seconds") if key in extra}
    given = [*others, own] if isinstance(others, list) else others
    parse_multi({"connectors": given})
    return {
        **config,
        "kv_connector": "FerryMultiConnector",
        "kv_connector_module_path": "kvferry.engines.vllm.multi.connector",
        "kv_connector_extra_config": {"connectors": given, **shared},
    }


def others_of(text: str) -> Any:
    """Entries of ``connectors`` from a command line.

    Raises:
        ConfigError: it is no JSON. What it holds, `beside` checks.
    """
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"beside is {text!r}, which is no JSON ({error}); write a list such as "
            '[{"kv_connector": "NixlConnector"}]'
        ) from error


def tiers_of(text: str | None) -> Any:
    """The value of the key ``tiers`` from a command line; None if it was not given.

    Args:
        text: ``default``, or JSON: a list of objects with a "type".

    Raises:
        ConfigError: it is neither. What the objects hold, `kv_transfer_config` checks.
    """
    if text is None or text == "default":
        return text
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"tiers is {text!r}, which is no JSON ({error}); write default, or a list such as "
            '[{"type": "host", "capacity": "8GiB"}]'
        ) from error


def kv_transfer_json(config: Mapping[str, Any]) -> str:
    """The object as one line of JSON."""
    return json.dumps(config, separators=(",", ":"))
