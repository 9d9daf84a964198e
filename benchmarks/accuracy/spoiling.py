"""Connectors that zero the KV that they have loaded: the negative controls.

If answers do not change with them, they do not depend on the KV that was moved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvferry.connector.messages import Load
from kvferry.engines.vllm.compat.connectors import KVConnectorTransferResults
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.messages import WorkerCard
from kvferry.geometry import GroupKind, RankGeometry
from kvferry.planning.select import blocks_needed


class SpoilingConnector(KVFerryConnector):
    """`KVFerryConnector` that zeroes the blocks of every load, after all checks.

    Attributes:
        kinds: kinds of KV cache groups to zero.
    """

    kinds: frozenset[GroupKind] = frozenset(GroupKind)
    _geometry: RankGeometry

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._tensors = {name: list(_flat(cache)) for name, cache in kv_caches.items()}
        self._loads: dict[str, Load] = {}

    def get_handshake_metadata(self) -> WorkerCard | None:
        if (card := super().get_handshake_metadata()) is not None:
            self._geometry = card.info.geometry
        return card

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self._loads |= {load.request_id: load for load in self._step_meta().orders.loads}

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving or ():
            self._zero(self._loads.pop(request_id))
        return results

    def _zero(self, load: Load) -> None:
        for group, table in zip(self._geometry.groups, load.tables, strict=True):
            if group.kind not in self.kinds:
                continue
            ids = blocks_needed(group, load.span, table)
            for tensor in (one for layer in group.layers for one in self._tensors[layer.name]):
                # An attention kernel may split a block into several.
                parts = tensor.shape[0] // self._geometry.num_blocks
                for block in ids.tolist():
                    tensor[block * parts : (block + 1) * parts] = 0


class WindowSpoilingConnector(SpoilingConnector):
    """`SpoilingConnector` for sliding windows alone."""

    kinds = frozenset({GroupKind.SLIDING})


class StateSpoilingConnector(SpoilingConnector):
    """`SpoilingConnector` for recurrent states and convolutions alone."""

    kinds = frozenset({GroupKind.STATE})


class FullSpoilingConnector(SpoilingConnector):
    """`SpoilingConnector` for full attention alone."""

    kinds = frozenset({GroupKind.FULL, GroupKind.MLA})


def _flat(cache: Any) -> Iterable[Any]:
    """Yield the tensors of a layer; a layer with recurrent state has a list of them."""
    yield from cache if isinstance(cache, list | tuple) else (cache,)
