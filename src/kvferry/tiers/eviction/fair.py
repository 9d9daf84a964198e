"""Fair eviction: one inner policy per tenant, and the tenant that is most above its fair share gives way.

    admit(key) ─▶ the policy of the key's tenant
    evict()    ─▶ the tenant with the highest level ─▶ its policy chooses the key

A tenant's *level* is its bytes per weight (`kvferry.tiers.tenants`). Chunks that are being filled count too,
so a tenant that stores many chunks at a time gives way before they are admitted. A tenant at or below the
mean level never loses a chunk to another tenant, even if all chunks of the others are pinned.

A change of a level takes logarithmic time: a heap has the levels, and outdated entries are skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import groupby

from kvferry.keys.tenant import tenant_of_key
from kvferry.tiers.eviction.base import EvictionPolicy
from kvferry.tiers.tenants import ABOVE, Tenants, TenantUsage

# Outdated entries that the heap may have beside one for each tenant and as many again.
_MOST_OUTDATED = 64


class FairEviction(EvictionPolicy):
    """Evicts chunks of the tenant that is most above its fair share, in the order of the tenant's own policy.

    A tenant without chunks is forgotten, with what its policy has learned.

    Args:
        policy: make the policy of one tenant for a capacity in bytes, which is that of the whole tier.
        tenants: weights and limits.
        evicted: number of evicted chunks by the tenant's label. Mutated; it may outlive this policy.
    """

    def __init__(
        self,
        capacity_bytes: int,
        policy: Callable[[int], EvictionPolicy],
        tenants: Tenants,
        evicted: Counter[str],
    ) -> None:
        super().__init__(capacity_bytes, [])
        self._make, self._tenants, self._evicted = policy, tenants, evicted
        self._policies: dict[bytes, EvictionPolicy] = {}
        self._admitted = 0
        self._expected: dict[bytes, int] = {}  # bytes of chunks that are being filled, by key
        # Bytes of each tenant, those being filled included, and by label; their sum, and that of the weights.
        self._used: dict[bytes, int] = {}
        self._used_by_label: Counter[str] = Counter()
        self._total, self._weights = 0, 0
        self._heap: list[tuple[float, bytes]] = []  # (negative level, tenant)
        self._storing: bytes | None = None  # tenant of the chunk that was expected last

    @property
    def used_bytes(self) -> int:
        return self._admitted

    def __len__(self) -> int:
        return sum(map(len, self._policies.values()))

    def __contains__(self, key: object) -> bool:
        policy = self._policies.get(tenant_of_key(key)) if isinstance(key, bytes) else None
        return policy is not None and key in policy

    def expect(self, key: bytes, size: int) -> None:
        self._storing = tenant_of_key(key)
        self._expected[key] = size
        self._charge(self._storing, size)

    def unexpect(self, key: bytes) -> None:
        self._charge(tenant_of_key(key), -self._expected.pop(key))

    @property
    def is_over_limit(self) -> bool:
        if (tenant := self._storing) is None:
            return False
        return self._tenants.is_over_limit(tenant, self._used.get(tenant, 0), self.capacity_bytes)

    def may_evict(self, keys: Iterable[bytes]) -> bool:
        tenants = set(map(tenant_of_key, keys)) - {self._storing}
        return all(self._level(tenant) > self._mean for tenant in tenants)

    @property
    def tenants(self) -> Mapping[str, TenantUsage]:
        return {
            label: TenantUsage(self._used_by_label[label], self._evicted[label])
            for label in self._tenants.labels
        }

    def make_newest(self, keys: Sequence[bytes]) -> None:
        for tenant, each in _by_tenant(keys):
            if (policy := self._policies.get(tenant)) is not None:
                policy.make_newest(each)

    def mark_used(self, keys: Sequence[bytes], tokens: int = 0) -> None:
        for tenant, each in _by_tenant(keys):
            if (policy := self._policies.get(tenant)) is not None:
                policy.mark_used(each, tokens)

    def make_cold(self, keys: Iterable[bytes]) -> None:
        for tenant, each in _by_tenant(keys):
            if (policy := self._policies.get(tenant)) is not None:
                policy.make_cold(each)

    def pin(self, key: bytes) -> None:
        self._policy_of(key).pin(key)

    def unpin(self, key: bytes) -> None:
        self._policy_of(key).unpin(key)

    def remove(self, key: bytes) -> int:
        size = self._policy_of(key).remove(key)
        self._count_evicted(tenant_of_key(key), size)
        return size

    def check_integrity(self) -> None:
        super().check_integrity()
        used = Counter[bytes]()
        for tenant, policy in self._policies.items():
            policy.check_integrity()
            used[tenant] = policy.used_bytes
            if not policy:
                raise AssertionError(f"tenant {tenant.hex()} has a policy and no chunk")
        if used.total() != self._admitted:
            raise AssertionError(f"{used.total()} bytes are admitted, {self._admitted} counted")
        for key, size in self._expected.items():
            used[tenant_of_key(key)] += size
        if used != self._used or used.total() != self._total:
            raise AssertionError("other bytes are counted of tenants than they use")
        if sum(self._tenants.of(tenant).weight for tenant in used) != self._weights:
            raise AssertionError(f"the weights of {len(used)} tenants are not {self._weights}")
        if not {(-self._level(tenant), tenant) for tenant in used} <= set(self._heap):
            raise AssertionError("the heap lacks the level of a tenant")

    @property
    def _mean(self) -> float:
        """Mean level, above which a tenant gives way to others."""
        return self._total / self._weights * ABOVE if self._weights else 0.0

    def _level(self, tenant: bytes) -> float:
        return self._used.get(tenant, 0) / self._tenants.of(tenant).weight

    def _charge(self, tenant: bytes, size: int) -> None:
        """Add to the bytes of a tenant, or subtract from them if `size` is negative."""
        if not size:
            return
        settings, before = self._tenants.of(tenant), self._used.get(tenant, 0)
        self._total += size
        self._used_by_label[settings.name] += size
        if now := before + size:
            self._used[tenant] = now
            heappush(self._heap, (-self._level(tenant), tenant))
        else:
            del self._used[tenant]
        self._weights += settings.weight * (bool(now) - bool(before))
        if len(self._heap) > 2 * len(self._used) + _MOST_OUTDATED:
            self._heap = [(-self._level(each), each) for each in self._used]
            heapify(self._heap)

    def _evict_highest(self) -> bytes | None:
        """Evict a key of the tenant with the highest level above the mean; None if all are pinned."""
        # Without a chunk to store, there is no tenant to protect from others.
        mean = -1.0 if self._storing is None else self._mean
        passed, key = list[tuple[float, bytes]](), None
        while key is None and self._heap:
            level, tenant = entry = heappop(self._heap)
            if level != -self._level(tenant) or tenant not in self._used:
                continue
            passed.append(entry)
            if -level <= mean:
                break
            key = self._evict_of(tenant)
        for entry in passed:
            heappush(self._heap, entry)
        return key

    def _evict_of(self, tenant: bytes) -> bytes | None:
        if (policy := self._policies.get(tenant)) is None:
            return None
        before = policy.used_bytes
        if (key := policy.evict()) is not None:
            self._count_evicted(tenant, before - policy.used_bytes)
        return key

    def _count_evicted(self, tenant: bytes, size: int) -> None:
        if not self._policies[tenant]:
            del self._policies[tenant]
        self._admitted -= size
        self._evicted[self._tenants.of(tenant).name] += 1
        self._charge(tenant, -size)

    def _policy_of(self, key: bytes) -> EvictionPolicy:
        if (policy := self._policies.get(tenant_of_key(key))) is None:
            raise KeyError(key)
        return policy

    def _touch(self, key: bytes) -> None:
        self._policy_of(key).touch(key)

    def _evict_warm(self) -> bytes | None:
        if not self.is_over_limit and (key := self._evict_highest()) is not None:
            return key
        return None if self._storing is None else self._evict_of(self._storing)

    def _place(self, key: bytes, size: int) -> None:
        self._admit((key,), size, cold=False)

    def _place_all(self, keys: Iterable[bytes], size: int) -> None:
        self._admit(keys, size, cold=False)

    def _place_cold(self, keys: Sequence[bytes], size: int) -> None:
        self._admit(keys, size, cold=True)

    def _admit(self, keys: Iterable[bytes], size: int, *, cold: bool) -> None:
        for tenant, each in _by_tenant(keys):
            if (policy := self._policies.get(tenant)) is None:
                policy = self._policies[tenant] = self._make(self.capacity_bytes)
            policy.admit_all(each, size, cold=cold)
            self._admitted += size * len(each)
            # Chunks that were expected count already.
            self._charge(tenant, sum([size - self._expected.pop(key, 0) for key in each]))


def _by_tenant(keys: Iterable[bytes]) -> Iterable[tuple[bytes, list[bytes]]]:
    """Group keys by tenant, each in order. The keys of a request have one tenant."""
    found: dict[bytes, list[bytes]] = {}
    for tenant, each in groupby(keys, tenant_of_key):
        found.setdefault(tenant, []).extend(each)
    return found.items()
