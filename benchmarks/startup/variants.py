"""The connectors whose starts are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NONE, NIXL, PEERS, TIERS = "no connector", "NixlConnector", "kvferry, peers", "kvferry, tiers"
VARIANTS = (NONE, NIXL, PEERS, TIERS)
"""Names of the variants.

`PEERS` exchanges KV with other engines only. `TIERS` has a host tier of 1 GiB and a file tier, and no peers.
"""


@dataclass(frozen=True, slots=True)
class Connector:
    """A connector, and the modules that it brings.

    Attributes:
        config: transfer configuration for vLLM; None for no connector.
        modules: modules that an engine with this connector imports beyond vLLM's own.
    """

    config: Mapping[str, Any] | None
    modules: Sequence[str]


def connector_of(variant: str, files: Path) -> Connector:
    """Return the connector of a variant.

    Args:
        variant: one of `VARIANTS`.
        files: existing folder for the file tier.
    """
    if variant == NONE:
        return Connector(None, ())
    if variant == NIXL:
        # This module imports the NIXL library itself, after it has set UCX's variables.
        package = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
        return Connector({"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}, (package,))
    module = "kvferry.engines.vllm.connector"
    tiers = [
        {"type": "host", "capacity": "1GiB"},
        {"type": "file", "capacity": "1GiB", "path": str(files)},
    ]
    config = {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": module,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": tiers} if variant == TIERS else {},
    }
    return Connector(config, (module, "nixl._api"))
