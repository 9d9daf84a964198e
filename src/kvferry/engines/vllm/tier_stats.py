"""What the tiers have done, counted, on its way to the engine's own /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

from kvferry.cache.chunk_cache import HOST, ChunkCache
from kvferry.engines.vllm.storing import Storing
from kvferry.engines.vllm.tier_source import TierSource

PREFIX = "kvferry_tier"

METRICS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "stored_chunks": ("Chunks that a tier has taken.", ("tier",)),
        "stored_bytes": ("Bytes of chunks that a tier has taken.", ("tier",)),
        "dropped_chunks": ("Chunks that were not stored.", ("tier", "reason")),
        "fetched_chunks": ("Chunks that loads took from a tier.", ("tier",)),
        "missed_chunks": ("Chunks that a tier was thought to have and did not give.", ("tier", "reason")),
        "evicted_chunks": ("Chunks that made room for others.", ("tier",)),
        "loads": ("Loads from the tiers that have ended.", ("outcome",)),
        "hit_tokens": ("Tokens that loads from the tiers brought.", ()),
        "declined_bids": ("Bids not made, too many loads being under way.", ()),
    }
)
"""Counter by name: what it counts, and its labels."""

Count: TypeAlias = tuple[str, tuple[str, ...]]


class TierCounts:
    """Differences of the tiers' counts from one look to the next."""

    def __init__(self, cache: ChunkCache, source: TierSource, storing: Storing) -> None:
        self._cache, self._source, self._storing = cache, source, storing
        self._seen: Counter[Count] = Counter()
        self._looked: tuple[int, ...] = ()

    def take(self) -> list[tuple[str, tuple[str, ...], int]]:
        """(metric, labels, how much more) of what has changed since the last call, which is every step."""
        looked = self._totals()  # before counting: what a thread adds meanwhile is seen next time
        if looked == self._looked:
            return []
        self._looked = looked
        now = Counter(dict(self._counts()))
        more = [(*count, n - self._seen[count]) for count, n in now.items() if n > self._seen[count]]
        self._seen = now
        return more

    def _totals(self) -> tuple[int, ...]:
        """Something that is another whenever some count is; taken in a microsecond."""
        loads = self._source.counts
        return self._cache.events, self._storing.dropped.total(), loads.loads.total(), loads.declined

    def _counts(self) -> Iterator[tuple[Count, int]]:
        cache, host = self._cache.counts, self._cache.host_counters
        yield ("stored_chunks", (HOST,)), host.stored
        yield ("stored_bytes", (HOST,)), host.stored_bytes
        yield ("evicted_chunks", (HOST,)), host.evicted
        for drop, n in host.dropped.items():
            yield ("dropped_chunks", (HOST, str(drop))), n
        for why, n in self._storing.dropped.items():
            yield ("dropped_chunks", (HOST, why)), n
        for tier, n in cache.fetched.items():
            yield ("fetched_chunks", (tier,)), n
        for (tier, miss), n in cache.missed.items():
            yield ("missed_chunks", (tier, str(miss))), n
        for writing in self._cache.writing:
            tier, stats = writing.behind.queue.name, writing.behind.queue.tier.stats
            yield ("stored_chunks", (tier,)), sum(n for put, n in stats.puts.items() if not put.dropped)
            yield ("stored_bytes", (tier,)), stats.stored_bytes
            yield ("evicted_chunks", (tier,)), stats.evicted
            yield ("dropped_chunks", (tier, "left host memory before its turn")), writing.lost
            for put, n in stats.dropped.items():
                yield ("dropped_chunks", (tier, str(put))), n
        for outcome, n in self._source.counts.loads.items():
            yield ("loads", (outcome,)), n
        yield ("hit_tokens", ()), self._source.counts.tokens
        yield ("declined_bids", ()), self._source.counts.declined
