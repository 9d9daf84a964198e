"""Retained chunks of several tenants over a real host tier."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvferry.cache.retained import RetainedChunks
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.host.tier import HostTier
from kvferry.tiers.tenants import Tenant, Tenants

PAGE, CHUNKS = 4096, 40


def key(number):
    return number.to_bytes(30, "big") + b"\0\0"


def keys(*numbers):
    return [key(number) for number in numbers]


def add(host, numbers):
    for number in numbers:
        host.commit(host.reserve(key(number), 0))


def full(share=0.25, policy="lru"):
    """Host memory that is full of chunks 0 to 39, a quarter of which may be retained: (host, retained)."""
    host = HostTier(CHUNKS * PAGE, [PAGE], EVICTION_POLICIES[policy])
    add(host, range(CHUNKS))
    return host, RetainedChunks(host, share)


def here(host, *numbers):
    return [number for number in numbers if host.contains([key(number)])[0]]


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_retained_chunks_are_not_evicted_until_their_time_has_passed(policy):
    host, retained = full(policy=policy)
    assert retained.retain(b"a", keys(0, 1, 2), until=10) == 3
    add(host, range(100, 200))
    assert here(host, 0, 1, 2, 3) == [0, 1, 2]
    retained.expire(now=9.9)
    add(host, range(200, 300))
    assert here(host, 0, 1, 2) == [0, 1, 2]
    retained.expire(now=10)
    assert (len(retained), retained.used_bytes) == (0, 0)
    add(host, range(300, 400))
    assert here(host, 0, 1, 2) == []
    host.check_integrity()


def test_all_retained_chunks_stay_within_the_share():
    host, retained = full()
    assert retained.retain(b"a", keys(*range(20)), until=10) == 10
    add(host, range(100, 200))
    assert here(host, *range(20)) == [*range(10)]
    retained.check_integrity()


def test_nothing_is_retained_without_a_share():
    host, retained = full(share=0.0)
    assert retained.retain(b"a", keys(0), until=10) == 0
    add(host, range(100, 200))
    assert here(host, 0) == []


def test_a_tenant_has_its_equal_part_although_another_one_retained_everything_before():
    host, retained = full()
    retained.retain(b"a", keys(*range(10)), until=10)
    assert retained.retain(b"b", keys(*range(20, 40)), until=10) == 5
    add(host, range(100, 200))
    assert here(host, *range(10)) == [0, 1, 2, 3, 4]
    assert here(host, *range(20, 40)) == [20, 21, 22, 23, 24]


def test_tenants_divide_the_share_by_weight():
    host, _ = full()
    retained = RetainedChunks(host, 0.25, Tenants({b"a": Tenant("a", 4)}))
    retained.retain(b"b", keys(*range(20, 40)), until=10)
    assert retained.retain(b"a", keys(*range(10)), until=10) == 8
    assert retained.retain(b"b", keys(*range(20, 40)), until=10) == 2
    retained.check_integrity()


def test_no_priority_takes_from_another_tenants_part():
    host, retained = full()
    retained.retain(b"b", keys(*range(20, 25)), until=10)
    for priority in range(10):
        retained.retain(b"a", keys(*range(20)), until=1e6, priority=10 * priority)
    add(host, range(100, 200))
    assert here(host, *range(20, 25)) == [20, 21, 22, 23, 24]


def test_the_lowest_priority_of_a_tenant_gives_way_and_equal_ones_stay():
    host, retained = full()
    retained.retain(b"a", keys(0, 1, 2, 3), until=50, priority=1)
    retained.retain(b"a", keys(4, 5, 6), until=20, priority=2)
    retained.retain(b"a", keys(7, 8, 9), until=30, priority=2)
    assert retained.retain(b"a", keys(10, 11, 12, 13, 14), until=25, priority=2) == 4
    add(host, range(100, 200))
    assert here(host, *range(15)) == [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert retained.retain(b"a", keys(*here(host, *range(100, 200))[:1]), until=99, priority=0) == 0


def test_chunks_of_equal_rank_give_way_from_the_last_to_the_first():
    host, retained = full()
    for number in range(10):  # one by one, as prefetches retain them
        retained.retain(b"a", keys(number), until=10)
    retained.retain(b"b", keys(*range(20, 40)), until=10)
    add(host, range(100, 200))
    assert here(host, *range(10)) == [0, 1, 2, 3, 4]


def test_of_chunks_that_expire_together_the_first_counts_as_the_latest_used():
    host, retained = full()
    retained.retain(b"a", keys(*range(5)), until=10)
    retained.expire(now=10)
    add(host, range(100, 100 + CHUNKS - 2))
    assert here(host, *range(5)) == [0, 1]


def test_a_chunk_keeps_the_later_end_and_the_higher_priority():
    host, retained = full()
    retained.retain(b"a", keys(0), until=50, priority=3)
    retained.retain(b"a", keys(0), until=20, priority=7)
    retained.expire(now=20)
    assert len(retained) == 1
    retained.retain(b"a", keys(*range(1, 20)), until=99, priority=6)
    retained.expire(now=49)
    assert here(host, 0) == [0]
    assert key(0) in retained._chunks
    retained.expire(now=50)
    assert key(0) not in retained._chunks


def test_chunks_are_given_up_by_key_by_tenant_and_all():
    _, retained = full()
    retained.retain(b"a", keys(0, 1, 2), until=10)
    retained.retain(b"b", keys(3, 4), until=10)
    retained.release(keys(0, 99))
    assert len(retained) == 4
    retained.release_tenant(b"a")
    assert len(retained) == 2
    retained.clear()
    assert (len(retained), retained.used_bytes) == (0, 0)


def test_hints_that_are_repeated_take_no_memory():
    _, retained = full()
    for now in range(5000):
        retained.retain(b"a", keys(0, 1), until=now)
    assert len(retained._ends) < 1100
    assert len(retained._ranked[b"a"]) < 1100


_RETAIN = st.tuples(
    st.just("retain"), st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 30), st.integers(1, 12),
    st.integers(0, 20), st.integers(0, 3),
)  # fmt: skip
_OTHER = st.tuples(st.sampled_from(["expire", "release", "tenant", "add"]), st.integers(0, 30))


@given(st.lists(_RETAIN | _OTHER, max_size=30))
def test_whatever_is_hinted_the_share_holds_and_every_tenant_can_have_its_part(work):
    host, retained = full()
    for number, (what, *values) in enumerate(work):
        if what == "retain":
            tenant, first, count, until, priority = values
            # Tenants share no keys.
            own = [key(at)[:-2] + tenant + b"\0" for at in range(first, first + count)]
            for one in own:
                if (slot := host.reserve(one, 0)) is not None:
                    host.commit(slot)
            retained.retain(tenant, own, until, priority)
            part = retained.most_bytes // len(retained._bytes or "a")
            wanted = min(int(host.contains(own).sum()) * PAGE, part // PAGE * PAGE)
            held = sum(one in retained._chunks for one in own) * PAGE
            assert held >= min(wanted, PAGE) or retained._bytes[tenant] >= part // PAGE * PAGE
        elif what == "expire":
            retained.expire(values[0])
        elif what == "release":
            retained.release(list(retained._chunks)[: values[0]])
        elif what == "tenant":
            retained.release_tenant((b"a", b"b", b"c")[values[0] % 3])
        else:
            add(host, range(1000 * (number + 1), 1000 * (number + 1) + values[0]))
        retained.check_integrity()
        host.check_integrity()
    retained.clear()
    assert host.holds == 0
