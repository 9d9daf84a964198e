"""A step that computes nothing waits for loads under way; other steps do not wait."""

from __future__ import annotations

from unittest import mock

import pytest

from kvferry.connector.messages import LoadOrder, LoadPart, StepOrders
from kvferry.connector.worker import BURST_SECONDS, GAP_SECONDS, IDLE_WAIT_SECONDS, WorkerHalf
from kvferry.planning.select import LoadSpan
from kvferry.transport.read_plan import ReadOrder, ReadResult
from support.clock import Clock
from support.loads import made_up_load, only_read


class Reads:
    """Lanes whose reads end at given times. Stands for `Transfers`, and for the event of a new result."""

    def __init__(self, clock: Clock, ends: dict[str, float]) -> None:
        self.clock, self.ends, self.waits = clock, dict(sorted(ends.items(), key=lambda one: one[1])), 0

    def results(self) -> list[ReadResult]:
        over = [key for key, at in self.ends.items() if at <= self.clock.now]
        for key in over:
            del self.ends[key]
        return [ReadResult(key, None) for key in over]

    def submit(self, *orders: ReadOrder) -> None:
        pass

    def clear(self) -> None:
        pass

    def is_set(self) -> bool:
        return any(end <= self.clock.now for end in self.ends.values())

    def wait(self, seconds: float) -> None:
        self.waits += 1
        self.clock.now = min([self.clock.now + seconds, *self.ends.values()])


def ended(ends: dict[str, float], *, computes: bool = False) -> tuple[set[str], float, int]:
    """The requests that one step reports, the time at which it does, and how often it has waited."""
    clock = Clock()
    reads = Reads(clock, ends)
    half = WorkerHalf(clock, transfers=reads, arrived=reads)
    loads = [made_up_load(key, LoadSpan(0, 4, 5), [[1]], request_id=key) for key in ends]
    reads_of = [only_read(key) for key in ends]
    half.begin(StepOrders(epoch=0, computes=computes, idle=not computes, loads=loads, parts=reads_of))
    return set(half.ended().received), clock.now, reads.waits


def test_a_step_without_tokens_reports_a_load_as_soon_as_it_ends():
    assert ended({"a": 0.002}) == ({"a"}, pytest.approx(0.002), 1)


def test_a_step_that_computes_does_not_wait():
    assert ended({"a": 0.002}, computes=True) == (set(), 0.0, 0)


def test_a_step_without_loads_does_not_wait():
    assert ended({}) == (set(), 0.0, 0)


def test_a_step_waits_no_longer_than_its_limit():
    assert ended({"a": 10.0}) == (set(), pytest.approx(IDLE_WAIT_SECONDS), 1)


def test_loads_that_end_shortly_after_each_other_are_reported_together():
    ends = {name: 0.001 + n * 0.8 * GAP_SECONDS for n, name in enumerate("abc")}
    assert ended(ends) == ({"a", "b", "c"}, pytest.approx(max(ends.values())), 3)


def test_a_step_does_not_wait_for_ever_while_loads_keep_ending():
    ends = {str(n): 0.8 * GAP_SECONDS * n for n in range(100)}
    received, at, _ = ended(ends)
    assert at == pytest.approx(BURST_SECONDS)
    assert received == {name for name, end in ends.items() if end <= BURST_SECONDS}


def test_a_load_that_takes_long_does_not_hold_up_one_that_has_ended():
    assert ended({"a": 0.001, "b": 10.0}) == ({"a"}, pytest.approx(0.001 + GAP_SECONDS), 2)


def test_a_load_of_other_weights_fails_in_its_first_step_and_copies_nothing():
    mover = mock.Mock()
    mover.take_reports.return_value = []
    half = WorkerHalf(Clock(), mover=mover)
    half.on_weights_changed()
    load = made_up_load("a", LoadSpan(0, 4, 5), [[1]])
    part = LoadPart("a", LoadOrder("part", (), first=True), last=True)
    half.begin(StepOrders(idle=True, loads=[load], parts=[part]))
    assert half.ended().failed == {"a"}
    mover.load.assert_not_called()
    assert set(half.take_reports().reports) == {"a", "part"}, "so that its host memory is released"


def test_a_load_past_its_deadline_is_not_waited_for():
    clock = Clock()
    reads = Reads(clock, {"a": 100.0})
    half = WorkerHalf(clock, transfers=reads, arrived=reads)
    load = made_up_load("a", LoadSpan(0, 4, 5), [[1]])
    half.begin(StepOrders(epoch=0, computes=True, loads=[load], parts=[only_read("a")]))
    clock.now = 40.0
    assert half.ended().failed == {"a"}
    half.begin(StepOrders(epoch=0, computes=False, idle=True))
    half.ended()
    assert reads.waits == 0
