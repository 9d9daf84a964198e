"""vLLM's hooks on a worker, forwarded to all children."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvferry.common.errors import ConfigError
from kvferry.engines.vllm.compat.connectors import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    as_current_config,
)
from kvferry.engines.vllm.multi.children import Child
from kvferry.engines.vllm.multi.completions import Completions
from kvferry.engines.vllm.multi.stats import MultiEvents, MultiHandshake, MultiMeta, MultiWorkerMeta


class WorkerHooks(KVConnectorBase_V1):
    """Base class of `FerryMultiConnector` with the connector methods that vLLM calls on a worker."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any, children: Sequence[Child]
    ) -> None:
        """Create the children, in the scheduler's process and on each worker."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._child_specs, self._names = tuple(children), tuple(child.name for child in children)
        self._connectors = [child.cls(child.config, role, kv_cache_config) for child in children]
        self._completions = Completions()

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        found = [(name, child.get_mem_pool_context()) for name, child in self._children()]
        with_pool = [(name, context) for name, context in found if context is not None]
        if len(with_pool) > 1:
            raise ConfigError(
                f"{' and '.join(name for name, _ in with_pool)} each want a memory pool of their own for the "
                "KV cache, which is in one; configure it for one of them"
            )
        return with_pool[0][1] if with_pool else None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        for connector, child in zip(self._connectors, self._child_specs, strict=True):
            # A child reads its own settings in the current configuration.
            with as_current_config(child.config):
                connector.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        for child in self._connectors:
            child.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        for child in self._connectors:
            child.restore_kv_caches()

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        for child in self._connectors:
            child.set_host_xfer_buffer_ops(copy_operation)

    def get_handshake_metadata(self) -> MultiHandshake | None:
        cards = tuple(child.get_handshake_metadata() for child in self._connectors)
        return None if all(card is None for card in cards) else MultiHandshake(cards)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        assert isinstance(connector_metadata, MultiMeta)
        super().bind_connector_metadata(connector_metadata)
        # Before the children run: they may report a load in the step that starts it.
        self._completions.expect(connector_metadata.loads, connector_metadata.holders)
        self._completions.give_up(connector_metadata.given_up)
        for child, meta in zip(self._connectors, connector_metadata.children, strict=True):
            child.bind_connector_metadata(meta)

    def clear_connector_metadata(self) -> None:
        for child in self._connectors:
            child.clear_connector_metadata()
        super().clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        for child, meta in zip(self._connectors, kv_connector_metadata.children, strict=True):
            child.handle_preemptions(meta)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for child in self._connectors:
            child.start_load_kv(forward_context, **kwargs)

    def finish_forward(self) -> None:
        for child in self._connectors:
            child.finish_forward()

    def reset_capture_state(self) -> None:
        for child in self._connectors:
            child.reset_capture_state()

    def wait_for_layer_load(self, layer_name: str) -> None:
        for child in self._connectors:
            child.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        for child in self._connectors:
            child.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        for child in self._connectors:
            child.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._completions.join(
            [child.get_transfer_results(finished_req_ids) for child in self._connectors]
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        found = set[int]().union(*(child.get_block_ids_with_load_errors() for child in self._connectors))
        # A child's errors about blocks of late loads concern no request.
        return found - self._completions.late_blocks

    def get_kv_connector_kv_cache_events(self) -> MultiEvents | None:
        events = tuple(child.get_kv_connector_kv_cache_events() for child in self._connectors)
        return None if all(of is None for of in events) else MultiEvents(events)

    def build_connector_worker_meta(self) -> MultiWorkerMeta | None:
        metas = tuple(child.build_connector_worker_meta() for child in self._connectors)
        ended = self._completions.take_ended()
        return MultiWorkerMeta(metas, ended) if ended or any(meta is not None for meta in metas) else None

    def _children(self) -> Iterable[tuple[str, Any]]:
        return zip(self._names, self._connectors, strict=True)
