"""A slow tier, the chunks that it is owed, and the threads that block on its storage.

The engine's thread starts reads and writes, and collects their results later. So it never waits for storage,
even if a mount hangs. If reads are in flight and none has ended for `stuck_seconds`, the tier is *stuck* for
reading: it offers no chunks until a read ends. Writes are treated in the same way, independently of reads. An
operation uses its memory until it ends, however long that takes.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.cache.fair_order import FairOrder
from kvferry.common.threads import Thread
from kvferry.keys.tenant import tenant_of_key
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.host.tier import Slot
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tiers.storage_tier import LateFetch, StorageTier, StoreUsage
from kvferry.tiers.tenants import Tenants
from kvferry.tiers.write_filter import WriteFilter

logger = logging.getLogger(__name__)

# Time without an ended operation after which a tier with operations in flight is stuck.
STUCK_SECONDS = 5.0
# Maximum number of prompts whose use is still to be recorded. If the tier hangs, the oldest are dropped.
_MOST_USES = 1 << 12
# Time between two refreshes of a tier, which record uses and look for chunks of other processes.
REFRESH_SECONDS = 2.0

# (rank, number in the order of calls, job); None ends a thread.
_Job: TypeAlias = tuple[float, int, Callable[[], None] | None]


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a read or a write. The operation does not use the memory of the chunk any more.

    A read that is `late` is the exception: it may use the memory until `LateFetch.over`.
    """

    key: bytes
    what: GetOutcome | PutOutcome  # of a read or a write
    seconds: float = field(default=0.0, compare=False)
    late: LateFetch | None = None
    group: ChunkGroup | None = field(default=None, compare=False)  # description of the chunk


class _Threads(Protocol):
    """Threads that run the jobs of one queue."""

    def put(self, job: Callable[[], None], rank: float = 0.0) -> None:
        """Queue a job for the next free thread. Jobs of lower rank may go first."""

    def close(self, ends: float) -> bool:
        """Run the queued jobs, end the threads, and return whether that was before `ends`, monotonic."""


class _Operations:
    """The reads (or the writes) of a tier: the threads that do them, their number, and their results.

    Only the engine's thread may use it. Threads run `call`, whose exception is the outcome `failed`, and then
    `after`. `count` is the number of operations whose results `done` has not returned yet, and `ended` are
    these results, of the operations that have ended. Threads call `on_ended` after each result.
    """

    def __init__(
        self,
        call: Callable[..., GetOutcome | PutOutcome],
        kind: str,
        failed: GetOutcome | PutOutcome,
        threads: _Threads,
        clock: Callable[[], float],
        stuck_seconds: float,
        after: Callable[[], None] = lambda: None,
        order: FairOrder | None = None,
    ) -> None:
        self.count, self.threads, self._order = 0, threads, order
        self.on_ended: Callable[[], None] = lambda: None
        self._call, self._kind, self._failed, self._after = call, kind, failed, after
        self._clock, self._stuck_seconds = clock, stuck_seconds
        self._progress_at = clock()  # time when an operation last ended, or began while none was in flight
        self.ended: deque[Ended] = deque()

    def start(self, key: bytes, group: ChunkGroup, memory: memoryview, **options: bool) -> None:
        """Queue an operation. It uses the memory until `done` returns its result."""
        # Time without operations is no time without progress.
        if not self.in_flight:
            self._progress_at = self._clock()
        self.count += 1
        rank = 0.0 if self._order is None else self._order.rank(tenant_of_key(key), len(memory))
        self.threads.put(partial(self._run, key, group, memory, rank=rank, **options), rank)

    def done(self) -> list[Ended]:
        """Return the results of operations that have ended since the last call."""
        found: list[Ended] = []
        while self.ended:
            found.append(self.ended.popleft())
        self.count -= len(found)
        return found

    @property
    def in_flight(self) -> int:
        """Number of operations that have not ended."""
        return self.count - len(self.ended)

    @property
    def stuck(self) -> bool:
        """Whether operations are in flight and none ended in the last `stuck_seconds`."""
        return self.in_flight > 0 and self._clock() - self._progress_at > self._stuck_seconds

    def _run(
        self, key: bytes, group: ChunkGroup, memory: memoryview, *, rank: float, **options: bool
    ) -> None:
        if self._order is not None:
            self._order.begin(rank)
        began, late = self._clock(), None
        try:
            what = self._call(key, group, memory, **options)
        except LateFetch as error:
            what, late = GetOutcome.LATE, error
        except Exception:
            logger.exception("%s of %s", self._kind, key.hex())
            what = self._failed
        seconds = self._clock() - began
        self._after()
        # First: whoever takes the result may ask at once whether the tier is stuck.
        self._progress_at = self._clock()
        self.ended.append(Ended(key, what, seconds, late, group))
        self.on_ended()


