"""The life of a load: reported once, released once, never released before it has landed."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvferry.connector.worker.loads import MOST_TIMEOUTS, AttemptResults, Loads, SettledLoads
from support.clock import Clock
from support.examples import examples


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def loads(clock):
    return Loads(clock)


def test_pins_do_not_change_without_reports(loads, clock):
    loads.begin("a", 30.0)
    clock.now = 29.9
    assert loads.settle() == SettledLoads({}, set())
    assert len(loads) == 1


def test_a_load_that_gets_on_is_not_late_but_does_not_go_on_for_ever(loads, clock):
    loads.begin("a", 30.0)
    for _ in range(MOST_TIMEOUTS - 1):
        clock.now += 29.9
        loads.extend("a", 30.0)
        assert loads.settle() == SettledLoads({}, set())
    clock.now += 29.9
    loads.extend("a", 30.0)
    clock.now = MOST_TIMEOUTS * 30.0
    assert loads.settle() == SettledLoads({"a": "its deadline passed"}, set())
    loads.extend("a", 30.0)
    assert loads.settle() == SettledLoads({}, set()), "it is reported once"


def test_a_load_says_that_the_engine_made_no_step_at_its_deadline(loads, clock):
    loads.begin("a", 30.0)
    clock.now = 85.8
    assert (
        loads.settle()
        .reported["a"]
        .startswith("its deadline passed 55.8 s ago, and the engine made no step since")
    )


@pytest.mark.parametrize("failure", [None, "it broke"])
def test_a_load_that_landed_is_reported_and_released_together(loads, failure):
    loads.begin("a", 30.0)
    loads.on_transfer_ended("a", failure)
    assert loads.settle() == SettledLoads({"a": failure}, {"a"})
    assert loads.settle() == SettledLoads({}, set())
    assert len(loads) == 0


def test_a_load_past_its_deadline_is_reported_at_once_and_released_when_it_lands(loads, clock):
    loads.begin("a", 30.0)
    clock.now = 30.0
    assert loads.settle() == SettledLoads({"a": "its deadline passed"}, set())
    assert len(loads) == 1, "its memory is still held"
    clock.now = 1000.0
    assert loads.settle() == SettledLoads({}, set())
    loads.on_transfer_ended("a", None)
    assert loads.settle() == SettledLoads({}, {"a"})
    assert len(loads) == 0


def test_a_load_that_is_given_up_is_reported_at_once_and_released_when_it_lands(loads, clock):
    loads.begin("a", 30.0)
    loads.begin("b", 30.0)
    loads.give_up("a", "of no use")
    loads.give_up("c", "of no use")
    assert loads.settle() == SettledLoads({"a": "of no use"}, set())
    assert len(loads) == 2, "its memory is still held"
    loads.give_up("a", "again")
    clock.now = 30.0
    assert loads.settle() == SettledLoads({"b": "its deadline passed"}, set())
    loads.on_transfer_ended("a", None)
    assert loads.settle() == SettledLoads({}, {"a"})


def test_a_load_that_landed_before_it_was_given_up_is_what_it_is(loads):
    loads.begin("a", 30.0)
    loads.on_transfer_ended("a", None)
    loads.give_up("a", "of no use")
    assert loads.settle() == SettledLoads({"a": None}, {"a"})
    assert loads.settle() == SettledLoads({}, set())


def test_a_load_that_landed_just_in_time_is_ready_however_late_one_asks(loads, clock):
    loads.begin("a", 30.0)
    loads.on_transfer_ended("a", None)
    clock.now = 31.0
    assert loads.settle() == SettledLoads({"a": None}, {"a"})


def test_each_load_has_its_own_deadline(loads, clock):
    loads.begin("a", 10.0)
    clock.now = 5.0
    loads.begin("b", 10.0)
    clock.now = 12.0
    assert loads.settle().reported.keys() == {"a"}


def test_a_load_begins_once(loads, clock):
    loads.begin("a", 1.0)
    with pytest.raises(ValueError, match="load 'a' has begun already"):
        loads.begin("a", 1.0)
    clock.now = 2.0
    loads.settle()
    with pytest.raises(ValueError, match="load 'a' has begun already"):
        loads.begin("a", 1.0)


class LifeOfLoads(RuleBasedStateMachine):
    """Begin, land, wait and ask in any order."""

    flying = Bundle("flying")

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.loads = Loads(self.clock)
        self.begun, self.deadline, self.landed = 0, {}, {}
        self.reported, self.released = {}, set()

    @rule(target=flying, timeout=st.integers(1, 5))
    def begin(self, timeout):
        key = f"load {self.begun}"
        self.begun += 1
        self.loads.begin(key, timeout)
        self.deadline[key] = self.clock.now + timeout
        return key

    @rule(key=consumes(flying), failure=st.sampled_from([None, "it broke"]))
    def land(self, key, failure):
        self.landed[key] = failure
        self.loads.on_transfer_ended(key, failure)

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule()
    def settle(self):
        settled = self.loads.settle()
        assert not settled.reported.keys() & self.reported.keys(), "reported twice"
        assert not settled.released & self.released, "released twice"
        assert settled.released <= self.landed.keys(), "released before it landed"
        for key, failure in settled.reported.items():
            expired = key not in settled.released
            assert failure.startswith("its deadline passed") if expired else failure == self.landed[key]
            assert not expired or self.deadline[key] <= self.clock.now
        self.reported |= settled.reported
        self.released |= settled.released
        late = {key for key, deadline in self.deadline.items() if deadline <= self.clock.now}
        assert self.reported.keys() == late | self.landed.keys(), "whatever is due is reported"
        assert self.released == self.landed.keys(), "whatever landed is released"

    @invariant()
    def holds_what_is_not_released(self):
        assert len(self.loads) == self.begun - len(self.released)


TestLifeOfLoads = LifeOfLoads.TestCase
TestLifeOfLoads.settings = examples(40, stateful_step_count=25)


@pytest.mark.parametrize("failing", [set(), {0}, {1}, {0, 2}])
def test_an_attempt_is_over_with_the_last_of_its_loads(failing):
    results = AttemptResults()
    said = [results.add("a", 3, "torn" if number in failing else None) for number in range(3)]
    assert said == [None, None, not failing]
    assert results.add("a", 1, None) is True, "nothing is left of the attempt before"
