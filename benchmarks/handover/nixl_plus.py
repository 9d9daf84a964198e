"""Give vLLM's NixlConnector two advantages that kvferry has: the peer ``nixl+`` of `benchmarks handover`."""

from __future__ import annotations

from typing import Any

from kvferry.geometry import Region
from kvferry.memory.pages import HugePageCollapser


def favour_nixl() -> None:
    """Give NixlConnector in this process a progress thread that sleeps, and huge pages for its KV cache."""
    from nixl import _api  # noqa: PLC0415 - heavy, and may be missing
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (  # noqa: PLC0415
        NixlBaseConnector,
    )

    from kvferry.transport.agent import sleeping_bindings  # noqa: PLC0415

    names = _api.nixl_agent.__init__.__globals__
    names["nixlBind"] = sleeping_bindings(names["nixlBind"])
    register = NixlBaseConnector.register_kv_caches

    def register_kv_caches(self: Any, caches: dict[str, Any]) -> Any:
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in caches.values()}
        HugePageCollapser([Region(address, one.nbytes()) for address, one in storages.items()]).wait()
        return register(self, caches)

    NixlBaseConnector.register_kv_caches = register_kv_caches
