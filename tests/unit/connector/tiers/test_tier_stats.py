"""Events about tiers are emitted once, when something has changed."""

from __future__ import annotations

from collections import Counter

from kvferry.cache.chunk_cache import ChunkCache, PromptChunk
from kvferry.connector.events import EventStream, TierChanged
from kvferry.connector.tiers.events import TierEvents
from kvferry.geometry.canonical import canonical_form_of
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.host.tier import HostTier
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tiers.storage_tier import StoreUsage
from kvferry.tools.models.layout import EngineShape, lay_out
from support.clock import Clock
from support.models import attention, model
from support.slow_tiers import answer, fake_tiers, queue_by_hand

CANONICAL = canonical_form_of(lay_out(model(attention()), EngineShape(1, (1,), 4, "LBHNC", 99)), 8)
(SIZE,) = (group.chunk_bytes for group in CANONICAL.groups)
FIRST, SECOND, KEPT = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32


class Tiers:
    def __init__(self, chunks=8):
        self.clock = Clock()
        (tier,) = fake_tiers([(KEPT, bytes(SIZE))])
        self.queue = queue_by_hand(tier, self.clock)
        self.cache = ChunkCache(
            HostTier(chunks * SIZE, [SIZE], EVICTION_POLICIES["lru"], tier.keys.table),
            lambda _, size: memoryview(bytearray(size)),
            CANONICAL.groups,
            [self.queue],
        )
        self.not_stored = Counter()
        self.heard: list[TierChanged] = []
        events = EventStream(self.heard.append)
        self.tier_events = TierEvents(self.cache, self.not_stored, events)

    def store(self, key):
        self.cache.filled(self.cache.reserve(key, 0), 8, None)

    def told(self):
        self.cache.poll()
        self.tier_events.emit_changes()
        heard, self.heard[:] = {event.tier: event for event in self.heard}, []
        return heard


def test_stores_are_reported_for_host_memory_and_later_for_the_slow_tier():
    tiers = Tiers()
    tiers.store(FIRST)
    told = tiers.told()
    assert (told["host"].stored, told["host"].stored_bytes, told["host"].used) == (1, SIZE, SIZE)
    assert (told["file"].stored, told["file"].owed, told["file"].store_seconds) == (0, 1, ())
    answer(tiers.queue, "write", FIRST, PutOutcome.STORED)
    tiers.queue.usage = StoreUsage(used=5, capacity=9)
    told = tiers.told()
    assert (told["host"].stored, told["file"].owed, len(told["file"].store_seconds)) == (0, 0, 1)
    assert (told["file"].used, told["file"].capacity) == (5, 9)
    assert tiers.told() == {}, "nothing has changed"


def test_reads_and_their_failures_are_reported_once():
    tiers = Tiers()
    tiers.told()
    tiers.cache.fetch([PromptChunk(0, 0, KEPT, 8)])
    answer(tiers.queue, "read", KEPT, GetOutcome.CORRUPT)
    assert tiers.told()["file"].missed == (("corrupt", 1),)
    tiers.queue.tier.keys.add(KEPT)
    tiers.cache.fetch([PromptChunk(0, 0, KEPT, 8)])
    answer(tiers.queue, "read", KEPT, GetOutcome.HIT)
    told = tiers.told()["file"]
    assert (told.fetched, told.missed, len(told.fetch_seconds)) == (1, (), 1)


def test_dropped_chunks_are_reported_with_a_reason_unless_they_are_present():
    tiers = Tiers()
    tiers.store(FIRST)
    assert tiers.cache.reserve(FIRST, 0) is None
    tiers.not_stored["too many stores under way"] += 3
    slot = tiers.cache.reserve(SECOND, 0)
    tiers.cache.filled(slot, 8, "gone")
    assert dict(tiers.told()["host"].dropped) == {"too many stores under way": 3, "failed": 1}


def test_copies_by_ranks_are_reported_for_host_memory():
    tiers = Tiers()
    tiers.told()
    tiers.cache.copied((), 0.1)
    tiers.cache.copied((), 0.2)
    assert tiers.told()["host"].fetch_seconds == (0.1, 0.2)
    assert tiers.told() == {}


def test_an_error_of_tier_events_is_logged(caplog):
    tiers = Tiers()
    tiers.store(FIRST)
    tiers.cache.counts = None
    assert tiers.told() == {}
    assert "TierEvents.emit_changes emitted no event" in caplog.text


def test_times_are_kept_until_the_next_step_only():
    tiers = Tiers()
    tiers.store(FIRST)
    tiers.cache.poll()
    answer(tiers.queue, "write", FIRST, PutOutcome.STORED)
    tiers.cache.poll()
    assert len(tiers.queue.write_seconds) == 1
    tiers.told()
    assert tiers.queue.write_seconds == []
