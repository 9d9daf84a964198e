"""vLLM's KV events: what it publishes of the blocks that an engine, or its connector, holds."""

from __future__ import annotations

from array import array
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvferry.connector.block_runs import BlockRun
from kvferry.tiers.names import Medium

_PLACES: dict[Medium, tuple[str, str]] = {
    Medium.HOST: (MEDIUM_CPU, "LOCAL"),
    Medium.DISK: (MEDIUM_STORAGE, "LOCAL"),
    Medium.NETWORK: (MEDIUM_STORAGE, "REMOTE"),
}
"""vLLM's medium and locality for each medium of a tier."""


def publishes_block_events(vllm_config: Any) -> bool:
    """Return True if the engine publishes KV events (``--kv-events-config``)."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


def describe_blocks(
    request: Any, group: int, tokens: range, block_tokens: int, hash_tokens: int
) -> BlockRun | None:
    """Return the blocks that end in a range of a request's tokens; None if vLLM has no hash of any of them.

    Args:
        request: vLLM's request.
        group: index of the KV cache group.
        tokens: range of the request's tokens.
        block_tokens: number of tokens per block of the group.
        hash_tokens: number of tokens that each of the request's block hashes covers.
    """
    hashes = resolve_block_hashes(request.block_hashes, hash_tokens, block_tokens)
    first, last = tokens.start // block_tokens, min(tokens.stop // block_tokens, len(hashes))
    if first >= last:
        return None
    lora = request.lora_request
    return BlockRun(
        group,
        tuple(hashes[first:last]),
        hashes[first - 1] if first else None,
        array("I", request.all_token_ids[first * block_tokens : last * block_tokens]),  # 4 bytes per token
        block_tokens,
        None if lora is None else (int(lora.adapter_id), str(lora.name)),
        _extra_keys(request, range(first, last), block_tokens),
    )


def _extra_keys(request: Any, blocks: range, block_tokens: int) -> tuple[tuple[object, ...] | None, ...]:
    """Return what vLLM hashes with the tokens of each block; an empty tuple if there is nothing for any."""
    keys = [
        generate_block_hash_extra_keys(request, number * block_tokens, (number + 1) * block_tokens, 0)[0]
        for number in blocks
    ]
    return tuple(to_event_extra_keys(keys) or ()) if any(keys) else ()


def stored_event(run: BlockRun, tier: str, medium: Medium, spec: Any) -> BlockStored:
    """Return vLLM's event for blocks that a tier has gained.

    Args:
        run: the blocks.
        tier: name of the tier, which becomes the event's ``ownership``.
        medium: medium of the tier.
        spec: vLLM's KVCacheSpec of the blocks' group.
    """
    name, locality = _PLACES[medium]
    lora_id, lora_name = run.adapter or (None, None)
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(one) for one in run.hashes],
        parent_block_hash=None if run.parent is None else maybe_convert_block_hash(run.parent),
        token_ids=list(run.tokens),
        block_size=run.block_tokens,
        lora_id=lora_id,
        medium=name,
        lora_name=lora_name,
        extra_keys=list(run.extra_keys) or None,
        group_idx=run.group,
        kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
        kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
        locality=locality,
        ownership=tier,
    )


def removed_event(hashes: tuple[bytes, ...], group: int, tier: str, medium: Medium) -> BlockRemoved:
    """Return vLLM's event for blocks that a tier has lost.

    Args:
        hashes: vLLM's hash of each block.
        group: index of the KV cache group.
        tier: name of the tier.
        medium: medium of the tier.
    """
    name, locality = _PLACES[medium]
    return BlockRemoved(
        block_hashes=[maybe_convert_block_hash(one) for one in hashes],
        medium=name,
        group_idx=group,
        locality=locality,
        ownership=tier,
    )
