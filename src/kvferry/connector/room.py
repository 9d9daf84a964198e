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

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.common.units import counted
from kvferry.connector.engine import BlockPool, CacheGroup, PrefixCache, Request
from kvferry.connector.events import MissReason
from kvferry.connector.load import saves_computation
from kvferry.geometry import GroupKind
from kvferry.planning.select import STATE_BLOCKS, attends_to_all, first_attended


@dataclass(slots=True)
class Headroom:
    """Decides whether a load may start: only if enough blocks stay free for requests that wait for loads.

    Without a group that has an attention window it accepts every load.

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
        if not any(group.attention_span for group in groups):
            return cls()
        return cls(groups, step_tokens, pool)

    def __len__(self) -> int:
        """Return the number of requests that hold blocks for a load and have not been scheduled since."""
        return len(self._needs)

    def fits(self, request_id: str, tokens_after_load: int, tokens: int) -> bool:
        """Return whether a load leaves enough free blocks for any one waiting request, its own included.

        Args:
            tokens_after_load: number of the request's tokens whose KV the engine has after the load.
            tokens: number of all tokens of the request.
        """
        others = [need for name, need in self._needs.items() if name != request_id]
        if not others:
            return True
        most = max(self._blocks_to_resume(tokens_after_load, tokens), *others)
        assert self.pool is not None
        return self.pool.get_num_free_blocks() - self._blocks_to_allocate(tokens_after_load) >= most

    def on_load_begun(self, request_id: str, tokens_after_load: int, tokens: int) -> None:
        """Keep blocks free for the request of a load that has begun. The arguments are those of `fits`."""
        if self.groups:
            self._needs[request_id] = self._blocks_to_resume(tokens_after_load, tokens)

    def on_resumed(self, requests: Container[str]) -> None:
        """Stop keeping blocks free for requests that the engine has scheduled again after their loads."""
        for name in [name for name in self._needs if name in requests]:
            del self._needs[name]

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, or whose load has failed. The request holds no blocks any more."""
        self._needs.pop(request_id, None)

    def _blocks_to_allocate(self, tokens_after_load: int) -> int:
        """Return the number of blocks that the pool allocates for a load of a request without blocks."""
        seen_from = [max(first_attended(group, tokens_after_load), 0) for group in self.groups]
        return sum(
            _additional_blocks(group, first // group.block_tokens * group.block_tokens, tokens_after_load)
            for group, first in zip(self.groups, seen_from, strict=True)
        )

    def _blocks_to_resume(self, tokens_after_load: int, tokens: int) -> int:
        """Return the number of additional blocks that a request needs to continue after its load.

        These are the blocks of its next step. For groups that attend to all tokens, they also include the
        blocks of all later steps of the prompt.
        """
        step = min(tokens, min(tokens_after_load, tokens - 1) + self.step_tokens)
        return sum(
            _additional_blocks(group, tokens_after_load, tokens if attends_to_all(group.kind) else step)
            for group in self.groups
        )


def _additional_blocks(group: CacheGroup, local_tokens: int, tokens: int) -> int:
    """Return how many more blocks a group needs for `tokens` tokens than for `local_tokens` tokens."""
    if group.kind is GroupKind.STATE:
        return STATE_BLOCKS
    return max(-(-tokens // group.block_tokens) - -(-local_tokens // group.block_tokens), 0)


@dataclass(frozen=True, slots=True)
class LocalPrefix:
    """The part of a request's prompt that is in the engine's own prefix cache.

    Attributes:
        tokens: number of tokens whose attention blocks the engine has.
        resumable_tokens: number of tokens after which the engine can continue without a load; at most
            `tokens`.
    """

    tokens: int
    resumable_tokens: int

    @classmethod
    def of(cls, cache: PrefixCache | None, request: Request, tokens: int) -> LocalPrefix:
        """Look up the part of a request that is in the engine's own prefix cache.

        Args:
            cache: None if the engine can always continue after `tokens` tokens.
            tokens: number of the request's tokens whose attention blocks the engine has.
        """
        if cache is None or not tokens:
            return cls(tokens, tokens)
        return cls(tokens, min(tokens, cache.resumable_tokens(request)))

    @property
    def needs_load(self) -> bool:
        """Whether the engine can use all of its attention blocks only after a load."""
        return self.resumable_tokens < self.tokens


def last_boundary_before(end: int, alignment_tokens: int) -> int:
    """Return the position of the last block boundary before the last token of a prefix.

    A prefix cache that finds this many tokens leaves at least one token to a load that ends at `end`.

    Args:
        end: length of the prefix in tokens, at least 1.

    >>> last_boundary_before(512, 128), last_boundary_before(500, 128), last_boundary_before(513, 128)
    (384, 384, 512)
    """
    return (end - 1) // alignment_tokens * alignment_tokens


def must_compute(request: Request, local_tokens: int) -> tuple[MissReason, str] | None:
    """Return why the engine must compute a request, with an explanation for people; None if it may load KV.

    Args:
        local_tokens: number of tokens of the request in the engine's own prefix cache.
    """
    if (why := request.cache_refusal) is not None:
        return MissReason.SKIPPED, f"{why}, so the engine computes the whole prompt"
    if saves_computation(request.num_tokens - local_tokens):
        return None
    if local_tokens:
        return (
            MissReason.LOCAL,
            f"{local_tokens} of {counted(request.num_tokens, 'token')} here, and the last is always computed",
        )
    return MissReason.SHORT_PROMPT, "its only token is always computed"


class BlocksWanted:
    """Computes how many KV blocks the largest waiting request needs."""

    def __init__(self, groups: Sequence[CacheGroup], tokens_in_flight: int) -> None:
        """Begin without requests.

        Args:
            tokens_in_flight: maximum number of tokens of one request that are scheduled but not yet computed.
        """
        self._groups, self._tokens_in_flight = tuple(groups), tokens_in_flight
        self._requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def remove(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)

    def blocks(self) -> int:
        """Return the number of blocks that the largest waiting request needs; 0 if none waits for blocks."""
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
