"""Transfers: every block is given back once, when nothing is in flight, and late ones are counted."""

from collections import Counter

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.connector.blocks import Transfer, TransferBook, may_hold
from kvferry.transport.read_plan import Report
from support.block_pool import BlockPool
from support.examples import examples


def transfer(key="a", holder="P", blocks=()) -> Transfer:
    return Transfer(key=key, holder=holder, blocks=blocks)


class Book:
    """A book of transfers over a pool whose blocks requests hold, too."""

    def __init__(self, workers=1):
        self.pool = BlockPool(32)
        self._held = self.pool.allocate(31)
        self.book = TransferBook[Transfer](workers, self.pool)

    def begin(self, key, holder, count):
        self.book.begin(transfer(key, holder, self._held[:count]))

    @property
    def pinned(self):
        return sum(block.ref_cnt - 1 for block in self._held)


def test_blocks_come_back_with_the_last_worker():
    book = Book(workers=3)
    book.begin("a", "P", 2)
    assert [book.book.end("a", 1) for _ in range(3)] == [False, False, True]
    assert (book.pinned, len(book.book), book.book.end("a", 1)) == (0, 0, False)


def test_one_report_may_count_several_workers():
    book = Book(workers=3)
    book.begin("a", "P", 1)
    for workers in (2, 1):
        assert book.pinned == 1
        report = Report(None, workers=workers)
        ended = book.book.add_report("a", report)
        book.book.release({"a": report}, {})
    assert (ended.key, ended.report.workers, book.pinned) == ("a", 3, 0)


def test_a_late_load_keeps_its_blocks_until_the_workers_that_were_late_have_released_it():
    book = Book(workers=2)
    book.begin("a", "P", 3)
    report = Report("its deadline passed", late=1, workers=2)
    assert book.book.add_report("a", report).late
    book.book.release({"a": report}, {})
    assert (book.pinned, book.book.late_blocks("P"), book.book.late_blocks()) == (3, 3, 3)
    book.book.release({}, {"a": 1})
    assert (book.pinned, book.book.late_blocks("P")) == (0, 0)


def test_reports_about_other_work_are_ignored():
    book = Book()
    book.begin("a", "P", 1)
    book.book.release({"store#1": Report(None)}, {"b": 1})
    assert book.pinned == 1


def test_a_transfer_begins_once():
    book = Book()
    book.begin("a", "P", 1)
    with pytest.raises(ValueError, match="transfer 'a' has begun already"):
        book.begin("a", "P", 1)
    assert book.pinned == 1


def test_blocks_of_each_holder_are_counted_until_its_loads_land():
    book = Book()
    for key, holder, blocks in (("a", "P", 2), ("b", "Q", 1), ("c", "P", 1)):
        book.begin(key, holder, blocks)
    book.book.mark_late(book.book["a"])
    assert (book.book.held, book.book.late_blocks("P"), book.book.late_blocks("Q")) == (
        {"P": 3, "Q": 1},
        2,
        0,
    )
    book.book.end("a", 1)
    assert (book.book.held, book.book.late_blocks()) == ({"P": 1, "Q": 1}, 0)
    book.book.end("b", 1)
    assert book.book.held == {"P": 1}


def test_a_source_holds_at_most_half_of_what_others_leave_of_the_blocks():
    assert may_hold("P", 2, {"P": 2}, 8)
    assert not may_hold("P", 3, {"P": 2}, 8)
    assert may_hold("P", 1, {"P": 2, "Q": 2}, 8)
    assert not may_hold("P", 2, {"P": 2, "Q": 2}, 8)


@pytest.mark.parametrize("held", [{}, {"P": 0, "Q": 0}])
def test_a_load_that_is_alone_may_be_larger_than_the_bound(held):
    assert may_hold("P", 100, held, 8)
    assert not may_hold("P", 100, {"Q": 1}, 8)


