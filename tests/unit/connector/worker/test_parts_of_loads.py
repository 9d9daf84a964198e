"""A worker's half and loads whose parts come while the peer computes them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvferry.connector.bids import Bid
from kvferry.connector.loads import MOST_TIMEOUTS
from kvferry.connector.messages import LoadPart, StepOrders, StepReports
from kvferry.connector.worker import WorkerHalf
from kvferry.planning.select import LoadSpan
from kvferry.transport.lease import LeaseWords
from kvferry.transport.read_plan import Report
from support.clock import Clock
from support.loads import made_up_load, only_read

TIMEOUT = 30.0
GROWING = Bid("peer", (), growing=True)


class Worker:
    """A worker's half whose lanes do what a test says."""

    def __init__(self) -> None:
        self.clock, self.submitted, self.over = Clock(), list[str](), list[tuple[str, Report]]()
        self.words = LeaseWords(5, 4)
        reads = SimpleNamespace(words=self.words, submit=self._submit, results=self._results)
        self.half = WorkerHalf(self.clock, transfers=reads)

    def _submit(self, *orders, idle=False) -> None:
        self.submitted += [order.key for order in orders]

    def _results(self) -> list[tuple[str, Report]]:
        over, self.over = self.over, []
        return over

    def step(self, *parts: LoadPart, begins: bool = False) -> tuple[set[str], set[str]]:
        """One step: the requests whose load has ended, and those of them that have failed."""
        loads = [made_up_load("a#1", LoadSpan(0, 4, 5), [[1]], bid=GROWING)] if begins else []
        self.half.begin(StepOrders(computes=True, loads=loads, parts=list(parts)))
        ended = self.half.ended()
        return set(ended.received), set(ended.failed)

    def land(self, key: str, failure: str | None = None) -> None:
        self.over.append((key, Report(failure)))

    def released(self) -> bool:
        reports = self.half.take_reports() or StepReports()
        report = reports.reports.get("a#1")
        return "a#1" in reports.released or (report is not None and not report.late)


def part(key: str, *, last: bool = False) -> LoadPart:
    read = only_read(key)
    return replace(read, load="a#1", last=last)


def test_a_load_is_reported_with_its_last_part() -> None:
    worker = Worker()
    assert worker.step(part("1"), begins=True) == (set(), set())
    worker.land("1")
    assert worker.step(part("2"), part("3", last=True)) == (set(), set())
    worker.land("3")
    assert worker.step() == (set(), set())
    assert not worker.released()
    worker.land("2")
    assert worker.step() == ({"a"}, set())
    assert worker.released()
    assert worker.submitted == ["1", "2", "3"]


def test_a_deadline_begins_anew_with_every_part_and_every_sign_of_progress() -> None:
    worker = Worker()
    worker.step(LoadPart("a#1", None), begins=True)
    for message in (LoadPart("a#1", None), part("1"), LoadPart("a#1", None)):
        worker.clock.now += TIMEOUT - 1
        assert worker.step(message) == (set(), set())
    worker.land("1")
    worker.clock.now += TIMEOUT
    assert worker.step() == ({"a"}, {"a"})
    worker.step()
    assert worker.released()
    assert worker.step(part("2", last=True)) == (set(), set())
    assert worker.submitted == ["1"], "its blocks may belong to others"


def test_a_peer_that_computes_for_ever_does_not_hold_a_request_for_ever() -> None:
    worker = Worker()
    worker.step(LoadPart("a#1", None), begins=True)
    for _ in range(MOST_TIMEOUTS):
        worker.clock.now += TIMEOUT - 1
        worker.step(LoadPart("a#1", None))
    worker.clock.now += TIMEOUT - 1
    assert worker.step(LoadPart("a#1", None)) == ({"a"}, {"a"})


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_load_that_is_broken_off_is_released_once_nothing_can_land(in_flight) -> None:
    worker = Worker()
    worker.step(part("1"), begins=True)
    if not in_flight:
        worker.land("1")
        worker.step()
    ended = worker.step(LoadPart("a#1", None, failure="the lease has ended"))
    if in_flight:
        assert (ended, worker.released()) == ((set(), set()), False)
        worker.land("1")
        ended = worker.step()
    else:
        ended = worker.step() if ended == (set(), set()) else ended
    assert ended == ({"a"}, {"a"})
    assert worker.released()


def test_after_a_change_of_weights_no_part_is_begun() -> None:
    worker = Worker()
    worker.step(part("1"), begins=True)
    worker.half.on_weights_changed()
    worker.step(part("2", last=True))
    worker.land("1")
    worker.step()
    assert worker.submitted == ["1"]
    assert worker.released()


def test_words_are_raised_before_the_step_and_reported_after_it() -> None:
    worker = Worker()
    before = worker.words.array.tolist()
    orders = StepOrders(computes=True, raised={"a": 2})
    worker.half.raise_words(orders)
    assert [now - was for now, was in zip(worker.words.array.tolist(), before, strict=True)] == [0, 0, 1, 0]
    worker.half.begin(orders)
    assert worker.words.array.tolist()[2] == before[2] + 1, "once"
    assert worker.half.take_reports().raised == {"a": 1}
