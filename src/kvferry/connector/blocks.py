"""The engine's KV cache blocks: those that transfers pin, those to keep free, and those filled only in part.

`TransferBook`: a transfer is a load or a store. Every block that it may read or write is pinned: the block
stays allocated until nothing of the transfer is in flight on any worker, even if its request ends before.

    begin ──every worker has reported──▶ reported ──nothing in flight on any──▶ over
      └───────request goes on or ends without it: late──────────────▲

The blocks of late loads are counted per source and bounded. Any load in flight may become late, so a load
begins only if all loads together, in flight and late, stay below the bound (`may_hold`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set as AbstractSet, Sized
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvferry.connector.engine import Block, BlockIds, BlockPool, CacheGroup, Request
from kvferry.geometry import Group, GroupKind
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import (
    NULL_BLOCK,
    STATE_BLOCKS,
    LoadSpan,
    attends_to_all,
    first_attended,
    first_independent,
    partial_block,
)
from kvferry.transport.read_plan import Report


def may_hold(source: str, blocks: int, held: Mapping[str, int], most: int) -> bool:
    """Return whether a load from a source may begin, given the blocks that all loads may still write.

    All sources together may hold at most `most` blocks. Each source may hold at most half of the blocks that
    the others leave, so sources that hang always leave room for another source. While no other load holds
    blocks, a load may be of any size, so that long prompts can be loaded too.

    >>> may_hold("a", 8, {}, 8)  # no other load holds blocks
    True
    >>> may_hold("a", 4, {"a": 1}, 8)  # 1 + 4 blocks are more than half of 8
    False
    >>> may_hold("b", 2, {"a": 4}, 8)  # "a" leaves 4 blocks, and 2 are half of them
    True

    Args:
        held: number of blocks that loads hold, by source, with those of late loads.
    """
    others = sum(held.values()) - held.get(source, 0)
    alone = not any(held.values())
    return alone or held.get(source, 0) + blocks <= (most - others) // 2


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    """A load or a store under way. Mutable."""

    key: str  # unique name
    holder: str  # who answers for the blocks: for a load, the peer's name or ``tiers``
    blocks: Sequence[Block]  # blocks that it may read or write
    report: Report | None = None  # merged report of the workers that have reported; None before the first
    late: bool = False  # True after `TransferBook.mark_late`
    landed: int = 0  # number of workers on which nothing of it is in flight any more


TransferT = TypeVar("TransferT", bound=Transfer)


class TransferBook(Generic[TransferT]):
    """The transfers of one kind that are not over. Only the engine's thread calls it.

    Attributes:
        pinned: number of blocks that they pin, counted for each transfer.
    """

    def __init__(self, workers: int, pool: BlockPool) -> None:
        self._workers, self._pool = workers, pool
        self._transfers: dict[str, TransferT] = {}
        # Counted, because a step may order many stores while hundreds are under way.
        self.pinned = 0
        self._held: Counter[str] = Counter()  # pinned blocks by holder
        self._late: Counter[str] = Counter()  # those of late transfers

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[TransferT]:
        return iter(self._transfers.values())

    def __contains__(self, key: str) -> bool:
        return key in self._transfers

    def __getitem__(self, key: str) -> TransferT:
        return self._transfers[key]

    def begin(self, transfer: TransferT) -> None:
        if transfer.key in self._transfers:
            raise ValueError(f"transfer {transfer.key!r} has begun already")
        self._pool.touch(transfer.blocks)
        self._transfers[transfer.key] = transfer
        self.pinned += len(transfer.blocks)
        self._held[transfer.holder] += len(transfer.blocks)

    def add_report(self, key: str, report: Report) -> TransferT | None:
        """Merge a report into that of its transfer. Return the transfer if all workers have reported it."""
        one = self._transfers[key]
        one.report = report if one.report is None else one.report.with_other(report)
        if report.late:
            self.mark_late(one)
        return one if one.report.workers == self._workers else None

    def mark_late(self, transfer: TransferT) -> None:
        """Record that no request waits for a transfer, while it may still write to its blocks."""
        if not transfer.late:
            transfer.late = True
            self._late[transfer.holder] += len(transfer.blocks)

    def release(self, reports: Mapping[str, Report], released: Mapping[str, int]) -> None:
        """Unpin the blocks of transfers that are over. Call this once per message, after `add_report`.

        The arguments are those fields of `StepReports`.
        """
        for key, report in reports.items():
            self.end(key, report.workers - report.late)
        for key, workers in released.items():
            self.end(key, workers)

    def end(self, key: str, workers: int) -> bool:
        """Record that nothing of a transfer is in flight any more on so many further workers.

        Return True if the transfer is over now, and its blocks are unpinned.
        """
        if (one := self._transfers.get(key)) is None:
            return False
        one.landed += workers
        if one.landed < self._workers:
            return False
        del self._transfers[key]
        self.pinned -= len(one.blocks)
        for blocks in (self._held, self._late) if one.late else (self._held,):
            blocks[one.holder] -= len(one.blocks)
            if not blocks[one.holder]:
                del blocks[one.holder]  # names of peers' runs would pile up
        # In reverse, so that the first blocks of a prompt are evicted last.
        self._pool.free_blocks(reversed(one.blocks))
        return True

    @property
    def held(self) -> Mapping[str, int]:
        """Number of pinned blocks, by holder."""
        return self._held

    def late_blocks(self, holder: str | None = None) -> int:
        """Return the number of blocks that late transfers of one holder pin, or those of all."""
        return self._late.total() if holder is None else self._late[holder]


# vLLM begins an asynchronous load if there are enough blocks for it and for the requests whose loads began
# before. For sliding windows it reserves too few: it subtracts the length of a request's block table from
# the maximum number of blocks that the request may hold, but table entries before the window are null
# blocks (`get_num_blocks_to_allocate`, where the cap applies). Requests that hold blocks resume in order.
# If the first one needs more blocks than are free and no request runs, none of them ever resumes. So a load
# begins only if it leaves as many free blocks as the next step of any of them needs. A single waiting
# request resumes when the running ones have ended. Without windows vLLM's own count is exact.
@dataclass(slots=True)
class Headroom:
    """Decides whether a load may start: only if enough blocks stay free for requests that wait for loads.

    Without a group that has an attention window it accepts every load.

    Attributes:
        groups: the engine's KV cache groups; empty if no group has an attention window.
    """

    groups: Sequence[CacheGroup] = ()
    step_tokens: int = 0  # maximum number of tokens of one request that a step computes
    pool: BlockPool | None = None  # the engine's block pool; None if no group has an attention window
    _needs: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, groups: Sequence[CacheGroup], step_tokens: int, pool: BlockPool) -> Headroom:
        if not any(group.attention_span for group in groups):
            return cls()
        return cls(groups, step_tokens, pool)

    def __len__(self) -> int:
        return len(self._needs)

    def fits(self, request_id: str, tokens_after_load: int, tokens: int) -> bool:
        """Return whether a load leaves enough free blocks for any one waiting request, its own included.

        Args:
            tokens_after_load: number of the request's tokens whose KV the engine has after the load.
        """
        if not self._needs.keys() - {request_id}:
            return True
        assert self.pool is not None
        most, taken = self._blocks_to_resume(tokens_after_load, tokens), 0
        for name, need in self._needs.items():
            if name != request_id:
                most = max(most, need)
        for group in self.groups:
            # The pool allocates no blocks for what the request does not attend to after the load.
            first = max(first_attended(group, tokens_after_load), 0)
            start = first // group.block_tokens * group.block_tokens
            taken += _additional_blocks(group, start, tokens_after_load)
        return self.pool.get_num_free_blocks() - taken >= most

    def on_load_begun(self, request_id: str, tokens_after_load: int, tokens: int) -> None:
        """Keep blocks free for the request of a load that has begun. The arguments are those of `fits`."""
        if self.groups:
            self._needs[request_id] = self._blocks_to_resume(tokens_after_load, tokens)

    def on_resumed(self, requests: AbstractSet[str]) -> None:
        """Stop keeping blocks free for requests that the engine has scheduled again."""
        # Hundreds may wait: an intersection takes the time of the smaller set.
        for name in self._needs.keys() & requests:
            del self._needs[name]

    def forget(self, request_id: str) -> None:
        """Forget a request that holds no blocks any more."""
        self._needs.pop(request_id, None)

    def _blocks_to_resume(self, tokens_after_load: int, tokens: int) -> int:
        """Return how many more blocks a request needs to go on after its load."""
        # Those of its next step, or of all later steps for groups that attend to all tokens.
        step = min(tokens, min(tokens_after_load, tokens - 1) + self.step_tokens)
        blocks = 0
        for group in self.groups:
            end = tokens if attends_to_all(group.kind) else step
            blocks += _additional_blocks(group, tokens_after_load, end)
        return blocks


def _additional_blocks(group: CacheGroup, local_tokens: int, tokens: int) -> int:
    """Return how many more blocks a group needs for `tokens` tokens than for `local_tokens` tokens."""
    if group.kind is GroupKind.STATE:
        return STATE_BLOCKS
    return max(-(-tokens // group.block_tokens) - -(-local_tokens // group.block_tokens), 0)


@dataclass(frozen=True, slots=True)
class _Part:
    """A block that a load fills only in part, at a position of the request's block table."""

    group: int
    at: int
    block: int
    until: int  # number of computed tokens at which the request stops attending to the block


