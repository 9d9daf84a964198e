"""Stories: what people read of what was told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.connector.bids import Bid, PlaceTokens
from kvferry.connector.events import (
    Arrived,
    DecisionReason,
    Finished,
    GroupBytes,
    Hinted,
    HintKind,
    HintOutcome,
    LeaseEnded,
    LeaseGranted,
    LoadOutcome,
    MissReason,
    RequestEvent,
    Scheduled,
    SourceMiss,
    SourceRefused,
    ValuedBid,
)
from kvferry.observe.traces import FIRST_EVENTS, RequestTrace, StoredChunks
from kvferry.tools.explain.timeline import summary, timeline
from kvferry.transport.read_plan import LoadFigures
from support.load_events import load_began, load_ended, sources_asked

PEER = Bid("10.0.0.1:5000", (PlaceTokens("peer", 444),))
LOOKING = replace(PEER, looking=True)
TIERS = Bid("tiers", (PlaceTokens("host", 128), PlaceTokens("file", 64)))
CAME = Arrived("a", 10.0, tokens=700, sources=("peer", "tiers"))


def told(*events: RequestEvent, **more: object) -> list[str]:
    lines = timeline(RequestTrace("a", (CAME, *events), **more))
    return [line.text if line.after is None else f"{line.after:.1f} {line.text}" for line in lines]


LOAD = load_began(end=699, begin=256, at=10.3, peer=PEER.source, parts=(PlaceTokens("peer", 443),))
LOADED = (
    sources_asked(
        10.1, ValuedBid("peer", LOOKING, 444.0), local_tokens=256, chosen=LOOKING, why=DecisionReason.LOOKING
    ),
    sources_asked(
        10.2,
        ValuedBid("peer", PEER, 444.0),
        ValuedBid("tiers", TIERS, 96.0),
        local_tokens=256,
        compute_value=1.5,
        chosen=PEER,
        why=DecisionReason.BEST,
    ),
    LOAD,
    load_ended(
        LOAD,
        at=10.8,
        moved=(GroupBytes("0 full", "direct", 1 << 20), GroupBytes("1 window", "staged", 4096)),
        figures=LoadFigures(
            pages=120,
            descriptors=6,
            plan_seconds=0.1,
            transfer_seconds=0.2,
            check_seconds=0.05,
            read_bytes_per_second=1.8e8,
            not_shared="no memory",
        ),
    ),
    Scheduled("a", 10.8, 699, 700, loads=(LOAD,)),
)


def test_a_timeline_has_all_events_of_a_load_in_order() -> None:
    assert told(
        *LOADED,
        Finished("a", 12.0),
        stored=(StoredChunks(group="full", ordered=3, first=10.5, done=3, failed=0, size=2048, last=10.75),),
    ) == [
        "0.0 The request has 700 tokens. Possible sources: peer, tiers.",
        "0.1 The engine's own cache has 256 tokens.",
        "peer is still looking for at most 444 tokens (444 from peer), worth 444.",
        "The request waits for peer: a source that is still looking may have more.",
        "0.2 The engine's own cache has 256 tokens.",
        "peer bids 444 tokens (444 from peer), worth 444.",
        "tiers bids 192 tokens (128 from host, 64 from file), worth 96.",
        "Computing everything is worth 1.5.",
        "peer is chosen: the best bid.",
        "0.3 Loading tokens 256 to 698: 443 from peer.",
        "The peer is 10.0.0.1:5000",
        "0.8 Loaded in 500 ms: 100 ms planning, 200 ms reading, 50 ms checking, 150 ms waiting.",
        "1 MiB of 0 full, direct",
        "4 KiB of 1 window, staged",
        "120 pages in 6 descriptors",
        "READs of this peer were measured at 0.18 GB/s; its host memory cannot be mapped: no memory",
        "0.8 Scheduled: 699 tokens cached, 1 to compute.",
        "2.0 The request has ended.",
        "0.5 Stored 3 of 3 chunks of full, 2 KiB, until 250 ms later.",
    ]


def test_a_timeline_names_a_failure_the_refused_source_and_the_next_one() -> None:
    gone = "the peer is gone"
    assert (
        told(
            first := load_began(end=444, at=10.1, peer=PEER.source, parts=PEER.parts),
            load_ended(first, outcome=LoadOutcome.FAILED, at=11.0, miss=MissReason.FAILED, failure=gone),
            SourceRefused("a", 11.0, PEER.source, gone),
            sources_asked(
                11.5,
                ValuedBid("peer", PEER, 0.0, gone),
                ValuedBid("tiers", TIERS, 192.0),
                chosen=TIERS,
                why=DecisionReason.BEST,
            ),
            second := load_began("a#2", "tiers", end=192, at=11.6, parts=TIERS.parts),
            load_ended(
                second,
                outcome=LoadOutcome.EXPIRED,
                at=12.1,
                miss=MissReason.DEADLINE,
                failure="chunk 1 is not there",
            ),
            SourceRefused("a", 12.1, "tiers", "chunk 1 is not there"),  # what is left of them may be bid
            sources_asked(12.2, local_tokens=16, why=DecisionReason.NO_ROOM),
            Scheduled("a", 12.3, 16, 700),
        )[1:]
        == [
            "0.1 Loading tokens 0 to 443: 444 from peer.",
            "The peer is 10.0.0.1:5000",
            "1.0 The load has failed after 900 ms (failed): the peer is gone",
            "1.0 10.0.0.1:5000 is not asked again for this request",
            "1.5 peer is not asked again: the peer is gone",
            "tiers bids 192 tokens (128 from host, 64 from file), worth 192.",
            "tiers is chosen: the best bid.",
            "1.6 Loading tokens 0 to 191: 128 from host, 64 from file.",
            "2.1 The load is given up at its deadline after 500 ms (deadline): chunk 1 is not there",
            "2.2 The engine's own cache has 16 tokens.",
            "The rest is computed: the engine has no blocks for a load and what comes after it.",
            "2.3 Scheduled: 16 tokens cached, 684 to compute.",
        ]
    )


def test_a_timeline_says_how_much_of_the_own_cache_lacks_a_state() -> None:
    lines = told(
        sources_asked(
            10.1,
            ValuedBid("peer", PEER, 444.0),
            local_tokens=256,
            resumable_tokens=0,
            chosen=PEER,
            why=DecisionReason.BEST,
        ),
        sources_asked(10.2, local_tokens=256, resumable_tokens=128, why=DecisionReason.NOTHING),
        sources_asked(10.3, local_tokens=256, resumable_tokens=0, why=DecisionReason.NOTHING),
    )
    own = "The engine's own cache has 256 tokens. Without a load it can use"
    assert f"0.1 {own} 0 of them." in lines
    assert [line for line in lines if line.startswith(("0.2", "0.3")) or "computed" in line] == [
        f"0.2 {own} 128 of them.",
        "The rest is computed: no source has more.",
        f"0.3 {own} 0 of them.",
        "Everything is computed: no source has more.",
    ]


def test_tokens_of_another_connector_are_no_hits_of_the_engines_own_cache() -> None:
    events = (
        sources_asked(
            10.0, ValuedBid("tiers", TIERS, 96.0), local_tokens=256, chosen=TIERS, why=DecisionReason.BEST
        ),
        Scheduled("a", 11.0, 699, 700, 443),
    )
    assert told(*events)[-2:] == [
        "1.0 Another connector of the engine loaded 443 tokens.",
        "Scheduled: 699 tokens cached, 1 to compute.",
    ]
    assert summary(RequestTrace("a", (CAME, *events))).tokens_by_origin == {
        "prefix cache": 256,
        "another connector": 443,
        "computed": 1,
    }


def test_a_miss_names_the_missing_chunk() -> None:
    lack = SourceMiss("tiers", MissReason.NOT_STORED, "full_attention", "chunk 4 of full_attention")
    assert told(sources_asked(10.0, misses=(lack, SourceMiss("peer", MissReason.LOCAL))))[1:] == [
        "0.0 tiers bids nothing, not stored: chunk 4 of full_attention",
        "peer bids nothing, local.",
        "Everything is computed: no source has more.",
    ]


@pytest.mark.parametrize("again", [LOADED[1:2], LOADED[2:3], LOADED[:3]])
def test_a_request_that_is_admitted_anew_was_preempted(again: tuple[RequestEvent, ...]) -> None:
    anew = "The request was preempted, and is admitted again."
    found = told(*LOADED, *again)
    assert [anew in line for line in found].count(True) == 1
    assert found.index(next(line for line in found if anew in line)) > len(told(*LOADED)) - 1


def test_a_timeline_names_the_sources_that_cannot_serve_a_request() -> None:
    alone = RequestTrace(
        "a",
        (replace(CAME, sources=(), declined=(SourceMiss("tiers", MissReason.UNNAMED, detail="no name"),)),),
    )
    assert [line.text for line in timeline(alone)] == [
        "The request has 700 tokens.",
        "tiers cannot serve it, unnamed: no name",
    ]
    (nobody,) = timeline(RequestTrace("a", (replace(CAME, sources=()),)))
    assert nobody.text == "The request has 700 tokens. No other engine offers them, so no source is asked."


@pytest.mark.parametrize(
    ("expired", "heartbeats", "said"),
    [
        (False, 3, "The lease is released by its consumer after 3 heartbeats."),
        (False, 1, "The lease is released by its consumer."),
        (False, 0, "The lease is released by its consumer."),
        (True, 0, "The lease has expired: its consumer sent no heartbeat."),
        (True, 1, "The lease has expired: its consumer stopped after 1 heartbeat."),
        (True, 2, "The lease has expired: its consumer stopped after 2 heartbeats."),
    ],
)
def test_a_timeline_says_how_a_lease_ended(expired: bool, heartbeats: int, said: str) -> None:
    granted = LeaseGranted("a", 11.0, 699, 30.0)
    found = told(granted, LeaseEnded("a", 12.0, granted=granted, expired=expired), heartbeats=heartbeats)
    assert found[1].startswith("1.0 699 tokens are offered to another engine; the lease ends 30 s after")
    assert found[2] == f"2.0 {said}"


def test_a_timeline_says_that_a_lease_was_withdrawn() -> None:
    granted = LeaseGranted("a", 11.0, 699, 30.0)
    ended = LeaseEnded("a", 12.0, granted=granted, expired=False, withdrawn=True)
    assert (
        told(granted, ended)[2]
        == "2.0 The lease is withdrawn: the cache was reset, or another sample of the request was aborted."
    )


def test_a_timeline_counts_failed_and_pending_stores() -> None:
    stored = (
        StoredChunks(
            group="full", ordered=5, first=10.5, done=2, failed=1, size=2048, last=10.75, failure="no room"
        ),
        StoredChunks(group="state", ordered=1, first=11.0),
    )
    assert told(stored=stored)[1:] == [
        "0.5 Stored 2 of 5 chunks of full, 2 KiB, 2 under way; 1 failed: no room",
        "1.0 Stored 0 of 1 chunk of state, 0 B, 1 under way.",
    ]


def test_a_timeline_says_which_chunks_the_admission_filter_declined() -> None:
    declined = (("file", "too few uses", 2), ("object", "short prompt", 1))
    stored = StoredChunks(
        group="full", ordered=2, first=10.5, done=2, size=2048, last=10.75, declined=declined
    )
    assert told(stored=(stored,))[2:] == [
        "Not written to file: 2 chunks of full (too few uses).",
        "Not written to object: 1 chunk of full (short prompt).",
    ]


def test_a_timeline_says_how_many_events_are_missing() -> None:
    many = [Scheduled("a", 10.0 + n, 0, 10) for n in range(FIRST_EVENTS)]
    assert told(*many, left_out=7)[FIRST_EVENTS] == "... 7 events not remembered ..."


def test_a_timeline_says_why_a_load_was_dropped() -> None:
    end = load_ended(load_began(at=10.1), outcome=LoadOutcome.DROPPED, at=11.0)
    assert told(end)[1] == "1.0 The load is dropped after 900 ms: the request ended first."
    given_up = replace(end, failure="another part of the prefix has failed")
    assert told(given_up)[1] == "1.0 The load is dropped after 900 ms: another part of the prefix has failed."


def test_a_summary_says_where_tokens_came_from_and_where_the_time_went() -> None:
    found = summary(RequestTrace("a", (CAME, *LOADED, *LOADED)))
    assert found.tokens_by_origin == {"peer": 443, "prefix cache": 256, "computed": 1}
    assert (found.tokens, found.failed) == (700, 0)
    assert (found.seconds, found.loading) == (pytest.approx(0.8), 0.5)
    assert (found.looking, found.queued) == (pytest.approx(0.1), pytest.approx(0.2))


def test_a_summary_of_a_failure_and_of_what_has_not_gone_on() -> None:
    end = load_ended(outcome=LoadOutcome.FAILED, at=11.0, miss=MissReason.FAILED, failure="gone")
    found = summary(RequestTrace("a", (CAME, LOADED[2], end)))
    assert (found.failed, found.seconds, found.tokens_by_origin) == (1, None, {})
    found = summary(RequestTrace("a", (CAME, LOADED[2], end, Scheduled("a", 12.0, 0, 700))))
    assert found.tokens_by_origin == {"computed": 700}


@pytest.mark.parametrize("fails", [False, True])
def test_a_summary_of_two_parts_counts_time_once_and_nothing_of_what_was_of_no_use(fails: bool) -> None:
    ends = LoadOutcome.FAILED if fails else LoadOutcome.READY
    host = load_began("a#1.0", "tiers", end=256, at=10.0)
    peer = load_began("a#1.1", end=700, begin=256, at=10.0, peer=PEER.source)
    found = summary(
        RequestTrace(
            "a",
            (
                CAME,
                host,
                peer,
                load_ended(peer, at=10.5),
                load_ended(host, outcome=ends, at=10.7, miss=MissReason.FAILED if fails else None),
                Scheduled("a", 11.0, 0 if fails else 699, 700, loads=() if fails else (host, peer)),
            ),
        )
    )
    assert found.tokens_by_origin == (
        {"computed": 700} if fails else {"host": 256, "peer": 443, "computed": 1}
    )
    assert (found.loading, found.queued) == (pytest.approx(0.7), pytest.approx(0.3))


@pytest.mark.parametrize(("heartbeats", "also"), [(0, ""), (3, " after 3 heartbeats of readers")])
def test_blocks_that_are_kept_for_the_next_turn(heartbeats, also):
    found = told(
        granted := LeaseGranted("a", 11.0, 699, 60.0, turn=True),
        LeaseEnded("a", 12.0, granted=granted, expired=False),
        heartbeats=heartbeats,
    )
    assert found[-2:] == [
        "1.0 Blocks of 699 tokens are kept for the next turn, for 60 s.",
        f"2.0 The blocks are given back{also}.",
    ]


def test_an_offer_that_the_engine_has_already_is_not_said_to_be_missing() -> None:
    lack = SourceMiss("peer", MissReason.LOCAL, detail="444 tokens offered, 444 here")
    assert told(sources_asked(10.0, local_tokens=444, misses=(lack,)))[1:] == [
        "0.0 The engine's own cache has 444 tokens.",
        "peer bids nothing, local: 444 tokens offered, 444 here",
        "The rest is computed: no source has more.",
    ]


def test_a_timeline_says_what_became_of_a_hint() -> None:
    hint = Hinted("a", 10.5, HintKind.NO_STORE, HintOutcome.APPLIED, "no tier stores it.")
    assert told(hint)[-1] == "0.5 Hint no store: no tier stores it."


def test_the_tenant_of_a_request_is_named() -> None:
    came = replace(CAME, tenant="acme", tenant_digest="5f0c2a9b11de")
    lines = [line.text for line in timeline(RequestTrace("a", (came,)))]
    assert lines[0] == "Its tenant is acme (digest 5f0c2a9b11de)."
