"""When requests arrive: at recorded times, after the turn before, and in a slot of another session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from kvferry.tools.replay.arrivals import Arrivals
from kvferry.tools.replay.curve import hit_rate_curve
from kvferry.tools.replay.show import Outcome, as_json, show
from kvferry.tools.replay.simulation import Simulation
from kvferry.tools.replay.trace.base import Branch, TraceRequest
from kvferry.tools.report import Report
from support.small_replays import UNIT, passes_over, prompt, simulation

SPEED = 2 * UNIT
"""Tokens per second, so that a prompt of one new unit takes half a second."""


def turn(unit: int, delay: float = 0.0, branches: Sequence[Branch] = ()) -> TraceRequest:
    return replace(prompt(UNIT, unit), delay=delay, branches=branches)


def session(at: float, first: TraceRequest, *later: TraceRequest) -> TraceRequest:
    return replace(first, arrival=at, later=iter(later))


def arrivals(*requests: TraceRequest, speed: float = SPEED, **settings: object) -> list[tuple[int, float]]:
    """Return the content and the arrival of each request, in the order of admission."""
    found: list[tuple[int, float]] = []
    names = {prompt(UNIT, unit).prefix_ids[0]: unit for unit in range(100)}

    def note(request: TraceRequest, _: object) -> None:
        found.append((names[request.prefix_ids[0]], request.arrival))

    replay = simulation(prefill_tokens_per_second=speed, skip=0, on_hit=note, **settings)
    replay.run(requests)
    return found


def test_a_turn_arrives_its_delay_after_the_end_of_the_turn_before() -> None:
    assert arrivals(session(2.0, turn(1), turn(2, 3.0), turn(3, 1.0))) == [(1, 2.0), (2, 5.5), (3, 7.0)]


def test_a_turn_waits_for_a_turn_that_waits_in_the_queue_of_its_engine() -> None:
    busy = [prompt(UNIT, n, at=0.0) for n in (7, 8, 9)]
    found = dict(arrivals(*busy, session(0.1, turn(1), turn(2, 1.0))))
    assert found[2] == 4 * 0.5 + 1.0
    alone = dict(arrivals(session(0.1, turn(1), turn(2, 1.0))))
    assert alone[2] == 0.1 + 0.5 + 1.0


def test_without_a_speed_a_turn_ends_when_it_arrives() -> None:
    found = arrivals(session(2.0, turn(1), turn(2, 3.0)), prompt(UNIT, 5, at=4.0), speed=0.0)
    assert found == [(1, 2.0), (5, 4.0), (2, 5.0)]


def test_without_a_speed_a_request_has_ended_before_another_arrives_at_the_same_time() -> None:
    tiers = "host=unlimited", "file=unlimited:shared"
    two = simulation(*tiers, engines=2, route="least-busy")
    assert two.run([prompt(UNIT, 1), prompt(UNIT, 1)]).hit_tokens == UNIT
    assert [engine.requests for engine in two.engines] == [1, 1]


def test_a_turn_finds_what_the_turn_before_has_stored() -> None:
    def hits(*requests: TraceRequest) -> int:
        tiers = "host=unlimited", "file=unlimited:shared"
        two = simulation(*tiers, prefill_tokens_per_second=SPEED, engines=2, route="least-busy")
        return two.run(requests).hit_tokens

    first, second = prompt(UNIT, 1), prompt(2 * UNIT, 1, 2)
    assert hits(session(0.0, first, second)) == UNIT
    assert hits(first, second) == 0, "the negative control: both arrive at once"


def test_the_next_turn_waits_for_all_branches_that_are_awaited() -> None:
    branches = [
        Branch(iter([turn(10, 1.0), turn(11, 1.0)]), is_awaited=True),
        Branch(iter([turn(20, 9.0)]), is_awaited=False),
        Branch(iter([turn(30, 0.25)]), is_awaited=True),
        Branch(iter(()), is_awaited=True),
    ]
    slow = Branch(iter([turn(40, 10.0)]), is_awaited=True)
    turns = turn(1, branches=branches), turn(2, 4.0, branches=[slow]), turn(3)
    found = dict(arrivals(session(0.0, *turns), engines=8, route="random"))
    assert (found[10], found[30], found[11]) == (0.5 + 1.0, 0.5 + 0.25, 2.0 + 1.0)
    assert found[2] == 3.5 + 4.0, "after the end of the longest branch"
    assert found[20] == 9.5, "nobody waits for it"
    assert found[3] == 8.0 + 10.0 + 0.5, "not for the branch that ends before this one either"


def test_branches_of_branches_are_waited_for_too() -> None:
    inner = Branch(iter([turn(20, 5.0)]), is_awaited=True)
    outer = Branch(iter([turn(10, branches=[inner])]), is_awaited=True)
    found = dict(arrivals(session(0.0, turn(1, branches=[outer]), turn(2))))
    assert (found[20], found[2]) == (6.0, 6.5)


def test_with_a_limit_a_session_begins_when_another_has_ended() -> None:
    sessions = [session(0.0, turn(10 * n), turn(10 * n + 1, 1.0)) for n in range(1, 4)]
    found = dict(arrivals(*sessions, concurrency=2, engines=8, route="random"))
    assert (found[10], found[20]) == (0.0, 0.0)
    assert found[30] == 0.5 + 1.0 + 0.5, "when the first of the two others has ended"
    one = dict(arrivals(*[replace(each, later=iter(())) for each in sessions], concurrency=1))
    assert one == {10: 0.0, 20: 0.5, 30: 1.0}, "requests without a session count as one"


def test_a_limit_does_not_count_branches_that_nobody_waits_for() -> None:
    behind = Branch(iter([turn(9, 100.0)]), is_awaited=False)
    found = dict(arrivals(turn(1, branches=[behind]), turn(2), turn(3), concurrency=1))
    assert (found[2], found[3], found[9]) == (0.5, 1.0, 100.5)


def test_a_trace_is_not_read_ahead_of_its_sessions() -> None:
    read: list[int] = []

    def trace() -> Iterator[TraceRequest]:
        for number in range(10_000):
            read.append(number)
            yield prompt(UNIT, number % 7, at=float(number))

    waiting = Arrivals(trace(), lambda batch: (list(batch), list(batch)), concurrency=3)  # type: ignore[arg-type]
    first = waiting.pop()
    assert len(read) == 512, "one batch"
    waiting.ended(first, 1.0)
    assert len(read) == 512


def test_times_without_tiers_are_unknown_if_arrivals_depend_on_times(capsys) -> None:
    def replay(*requests: TraceRequest, **settings: object) -> Simulation:
        made = simulation(prefill_tokens_per_second=SPEED, **settings)
        made.run(requests)
        return made

    known = replay(turn(1), prompt(UNIT, 1, at=1.0))
    assert (
        as_json(Outcome(known.replayed(), "t", complete=True))["time_to_first_token"]["without_tiers"]["mean"]
        == 0.5
    )
    for unknown in (replay(session(0.0, turn(1), turn(1))), replay(turn(1), turn(1), concurrency=1)):
        found = Outcome(unknown.replayed(), "t", complete=True)
        times = as_json(found)["time_to_first_token"]
        assert times["without_tiers"] is None
        assert times["with_tiers"]["mean"] == pytest.approx(0.25, abs=0.01)
        show(found, Report.to_stdout())
        said = capsys.readouterr().out
        assert "with the tiers" in said
        assert "without tiers" not in said


def test_the_curve_of_sessions_is_the_hit_rate_of_a_replay_at_each_capacity() -> None:
    def sessions() -> list[TraceRequest]:
        later = [
            [replace(prompt((k + 2) * UNIT, n, *range(50, 51 + k)), delay=1.5) for k in range(3)]
            for n in range(30)
        ]
        return [session(float(at), prompt(UNIT, at * 7 % 30), *later[at * 7 % 30]) for at in range(90)]

    replay = simulation()
    replay.run(sessions())
    curve = hit_rate_curve(passes_over(sessions), replay.replayed())
    assert len({point.hit_rate for point in curve}) > 1
    for point in curve:
        alone = simulation(f"host={point.capacity_bytes}B", of=replay.model).run(sessions())
        assert alone.hit_rate == pytest.approx(point.hit_rate), point.capacity_bytes
