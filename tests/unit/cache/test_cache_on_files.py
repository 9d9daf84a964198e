"""The tiered cache over a real directory, which goes away, is replaced, and comes back."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import shake_128
from pathlib import Path

import numpy as np

from kvferry.cache.chunk_cache import ChunkCache, PromptChunk
from kvferry.cache.tier_queue import TierQueue
from kvferry.geometry.canonical import canonical_form_of
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.files.tier import FileTier
from kvferry.tiers.host.tier import HostTier
from kvferry.tiers.index import KeyTable
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tiers.write_filter import DeclineReason, WriteFilter
from kvferry.tools.models.layout import EngineShape, lay_out
from support.models import attention, model
from support.stores import NAMESPACE, Clock
from support.waiting import wait_for

CHUNK, SLOTS = 64, 16
KV = attention(k=8, v=8)
GROUPS = canonical_form_of(lay_out(model(KV, KV), EngineShape(1, (2,), 16, "LBHNC", 9)), CHUNK).groups
SIZE = GROUPS[0].chunk_bytes
KEYS = [b"%031d" % n + b"\0" for n in range(8)]


def content(key: bytes) -> bytes:
    return shake_128(key).digest(SIZE)


class Cache:
    """Host memory before a directory."""

    def __init__(self, folder: Path, min_uses: int = 1, **options) -> None:
        table = KeyTable()
        self.memory = np.zeros(SLOTS * SIZE, np.uint8)
        self.host = HostTier(SLOTS * SIZE, [SIZE], EVICTION_POLICIES["lru"], table)
        self.store = FileTier(folder, NAMESPACE, capacity=1 << 24, table=table, **options)
        self.queue = TierQueue(
            self.store, "file", write_filter=WriteFilter(min_uses=min_uses), refresh_seconds=0.02
        )
        self.cache = ChunkCache(self.host, self.bytes_at, GROUPS, [self.queue])

    def bytes_at(self, offset: int, size: int) -> memoryview:
        return memoryview(self.memory)[offset : offset + size]

    def step_until(self, done: Callable[[], bool]) -> None:
        wait_for(lambda: self.cache.poll() or done())

    def keep(self, *keys: bytes) -> None:
        for key in keys:
            slot = self.cache.reserve(key, 0)
            self.bytes_at(slot.offset, SIZE)[:] = content(key)
            self.cache.filled(slot, CHUNK, None)
        self.step_until(lambda: not self.cache.busy)

    def forget(self) -> None:
        """Nothing is in host memory any more."""
        for key in KEYS:
            if self.host.contains([key])[0]:
                self.host.evict(key)

    def load(self, *keys: bytes) -> bool:
        """Whether all could be loaded; what was is right, and nothing is held afterwards."""
        fetch = self.cache.fetch([PromptChunk(0, at, key, CHUNK) for at, key in enumerate(keys)])
        self.step_until(lambda: fetch.over)
        taken = fetch.take()
        for want, slot in taken:
            assert bytes(self.bytes_at(slot.offset, SIZE)) == content(want.key)
            self.cache.host.close(slot)
        self.cache.cancel(fetch)
        self.step_until(lambda: not (self.cache.busy or self.host.holds))
        return len(taken) == len(keys)


def test_a_directory_that_goes_and_is_replaced_costs_its_chunks_and_nothing_else(tmp_path):
    folder, away = tmp_path / "cache", tmp_path / "away"
    folder.mkdir()
    made = Cache(folder)
    made.keep(*KEYS[:4])
    made.forget()
    assert made.load(*KEYS[:4])

    folder.rename(away)
    made.forget()
    assert not made.load(*KEYS[:4])
    made.keep(KEYS[4])
    assert made.load(KEYS[4]), "host memory serves on"
    assert not folder.exists()
    assert made.store.stats.dropped[PutOutcome.IO_ERROR] >= 1
    made.step_until(lambda: not made.queue.known(KEYS).any())

    folder.mkdir()
    made.keep(KEYS[5])
    made.forget()
    assert made.load(KEYS[5])
    assert not made.cache.available(KEYS[:5]).any()

    folder.rename(tmp_path / "second")
    away.rename(folder)
    made.forget()
    made.step_until(lambda: made.queue.known(KEYS[:4]).all() and not made.queue.known(KEYS[4:]).any())
    assert made.load(*KEYS[:4])
    assert set(made.store.stats.gets) <= {GetOutcome.HIT, GetOutcome.ABSENT}
    made.cache.shutdown(5.0)


def in_directory(made: Cache) -> list[bool]:
    return made.queue.known(KEYS).tolist()


def test_a_chunk_is_written_with_its_second_use_and_then_outlasts_host_memory(tmp_path):
    made = Cache(tmp_path, min_uses=2)
    made.keep(*KEYS[:4])
    made.cache.mark_used(KEYS[:4], prompt_tokens=4 * CHUNK)
    made.step_until(lambda: not made.cache.busy)
    assert in_directory(made) == [False] * 8
    assert made.queue.filter.declined == {DeclineReason.FEW_USES: 4}
    made.cache.mark_used(KEYS[:2], prompt_tokens=2 * CHUNK)
    made.step_until(lambda: not made.cache.busy)
    assert in_directory(made) == [True] * 2 + [False] * 6
    made.forget()
    assert made.load(*KEYS[:2])
    assert not made.cache.available(KEYS[2:4]).any()
    made.keep(KEYS[2])  # computed anew by a second prompt
    assert in_directory(made)[2]
    made.cache.shutdown(5.0)


def test_a_declined_chunk_that_has_left_host_memory_is_not_queued(tmp_path):
    made = Cache(tmp_path, min_uses=2)
    made.keep(*KEYS[:2])
    made.cache.mark_used(KEYS[:2], prompt_tokens=2 * CHUNK)
    made.forget()
    made.cache.mark_used(KEYS[:2], prompt_tokens=2 * CHUNK)
    made.step_until(lambda: not made.cache.busy)
    assert (in_directory(made), made.queue.lost) == ([False] * 8, 0)
    made.cache.shutdown(5.0)


def test_chunks_dropped_from_host_memory_at_once_are_forgotten_by_the_filter(tmp_path):
    made = Cache(tmp_path, min_uses=2)
    made.keep(*KEYS[:2])
    made.cache.clear()
    for _ in range(3):
        assert made.queue.filter.use(KEYS[:2], 2 * CHUNK) == []
    made.cache.shutdown(5.0)


def test_a_chunk_beyond_the_write_budget_is_written_with_a_later_use(tmp_path):
    clock = Clock()
    made = Cache(tmp_path, write_per_day=24, clock=clock)  # less than a chunk, which takes a day's budget
    made.keep(*KEYS[:2])
    wait_for(lambda: made.queue.usage.write_budget_left == 0.0)
    assert sum(in_directory(made)) == 1
    clock.now += 2 * 86_400
    wait_for(lambda: made.queue.usage.write_budget_left == 1.0)
    made.cache.mark_used(KEYS[:2], prompt_tokens=2 * CHUNK)
    made.step_until(lambda: sum(in_directory(made)) == 2)
    made.cache.shutdown(5.0)
