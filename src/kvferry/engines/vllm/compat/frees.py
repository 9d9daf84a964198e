"""Deferred freeing of blocks in vLLM."""

from __future__ import annotations

from vllm.config import VllmConfig


def defer_frees(vllm_config: VllmConfig) -> None:
    """Make vLLM free blocks only after the steps that may write them; mutates the role in `vllm_config`.

    If steps overlap, a step that is still running may write to the blocks of an aborted or preempted request.
    If the blocks are freed at once, these writes may come after a load into the same blocks and destroy the
    loaded KV. vLLM waits for such steps only in engines whose role is to load KV (``kv_consumer`` or
    ``kv_both``). With kvferry, a prefill engine (``kv_producer``) loads KV too: from tiers, and from the
    engine that has decoded the earlier turns of a conversation. So this function changes the role of a
    prefill engine to ``kv_both``.

    Call this while the connector is created, because vLLM reads the role right after that.
    """
    transfer = vllm_config.kv_transfer_config
    if not transfer.is_kv_consumer:
        transfer.kv_role = "kv_both"
