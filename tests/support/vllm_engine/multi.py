"""Engines with several connectors."""

from __future__ import annotations

from typing import Any

from support.vllm_engine.pair import connector


def child(**extra: Any) -> dict[str, Any]:
    """An entry of ``connectors``: kvferry's own, with these settings."""
    whole = connector(**extra)
    return {
        key: whole[key] for key in ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config")
    }


def multi(*children: dict[str, Any], **more: Any) -> dict[str, Any]:
    """``kv_transfer_config`` of a `FerryMultiConnector`.

    Args:
        children: its ``connectors``.
        more: other keys of its settings.
    """
    return {
        "kv_connector": "FerryMultiConnector",
        "kv_connector_module_path": "kvferry.engines.vllm.multi.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children), **more},
    }
