"""The host tier with several ranks: stores, loads, faults, in any order, against plain dictionaries."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.tiers.book import ArenaBook
from kvferry.tiers.counters import Drop, Miss
from kvferry.tiers.eviction import POLICIES
from kvferry.tiers.host import HostTier
from kvferry.tiers.shape import ALIGNMENT, ChunkShape

RANKS = 3
SHAPES = (ChunkShape((6,), (ALIGNMENT,)), ChunkShape((2, 3), (100, 7)), ChunkShape((3,), (5,)))
KEYS = [b"key %d" % n for n in range(20)]


def tier(pages=48, policy="lru", shapes=SHAPES, ranks=RANKS):
    return HostTier(ArenaBook(pages * ALIGNMENT, shapes, ranks, digest_bytes=2), POLICIES[policy])


def digests(key, first, units):
    return b"".join(bytes([key[-1], unit]) for unit in range(first, first + units))


def share(shape, rank, ranks=RANKS):
    """The units of a rank: first and how many; the last takes the rest."""
    each = shape.total_units // ranks
    return rank * each, each if rank < ranks - 1 else shape.total_units - rank * each


def write(host, ticket, key, ranks=RANKS):
    for rank in range(ranks):
        first, units = share(host._book.shapes[ticket.group], rank, ranks)
        host.commit(ticket, rank, [(first, digests(key, first, units))])


def stored(host, key, group=0, ranks=RANKS):
    ticket = host.reserve(key, group)
    assert ticket is not None
    write(host, ticket, key, ranks)
    host.check_integrity()
    return ticket


def close(host, opened, ranks=RANKS, *, intact=True):
    for rank in range(ranks):
        host.close(opened.ticket, rank, intact=intact)


class Serving(RuleBasedStateMachine):
    """What ranks may do, in any order. The model: who holds which bytes, and what must be readable."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)), pages=st.integers(24, 36))
    def make(self, policy, pages):
        self.host = tier(pages, policy)
        self.owed = {}  # ticket -> ranks that have not reported
        self.stores = {}  # ticket -> [key, still wanted]
        self.loads = {}  # ticket -> key
        self.generations = {}  # ticket of a load -> serial of the store that it reads
        self.readable = set()  # keys that were stored and for which no reason to leave is known but eviction
        self.written = {}  # key -> ticket of its store
        self.over = []  # (ticket, rank) of stores, reported long ago

    def span(self, ticket):
        return range(ticket.offset, ticket.offset + SHAPES[ticket.group].stride)

    @rule(key=st.sampled_from(KEYS), group=st.integers(0, len(SHAPES) - 1))
    def reserve(self, key, group):
        self.reserved(key, group)

    def reserved(self, key, group):
        dropped = self.host.counters.dropped.total()
        storing = any(name == key and wanted for name, wanted in self.stores.values())
        here = bool(self.host.contains([key])[0])
        ticket = self.host.reserve(key, group)
        if ticket is None:
            assert self.host.counters.dropped.total() == dropped + 1
            return None
        assert not storing
        assert not here
        assert self.span(ticket).stop <= self.host.capacity_bytes
        self.stores[ticket] = [key, True]
        self.owed[ticket] = set(range(RANKS))
        return ticket

    @rule(
        key=st.sampled_from(KEYS), group=st.integers(0, len(SHAPES) - 1), aborts=st.sampled_from([0, 0, 0, 1])
    )
    def store(self, key, group, aborts):
        """All of a store at once: most runs have many chunks then."""
        ticket = self.reserved(key, group)
        for rank in range(RANKS) if ticket else ():
            if rank < aborts:
                self.host.abort(ticket, rank)
                self.stores[ticket][1] = False
            else:
                first, units = share(SHAPES[group], rank)
                self.host.commit(ticket, rank, [(first, digests(key, first, units))])
            self.finish(ticket, rank)

    def settle(self, ticket, rank):
        """A rank has reported; True with the last one."""
        self.owed[ticket].discard(rank)
        if self.owed[ticket]:
            return False
        del self.owed[ticket]
        self.loads.pop(ticket, None)
        return True

    def finish(self, ticket, rank):
        self.over.append((ticket, rank))
        if self.settle(ticket, rank):
            key, wanted = self.stores.pop(ticket)
            if wanted:
                self.readable.add(key)
                self.written[key] = ticket
            assert bool(self.host.contains([key])[0]) >= wanted

    def draw(self, data, tickets):
        ticket = data.draw(st.sampled_from(sorted(tickets, key=lambda one: one.serial)))
        return ticket, data.draw(st.sampled_from(sorted(self.owed[ticket])))

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def commit(self, data):
        ticket, rank = self.draw(data, self.stores)
        first, units = share(SHAPES[ticket.group], rank)
        self.host.commit(ticket, rank, [(first, digests(self.stores[ticket][0], first, units))])
        self.finish(ticket, rank)

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), how=st.sampled_from(["abort", "too few", "another's", "cut off"]))
    def fail(self, data, how):
        ticket, rank = self.draw(data, self.stores)
        first, units = share(SHAPES[ticket.group], rank)
        if how == "abort":
            self.host.abort(ticket, rank)
        elif how == "too few":
            self.host.commit(ticket, rank, [(first, digests(b"k", first, units - 1))])
        elif how == "another's":
            self.host.commit(ticket, rank, [(first, digests(b"k", first, units))] * 2)
        else:
            self.host.commit(ticket, rank, [(first, digests(b"k", first, units)[:-1])])
        self.stores[ticket][1] = False
        self.finish(ticket, rank)

    @rule(data=st.data())
    def open_one(self, data):
        """One that is here: by chance alone few are."""
        if self.readable:
            self.open(data.draw(st.sampled_from(sorted(self.readable))))

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def cancel(self, data):
        ticket, _ = self.draw(data, self.stores)
        self.host.cancel(ticket)
        self.stores[ticket][1] = False

    @rule(key=st.sampled_from(KEYS))
    def open(self, key):
        opened = self.host.open(key)
        if opened is None:
            return
        assert key in self.readable
        store = self.written[key]
        assert opened.ticket.offset == store.offset
        assert opened.digests == digests(key, 0, SHAPES[store.group].total_units)
        self.loads[opened.ticket] = key
        self.generations[opened.ticket] = store.serial
        self.owed[opened.ticket] = set(range(RANKS))

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), intact=st.sampled_from([True, True, False]))
    def close(self, data, intact):
        ticket, rank = self.draw(data, self.loads)
        key = self.loads[ticket]
        still = self.written.get(key) is not None and self.written[key].offset == ticket.offset
        self.host.close(ticket, rank, intact=intact)
        if not intact and still and self.written[key].serial < ticket.serial:
            assert not self.host.contains([key])[0]
        self.settle(ticket, rank)

    @rule(rank=st.integers(0, RANKS - 1))
    def lose(self, rank):
        for ticket in [ticket for ticket, owing in self.owed.items() if rank in owing]:
            if ticket in self.stores:
                self.stores[ticket][1] = False
        self.host.lost(rank)
        for ticket in [ticket for ticket, owing in self.owed.items() if rank in owing]:
            if ticket in self.stores:
                self.finish(ticket, rank)
            else:
                self.settle(ticket, rank)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def report_again(self, data):
        """Whatever was written over by it is not believed any more."""
        ticket, rank = data.draw(st.sampled_from(self.over))
        late = self.host.counters.late
        self.host.commit(ticket, rank, [])
        assert self.host.counters.late == late + 1
        for store, (_, wanted) in self.stores.items():
            overlap = range(
                max(store.offset, ticket.offset), min(self.span(store).stop, self.span(ticket).stop)
            )
            if wanted and overlap and store.serial > ticket.serial:
                self.stores[store][1] = False
        for key in self.readable:
            chunk = self.host._book.ready.get(key)
            if chunk is not None and chunk.generation > ticket.serial:
                end = chunk.offset + SHAPES[chunk.group].stride
                assert end <= ticket.offset or chunk.offset >= self.span(ticket).stop

    @rule()
    def clear(self):
        self.host.clear()
        self.readable.clear()
        for store in self.stores.values():
            store[1] = False

    @invariant()
    def sound(self):
        self.host.check_integrity()
        assert self.host.used_bytes <= self.host.capacity_bytes
        found = {key for key, here in zip(KEYS, self.host.contains(KEYS), strict=True) if here}
        assert found <= self.readable
        self.readable = found
        # No two holders of different chunks share a byte, whatever became of the chunks.
        spans = {(self.span(ticket).start, self.span(ticket).stop) for ticket in self.owed}
        spans |= {(c.offset, c.offset + SHAPES[c.group].stride) for c in self.host._book.ready.values()}
        assert all(one[1] <= other[0] for one, other in pairwise(sorted(spans)))
        generations = {chunk.offset: chunk.generation for chunk in self.host._book.ready.values()}
        for ticket in self.owed:
            generation = self.generations.get(ticket, ticket.serial)
            assert generations.setdefault(ticket.offset, generation) == generation


