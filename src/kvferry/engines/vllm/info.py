"""Description of a vLLM engine and its KV cache groups for the connector's scheduler half."""

from __future__ import annotations

from typing import Any

from kvferry.connector.engine import CacheGroup, EngineFacts
from kvferry.engines.vllm.compat.models import reads_ahead
from kvferry.engines.vllm.compat.request_ids import parent_of
from kvferry.engines.vllm.compat.specs import (
    attention_span_of,
    has_rings,
    reuses_prompts_only,
    snapshot_tokens,
    state_block_tokens,
    writes_before_hooks,
)
from kvferry.engines.vllm.geometry import kind_of_group


def engine_info(vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
    """Collect what the connector's scheduler half must know about the engine: groups, limits and features.

    Raises:
        ConfigError: kvferry cannot move one of the engine's KV cache groups.
    """
    return EngineFacts(
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
        groups=tuple(map(cache_group, kv_cache_config.kv_cache_groups)),
        num_blocks=int(kv_cache_config.num_blocks),
        longest_request=int(vllm_config.model_config.max_model_len),
        steps_in_flight=int(vllm_config.max_concurrent_batches),
        tokens_in_flight=int(vllm_config.max_in_flight_tokens),
        step_tokens=step_tokens(vllm_config),
        draft_lookahead=reads_ahead(vllm_config),
        speculates=vllm_config.speculative_config is not None,
        reuses_prompts_only=reuses_prompts_only(kv_cache_config),
        has_rings=has_rings(kv_cache_config),
        writes_before_hooks=writes_before_hooks(vllm_config, kv_cache_config),
        # Data-parallel engines of a mixture of experts compute each step together.
        lockstep=vllm_config.parallel_config.data_parallel_size > 1,
        port_offset=int(vllm_config.parallel_config.data_parallel_index),
        parent_of=parent_of,
    )


def step_tokens(vllm_config: Any) -> int:
    """Return the maximum number of tokens that one step computes for one request, including draft tokens."""
    batched = vllm_config.scheduler_config.max_num_batched_tokens
    return int(batched + vllm_config.num_speculative_tokens)


def cache_group(group: Any) -> CacheGroup:
    """Describe a KV cache group for the connector's scheduler half, from vLLM's KVCacheGroupSpec.

    Raises:
        ConfigError: kvferry cannot move the group. The message names one of its layers.
    """
    spec = group.kv_cache_spec
    return CacheGroup(
        kind=kind_of_group(group),
        attention_span=attention_span_of(spec),
        block_tokens=int(spec.block_size),
        state_block_tokens=state_block_tokens(spec),
        snapshot_tokens=snapshot_tokens(spec),
    )
