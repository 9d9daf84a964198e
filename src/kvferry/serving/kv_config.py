"""The value of vLLM's ``--kv-transfer-config`` that loads kvferry's connector."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from kvferry.engines.vllm.config import parse_config
from kvferry.transport import security


class Role(StrEnum):
    """What an engine does for a request that is served by two."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


_VLLM_ROLE = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}


def kv_transfer_config(role: Role, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The object for an engine of this role.

    Args:
        role: of the engine.
        settings: keys of `ConnectorConfig`; a key whose value is None is left out.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range; or a host that would let anyone in.
    """
    extra = {key: value for key, value in (settings or {}).items() if value is not None}
    config = parse_config(extra)
    if config.secret_file is None:
        security.check_host(config.host, None, config.allow_insecure)
    return {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.engines.vllm.connector",
        "kv_role": _VLLM_ROLE[role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def kv_transfer_json(config: Mapping[str, Any]) -> str:
    """The object as one line of JSON."""
    return json.dumps(config, separators=(",", ":"))