Serving.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
test_ranks_may_report_in_any_order = Serving.TestCase


def test_a_chunk_is_found_once_every_rank_has_written_its_units():
    host = tier()
    ticket = host.reserve(KEYS[0], 0)
    for rank in range(RANKS):
        assert not host.contains([KEYS[0]])[0]
        assert host.open(KEYS[0]) is None
        host.commit(ticket, rank, [(2 * rank, digests(KEYS[0], 2 * rank, 2))])
    assert host.open(KEYS[0]).digests == digests(KEYS[0], 0, 6)
    assert (host.counters.stored, host.counters.stored_bytes) == (1, 6 * ALIGNMENT)
    assert host.counters.misses == {Miss.FILLING: RANKS}
    assert (host.counters.hits, host.counters.hit_bytes) == (1, 6 * ALIGNMENT)


def test_a_unit_that_nobody_wrote_drops_the_chunk():
    host = tier()
    ticket = host.reserve(KEYS[0], 0)
    host.commit(ticket, 0, [(0, digests(KEYS[0], 0, 5))])
    host.commit(ticket, 1, [])
    host.commit(ticket, 2, [])
    assert host.open(KEYS[0]) is None
    assert host.counters.dropped == {Drop.FAILED: 1}
    assert host.used_bytes == 0


