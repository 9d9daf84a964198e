"""Stories: what people read of what was told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.cache.bids import Bid, Part
from kvferry.explain.story import story
from kvferry.explain.summary import summary
from kvferry.observe.events import (
    Arrived,
    Asked,
    Finished,
    Lack,
    LeaseEnded,
    LeaseGranted,
    LoadBegan,
    LoadEnded,
    Miss,
    Moved,
    OfRequest,
    Outcome,
    Refused,
    Settled,
    Valued,
    Why,
)
from kvferry.observe.traces import FIRST, Stored, Trace

PEER = Bid("10.0.0.1:5000", (Part("peer", 444),))
LOOKING = replace(PEER, looking=True)
TIERS = Bid("tiers", (Part("host", 128), Part("file", 64)))
CAME = Arrived("a", 10.0, 700, ("peer", "tiers"))


def asked(at: float, *bids: Valued, **more: object) -> Asked:
    said = {"have": 0, "computing": 0.0, "lacks": (), "chosen": None, "why": Why.NOTHING, **more}
    return Asked("a", at, bids=bids, **said)


def told(*events: OfRequest, **more: object) -> list[str]:
    lines = story(Trace("a", (CAME, *events), **more))
    return [line.text if line.after is None else f"{line.after:.1f} {line.text}" for line in lines]


LOADED = (
    asked(10.1, Valued("peer", LOOKING, 444.0), have=256, chosen=LOOKING, why=Why.LOOKING),
    asked(
        10.2, Valued("peer", PEER, 444.0), Valued("tiers", TIERS, 96.0),
        have=256, computing=1.5, chosen=PEER, why=Why.BEST,
    ),
    LoadBegan("a", 10.3, "a#1", "peer", PEER.source, PEER.parts, 256, 699, "a#1"),
    LoadEnded(
        "a", 10.8, "a#1", "peer", Outcome.READY, None, "", 0.5,
        (Moved("0 full", "direct", 1 << 20), Moved("1 window", "staged", 4096)), 120, 6, 0.1, 0.2, 0.05,
    ),
    Settled("a", 10.8, 699, 700),
)  # fmt: skip


def test_a_load_is_told_from_the_coming_of_its_request_to_its_end() -> None:
    assert told(*LOADED, Finished("a", 12.0), stored=(Stored("full", 3, 10.5, 3, 0, 2048, 10.75),)) == [
        "0.0 It comes with 700 tokens; may be served by peer and tiers.",
        "0.1 The engine itself has 256 tokens.",
        "peer is still looking, for at most 444 tokens (444 from peer), worth 444.",
        "It waits for peer: a source that is still looking may have more.",
        "0.2 The engine itself has 256 tokens.",
        "peer bids 444 tokens (444 from peer), worth 444.",
        "tiers bids 192 tokens (128 from host, 64 from file), worth 96.",
        "Computing all is worth 1.5.",
        "peer is taken: the best bid.",
        "0.3 Loading tokens 256 to 698: 443 from peer.",
        "The peer is 10.0.0.1:5000",
        "0.8 Loaded in 500 ms: 100 ms planning, 200 ms reading, 50 ms checking, 150 ms waiting.",
        "1 MiB of 0 full, direct",
        "4 KiB of 1 window, staged",
        "120 pages in 6 descriptors",
        "0.8 The engine goes on with 699 tokens at hand and computes 1.",
        "2.0 The request has ended.",
        "0.5 Stored 3 of 3 chunks of full, 2 KiB, until 250 ms later.",
    ]


def test_a_failure_is_told_with_what_was_struck_out_and_tried_next() -> None:
    gone = "the peer is gone"
    assert (
        told(
            LoadBegan("a", 10.1, "a#1", "peer", PEER.source, PEER.parts, 0, 444, "a#1"),
            LoadEnded("a", 11.0, "a#1", "peer", Outcome.FAILED, Miss.FAILED, gone, 0.9),
            Refused("a", 11.0, PEER.source, gone),
            asked(
                11.5,
                Valued("peer", PEER, 0.0, gone),
                Valued("tiers", TIERS, 192.0),
                chosen=TIERS,
                why=Why.BEST,
            ),
            LoadBegan("a", 11.6, "a#2", "tiers", "tiers", TIERS.parts, 0, 192, "a#2"),
            LoadEnded("a", 12.1, "a#2", "tiers", Outcome.EXPIRED, Miss.DEADLINE, "chunk 1 is not there", 0.5),
            Refused("a", 12.1, "tiers", "chunk 1 is not there"),  # what is left of them may be bid
            asked(12.2, have=16, why=Why.NO_ROOM),
            Settled("a", 12.3, 16, 700),
        )[1:]
        == [
            "0.1 Loading tokens 0 to 443: 444 from peer.",
            "The peer is 10.0.0.1:5000",
            "1.0 The load has failed after 900 ms (failed): the peer is gone",
            "1.0 10.0.0.1:5000 is not asked again for this request",
            "1.5 peer is not asked again: the peer is gone",
            "tiers bids 192 tokens (128 from host, 64 from file), worth 192.",
            "tiers is taken: the best bid.",
            "1.6 Loading tokens 0 to 191: 128 from host, 64 from file.",
            "2.1 The load is given up at its deadline after 500 ms (deadline): chunk 1 is not there",
            "2.2 The engine itself has 16 tokens.",
            "The rest is to be computed: the engine has no blocks for a load and what comes after it.",
            "2.3 The engine goes on with 16 tokens at hand and computes 684.",
        ]
    )


def test_what_another_connector_has_brought_is_told_and_no_hit_of_the_engines_own() -> None:
    events = (
        asked(10.0, Valued("tiers", TIERS, 96.0), have=256, chosen=TIERS, why=Why.BEST),
        Settled("a", 11.0, 699, 700, 443),
    )
    assert told(*events)[-2:] == [
        "1.0 Another connector of the engine has brought 443 tokens.",
        "The engine goes on with 699 tokens at hand and computes 1.",
    ]
    assert summary(Trace("a", (CAME, *events))).places == {
        "prefix cache": 256,
        "another connector": 443,
        "computed": 1,
    }


def test_why_nothing_is_loaded_names_the_chunk_that_is_lacking() -> None:
    lack = Lack("tiers", Miss.NOT_STORED, "full_attention", "chunk 4 of full_attention")
    assert told(asked(10.0, lacks=(lack, Lack("peer", Miss.LOCAL))))[1:] == [
        "0.0 tiers bids nothing, not stored: chunk 4 of full_attention",
        "peer bids nothing, local.",
        "All of it is to be computed: no source has more.",
    ]


@pytest.mark.parametrize("again", [LOADED[1:2], LOADED[2:3], LOADED[:3]])
def test_a_request_that_is_admitted_anew_was_preempted(again: tuple[OfRequest, ...]) -> None:
    anew = "It was preempted, and is admitted anew."
    found = told(*LOADED, *again)
    assert [anew in line for line in found].count(True) == 1
    assert found.index(next(line for line in found if anew in line)) > len(told(*LOADED)) - 1


def test_what_only_one_source_may_serve_and_who_cannot_is_told() -> None:
    alone = Trace(
        "a", (replace(CAME, sources=(), declined=(Lack("tiers", Miss.UNNAMED, detail="no name"),)),)
    )
    assert [line.text for line in story(alone)] == [
        "It comes with 700 tokens.",
        "tiers cannot serve it, unnamed: no name",
    ]
    (nobody,) = story(Trace("a", (replace(CAME, sources=()),)))
    assert nobody.text == "It comes with 700 tokens. No other engine offers them, so no source is asked."


@pytest.mark.parametrize(
    ("expired", "heard", "said"),
    [
        (False, 3, "The lease is released by its consumer, after 3 signs of life."),
        (False, 1, "The lease is released by its consumer."),
        (False, 0, "The lease is released by its consumer."),
        (True, 0, "The lease has expired: its consumer gave no sign of life."),
        (True, 1, "The lease has expired: its consumer gave 1 sign of life, and then no more."),
        (True, 2, "The lease has expired: its consumer gave 2 signs of life, and then no more."),
    ],
)
def test_a_lease_is_told_with_its_end(expired: bool, heard: int, said: str) -> None:
    found = told(LeaseGranted("a", 11.0, 699, 30.0), LeaseEnded("a", 12.0, expired), heard=heard)
    assert found[1].startswith("1.0 699 tokens are offered to another engine; the lease ends 30 s after")
    assert found[2] == f"2.0 {said}"


def test_a_lease_that_a_reset_has_ended_is_told_so() -> None:
    ended = LeaseEnded("a", 12.0, expired=False, withdrawn=True)
    assert (
        told(LeaseGranted("a", 11.0, 699, 30.0), ended)[2]
        == "2.0 The lease is withdrawn: the cache was reset, or another sample of the request was aborted."
    )


def test_stores_that_failed_or_are_under_way_are_told() -> None:
    stored = (Stored("full", 5, 10.5, 2, 1, 2048, 10.75, "no room"), Stored("state", 1, 11.0))
    assert told(stored=stored)[1:] == [
        "0.5 Stored 2 of 5 chunks of full, 2 KiB, 2 under way; 1 have failed: no room",
        "1.0 Stored 0 of 1 chunks of state, 0 B, 1 under way.",
    ]


def test_a_gap_is_told() -> None:
    many = [Settled("a", 10.0 + n, 0, 10) for n in range(FIRST)]
    assert told(*many, left_out=7)[FIRST] == "... 7 events are not remembered ..."


def test_a_load_that_nobody_waits_for_is_told() -> None:
    end = LoadEnded("a", 11.0, "a#1", "peer", Outcome.DROPPED, None, "", 0.9)
    assert told(end)[1] == "1.0 The load is dropped after 900 ms: the request has ended before."
    given_up = replace(end, failure="another part of the prefix has failed")
    assert told(given_up)[1] == "1.0 The load is dropped after 900 ms: another part of the prefix has failed."


def test_a_summary_says_where_tokens_came_from_and_where_the_time_went() -> None:
    found = summary(Trace("a", (CAME, *LOADED, *LOADED)))
    assert found.places == {"peer": 443, "prefix cache": 256, "computed": 1}
    assert (found.tokens, found.failed) == (700, 0)
    assert (found.seconds, found.loading) == (pytest.approx(0.8), 0.5)
    assert (found.looking, found.queued) == (pytest.approx(0.1), pytest.approx(0.2))


def test_a_summary_of_a_failure_and_of_what_has_not_gone_on() -> None:
    end = LoadEnded("a", 11.0, "a#1", "peer", Outcome.FAILED, Miss.FAILED, "gone", 0.5)
    found = summary(Trace("a", (CAME, LOADED[2], end)))
    assert (found.failed, found.seconds, found.places) == (1, None, {})
    found = summary(Trace("a", (CAME, LOADED[2], end, Settled("a", 12.0, 0, 700))))
    assert found.places == {"computed": 700}


@pytest.mark.parametrize("fails", [False, True])
def test_a_summary_of_two_parts_counts_time_once_and_nothing_of_what_was_of_no_use(fails: bool) -> None:
    host = Bid("tiers", (Part("host", 256),))
    ends = Outcome.FAILED if fails else Outcome.READY
    found = summary(
        Trace(
            "a",
            (
                CAME,
                LoadBegan("a", 10.0, "a#1.0", "tiers", "tiers", host.parts, 0, 256, "a#1"),
                LoadBegan("a", 10.0, "a#1.1", "peer", PEER.source, PEER.parts, 256, 700, "a#1"),
                LoadEnded("a", 10.5, "a#1.1", "peer", Outcome.READY, None, "", 0.5),
                LoadEnded("a", 10.7, "a#1.0", "tiers", ends, Miss.FAILED if fails else None, "", 0.7),
                Settled("a", 11.0, 0 if fails else 700, 700),
            ),
        )
    )
    assert found.places == ({"computed": 700} if fails else {"host": 256, "peer": 444})
    assert (found.loading, found.queued) == (pytest.approx(0.7), pytest.approx(0.3))


@pytest.mark.parametrize(("heard", "also"), [(0, ""), (3, "; readers gave 3 signs of life")])
def test_blocks_that_are_kept_for_the_next_turn(heard, also):
    found = told(
        LeaseGranted("a", 11.0, 699, 60.0, turn=True), LeaseEnded("a", 12.0, expired=False), heard=heard
    )
    assert found[-2:] == [
        "1.0 Blocks of 699 tokens are kept for the next turn, for 60 s.",
        f"2.0 They are given back{also}.",
    ]


def test_an_offer_that_the_engine_has_already_is_not_said_to_be_missing() -> None:
    lack = Lack("peer", Miss.LOCAL, detail="444 tokens are offered, 444 are here")
    assert told(asked(10.0, have=444, lacks=(lack,)))[1:] == [
        "0.0 The engine itself has 444 tokens.",
        "peer bids nothing, local: 444 tokens are offered, 444 are here",
        "The rest is to be computed: no source has more.",
    ]
