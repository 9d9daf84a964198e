"""A step that computes nothing waits a moment for chunks that are read for loads, and for nothing else."""

from __future__ import annotations

import pytest

from kvferry.cache.chunk_cache import (
    FIRST_READ_SECONDS,
    MOST_READS_SECONDS,
    NEXT_READ_SECONDS,
    ChunkCache,
    Fetch,
    PromptChunk,
)
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.host.tier import HostTier
from kvferry.tiers.names import GetOutcome
from support.clock import Clock
from support.slow_tiers import answer, fake_tiers, queue_by_hand, table_of
from unit.cache.test_chunk_cache import GROUPS, PAGE, Memory, content, tokens_of

KEYS = [b"%031d" % n + bytes((0,)) for n in range(30)]


class Reads:
    """A cache with a slow tier whose reads end at given times. Stands for the event of a result, too."""

    def __init__(self, **ends: float) -> None:
        self.clock, self.waits = Clock(), 0
        self.ends = {KEYS[int(name[1:])]: at for name, at in ends.items()}
        tiers = fake_tiers([(key, content(key)) for key in KEYS])
        self.queue = queue_by_hand(tiers[0], self.clock)
        sizes = [group.chunk_bytes for group in GROUPS]
        memory = Memory(200 * PAGE)
        self.cache = ChunkCache(
            HostTier(200 * PAGE, sizes, EVICTION_POLICIES["lru"], table_of(tiers)),
            memory.bytes_at, GROUPS, [self.queue], self.clock, arrived=self,
        )  # fmt: skip
        self.fetch = self.fetch_first(len(ends))

    def fetch_first(self, count: int) -> Fetch:
        return self.cache.fetch([PromptChunk(0, n, KEYS[n], tokens_of(KEYS[n])) for n in range(count)])

    def set(self) -> None:
        pass

    def clear(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        self.waits += 1
        self.clock.now = min([self.clock.now + seconds, *self.ends.values()])
        for key in [key for key, at in self.ends.items() if at <= self.clock.now]:
            del self.ends[key]
            answer(self.queue, "read", key, GetOutcome.HIT)

    def step(self) -> tuple[int, float]:
        """The number of chunks that an idle step gets, and the time at which it has them."""
        self.cache.await_reads()
        self.cache.poll()
        return len(self.fetch.take()), self.clock.now


def test_a_step_has_a_chunk_as_soon_as_it_is_read():
    assert Reads(k0=0.002).step() == (1, pytest.approx(0.002))


def test_chunks_that_arrive_shortly_after_each_other_are_had_together():
    later = 0.002 + 0.5 * NEXT_READ_SECONDS
    assert Reads(k0=0.002, k1=later).step() == (2, pytest.approx(later))


def test_a_chunk_does_not_wait_for_one_that_takes_long():
    reads = Reads(k0=0.002, k1=10.0)
    assert reads.step() == (1, pytest.approx(0.002 + NEXT_READ_SECONDS))


def test_a_step_waits_no_longer_than_its_limit():
    assert Reads(k0=10.0).step() == (0, pytest.approx(FIRST_READ_SECONDS))


def test_a_step_does_not_wait_for_ever_while_chunks_keep_arriving():
    read, at = Reads(**{f"k{n}": 0.8 * NEXT_READ_SECONDS * n for n in range(30)}).step()
    assert at == pytest.approx(MOST_READS_SECONDS)
    assert read == 13


def test_a_step_does_not_wait_for_a_load_that_can_go_on():
    reads = Reads(k0=0.002)
    reads.step()
    later = reads.fetch_first(2)
    before = reads.waits
    reads.step()
    assert reads.waits == before
    assert len(later.take()) == 1


def test_a_step_does_not_wait_for_what_no_load_wants_any_more():
    reads = Reads(k0=0.002)
    reads.cache.cancel(reads.fetch)
    for _ in range(2):
        assert reads.step() == (0, 0.0)
    assert reads.waits == 0
