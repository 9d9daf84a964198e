"""Prefetches: chunks on their way from slow tiers to host memory, before a request needs them.

    searching ─▶ a few chunks at a time: read, retained for a while ─▶ … ─▶ ended

Prefetches of different tenants take turns, and only a few reads are under way, so that a load which needs the
same tier waits for those at most.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.cache.chunk_cache import Fetch, PromptChunk
from kvferry.cache.retained import HoldingTier, RetainedChunks
from kvferry.common.units import format_bytes
from kvferry.tiers.storage_tier import KeySearch

MOST_READS = 16
"""Maximum number of chunks that are read at a time for all prefetches."""

MOST_PER_STEP = 64
"""Maximum number of chunks of a prefetch that a step looks at."""

MOST_WAITING = 16
"""Maximum number of prefetches of a tenant that have not ended."""

KEPT_SECONDS = 30.0
"""Time for which a prefetched chunk is retained, for a request that needs it."""

_DEADLINE_SECONDS = 30.0


class PrefetchedTier(HoldingTier, Protocol):
    """Host memory, as far as prefetches need it."""

    @property
    def chunk_bytes(self) -> tuple[int, ...]: ...

    def contains(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]: ...


class FetchingCache(Protocol):
    """`ChunkCache` as far as prefetches need it, or a simulated one."""

    @property
    def host(self) -> PrefetchedTier: ...

    def fetch(self, wanted_chunks: Iterable[PromptChunk]) -> Fetch: ...

    def cancel(self, fetch: Fetch) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class Prefetch:
    """The chunks to bring to host memory for one tenant.

    Attributes:
        find: returns the chunks that some tier has, in the order of the prompt. Called after the searches.
        searches: searches of other engines for the chunks.
        wanted, ready: number of chunks to bring, and of those that are in host memory.
        why: reason why it ended before all were ready; else empty.
        deadline: monotonic time at which the present reads must have ended.
    """

    tenant: bytes
    find: Callable[[], Sequence[PromptChunk]]
    searches: Sequence[KeySearch] = ()
    wanted: int = 0
    ready: int = 0
    why: str = ""
    deadline: float = 0.0
    # None until the searches have ended.
    remaining: deque[PromptChunk] | None = None
    fetch: Fetch | None = None

    @property
    def over(self) -> bool:
        return bool(self.why) or (self.remaining is not None and not self.remaining and self.fetch is None)


class Prefetches:
    """The prefetches of all tenants. Only the engine's thread calls it.

    Attributes:
        waiting: prefetches that have not ended, by tenant. The first of each tenant is under way.
        ended: prefetches that have ended since the caller last cleared it.
    """

    def __init__(
        self, cache: FetchingCache, retained: RetainedChunks, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.waiting: OrderedDict[bytes, deque[Prefetch]] = OrderedDict()
        self.ended: list[Prefetch] = []
        self._cache, self._retained, self._clock = cache, retained, clock

    def begin(self, prefetch: Prefetch) -> None:
        """Begin a prefetch, after those of its tenant that have not ended. `poll` continues it."""
        queue = self.waiting.setdefault(prefetch.tenant, deque())
        if len(queue) >= MOST_WAITING:
            prefetch.why = f"{MOST_WAITING} earlier prefetches of the tenant have not ended"
            self.ended.append(prefetch)
            return
        queue.append(prefetch)

    def poll(self) -> None:
        """Take what has been read, and read more. Call this after `ChunkCache.poll`."""
        room = MOST_READS - sum([self._take(queue[0]) for queue in self.waiting.values()])
        for tenant in list(self.waiting):
            queue = self.waiting[tenant]
            if room > 0 and (begun := self._begin_reads(queue[0], room)):
                room -= begun
                self.waiting.move_to_end(tenant)  # the others go first in the next step
            while queue and queue[0].over:
                self.ended.append(queue.popleft())
            if not queue:
                del self.waiting[tenant]

    def clear(self) -> None:
        """End all prefetches, because the cache is reset."""
        for queue in self.waiting.values():
            for prefetch in queue:
                self._stop(prefetch, "the cache was reset")
                self.ended.append(prefetch)
        self.waiting.clear()

    def _take(self, prefetch: Prefetch) -> int:
        """Take the chunks that have been read. Return how many are still being read."""
        fetch = prefetch.fetch
        if fetch is None:
            return 0
        for chunk, slot in fetch.take():
            self._keep(prefetch, chunk)
            self._cache.host.close(slot)
        if fetch.over:
            prefetch.fetch, prefetch.why = None, fetch.failure or ""
        elif self._clock() > prefetch.deadline:
            self._stop(prefetch, f"not read within {_DEADLINE_SECONDS:g} s")
        return 0 if prefetch.fetch is None else len(fetch.reading) + len(fetch.remaining)

    def _begin_reads(self, prefetch: Prefetch, most: int) -> int:
        """Read the next chunks, at most so many. Return how many are read now."""
        if prefetch.remaining is None:
            self._find(prefetch)
        if prefetch.fetch is not None or not prefetch.remaining or prefetch.why:
            return 0
        host, room, batch = self._cache.host, self._retained.room(prefetch.tenant), list[PromptChunk]()
        for chunk in list(islice(prefetch.remaining, MOST_PER_STEP)):
            if host.contains([chunk.key])[0]:
                self._keep(prefetch, chunk)
            elif len(batch) < most and (room := room - host.chunk_bytes[chunk.group]) >= 0:
                batch.append(chunk)
            else:
                break
            prefetch.remaining.popleft()
        if batch:
            prefetch.fetch = self._cache.fetch(batch)
            prefetch.deadline = self._clock() + _DEADLINE_SECONDS
        elif room < 0:
            limit = format_bytes(self._retained.most_bytes)
            prefetch.why = f"its part of the {limit} that hints may take is full (hint_share)"
        return len(batch)

    def _find(self, prefetch: Prefetch) -> None:
        if all(search.over for search in prefetch.searches):
            prefetch.remaining = deque(prefetch.find())
            prefetch.wanted = len(prefetch.remaining)

    def _keep(self, prefetch: Prefetch, chunk: PromptChunk) -> None:
        """Retain a chunk in host memory, unless there is no room: then it stays as any other does."""
        self._retained.retain(prefetch.tenant, [chunk.key], self._clock() + KEPT_SECONDS)
        prefetch.ready += 1

    def _stop(self, prefetch: Prefetch, why: str) -> None:
        if prefetch.fetch is not None:
            self._cache.cancel(prefetch.fetch)
            prefetch.fetch = None
        prefetch.why = why
