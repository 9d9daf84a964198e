"""Deferred freeing of blocks in vLLM."""

from __future__ import annotations

from vllm.config import VllmConfig


def defer_frees(vllm_config: VllmConfig) -> None:
    """Make vLLM free blocks only after the steps that may write them; mutates the role in `vllm_config`.

    With overlapping steps, a step in flight may still write the blocks of an aborted or preempted request.
    Nothing orders these writes with a load into the same blocks. vLLM waits for such steps only in engines
    whose role is to load, and reads the role right after it has created the connector. But a prefill engine
    with kvferry loads as well: from tiers, and earlier turns of a conversation from the engine that decoded
    them.
    """
    transfer = vllm_config.kv_transfer_config
    if not transfer.is_kv_consumer:
        transfer.kv_role = "kv_both"
