"""A slow tier in memory that answers when, and what, a test says."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from kvferry.cache.tier_queue import TierQueue
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.index import KeyTable, TierKeys
from kvferry.tiers.names import GetOutcome, PutOutcome, TierStats
from kvferry.tiers.storage_tier import LateFetch, StorageTier

GARBAGE = 0xEE
"""What a chunk that is no hit leaves in memory."""


class FakeTier(StorageTier):
    """A mapping. What it does next is what a test has put into `next_get` and `next_put`."""

    def __init__(
        self, name: str, kept: Iterable[tuple[bytes, bytes]] = (), table: KeyTable | None = None
    ) -> None:
        self.name = name
        self.kept = dict(kept)
        self.keys = TierKeys(table)
        for key in self.kept:
            self.keys.add(key)
        self.next_get: GetOutcome | type[Exception] = GetOutcome.HIT
        self.next_put: PutOutcome | type[Exception] = PutOutcome.STORED
        self.closed = self.rests = False
        self.late: list[tuple[LateFetch, memoryview]] = []  # fetches that may still write

    @property
    def paused(self) -> bool:
        return self.rests

    def put(self, key: bytes, group: ChunkGroup, body: memoryview, cold: bool = False) -> PutOutcome:
        if not isinstance(self.next_put, PutOutcome):
            raise self.next_put
        if not self.next_put.dropped:
            self.kept[key] = bytes(body)
            self.keys.add(key)
        return self.next_put

    def get(self, key: bytes, group: ChunkGroup, into: memoryview) -> GetOutcome:
        found = self.next_get
        if found is GetOutcome.HIT and key not in self.kept:
            found = GetOutcome.ABSENT
        if found is GetOutcome.HIT:
            into[:] = self.kept[key]
            return GetOutcome.HIT
        if found is LateFetch:
            late = LateFetch("it takes long")
            self.late.append((late, into))
            raise late
        into[:] = bytes([GARBAGE]) * len(into)
        self.keys.discard(key)
        if not isinstance(found, GetOutcome):
            raise found
        return found

    def refresh(self) -> int:
        return 0

    @property
    def stats(self) -> TierStats:
        return TierStats(Counter(), Counter(), 0, 0, 0, 0, 0)

    def close(self) -> None:
        self.closed = True


def fake_tiers(*kept: Iterable[tuple[bytes, bytes]]) -> list[FakeTier]:
    """A file tier and an object tier of one cache, or fewer, that have these chunks."""
    table, names = KeyTable(), ("file", "object")
    return [FakeTier(name, chunks, table) for name, chunks in zip(names, kept, strict=False)]


def table_of(tiers: list[FakeTier]) -> KeyTable:
    """Where their tags are; a new one of no tiers."""
    return tiers[0].keys.table if tiers else KeyTable()


class ByHand:
    """In place of threads: jobs wait until a test runs one."""

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()

    def put(self, job: Callable[[], None], _rank: float = 0.0) -> None:
        self.jobs.append(job)

    def close(self, ends: float) -> bool:
        while self.jobs:
            self.jobs.popleft()()
        return True


class QueueByHand(TierQueue):
    """A real queue whose operations end when a test says: `jobs_of` and `answer`."""

    def __init__(self, tier: FakeTier, clock: Callable[[], float], **options: Any) -> None:
        self.read_jobs, self.write_jobs = ByHand(), ByHand()
        super().__init__(
            tier, tier.name, clock=clock, refresh_seconds=None, start_threads=self._start, **options
        )

    def _start(self, count: int, name: str) -> ByHand:
        return self.read_jobs if name.endswith("-read") else self.write_jobs


queue_by_hand = QueueByHand


def end_late(tier: FakeTier) -> None:
    """Let the oldest late fetch write its bytes at last."""
    late, memory = tier.late.pop(0)
    memory[:] = bytes([GARBAGE]) * len(memory)
    late.over = True


def jobs_of(queue: QueueByHand) -> list[tuple[str, bytes, memoryview]]:
    """Operations under way: what, key, memory."""
    return [
        (what, job.args[0], job.args[2])
        for what, threads in (("read", queue.read_jobs), ("write", queue.write_jobs))
        for job in threads.jobs
    ]


def answer(queue: QueueByHand, what: str, key: bytes, as_: GetOutcome | PutOutcome | type[Exception]) -> None:
    """Let an operation end."""
    threads = queue.read_jobs if what == "read" else queue.write_jobs
    job = next(job for job in threads.jobs if job.args[0] == key)
    threads.jobs.remove(job)
    if what == "read":
        queue.tier.next_get = as_
    else:
        queue.tier.next_put = as_
    job()
