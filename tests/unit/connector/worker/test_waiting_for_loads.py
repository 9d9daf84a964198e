"""A step that computes nothing waits for loads under way; other steps do not wait."""

from __future__ import annotations

from unittest import mock

import pytest

from kvferry.connector.bids import Bid, PlaceTokens
from kvferry.connector.loads import IDLE_WAIT_SECONDS, MOST_STEP_SECONDS
from kvferry.connector.messages import LoadOrder, LoadPart, StepOrders
from kvferry.connector.worker import WorkerHalf
from kvferry.planning.select import LoadSpan
from kvferry.transport.read_plan import ReadOrder, Report
from support.clock import Clock
from support.loads import made_up_load, only_read

STEP = 0.016
"""Seconds of a step of a few tokens."""


class Reads:
    """Lanes whose reads end at given times. Stands for `Transfers`, and for the event of a new result."""

    def __init__(self, clock: Clock, ends: dict[str, float]) -> None:
        self.clock, self.ends, self.waits = clock, dict(sorted(ends.items(), key=lambda one: one[1])), 0

    def results(self) -> list[tuple[str, Report]]:
        over = [key for key, at in self.ends.items() if at <= self.clock.now]
        for key in over:
            del self.ends[key]
        return [(key, Report(None)) for key in over]

    def submit(self, *orders: ReadOrder, idle: bool = False) -> None:
        pass

    def clear(self) -> None:
        pass

    def is_set(self) -> bool:
        return any(end <= self.clock.now for end in self.ends.values())

    def wait(self, seconds: float) -> None:
        self.waits += 1
        self.clock.now = min([self.clock.now + seconds, *self.ends.values()])


