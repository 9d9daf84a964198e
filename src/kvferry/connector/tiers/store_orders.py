"""Stores under way: orders to the ranks to copy chunks from the engine's blocks to host memory.

The blocks stay pinned until all ranks have copied them. When a request has ended and its stores are complete,
its chunks are marked as used.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.common.limited_log import LimitedLog
from kvferry.connector.engine import BlockPool, Request
from kvferry.connector.events import EventStream, StoreBegan, StoreEnded, short_id
from kvferry.connector.messages import Piece, StepReports, StoreOrder
from kvferry.connector.transfer import Transfer, TransferBook
from kvferry.planning.chunk_cells import TableSlice
from kvferry.planning.select import NULL_BLOCK
from kvferry.tiers.host.tier import Slot

logger = logging.getLogger(__name__)

MOST_PINNED = 0.25
"""Maximum share of the engine's blocks that stores may pin."""


class ChunkToStore(NamedTuple):
    """A chunk of a request to store.

    Attributes:
        number: index of the chunk in the request.
        key: key of the chunk.
        tokens: number of tokens in the chunk; 0 for a snapshot.
        cold: True if host memory evicts the chunk before all others, until it is used.
    """

    number: int
    key: bytes
    tokens: int
    cold: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class _Store(Transfer):
    """A store under way.

    Attributes:
        request_id: id of the request that the chunks belong to.
        began: event of the store's start.
        slots: each chunk, with its slot in host memory.
    """

    request_id: str
    began: StoreBegan
    slots: list[tuple[Slot, ChunkToStore]]


