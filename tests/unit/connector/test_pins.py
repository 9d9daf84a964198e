"""Pins: every reference is given back once, when every worker has landed, and late ones are counted."""

from collections import Counter

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.connector.pins import Pins, may_hold
from support.examples import examples


def test_blocks_come_back_with_the_last_worker():
    pins = Pins[int](workers=3)
    pins.hold("a", "P", [1, 2])
    assert pins.on_transfer_ended("a") == ()
    assert pins.on_transfer_ended("a") == ()
    assert pins.on_transfer_ended("a") == [1, 2]
    assert pins.on_transfer_ended("a") == ()
    assert len(pins) == 0


def test_one_report_may_count_several_workers():
    pins = Pins[int](workers=3)
    pins.hold("a", "P", [1])
    assert pins.on_transfer_ended("a", 2) == ()
    assert pins.on_transfer_ended("a", 1) == [1]


def test_an_unknown_load_has_no_blocks():
    pins = Pins[int](workers=1)
    assert pins.on_transfer_ended("a") == ()
    pins.mark_late("a")
    assert pins.late_blocks("P") == 0


def test_a_load_is_pinned_once():
    pins = Pins[int](workers=1)
    pins.hold("a", "P", [1])
    with pytest.raises(ValueError, match="load 'a' is pinned already"):
        pins.hold("a", "P", [1])


def test_late_blocks_are_counted_per_source_once_and_until_they_land():
    pins = Pins[int](workers=1)
    pins.hold("a", "P", [1, 2])
    pins.hold("b", "P", [3])
    pins.hold("c", "Q", [4])
    for key in ("a", "a", "b", "c"):
        pins.mark_late(key)
    assert (pins.late_blocks("P"), pins.late_blocks("Q"), pins.late_blocks("R")) == (3, 1, 0)
    assert pins.all_late_blocks == 4
    pins.on_transfer_ended("a")
    assert pins.late_blocks("P") == 1
    pins.on_transfer_ended("b")
    pins.on_transfer_ended("c")
    assert pins.late_blocks("P") == pins.late_blocks("Q") == 0


def test_blocks_of_each_source_are_counted_until_its_loads_land():
    pins = Pins[int](workers=1)
    pins.hold("a", "P", [1, 2])
    pins.hold("b", "Q", [3])
    pins.mark_late("a")
    pins.hold("c", "P", [4])
    assert pins.held == {"P": 3, "Q": 1}
    pins.on_transfer_ended("a")
    assert pins.held == {"P": 1, "Q": 1}
    pins.on_transfer_ended("b")
    assert pins.held == {"P": 1}
    pins.on_transfer_ended("c")
    assert pins.held == {}


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


class LifeOfPins(RuleBasedStateMachine):
    """Loads of several workers, pinned, late and landed in any order, against a count of references."""

    def __init__(self):
        super().__init__()
        self.pins = Pins[int](WORKERS)
        self.made = 0
        self.references = Counter()
        self.blocks, self.source, self.waiting, self.late = {}, {}, {}, set()

    @rule(source=st.sampled_from(SOURCES), blocks=st.lists(st.integers(0, 5), max_size=4, unique=True))
    def hold(self, source, blocks):
        key = f"load {self.made}"
        self.made += 1
        self.references.update(blocks)
        self.pins.hold(key, source, blocks)
        self.blocks[key], self.source[key], self.waiting[key] = blocks, source, WORKERS

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def be_late(self, data):
        key = data.draw(st.sampled_from(sorted(self.waiting)))
        self.late.add(key)
        self.pins.mark_late(key)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def land(self, data):
        key = data.draw(st.sampled_from(sorted(self.waiting)))
        workers = data.draw(st.integers(1, self.waiting[key]))
        self.waiting[key] -= workers
        given_back = self.pins.on_transfer_ended(key, workers)
        self.references.subtract(given_back)
        assert list(given_back) == (self.blocks[key] if self.waiting[key] == 0 else [])
        if self.waiting[key] == 0:
            del self.waiting[key]
            self.late.discard(key)
            assert self.pins.on_transfer_ended(key) == (), "given back twice"

    @invariant()
    def references_are_those_of_loads_in_flight(self):
        held = Counter(block for key in self.waiting for block in self.blocks[key])
        assert +self.references == held
        assert min(self.references.values(), default=0) >= 0
        assert len(self.pins) == len(self.waiting)

    @invariant()
    def held_counts_are_those_of_loads_in_flight(self):
        held = Counter()
        for key in self.waiting:
            held[self.source[key]] += len(self.blocks[key])
        assert +self.pins.held == +held

    @invariant()
    def late_counts_are_those_of_late_loads(self):
        for source in SOURCES:
            late = sum(len(self.blocks[key]) for key in self.late if self.source[key] == source)
            assert self.pins.late_blocks(source) == late


TestLifeOfPins = LifeOfPins.TestCase
TestLifeOfPins.settings = examples(40, stateful_step_count=25)
