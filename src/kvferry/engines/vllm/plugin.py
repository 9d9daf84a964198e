"""Makes kvferry's connectors known to vLLM by name; the entry point ``vllm.general_plugins`` of this package.

vLLM calls it once in each of its processes. So ``kv_connector`` needs no ``kv_connector_module_path``, as the
child of another connector neither.
"""

from __future__ import annotations

CONNECTORS = {
    "KVFerryConnector": "kvferry.engines.vllm.connector",
    "FerryMultiConnector": "kvferry.engines.vllm.multi.connector",
}
"""Class to the module that has it."""


def register() -> None:
    """Tell the factory; nothing of kvferry is loaded before it is asked for."""
    # Not through `compat`: this runs in every vLLM where kvferry is installed, and that loads much of vLLM.
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    for name, module in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
