"""The number of blocks that requests wait for, and the choice of leases to end for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvferry.connector.engine import CacheGroup, Request
from kvferry.planning.select import attends_to_all


class BlocksWanted:
    """Computes how many KV blocks the largest waiting request needs. Only the engine's thread calls it."""

    def __init__(self, groups: Sequence[CacheGroup], tokens_in_flight: int) -> None:
        """Create the record of the engine's requests. It has no requests yet.

        Args:
            groups: the engine's KV cache groups.
            tokens_in_flight: maximum number of tokens of one request that are scheduled but not yet computed.
        """
        self._groups, self._tokens_in_flight = tuple(groups), tokens_in_flight
        self._requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Add a new request. `blocks` considers it while it waits for blocks (`Request.needs_blocks`)."""
        self._requests[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._requests.pop(request.request_id, None)

    def blocks(self) -> int:
        """Return the number of KV blocks that the largest waiting request needs; 0 if none waits for blocks.

        The engine allocates all blocks of a request at once. If fewer blocks are free, the request keeps
        waiting.
        """
        waiting = (one.num_tokens for one in self._requests.values() if one.needs_blocks)
        tokens = max(waiting, default=0)
        return sum(self._of_group(group, tokens) for group in self._groups) if tokens else 0

    def _of_group(self, group: CacheGroup, tokens: int) -> int:
        if not attends_to_all(group.kind):
            tokens = min(tokens, group.attention_span + self._tokens_in_flight + group.block_tokens)
        return 1 + -(-tokens // group.block_tokens)


def choose_leases_to_end(held: Mapping[str, int], lacking: int) -> list[str]:
    """Choose leases (blocks kept for other engines) to end, so that at least `lacking` blocks become free.

    The leases are taken in their order, even if a later lease alone would be enough ("b" in this example):

    >>> choose_leases_to_end({"a": 2, "b": 3, "c": 1}, 3), choose_leases_to_end({"a": 2}, 0)
    (['a', 'b'], [])

    Args:
        held: number of blocks that each lease holds, by lease name; the lease to end first comes first.
        lacking: number of blocks to free.

    Returns:
        Names of the first leases that together hold enough blocks; all names if there are too few blocks.
    """
    found = []
    for name, blocks in held.items():
        if lacking <= 0:
            break
        found.append(name)
        lacking -= blocks
    return found
