"""A connector for vLLM that does nothing. The time of its hooks is vLLM's own cost of calling a connector."""

from __future__ import annotations

from typing import Any

from kvferry.engines.vllm.compat.connectors import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


class EmptyConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector without a source of KV."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return that there is nothing to load."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return an empty message."""
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Return that the blocks may be freed."""
        return False, None
