"""Counts of events: each query has one end, and no count is negative or doubled."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from kvferry.connector.bids import Bid, PlaceTokens
from kvferry.connector.events import (
    Arrived,
    DecisionReason,
    Event,
    Finished,
    GroupBytes,
    Hinted,
    HintKind,
    HintOutcome,
    LateBlocks,
    LeaseEnded,
    LeaseExtended,
    LeaseGranted,
    LoadBegan,
    LoadEnded,
    LoadOutcome,
    MissReason,
    RetainedBytes,
    Scheduled,
    SnapshotsPlaced,
    SourceMiss,
    SourcesAsked,
    StoreBegan,
    StoreEnded,
    TierChanged,
    ValuedBid,
)
from kvferry.observe.metrics import METRICS, MetricKind, MetricsDelta
from kvferry.observe.metrics_listener import MetricsListener
from kvferry.transport.read_plan import LoadFigures
from support.examples import examples
from support.load_events import load_began, load_ended, sources_asked

SOURCES = ("peer", "tiers")
PROMPT = 100


def bid(source: str, tokens: int, *, looking: bool = False) -> Bid:
    return Bid(source, (PlaceTokens("peer" if source == "peer" else "host", tokens),), looking)


def asked(
    name="a", bids=(), misses=(), chosen=None, why=DecisionReason.NOTHING, local_tokens=0
) -> SourcesAsked:
    valued = tuple(ValuedBid(one.source, one, 1.0) for one in bids)
    return sources_asked(
        0.0,
        *valued,
        request_id=name,
        local_tokens=local_tokens,
        misses=tuple(misses),
        chosen=chosen,
        why=why,
    )


def counted(*events: Event) -> MetricsDelta:
    fold = MetricsListener()
    for event in events:
        fold(event)
    return fold.take()


def counts(*events: Event) -> dict[str, int]:
    return {" ".join([name, *map(str, of)]): n for (name, of), n in counted(*events).counters.items()}


def misses(*events: Event) -> dict[str, int]:
    found = counts(Arrived("a", 0.0, tokens=PROMPT, sources=SOURCES), *events, Scheduled("a", 1.0, 0, PROMPT))
    return {name.removeprefix("misses "): n for name, n in found.items() if name.startswith("misses")}


def test_a_hit_is_the_load_that_was_ready_and_others_have_lost_the_bid() -> None:
    bids = bid("peer", 80), bid("tiers", 60)
    assert counts(
        Arrived("a", 0.0, tokens=PROMPT, sources=SOURCES),
        asked(bids=bids, chosen=bids[0], why=DecisionReason.BEST),
        load_began(),
        load_ended(
            moved=(GroupBytes("0 full_attention", "direct", 640),),
            figures=LoadFigures(pages=4, descriptors=1),
        ),
        Scheduled("a", 1.0, 80, PROMPT, loads=(load_began(),)),
    ) == {
        "loads peer ready": 1,
        "load_bytes peer 0 full_attention direct": 640,
        "transfer_pages": 4,
        "transfer_descriptors": 1,
        "queries peer": 1,
        "hits peer": 1,
        "hit_tokens peer peer": 80,
        "queries tiers": 1,
        "misses tiers lost_bid ": 1,
    }


def test_the_speed_of_reads_stands_beside_the_strategy_that_was_chosen_by_it() -> None:
    moved = GroupBytes("0 full_attention", "shared", 640), GroupBytes("1 window", "direct", 64)
    slow, unknown = LoadFigures(read_bytes_per_second=2e8), LoadFigures()
    assert counted(
        load_began("a"), load_ended("a", moved=moved, figures=slow),
        load_began("b"), load_ended("b", moved=moved, figures=unknown),
    ).gauges == {
        ("pending_loads", ("peer",)): 0,
        ("read_bytes_per_second", ("shared",)): 2e8,
        ("read_bytes_per_second", ("direct",)): 2e8,
    }  # fmt: skip


@pytest.mark.parametrize("fails", [None, "peer", "tiers"])
def test_two_parts_of_a_prefix_are_two_hits_or_none(fails) -> None:
    loads = load_began("a#1.0", "tiers", 64), load_began("a#1.1", "peer", 80, 64)
    found = counts(
        Arrived("a", 0.0, tokens=PROMPT, sources=SOURCES),
        *loads,
        *(
            load_ended(load)
            if fails != load.source
            else load_ended(load, outcome=LoadOutcome.FAILED, miss=MissReason.FAILED)
            for load in loads
        ),
        Scheduled("a", 1.0, 0 if fails else 80, PROMPT, loads=() if fails else loads),
    )
    hits = {name: n for name, n in found.items() if name.startswith("hit")}
    assert hits == ({} if fails else {
        "hits peer": 1, "hits tiers": 1, "hit_tokens tiers host": 64, "hit_tokens peer peer": 16
    })  # fmt: skip
    assert (found["queries peer"], found["queries tiers"]) == (1, 1)


@pytest.mark.parametrize(
    ("failing", "available", "recomputed"),
    [
        (["tiers"], 0, {"tiers": 80}),
        (["peer"], 16, {"peer": 64}),
        (["tiers", "peer"], 0, {"tiers": 80}),
        (["tiers"], 80, {}),
    ],
)
def test_all_tokens_of_a_failed_pair_of_loads_are_recomputed(failing, available, recomputed) -> None:
    """Of the source that failed; of two that did, once."""
    found = counts(
        Arrived("a", 0.0, tokens=PROMPT, sources=SOURCES),
        load_began("a#1.0", "tiers", 64),
        load_began("a#1.1", "peer", 80, 64),
        *(
            load_ended(f"a#1.{number}", source, LoadOutcome.FAILED, miss=MissReason.FAILED)
            if source in failing
            else load_ended(f"a#1.{number}", source)
            for number, source in enumerate(("tiers", "peer"))
        ),
        Scheduled("a", 1.0, available, PROMPT),
    )
    assert {
        name.partition(" ")[2]: n for name, n in found.items() if name.startswith("recomputed")
    } == recomputed


def test_hit_tokens_are_counted_by_tier() -> None:
    load = load_began(source="tiers", end=60, parts=(PlaceTokens("host", 30), PlaceTokens("file", 30)))
    found = counts(
        Arrived("a", 0.0, tokens=PROMPT, sources=("tiers",)),
        load,
        load_ended(load),
        Scheduled("a", 1.0, 60, PROMPT, loads=(load,)),
    )
    assert (found["hit_tokens tiers host"], found["hit_tokens tiers file"]) == (30, 30)


@pytest.mark.parametrize(
    "miss", [MissReason.NOT_STORED, MissReason.EVICTED, MissReason.BUSY, MissReason.LOCAL]
)
def test_a_source_that_bid_nothing_has_said_why(miss: MissReason) -> None:
    lacks = [SourceMiss("tiers", miss, "several"), SourceMiss("peer", MissReason.REFUSED)]
    assert misses(asked(misses=lacks)) == {f"tiers {miss} several": 1, "peer refused ": 1}


@pytest.mark.parametrize("miss", [MissReason.GONE, MissReason.REFUSED, MissReason.LOCAL, MissReason.LOST_BID])
def test_a_ticket_counts_with_what_became_of_it(miss: MissReason) -> None:
    lack = SourceMiss("peer", miss)
    ticket = Arrived("a", 0.0, tokens=PROMPT, sources=SOURCES, ticket=True)
    missed = counts(ticket, asked(misses=[lack]), Scheduled("a", 1.0, 0, PROMPT))
    assert {n for n in missed if n.startswith("tickets")} == {f"tickets {miss}"}
    hit = Scheduled("a", 1.0, 80, PROMPT, loads=(load_began(),))
    loaded = counts(ticket, asked(), load_began(), load_ended(), hit)
    assert {n for n in loaded if n.startswith("tickets")} == {"tickets hit"}
    declined = counts(Arrived("a", 0.0, tokens=PROMPT, sources=(), declined=(lack,), ticket=True))
    assert declined[f"tickets {miss}"] == 1
    assert not any(name.startswith("tickets") for name in counts(replace(ticket, ticket=False)))


def test_a_source_that_said_nothing_is_said_to_have_nothing_stored() -> None:
    nothing = {"peer not_stored ": 1, "tiers not_stored ": 1}
    assert misses() == misses(asked()) == nothing


def test_only_what_was_said_last_counts() -> None:
    first = [SourceMiss(source, MissReason.STORING) for source in SOURCES]
    last = [SourceMiss(source, MissReason.EVICTED) for source in SOURCES]
    assert misses(asked(misses=first), asked(misses=last)) == {"peer evicted ": 1, "tiers evicted ": 1}


def test_why_a_bid_was_not_taken_is_told_apart() -> None:
    looking, ready = bid("peer", 90, looking=True), bid("tiers", 60)
    computing = asked(bids=[looking, ready], why=DecisionReason.COMPUTING)
    assert misses(computing) == {"peer looking ": 1, "tiers lost_bid ": 1}
    valued = ValuedBid("peer", looking, 9.0), ValuedBid("tiers", ready, 60.0)
    better = replace(asked(chosen=ready, why=DecisionReason.BEST), bids=valued)
    assert misses(better)["peer lost_bid "] == 1, "it was not waited for: what it may have is less"
    for why, miss in ((DecisionReason.ATTEMPTS, "attempts"), (DecisionReason.NO_ROOM, "no_room")):
        assert misses(asked(bids=[bid("peer", 9), ready], why=why)) == {
            f"peer {miss} ": 1,
            f"tiers {miss} ": 1,
        }


def test_a_source_whose_load_failed_missed_for_that_and_what_it_had_bid_is_recomputed() -> None:
    events = (
        Arrived("a", 0.0, tokens=PROMPT, sources=SOURCES),
        load_began(end=80),
        load_ended(outcome=LoadOutcome.EXPIRED, miss=MissReason.DEADLINE),
        load_began("a#2", "tiers", 60),
        load_ended("a#2", "tiers", LoadOutcome.FAILED, miss=MissReason.CHECKSUM),
        asked(misses=[SourceMiss(source, MissReason.NOT_STORED) for source in SOURCES]),
        Scheduled("a", 1.0, 16, PROMPT),
    )
    assert counts(*events) == {
        "loads peer expired": 1,
        "loads tiers failed": 1,
        "recomputed_tokens peer": 64,
        "queries peer": 1,
        "misses peer deadline ": 1,
        "queries tiers": 1,
        "misses tiers checksum ": 1,
    }
    assert "recomputed_tokens peer" not in counts(*events[:-1], Scheduled("a", 1.0, 80, PROMPT))
    again = Scheduled("a", 2.0, 0, PROMPT)
    assert counts(*events, again)["recomputed_tokens peer"] == 64, "preempted later, it is computed for that"


def test_tokens_that_another_source_loads_after_a_failure_are_not_recomputed() -> None:
    found = counts(
        Arrived("a", 0.0, tokens=PROMPT, sources=SOURCES),
        load_began(end=80),
        load_ended(outcome=LoadOutcome.FAILED, miss=MissReason.FAILED),
        load_began("a#2", "tiers", 60),
        load_ended("a#2", "tiers"),
        Scheduled("a", 1.0, 60, PROMPT, loads=(load_began("a#2", "tiers", 60),)),
    )
    assert (found["recomputed_tokens peer"], found["hits tiers"], found["misses peer failed "]) == (20, 1, 1)


def test_a_request_that_is_preempted_and_admitted_anew_is_counted_once_its_loads_twice() -> None:
    once, again = (
        (load, load_ended(load), Scheduled("a", at, 80, PROMPT, loads=(load,)))
        for load, at in ((load_began(), 1.0), (load_began("a#2"), 2.0))
    )
    found = counts(Arrived("a", 0.0, tokens=PROMPT, sources=("peer",)), *once, *again)
    assert found == {"loads peer ready": 2, "queries peer": 1, "hits peer": 1, "hit_tokens peer peer": 80}


def test_a_source_that_cannot_serve_a_request_is_counted_at_once_and_nothing_is_kept() -> None:
    fold = MetricsListener()
    fold(Arrived("a", 0.0, tokens=PROMPT, sources=(), declined=(SourceMiss("tiers", MissReason.UNNAMED),)))
    assert fold.take().counters == Counter(
        {("queries", ("tiers",)): 1, ("misses", ("tiers", "unnamed", "")): 1}
    )
    assert len(fold) == 0


def test_a_request_that_ends_before_it_is_settled_is_not_counted_but_its_load_is() -> None:
    events = (
        Arrived("a", 0.0, tokens=PROMPT, sources=SOURCES),
        load_began(),
        Finished("a", 1.0),
        load_ended(outcome=LoadOutcome.DROPPED),
    )
    found = counted(*events)
    assert found.counters == {("loads", ("peer", "dropped")): 1}
    assert found.gauges == {("pending_loads", ("peer",)): 0}
    assert not found.samples


def test_tiers_and_leases_and_late_blocks() -> None:
    found = counted(
        TierChanged(0.0, "host", used=10, capacity=100, owed=None, fetch_seconds=(0.1, 0.2)),
        TierChanged(
            0.0,
            "file",
            used=None,
            capacity=None,
            owed=3,
            fetched=1,
            stored=2,
            stored_bytes=30,
            evicted=4,
            missed=(("corrupt", 1),),
            dropped=(("no room", 2),),
            declined=(("too few uses", 5),),
        ),
        TierChanged(1.0, "file", used=20, capacity=200, owed=0),
        TierChanged(1.0, "fleet", served=3, served_bytes=30, refused=2, address="10.0.0.1:5700"),
        store := StoreBegan("a", 0.0, "store#0", "full_attention", 2),
        StoreEnded("a", 0.0, began=store, failure="", size=64, seconds=0.3),
        StoreEnded("a", 0.0, began=store, failure="gone", size=0, seconds=0.3),
        granted := LeaseGranted("a", 0.0, 80, 30.0),
        LeaseGranted("b", 0.0, 80, 30.0),
        LeaseExtended("a", 0.0),
        LeaseEnded("a", 0.0, granted=granted, expired=True),
        LateBlocks(0.0, 7),
        SnapshotsPlaced(1088, 4096),
    )
    assert {" ".join([name, *of]): n for (name, of), n in found.gauges.items()} == {
        "tier_used_bytes host": 10, "tier_capacity_bytes host": 100, "tier_owed_chunks file": 0,
        "tier_used_bytes file": 20, "tier_capacity_bytes file": 200, "leases": 1, "late_blocks": 7,
        "fleet_info 10.0.0.1:5700": 1,
        "first_snapshot_tokens": 1088, "snapshot_bytes": 4096,
    }  # fmt: skip
    assert {" ".join([name, *of]): n for (name, of), n in found.counters.items()} == {
        "tier_fetched_chunks file": 1, "tier_stored_chunks file": 2, "tier_stored_bytes file": 30,
        "tier_evicted_chunks file": 4, "tier_missed_chunks file corrupt": 1,
        "tier_dropped_chunks file no room": 2, "tier_declined_chunks file too few uses": 5,
        "tier_served_chunks fleet": 3, "tier_served_bytes fleet": 30,
        "tier_refused_chunks fleet": 2, "leases_granted": 2, "leases_ended expired": 1,
    }  # fmt: skip
    assert dict(found.samples) == {
        ("tier_fetch_seconds", ("host",)): [0.1, 0.2], ("tier_store_seconds", ("host",)): [0.3],
    }  # fmt: skip


def test_tenants_are_counted_by_label() -> None:
    part = PlaceTokens("host", 128)
    found = counted(
        Arrived("a", 0.0, tokens=PROMPT, sources=("tiers",), tenant="acme", tenant_digest="00" * 6),
        load := load_began("a#1", source="tiers", end=80, parts=(part,)),
        load_ended(load, source="tiers"),
        Scheduled("a", 1.0, 80, PROMPT, loads=(load,)),
        Arrived("b", 0.0, tokens=PROMPT, sources=(), tenant="acme"),
        TierChanged(0.0, "host", tenants=(("acme", 10, 2), ("others", 0, 0))),
    )
    of_tenants = {
        " ".join([name, *of]): n
        for (name, of), n in (*found.counters.items(), *found.gauges.items())
        if name.startswith("tenant_")
    }
    assert of_tenants == {
        "tenant_prompt_tokens acme": PROMPT, "tenant_hit_tokens acme host": 128,
        "tenant_evicted_chunks host acme": 2,
        "tenant_used_bytes host acme": 10, "tenant_used_bytes host others": 0,
    }  # fmt: skip


def test_taking_the_counts_resets_them() -> None:
    fold = MetricsListener()
    fold(LeaseGranted("a", 0.0, 80, 30.0))
    assert fold.take()
    assert not fold.take()


@st.composite
def lives(draw: st.DrawFn, name: str) -> list[Event]:
    """One request from its coming to its end, or to any point before: what admission may say of it."""
    sources = draw(st.lists(st.sampled_from(SOURCES), unique=True, min_size=1))
    events: list[Event] = [Arrived(name, 0.0, tokens=PROMPT, sources=tuple(sources))]
    loads = 0
    for _ in range(draw(st.integers(1, 3))):  # admissions: the first, and those after a preemption
        available, used = (local_tokens := draw(st.integers(0, PROMPT - 1))), ()
        for _ in range(draw(st.integers(0, 3))):  # attempts
            source, loads = draw(st.sampled_from(sources)), loads + 1
            total = draw(st.integers(local_tokens + 1, PROMPT))
            events.append(
                asked(
                    name,
                    bids=[bid(source, total - local_tokens)],
                    why=DecisionReason.BEST,
                    local_tokens=local_tokens,
                )
            )
            outcome = draw(st.sampled_from([LoadOutcome.READY, LoadOutcome.FAILED, LoadOutcome.EXPIRED]))
            events.append(load := load_began(f"{name}#{loads}", source, total, local_tokens))
            miss = (
                None
                if outcome is LoadOutcome.READY
                else draw(st.sampled_from([MissReason.FAILED, MissReason.CHECKSUM]))
            )
            events.append(load_ended(load, outcome=outcome, miss=miss))
            if outcome is LoadOutcome.READY:
                available, used = total, (load,)
                break
        else:
            lacking = [
                SourceMiss(source, draw(st.sampled_from(MissReason)))
                for source in sources
                if draw(st.booleans())
            ]
            why = draw(
                st.sampled_from(
                    [
                        DecisionReason.NOTHING,
                        DecisionReason.COMPUTING,
                        DecisionReason.ATTEMPTS,
                        DecisionReason.NO_ROOM,
                    ]
                )
            )
            events.append(asked(name, misses=lacking, why=why, local_tokens=local_tokens))
        events.append(Scheduled(name, 1.0, available, PROMPT, loads=used))
    events = events[: draw(st.integers(1, len(events)))]
    return [*events, Finished(name, 2.0), *_left_behind(events)]


def _left_behind(events: list[Event]) -> list[Event]:
    """A load that was under way when the request ended is reported after it."""
    done = [event.began for event in events if isinstance(event, LoadEnded)]
    under_way = [event for event in events if isinstance(event, LoadBegan) and event not in done]
    return [load_ended(event, outcome=LoadOutcome.DROPPED) for event in under_way]


@examples(60)
@given(st.data())
def test_hits_and_misses_are_queries_at_every_instant_and_nothing_is_negative(data: st.DataObject) -> None:
    queues = [data.draw(lives(name)) for name in "abc"]
    arrived = {name: queue[0].sources for name, queue in zip("abc", queues, strict=True)}
    fold, whole, happened = MetricsListener(), MetricsDelta(), list[Event]()
    while any(queues):
        queue = data.draw(st.sampled_from([queue for queue in queues if queue]))
        happened.append(event := queue.pop(0))
        fold(event)
        if data.draw(st.booleans()):
            step = fold.take()
            assert all(n > 0 for n in step.counters.values())
            whole.add(step)
            check(whole)
    whole.add(fold.take())
    check(whole)
    settled = {event.request_id for event in happened if isinstance(event, Scheduled)}
    total = Counter(source for name in settled for source in arrived[name])
    assert {source: whole.counters["queries", (source,)] for source in total} == total
    loads = [event for event in happened if isinstance(event, LoadEnded)]
    assert sum(n for (name, _), n in whole.counters.items() if name == "loads") == len(loads)
    assert not any(n for (name, _), n in whole.gauges.items() if name == "pending_loads")
    assert sum(n for (name, _), n in whole.counters.items() if name == "hit_tokens") <= PROMPT * len(settled)
    assert len(fold) == 0


def check(whole: MetricsDelta) -> None:
    for source in SOURCES:
        missed = sum(n for (name, of), n in whole.counters.items() if name == "misses" and of[0] == source)
        assert whole.counters["queries", (source,)] == whole.counters["hits", (source,)] + missed
    assert all(value >= 0 for value in whole.gauges.values())
    for name, labels in (*whole.counters, *whole.gauges, *whole.samples):
        assert len(METRICS[name].labels) == len(labels), name
    kinds = {
        MetricKind.COUNTER: whole.counters,
        MetricKind.GAUGE: whole.gauges,
        MetricKind.HISTOGRAM: whole.samples,
    }
    assert all(METRICS[name].kind is kind for kind, found in kinds.items() for name, _ in found)


def test_a_load_that_ends_when_another_request_has_the_name_does_no_harm() -> None:
    again = Arrived("a", 1.0, tokens=PROMPT, sources=SOURCES)
    failed = load_ended(outcome=LoadOutcome.FAILED, miss=MissReason.FAILED)
    assert counts(load_began(), Finished("a", 0.5), again, failed)["loads peer failed"] == 1


def test_an_event_that_is_heard_without_those_before_it_does_no_harm() -> None:
    events = (
        Scheduled("a", 0.0, 0, PROMPT),
        Finished("a", 0.0),
        asked(),
    )
    assert not counted(*events)
    assert not counted(*(replace(event, at=1.0) for event in events))


def test_hints_count_by_kind_and_outcome_and_retained_bytes_are_a_gauge() -> None:
    hint = Hinted("a", 0.0, HintKind.RETAIN, HintOutcome.PARTIAL, "some")
    whole = counted(hint, hint, RetainedBytes(0.0, 5), RetainedBytes(0.0, 3))
    assert whole.counters == {("hints", ("retain", "partial")): 2}
    assert whole.gauges == {("retained_bytes", ()): 3}
