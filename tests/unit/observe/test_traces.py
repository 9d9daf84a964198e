"""The buffer of traces keeps the last requests, within its limits."""

from __future__ import annotations

import sys
import threading

from kvferry.connector.bids import Bid, PlaceTokens
from kvferry.connector.events import (
    Arrived,
    DecisionReason,
    Finished,
    LateBlocks,
    LeaseExtended,
    MissReason,
    Scheduled,
    SourceMiss,
    SourceRefused,
    SourcesAsked,
    StoreBegan,
    StoreEnded,
    ValuedBid,
)
from kvferry.observe.traces import (
    EVENTS_PER_REQUEST,
    FIRST_EVENTS,
    LAST_EVENTS,
    MAX_TEXT,
    StoredChunks,
    TraceBuffer,
)


def arrived(name: str) -> Arrived:
    return Arrived(name, 0.0, tokens=10, sources=("peer",))


def kept(found: TraceBuffer) -> list[str]:
    return [trace.request_id for trace in found.last()]


def test_the_last_requests_are_remembered_the_latest_first() -> None:
    found = TraceBuffer(3)
    for number in range(5):
        found(arrived(f"r{number}"))
    assert kept(found) == ["r4", "r3", "r2"]
    found(arrived("r2"))
    assert kept(found) == ["r2", "r4", "r3"], "it has come anew"


def test_events_of_forgotten_requests_are_not_kept() -> None:
    found = TraceBuffer(1)
    for event in (
        arrived("a"),
        arrived("b"),
        Scheduled("a", 1.0, 0, 10),
        LateBlocks(1.0, 3),
        Finished("b", 2.0),
    ):
        found(event)
    (trace,) = found.last()
    assert trace.events == (arrived("b"), Finished("b", 2.0))


def test_the_first_and_last_events_of_a_long_request_are_kept() -> None:
    found = TraceBuffer(10)
    found(arrived("a"))
    for number in range(1, 200):
        found(Scheduled("a", float(number), 0, 10))
    (trace,) = found.last()
    assert [event.at for event in trace.events] == [*range(FIRST_EVENTS), *range(200 - LAST_EVENTS, 200)]
    assert trace.left_out == 200 - FIRST_EVENTS - LAST_EVENTS


def test_requests_with_many_events_leave_room_for_fewer() -> None:
    found = TraceBuffer(8)
    for name in range(8):
        found(arrived(str(name)))
        for number in range(100):
            found(Scheduled(str(name), float(number), 0, 10))
    found(arrived("last"))
    held = sum(len(trace.events) for trace in found.last())
    assert held <= 8 * EVENTS_PER_REQUEST
    assert kept(found)[:2] == ["last", "7"]


def test_chunks_that_were_stored_and_signs_of_life_are_summed_up() -> None:
    found = TraceBuffer(1)
    found(arrived("a"))
    for number in range(1000):
        found(began := StoreBegan("a", number, f"store#{number}", "full", 2))
        found(
            StoreEnded(
                "a",
                number + 0.5,
                began=began,
                failure="" if number % 10 else "no room",
                size=8,
                seconds=0.1,
            )
        )
        found(LeaseExtended("a", number))
    found(StoreBegan("a", 2000.0, "store#x", "state", 1))
    (trace,) = found.last()
    assert trace.events == (arrived("a"),)
    assert trace.stored == (
        StoredChunks(
            group="full",
            ordered=2000,
            first=0,
            done=1800,
            failed=200,
            size=7200,
            last=999.5,
            failure="no room",
        ),
        StoredChunks(group="state", ordered=1, first=2000.0),
    )
    assert trace.heartbeats == 1000


def test_declined_chunks_are_summed_up_by_tier_and_reason() -> None:
    found = TraceBuffer(1)
    found(arrived("a"))
    for number in range(3):
        found(began := StoreBegan("a", number, f"store#{number}", "full", 2))
        declined = (("file", "too few uses", 2), ("object", "short prompt", number + 1))
        ended = StoreEnded("a", number, began=began, failure="", size=8, seconds=0.1, declined=declined)
        found(ended)
    (trace,) = found.last()
    assert trace.stored[0].declined == (("file", "too few uses", 6), ("object", "short prompt", 6))


def test_stores_of_forgotten_requests_are_forgotten() -> None:
    found, began = TraceBuffer(1), StoreBegan("a", 0.0, "store#a", "full", 1)
    found(arrived("a"))
    found(began)
    found(arrived("other"))
    found(StoreEnded("a", 0.0, began=began, failure="", size=8, seconds=0.1))
    assert [(trace.request_id, trace.stored) for trace in found.last()] == [("other", ())]


def test_long_texts_of_others_are_cut() -> None:
    text = "x" * 10_000
    found = TraceBuffer(1)
    lack = SourceMiss("tiers", MissReason.FAILED, detail=text)
    bid = ValuedBid("peer", Bid("peer", (PlaceTokens("peer", 1),)), 0.0, text)
    found(Arrived("a", 0.0, tokens=10, sources=(), declined=(lack,), trace_headers=(("tracestate", text),)))
    found(
        SourcesAsked(
            "a",
            0.0,
            local_tokens=0,
            resumable_tokens=0,
            bids=(bid,),
            compute_value=0.0,
            misses=(lack,),
            chosen=None,
            why=DecisionReason.NOTHING,
        )
    )
    found(SourceRefused("a", 0.0, "peer", text))
    (trace,) = found.last()
    assert len(repr(trace)) < 7 * MAX_TEXT


def test_a_reader_never_stops_the_writer_nor_sees_half_of_it() -> None:
    found, failures, over = TraceBuffer(50), [], threading.Event()

    def read() -> None:
        while not over.is_set():
            try:
                for trace in found.last():
                    assert isinstance(trace.events[0], Arrived)
            except Exception as error:  # noqa: BLE001 - told below
                failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(3000):
            found(arrived(str(number)))
            for at in range(5):
                found(StoreBegan(str(number), at, f"{number}-{at}", str(at), 1))
                found(Scheduled(str(number), at, 0, 10))
    finally:
        over.set()
        reader.join()
        sys.setswitchinterval(before)
    assert not failures
