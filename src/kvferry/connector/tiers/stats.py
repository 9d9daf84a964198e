"""Events about the tiers: counts of chunks read, stored, missed, dropped and evicted since the last step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.cache.counts import TransferTimes
from kvferry.cache.writing import Writing
from kvferry.connector.events import TierChanged
from kvferry.connector.stream import EventStream, log_errors
from kvferry.connector.tiers.store_orders import StoreOrders
from kvferry.tiers.host.counters import HostDropReason
from kvferry.tiers.names import HOST


@dataclass(frozen=True, slots=True)
class _Totals:
    """The counts of one tier since the start of the engine, in chunks; `stored_bytes` in bytes.

    Attributes:
        missed: number of chunks not found, by reason.
        dropped: number of chunks that were not stored, by reason.
    """

    fetched: int
    stored: int
    stored_bytes: int
    evicted: int
    missed: Mapping[str, int]
    dropped: Mapping[str, int]


_NOTHING = _Totals(fetched=0, stored=0, stored_bytes=0, evicted=0, missed={}, dropped={})


@dataclass(slots=True)
class TierEvents:
    """Emits events about what tiers have read, stored, missed, dropped and evicted since the last step.

    If any tier has changed in a step, one event is emitted for every tier.

    Attributes:
        cache: chunks in host memory and in the slower tiers.
        stores: stores under way, with counts of the chunks that were not stored.
        events: stream that receives the events.
    """

    cache: ChunkCache
    stores: StoreOrders
    events: EventStream
    _last_totals: dict[str, _Totals] = field(default_factory=dict)
    _last_fingerprint: tuple[object, ...] = ()

    @log_errors
    def emit_changes(self, times: TransferTimes, copies: Sequence[float]) -> None:
        """Emit a `TierChanged` event for every tier if any tier has changed since the last call.

        Args:
            times: seconds of reads and writes of chunks in storage since the last call.
            copies: seconds of copies from host memory to KV blocks since the last call.
        """
        fingerprint = self._fingerprint()  # before counting, so that the next call sees concurrent changes
        if fingerprint == self._last_fingerprint and not copies:
            return
        self._last_fingerprint = fingerprint
        for event in self._changes(times, copies):
            self.events.emit(event)

    def _fingerprint(self) -> tuple[object, ...]:
        """Return a value that changes whenever the content or the counts of any tier change."""
        # Called in every engine step: this takes about a microsecond, and all counts take much longer.
        around = [one.slow_tier.queue.usage for one in self.cache.writing]
        return self.cache.events, self.stores.dropped.total(), *around

    def _changes(self, times: TransferTimes, copies: Sequence[float]) -> Iterator[TierChanged]:
        host = self.cache.host
        used, capacity = host.used_bytes, host.capacity_bytes
        yield self._changed_event(HOST, self._host_totals(), used, capacity, fetch_seconds=tuple(copies))
        for writing in self.cache.writing:
            queue = writing.slow_tier.queue
            yield self._changed_event(
                queue.name,
                now=self._storage_totals(writing),
                used=queue.usage.used,
                capacity=queue.usage.capacity,
                owed=len(writing),
                fetch_seconds=tuple(times.reads.get(queue.name, ())),
                store_seconds=tuple(times.writes.get(queue.name, ())),
            )

    def _changed_event(
        self,
        tier: str,
        now: _Totals,
        used: int | None,
        capacity: int | None,
        owed: int | None = None,
        fetch_seconds: tuple[float, ...] = (),
        store_seconds: tuple[float, ...] = (),
    ) -> TierChanged:
        last, self._last_totals[tier] = self._last_totals.get(tier, _NOTHING), now
        return TierChanged(
            time.monotonic(),
            tier,
            used=used,
            capacity=capacity,
            owed=owed,
            fetched=now.fetched - last.fetched,
            stored=now.stored - last.stored,
            stored_bytes=now.stored_bytes - last.stored_bytes,
            evicted=now.evicted - last.evicted,
            missed=tuple((Counter(now.missed) - Counter(last.missed)).items()),
            dropped=tuple((Counter(now.dropped) - Counter(last.dropped)).items()),
            fetch_seconds=fetch_seconds,
            store_seconds=store_seconds,
        )

    def _host_totals(self) -> _Totals:
        did = self.cache.host.counters
        dropped = {str(why): n for why, n in did.dropped.items() if why is not HostDropReason.PRESENT}
        return _Totals(
            fetched=self.cache.counts.fetched[HOST],
            stored=did.stored,
            stored_bytes=did.stored_bytes,
            evicted=did.evicted,
            missed={},
            dropped={**dropped, **self.stores.dropped},
        )

    def _storage_totals(self, writing: Writing) -> _Totals:
        queue, counts = writing.slow_tier.queue, self.cache.counts
        did = queue.tier.stats
        dropped = {str(put): n for put, n in did.dropped.items()}
        return _Totals(
            fetched=counts.fetched[queue.name],
            stored=sum(n for put, n in did.puts.items() if not put.dropped),
            stored_bytes=did.stored_bytes,
            evicted=did.evicted,
            missed={str(miss): n for (tier, miss), n in counts.missed.items() if tier == queue.name},
            dropped={**dropped, "left host memory before its turn": writing.lost},
        )
