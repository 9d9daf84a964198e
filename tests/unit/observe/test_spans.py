"""Spans: what takes time, with whose trace it belongs to."""

from __future__ import annotations

from kvferry.connector.bids import Bid, PlaceTokens
from kvferry.connector.events import (
    Arrived,
    DecisionReason,
    Event,
    Finished,
    GroupBytes,
    LeaseEnded,
    LeaseGranted,
    LoadOutcome,
    MissReason,
    Scheduled,
    SourcesAsked,
    StoreBegan,
    StoreEnded,
)
from kvferry.observe.spans import SpanListener, TraceSpan
from kvferry.transport.read_plan import LoadFigures
from support.load_events import load_began, load_ended, sources_asked

HEADERS = (("traceparent", "00-1-2-01"),)
PARTS = (PlaceTokens("host", 64), PlaceTokens("file", 64))
USED = (PlaceTokens("host", 64), PlaceTokens("file", 36))


def spans(*events: Event) -> list[TraceSpan]:
    found: list[TraceSpan] = []
    fold = SpanListener(found.append)
    for event in events:
        fold(event)
    return found


def asked(at: float, why: DecisionReason, source: str = "peer") -> SourcesAsked:
    chosen = (
        Bid(source, (PlaceTokens(source, 9),), why is DecisionReason.LOOKING)
        if why in {DecisionReason.LOOKING, DecisionReason.BEST}
        else None
    )
    return sources_asked(at, chosen=chosen, why=why)


def test_a_load_is_a_span_of_the_requests_trace() -> None:
    (load,) = spans(
        Arrived("a", 0.0, tokens=200, sources=("tiers",), declined=(), trace_headers=HEADERS),
        asked(0.5, DecisionReason.BEST, "tiers"),
        load_ended(
            load_began(source="tiers", end=100, at=1.0, parts=USED),
            at=1.5,
            moved=(GroupBytes("0 full", "copied", 640),),
        ),
    )
    assert load == TraceSpan(
        name="kvferry.load", request_id="a", parent=HEADERS, begin=1.0, end=1.5,
        attributes={
            "kvferry.source": "tiers", "kvferry.outcome": "ready",
            "kvferry.tokens": 100, "kvferry.bytes": 640,
            "kvferry.tokens.host": 64, "kvferry.tokens.file": 36, "kvferry.bytes.0 full": 640,
        },
    )  # fmt: skip


def test_a_load_from_a_peer_says_which_and_what_took_how_long() -> None:
    (load,) = spans(
        load_ended(
            load_began(end=9, at=1.0, peer="10.0.0.1:5", parts=(PlaceTokens("peer", 9),)),
            at=2.0,
            figures=LoadFigures(
                pages=8, descriptors=2, plan_seconds=0.1, transfer_seconds=0.5, check_seconds=0.2
            ),
        ),
    )
    said = load.attributes
    assert (said["kvferry.peer"], said["kvferry.pages"], said["kvferry.descriptors"]) == ("10.0.0.1:5", 8, 2)
    stages = [said[f"kvferry.{stage}_seconds"] for stage in ("plan", "read", "check")]
    assert stages == [0.1, 0.5, 0.2]
    assert load.parent == (), "the request belongs to no trace"


def test_a_load_that_fails_is_an_error_and_one_that_nobody_waits_for_is_none() -> None:
    began = load_began(end=9, at=1.0, parts=PARTS)
    (failed,) = spans(
        load_ended(began, outcome=LoadOutcome.EXPIRED, at=2.0, miss=MissReason.DEADLINE, failure="no answer"),
    )
    assert (failed.failure, failed.attributes["error.type"]) == ("no answer", "deadline")
    (dropped,) = spans(load_ended(began, outcome=LoadOutcome.DROPPED, at=2.0, failure="late"))
    assert (dropped.failure, "error.type" in dropped.attributes) == ("", False)


def test_waiting_for_a_source_is_a_span_until_something_else_is_decided() -> None:
    for end in (
        asked(3.0, DecisionReason.NOTHING),
        load_began(end=9, at=3.0, parts=PARTS),
        Scheduled("a", 3.0, 0, 10),
        Finished("a", 3.0),
    ):
        (wait,) = spans(
            asked(1.0, DecisionReason.LOOKING), asked(2.0, DecisionReason.LOOKING), end, Finished("a", 4.0)
        )
        assert (wait.name, wait.begin, wait.end) == ("kvferry.wait", 1.0, 3.0)
        assert wait.attributes == {"kvferry.source": "peer"}


def test_stores_and_leases_end_after_their_requests_and_keep_their_trace() -> None:
    lease, store = spans(
        Arrived("a", 0.0, tokens=200, sources=(), declined=(), trace_headers=HEADERS),
        store := StoreBegan("a", 1.0, "store#0", "full", 2),
        granted := LeaseGranted("a", 2.0, 199, 30.0),
        Finished("a", 2.0),
        LeaseEnded("a", 3.0, granted=granted, expired=True),
        StoreEnded("a", 4.0, began=store, failure="gone", size=8, seconds=0.1),
    )
    assert (lease.parent, lease.attributes) == (HEADERS, {"kvferry.tokens": 199, "kvferry.expired": True})
    assert (store.parent, store.failure) == (HEADERS, "gone")
    assert store.attributes == {"kvferry.group": "full", "kvferry.chunks": 2, "kvferry.bytes": 8}
