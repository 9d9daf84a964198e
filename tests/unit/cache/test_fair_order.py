"""Reads of several tenants: who is read for next, and that no tenant waits for all of another's reads."""

from __future__ import annotations

import threading
from heapq import heappop, heappush

import pytest
from hypothesis import given, strategies as st

from kvferry.cache.fair_order import FairOrder
from kvferry.cache.tier_queue import TierQueue
from kvferry.keys.tenant import NOBODY, key_of_chunk, tenant_of, tenant_of_key
from kvferry.tiers.names import GetOutcome
from kvferry.tiers.tenants import Tenant, Tenants
from support.examples import examples
from support.slow_tiers import FakeTier
from support.stores import GROUP, body
from support.waiting import wait_for

A, B, C = (tenant_of(name, None) for name in ("a", "b", "c"))
WEIGHTS = Tenants({A: Tenant("a", 3), B: Tenant("b", 1)}, Tenant(weight=2))


@examples(100)
@given(st.data())
def test_tenants_with_much_to_read_are_read_for_by_weight(data):
    """Goyal et al., theorem 1: what two get per weight differs by one operation of each at most."""
    order, largest = FairOrder(WEIGHTS), 20
    sizes = st.lists(st.integers(1, largest), min_size=30, max_size=30)
    queue: list[tuple[float, int, bytes, int]] = []
    for tenant in data.draw(st.permutations((A, B, C))):
        for size in data.draw(sizes):
            heappush(queue, (order.rank(tenant, size), len(queue), tenant, size))
    got, left = dict.fromkeys((A, B, C), 0), dict.fromkeys((A, B, C), 30)
    while all(left.values()):
        rank, _, tenant, size = heappop(queue)
        order.begin(rank)
        got[tenant] += size
        left[tenant] -= 1
        shares = [got[one] / WEIGHTS.of(one).weight for one in got]
        assert max(shares) - min(shares) <= 2 * largest


def test_a_tenant_that_comes_back_gets_nothing_for_the_time_without_reads():
    order = FairOrder(WEIGHTS)
    first = [order.rank(B, 10) for _ in range(100)]
    order.begin(first[-1])
    assert order.rank(A, 10) == first[-1]


def test_tenants_without_reads_are_forgotten():
    order = FairOrder(WEIGHTS)
    for number in range(5000):
        order.begin(order.rank(number.to_bytes(6, "big"), 10) + 10)
    assert len(order._ends) < 1100


class Gate(FakeTier):
    """Reads one chunk at a time, when it is opened, and notes the order."""

    def __init__(self) -> None:
        super().__init__("gate")
        self.opened, self.read = threading.Event(), list[bytes]()

    def get(self, key, *_):
        self.opened.wait(60)
        self.read.append(tenant_of_key(key))
        return GetOutcome.ABSENT


@pytest.mark.parametrize(
    ("tenants", "place"), [(None, 100), (Tenants({}), 1)], ids=["without shares", "with shares"]
)
def test_a_read_of_a_tenant_does_not_wait_for_the_many_of_another(tenants, place):
    tier, memory = Gate(), body(0)
    queue = TierQueue(tier, "gate", readers=1, refresh_seconds=None, tenants=tenants)
    numbers = iter(range(1000))
    for tenant, count in ((A, 100), (B, 1), (A, 5)):
        for _ in range(count):
            key = key_of_chunk(next(numbers).to_bytes(32, "big"), tenant, 0)
            queue.reads.start(key, GROUP, memory)
    tier.opened.set()
    wait_for(lambda: len(tier.read) == 106)
    # A thread has begun the first one before the others came.
    assert tier.read.index(B) in (place, place + (tenants is not None))
    assert tier.read.count(A) == 105
    queue.close(5)


def test_reads_of_one_tenant_keep_their_order():
    tier, memory, keys = Gate(), body(0), [number.to_bytes(32, "big") for number in range(50)]
    seen = []
    tier.get = lambda key, *_: seen.append(key) or GetOutcome.ABSENT
    queue = TierQueue(tier, "gate", readers=1, refresh_seconds=None, tenants=Tenants({}))
    for key in keys:
        queue.reads.start(key, GROUP, memory)
    wait_for(lambda: len(seen) == 50)
    assert seen == keys
    assert tenant_of_key(keys[0]) == NOBODY
    queue.close(5)