def test_a_slot_whose_writer_may_still_write_is_not_given_out():
    host = tier(pages=6, shapes=SHAPES[:1])
    ticket = host.reserve(KEYS[0], 0)
    host.abort(ticket, 0)
    host.cancel(ticket)
    host.commit(ticket, 2, [])
    assert host.reserve(KEYS[1], 0) is None
    assert host.counters.dropped == {Drop.FAILED: 1, Drop.NO_ROOM: 1}
    host.abort(ticket, 1)
    assert host.reserve(KEYS[1], 0).offset == ticket.offset


def test_a_chunk_that_is_read_is_neither_evicted_nor_written_over():
    host = tier(pages=12, shapes=SHAPES[:1])
    stored(host, KEYS[0])
    stored(host, KEYS[1])
    first, second = host.open(KEYS[0]), host.open(KEYS[0])
    close(host, first)
    ticket = stored(host, KEYS[2])
    assert ticket.offset != second.ticket.offset
    assert list(host.contains(KEYS[:3])) == [True, False, True]
    assert host.open(KEYS[1]) is None
    assert host.counters.misses == {Miss.EVICTED: 1}
    close(host, second)
    stored(host, KEYS[3])
    stored(host, KEYS[4])
    assert not host.contains(KEYS[:1])[0]


def test_a_chunk_found_damaged_is_opened_no_more_and_its_slot_waits_for_all_readers():
    host = tier(pages=6, shapes=SHAPES[:1])
    stored(host, KEYS[0])
    opened, other = host.open(KEYS[0]), host.open(KEYS[0])
    host.close(opened.ticket, 1, intact=False)
    assert host.open(KEYS[0]) is None
    assert host.counters.damaged == 1
    assert host.reserve(KEYS[1], 0) is None
    close(host, other, intact=False)
    close(host, opened)
    assert host.counters.late == 1, "rank 1 had closed it"
    assert host.reserve(KEYS[1], 0) is not None
    assert host.counters.damaged == 1


def test_what_a_late_writer_may_have_written_over_is_not_believed():
    host = tier(pages=6, shapes=SHAPES[:1])
    late = host.reserve(KEYS[0], 0)
    for rank in (0, 1):
        host.abort(late, rank)
    host.lost(2)
    stored(host, KEYS[1])
    host.commit(late, 0, [])
    assert not host.contains([KEYS[1]])[0]
    assert (host.counters.late, host.counters.damaged) == (1, 1)


def test_a_report_that_comes_twice_costs_nothing():
    host = tier()
    ticket = stored(host, KEYS[0])
    host.commit(ticket, 0, [(0, digests(KEYS[0], 0, 2))])
    assert host.contains([KEYS[0]])[0]
    assert (host.counters.late, host.counters.damaged) == (1, 0)


