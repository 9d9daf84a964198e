"""Registration of kvferry's connectors with vLLM by name, through the entry point ``vllm.general_plugins``.

vLLM calls `register` once in each of its processes. So users need not set ``kv_connector_module_path`` beside
``kv_connector``, not even for a child of another connector.
"""

from __future__ import annotations

import logging

from kvferry.common.errors import ConfigError
from kvferry.engines.vllm.version import check_release, vllm_version

logger = logging.getLogger(__name__)

CONNECTORS = {
    "KVFerryConnector": "kvferry.engines.vllm.connector",
    "FerryMultiConnector": "kvferry.engines.vllm.multi.connector",
}
"""Module of each connector class, by the name of the class."""


def register() -> None:
    """Register kvferry's connectors with vLLM by name. vLLM imports a connector's module when needed."""
    try:
        check_release(vllm_version())
    except ConfigError as error:
        # The engine may not use kvferry at all, so it must start. One that uses it ends with an error: vLLM
        # does not know the name, and `compat` refuses to be imported.
        logger.warning("kvferry: %s", error)
        return
    # This runs in every vLLM where kvferry is installed, so it must not import `compat`, which loads much.
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    for name, module in CONNECTORS.items():
        # The module of a connector registers it, too.
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
