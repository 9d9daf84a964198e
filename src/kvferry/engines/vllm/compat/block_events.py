"""vLLM's KV events: what it publishes of the blocks that an engine, or its connector, holds."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvferry.connector.engine import BlockRun, Request
from kvferry.connector.events import BlocksRemoved, BlocksStored, Event
from kvferry.engines.vllm.compat.requests import VLLMRequest
from kvferry.tiers.names import Medium
from kvferry.tiers.registry import medium_of

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


class BlockEventPublisher:
    """Listener that turns events about blocks in tiers into vLLM's KV events, until vLLM takes them."""

    def __init__(self, groups: Sequence[Any]) -> None:
        """Create a publisher without events. `groups` are those of `scheduled_groups`."""
        self._specs = [group.kv_cache_spec for group in groups]
        self._events: list[Any] = []

    def __call__(self, event: Event) -> None:
        """Convert an event about blocks, and ignore any other event."""
        if isinstance(event, BlocksStored):
            self._events.append(_stored(event, self._specs[event.blocks.group]))
        elif isinstance(event, BlocksRemoved):
            self._events.append(_removed(event))

    def take(self) -> list[Any]:
        """Return vLLM's events since the last call, and clear them."""
        taken, self._events = self._events, []
        return taken

    def describe(self, request: Request, group: int, tokens: range) -> BlockRun | None:
        """Return the engine's blocks of a group that end in a range of a request's tokens; None for none."""
        assert isinstance(request, VLLMRequest)
        raw, hash_tokens = request.raw, request.hash_block_tokens
        block_tokens = int(self._specs[group].block_size)
        if not hash_tokens or block_tokens % hash_tokens:
            return None
        hashes = resolve_block_hashes(raw.block_hashes, hash_tokens, block_tokens)
        first, last = tokens.start // block_tokens, min(tokens.stop // block_tokens, len(hashes))
        if first >= last:
            return None
        lora = raw.lora_request
        return BlockRun(
            group,
            tuple(hashes[first:last]),
            hashes[first - 1] if first else None,
            array("I", raw.all_token_ids[first * block_tokens : last * block_tokens]),  # 4 bytes per token
            block_tokens,
            None if lora is None else (int(lora.adapter_id), str(lora.name)),
            _extra_keys(raw, range(first, last), block_tokens),
        )


def _extra_keys(request: Any, blocks: range, block_tokens: int) -> tuple[tuple[object, ...] | None, ...]:
    """Return what vLLM hashes with the tokens of each block; an empty tuple if there is nothing for any."""
    keys = [
        generate_block_hash_extra_keys(request, number * block_tokens, (number + 1) * block_tokens, 0)[0]
        for number in blocks
    ]
    return tuple(to_event_extra_keys(keys) or ()) if any(keys) else ()


def _stored(event: BlocksStored, spec: Any) -> BlockStored:
    run = event.blocks
    name, locality = _PLACES[medium_of(event.tier)]
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
        # Routers tell the tiers of an engine apart by it: several may have the same medium.
        ownership=event.tier,
    )


def _removed(event: BlocksRemoved) -> BlockRemoved:
    name, locality = _PLACES[medium_of(event.tier)]
    return BlockRemoved(
        block_hashes=[maybe_convert_block_hash(one) for one in event.hashes],
        medium=name,
        group_idx=event.group,
        locality=locality,
        ownership=event.tier,
    )