class _DaemonThreads:
    """Daemon threads that run the jobs of one queue. A hanging thread does not keep the process alive.

    Jobs run in the order in which they were put, or if `ranked`, in that of their ranks.
    """

    def __init__(self, count: int, name: str, *, ranked: bool = False) -> None:
        # Of equal ranks, the earlier job comes first, and the end after all jobs.
        self._numbers = itertools.count()
        self._jobs: queue.SimpleQueue[_Job] | queue.PriorityQueue[_Job] = (
            queue.PriorityQueue() if ranked else queue.SimpleQueue()
        )
        self._threads = [Thread(self._run, f"kvferry-{name}-{number}") for number in range(count)]
        for thread in self._threads:
            thread.start()

    def put(self, job: Callable[[], None], rank: float = 0.0) -> None:
        self._jobs.put((rank, next(self._numbers), job))

    def close(self, ends: float) -> bool:
        for _ in self._threads:
            self._jobs.put((math.inf, next(self._numbers), None))
        for thread in self._threads:
            thread.join(max(ends - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            job()


class TierQueue:
    """A storage tier behind host memory, which background threads read and write.

    Only the engine's thread may use it. `ChunkCache` moves each chunk from `queued` to `held` when its write
    starts.

    Args:
        name: name of the tier, unique within an engine.
        readers, writers: number of threads for reads, and for writes.
        write_back: True to write only while host memory is rather full (`chunk_cache.WRITE_BACK_SHARE`).
        write_filter: decides which chunks are written; None to write all.
        refresh_seconds: time between two refreshes; None never to refresh the tier.
        start_threads: start a number of threads; None for daemon threads.
        tenants: read for tenants by weight; None to read in the order of the calls.

    Attributes:
        usage: usage of the tier's storage, as a background thread last read it.
        queued: chunks still to be written, the oldest first: (description, cold) by key.
        held: slots of the chunks that are being written, by key.
        filter: decides which chunks are written.
        lost: number of queued chunks that host memory evicted before their write started.
        read_seconds, write_seconds: seconds that each successful read and write took, since the last event
            about tiers, which clears these lists.
    """

    def __init__(
        self,
        tier: StorageTier,
        name: str,
        readers: int = 8,
        writers: int = 4,
        clock: Callable[[], float] = time.monotonic,
        *,
        write_back: bool = False,
        write_filter: WriteFilter[ChunkGroup] | None = None,
        refresh_seconds: float | None = REFRESH_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
        start_threads: Callable[[int, str], _Threads] | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        self.name, self.tier, self.usage, self.write_back = name, tier, StoreUsage(), write_back
        self.queued: OrderedDict[bytes, tuple[ChunkGroup, bool]] = OrderedDict()
        self.held: dict[bytes, Slot] = {}
        self.filter = WriteFilter[ChunkGroup]() if write_filter is None else write_filter
        self.lost = 0
        self.read_seconds, self.write_seconds = list[float](), list[float]()
        self._clock, self._usage_lock, self._refresh_seconds = clock, threading.Lock(), refresh_seconds
        # A few more than threads, so that these never wait for the engine's next step. The rest stays in
        # `queued`, where a chunk that host memory evicts costs no write.
        self._most_writes = 4 * writers
        self._uses: deque[Sequence[bytes]] = deque(maxlen=_MOST_USES)
        self._closing = threading.Event()
        start = start_threads or _DaemonThreads
        ranked = start_threads or partial(_DaemonThreads, ranked=tenants is not None)
        # Apart from each other: a mount may hang for writes only.
        self.reads = _Operations(
            tier.get,
            f"{name} tier: fetch",
            GetOutcome.IO_ERROR,
            ranked(readers, f"{name}-read"),
            clock,
            stuck_seconds,
            order=None if tenants is None else FairOrder(tenants),
        )
        # The usage may take long to read on a mount, so it is no part of the seconds of a write.
        self.writes = _Operations(
            tier.put,
            f"{name} tier: store",
            PutOutcome.IO_ERROR,
            start(writers, f"{name}-write"),
            clock,
            stuck_seconds,
            after=self._read_usage,
        )
        self._refresher = Thread(self._refresh, f"kvferry-{name}-refresh")
        if refresh_seconds is not None:
            self._refresher.start()

    def __len__(self) -> int:
        """Return the number of chunks that the tier is owed."""
        return len(self.queued) + len(self.held)

    def enqueue(
        self, key: bytes, group: ChunkGroup, *, cold: bool = False, prompt_tokens: int | None = None
    ) -> None:
        """Queue a chunk that is new in host memory for writing, unless the filter declines it.

        A chunk that the tier has or writes is not queued. `prompt_tokens` is as in `WriteFilter.admit`.
        """
        if self._lacks(key):
            for _ in self.filter.admit([(key, group)], prompt_tokens, self.usage.write_budget_left):
                self.queued[key] = group, cold

    def enqueue_used(self, keys: Sequence[bytes], prompt_tokens: int, held: Callable[[bytes], bool]) -> bool:
        """Count a use of a prompt's chunks, and queue those in host memory that are declined no more.

        `held` returns whether host memory has a chunk. Return whether any chunk was queued.
        """
        before = len(self.queued)
        for key, group in self.filter.use(keys, prompt_tokens, self.usage.write_budget_left):
            if self._lacks(key) and held(key):
                self.queued[key] = group, False
        return len(self.queued) > before

    def _lacks(self, key: bytes) -> bool:
        return not self.tier.read_only and key not in self.held and not self.tier.contains([key])[0]

    def known(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return a mask of the chunks that can be read from the tier now: all False while its reads hang."""
        return np.zeros(len(keys), np.bool_) if self.reads.stuck else self.tier.contains(keys)

    @property
    def can_write(self) -> bool:
        """Whether another write may start now: not too many are in flight, and none hang."""
        return self.writes.count < self._most_writes and not self.writes.stuck

    def mark_used(self, keys: Sequence[bytes]) -> None:
        """Mark chunks of a prompt, the first one first, as used. The refresh thread tells the tier later."""
        self._uses.append(keys)

    def done(self) -> list[Ended]:
        return [*self.reads.done(), *self.writes.done()]

    def close(self, patience_seconds: float) -> None:
        """Finish all queued reads and writes, end the threads, and close the tier.

        If that takes longer than `patience_seconds`, a warning is logged and the tier stays open.
        """
        self._closing.set()
        ends = time.monotonic() + patience_seconds
        # Writes first: their chunks would be lost, those of reads are still in the tier.
        idle = [threads.close(ends) for threads in (self.writes.threads, self.reads.threads)]
        if self._refresher.ident is not None:
            self._refresher.join(max(ends - time.monotonic(), 0))
        if all(idle) and not self._refresher.is_alive():
            self.tier.close()
        else:
            logger.warning(
                "%s tier: a read or write has not ended %g s after the engine began to stop, and is "
                "abandoned; see whether its storage hangs",
                self.name, patience_seconds,
            )  # fmt: skip

    def _read_usage(self) -> None:
        try:
            with self._usage_lock:  # so that an older result does not replace a newer one
                self.usage = self.tier.usage()
        except Exception:
            logger.exception("%s tier: what lies around", self.name)

    def _refresh(self) -> None:
        """Refresh the tier every `refresh_seconds` until the queue is closed, on a thread of its own."""
        while True:
            self._read_usage()
            closing = self._closing.wait(self._refresh_seconds)
            self._record_uses()
            if closing:
                return
            try:
                self.tier.refresh()
            except Exception:
                logger.exception("%s tier: refresh", self.name)

    def _record_uses(self) -> None:
        """Tell the tier which chunks were used since the last call, so that it evicts them late."""
        order: dict[bytes, None] = {}
        while self._uses:
            # The tier evicts in the order in which it is told, so the last chunk of a prompt comes first. A
            # chunk that several prompts used counts with the last of them.
            for key in reversed(self._uses.popleft()):
                order.pop(key, None)
                order[key] = None
        try:
            if order:
                self.tier.mark_used(list(order))
        except Exception:
            logger.exception("%s tier: what was used", self.name)
