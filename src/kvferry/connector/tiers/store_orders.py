"""Stores under way: chunks that ranks are to copy out of blocks of the engine, pinned until all of them have.

When a request has ended, and what it had stored is there, its chunks are ranked as used, its beginning last:
what a prompt begins with is of use without the rest, the rest is not without it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.connector.engine import Block, BlockPool
from kvferry.connector.events import StoreBegan, StoreEnded
from kvferry.connector.stream import EventStream
from kvferry.connector.worker.orders import MovedByAll, Piece, StoreOrder
from kvferry.planning.chunk_cells import TableSlice
from kvferry.planning.select import NULL_BLOCK
from kvferry.tiers.host.tier import Slot

MOST_PINNED = 0.25
"""Of the engine's blocks: what stores may hold back from it."""


@dataclass(slots=True)
class _Store:
    """An order that ranks have not done yet.

    Attributes:
        request_id: whose chunks they are.
        slots: with the tokens that each will hold.
        blocks: pinned.
    """

    request_id: str
    slots: list[tuple[Slot, int]]
    blocks: list[Block]


class StoreOrders:
    """The stores under way of an engine. Only the engine's thread calls it.

    Attributes:
        dropped: chunks that were not stored, by reason.
        most_pinned: blocks that stores may hold.
    """

    def __init__(
        self, cache: ChunkCache, pool: BlockPool, labels: Sequence[str], events: EventStream
    ) -> None:
        """Begin.

        Args:
            cache: of this engine.
            pool: the engine's block pool.
            labels: of the canonical groups, with their numbers.
            events: told of orders.
        """
        self.dropped: Counter[str] = Counter()
        self.most_pinned = int(MOST_PINNED * len(pool.blocks))
        self._cache, self._pool, self._labels, self._events = cache, pool, labels, events
        self._stores: dict[str, _Store] = {}
        self._orders: list[StoreOrder] = []
        self._ended: dict[str, list[bytes]] = {}
        self._pinned = 0
        self._numbers = count()

    @property
    def busy(self) -> bool:
        """Whether blocks are pinned."""
        return bool(self._stores)

    def order(
        self,
        request_id: str,
        group: int,
        wanted: Sequence[tuple[int, bytes, int]],
        stretches: Sequence[TableSlice | None],
        available: range,
    ) -> None:
        """Reserve room, pin blocks, and tell the ranks with the next hand-over.

        Args:
            request_id: whose chunks they are.
            group: canonical.
            wanted: (number, key, tokens) of chunks.
            stretches: blocks per group of the engine.
            available: tokens that the blocks hold.
        """
        ids = {block for stretch in stretches if stretch for block in stretch.ids} - {NULL_BLOCK}
        if self._pinned + len(ids) > self.most_pinned:
            self.dropped["too many stores under way"] += len(wanted)
            return
        slots: list[tuple[Slot, int]] = []
        pieces = []
        for number, key, tokens in wanted:
            slot = self._cache.reserve(key, group)
            if slot is not None:
                slots.append((slot, tokens))
                pieces.append(Piece(group, number, slot.offset))
        if not pieces:
            return
        blocks = [self._pool.blocks[block] for block in ids]
        self._pool.touch(blocks)
        self._pinned += len(blocks)
        name = f"store#{next(self._numbers)}"
        self._stores[name] = _Store(request_id, slots, blocks)
        self._events.emit(StoreBegan(request_id, time.monotonic(), name, self._labels[group], len(pieces)))
        self._orders.append(StoreOrder(name, tuple(pieces), tuple(stretches), available))

    def take(self) -> list[StoreOrder]:
        """Return the orders since the last call."""
        orders, self._orders = self._orders, []
        return orders

    def moved(self, moved: MovedByAll) -> bool:
        """Handle an order that all ranks have carried out; return whether it was a store."""
        store = self._stores.pop(moved.key, None)
        if store is None:
            return False
        for slot, tokens in reversed(store.slots):
            self._cache.filled(slot, tokens, moved.failure)
        self._pool.free_blocks(reversed(store.blocks))
        self._pinned -= len(store.blocks)
        self._rank(store.request_id)
        size, now = sum(moved.bytes_by_group), time.monotonic()
        self._events.emit(
            StoreEnded(
                store.request_id,
                now,
                store=moved.key,
                failure=moved.failure or "",
                size=size,
                seconds=moved.seconds,
            )
        )
        return True

    def ended(self, request_id: str, keys: list[bytes]) -> None:
        """Note a request that has ended, of which nothing more will be ordered.

        Args:
            request_id: which.
            keys: of its prompt's chunks, from the first on.
        """
        self._ended[request_id] = keys
        self._rank(request_id)

    def start_anew(self) -> None:
        """Forget which chunks ended requests used."""
        self._ended.clear()

    def _rank(self, request_id: str) -> None:
        """Mark the chunks of an ended request as used, once nothing of it is being stored."""
        if request_id in self._ended and all(one.request_id != request_id for one in self._stores.values()):
            self._cache.used(self._ended.pop(request_id))
