"""A load has ended when nothing of it is in flight and nothing more of it will be begun."""

from __future__ import annotations

import pytest

from kvferry.connector.messages import LoadRead
from kvferry.connector.worker.load_reads import LoadReads
from kvferry.planning.select import LoadSpan
from kvferry.transport.lane import ReadResult
from kvferry.transport.lease import LeaseWord
from kvferry.transport.read_order import ReadOrder


def read(key: str, load: str = "a", *, last: bool = False) -> LoadRead:
    order = ReadOrder(key, "peer", LoadSpan(0, 1, 2), (), (), LeaseWord(0, 0, 1))
    return LoadRead(load, order, last)


def result(key: str, failure: str | None = None, seconds: float = 1.0, *, lost: bool = False) -> ReadResult:
    return ReadResult(key, failure, None, seconds, seconds / 2, lost)


@pytest.fixture
def reads() -> LoadReads:
    made = LoadReads()
    made.begin(["a"])
    return made


def test_a_load_of_one_part_ends_with_its_read(reads):
    assert reads.add(part := read("1", last=True)) is part.order
    assert reads.take_ended() == []
    reads.on_result(result("1"))
    assert reads.take_ended() == [ReadResult("a", None, None, 1.0, 0.5)]
    assert (reads.take_ended(), len(reads)) == ([], 0)


def test_a_load_ends_with_its_last_part_whatever_part_ends_last(reads):
    reads.add(read("1"))
    reads.on_result(result("1"))
    assert reads.take_ended() == [], "more is to come"
    reads.add(read("2"))
    reads.add(read("3", last=True))
    reads.on_result(result("3"))
    assert reads.take_ended() == []
    reads.on_result(result("2", seconds=2.0))
    assert reads.take_ended() == [ReadResult("a", None, None, 4.0, 2.0, reads=3)], "the times of all parts"


def test_after_a_failure_nothing_is_begun_and_what_is_in_flight_is_awaited(reads):
    reads.add(read("1"))
    reads.add(read("2"))
    reads.on_result(result("1", "lost", lost=True))
    assert reads.take_ended() == []
    assert reads.add(read("3", last=True)) is None
    reads.on_result(result("2", "another"))
    assert reads.take_ended() == [ReadResult("a", "lost", None, 2.0, 1.0, peer_lost=True, reads=2)]
    assert reads.add(read("4", last=True)) is None, "its blocks may belong to others"
    assert reads.take_ended() == []


def test_a_load_that_is_broken_off_ends_once_nothing_is_in_flight(reads):
    reads.add(LoadRead("a", None))
    assert reads.take_ended() == []
    reads.add(read("1"))
    reads.add(LoadRead("a", None, failure="aborted"))
    assert reads.take_ended() == []
    reads.on_result(result("1"))
    assert [(one.key, one.failure) for one in reads.take_ended()] == [("a", "aborted")]


def test_a_load_that_nobody_waits_for_any_more_ends_without_its_last_part(reads):
    reads.fail("a", "late")
    reads.fail("a", "again")
    reads.fail("of the tiers", "late")
    assert [(one.key, one.failure) for one in reads.take_ended()] == [("a", "late")]
    assert reads.add(read("1")) is None