class StoreOrders:
    """Orders stores from the ranks and completes them. Only the engine's thread calls it.

    Attributes:
        dropped: number of chunks that were not stored, by reason.
        most_pinned: maximum number of blocks that stores may pin at a time.
    """

    def __init__(
        self, cache: ChunkCache, pool: BlockPool, workers: int, labels: Sequence[str], events: EventStream
    ) -> None:
        """Create an empty collection of stores.

        Args:
            cache: chunks in host memory and in the slower tiers.
            pool: the engine's block pool.
            workers: number of workers, each of which reports every store.
            labels: label of each KV cache group in the storage format.
            events: receives an event when a store begins, and when it ends.
        """
        self.dropped: Counter[str] = Counter()
        self.most_pinned = int(MOST_PINNED * len(pool.blocks))
        self._cache, self._pool, self._labels, self._events = cache, pool, labels, events
        self._stores = TransferBook[_Store](workers, pool)
        self._orders: list[StoreOrder] = []
        self._ended: dict[str, tuple[list[bytes], list[bytes]]] = {}
        self._numbers = count()
        self._log = LimitedLog(logger)

    @property
    def busy(self) -> bool:
        """True if any store is under way and pins blocks."""
        return len(self._stores) > 0

    @property
    def chunks(self) -> int:
        """Number of chunks that stores still copy to host memory."""
        return sum(len(store.slots) for store in self._stores)

    def order(
        self,
        request_id: str,
        group: int,
        chunks: Sequence[ChunkToStore],
        table_slices: Sequence[TableSlice | None],
        available: range,
    ) -> None:
        """Order the ranks to store chunks. Reserve slots, and pin the blocks until the copy ends.

        A chunk is not stored if host memory has it already or has no room for it. No chunk is stored if
        stores would pin more than `most_pinned` blocks.

        Args:
            request_id: id of the request that the chunks belong to.
            group: index of the KV cache group in the storage format.
            chunks: chunks to store.
            table_slices: the part of the block table that holds the chunks, for each KV cache group of the
                engine; None for groups without chunks in this order.
            available: range of prompt tokens that the blocks in `table_slices` hold.
        """
        ids = {block for part in table_slices if part for block in part.ids} - {NULL_BLOCK}
        if self._stores.pinned + len(ids) > self.most_pinned:
            self.dropped["too many stores under way"] += len(chunks)
            return
        slots: list[tuple[Slot, ChunkToStore]] = []
        pieces = []
        for chunk in chunks:
            slot = self._cache.reserve(chunk.key, group)
            if slot is not None:
                slots.append((slot, chunk))
                pieces.append(Piece(group, chunk.number, slot.offset))
        if not pieces:
            return
        name = f"store#{next(self._numbers)}"
        began = StoreBegan(short_id(request_id), time.monotonic(), name, self._labels[group], len(pieces))
        blocks = [self._pool.blocks[block] for block in ids]
        self._stores.begin(
            _Store(key=name, holder="stores", blocks=blocks, request_id=request_id, began=began, slots=slots)
        )
        self._events.emit(began)
        self._orders.append(StoreOrder(name, tuple(pieces), tuple(table_slices), available))

    def take(self) -> list[StoreOrder]:
        """Return, and clear, the orders that were queued since the last call."""
        orders, self._orders = self._orders, []
        return orders

    def take_reports(self, reports: StepReports) -> None:
        """Complete the stores that all ranks have reported.

        Unpin their blocks. If a store succeeded, make its chunks available to requests.
        """
        ended = [
            store
            for key, report in reports.reports.items()
            if key in self._stores and (store := self._stores.add_report(key, report)) is not None
        ]
        self._stores.release(reports)
        for store in ended:
            self._on_ended(store)

    def _on_ended(self, store: _Store) -> None:
        report = store.report
        assert report is not None
        # In reverse order, so that the end of the prompt is evicted before its start.
        for slot, chunk in reversed(store.slots):
            self._cache.filled(slot, chunk.tokens, report.failure, cold=chunk.cold)
        if report.failure is not None:
            self._log.say(report.failure, f"tiers: ranks could not store chunks: {report.failure}")
        self._mark_chunks_used(store.request_id)
        self._events.emit(
            StoreEnded(
                store.request_id,
                time.monotonic(),
                began=store.began,
                failure=report.failure or "",
                size=sum(report.figures.bytes_by_group),
                seconds=report.figures.transfer_seconds,
            )
        )

    def ended(self, request_id: str, used: list[bytes], cold: list[bytes]) -> None:
        """Record that a request has ended. No more of its chunks will be stored.

        When all its stores have ended, its chunks are marked for the eviction policy.

        Args:
            request_id: id of the request.
            used: keys of chunks to mark as used, the first chunk of the request first.
            cold: keys of chunks that host memory evicts before all others.
        """
        self._ended[request_id] = used, cold
        self._mark_chunks_used(request_id)

    def start_anew(self) -> None:
        """Forget the ended requests whose stores are still under way, because the cache was reset."""
        self._ended.clear()

    def _mark_chunks_used(self, request_id: str) -> None:
        """Mark the chunks of a request as used if it has ended and none of its stores is under way."""
        if request_id in self._ended and all(one.request_id != request_id for one in self._stores):
            # The end of the prompt is to be evicted before its start: the start is useful without the rest,
            # but not the rest without the start.
            self._cache.mark_used(*self._ended.pop(request_id))


