"""How often the policies hit on traces whose answer is known."""

from __future__ import annotations

import random
import sys
from itertools import count

import pytest

from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.eviction.policies import ARC


def hits(name, capacity, trace):
    """Hits of a cache of `capacity` bytes on a trace of (key number, size)."""
    policy = EVICTION_POLICIES[name](capacity)
    found = 0
    for number, size in trace:
        key = number.to_bytes(4)
        if key in policy:
            found += 1
            policy.touch(key)
            continue
        while policy.used_bytes + size > capacity:
            policy.evict()
        policy.admit(key, size)
    policy.check_integrity()
    return found


def loops_and_scans(rounds):
    """60 keys, each used twice a round; between two rounds 80 that are used once. Room is for 100."""
    scanned = count(1000)
    for _ in range(rounds):
        yield from ((key, 1) for _ in range(2) for key in range(60))
        yield from ((next(scanned), 1) for _ in range(80))


def test_reused_keys_survive_scans_under_arc_and_s3fifo_but_not_lru():
    found = {name: hits(name, 100, loops_and_scans(50)) for name in EVICTION_POLICIES}
    assert found["lru"] < 0.6 * 50 * 120
    assert found["arc"] > 0.9 * 50 * 120
    assert found["s3fifo"] > 0.9 * 50 * 120


def test_arc_and_s3fifo_beat_lru_where_few_keys_are_popular():
    chance = random.Random(1)
    trace = [(int(chance.paretovariate(0.6)) % 5000, chance.choice([1, 4])) for _ in range(20_000)]
    found = {name: hits(name, 600, trace) for name in EVICTION_POLICIES}
    assert found["arc"] > found["lru"]
    assert found["s3fifo"] > found["lru"]


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_cold_keys_are_evicted_first_and_a_use_makes_them_warm(name):
    policy = EVICTION_POLICIES[name](100)
    for key in (b"a", b"b", b"c"):
        policy.admit(key, 1)
    policy.admit_all([b"d", b"e", b"f", b"g"], 1, cold=True)
    policy.touch(b"d")
    policy.make_newest([b"e"])
    policy.make_cold([b"b"])
    assert policy.evict_bytes(3) == [b"f", b"g", b"b"]
    assert set(policy.evict_bytes(4)) == {b"a", b"c", b"d", b"e"}


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_a_cold_key_stays_cold_while_it_is_pinned(name):
    policy = EVICTION_POLICIES[name](100)
    policy.admit(b"cold", 1, cold=True)
    policy.admit(b"warm", 1)
    policy.pin(b"cold")
    policy.pin(b"warm")
    policy.make_cold([b"warm"])
    assert policy.evict() is None
    policy.admit(b"other", 1)
    policy.unpin(b"warm")
    policy.unpin(b"cold")
    assert policy.evict_bytes(2) == [b"warm", b"cold"]


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_everything_that_fits_stays(name):
    assert hits(name, 100, [(key, 1) for _ in range(5) for key in range(100)]) == 400


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_bytes_are_what_counts_not_keys(name):
    policy = EVICTION_POLICIES[name](100)
    policy.admit(b"large", 90)
    for number in range(10):
        policy.admit(b"%d" % number, 1)
    assert policy.evict() == b"large"
    assert policy.used_bytes == 10


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_a_policy_whose_keys_are_all_pinned_names_none(name):
    policy = EVICTION_POLICIES[name](10)
    for key in (b"a", b"b"):
        policy.admit(key, 5)
        policy.touch(key)
        policy.pin(key)
    assert policy.evict() is None
    policy.unpin(b"a")
    assert [policy.evict(), policy.evict()] == [b"a", None]


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_an_eviction_takes_no_longer_among_many_pinned_keys(name):
    def opcodes(pinned):
        """Steps of Python that 100 evictions take."""
        policy, found = EVICTION_POLICIES[name](pinned + 200), count()
        for number in range(pinned + 200):
            policy.admit(number.to_bytes(4), 1)
            if number < pinned:
                policy.pin(number.to_bytes(4))

        def trace(frame, event, _):
            frame.f_trace_opcodes = True
            if event == "opcode":
                next(found)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for _ in range(100):
                policy.evict()
        finally:
            sys.settrace(before)
        return next(found)

    assert 100 < opcodes(4000) < 2 * opcodes(200)


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_the_integrity_check_finds_wrong_bytes_and_keys_in_two_queues(name):
    policy = EVICTION_POLICIES[name](100)
    policy.admit(b"a", 10)
    policy.check_integrity()
    home = policy._queue_of(b"a")
    home.total += 1
    with pytest.raises(AssertionError, match="a queue of 10 bytes says 11"):
        policy.check_integrity()
    home.total -= 1
    for other in policy._queues:
        if other is not home:
            other.push(b"a", 10)
            with pytest.raises(AssertionError, match="is in two queues"):
                policy.check_integrity()
            other.remove(b"a")


@pytest.mark.parametrize("target", [-1, 101])
def test_the_integrity_check_of_arc_finds_a_target_outside_the_capacity(target):
    policy = ARC(100)
    policy._target = target
    with pytest.raises(AssertionError, match=f"target {target} is outside the capacity 100"):
        policy.check_integrity()