@dataclass(slots=True)
class _Watch:
    """The partly filled blocks of a request that vLLM has not cached, and to which the request attends."""

    request: Request
    admission: int  # `request.num_preemptions` when the request was admitted
    parts: list[_Part]


# If a source has smaller blocks than this engine, it may have only the end of the block in which an
# attention window begins. The waiting request does not attend to the missing tokens. But vLLM would reuse
# the block for any prompt with the same prefix, and a shorter prompt would attend to them. So such a block
# is evicted from vLLM's prefix cache as soon as it is there. It is neither stored nor offered to other
# engines. vLLM caches a block once, when all its tokens are computed: when the request goes on after its
# load, or some tokens later if the window is shorter than the block. The block is watched until then, or
# until the request no longer attends to it.
class PartBlocks:
    """The blocks that loads have filled only in part. Only the engine's thread calls it.

    Attributes:
        refused: True if no load may fill a block only in part.
    """

    def __init__(self, groups: Sequence[Group], pool: BlockPool, refused: bool = False) -> None:
        self._groups, self._pool, self.refused = tuple(groups), pool, refused
        self._parts: dict[str, list[_Part]] = {}
        self._loading: dict[str, _Watch] = {}
        self._resumed: dict[str, _Watch] = {}
        self._looked = False
        self._distrusted: set[str] = set()

    def distrust_all(self, request_id: str) -> None:
        """Treat all blocks of a request as partly loaded, because another connector loads its KV."""
        # If the other connector's load fails, this connector learns of it too late, and may have stored wrong
        # KV by then. So these blocks are neither stored nor offered to peers.
        self._distrusted.add(request_id)

    def would_fill_partly(self, span: LoadSpan, alignments: Sequence[int]) -> bool:
        """Return whether a load would fill a block only in part. `alignments` are those of `Source`."""
        return any(
            partial_block(group, span, alignment_tokens) is not None
            for group, alignment_tokens in zip(self._groups, alignments, strict=True)
        )

    def begin(
        self, request: Request, tables: Sequence[Int64s], span: LoadSpan, alignments: Sequence[int]
    ) -> None:
        """Record the blocks that a load fills only in part. `tables` are those of `Load`."""
        self.forget(request.request_id)
        found = []
        for number, (group, ids, alignment_tokens) in enumerate(
            zip(self._groups, tables, alignments, strict=True)
        ):
            at = partial_block(group, span, alignment_tokens)
            if at is not None:
                until = first_independent(group, (at + 1) * group.block_tokens)
                found.append(_Part(number, at, int(ids[at]), until))
        if found:
            self._parts[request.request_id] = found
            self._loading[request.request_id] = _Watch(request, request.num_preemptions, found)

    def evict(self) -> bool:
        """Evict partly loaded blocks from the engine's prefix cache; return True if any was in the cache."""
        found = bool(self._loading) and self._evict(self._loading)
        if self._resumed and not self._looked:
            # Once per pass: the engine has scheduled all running requests before the first waiting one.
            self._looked = True
            found |= self._evict(self._resumed)
        return found

    @property
    def agenda(self) -> tuple[Sized, ...]:
        return self._loading, self._resumed

    def end_pass(self) -> None:
        """End a scheduling pass: evict the partly loaded blocks that the engine cached during it."""
        self._evict(self._loading)
        self._evict(self._resumed)
        self._looked = False

    def on_resumed(self, request_id: str) -> None:
        """Record that a request continues after its load, and evict its partly loaded blocks."""
        if request_id in self._loading:
            # The engine has just put all full blocks of the load into its prefix cache.
            self._evict(self._loading)
            if (watch := self._loading.pop(request_id, None)) is not None:
                self._resumed[request_id] = watch

    def masked_tables(self, request_id: str, tables: BlockIds) -> BlockIds:
        """Return a request's block tables with null blocks in place of its partly loaded blocks."""
        if request_id in self._distrusted:
            return tuple([NULL_BLOCK] * len(ids) for ids in tables)
        parts = self._parts.get(request_id)
        if parts is None:
            return tables
        whole = [list(ids) for ids in tables]
        for part in parts:
            ids = whole[part.group]
            if part.at < len(ids) and ids[part.at] == part.block:
                ids[part.at] = NULL_BLOCK
        return tuple(whole)

    def forget(self, request_id: str) -> None:
        """Forget a request's partly loaded blocks: they are freed or will be computed instead."""
        self._distrusted.discard(request_id)
        for of in (self._parts, self._loading, self._resumed):
            of.pop(request_id, None)

    def _evict(self, watched: dict[str, _Watch]) -> bool:
        cached: set[int] = set()
        for name, watch in list(watched.items()):
            request = watch.request
            if request.num_preemptions != watch.admission:
                del watched[name]  # a preemption has freed the request's blocks
                continue
            seen = [part for part in watch.parts if request.num_computed_tokens < part.until]
            now = {part.block for part in seen if self._pool.blocks[part.block].block_hash is not None}
            watch.parts = [part for part in seen if part.block not in now]
            cached |= now
            if not watch.parts:
                del watched[name]
        if cached:
            self._pool.evict_blocks(cached)
        return bool(cached)