class Rank:
    """A worker half of an engine, and its reads."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.reads = Reads(self.clock, {})
        self.half = WorkerHalf(self.clock, transfers=self.reads, arrived=self.reads)

    def step(
        self,
        ends: dict[str, float] | None = None,
        *,
        computes: bool = False,
        step_seconds: float = STEP,
        bid: Bid | None = None,
    ) -> set[str]:
        """Run a step that begins loads, which end after some seconds. Return the loads that it reports."""
        loads = {}
        for key, after in (ends or {}).items():
            loads[key] = made_up_load(key, LoadSpan(0, 4, 5), [[1]], request_id=key, bid=bid)
            self.reads.ends[key] = self.clock.now + after
        orders = StepOrders(
            computes=computes,
            idle=not computes,
            step_seconds=step_seconds,
            loads=list(loads.values()),
            parts=[only_read(key) for key in loads],
        )
        self.half.begin(orders)
        return set(self.half.ended().received)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def ended(ends: dict[str, float], **given) -> tuple[set[str], float, int]:
    """The requests that one step reports, the time at which it does, and how often it has waited."""
    rank = Rank()
    received = rank.step(ends, **given)
    return received, rank.clock.now, rank.reads.waits


def named(times: list[float]) -> dict[str, float]:
    return {str(number): at for number, at in enumerate(times)}


def test_a_step_without_tokens_reports_a_load_as_soon_as_it_ends():
    assert ended({"a": 0.002}) == ({"a"}, pytest.approx(0.002), 1)


def test_a_step_that_computes_does_not_wait():
    assert ended({"a": 0.002}, computes=True) == (set(), 0.0, 0)


def test_a_step_without_loads_does_not_wait():
    assert ended({}) == (set(), 0.0, 0)


def test_a_step_waits_no_longer_than_its_limit():
    assert ended({"a": 10.0}) == (set(), pytest.approx(IDLE_WAIT_SECONDS), 1)


def test_eight_loads_that_end_within_a_step_s_time_are_reported_together():
    ends = named([0.001 + 0.0019 * number for number in range(8)])
    assert ended(ends) == (set(ends), pytest.approx(max(ends.values())), 8)


def test_the_wait_for_the_next_load_is_no_longer_than_what_it_saves():
    # Of two requests, the second one would get its token 16 ms later, and both wait.
    assert ended({"a": 0.001, "b": 0.001 + 0.49 * STEP})[0] == {"a", "b"}
    assert ended({"a": 0.001, "b": 0.001 + 0.51 * STEP}) == ({"a"}, pytest.approx(0.001 + 0.5 * STEP), 2)
    # The fewer are missing, the less they save.
    ends = named([0.001] * 7)
    assert ended(ends | {"b": 0.001 + 0.12 * STEP})[0] == {*ends, "b"}
    assert ended(ends | {"b": 0.001 + 0.13 * STEP})[:2] == (set(ends), pytest.approx(0.001 + STEP / 8))


def test_a_step_waits_no_longer_than_a_step_takes_while_loads_keep_ending():
    ends = named([0.001 + 0.0005 * number for number in range(200)])
    received, at, _ = ended(ends)
    assert at == pytest.approx(0.001 + STEP)
    assert received == {name for name, end in ends.items() if end <= at}


@pytest.mark.parametrize("step_seconds", [1.0, 1e9])
def test_steps_that_took_unusually_long_make_no_wait_long(step_seconds):
    received, at, _ = ended({"a": 0.001, "b": 10.0}, step_seconds=step_seconds)
    assert (received, at) == ({"a"}, pytest.approx(0.001 + MOST_STEP_SECONDS / 2))


def test_before_the_first_step_of_a_few_tokens_a_load_that_has_ended_waits_for_no_other():
    assert ended({"a": 0.001, "b": 0.0011}, step_seconds=0.0) == ({"a"}, pytest.approx(0.001), 1)


def test_loads_that_ended_before_the_wait_are_reported_without_the_wait_for_a_first_one(rank):
    rank.step({"a": 0.001, "b": 10.0}, computes=True)
    rank.clock.now = 0.002
    assert rank.step(step_seconds=0.0) == {"a"}
    assert rank.clock.now == 0.002


PEER = Bid("peer", (PlaceTokens("peer", 4),))
SLOW = Bid("tiers", (PlaceTokens("object", 4),))


def test_a_load_that_is_expected_to_take_longer_is_not_waited_for(rank):
    rank.step({"slow": 0.1}, bid=SLOW)
    while not rank.step():
        pass  # an idle engine looks again, and so times the load
    rank.step({"b": 0.1}, bid=SLOW)
    began = rank.clock.now
    assert rank.step({"a": 0.001}, bid=PEER) == {"a"}
    assert rank.clock.now - began == pytest.approx(0.001)


def test_a_load_that_is_waited_for_in_vain_is_waited_for_only_a_few_times(rank):
    """Whatever its speed, and although a request is ready in every step."""
    rank.step({"stuck": 20.0}, bid=SLOW)
    waited, steps = 0.0, 0
    while rank.clock.now < 10.0:
        rank.clock.now += 0.1  # such as a step that computes
        began, steps = rank.clock.now, steps + 1
        assert rank.step({f"a{steps}": 0.001}, bid=PEER) == {f"a{steps}"}
        waited += rank.clock.now - began - 0.001
    assert steps > 50
    assert waited < 10 * STEP / 2


def test_a_load_whose_peer_still_computes_is_not_waited_for(rank):
    rank.step({"growing": 0.002}, bid=Bid("peer", (PlaceTokens("peer", 4),), growing=True), computes=True)
    assert rank.step({"a": 0.001}, bid=PEER) == {"a"}
    assert rank.clock.now == pytest.approx(0.001)


def test_a_load_that_ended_while_the_engine_computed_does_not_seem_slow(rank):
    rank.step({"a": 0.001}, bid=PEER)
    rank.step({"b": 0.001}, bid=PEER, computes=True)
    rank.clock.now += 5.0  # the step computes for long
    assert rank.step(computes=True) == {"b"}
    began = rank.clock.now
    assert rank.step({"c": 0.001, "d": 0.002}, bid=PEER) == {"c", "d"}
    assert rank.clock.now - began == pytest.approx(0.002)


def test_a_load_of_other_weights_fails_in_its_first_step_and_copies_nothing():
    mover = mock.Mock()
    mover.take_reports.return_value, mover.take_arenas.return_value = [], {}
    half = WorkerHalf(Clock(), mover=mover)
    half.on_weights_changed()
    load = made_up_load("a", LoadSpan(0, 4, 5), [[1]])
    part = LoadPart("a", LoadOrder("part", (), first=True), last=True)
    half.begin(StepOrders(idle=True, loads=[load], parts=[part]))
    assert half.ended().failed == {"a"}
    mover.load.assert_not_called()
    assert set(half.take_reports().reports) == {"a", "part"}, "so that its host memory is released"


def test_a_load_that_is_given_up_is_not_waited_for(rank):
    rank.step({"a": 10.0}, computes=True)
    rank.half.begin(StepOrders(idle=True, given_up={"a": "another part has failed"}))
    assert rank.half.ended().failed == {"a"}
    assert rank.reads.waits == 0


def test_a_load_past_its_deadline_is_not_waited_for(rank):
    rank.step({"a": 100.0}, computes=True)
    rank.clock.now = 40.0
    assert rank.half.ended().failed == {"a"}
    rank.step()
    assert rank.reads.waits == 0


@pytest.mark.parametrize("growing", [False, True])
def test_a_load_of_which_nothing_is_in_flight_is_waited_for_only_if_a_peer_computes_it(rank, growing):
    load = made_up_load("a", LoadSpan(0, 4, 5), [[1]], bid=Bid("a source", (), growing=growing))
    rank.half.begin(StepOrders(idle=True, loads=[load]))
    assert rank.half.ended().received == set()
    assert rank.clock.now == pytest.approx(IDLE_WAIT_SECONDS if growing else 0.0)
