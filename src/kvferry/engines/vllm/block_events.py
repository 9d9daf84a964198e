"""The exit of the event stream to vLLM's publisher of KV events."""

from __future__ import annotations

from typing import Any

from kvferry.connector.block_runs import BlockRun
from kvferry.connector.engine import Request
from kvferry.connector.events import BlocksRemoved, BlocksStored, Event
from kvferry.engines.vllm.compat.block_events import describe_blocks, removed_event, stored_event
from kvferry.engines.vllm.compat.requests import VLLMRequest
from kvferry.tiers.registry import medium_of


class BlockEventPublisher:
    """Listener that turns events about blocks in tiers into vLLM's KV events, until vLLM takes them.

    Args:
        kv_cache_config: vLLM's configuration of the KV cache.
    """

    def __init__(self, kv_cache_config: Any) -> None:
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._events: list[Any] = []

    def __call__(self, event: Event) -> None:
        """Convert an event about blocks, and ignore any other event."""
        if isinstance(event, BlocksStored):
            spec = self._specs[event.blocks.group]
            self._events.append(stored_event(event.blocks, event.tier, medium_of(event.tier), spec))
        elif isinstance(event, BlocksRemoved):
            self._events.append(removed_event(event.hashes, event.group, event.tier, medium_of(event.tier)))

    def take(self) -> list[Any]:
        """Return vLLM's events since the last call, and clear them."""
        taken, self._events = self._events, []
        return taken

    def describe(self, request: Request, group: int, tokens: range) -> BlockRun | None:
        """Return the engine's blocks that end in a range of a request's tokens.

        Return None if there is none, or if vLLM has no hashes, because prefix caching is off.

        Args:
            request: a request that `VLLMRequests` has wrapped.
            group: index of the KV cache group.
            tokens: range of the request's tokens.
        """
        assert isinstance(request, VLLMRequest)
        block_tokens = int(self._specs[group].block_size)
        if not request.hash_block_tokens or block_tokens % request.hash_block_tokens:
            return None
        return describe_blocks(request.raw, group, tokens, block_tokens, request.hash_block_tokens)
