"""Pins of operators over a real host tier."""

from __future__ import annotations

from kvferry.cache.pinned import PinnedChunks
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.host.tier import HostTier

PAGE, CHUNKS = 4096, 8


def key(number):
    return number.to_bytes(31, "big") + b"\0"


def full():
    """Host memory that is full: (host, pins, keys)."""
    host = HostTier(CHUNKS * PAGE, [PAGE], EVICTION_POLICIES["lru"])
    keys = [key(number) for number in range(CHUNKS)]
    add(host, keys)
    return host, PinnedChunks(host), keys


def add(host, keys):
    for one in keys:
        host.commit(host.reserve(one, 0))


def test_pinned_chunks_are_not_evicted_until_they_are_unpinned():
    host, pins, keys = full()
    assert pins.pin("a", [key(99), *keys[:3]]) == 3
    add(host, [key(number) for number in range(100, 110)])
    assert host.contains(keys[:4]).tolist() == [True, True, True, False]
    assert (pins.unpin("a"), pins.unpin("a")) == (3, 0)
    add(host, [key(number) for number in range(200, 210)])
    assert not host.contains(keys).any()
    host.check_integrity()


def test_pins_hold_half_of_host_memory_at_most():
    _, pins, keys = full()
    assert pins.pin("a", keys[:3]) == 3
    assert pins.pin("b", keys[3:]) == 1
    pins.clear()
    assert pins.pin("b", keys) == 4


def test_the_pins_of_one_salt_are_removed_alone():
    host, pins, keys = full()
    pins.pin("a", keys[:2], "salt")
    pins.pin("b", keys[2:3], "other")
    pins.pin("c", keys[3:4])
    pins.unpin_salt("salt")
    assert [pins.unpin(name) for name in "abc"] == [0, 1, 1]
    host.check_integrity()


def test_a_pin_replaces_the_one_of_its_name():
    _, pins, keys = full()
    pins.pin("a", keys[:4])
    assert pins.pin("a", keys[4:6]) == 2
    assert pins.unpin("a") == 2
