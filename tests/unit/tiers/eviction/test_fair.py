"""Fair eviction against a slow model of it, and what a tenant may lose to a flood of another one."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry.keys.tenant import NOBODY, key_of_chunk, tenant_of, tenant_of_key
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.eviction.fair import FairEviction
from kvferry.tiers.host.tier import HostTier
from kvferry.tiers.tenants import OTHERS, Tenant, Tenants, TenantUsage
from support.examples import examples

PAGE = 4096
A, B, C = (tenant_of(name, None) for name in ("a", "b", "c"))
WEIGHTS = Tenants({A: Tenant("a", 3), B: Tenant("b", 1, 0.5)}, Tenant(weight=2))


def key_of(number, tenant=NOBODY):
    return key_of_chunk(number.to_bytes(32, "big"), tenant, 0)[:-1] + bytes((number % 256,))


def fair(capacity, tenants=WEIGHTS, policy="lru"):
    return FairEviction(capacity, EVICTION_POLICIES[policy], tenants, Counter())


def host_of(chunks, tenants=None, policy="lru", sizes=(PAGE,)):
    make = EVICTION_POLICIES[policy]
    if tenants is not None:
        make = partial(FairEviction, policy=make, tenants=tenants, evicted=Counter())
    return HostTier(chunks * PAGE, sizes, make)


def store(host, keys, group=0):
    for key in keys:
        if (slot := host.reserve(key, group)) is not None:
            host.commit(slot)
    host.check_integrity()


def kept(host, tenant):
    return sum(tenant_of_key(key) == tenant for key in host.readable_keys())


KEYS = [key_of(number, tenant) for tenant in (A, B, C, NOBODY) for number in range(8)]


class Comparison(RuleBasedStateMachine):
    """The policy beside a list of (key, size), oldest first, whose levels are added up for each eviction."""

    @initialize(capacity=st.integers(20, 100))
    def make(self, capacity):
        self.policy, self.capacity = fair(capacity), capacity
        self.entries, self.expected, self.pinned = [], {}, set()
        self.evicted, self.storing = Counter(), None

    def used(self):
        found = Counter()
        for key, size in (*self.entries, *self.expected.items()):
            found[tenant_of_key(key)] += size
        return found

    def expected_victim(self):
        used = self.used()
        storing, weight = self.storing, {tenant: WEIGHTS.of(tenant).weight for tenant in used}
        loose = [key for key, _ in self.entries if key not in self.pinned]
        first = {}
        for key in loose:
            first.setdefault(tenant_of_key(key), key)
        over = storing is not None and used[storing] > WEIGHTS.of(storing).limit * self.capacity
        mean = sum(used.values()) / sum(weight.values()) if used else 0
        levels = {tenant: used[tenant] / weight[tenant] for tenant in first}
        above = {tenant for tenant in first if storing is None or levels[tenant] > mean * (1 + 1e-9)}
        if not over and above:
            highest = max(levels[tenant] for tenant in above)
            return {first[tenant] for tenant in above if levels[tenant] == highest}
        return {first.get(storing)}

    def evict(self):
        victims = self.expected_victim()
        key = self.policy.evict()
        assert key in victims
        if key is not None:
            self.evicted[WEIGHTS.of(tenant_of_key(key)).name] += 1
            self.entries = [entry for entry in self.entries if entry[0] != key]
        return key

    @rule(key=st.sampled_from(KEYS), size=st.integers(1, 20))
    def expect(self, key, size):
        if key in self.policy or key in self.expected:
            return
        self.policy.expect(key, size)
        self.expected[key], self.storing = size, tenant_of_key(key)
        limit = WEIGHTS.of(self.storing).limit * self.capacity
        while sum(size for _, size in self.entries) + size > self.capacity or self.policy.is_over_limit:
            assert self.policy.is_over_limit == (self.used()[self.storing] > limit)
            if self.evict() is None:
                self.policy.unexpect(key)
                del self.expected[key]
                return

    @rule(data=st.data(), stored=st.booleans())
    def end(self, data, stored):
        if not self.expected:
            return
        key = data.draw(st.sampled_from(sorted(self.expected)))
        size = self.expected[key]
        if not stored or size > self.capacity - self.policy.used_bytes:
            self.policy.unexpect(key)
        else:
            self.policy.admit(key, size)
            self.entries.append((key, size))
        del self.expected[key]

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def make_newest(self, keys):
        self.policy.make_newest(keys)
        for key in keys:
            if (entry := self.entry(key)) is not None and key not in self.pinned:
                self.entries.remove(entry)
                self.entries.append(entry)

    @rule(key=st.sampled_from(KEYS))
    def pin_or_unpin(self, key):
        if (entry := self.entry(key)) is None:
            with pytest.raises(KeyError):
                self.policy.pin(key)
        elif key in self.pinned:
            self.policy.unpin(key)
            self.pinned.discard(key)
            self.entries.remove(entry)
            self.entries.append(entry)
        else:
            self.policy.pin(key)
            self.pinned.add(key)

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key):
        if (entry := self.entry(key)) is not None:
            assert self.policy.remove(key) == entry[1]
            self.entries.remove(entry)
            self.pinned.discard(key)
            self.evicted[WEIGHTS.of(tenant_of_key(key)).name] += 1

    @rule()
    def evict_one(self):
        self.evict()

    def entry(self, key):
        return next((entry for entry in self.entries if entry[0] == key), None)

    @invariant()
    def same(self):
        self.policy.check_integrity()
        assert len(self.policy) == len(self.entries)
        assert all(key in self.policy for key, _ in self.entries)
        used = Counter()
        for tenant, size in self.used().items():
            used[WEIGHTS.of(tenant).name] += size
        assert self.policy.tenants == {
            label: TenantUsage(used[label], self.evicted[label]) for label in ("a", "b", OTHERS)
        }


TestComparison = Comparison.TestCase
TestComparison.settings = examples(60)


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
@examples(40)
@given(data=st.data())
def test_a_flood_takes_no_chunk_of_a_tenant_within_its_share(policy, data):
    """Whatever tenants have stored, in whatever order: what a flood leaves is the share, or all there was."""
    weights = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
    names = [tenant_of(f"tenant {at}", None) for at in range(len(weights))]
    tenants = Tenants(
        {name: Tenant(f"t{at}", weight) for at, (name, weight) in enumerate(zip(names, weights, strict=True))}
    )
    capacity = 60
    host = host_of(capacity, tenants, policy)
    counts = data.draw(st.lists(st.integers(1, 60), min_size=len(names), max_size=len(names)))
    for at, (name, count) in enumerate(zip(names, counts, strict=True)):
        store(host, [key_of(1000 * at + n, name) for n in range(count)])
    before = {name: kept(host, name) for name in names}
    held = [host.hold(key) for key in data.draw(st.lists(st.sampled_from(host.readable_keys()), unique=True))]
    store(host, [key_of(9000 + n, names[0]) for n in range(2 * capacity)])
    for slot in held:
        host.close(slot)
    for name, weight in zip(names[1:], weights[1:], strict=True):
        share = capacity * weight / sum(weights)
        assert kept(host, name) >= min(before[name], int(share)), (policy, weights, counts)


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_without_shares_the_same_flood_takes_all(policy):
    left = {}
    for tenants in (WEIGHTS, None):
        host = host_of(40, tenants, policy)
        store(host, [key_of(number, A) for number in range(20)])
        store(host, [key_of(100 + number, C) for number in range(400)])
        left[tenants is not None] = kept(host, A)
    assert left == {True: 20, False: 0}


def test_chunks_that_are_being_filled_count_for_their_tenant():
    host = host_of(20, Tenants({}))
    store(host, [key_of(number, A) for number in range(10)])
    store(host, [key_of(100 + number, B) for number in range(10)])
    slots = [host.reserve(key_of(200 + number, B), 0) for number in range(15)]
    assert kept(host, A) == 10
    assert [slot is None for slot in slots] == [False] * 10 + [True] * 5, "B fills all of its share"
    for slot in slots[:10]:
        host.commit(slot)
    host.check_integrity()


def test_a_tenant_uses_what_others_leave_and_gives_it_back_when_they_come():
    host = host_of(20, Tenants({}))
    store(host, [key_of(number, A) for number in range(40)])
    assert kept(host, A) == 20
    store(host, [key_of(100 + number, B) for number in range(40)])
    assert (kept(host, A), kept(host, B)) == (10, 10)


def test_a_tenant_over_its_limit_evicts_its_own_although_there_is_room():
    host = host_of(20, WEIGHTS)
    store(host, [key_of(number, B) for number in range(15)])
    assert sorted(host.readable_keys()) == sorted(key_of(number, B) for number in range(5, 15))
    assert host.counters.evicted == 5
    held = [host.hold(key) for key in host.readable_keys()]
    assert host.reserve(key_of(20, B), 0) is None, "all of its own are in use, and it gets no more"
    assert host.reserve(key_of(20, A), 0) is not None
    assert len(held) == 10


def test_a_failed_and_an_abandoned_fill_count_no_longer():
    host = host_of(20, WEIGHTS)
    failed, abandoned = host.reserve(key_of(1, A), 0), host.reserve(key_of(2, A), 0)
    assert host.tenants["a"].used_bytes == 2 * PAGE
    host.abort(failed)
    assert host.tenants["a"].used_bytes == PAGE
    host.abandon(abandoned)
    assert host.tenants["a"].used_bytes == 0
    host.abort(abandoned)
    host.check_integrity()


def test_a_fill_of_before_a_reset_does_not_count_after_it():
    host = host_of(20, WEIGHTS)
    slot = host.reserve(key_of(1, A), 0)
    host.clear()
    assert host.tenants["a"] == TenantUsage()
    assert not host.commit(slot)
    host.check_integrity()


def test_a_slab_with_chunks_within_a_share_is_emptied_only_if_no_other_can_be():
    host = host_of(256, Tenants({}), sizes=(PAGE, 4 * PAGE))
    store(host, [key_of(0, A), *(key_of(number, B) for number in range(1, 256))])
    slabs = {}
    for key in host.readable_keys():
        slabs.setdefault(host.peek(key).offset // host._slabs.slab_bytes, []).append(key)
    ours = next(keys for keys in slabs.values() if key_of(0, A) in keys)
    other = next(keys for keys in slabs.values() if keys is not ours)
    # Free slots that add up to a slab, most of them in the slab with A's chunk: it is the emptiest.
    for key in [*[key for key in ours if key != key_of(0, A)], other[0]]:
        host.evict(key)
    store(host, [key_of(1000, B)], group=1)
    assert host.contains([key_of(0, A), key_of(1000, B)]).all()
    assert not host.contains(other).any()
    # No other slab can be emptied.
    host.evict(next(key for key in host.readable_keys() if key not in (key_of(0, A), key_of(1000, B))))
    for key in host.readable_keys():
        if key != key_of(0, A):
            host.hold(key)
    assert host.reserve(key_of(2000, B), 1) is not None
    assert not host.contains([key_of(0, A)])[0]


def test_one_tenant_is_evicted_as_without_shares():
    hosts = [host_of(20, tenants) for tenants in (WEIGHTS, None)]
    for host in hosts:
        store(host, [key_of(number) for number in range(15)])
        host.mark_used([key_of(number) for number in range(5)], [key_of(7)])
        store(host, [key_of(100 + number) for number in range(12)])
    assert hosts[0].readable_keys() == hosts[1].readable_keys()


@pytest.mark.parametrize("count", [3, 300])
def test_the_heap_of_levels_stays_in_proportion_to_the_tenants(count):
    policy = fair(1 << 20)
    for number in range(5000):
        key = key_of(number, (number % count).to_bytes(6, "big"))
        policy.expect(key, 1)
        policy.admit(key, 1)
        if number % 2:
            policy.evict()
    assert len(policy._heap) <= 2 * count + 64 + 1
    policy.check_integrity()
