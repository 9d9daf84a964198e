"""The blocks that requests wait for, and the leases that give way to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.engines.vllm.compat.requests import waits_for_blocks
from kvferry.engines.vllm.compat.specs import attention_span_of
from kvferry.geometry import GroupKind
from kvferry.planning.select import attends_to_all


class BlocksWanted:
    """Counts the blocks that requests of an engine wait for. Only the engine's thread calls it."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, kinds: Sequence[GroupKind]) -> None:
        """No request has come in yet.

        Args:
            vllm_config, kv_cache_config: vLLM's.
            kinds: the kind of each of its groups.
        """
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._groups = list(zip(kinds, specs, strict=True))
        self._ahead = int(vllm_config.max_in_flight_tokens)
        self._requests: dict[str, Any] = {}

    def came(self, request: Any) -> None:
        """Note a request that came in and will need blocks."""
        self._requests[request.request_id] = request

    def gone(self, request: Any) -> None:
        """Forget a request that has ended."""
        self._requests.pop(request.request_id, None)

    def blocks(self) -> int:
        """Return the blocks of the largest request that has none.

        It gets all of them at once, or goes on waiting.
        """
        waiting = (one.num_tokens for one in self._requests.values() if waits_for_blocks(one))
        tokens = max(waiting, default=0)
        return sum(self._of_group(kind, spec, tokens) for kind, spec in self._groups) if tokens else 0

    def _of_group(self, kind: GroupKind, spec: Any, tokens: int) -> int:
        if not attends_to_all(kind):
            tokens = min(tokens, attention_span_of(spec) + self._ahead + spec.block_size)
        return 1 + -(-tokens // int(spec.block_size))


def first_to_go(held: Mapping[str, int], lacking: int) -> list[str]:
    """Return the first leases that together hold as many blocks as are lacking.

    >>> first_to_go({"a": 2, "b": 3, "c": 1}, 3), first_to_go({"a": 2}, 0)
    (['a', 'b'], [])

    Args:
        held: blocks of each lease, in the order in which they are to go.
        lacking: blocks.
    """
    found = []
    for name, blocks in held.items():
        if lacking <= 0:
            break
        found.append(name)
        lacking -= blocks
    return found
