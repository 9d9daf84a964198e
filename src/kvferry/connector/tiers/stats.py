"""Events about the tiers: counts of chunks read, stored, missed, dropped and evicted since the last step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.cache.reading import TransferTimes, Writing
from kvferry.connector.events import EventStream, TierChanged, log_errors
from kvferry.connector.tiers.store_orders import StoreOrders
from kvferry.tiers.host.settings import HostDropReason
from kvferry.tiers.host.tier import Slot
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


MOST_PINNED = 0.5
"""Maximum share of host memory in use that pins may hold, so that other chunks still find room."""


@dataclass(frozen=True, slots=True)
class _Pin:
    """The chunks in host memory that one pin holds, and the cache salt of their prompt."""

    slots: Sequence[Slot]
    salt: str


class PinnedChunks:
    """The pins of operators, by name. Only the engine's thread calls it.

    Args:
        cache: chunks in host memory.
        chunk_bytes: bytes of a chunk, for each KV cache group.
    """

    def __init__(self, cache: ChunkCache, chunk_bytes: Sequence[int]) -> None:
        self._cache, self._chunk_bytes = cache, tuple(chunk_bytes)
        self._pins: dict[str, _Pin] = {}
        self._held = 0

    def pin(self, name: str, keys: Sequence[bytes], salt: str = "") -> int:
        """Pin those of these chunks that are in host memory. Return their number.

        An earlier pin of the same name is replaced. Chunks beyond the share `MOST_PINNED` are not pinned.

        Args:
            name: name of the pin.
            keys: keys of the chunks, the first chunk of the prompt first.
            salt: cache salt of the prompt; empty without one.
        """
        self.unpin(name)
        most = MOST_PINNED * self._cache.host.capacity_bytes
        slots: list[Slot] = []
        for key in keys:
            slot = self._cache.hold(key)
            if slot is None:
                continue
            if self._held + self._chunk_bytes[slot.group] > most:
                self._cache.close(slot)
                break
            self._held += self._chunk_bytes[slot.group]
            slots.append(slot)
        if slots:
            self._pins[name] = _Pin(slots, salt)
        return len(slots)

    def unpin(self, name: str) -> int:
        """Remove a pin. Return the number of chunks that it held; 0 if there is no pin of this name."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return 0
        # In reverse order, so that the end of the prompt is evicted before its start.
        for slot in reversed(pin.slots):
            self._cache.close(slot)
            self._held -= self._chunk_bytes[slot.group]
        return len(pin.slots)

    def unpin_salt(self, salt: str) -> None:
        """Remove all pins of prompts with a cache salt, because no request can find these chunks any more."""
        for name in [name for name, pin in self._pins.items() if pin.salt == salt]:
            self.unpin(name)

    def clear(self) -> None:
        """Remove all pins, before host memory is cleared."""
        for name in list(self._pins):
            self.unpin(name)
