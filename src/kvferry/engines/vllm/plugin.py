"""Registration of kvferry's connectors with vLLM by name; the entry point ``vllm.general_plugins``.

vLLM calls it once in each of its processes. So ``kv_connector`` needs no ``kv_connector_module_path``, and
neither does the child of another connector.
"""

from __future__ import annotations

CONNECTORS = {
    "KVFerryConnector": "kvferry.engines.vllm.connector",
    "FerryMultiConnector": "kvferry.engines.vllm.multi.connector",
}
"""Class to the module that has it."""


def register() -> None:
    """Register the connectors with vLLM's factory; loads nothing of kvferry before the factory needs it."""
    # Not through `compat`: this runs in every vLLM where kvferry is installed, and that loads much of vLLM.
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    for name, module in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
