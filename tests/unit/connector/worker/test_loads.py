"""The life of a load: reported once, released once, never released before it has landed."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvferry.connector.bids import Bid
from kvferry.connector.loads import MOST_TIMEOUTS, Loads
from kvferry.connector.messages import Load, LoadOrder, LoadPart
from kvferry.planning.select import LoadSpan
from kvferry.transport.read_plan import LoadFigures, Report
from support.clock import Clock
from support.examples import examples
from support.loads import made_up_load

GROWING = Bid("peer", (), growing=True)
LATE = "its deadline passed"


def load(key: str = "a", **given) -> Load:
    """A load with a timeout of 30 s."""
    return made_up_load(key, LoadSpan(0, 4, 5), [], **given)


def part(key: str, of: str = "a", *, last: bool = False) -> LoadPart:
    return LoadPart(of, LoadOrder(key, (), first=True), last)


def settled(loads: Loads) -> tuple[dict[str, str | None], set[str]]:
    """Failure of each load that is reported, and the loads whose memory is free."""
    found = loads.settle()
    reported = {one.load.key: one.report.failure for one in found if one.report is not None}
    released = {one.load.key for one in found if one.report is None or not one.report.late}
    return reported, released


NOTHING: tuple[dict[str, str | None], set[str]] = ({}, set())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loads(clock) -> Loads:
    """Loads, of which one has begun."""
    made = Loads(clock)
    made.begin(load())
    return made


@pytest.mark.parametrize("failure", [None, "it broke"])
def test_a_load_of_one_part_is_reported_and_released_with_it(loads, failure):
    assert loads.add(part("1", last=True)).key == "a"
    assert settled(loads) == NOTHING
    loads.on_part_ended("1", Report(failure))
    assert settled(loads) == ({"a": failure}, {"a"})
    assert settled(loads) == NOTHING
    assert len(loads) == 0


def test_a_load_ends_with_its_last_part_whatever_part_ends_last(loads):
    loads.add(part("1"))
    loads.on_part_ended("1", Report(None))
    assert settled(loads) == NOTHING, "more is to come"
    loads.add(part("2"))
    loads.add(part("3", last=True))
    loads.on_part_ended("3", Report(None))
    assert settled(loads) == NOTHING
    loads.on_part_ended("2", Report(None))
    assert settled(loads) == ({"a": None}, {"a"})


def test_figures_of_all_reads_are_added(loads):
    for key, size, pages in (("1", 10, 2), ("2", 30, 3)):
        figures = LoadFigures(
            bytes_by_group=(size, 0),
            strategies_by_group=(("direct",), ()),
            reads=1,
            pages=pages,
            descriptors=1,
            run_bytes=size,
            plan_seconds=0.25,
            transfer_seconds=1.0,
            check_seconds=0.5,
        )
        loads.add(part(key, last=key == "2"))
        loads.on_part_ended(key, Report(None, figures))
    (one,) = loads.settle()
    assert one.report == Report(
        None,
        figures=LoadFigures(
            bytes_by_group=(40, 0),
            strategies_by_group=(("direct",), ()),
            reads=2,
            pages=5,
            descriptors=2,
            run_bytes=30,
            plan_seconds=0.5,
            transfer_seconds=2.0,
            check_seconds=1.0,
        ),
    )


@pytest.mark.parametrize("name", ["peer_lost", "corrupt"])
@pytest.mark.parametrize("value", [False, True])
def test_a_lost_peer_and_corrupt_bytes_are_reported(loads, name, value):
    loads.add(part("1"))
    loads.on_part_ended("1", Report("lost", **{name: value}))
    (report,) = [one.report for one in loads.settle()]
    assert {"peer_lost": report.peer_lost, "corrupt": report.corrupt} == {
        "peer_lost": False, "corrupt": False, name: value,
    }  # fmt: skip


def test_after_a_failure_nothing_is_begun_and_what_is_in_flight_is_awaited(loads):
    loads.add(part("1"))
    loads.add(part("2"))
    loads.on_part_ended("1", Report("lost"))
    assert settled(loads) == NOTHING
    assert loads.add(part("3", last=True)) is None
    loads.on_part_ended("2", Report("another"))
    assert settled(loads) == ({"a": "lost"}, {"a"})
    assert loads.add(part("4", last=True)) is None, "its blocks may belong to others"
    assert settled(loads) == NOTHING


def test_a_load_that_is_broken_off_ends_once_nothing_is_in_flight(loads):
    loads.add(LoadPart("a", None))
    loads.add(part("1"))
    loads.add(LoadPart("a", None, failure="aborted"))
    assert settled(loads) == NOTHING
    loads.on_part_ended("1", Report(None))
    assert settled(loads) == ({"a": "aborted"}, {"a"})


def test_a_load_past_its_deadline_is_reported_at_once_and_released_when_it_lands(loads, clock):
    loads.add(part("1"))
    clock.now = 29.9
    assert settled(loads) == NOTHING
    clock.now = 30.0
    assert settled(loads) == ({"a": LATE}, set())
    assert len(loads) == 1, "its memory is still held"
    assert loads.add(part("2", last=True)) is None, "its blocks may belong to others"
    clock.now = 1000.0
    assert settled(loads) == NOTHING
    loads.on_part_ended("1", Report(None))
    assert settled(loads) == ({}, {"a"})
    assert len(loads) == 0


def test_a_load_that_gets_on_is_not_late_but_does_not_go_on_for_ever(clock):
    loads = Loads(clock)
    loads.begin(load(bid=GROWING))
    for _ in range(MOST_TIMEOUTS - 1):
        clock.now += 29.9
        loads.add(LoadPart("a", None))
        assert settled(loads) == NOTHING
    clock.now += 29.9
    loads.add(LoadPart("a", None))
    clock.now = MOST_TIMEOUTS * 30.0
    assert settled(loads) == ({"a": LATE}, set())
    loads.add(LoadPart("a", None))
    assert settled(loads) == ({}, {"a"}), "it is reported once"


def test_parts_of_a_load_that_does_not_grow_leave_its_deadline_as_it_is(loads, clock):
    clock.now = 29.9
    loads.add(part("1"))
    clock.now = 30.0
    assert settled(loads)[0] == {"a": LATE}


def test_a_load_says_that_the_engine_made_no_step_at_its_deadline(loads, clock):
    clock.now = 85.8
    assert settled(loads)[0]["a"].startswith(f"{LATE} 55.8 s ago, and the engine made no step since")


def test_a_load_that_is_given_up_is_reported_at_once_and_released_when_it_lands(loads, clock):
    loads.begin(load("b"))
    loads.add(part("1"))
    loads.add(part("2", of="b"))
    loads.give_up("a", "of no use")
    loads.give_up("c", "of no use")
    assert settled(loads) == ({"a": "of no use"}, set())
    assert len(loads) == 2, "its memory is still held"
    loads.give_up("a", "again")
    clock.now = 30.0
    assert settled(loads) == ({"b": LATE}, set())
    loads.on_part_ended("1", Report(None))
    assert settled(loads) == ({}, {"a"})


def test_a_load_that_has_landed_is_ready_though_it_is_given_up_or_late(loads, clock):
    loads.add(part("1", last=True))
    loads.on_part_ended("1", Report(None))
    loads.give_up("a", "of no use")
    clock.now = 31.0
    assert settled(loads) == ({"a": None}, {"a"})


def test_a_load_whose_kv_must_not_be_used_has_failed_though_it_has_landed(loads):
    loads.begin(load("b"))
    loads.add(part("1", last=True))
    loads.on_part_ended("1", Report(None))
    loads.invalidate("of other weights", ["a", "unknown"])
    assert settled(loads) == ({"a": "of other weights"}, {"a"})
    loads.invalidate("moved")
    assert loads.add(part("2", of="b")) is None
    assert settled(loads) == ({"b": "moved"}, {"b"})


def test_each_load_has_its_own_deadline(loads, clock):
    clock.now = 5.0
    loads.begin(load("b"))
    clock.now = 32.0
    assert settled(loads)[0].keys() == {"a"}


def test_a_load_begins_once(loads):
    with pytest.raises(ValueError, match="load 'a' has begun already"):
        loads.begin(load())


@pytest.mark.parametrize("failing", [set(), {0}, {1}, {0, 2}])
def test_an_attempt_is_over_with_the_last_of_its_loads(clock, failing):
    loads, served = Loads(clock), []
    for number in range(3):
        loads.begin(load(str(number), attempt="one", loads=3))
        loads.add(part(f"part {number}", of=str(number), last=True))
    for number in range(3):
        loads.on_part_ended(f"part {number}", Report("torn" if number in failing else None))
        served += [one.served for one in loads.settle()]
    assert served == [None, None, not failing]


class LifeOfLoads(RuleBasedStateMachine):
    """Begin loads and parts, land, wait, give up and ask in any order, beside a plain model."""

    begun = Bundle("begun")

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.loads = Loads(self.clock)
        self.number, self.deadline = 0, {}
        self.flying, self.whole, self.failed = {}, set(), {}
        self.given_up = set()
        self.reported, self.released = {}, set()

    @rule(target=begun)
    def begin(self):
        key = f"load {self.number}"
        self.number += 1
        self.loads.begin(load(key))
        self.deadline[key], self.flying[key] = self.clock.now + 30, []
        return key

    @rule(key=begun, last=st.booleans())
    def add(self, key, last):
        self.number += 1
        name = f"part {self.number}"
        closed = key in self.whole or key in self.failed or key in self.reported
        assert (self.loads.add(part(name, of=key, last=last)) is None) is closed
        if not closed:
            self.flying[key].append(name)
            if last:
                self.whole.add(key)

    @rule(key=begun, failure=st.sampled_from([None, None, "it broke"]), data=st.data())
    def land(self, key, failure, data):
        if not self.flying[key]:
            return
        name = data.draw(st.sampled_from(self.flying[key]))
        self.flying[key].remove(name)
        if failure:
            self.failed.setdefault(key, failure)
        self.loads.on_part_ended(name, Report(failure))

    @rule(key=begun)
    def give_up(self, key):
        self.given_up.add(key)
        self.loads.give_up(key, "of no use")

    @rule(seconds=st.integers(0, 20))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule()
    def settle(self):
        over = {
            key
            for key, flying in self.flying.items()
            if not flying and (key in self.whole or key in self.failed or key in self.reported)
        }
        reported, released = settled(self.loads)
        assert not reported.keys() & self.reported.keys(), "reported twice"
        assert released == over - self.released, "whatever landed is released, once, and nothing else"
        for key, failure in reported.items():
            if key in released:
                assert failure == self.failed.get(key)
            else:
                assert failure == "of no use" or failure.startswith(LATE)
        self.reported |= reported
        self.released |= released
        late = {key for key, deadline in self.deadline.items() if deadline <= self.clock.now}
        assert self.reported.keys() == late | over | self.given_up, "whatever is due is reported"

    @invariant()
    def holds_what_is_not_released(self):
        assert len(self.loads) == len(self.deadline) - len(self.released)


TestLifeOfLoads = LifeOfLoads.TestCase
TestLifeOfLoads.settings = examples(40, stateful_step_count=40)
