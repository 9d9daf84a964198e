"""Give vLLM's NixlConnector three advantages of kvferry: the peer ``nixl+`` of `benchmarks handover`."""

from __future__ import annotations

from functools import wraps
from typing import Any

from kvferry.geometry import Region
from kvferry.memory.pages import HugePageCollapser


def favour_nixl() -> None:
    """Favour NixlConnector in this process.

    Its progress thread sleeps while idle, its KV cache has huge pages, and on a CPU the engine sleeps between
    two checks of its message queues.
    """
    from nixl import _api  # noqa: PLC0415 - heavy, and may be missing
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (  # noqa: PLC0415
        NixlBaseConnector,
    )

    from kvferry.engines.vllm.compat.process import sleep_between_polls  # noqa: PLC0415
    from kvferry.transport.agent import sleeping_bindings  # noqa: PLC0415

    names = _api.nixl_agent.__init__.__globals__
    names["nixlBind"] = sleeping_bindings(names["nixlBind"])
    start, register = NixlBaseConnector.__init__, NixlBaseConnector.register_kv_caches

    @wraps(start)
    def __init__(self: Any, vllm_config: Any, *rest: Any, **named: Any) -> None:  # noqa: N807 - replaces one
        sleep_between_polls(vllm_config)
        start(self, vllm_config, *rest, **named)

    def register_kv_caches(self: Any, caches: dict[str, Any]) -> Any:
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in caches.values()}
        HugePageCollapser([Region(address, one.nbytes()) for address, one in storages.items()]).wait()
        return register(self, caches)

    NixlBaseConnector.__init__ = __init__
    NixlBaseConnector.register_kv_caches = register_kv_caches
