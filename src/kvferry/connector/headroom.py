"""Check that a load leaves enough free blocks for the requests that wait with blocks allocated.

vLLM begins an asynchronous load if there are enough blocks for it and for the requests whose loads began
before. For sliding windows it reserves too few blocks: it subtracts the length of a request's block table
from the maximum number of blocks that the request may hold, but table entries before the window are null
blocks (`get_num_blocks_to_allocate`, where the cap applies). Requests that hold blocks resume in order. If
the first one needs more blocks than are free and no request runs, none of them ever resumes. So a load begins
only if it leaves as many free blocks as the next step of any of them needs. A single waiting request resumes
when the running ones have ended.

For models without windows vLLM's own count is exact, so this module checks nothing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from kvferry.connector.engine import BlockPool, CacheGroup
from kvferry.geometry import GroupKind
from kvferry.planning.select import STATE_BLOCKS, attends_to_all, first_attended


@dataclass(slots=True)
class Headroom:
    """Decides whether a load may start: only if enough blocks stay free for requests that wait for loads.

    A request that waits for its load holds only the blocks that the load fills. To continue, it needs more
    blocks. vLLM keeps some blocks free for this, but too few if a KV cache group has an attention window.
    Without such a group, this class accepts every load. Only the engine's thread calls it.

    Attributes:
        groups: the engine's KV cache groups; empty if no group has an attention window.
        step_tokens: maximum number of tokens of one request that a step computes.
        pool: the engine's block pool; None if no group has an attention window.
    """

    groups: Sequence[CacheGroup] = ()
    step_tokens: int = 0
    pool: BlockPool | None = None
    _needs: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, groups: Sequence[CacheGroup], step_tokens: int, pool: BlockPool) -> Headroom:
        """Return a headroom check for an engine. It accepts every load if no group has an attention window.

        Args:
            groups: the engine's KV cache groups.
            step_tokens: maximum number of tokens of one request that a step computes.
            pool: the engine's block pool.
        """
        if not any(group.attention_span for group in groups):
            return cls()
        return cls(groups, step_tokens, pool)

    def __len__(self) -> int:
        """Return the number of requests that hold blocks for a load and have not been scheduled since."""
        return len(self._needs)

    def fits(self, request_id: str, tokens_after_load: int, tokens: int) -> bool:
        """Return whether a new load leaves enough free blocks for any one waiting request to continue.

        The waiting requests are those that wait for a load, including the request of the new load. Return
        True if no other request waits for a load.

        Args:
            request_id: id of the load's request.
            tokens_after_load: number of the request's tokens whose KV the engine has after the load.
            tokens: number of all tokens of the request, with or without KV.
        """
        others = [need for name, need in self._needs.items() if name != request_id]
        if not others:
            return True
        most = max(self._blocks_to_resume(tokens_after_load, tokens), *others)
        assert self.pool is not None
        return self.pool.get_num_free_blocks() - self._blocks_to_allocate(tokens_after_load) >= most

    def on_load_begun(self, request_id: str, tokens_after_load: int, tokens: int) -> None:
        """Record that a load has begun, so that `fits` keeps blocks free for the load's request.

        Args:
            request_id: id of the load's request.
            tokens_after_load: number of the request's tokens whose KV the engine has after the load.
            tokens: number of all tokens of the request, with or without KV.
        """
        if self.groups:
            self._needs[request_id] = self._blocks_to_resume(tokens_after_load, tokens)

    def on_resumed(self, requests: Container[str]) -> None:
        """Stop keeping blocks free for requests that the engine has scheduled again after their loads.

        Args:
            requests: ids of all requests whose tokens the coming step computes.
        """
        for name in [name for name in self._needs if name in requests]:
            del self._needs[name]

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, or whose load has failed. The request holds no blocks any more."""
        self._needs.pop(request_id, None)

    def _blocks_to_allocate(self, tokens_after_load: int) -> int:
        """Return the number of blocks that the pool allocates for a load if the request has no blocks yet.

        Blocks before the attention window of the next token are not allocated.

        Args:
            tokens_after_load: number of the request's tokens whose KV the engine has after the load.
        """
        seen_from = [max(first_attended(group, tokens_after_load), 0) for group in self.groups]
        return sum(
            _additional_blocks(group, first // group.block_tokens * group.block_tokens, tokens_after_load)
            for group, first in zip(self.groups, seen_from, strict=True)
        )

    def _blocks_to_resume(self, tokens_after_load: int, tokens: int) -> int:
        """Return the number of additional blocks that a request needs to continue after its load.

        These are the blocks of its next step. For groups that attend to all tokens, they also include the
        blocks of all later steps of the prompt.

        Args:
            tokens_after_load: number of the request's tokens whose KV the engine has after the load.
            tokens: number of all tokens of the request, with or without KV.
        """
        step = min(tokens, min(tokens_after_load, tokens - 1) + self.step_tokens)
        return sum(
            _additional_blocks(group, tokens_after_load, tokens if attends_to_all(group.kind) else step)
            for group in self.groups
        )


def _additional_blocks(group: CacheGroup, local_tokens: int, tokens: int) -> int:
    """Return how many more blocks a group needs for `tokens` tokens than for `local_tokens` tokens.

    For a group of recurrent state, return `STATE_BLOCKS`, because its blocks do not depend on the tokens.
    """
    if group.kind is GroupKind.STATE:
        return STATE_BLOCKS
    return max(-(-tokens // group.block_tokens) - -(-local_tokens // group.block_tokens), 0)