def test_a_key_that_is_here_or_on_its_way_is_not_stored_twice():
    host = tier()
    ticket = host.reserve(KEYS[0], 0)
    assert host.reserve(KEYS[0], 0) is None
    write(host, ticket, KEYS[0])
    assert host.reserve(KEYS[0], 0) is None
    assert host.counters.dropped == {Drop.PRESENT: 2}


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_moves_between_groups_as_they_are_used(policy):
    shapes = (ChunkShape((3,), (ALIGNMENT,)), ChunkShape((3,), (2 * ALIGNMENT,)))
    host = tier(pages=240, policy=policy, shapes=shapes)
    for number in range(300):
        stored(host, b"small %d" % number, 0)
        assert host.used_bytes <= host.capacity_bytes
    assert len(host) > 70, "one group alone has nearly all of it"
    for number in range(150):
        stored(host, b"large %d" % number, 1)
        assert host.used_bytes <= host.capacity_bytes
    large = sum(chunk.group for chunk in host._book.ready.values())
    assert large > 25, "and then the other has most of it"
    assert host.counters.dropped == {}


def test_a_slab_is_emptied_for_another_group_when_what_leaves_is_scattered():
    shapes = (ChunkShape((3,), (ALIGNMENT,)), ChunkShape((12,), (4 * ALIGNMENT,)))
    host = tier(pages=48 * 40, shapes=shapes)
    slab_bytes = host._book.slabs.slab_bytes
    offsets = {}
    while host.counters.evicted == 0:
        offsets[b"%d" % len(offsets)] = stored(host, b"%d" % len(offsets)).offset
    for key in sorted(offsets, key=lambda key: (offsets[key] % slab_bytes, offsets[key])):
        if opened := host.open(key):
            close(host, opened)
    before = host.counters.evicted
    stored(host, b"large", 1)
    assert (host.counters.evicted - before) * shapes[0].stride <= 2 * slab_bytes


def test_two_groups_in_balance_leave_hardly_any_memory_idle():
    shapes = (ChunkShape((3,), (ALIGNMENT,)), ChunkShape((3,), (2 * ALIGNMENT,)))
    host = tier(pages=900, shapes=shapes)
    for number in range(3000):
        stored(host, b"%d" % number, number % 2)
    assert host.used_bytes > 0.9 * host.capacity_bytes


def test_one_store_evicts_a_bounded_amount():
    """Slabs of the other size are full of holes, each held by one load: no slab can be emptied."""
    shapes = (ChunkShape((3,), (ALIGNMENT,)), ChunkShape((12,), (4 * ALIGNMENT,)))
    host = tier(pages=48 * 40, shapes=shapes)
    for number in range(640):
        stored(host, b"%d" % number, 0)
    for number in range(0, 640, 8):
        assert host.open(b"%d" % number)
    assert host.reserve(b"large", 1) is None
    assert host.counters.dropped == {Drop.NO_ROOM: 1}
    assert 0 < host.counters.evicted < 200


def test_clear_forgets_what_is_here_and_what_is_on_its_way():
    host = tier()
    stored(host, KEYS[0])
    ticket = host.reserve(KEYS[1], 1)
    host.clear()
    write(host, ticket, KEYS[1])
    host.check_integrity()
    assert not host.contains(KEYS).any()
    assert host.used_bytes == 0


def test_a_lookup_of_512_keys_takes_far_less_than_a_millisecond():
    shape = ChunkShape((1,), (1,))
    host = tier(pages=20_000, shapes=(shape,), ranks=1)
    for number in range(20_000):
        host.commit(host.reserve(number.to_bytes(32), 0), 0, [(0, b"ab")])
    keys = [number.to_bytes(32) for number in range(0, 20_480, 40)]

    def seconds():
        began = time.perf_counter()
        assert host.contains(keys).sum() == 500
        return time.perf_counter() - began

    assert min(seconds() for _ in range(20)) < 1e-3


@pytest.mark.parametrize("runs", [[(0, 2), (0, 2), (2, 2)], [(-2, 2), (0, 4)], [(5, 2), (0, 4)]])
def test_units_written_twice_or_that_do_not_exist_do_not_count_for_those_that_are_missing(runs):
    host = tier(ranks=1)
    ticket = host.reserve(KEYS[0], 0)
    host.commit(ticket, 0, [(first, digests(KEYS[0], 0, units)) for first, units in runs])
    assert not host.contains([KEYS[0]])[0]
    assert host.counters.dropped == {Drop.FAILED: 1}


def test_digests_cut_off_drop_the_chunk():
    host = tier(ranks=1)
    ticket = host.reserve(KEYS[0], 0)
    host.commit(ticket, 0, [(3, digests(KEYS[0], 3, 3)), (0, digests(KEYS[0], 0, 3) + b"x")])
    assert not host.contains([KEYS[0]])[0]
