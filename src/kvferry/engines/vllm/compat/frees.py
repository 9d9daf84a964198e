"""When vLLM gives blocks back."""

from __future__ import annotations

from vllm.config import VllmConfig


def defer_frees(vllm_config: VllmConfig) -> None:
    """Let vLLM give blocks back only when no step in flight writes them; mutates the role in `vllm_config`.

    With overlapping steps an aborted or preempted request's blocks may still be written, unordered with a
    load that is given them. vLLM waits for that in engines whose role is to load, and reads the role right
    after it has made the connector. A prefill engine of ours loads as well: from tiers, and earlier turns
    from the engine that decoded them.
    """
    transfer = vllm_config.kv_transfer_config
    if not transfer.is_kv_consumer:
        transfer.kv_role = "kv_both"
