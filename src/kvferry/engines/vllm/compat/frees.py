"""Deferred freeing of blocks in vLLM."""

from __future__ import annotations

from vllm.config import VllmConfig


def defer_frees(vllm_config: VllmConfig) -> None:
    """Make vLLM free blocks only after the steps that may write them; mutates the role in `vllm_config`.

    If steps overlap, a step that is still running may write to the blocks of an aborted or preempted request.
    These writes are not ordered with a load into the same blocks. vLLM waits for such steps only in engines
    whose role is to load KV. So this function changes the role of other engines to ``kv_both``. vLLM reads
    the role right after it has created the connector.

    A prefill engine with kvferry also loads KV: from tiers, and from the engine that has decoded the earlier
    turns of a conversation.
    """
    transfer = vllm_config.kv_transfer_config
    if not transfer.is_kv_consumer:
        transfer.kv_role = "kv_both"
