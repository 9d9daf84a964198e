"""Prefetches over a real cache, whose slow tier answers when a test says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.cache.chunk_cache import ChunkCache, PromptChunk
from kvferry.cache.prefetching import KEPT_SECONDS, MOST_READS, MOST_WAITING, Prefetch, Prefetches
from kvferry.cache.retained import RetainedChunks
from kvferry.geometry.canonical import canonical_form_of
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.host.tier import HostTier
from kvferry.tiers.names import GetOutcome
from kvferry.tools.models.layout import EngineShape, lay_out
from support.clock import Clock
from support.models import attention, model
from support.slow_tiers import fake_tiers, queue_by_hand

CANONICAL = canonical_form_of(lay_out(model(attention()), EngineShape(1, (1,), 4, "LBHNC", 99)), 8)
SIZE = CANONICAL.groups[0].chunk_bytes
CHUNKS = 100


def chunk(tenant, number):
    return PromptChunk(0, number, number.to_bytes(30, "big") + tenant.encode() + b"\0", 8)


def chunks(tenant, count):
    return [chunk(tenant, number) for number in range(count)]


@pytest.fixture
def tiers():
    """A cache whose file tier has 60 chunks of tenants a and b; host memory has room for 100."""
    kept = [(one.key, bytes(SIZE)) for tenant in "ab" for one in chunks(tenant, 60)]
    (tier,) = fake_tiers(kept)
    clock = Clock(100.0)
    host = HostTier(CHUNKS * SIZE, [SIZE], EVICTION_POLICIES["lru"], tier.keys.table)
    slow = queue_by_hand(tier, clock)
    cache = ChunkCache(
        host, lambda _, size: memoryview(bytearray(size)), CANONICAL.groups, [slow], clock=clock
    )
    retained = RetainedChunks(host, 0.25)
    return SimpleNamespace(
        tier=tier, slow=slow, cache=cache, host=host, clock=clock, retained=retained,
        prefetches=Prefetches(cache, retained, clock),
    )  # fmt: skip


def begin(tiers, tenant, count, **more):
    found = Prefetch(tenant=tenant, find=lambda: chunks(tenant, count), **more)
    tiers.prefetches.begin(found)
    return found


def poll(tiers, reads=99):
    """End so many of the reads under way, then run a step. Return the number of reads under way after it."""
    for _ in range(min(reads, len(tiers.slow.read_jobs.jobs))):
        tiers.slow.read_jobs.jobs.popleft()()
    tiers.cache.poll()
    tiers.prefetches.poll()
    tiers.host.check_integrity()
    tiers.retained.check_integrity()
    return len(tiers.slow.read_jobs.jobs)


def test_chunks_come_to_host_memory_a_few_at_a_time_and_are_retained_for_a_while(tiers):
    one = begin(tiers, "a", 20)
    assert poll(tiers) == MOST_READS
    assert poll(tiers, reads=5) == MOST_READS - 5
    assert (one.ready, one.over) == (5, False)
    while tiers.prefetches.waiting:
        assert poll(tiers) <= MOST_READS
    assert (one.wanted, one.ready, one.why) == (20, 20, "")
    assert tiers.prefetches.ended == [one]
    assert tiers.host.contains([each.key for each in chunks("a", 20)]).all()
    assert tiers.host.holds == len(tiers.retained) == 20
    tiers.retained.expire(tiers.clock() + KEPT_SECONDS)
    assert tiers.host.holds == 0


def test_a_tenant_brings_no_more_than_its_part_and_says_so(tiers):
    one = begin(tiers, "a", 60)
    while tiers.prefetches.waiting:
        poll(tiers)
    assert (one.ready, one.wanted) == (25, 60)
    assert "hint_share" in one.why
    other = begin(tiers, "b", 60)
    while tiers.prefetches.waiting:
        poll(tiers)
    # Each chunk of b takes from what a had beyond its part.
    assert other.ready == 12
    assert len(tiers.retained) == 25


def test_tenants_take_turns(tiers):
    first, second = begin(tiers, "a", 60), begin(tiers, "b", 10)
    poll(tiers)
    poll(tiers)
    assert (first.ready, second.ready) == (MOST_READS, 0)
    poll(tiers)
    # The second tenant waits for one batch of the first, whose next reads take the rest of the step's.
    assert (first.ready, second.ready) == (MOST_READS + 6, 10)


def test_chunks_in_host_memory_are_not_read_again(tiers):
    for one in chunks("a", 20):
        tiers.host.commit(tiers.host.reserve(one.key, 0))
    one = begin(tiers, "a", 20)
    assert poll(tiers) == 0
    assert (one.ready, one.over) == (20, True)
    assert len(tiers.retained) == 20


def test_a_chunk_that_cannot_be_read_ends_the_prefetch_with_the_reason(tiers):
    tiers.tier.next_get = GetOutcome.CORRUPT
    one = begin(tiers, "a", 3)
    poll(tiers)
    poll(tiers)
    assert one.over
    assert (one.ready, one.why) == (0, "a chunk of the file tier: corrupt")
    assert tiers.host.holds == 0


def test_a_tier_that_hangs_does_not_hold_the_prefetch_for_ever(tiers):
    one = begin(tiers, "a", 3)
    poll(tiers)
    tiers.clock.now += 31
    poll(tiers, reads=0)
    assert one.over
    assert one.why == "not read within 30 s"
    poll(tiers)
    assert (tiers.host.holds, tiers.cache.fetches) == (0, [])


def test_a_prefetch_waits_for_the_searches_of_other_engines(tiers):
    search = SimpleNamespace(over=False)
    one = begin(tiers, "a", 3, searches=(search,))
    assert poll(tiers) == 0
    search.over = True
    assert poll(tiers) == 3
    poll(tiers)
    assert one.ready == 3


def test_a_tenant_has_a_limited_number_of_prefetches(tiers):
    for _ in range(MOST_WAITING):
        begin(tiers, "a", 3)
    over = begin(tiers, "a", 3)
    assert tiers.prefetches.ended == [over]
    assert "earlier prefetches" in over.why
    assert not begin(tiers, "b", 3).why


def test_a_reset_ends_all_prefetches(tiers):
    one, next_one = begin(tiers, "a", 3), begin(tiers, "a", 3)
    poll(tiers)
    tiers.prefetches.clear()
    tiers.retained.clear()
    tiers.cache.clear()
    assert one.why == next_one.why == "the cache was reset"
    assert not tiers.prefetches.waiting
    poll(tiers)
    assert tiers.host.holds == 0
    assert not tiers.host.contains([each.key for each in chunks("a", 3)]).any()
