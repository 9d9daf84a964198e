"""Deferred freeing of blocks in vLLM."""

from __future__ import annotations

from vllm.config import VllmConfig


def defer_frees(vllm_config: VllmConfig) -> None:
    """Make vLLM free a block only after all steps that may write to it; mutates the role in `vllm_config`.

    With overlapping steps (asynchronous scheduling), a running step may still write to the blocks of an
    aborted or preempted request. If vLLM freed these blocks at once and other KV were loaded into them, the
    step could overwrite the loaded KV. vLLM waits for the step only if the role of the engine includes loads
    (``kv_consumer`` or ``kv_both``). With kvferry, prefill engines (``kv_producer``) also load KV, from tiers
    or from decode engines. So this function changes the role ``kv_producer`` to ``kv_both``.

    Call this while the connector is created, because vLLM reads the role right after that.
    """
    transfer = vllm_config.kv_transfer_config
    if not transfer.is_kv_consumer:
        transfer.kv_role = "kv_both"
