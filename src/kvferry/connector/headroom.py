"""Free blocks to leave for requests that hold blocks and wait, enough for the next step of any of them.

vLLM begins an asynchronous load if there are blocks for it and for the requests whose loads came before. For
windows it reserves too few: it subtracts the entries of a request's table from the most blocks that it may
hold, but entries before the window are null (`get_num_blocks_to_allocate`, where the cap applies). Requests
that wait with blocks go on in order. If the first needs more blocks than are free and nothing runs, none ever
goes on. So a load begins only if it leaves as many free blocks as any of them needs. A request that waits
alone goes on when the running ones have ended.

Models without windows are left to vLLM's own count, which is exact there.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from kvferry.connector.engine import BlockPool, CacheGroup
from kvferry.geometry import GroupKind
from kvferry.planning.select import STATE_BLOCKS, attends_to_all, first_attended


@dataclass(slots=True)
class Headroom:
    """Decides whether a load leaves enough free blocks. Only the engine's thread calls it.

    Attributes:
        groups: the engine's KV cache groups; empty if none has a window.
        step_tokens: most tokens of a request that one step computes.
        pool: the engine's block pool.
    """

    groups: Sequence[CacheGroup] = ()
    step_tokens: int = 0
    pool: BlockPool | None = None
    _needs: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, groups: Sequence[CacheGroup], step_tokens: int, pool: BlockPool) -> Headroom:
        """Make one for an engine with these groups; see the attributes."""
        if not any(group.attention_span for group in groups):
            return cls()
        return cls(groups, step_tokens, pool)

    def __len__(self) -> int:
        """Number of requests that hold blocks and wait."""
        return len(self._needs)

    def fits(self, request_id: str, total: int, tokens: int) -> bool:
        """Return whether a load can begin.

        Args:
            request_id: the request of the load.
            total: tokens that the engine has after the load.
            tokens: tokens of the request.
        """
        others = [need for name, need in self._needs.items() if name != request_id]
        if not others:
            return True
        most = max(self._need(total, tokens), *others)
        assert self.pool is not None
        return self.pool.get_num_free_blocks() - self._takes(total) >= most

    def loads(self, request_id: str, total: int, tokens: int) -> None:
        """Note that a load begins; arguments as of `fits`."""
        if self.groups:
            self._needs[request_id] = self._need(total, tokens)

    def go_on(self, requests: Container[str]) -> None:
        """Note the requests that the coming step computes tokens of."""
        for name in [name for name in self._needs if name in requests]:
            del self._needs[name]

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended or whose load has failed: it holds no blocks."""
        self._needs.pop(request_id, None)

    def _takes(self, total: int) -> int:
        """Return the blocks that a request with `total` tokens holds if it has none yet."""
        seen_from = [max(first_attended(group.kind, group.attention_span, total), 0) for group in self.groups]
        return sum(
            _between(group, first // group.block_tokens * group.block_tokens, total)
            for group, first in zip(self.groups, seen_from, strict=True)
        )

    def _need(self, total: int, tokens: int) -> int:
        """Return the blocks that its next step takes, or all later steps in groups that see all tokens."""
        step = min(tokens, min(total, tokens - 1) + self.step_tokens)
        return sum(
            _between(group, total, tokens if attends_to_all(group.kind) else step) for group in self.groups
        )


def _between(group: CacheGroup, local_tokens: int, tokens: int) -> int:
    """Return the blocks that a group adds between two numbers of tokens."""
    if group.kind is GroupKind.STATE:
        return STATE_BLOCKS
    return max(-(-tokens // group.block_tokens) - -(-local_tokens // group.block_tokens), 0)
