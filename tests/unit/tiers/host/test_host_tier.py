"""The host tier: fills, reads, doubts, in any order, against plain dictionaries and real bytes."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.common.errors import GeometryError
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.host.settings import HostCounters, HostDropReason, HostMissReason
from kvferry.tiers.host.slabs import Slabs
from kvferry.tiers.host.tier import HostTier
from support.examples import examples

PAGE = 4096
CHUNKS = (6 * PAGE, 2 * PAGE, PAGE)
KEYS = [blake2b(b"%d" % n, digest_size=16).digest() for n in range(12)]
GROUPS = st.integers(0, len(CHUNKS) - 1)


def tier(pages=48, policy="lru", chunks=CHUNKS):
    return HostTier(pages * PAGE, chunks, EVICTION_POLICIES[policy])


def stored(host, key, group=0):
    slot = host.reserve(key, group)
    assert slot is not None
    assert host.commit(slot)
    host.check_integrity()
    return slot


class Serving(RuleBasedStateMachine):
    """What an engine may do, in any order.

    The memory is real but small: of every page it has the serial of the fill that wrote it last.
    """

    @initialize(policy=st.sampled_from(sorted(EVICTION_POLICIES)), pages=st.integers(18, 30))
    def make(self, policy, pages):
        self.host = tier(pages, policy)
        self.memory = np.zeros(self.host.capacity_bytes // PAGE, np.int64)
        self.fills = []  # slots
        self.wanted = {}  # key -> slot of the fill that will be committed
        self.stored = {}  # key -> slot of the fill, until it is known to be gone
        self.reads = {}  # slot -> slot of the fill whose bytes are read
        self.over = []  # slots given back, with what they were for
        self.evicted = set()
        self.expected = HostCounters()

    def pages(self, slot):
        assert slot.offset + CHUNKS[slot.group] <= self.host.capacity_bytes
        return self.memory[slot.offset // PAGE :][: CHUNKS[slot.group] // PAGE]

    def drawn(self, data, slots):
        return data.draw(st.sampled_from(sorted(slots, key=lambda slot: slot.serial)))

    def drawn_key(self, data):
        """Often one that is here: by chance alone few are."""
        return data.draw(st.sampled_from(KEYS) | st.sampled_from(sorted(self.stored) or KEYS))

    @rule(key=st.sampled_from(KEYS), group=GROUPS)
    def reserve(self, key, group):
        self.reserved(key, group)

    def reserved(self, key, group):
        slot = self.host.reserve(key, group)
        self.note_evicted()
        if key in self.wanted or key in self.stored:
            assert slot is None
            self.expected.dropped[HostDropReason.PRESENT] += 1
        elif slot is None:
            assert self.fills or self.reads, "with nothing held there is always room"
            self.expected.dropped[HostDropReason.NO_ROOM] += 1
        else:
            assert (slot.key, slot.group) == (key, group)
            self.fills.append(slot)
            self.wanted[key] = slot
            self.pages(slot)[:] = slot.serial
        return slot

    def note_evicted(self):
        for key in [key for key in self.stored if not self.host.contains([key])[0]]:
            slot = self.stored.pop(key)
            assert slot not in self.reads.values(), "what is read does not make room"
            self.evicted.add(key)
            self.expected.evicted += 1
            self.expected.evicted_bytes += CHUNKS[slot.group]

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=12), group=GROUPS)
    def store(self, keys, group):
        """Many at once, so that the memory is full most of the time."""
        for key in keys:
            if slot := self.reserved(key, group):
                self.committed(slot)

    @precondition(lambda self: self.fills)
    @rule(data=st.data())
    def commit(self, data):
        self.committed(self.drawn(data, self.fills))

    def committed(self, slot):
        self.fills.remove(slot)
        self.over.append((slot, "fill"))
        wanted = self.wanted.get(slot.key) == slot
        assert self.host.commit(slot) == wanted
        if wanted:
            self.stored[slot.key] = self.wanted.pop(slot.key)
            self.evicted.discard(slot.key)
            self.expected.stored += 1
            self.expected.stored_bytes += CHUNKS[slot.group]

    @precondition(lambda self: self.fills)
    @rule(data=st.data())
    def abort(self, data):
        slot = self.drawn(data, self.fills)
        self.fills.remove(slot)
        self.over.append((slot, "fill"))
        self.host.abort(slot)
        if self.wanted.get(slot.key) == slot:
            del self.wanted[slot.key]
            self.expected.dropped[HostDropReason.FAILED] += 1

    @precondition(lambda self: self.fills)
    @rule(data=st.data())
    def abandon(self, data):
        slot = self.drawn(data, self.fills)
        wanted = self.wanted.get(slot.key) == slot
        assert self.host.abandon(slot) == wanted
        if wanted:
            del self.wanted[slot.key]

    @rule(data=st.data())
    def open(self, data):
        key = self.drawn_key(data)
        slot = self.host.open(key)
        if key not in self.stored:
            assert slot is None
            lately = HostMissReason.EVICTED if key in self.evicted else HostMissReason.ABSENT
            self.expected.misses[HostMissReason.FILLING if key in self.wanted else lately] += 1
            return
        fill = self.stored[key]
        assert (slot.key, slot.group, slot.offset) == (key, fill.group, fill.offset)
        assert slot not in self.reads, "every hold has its own serial"
        self.reads[slot] = fill
        self.expected.hits += 1

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def close(self, data):
        slot = self.drawn(data, self.reads)
        del self.reads[slot]
        self.over.append((slot, "read"))
        self.host.close(slot)

    @rule()
    def clear(self):
        self.host.clear()
        self.expected.dropped[HostDropReason.CLEARED] += len(self.wanted)
        for forgotten in (self.stored, self.wanted, self.evicted):
            forgotten.clear()

    @precondition(lambda self: self.over or self.fills or self.reads)
    @rule(data=st.data())
    def mistake(self, data):
        """To give a slot back twice, or for what it is not; the invariants say that it changes nothing."""
        now = [(slot, "fill") for slot in self.fills] + [(slot, "read") for slot in self.reads]
        slot, purpose = data.draw(st.sampled_from(self.over + now))
        wrong = {"fill": [self.host.close], "read": [self.host.commit, self.host.abort]}[purpose]
        if (slot, purpose) in self.over:
            wrong = [self.host.commit, self.host.abort, self.host.close]
        for verb in wrong:
            with pytest.raises(KeyError):
                verb(slot)

    @invariant()
    def sound(self):
        self.host.check_integrity()
        assert self.host.counters == self.expected
        assert self.host.used_bytes <= self.host.capacity_bytes

    @invariant()
    def only_what_was_committed_is_found(self):
        assert list(self.host.contains(KEYS)) == [key in self.stored for key in KEYS]
        assert len(self.host) == len(self.stored)

    @invariant()
    def no_byte_in_use_is_written_by_another_fill(self):
        for fill in (*self.fills, *self.reads.values(), *self.stored.values()):
            assert (self.pages(fill) == fill.serial).all()

    @invariant()
    def nothing_else_takes_bytes(self):
        slots = {*self.fills, *self.reads.values(), *self.stored.values()}
        assert self.host.used_bytes == sum(CHUNKS[slot.group] for slot in slots)


Serving.TestCase.settings = examples(100, stateful_step_count=50)
test_an_engine_may_do_all_in_any_order = pytest.mark.slow(Serving.TestCase)


def test_a_chunk_is_found_once_it_is_committed():
    host = tier()
    slot = host.reserve(KEYS[0], 0)
    assert not host.contains([KEYS[0]])[0]
    assert host.open(KEYS[0]) is None
    assert host.commit(slot)
    assert host.contains([KEYS[1], KEYS[0]]).tolist() == [False, True]
    assert host.open(KEYS[0]).offset == slot.offset
    assert (host.counters.stored, host.counters.stored_bytes) == (1, CHUNKS[0])
    assert host.counters.misses == {HostMissReason.FILLING: 1}
    assert host.counters.hits == 1


def test_a_slot_that_may_still_be_written_is_not_given_out():
    host = tier(pages=6, chunks=CHUNKS[:1])
    slot = host.reserve(KEYS[0], 0)
    host.clear()
    assert host.reserve(KEYS[0], 0) is None
    host.abort(slot)
    assert host.counters.dropped == {HostDropReason.CLEARED: 1, HostDropReason.NO_ROOM: 1}
    assert host.reserve(KEYS[1], 0).offset == slot.offset


def test_a_chunk_that_is_read_is_neither_evicted_nor_written_over():
    host = tier(pages=12, chunks=CHUNKS[:1])
    stored(host, KEYS[0])
    stored(host, KEYS[1])
    first, second = host.open(KEYS[0]), host.open(KEYS[0])
    host.close(first)
    assert stored(host, KEYS[2]).offset != second.offset
    assert list(host.contains(KEYS[:3])) == [True, False, True]
    assert host.open(KEYS[1]) is None
    assert host.counters.misses == {HostMissReason.EVICTED: 1}
    host.close(second)
    stored(host, KEYS[3])
    stored(host, KEYS[4])
    assert not host.contains(KEYS[:1])[0]


def test_a_chunk_that_is_forgotten_is_opened_no_more_and_its_slot_waits_for_all_readers():
    host = tier(pages=6, chunks=CHUNKS[:1])
    stored(host, KEYS[1])
    stored(host, KEYS[0])
    first, second = host.open(KEYS[0]), host.open(KEYS[0])
    host.clear()
    assert host.open(KEYS[0]) is None
    assert host.counters.misses == {HostMissReason.ABSENT: 1}, "a larger capacity had not kept it"
    for slot in (first, second):
        assert host.reserve(KEYS[1], 0) is None
        host.close(slot)
    assert host.reserve(KEYS[1], 0).offset == first.offset


def test_a_key_that_is_here_or_on_its_way_is_not_stored_twice():
    host = tier()
    slot = host.reserve(KEYS[0], 0)
    assert host.reserve(KEYS[0], 0) is None
    host.commit(slot)
    assert host.reserve(KEYS[0], 0) is None
    assert host.counters.dropped == {HostDropReason.PRESENT: 2}


def test_fill_that_ends_after_clear_leaves_the_new_chunk_alone():
    host = tier()
    stored(host, KEYS[0])
    old = host.reserve(KEYS[1], 1)
    host.clear()
    assert not host.contains(KEYS).any()
    new = host.reserve(KEYS[1], 1)
    assert not host.commit(old)
    assert host.open(KEYS[1]) is None
    assert host.commit(new)
    assert host.open(KEYS[1]).offset == new.offset
    assert host.used_bytes == CHUNKS[1]


def test_chunks_that_are_not_whole_pages_are_refused():
    with pytest.raises(GeometryError, match=r"chunks of \(4096, 5000\) bytes; expected multiples of 4096"):
        tier(chunks=(PAGE, 5000))


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_memory_moves_between_groups_as_they_are_used(policy):
    host = tier(pages=240, policy=policy, chunks=(3 * PAGE, 6 * PAGE))
    for number in range(300):
        stored(host, b"small %07ds" % number, 0)
        assert host.used_bytes <= host.capacity_bytes
    assert len(host) > 70, "one group alone has nearly all of it"
    for number in range(150):
        stored(host, b"large %07dl" % number, 1)
        assert host.used_bytes <= host.capacity_bytes
    large = sum(host.contains([b"large %07dl" % number for number in range(150)]))
    assert large > 25, "and then the other has most of it"
    assert host.counters.dropped == {}


def test_a_slab_is_emptied_for_another_group_when_what_leaves_is_scattered():
    chunks = (3 * PAGE, 48 * PAGE)
    host = tier(pages=48 * 40, chunks=chunks)
    slab_bytes = Slabs(48 * 40 * PAGE, chunks).slab_bytes
    offsets = {}
    while host.counters.evicted == 0:
        offsets[b"%012d" % len(offsets)] = stored(host, b"%012d" % len(offsets)).offset
    for key in sorted(offsets, key=lambda key: (offsets[key] % slab_bytes, offsets[key])):
        if slot := host.open(key):
            host.close(slot)
    before = host.counters.evicted
    stored(host, b"large chunk", 1)
    assert (host.counters.evicted - before) * chunks[0] <= 2 * slab_bytes


@pytest.mark.slow
def test_two_groups_in_balance_leave_hardly_any_memory_idle():
    host = tier(pages=900, chunks=(3 * PAGE, 6 * PAGE))
    for number in range(3000):
        host.commit(host.reserve(b"%012d" % number, number % 2))
    host.check_integrity()
    assert host.used_bytes > 0.9 * host.capacity_bytes


@pytest.mark.parametrize("policy", ["arc", "s3fifo"])
def test_reused_chunk_survives_many_that_are_never_read(policy):
    host = tier(pages=20, policy=policy, chunks=(PAGE,))
    stored(host, b"popular chunk")
    for _ in range(2):
        host.close(host.open(b"popular chunk"))
    for number in range(100):
        stored(host, b"%012d" % number)
    assert host.contains([b"popular chunk"])[0]


def test_chunk_that_requests_use_again_and_again_survives_many_that_none_does():
    popular, kept = b"popular chunk", {}
    for policy in ("lru", "density"):
        host, kept[policy] = tier(pages=20, policy=policy, chunks=(PAGE,)), 0
        for number in range(900):
            name = b"%012d" % number if number % 30 else popular
            kept[policy] += name == popular and bool(host.contains([popular])[0])
            if not host.contains([name])[0]:
                stored(host, name)
            host.mark_used([name])
    assert kept["lru"] == 0
    assert kept["density"] > 20


def test_store_evicts_a_bounded_amount():
    """Slabs of the other size are full of holes, each held by one read: no slab can be emptied."""
    host = tier(pages=48 * 40, chunks=(3 * PAGE, 48 * PAGE))
    for number in range(640):
        stored(host, b"%012d" % number, 0)
    for number in range(0, 640, 8):
        assert host.open(b"%012d" % number)
    assert host.reserve(b"large chunk", 1) is None
    assert host.counters.dropped[HostDropReason.NO_ROOM] == host.counters.dropped.total() == 1
    assert 0 < host.counters.evicted < 200


def test_a_lookup_of_many_keys_finds_those_that_are_there():
    host = tier(pages=20_000, chunks=(PAGE,))
    for number in range(20_000):
        host.commit(host.reserve(number.to_bytes(32), 0))
    numbers = [40 * number for number in range(1500)]
    found = host.contains([number.to_bytes(32) for number in numbers])
    assert found.tolist() == [number < 20_000 for number in numbers]


def test_uncounted_reservation_counts_no_drop():
    host = HostTier(4 * PAGE, [PAGE], EVICTION_POLICIES["lru"])
    slots = [host.reserve(b"%012d" % n, 0) for n in range(4)]
    assert all(slots)
    for _ in range(3):
        assert host.reserve(b"more chunks", 0, counted=False) is None
        assert host.reserve(b"%012d" % 0, 0, counted=False) is None
    assert host.counters.dropped.total() == 0
    assert host.reserve(b"more chunks", 0) is None
    assert host.counters.dropped[HostDropReason.NO_ROOM] == host.counters.dropped.total() == 1


@pytest.mark.parametrize("is_ready", [False, True])
def test_the_integrity_check_finds_states_that_disagree_with_fills_and_reads(is_ready):
    key, host = b"%012d" % 0, tier(pages=4, chunks=[PAGE])
    slot = host.reserve(key, 0)
    if is_ready:
        host.commit(slot)
        host.open(key)
    host.check_integrity()
    before, after = (host._ready, host._filling) if is_ready else (host._filling, host._ready)
    after[key] = before.pop(key)
    with pytest.raises(AssertionError, match="FILLING without a fill or with a read, or READY with a fill"):
        host.check_integrity()


def test_the_integrity_check_finds_policy_and_keys_that_disagree_with_the_slots():
    policy = EVICTION_POLICIES["lru"](4 * PAGE)
    host = HostTier(4 * PAGE, [PAGE], lambda _: policy)
    keys = [b"%012d" % n for n in range(2)]
    for key in keys:
        host.commit(host.reserve(key, 0))
    host.check_integrity()
    host.keys.discard(keys[0])
    with pytest.raises(AssertionError, match="other keys are told"):
        host.check_integrity()
    host.keys.add(keys[0])
    policy.remove(keys[1])
    with pytest.raises(AssertionError, match="the policy ranks other keys"):
        host.check_integrity()
    policy.admit(keys[1], 2 * PAGE)
    with pytest.raises(AssertionError, match="the policy counts other bytes"):
        host.check_integrity()
