"""Spans: what takes time, with whose trace it belongs to."""

from __future__ import annotations

from kvferry.cache.bids import Bid, Part
from kvferry.observe.events import (
    Arrived,
    Asked,
    Event,
    Finished,
    LeaseEnded,
    LeaseGranted,
    LoadBegan,
    LoadEnded,
    Miss,
    Moved,
    Outcome,
    Settled,
    StoreBegan,
    StoreEnded,
    Why,
)
from kvferry.observe.spans import Span, Spans

HEADERS = (("traceparent", "00-1-2-01"),)
PARTS = (Part("host", 64), Part("file", 64))


def spans(*events: Event) -> list[Span]:
    found: list[Span] = []
    fold = Spans(found.append)
    for event in events:
        fold(event)
    return found


def asked(at: float, why: Why, source: str = "peer") -> Asked:
    chosen = Bid(source, (Part(source, 9),), why is Why.LOOKING) if why in {Why.LOOKING, Why.BEST} else None
    return Asked("a", at, 0, (), 0.0, (), chosen, why)


def test_a_load_is_a_span_of_the_requests_trace() -> None:
    (load,) = spans(
        Arrived("a", 0.0, 200, ("tiers",), (), HEADERS),
        asked(0.5, Why.BEST, "tiers"),
        LoadBegan("a", 1.0, "a#1", "tiers", "tiers", PARTS, 0, 100, "a#1"),
        LoadEnded("a", 1.5, "a#1", "tiers", Outcome.READY, None, "", 0.5, (Moved("0 full", "copied", 640),)),
    )
    assert load == Span(
        "kvferry.load", "a", HEADERS, 1.0, 1.5,
        {
            "kvferry.source": "tiers", "kvferry.outcome": "ready",
            "kvferry.tokens": 100, "kvferry.bytes": 640,
            "kvferry.tokens.host": 64, "kvferry.tokens.file": 36, "kvferry.bytes.0 full": 640,
        },
    )  # fmt: skip


def test_a_load_from_a_peer_says_which_and_what_took_how_long() -> None:
    (load,) = spans(
        LoadBegan("a", 1.0, "a#1", "peer", "10.0.0.1:5", (Part("peer", 9),), 0, 9, "a#1"),
        LoadEnded("a", 2.0, "a#1", "peer", Outcome.READY, None, "", 1.0, (), 8, 2, 0.1, 0.5, 0.2),
    )
    said = load.attributes
    assert (said["kvferry.peer"], said["kvferry.pages"], said["kvferry.descriptors"]) == ("10.0.0.1:5", 8, 2)
    stages = [said[f"kvferry.{stage}_seconds"] for stage in ("plan", "read", "check")]
    assert stages == [0.1, 0.5, 0.2]
    assert load.parent == (), "the request belongs to no trace"


def test_a_load_that_fails_is_an_error_and_one_that_nobody_waits_for_is_none() -> None:
    began = LoadBegan("a", 1.0, "a#1", "peer", "peer", PARTS, 0, 9, "a#1")
    (failed,) = spans(
        began, LoadEnded("a", 2.0, "a#1", "peer", Outcome.EXPIRED, Miss.DEADLINE, "no answer", 1.0)
    )
    assert (failed.failure, failed.attributes["error.type"]) == ("no answer", "deadline")
    (dropped,) = spans(began, LoadEnded("a", 2.0, "a#1", "peer", Outcome.DROPPED, None, "late", 1.0))
    assert (dropped.failure, "error.type" in dropped.attributes) == ("", False)


def test_waiting_for_a_source_is_a_span_until_something_else_is_decided() -> None:
    for end in (
        asked(3.0, Why.NOTHING),
        LoadBegan("a", 3.0, "a#1", "peer", "peer", PARTS, 0, 9, "a#1"),
        Settled("a", 3.0, 0, 10),
        Finished("a", 3.0),
    ):
        (wait,) = spans(asked(1.0, Why.LOOKING), asked(2.0, Why.LOOKING), end, Finished("a", 4.0))
        assert (wait.name, wait.begin, wait.end) == ("kvferry.wait", 1.0, 3.0)
        assert wait.attributes == {"kvferry.source": "peer"}


def test_stores_and_leases_end_after_their_requests_and_keep_their_trace() -> None:
    lease, store = spans(
        Arrived("a", 0.0, 200, (), (), HEADERS),
        StoreBegan("a", 1.0, "store#0", "full", 2),
        LeaseGranted("a", 2.0, 199, 30.0),
        Finished("a", 2.0),
        LeaseEnded("a", 3.0, expired=True),
        StoreEnded("a", 4.0, "store#0", "gone", 8, 0.1),
    )
    assert (lease.parent, lease.attributes) == (HEADERS, {"kvferry.tokens": 199, "kvferry.expired": True})
    assert (store.parent, store.failure) == (HEADERS, "gone")
    assert store.attributes == {"kvferry.group": "full", "kvferry.chunks": 2, "kvferry.bytes": 8}


def test_what_nobody_saw_begin_is_no_span() -> None:
    assert spans(
        LoadEnded("a", 2.0, "a#1", "peer", Outcome.READY, None, "", 1.0),
        StoreEnded("a", 4.0, "store#0", "", 8, 0.1),
        LeaseEnded("a", 3.0, expired=False),
    ) == []  # fmt: skip