@dataclass(slots=True)
class Progress:
    """The progress of storing the chunks of one running request.

    Attributes:
        request: request whose chunks are stored.
        computed: number of tokens that will have been computed when all steps scheduled so far have run.
        preemptions: number of times the request had been preempted when it was last admitted; -1 before its
            first step.
        found: number of tokens that came from the engine's prefix cache or from a load when the request was
            last admitted.
        chunks: number of whole chunks that `take` has returned.
        tail: True if `take` has returned the shorter last chunk of the prompt, or there is none to store.
        due: number of computed tokens at which the next chunk is complete.
        needed: for each KV cache group, the chunks that later prompts are likely to need
            (`retention.needed_chunks`); empty before the first chunk is stored.
    """

    request: Request
    computed: int = 0
    preemptions: int = -1
    found: int = 0
    chunks: int = 0
    tail: bool = False
    due: int = 0
    needed: tuple[Collection[int] | None, ...] = ()

    def step(self, tokens: int) -> bool:
        """Add the tokens that the coming step computes. Return True if the step may complete a chunk."""
        request = self.request
        # The request was admitted anew: what it has now was found in a cache or loaded.
        if self.preemptions != request.num_preemptions:
            self.preemptions, self.found = request.num_preemptions, request.num_computed_tokens
        self.computed = request.num_computed_tokens + tokens
        return self.computed >= self.due

    def end(self) -> bool:
        """Record that the request has ended. Return True if its blocks still hold the computed KV."""
        # While a load is under way, its tokens are not in the blocks yet.
        self.computed = min(self.computed, self.request.num_computed_tokens)
        return self.preemptions == self.request.num_preemptions  # a preemption frees its blocks

    def take(self, chunk_tokens: int) -> tuple[range, bool]:
        """Return the complete chunks that have not been returned before.

        Returns:
            (indices, tail). `indices` are the indices of whole chunks, counted from the start of the request.
            `tail` is True if the shorter last chunk of the prompt is complete and is returned now.
        """
        prompt = self.request.num_prompt_tokens
        # Drafts of the coming step count as computed, but may be rejected.
        until = min(self.computed, self.request.num_tokens)
        whole = range(self.chunks, max(self.chunks, until // chunk_tokens))
        self.chunks = whole.stop
        self.tail |= prompt % chunk_tokens == 0
        with_tail = not self.tail and until >= prompt
        self.tail |= with_tail
        self.due = (self.chunks + 1) * chunk_tokens
        if not self.tail:
            self.due = min(self.due, prompt)
        return whole, with_tail

    def is_cold(self, group: int, number: int, chunk_tokens: int) -> bool:
        """Return True if later prompts are unlikely to need a chunk, so that it is evicted before all others.

        Args:
            group: index of the KV cache group.
            number: index of the chunk in the request.
            chunk_tokens: number of tokens per chunk.
        """
        needed = self.needed[group]
        # A chunk with generated tokens may turn out to be the last one, so it is not cold while the request
        # runs.
        of_prompt = (number + 1) * chunk_tokens <= self.request.num_prompt_tokens
        return of_prompt and needed is not None and number not in needed


class QuietSteps:
    """Counts down the steps until a chunk may become complete, so that others need no look at each request.

    Most steps of a busy engine compute one token for each of the same requests. A chunk of one of them
    becomes complete once in hundreds of steps.
    """

    def __init__(self) -> None:
        self._tokens: Mapping[str, int] = {}
        self._left = 0

    def start(self, tokens: Mapping[str, int], steps: int) -> None:
        """Begin to count after a step.

        Args:
            tokens: number of tokens that the step computes, by request id. It must not change afterwards.
            steps: number of steps that complete no chunk, if each computes one token for each of these
                requests; not positive if there is none.
        """
        self._tokens, self._left = tokens, steps

    def stop(self) -> None:
        """End the count: the next step is not quiet."""
        self._left = 0

    def count(self, tokens: Mapping[str, int], num_tokens: int) -> bool:
        """Count a step, and return True if it completes no chunk.

        Args:
            tokens: number of tokens that the step computes, by request id.
            num_tokens: sum of these numbers.

        >>> quiet, one_each = QuietSteps(), {"a": 1, "b": 1}
        >>> quiet.start({"a": 30, "b": 1}, 2)
        >>> quiet.count(one_each, 2), quiet.count(one_each, 2), quiet.count(one_each, 2)
        (True, True, False)
        """
        # A comparison of all keys takes a few microseconds for hundreds of requests.
        if self._left < 1 or num_tokens != len(tokens) or tokens.keys() != self._tokens.keys():
            return False
        self._left -= 1
        return True
