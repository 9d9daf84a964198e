"""A connector that zeroes the KV cache whenever a load has ended: the negative control.

If answers do not change with it, they do not depend on the KV that was moved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvferry.engines.vllm.compat.contract import KVConnectorTransferResults
from kvferry.engines.vllm.connector import KVFerryConnector


class SpoilingConnector(KVFerryConnector):
    """`KVFerryConnector` that overwrites what it has loaded, after all checks.

    It zeroes the whole cache, so the engine must serve one request at a time.
    """

    _tensors: tuple[Any, ...] = ()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._tensors = tuple(_flat(kv_caches.values()))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving:
            for tensor in self._tensors:
                tensor.zero_()
        return results


def _flat(caches: Iterable[Any]) -> Iterable[Any]:
    """Yield the tensors of all layers; a layer with recurrent state has a list of them."""
    for one in caches:
        yield from one if isinstance(one, list | tuple) else (one,)
