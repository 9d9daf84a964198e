"""The chunks in host memory that are retained for a time, because of hints, within a share for all tenants.

A tenant that retains chunks can always have its part of the share, by its weight among those that do, and
more while others leave room. So no tenant's hints take from another's part, and all of them together take no
more than the share.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple, Protocol

from kvferry.tiers.host.tier import Slot
from kvferry.tiers.tenants import Tenants

_MOST_STALE = 1024
"""Number of outdated entries that a heap may have, beside as many as there are chunks."""


class HoldingTier(Protocol):
    """Host memory, as far as hints need it: `HostTier`, or a simulated one. The methods are those of it."""

    @property
    def capacity_bytes(self) -> int: ...

    def hold(self, key: bytes) -> Slot | None: ...

    def close(self, slot: Slot) -> None: ...

    def make_cold(self, keys: Sequence[bytes]) -> None: ...


class _Rank(NamedTuple):
    """The order in which the chunks of a tenant give way to others of it, the lowest first."""

    priority: int
    until: float
    place: int  # the later it was retained, the lower


class _Retained(NamedTuple):
    slot: Slot
    tenant: bytes
    rank: _Rank


class RetainedChunks:
    """The retained chunks of all tenants. Only the engine's thread calls it.

    A chunk is held in host memory, so it is not evicted. When it is given up it counts as just used.

    Attributes:
        most_bytes: maximum bytes of all retained chunks.
        used_bytes: bytes of all retained chunks.
    """

    def __init__(self, host: HoldingTier, share: float, tenants: Tenants | None = None) -> None:
        """Begin without chunks. Without `tenants`, all have the same weight."""
        self.most_bytes, self.used_bytes = int(share * host.capacity_bytes), 0
        self._host, self._tenants = host, tenants or Tenants({})
        self._chunks: dict[bytes, _Retained] = {}
        self._bytes = Counter[bytes]()
        self._places = count()
        # Heaps with entries of chunks that have been given up or have another rank since.
        self._ranked: dict[bytes, list[tuple[_Rank, bytes]]] = {}
        self._ends: list[tuple[float, int, bytes]] = []  # (until, place, key)

    def __len__(self) -> int:
        return len(self._chunks)

    def retain(self, tenant: bytes, keys: Sequence[bytes], until: float, priority: int = 0) -> int:
        """Retain those of a tenant's chunks that are in host memory. Return how many are retained now.

        A chunk that is retained already keeps the later end and the higher priority. Chunks of the tenant
        with a lower priority give way. `keys` are in the order of the prompt: the last ones are left out.
        """
        retained = 0
        for key in keys:
            rank = _Rank(priority, until, -next(self._places))
            if (old := self._chunks.get(key)) is not None:
                rank = _Rank(max(priority, old.rank.priority), max(until, old.rank.until), rank.place)
                self._add(key, _Retained(old.slot, tenant, rank))
                retained += 1
            elif (slot := self._host.hold(key)) is not None:
                if not self._make_room(tenant, slot.size, priority):
                    self._host.close(slot)
                    break
                self.used_bytes += slot.size
                self._bytes[tenant] += slot.size
                self._add(key, _Retained(slot, tenant, rank))
                retained += 1
        return retained

    def room(self, tenant: bytes) -> int:
        """Return how many bytes a tenant may retain beside those that it retains now."""
        return int(max(self._part_of(tenant) - self._bytes[tenant], self.most_bytes - self.used_bytes))

    def expire(self, now: float) -> None:
        """Give up the chunks whose time has passed."""
        # By place, so that of a prompt the first chunk counts as the latest used.
        while self._ends and self._ends[0][0] <= now:
            until, _, key = heapq.heappop(self._ends)
            if key in self._chunks and self._chunks[key].rank.until == until:
                self._give_up(key)

    def release(self, keys: Iterable[bytes]) -> None:
        """Give up those of the chunks that are retained."""
        for key in keys:
            if key in self._chunks:
                self._give_up(key)

    def release_tenant(self, tenant: bytes) -> None:
        self.release([key for key, one in self._chunks.items() if one.tenant == tenant])

    def clear(self) -> None:
        """Give up all chunks, before host memory is cleared."""
        self.release(list(self._chunks))

    def check_integrity(self) -> None:
        """Check that the counts agree with the chunks, or raise AssertionError: O(chunks)."""
        sizes = Counter[bytes]()
        for one in self._chunks.values():
            sizes[one.tenant] += one.slot.size
        if +self._bytes != sizes or self.used_bytes != sizes.total() or self.used_bytes > self.most_bytes:
            raise AssertionError(f"{sizes.total()} bytes are retained, counted {self.used_bytes}")

    def _part_of(self, tenant: bytes) -> float:
        weight = self._tenants.of(tenant).weight
        weights = sum([self._tenants.of(each).weight for each in self._bytes if each != tenant])
        return self.most_bytes * weight / (weights + weight)

    def _make_room(self, tenant: bytes, size: int, priority: int) -> bool:
        """Give up chunks for a new one of a priority. Return False if the tenant must do without it."""
        if size > self.most_bytes:
            return False
        while self.used_bytes + size > self.most_bytes:
            owner = tenant
            if self._bytes[tenant] + size <= self._part_of(tenant):
                # Another tenant has more than its part.
                owner = max(self._bytes, key=lambda each: self._bytes[each] / self._tenants.of(each).weight)
            lowest, key = self._lowest(owner)
            # The latest chunks of a tenant are evicted last anyway, so they take from no older ones.
            if owner == tenant and not (key and lowest.priority < priority):
                return False
            self._give_up(key)
        return True

    def _lowest(self, tenant: bytes) -> tuple[_Rank, bytes]:
        """Return the rank and the key of a tenant's chunk with the lowest rank; no key if it has none."""
        ranked = self._ranked.get(tenant, [])
        while ranked:
            rank, key = ranked[0]
            if key in self._chunks and self._chunks[key].rank == rank:
                return rank, key
            heapq.heappop(ranked)
        return _Rank(0, 0.0, 0), b""

    def _add(self, key: bytes, one: _Retained) -> None:
        self._chunks[key] = one
        ranked = self._ranked.setdefault(one.tenant, [])
        heapq.heappush(ranked, (one.rank, key))
        heapq.heappush(self._ends, (one.rank.until, one.rank.place, key))
        # A chunk that is retained again and again leaves an entry each time.
        most = 2 * len(self._chunks) + _MOST_STALE
        if len(ranked) > most:
            ranked[:] = sorted(
                (each.rank, at) for at, each in self._chunks.items() if each.tenant == one.tenant
            )
        if len(self._ends) > most:
            self._ends[:] = sorted(
                (each.rank.until, each.rank.place, at) for at, each in self._chunks.items()
            )

    def _give_up(self, key: bytes) -> None:
        slot, tenant, _ = self._chunks.pop(key)
        self.used_bytes -= slot.size
        self._bytes[tenant] -= slot.size
        if not self._bytes[tenant]:
            del self._bytes[tenant], self._ranked[tenant]
        self._host.close(slot)
