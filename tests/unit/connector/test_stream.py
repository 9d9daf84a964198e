"""The event stream: all listeners receive all events, and none disturbs the others."""

from __future__ import annotations

import logging

from kvferry.connector.events import MAX_ID_CHARACTERS, EventStream, Finished

FIRST, SECOND = Finished("a", 1.0), Finished("b", 2.0)


def test_every_listener_hears_everything_in_order_from_when_it_was_added() -> None:
    one, other = [], []
    events = EventStream(one.append)
    events.emit(FIRST)
    events.subscribe(other.append)
    events.emit(SECOND)
    assert (one, other) == ([FIRST, SECOND], [SECOND])


def test_events_that_are_held_are_passed_in_order_at_the_release() -> None:
    heard: list[Finished] = []
    events = EventStream(heard.append)
    events.hold()
    events.emit(FIRST)
    events.emit(SECOND)
    assert (heard, len(events.waiting)) == ([], 2)
    events.release()
    assert (heard, len(events.waiting)) == ([FIRST, SECOND], 0)
    events.emit(FIRST)
    assert heard[2:] == [FIRST], "a release ends the hold"


def test_a_listener_that_raises_is_removed_and_logged_once(caplog) -> None:
    heard = []

    def broken(event):
        heard.append(event)
        raise RuntimeError("no")

    after: list[object] = []
    events = EventStream(broken, after.append)
    with caplog.at_level(logging.ERROR):
        events.emit(FIRST)
        events.emit(SECOND)
    assert (heard, after) == ([FIRST], [FIRST, SECOND])
    assert len(caplog.records) == 1


def test_an_id_of_a_megabyte_is_cut_before_any_listener_sees_it_and_its_end_stays() -> None:
    heard: list[Finished] = []
    events = EventStream(heard.append)
    for end in ("-1b2c3d4e", "-5f6a7b8c"):
        events.emit(Finished("\n" * (1 << 20) + end, 1.0))
    first, second = (event.request_id for event in heard)
    assert len(first) < 3 * MAX_ID_CHARACTERS
    assert first.endswith("-1b2c3d4e")
    assert first != second
    assert first.isprintable()