@examples(40)
@given(
    most=st.integers(0, 64),
    loads=st.lists(st.tuples(st.sampled_from("PQRS"), st.integers(1, 40), st.integers(0, 3)), max_size=60),
)
def test_loads_that_all_prove_late_hold_no_more_than_they_may_and_leave_room_for_others(most, loads):
    """Each lands after as many others have begun as its number says, or never."""
    held, under_way = Counter(), []
    for source, blocks, lands_after in loads:
        if may_hold(source, blocks, held, most):
            held[source] += blocks
            under_way.append([source, blocks, lands_after or 1000])
        assert held.total() <= most or len(under_way) == 1
        if under_way:
            assert may_hold("nobody yet", 1, held, most) == (most - held.total() >= 2)
        for one in under_way:
            one[2] -= 1
        for name, size, left in under_way:
            held[name] -= size * (not left)
        under_way = [one for one in under_way if one[2]]


def test_any_number_of_hanging_sources_leaves_room_for_others():
    held = {}
    for number in range(5):
        blocks = max(n for n in range(65) if not n or may_hold(f"s{number}", n, held or {"x": 0, "y": 1}, 64))
        held[f"s{number}"] = blocks
    assert list(held.values()) == [31, 16, 8, 4, 2]


SOURCES = ("P", "Q")
WORKERS = 3


class LifeOfTransfers(RuleBasedStateMachine):
    """Loads of several workers, reported, late and landed in any order, against a count of references."""

    def __init__(self):
        super().__init__()
        self.book, self.made = Book(WORKERS), 0
        self.blocks, self.holder, self.unreported, self.in_flight, self.late = {}, {}, {}, {}, set()

    @rule(holder=st.sampled_from(SOURCES), blocks=st.integers(0, 4))
    def begin(self, holder, blocks):
        key = f"load {self.made}"
        self.made += 1
        self.book.begin(key, holder, blocks)
        self.blocks[key], self.holder[key] = blocks, holder
        self.unreported[key], self.in_flight[key] = WORKERS, 0

    @precondition(lambda self: any(self.unreported.values()))
    @rule(data=st.data())
    def report(self, data):
        key = data.draw(st.sampled_from(sorted(key for key, left in self.unreported.items() if left)))
        workers = data.draw(st.integers(1, self.unreported[key]))
        late = data.draw(st.integers(0, workers))
        report = Report(None, late=late, workers=workers)
        ended = self.book.book.add_report(key, report)
        self.book.book.release({key: report}, {})
        self.unreported[key] -= workers
        self.in_flight[key] += late
        if late:
            self.late.add(key)
        assert (ended is not None) is (self.unreported[key] == 0), "all workers have reported it"
        self._forget(key)

    @precondition(lambda self: any(self.in_flight.values()))
    @rule(data=st.data())
    def land(self, data):
        key = data.draw(st.sampled_from(sorted(key for key, left in self.in_flight.items() if left)))
        workers = data.draw(st.integers(1, self.in_flight[key]))
        self.in_flight[key] -= workers
        self.book.book.release({}, {key: workers})
        self._forget(key)

    def _forget(self, key):
        if not (self.unreported[key] or self.in_flight[key]):
            for of in (self.blocks, self.holder, self.unreported, self.in_flight):
                del of[key]
            self.late.discard(key)

    @invariant()
    def counts_are_those_of_loads_that_are_not_over(self):
        held = Counter()
        for key, blocks in self.blocks.items():
            held[self.holder[key]] += blocks
        assert (self.book.pinned, len(self.book.book)) == (held.total(), len(self.blocks))
        assert (self.book.book.held, self.book.book.pinned) == (+held, held.total())
        for holder in SOURCES:
            late = sum(self.blocks[key] for key in self.late if self.holder[key] == holder)
            assert self.book.book.late_blocks(holder) == late


TestLifeOfTransfers = LifeOfTransfers.TestCase
TestLifeOfTransfers.settings = examples(40, stateful_step_count=25)
