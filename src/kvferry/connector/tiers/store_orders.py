"""Stores under way: orders to the ranks to copy chunks from the engine's blocks to host memory."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.common.limited_log import LimitedLog
from kvferry.connector.blocks import Transfer, TransferBook
from kvferry.connector.engine import BlockPool
from kvferry.connector.events import EventStream, StoreBegan, StoreEnded, short_id
from kvferry.connector.messages import Piece, StepReports, StoreOrder
from kvferry.planning.chunk_cells import TableSlice
from kvferry.planning.select import NULL_BLOCK
from kvferry.tiers.host.tier import Slot

logger = logging.getLogger(__name__)

MOST_PINNED = 0.25
"""Maximum share of the engine's blocks that stores may pin."""


class ChunkToStore(NamedTuple):
    """A chunk to store.

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
    """A store under way, with the slot of each chunk in host memory."""

    request_id: str
    began: StoreBegan
    slots: list[tuple[Slot, ChunkToStore]]


class StoreOrders:
    """Orders stores from the ranks, and completes them. Only the engine's thread calls it.

    Attributes:
        dropped: number of chunks that were not stored, by reason.
        most_pinned: maximum number of blocks that stores may pin at a time.
    """

    def __init__(
        self, cache: ChunkCache, pool: BlockPool, workers: int, labels: Sequence[str], events: EventStream
    ) -> None:
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
        return len(self._stores) > 0

    @property
    def chunks(self) -> int:
        return sum(len(store.slots) for store in self._stores)

    def order(
        self,
        request_id: str,
        group: int,
        chunks: Sequence[ChunkToStore],
        table_slices: Sequence[TableSlice | None],
        available: range,
    ) -> None:
        """Order the ranks to store chunks. Reserve slots, and pin the blocks until all ranks have copied.

        A chunk is not stored if host memory has it already or has no room for it. No chunk is stored if
        stores would pin more than `most_pinned` blocks.

        Args:
            group: index of the KV cache group in the storage format.
            table_slices: as `StoreOrder.tables`.
            available: as `StoreOrder.available`.
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
        """Complete the stores that all ranks have reported: unpin the blocks, make the chunks available."""
        ended = []
        for key, report in reports.reports.items():
            if key in self._stores and (store := self._stores.add_report(key, report)) is not None:
                ended.append(store)
        self._stores.release(reports)
        for store in ended:
            assert store.report is not None
            failure, figures = store.report.failure, store.report.figures
            # In reverse order, so that the end of the prompt is evicted before its start.
            for slot, chunk in reversed(store.slots):
                self._cache.filled(slot, chunk.tokens, failure, cold=chunk.cold)
            if failure is not None:
                self._log.say(failure, f"tiers: ranks could not store chunks: {failure}")
            self._mark_chunks_used(store.request_id)
            self._events.emit(
                StoreEnded(
                    store.request_id,
                    time.monotonic(),
                    began=store.began,
                    failure=failure or "",
                    size=sum(figures.bytes_by_group),
                    seconds=figures.transfer_seconds,
                )
            )

    def ended(self, request_id: str, used: list[bytes], cold: list[bytes]) -> None:
        """Mark the chunks of an ended request for the eviction policy, when all its stores have ended.

        Args:
            used: keys of chunks to mark as used, the first chunk of the request first.
            cold: keys of chunks that host memory evicts before all others.
        """
        self._ended[request_id] = used, cold
        self._mark_chunks_used(request_id)

    def start_anew(self) -> None:
        """Forget the ended requests whose stores are still under way, because the cache was reset."""
        self._ended.clear()

    def _mark_chunks_used(self, request_id: str) -> None:
        if request_id in self._ended and all(one.request_id != request_id for one in self._stores):
            # The end of the prompt is to be evicted before its start: the start is useful without the rest,
            # but not the rest without the start.
            self._cache.mark_used(*self._ended.pop(request_id))
