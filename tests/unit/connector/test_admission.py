"""Admission: the best bid is taken, failures lead to the next, and pins are always given back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.connector.admission import Admission
from kvferry.connector.bids import Bid, PlaceTokens, Speeds
from kvferry.connector.blocks import Headroom, PartBlocks
from kvferry.connector.engine import CacheGroup
from kvferry.connector.events import (
    DecisionReason,
    GroupBytes,
    LateBlocks,
    LoadEnded,
    LoadOutcome,
    MissReason,
    Scheduled,
    SourceMiss,
    SourcesAsked,
)
from kvferry.connector.messages import Load, LoadPart, StepOrders, StepReports
from kvferry.connector.source import Answer, RunningLoads
from kvferry.geometry import Group, GroupKind
from kvferry.observe.metrics import MetricsDelta
from kvferry.planning.select import LoadSpan
from kvferry.transport.read_plan import LoadFigures, Report
from support.block_pool import request
from support.examples import examples
from support.fake_engine import FakeEngine, PartialHalf, counted, events_of
from support.offers import first_policy, weight_policy

BLOCK, PROMPT = 4, 40
CACHE_GROUPS = (
    CacheGroup(kind=GroupKind.FULL, attention_span=0, block_tokens=BLOCK),
    CacheGroup(kind=GroupKind.SLIDING, attention_span=6, block_tokens=BLOCK),
)
GROUPS = Group(GroupKind.FULL, BLOCK, 0, ()), Group(GroupKind.SLIDING, BLOCK, 6, ())


def offer(name, tokens, looking=False, promised=False):
    return Bid(name, (PlaceTokens(name, tokens),), looking, looking and promised)


@dataclass
class Stand:
    """A source that offers as many tokens as a test sets, and remembers the calls."""

    name: str
    total: int = 0
    looking: bool = False
    promised: bool = False
    serves: bool = True
    strikes: bool = True
    alignment_tokens: int = BLOCK
    miss: MissReason | None = None
    head_until: int = 0
    heard: list = field(default_factory=list)
    forgotten: list = field(default_factory=list)

    def arrived(self, request, excluded):
        self.excluded = excluded
        return self.serves

    def declined(self, request):
        return None if self.miss is None else SourceMiss(self.name, self.miss)

    def ask(self, request, local_tokens):
        return Answer(
            self.bids(request, local_tokens),
            lambda: self.why_no_bid(request, local_tokens),
            lambda alignment: self.head(request, local_tokens, alignment),
            lambda first: self.tail(request, local_tokens, first),
        )

    def why_no_bid(self, request, local_tokens):
        return SourceMiss(self.name, self.miss or MissReason.NOT_STORED, "0 full_attention")

    def bids(self, request, local_tokens):
        tokens = self.total - local_tokens
        return [offer(self.name, tokens, self.looking, self.promised)] if tokens > 0 else []

    def head(self, request, local_tokens, alignment_tokens):
        tokens = self.head_until // alignment_tokens * alignment_tokens - local_tokens
        return offer(self.name, tokens) if tokens > 0 else None

    def tail(self, request, local_tokens, first):
        tokens = self.total - first
        return offer(self.name, tokens, self.looking, self.promised) if tokens > 0 else None

    def has_room(self, bid, blocks):
        self.heard_of = bid.source, blocks
        return True

    def begin(self, load, request):
        self.load = load
        self.heard.append(("begin", load.span.begins, load.span.ends))
        return StandFeed(self, load)

    def alignments(self, request_id):
        return self.alignment_tokens, self.alignment_tokens

    def settled(self, request_id):
        self.heard.append(("settled", request_id))

    def finished(self, request_id):
        self.heard.append(("finished", request_id))


@dataclass
class StandFeed:
    """What such a source does for a load, which has one part."""

    source: Stand
    load: Load

    @property
    def origin(self):
        return f"{self.source.name} of {self.load.request_id}"

    def next_parts(self):
        return [LoadPart(self.load.key, None, last=True)]

    def drop(self):
        self.source.heard.append(("dropped", self.load.key))

    def moved(self, report):
        return (GroupBytes("0 full_attention", "copied", 100),)

    def miss(self, report):
        return MissReason.DEADLINE if report.late else MissReason.FAILED

    def ended(self, report, *, wanted):
        self.source.forgotten.append(self.load.key)
        if wanted:
            self.source.heard.append(("ended", report.failure))
            if report.failure is not None and self.source.strikes:
                self.source.excluded.setdefault(self.source.name, report.failure)


def engine_with(
    *sources,
    workers=2,
    attempts=2,
    policy=None,
    patience=10.0,
    whole=False,
    windows=(),
    prefix_cache=None,
):
    """An engine with these sources behind admission."""
    engine = FakeEngine(CACHE_GROUPS, blocks=64, workers=workers)
    engine.chooser = replace(
        policy or weight_policy({}), speeds=Speeds(engine.clock), patience_seconds=patience
    )
    parts = PartBlocks(GROUPS, engine.pool, whole)
    admission = Admission(
        CACHE_GROUPS,
        loads=RunningLoads(
            CACHE_GROUPS, workers=workers, pool=engine.pool, timeout_seconds=30.0, clock=engine.clock
        ),
        parts=parts,
        headroom=Headroom(windows, 8, engine.pool),
        attempts=attempts,
        sources=sources,
        chooser=engine.chooser,
        events=engine.events,
        prefix_cache=prefix_cache,
        clock=engine.clock,
    )
    engine.half = PartialHalf(admission=admission, parts=parts)
    return engine


def arrive(engine, name="a"):
    return engine.arrive(request(name, range(PROMPT)))


def admit_again(engine, one):
    """Admit a request after its load has failed: it lets others go first once."""
    assert engine.admission.matched(one, 0) is None
    return engine.admit(one)


def run(engine, one, cached_tokens=0):
    """Run a step that computes the token after these."""
    one.num_computed_tokens = cached_tokens
    engine.step((one, 1))


def alone(strikes=True, alignment_tokens=BLOCK, **settings):
    """An engine with one source of 24 tokens, and a new request."""
    source = Stand("one", 24, strikes=strikes, alignment_tokens=alignment_tokens)
    engine = engine_with(source, **settings)
    return engine, source, arrive(engine)


def test_the_most_tokens_win_and_the_first_of_equals():
    few, many, same = Stand("few", 8), Stand("many", 16), Stand("same", 16)
    engine = engine_with(few, many, same)
    assert engine.admit(arrive(engine)) == 16
    assert (few.heard, many.heard, same.heard) == ([], [("begin", 0, 16)], [])


def test_a_ready_source_is_used_while_another_is_looking():
    ready, looking = Stand("ready", 8), Stand("looking", 16, looking=True)
    engine = engine_with(ready, looking)
    assert engine.admit(arrive(engine)) == 8
    assert (ready.heard, looking.heard) == ([("begin", 0, 8)], [])


def test_a_request_waits_for_a_looking_source_if_no_other_has_tokens():
    empty, looking = Stand("empty"), Stand("looking", 16, looking=True)
    engine = engine_with(empty, looking)
    one = arrive(engine)
    assert engine.admit(one) is None
    assert engine.admission.awaited("a").source == "looking"
    empty.total = 8
    assert engine.admit(one) == 8, "it has found tokens"
    assert engine.admission.awaited("a") is None


def test_a_request_waits_for_a_ticket_for_more_tokens_than_the_ready_source():
    ready, peer = Stand("ready", 8), Stand("peer", 16, looking=True, promised=True)
    engine = engine_with(ready, peer)
    one = arrive(engine)
    assert engine.admit(one) is None
    peer.looking = False
    assert engine.admit(one) == 16


def test_a_request_waits_for_a_silent_peer_no_longer_than_its_patience():
    ready, peer = Stand("ready", 8), Stand("peer", 16, looking=True, promised=True)
    engine = engine_with(ready, peer, patience=5.0)
    one = arrive(engine)
    assert engine.admit(one) is None
    engine.clock.now += 4.9
    assert engine.admit(one) is None
    engine.clock.now += 0.2
    assert engine.admit(one) == 8
    ready.total = 0
    other = arrive(engine, "b")
    assert engine.admit(other) is None, "each request has its own patience"
    engine.clock.now += 5.0
    assert engine.admit(other) == 0, "it is computed"


def test_a_request_waits_no_longer_than_its_prompt_takes_to_compute():
    engine = engine_with(Stand("peer", 16, looking=True), Stand("empty"), patience=5.0)
    engine.chooser.speeds.record_computation(PROMPT, 2.0)
    one = arrive(engine)
    assert engine.admit(one) is None
    engine.clock.now += 1.9
    assert engine.admit(one) is None
    engine.clock.now += 0.2
    assert engine.admit(one) == 0


def test_the_time_until_an_answer_is_measured():
    source = Stand("peer", 16, looking=True)
    engine = engine_with(source, patience=5.0)
    speeds = engine.chooser.speeds
    one = arrive(engine)
    for _ in range(3):
        assert engine.admit(one) is None
        engine.clock.now += 1.0
    source.looking = False
    assert engine.admit(one) == 16
    assert speeds.answer_seconds("peer") == 3.0
    source.looking = True
    other = arrive(engine, "b")
    assert engine.admit(other) is None
    engine.clock.now += 13.0
    assert engine.admit(other) == 0
    assert speeds.answer_seconds("peer") == pytest.approx(0.7 * 3.0 + 0.3 * 13.0), (
        "it had not answered by then"
    )


def test_a_load_waits_a_while_for_requests_that_need_the_free_blocks():
    source = Stand("one", 24)
    engine = engine_with(source, workers=1, patience=5.0, windows=CACHE_GROUPS)
    waiting, second, third = (arrive(engine, name) for name in "abc")
    assert engine.admit(waiting) == 24
    engine.leave_free(13)
    assert engine.admission.matched(second, 0) is None, "8 blocks are taken, and 6 needed for the rest"
    engine.clock.now += 4.9
    assert engine.admission.matched(second, 0) is None
    engine.clock.now += 0.2
    assert engine.admission.matched(second, 0) == 0, "it is computed"
    engine.leave_free(30)
    engine.allocate(second, 0)
    run(engine, second)
    assert counted(engine)["misses one no_room "] == 1
    engine.leave_free(13)
    engine.report(source.load, None)
    assert engine.admission.matched(third, 0) is None, "it has not gone on yet"
    run(engine, waiting, 24)
    assert engine.admission.matched(third, 0) == 24, "nobody waits"


@pytest.mark.parametrize("ends", ["failed", "aborted"])
def test_a_failed_or_aborted_load_keeps_no_blocks_free(ends):
    source = Stand("one", 24, strikes=False)
    engine = engine_with(source, workers=1, windows=CACHE_GROUPS)
    first, second = (arrive(engine, name) for name in "ab")
    engine.admit(first)
    engine.leave_free(13)
    assert engine.admission.matched(second, 0) is None
    if ends == "failed":
        engine.report(source.load, "torn")
    else:
        engine.admission.finished("a")
    assert engine.admission.matched(second, 0) == 24


def test_weights_decide_which_source_serves():
    far, near = Stand("far", 24), Stand("near", 16)
    engine = engine_with(far, near, policy=weight_policy({"near": 2.0}))
    assert engine.admit(arrive(engine)) == 16
    assert near.heard == [("begin", 0, 16)]


def test_the_policy_first_takes_the_first_source():
    engine = engine_with(Stand("few", 8), Stand("many", 24), policy=first_policy())
    assert engine.admit(arrive(engine)) == 8


def test_a_request_that_waits_for_blocks_keeps_its_source():
    one, other = Stand("one", 20), Stand("other", 19)
    engine = engine_with(one, other)
    waiting = arrive(engine)
    assert engine.admission.matched(waiting, 0) == 20
    one.total, other.total = 19, 20
    assert engine.admission.matched(waiting, 0) == 19
    other.total = 32
    assert engine.admission.matched(waiting, 0) == 32


@pytest.mark.parametrize(
    ("reports", "late", "known"),
    [((None, None), False, True), (("slow", "slow"), True, True), (("torn", "torn"), False, False)],
    ids=["whole", "late", "failed"],
)
def test_a_load_measures_the_speed_of_its_place(reports, late, known):
    source = Stand("one", 24)
    engine = engine_with(source)
    engine.admit(arrive(engine))
    engine.clock.now += 2.0
    engine.report(source.load, *reports, late=late)
    seconds = engine.chooser.speeds.load_seconds("one", 12)
    assert seconds == pytest.approx(1.0 if known else 0.0)


def test_a_request_without_a_load_is_settled_with_all_sources():
    source, other = Stand("one"), Stand("other")
    engine = engine_with(source, other)
    assert engine.admit(arrive(engine)) == 0
    assert source.heard == other.heard == [("settled", "a")]


def test_a_request_that_no_source_serves_is_ignored():
    source = Stand("one", 8, serves=False)
    engine = engine_with(source)
    one = arrive(engine)
    assert (engine.admit(one), len(engine.admission)) == (0, 0)
    engine.admission.finished("a")
    assert source.heard == []


def test_a_load_has_its_span_tables_and_timeout():
    engine, source, one = alone()
    assert engine.admit(one, local_tokens=8) == 16
    load = source.load
    assert (load.request_id, load.source, load.span) == ("a", "one", LoadSpan(8, 24, PROMPT))
    assert [ids.tolist() for ids in load.tables] == [[b.block_id for b in of] for of in engine.tables["a"]]
    assert load.timeout_seconds == 30.0
    orders = StepOrders()
    engine.admission.schedule((), orders)
    assert orders.loads == [load], "workers get the same value"
    engine.admission.schedule((), orders := StepOrders())
    assert orders.loads == [], "once"
    assert engine.admission.origins("a") == {"one of a": 16}


def test_an_engine_that_takes_less_loads_the_end_of_what_was_offered():
    engine, source, one = alone()
    assert engine.admission.matched(one, 0) == 24
    engine.allocate(one, 16)
    assert source.heard == [("begin", 8, 24)]


def test_a_second_allocation_begins_no_second_load():
    engine, source, one = alone()
    engine.admit(one)
    engine.allocate(one, 24)
    engine.allocate(one, 0)
    assert source.heard == [("begin", 0, 24)]
    assert engine.admission.matched(one, 0) == 0, "it is loading"


def test_blocks_that_a_load_writes_are_pinned_until_every_worker_has_landed():
    engine, source, one = alone()
    engine.admit(one, local_tokens=12)
    table, window = engine.tables["a"]
    assert [block.ref_cnt for block in table] == [1] * 3 + [2] * 7
    assert [block.ref_cnt for block in window] == [0, 1, 1] + [2] * 7, "nobody holds the null block"
    engine.report(source.load, None)
    assert source.heard == [("begin", 12, 24)], "one worker of two"
    assert table[3].ref_cnt == 2
    engine.report(source.load, None)
    assert source.heard[1:] == [("ended", None), ("settled", "a")]
    assert {block.ref_cnt for block in table} == {1}
    engine.free(one)
    assert engine.pool.references == 0


def test_reports_of_several_workers_may_come_as_one():
    source = Stand("one", 24)
    engine = engine_with(source, workers=3)
    engine.admit(arrive(engine))
    engine.report(source.load, None, workers=3)
    assert source.heard[1:] == [("ended", None), ("settled", "a")]
    assert engine.pool.references == 2 * PROMPT // BLOCK


def test_a_load_fails_if_it_fails_on_one_worker_and_the_next_bid_is_taken():
    best, second = Stand("best", 24), Stand("second", 16)
    engine = engine_with(best, second)
    one = arrive(engine)
    engine.admit(one)
    engine.report(best.load, None, "torn")
    assert best.heard[1:] == [("ended", "torn")], "a failed load does not settle the request"
    engine.free(one)
    assert engine.pool.references == 0
    assert admit_again(engine, one) == 16
    engine.report(second.load, None, None)
    assert second.heard[1:] == [("ended", None), ("settled", "a")]


def test_a_request_is_computed_when_all_sources_are_excluded():
    engine, source, one = alone(attempts=9)
    engine.admit(one)
    engine.report(source.load, "torn", "torn")
    assert admit_again(engine, one) == 0
    assert source.heard[-1] == ("settled", "a")


def test_attempts_are_capped_though_a_source_goes_on_bidding():
    engine, source, one = alone(strikes=False, attempts=3)
    assert engine.admit(one) == 24
    for left in (24, 24, 0):
        engine.report(source.load, "torn", "torn")
        assert admit_again(engine, one) == left


def test_a_plan_after_a_failed_load_is_dropped_if_blocks_are_short():
    engine, source, one = alone(strikes=False, attempts=9)
    engine.admit(one)
    engine.report(source.load, "torn", "torn")
    engine.free(one)
    assert engine.admission.matched(one, 0) is None, "other requests go first"
    assert engine.admission.matched(one, 0) == 24
    assert engine.admission.matched(one, 0) == 0, "the engine had no blocks for it, or it would not ask again"
    engine.allocate(one, 0)
    engine.free(one)
    assert engine.admission.matched(one, 0) == 24, "preempted, it is a request like any other"


def test_loads_that_bring_something_do_not_use_up_attempts():
    engine, source, one = alone(attempts=1)
    for _ in range(3):
        assert engine.admit(one) == 24
        engine.report(source.load, None, None)
        run(engine, one)
        engine.free(one)  # preempted
    assert engine.pool.references == 0


def test_a_request_that_asks_again_before_it_computes_anything_uses_up_attempts():
    engine, source, one = alone(attempts=3)
    for _ in range(3):
        assert engine.admit(one) == 24
        engine.report(source.load, None, None)
        engine.free(one)
    assert engine.admit(one) == 0


def test_no_load_begins_if_only_the_last_token_is_missing():
    source = Stand("tiers", PROMPT)
    engine = engine_with(source, workers=1)
    one = arrive(engine)
    assert engine.admit(one, local_tokens=PROMPT - 1) == 0
    run(engine, one)
    only = engine.arrive(request("b", [7]))
    assert engine.admit(only) == 0
    run(engine, only)
    assert counted(engine) == {
        "queries tiers": 2, "misses tiers local ": 1, "misses tiers short_prompt ": 1,
    }  # fmt: skip
    assert source.heard == [("settled", "a"), ("settled", "b")]


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        (
            SimpleNamespace(prompt_logprobs=1, prompt_logprob_token_ids=None),
            "logprobs of its prompt are asked for (prompt_logprobs, or echo with logprobs)",
        ),
        (
            SimpleNamespace(prompt_logprobs=None, prompt_logprob_token_ids=[5]),
            "logprobs of its prompt are asked for (prompt_logprobs, or echo with logprobs)",
        ),
        (
            SimpleNamespace(prompt_logprobs=None, prompt_logprob_token_ids=None),
            "it asks to read no cache (skip_reading_prefix_cache)",
        ),
        (None, "it asks to read no cache (skip_reading_prefix_cache)"),
    ],
)
def test_a_request_that_must_not_use_cached_kv_is_reported_as_skipped(sampling, why):
    source = Stand("peer", PROMPT - 1)
    engine = engine_with(source, workers=1)
    one = request("a", range(PROMPT), skip_reading_prefix_cache=True, sampling_params=sampling)
    engine.arrive(one)
    assert engine.admission.matched(one, 0) == engine.admission.matched(one, 0) == 0
    engine.allocate(one, 0)
    run(engine, one)
    assert source.heard == [("settled", "a")], "a peer need not keep it"
    (asked,) = events_of(engine, SourcesAsked)
    assert (asked.bids, asked.chosen, asked.why) == ((), None, DecisionReason.SKIPPED)
    (lack,) = asked.misses
    assert lack == SourceMiss(
        "peer", MissReason.SKIPPED, detail=f"{why}, so the engine computes the whole prompt"
    )
    assert counted(engine) == {"queries peer": 1, "misses peer skipped ": 1}


def test_a_late_load_is_a_failure_and_keeps_its_blocks_until_it_has_landed():
    engine, source, one = alone()
    engine.admit(one)
    load = source.load
    engine.report(load, "its deadline passed", "its deadline passed", late=True)
    engine.free(one)
    pinned = 2 * PROMPT // BLOCK
    assert engine.pool.references == pinned == engine.admission.loads.late_blocks("one")
    assert source.heard[-1] == ("ended", "its deadline passed")
    engine.landed(load, 1)
    assert engine.pool.references == pinned
    engine.landed(load, 1)
    assert engine.pool.references == 0
    assert engine.admission.loads.late_blocks("one") == 0


def test_a_load_that_one_worker_has_late_and_another_in_time_is_late():
    engine, source, one = alone()
    engine.admit(one)
    engine.report(source.load, None)
    engine.report(source.load, "its deadline passed", late=True)
    assert source.heard[-1] == ("ended", "its deadline passed")
    engine.free(one)
    engine.landed(source.load, 1)
    assert engine.pool.references == 0


def test_a_request_aborted_while_loading_is_settled_once_and_its_load_still_reported():
    source, other = Stand("one", 24), Stand("other", 8)
    engine = engine_with(source, other)
    one = arrive(engine)
    engine.admit(one)
    load = source.load
    engine.admission.finished("a")
    engine.free(one)
    assert source.heard[1:] == [("dropped", load.key), ("settled", "a"), ("finished", "a")]
    assert other.heard == [("settled", "a"), ("finished", "a")]
    assert engine.admission.loads.late_blocks("one") > 0
    engine.report(load, None, None)
    assert source.heard[4:] == [], "no request waits for it"
    assert (engine.pool.references, len(engine.admission), len(engine.admission.loads)) == (0, 0, 0)


def test_a_request_with_a_reused_id_is_not_affected_by_the_earlier_load():
    engine, source, one = alone()
    engine.admit(one)
    load = source.load
    engine.admission.finished("a")
    engine.free(one)
    again = arrive(engine)
    engine.admit(again)
    heard = list(source.heard)
    engine.report(load, "torn", "torn")
    assert source.heard == heard
    engine.report(source.load, None, None)
    assert source.heard[len(heard) :] == [("ended", None), ("settled", "a")]
    engine.free(again)
    assert engine.pool.references == 0


@pytest.mark.parametrize("served", [True, False])
def test_a_preempted_request_is_served_again(served):
    engine, source, one = alone()
    if served:
        engine.admit(one)
        engine.report(source.load, None, None)
    else:
        source.total = 0
        engine.admit(one)
        source.total = 24
    engine.free(one)
    assert engine.admit(one, local_tokens=4) == 20
    assert source.heard[-1] == ("begin", 4, 24)


def test_an_offer_that_is_gone_when_blocks_are_allocated_is_not_loaded():
    engine, source, one = alone()
    assert engine.admission.matched(one, 0) == 24
    source.total = 0
    assert engine.admission.matched(one, 0) == 0
    engine.allocate(one, 0)
    assert source.heard == [("settled", "a")]
    assert engine.admission.loads.late_blocks("one") == len(engine.admission.loads) == 0


def cached(blocks):
    """Put blocks into the engine's prefix cache."""
    for block in blocks:
        if not block.is_null:
            block.block_hash = b"content"


def loaded_in_part(source):
    """An engine that has cached what a load filled, and the block that holds only [18, 20)."""
    engine = engine_with(source)
    one = arrive(engine)
    engine.admit(one)  # 23 sees tokens from 18 on
    engine.report(source.load, None, None)
    table, window = engine.tables["a"]
    cached(table)
    cached(window)
    return engine, one, window[4]


def test_a_partly_loaded_block_is_evicted_when_its_request_resumes():
    engine, one, part = loaded_in_part(Stand("one", 24, alignment_tokens=2))
    engine.allocate(one, 0)
    assert part.block_hash is None
    assert all(
        block.block_hash for table in engine.tables["a"] for block in table if block not in (part, table[0])
    )


def test_a_partly_loaded_block_is_evicted_with_the_step():
    engine, _, part = loaded_in_part(Stand("one", 24, alignment_tokens=2))
    engine.admission.schedule((), StepOrders())
    assert part.block_hash is None


def test_a_prefix_that_may_contain_an_evicted_block_is_looked_up_again():
    source = Stand("one", 24, alignment_tokens=2)
    engine, _, part = loaded_in_part(source)
    other = request("b", range(PROMPT))
    assert engine.admission.matched(other, 20) is None
    assert part.block_hash is None
    assert engine.admission.matched(other, 0) == 0


def test_a_second_allocation_during_a_load_evicts_no_block():
    source, other = Stand("one", 24, alignment_tokens=2), request("b", range(PROMPT))
    engine = engine_with(source)
    one = arrive(engine)
    engine.admit(one)
    engine.allocate(one, 24)
    engine.report(source.load, None, None)
    assert engine.admission.matched(other, 0) == 0
    _, window = engine.tables["a"]
    cached(window)
    assert engine.admission.matched(other, 20) is None


def test_wholly_loaded_blocks_stay_in_the_prefix_cache():
    engine, one, block = loaded_in_part(Stand("one", 24))
    assert engine.admission.matched(request("b", range(PROMPT)), 20) == 0
    engine.allocate(one, 0)
    assert block.block_hash is not None


def test_masked_blocks_belong_to_one_request():
    engine, one, part = loaded_in_part(Stand("one", 24, alignment_tokens=2))
    tables = tuple([block.block_id for block in table] for table in engine.tables["a"])
    engine.allocate(one, 0)
    assert part.block_id not in engine.half.parts.masked_tables("a", tables)[1]
    assert engine.half.parts.masked_tables("b", tables) == tables
    elsewhere = tables[0], [*tables[1][5:], *tables[1][:5]]
    assert engine.half.parts.masked_tables("a", elsewhere) == elsewhere, "freed and allocated again"
    engine.half.parts.forget("a")
    assert engine.half.parts.masked_tables("a", tables) == tables
    cached([part])
    assert not engine.half.parts.evict()


def test_freed_blocks_of_a_failed_load_are_not_evicted():
    engine, source, one = alone(alignment_tokens=2)
    engine.admit(one)
    _, window = engine.tables["a"]
    engine.report(source.load, "torn", "torn")
    engine.free(one)
    cached(window)  # somebody else's, whole
    assert not engine.half.parts.evict()


def test_freed_blocks_of_a_preempted_request_are_not_evicted():
    engine, source, one = alone(alignment_tokens=2)
    engine.admit(one)
    engine.report(source.load, None, None)
    _, window = engine.tables["a"]
    tables = tuple([block.block_id for block in table] for table in engine.tables["a"])
    engine.free(one)
    one.num_preemptions += 1
    cached(window)
    assert not engine.half.parts.evict()
    source.total = 0
    assert engine.admit(one) == 0
    assert engine.half.parts.masked_tables("a", tables) == tables, "they are computed anew"


def test_the_beginning_comes_from_one_source_and_the_rest_from_another():
    near, far = Stand("near", 0, head_until=18), Stand("far", 39)
    engine = engine_with(near, far, policy=weight_policy({"near": 2.0}))
    one = arrive(engine)
    assert engine.admit(one, local_tokens=4) == 35
    assert (near.heard, far.heard) == ([("begin", 4, 16)], [("begin", 16, 39)]), "16: where a block ends"
    assert (near.load.span, far.load.span) == (
        LoadSpan(4, 39, PROMPT, (4, 16)),
        LoadSpan(4, 39, PROMPT, (16, 39)),
    )
    assert near.load.attempt == far.load.attempt
    assert (near.load.loads, far.load.loads) == (2, 2)
    assert near.load.key != far.load.key
    table, window = engine.tables["a"]
    assert [block.ref_cnt for block in table] == [1] + [2] * 9
    assert [block.ref_cnt for block in window] == [1] + [2] * 9, "windows come with the end"
    assert engine.admission.origins("a") == {"near of a": 12, "far of a": 23}


def composed(**options):
    near, far = Stand("near", 0, head_until=16), Stand("far", 39)
    engine = engine_with(near, far, policy=weight_policy({"near": 2.0}), **options)
    one = arrive(engine)
    assert engine.admit(one) == 39
    return engine, one, near, far


@pytest.mark.parametrize("first", ["near", "far"])
def test_a_request_goes_on_when_both_parts_are_there(first):
    engine, one, near, far = composed()
    earlier, later = (near, far) if first == "near" else (far, near)
    engine.report(earlier.load, None, None)
    assert earlier.heard[1:] == [("ended", None)]
    assert engine.admission.matched(one, 0) == 0, "it is loading"
    engine.report(later.load, None, None)
    assert later.heard[1:] == [("ended", None), ("settled", "a")]
    assert earlier.heard[1:] == [("ended", None), ("settled", "a")]
    engine.free(one)
    assert engine.pool.references == 0


@pytest.mark.parametrize("first", ["near", "far"])
@pytest.mark.parametrize("fails", ["near", "far"])
def test_only_the_source_of_the_failed_part_is_excluded(first, fails):
    engine, one, near, far = composed()
    for source in (near, far) if first == "near" else (far, near):
        engine.report(source.load, "torn" if source.name == fails else None, None)
    engine.free(one)
    assert engine.pool.references == 0
    if fails == "near":
        assert admit_again(engine, one) == 39
        assert far.load.span == LoadSpan(0, 39, PROMPT)
    else:
        assert admit_again(engine, one) == 0, "a head alone is of no use"
        assert near.heard[-1] == ("settled", "a")


def handed_over(engine):
    meta = StepOrders()
    engine.admission.schedule((), meta)
    return meta.given_up


@pytest.mark.parametrize("growing", [True, False])
def test_a_growing_load_that_failed_on_one_worker_is_dropped(growing):
    source = Stand("one", 24)
    source.bids = lambda request, local_tokens: [
        Bid("one", (PlaceTokens("one", 24 - local_tokens),), growing=growing)
    ]
    engine = engine_with(source)
    one = arrive(engine)
    assert engine.admit(one) == 24
    engine.report(source.load, "torn")
    assert source.heard[1:] == ([("dropped", source.load.key)] if growing else [])
    engine.report(source.load, "torn")
    assert source.heard[-1] == ("ended", "torn")


@pytest.mark.parametrize("lands", [True, False], ids=["it lands", "it hangs"])
@pytest.mark.parametrize("fails", ["near", "far"])
def test_the_other_part_of_a_failed_load_is_dropped_and_not_excluded(fails, lands):
    engine, one, near, far = composed()
    bad, good = (near, far) if fails == "near" else (far, near)
    load = good.load
    engine.report(bad.load, "torn")
    assert handed_over(engine) == {load.key: "another part of the prefix has failed"}
    assert good.heard[1:] == [("dropped", load.key)]
    engine.report(bad.load, None)
    assert handed_over(engine) == {}, "it is ordered once"
    assert engine.admission.matched(one, 0) == 0, "not every worker has reported it"
    why = "another part of the prefix has failed"
    engine.report(load, why, None if lands else why, late=not lands)
    assert good.heard[1:] == [("dropped", load.key)], "it is not excluded"
    engine.free(one)
    held = 0 if lands else sum(block.ref_cnt for block in engine.pool.blocks)
    assert bool(held) == (not lands), "bytes in flight may still be written"
    dropped = [e for e in engine.told if isinstance(e, LoadEnded) and e.began.source == good.name]
    assert [(e.outcome, e.failure) for e in dropped] == [(LoadOutcome.DROPPED, why)]
    good.head_until = 0
    assert admit_again(engine, one) == (39 if good is far else 0)
    if not lands:
        engine.landed(load, 2)
    engine.admission.finished("a")
    if good is far:
        engine.report(far.load, None, None)
    engine.free(one)
    assert engine.pool.references == 0


def test_two_parts_that_fail_at_once_are_both_excluded():
    engine, one, near, far = composed(workers=1)
    reports = {source.load.key: Report("torn", late=False) for source in (near, far)}
    engine.report_at_once(reports)
    assert near.heard[1:] == far.heard[1:] == [("ended", "torn")]
    assert handed_over(engine) == {}
    assert admit_again(engine, one) == 0


def test_two_parts_that_fail_at_once_on_one_worker_are_given_up_and_excluded():
    engine, one, near, far = composed()
    reports = {source.load.key: Report("torn", late=False) for source in (near, far)}
    engine.report_at_once(reports)
    why = "another part of the prefix has failed"
    assert handed_over(engine) == dict.fromkeys(reports, why)
    for source in (near, far):
        engine.report(source.load, why)
        assert source.heard[-1] in (("ended", "torn"), ("settled", "a"))
    assert admit_again(engine, one) == 0


def test_a_load_in_parts_measures_no_speed():
    engine, _, near, far = composed()
    for source in (near, far):
        engine.report(source.load, None, None)
    speeds = engine.chooser.speeds
    assert [speeds.load_seconds(place, 100) for place in ("near", "far")] == [0, 0]


def test_an_attempt_of_two_parts_is_one():
    engine, one, near, far = composed(attempts=1)
    engine.report(near.load, None, None)
    engine.report(far.load, None, None)
    run(engine, one)
    assert engine.admit(one) == 39, "it was served, and is admitted anew after it was preempted"
    engine.report(near.load, "torn", "torn")
    engine.report(far.load, "torn", "torn")
    assert admit_again(engine, one) == 0


def test_a_request_aborted_while_two_parts_are_loading_holds_blocks_until_both_have_landed():
    engine, one, near, far = composed()
    engine.admission.finished("a")
    assert [("dropped", near.load.key)] == [heard for heard in near.heard if heard[0] == "dropped"]
    assert [("dropped", far.load.key)] == [heard for heard in far.heard if heard[0] == "dropped"]
    engine.free(one)
    engine.report(near.load, "the request has ended", None)
    assert engine.pool.references == 10 + 6
    engine.report(far.load, None, None)
    assert engine.pool.references == 0


def test_an_engine_that_takes_less_may_need_the_second_part_alone():
    near, far = Stand("near", 0, head_until=16), Stand("far", 39)
    engine = engine_with(near, far, policy=weight_policy({"near": 2.0}))
    one = arrive(engine)
    assert engine.admission.matched(one, 0) == 39
    engine.allocate(one, 19)
    assert (near.heard, far.load.span) == ([], LoadSpan(20, 39, PROMPT, (16, 39)))
    assert far.load.loads == 1
    engine.report(far.load, None, None)
    assert far.heard[-1] == ("settled", "a")


def test_one_source_that_has_all_is_preferred_to_two():
    both, far = Stand("both", 39, head_until=16), Stand("far", 39)
    engine = engine_with(both, far)
    assert engine.admit(arrive(engine)) == 39
    assert (both.load.span, far.heard) == (LoadSpan(0, 39, PROMPT), [])


def test_a_request_waits_for_a_promised_tail():
    near, far = Stand("near", 12, head_until=16), Stand("far", 39, looking=True, promised=True)
    engine = engine_with(near, far, patience=5.0)
    one = arrive(engine)
    assert engine.admit(one) is None
    engine.clock.now += 5.1
    assert engine.admit(one) == 12
    far.looking = False
    assert engine.admit(arrive(engine, "b")) == 39


@pytest.mark.parametrize("total", [16, 12])
def test_a_head_is_combined_only_with_a_longer_tail(total):
    near, far = Stand("near", 8, head_until=16), Stand("far", total)
    engine = engine_with(near, far, policy=weight_policy({"near": 2.0, "far": 0.1}))
    assert engine.admit(arrive(engine)) == 8
    assert (near.load.span, far.heard) == (LoadSpan(0, 8, PROMPT), [])


def names_of_events(engine):
    return [type(event).__name__ for event in engine.told]


@pytest.mark.parametrize("ends", ["first", "last"])
def test_a_source_forgets_a_load_once(ends):
    source = Stand("tiers", 16)
    engine = engine_with(source)
    one = arrive(engine)
    engine.admit(one)
    if ends == "first":
        engine.admission.finished("a")
    engine.report(source.load, None)
    assert source.forgotten == []
    engine.report(source.load, None)
    assert source.forgotten == [source.load.key]


def test_events_of_a_request_are_in_order_and_counted_once():
    peer, tiers = Stand("peer", 16), Stand("tiers", 8)
    engine = engine_with(peer, tiers)
    one = arrive(engine)
    assert engine.admission.matched(one, 0) == 16
    assert engine.admission.matched(one, 0) == 16, "it waits for room"
    engine.allocate(one, 16)
    engine.report(peer.load, None, None)
    engine.allocate(one, 0)
    engine.admission.finished("a")
    assert names_of_events(engine) == [
        "Arrived", "SourcesAsked", "LoadBegan", "LoadEnded", "Scheduled", "Finished",
    ]  # fmt: skip
    (asked,) = (event for event in engine.told if isinstance(event, SourcesAsked))
    assert [(one.source, one.value, one.excluded) for one in asked.bids] == [
        ("peer", 16, ""),
        ("tiers", 8, ""),
    ]
    assert (asked.chosen, asked.why, asked.misses) == (asked.bids[0].bid, DecisionReason.BEST, ())
    assert counted(engine) == {
        "queries peer": 1, "hits peer": 1, "hit_tokens peer peer": 16, "loads peer ready": 1,
        "queries tiers": 1, "misses tiers lost_bid ": 1, "load_bytes peer 0 full_attention copied": 100,
    }  # fmt: skip
    assert all(first.at <= then.at for first, then in pairwise(engine.told))


def test_the_loads_of_a_scheduled_request_are_those_of_the_attempt_that_succeeded():
    engine, one, near, far = composed()
    engine.report(far.load, None, None)
    engine.report(near.load, "torn", None)
    engine.free(one)
    assert admit_again(engine, one) == 39
    engine.report(far.load, None, None)
    (event,) = events_of(engine, Scheduled)
    assert [(load.source, load.begin, load.end) for load in event.loads] == [("far", 0, 39)]


def test_the_parts_of_a_load_are_what_is_loaded_and_not_what_was_offered():
    tiers = Stand("tiers", 39)
    tiers.bids = lambda *_: [Bid("tiers", (PlaceTokens("host", 20), PlaceTokens("file", 19)))]
    engine = engine_with(tiers)
    one = arrive(engine)
    assert engine.admission.matched(one, 0) == 39
    engine.allocate(one, 24)  # the engine has found 15 tokens in its own cache since
    engine.report(tiers.load, None, None)
    (event,) = events_of(engine, Scheduled)
    assert event.loads[0].parts == (PlaceTokens("host", 20), PlaceTokens("file", 4))


@pytest.mark.parametrize("failure", [None, "gone"])
def test_the_end_of_a_load_has_the_figures_of_all_workers(failure):
    peer = Stand("peer", 16)
    engine = engine_with(peer)
    engine.admit(arrive(engine))
    figures = LoadFigures(
        bytes_by_group=(640, 0), strategies_by_group=(("direct",), ()), pages=4, plan_seconds=0.1
    )
    for end in (failure, None):
        report = Report(end, figures=figures)
        engine.admission.take_reports(StepReports(reports={peer.load.key: report}))
    (ended,) = (event for event in engine.told if isinstance(event, LoadEnded))
    assert ended.figures == replace(figures, bytes_by_group=(1280, 0), pages=8)
    assert bool(ended.moved) == (failure is None)


def test_events_of_a_failed_load_name_the_exclusion_and_the_recomputed_tokens():
    peer = Stand("peer", 16)
    engine = engine_with(peer, workers=1)
    one = arrive(engine)
    engine.admit(one)
    engine.report(peer.load, "gone")
    assert admit_again(engine, one) == 0
    run(engine, one)
    assert names_of_events(engine) == [
        "Arrived", "SourcesAsked", "LoadBegan", "LoadEnded", "SourcesAsked", "Scheduled",
    ]  # fmt: skip
    assert (engine.told[-2].bids[0].excluded, engine.told[-2].why) == ("gone", DecisionReason.NOTHING)
    assert counted(engine) == {
        "loads peer failed": 1, "queries peer": 1, "misses peer failed ": 1, "recomputed_tokens peer": 16,
    }  # fmt: skip


def test_the_last_token_counts_as_computed_even_if_its_kv_is_loaded():
    tiers = Stand("tiers", PROMPT)
    engine = engine_with(tiers, workers=1)
    assert engine.admit(arrive(engine)) == PROMPT
    engine.report(tiers.load, None)
    assert scheduled(engine) == [(PROMPT - 1, 0)]


def scheduled(engine):
    return [(event.cached_tokens, event.other_connector_tokens) for event in events_of(engine, Scheduled)]


@pytest.mark.parametrize(("local", "available"), [(8, 39), (None, 39), (0, 24)])
def test_tokens_loaded_by_another_connector_are_counted_apart(local, available):
    # A parent of several connectors asks like this: 0 tokens are to be loaded, and the engine has more later.
    ours = Stand("tiers", 32)
    engine = engine_with(ours)
    one = arrive(engine)
    one.prefill_stats = None if local is None else SimpleNamespace(num_local_cached_tokens=local)
    assert engine.admission.matched(one, local or 0) == 32 - (local or 0)
    engine.allocate(one, 0)
    assert scheduled(engine) == [], "the other one is loading"
    engine.allocate(one, 0)
    engine.admission.schedule({"b": 1}, StepOrders())
    run(engine, one, available)
    run(engine, one, available + 1)
    assert scheduled(engine) == [(available, available - (local or 0))]
    assert counted(engine) == {"queries tiers": 1, "misses tiers lost_bid ": 1}


@pytest.mark.parametrize(("own", "others"), [(8, 4), (None, 0)])
def test_a_request_that_no_source_can_serve_is_scheduled_too(own, others):
    engine = engine_with(Stand("peer", serves=False))
    one = arrive(engine)
    one.prefill_stats = None if own is None else SimpleNamespace(num_local_cached_tokens=own)
    assert engine.admit(one, 8) == 0
    run(engine, one, 12)
    run(engine, one, 13)
    assert scheduled(engine) == [(12, others)]
    assert (names_of_events(engine), counted(engine)) == (["Arrived", "Scheduled"], {})


def test_tokens_that_another_connector_loads_after_a_failure_are_not_recomputed():
    ours = Stand("tiers", 32)
    engine = engine_with(ours, workers=1)
    one = arrive(engine)
    engine.admit(one)
    engine.report(ours.load, "gone")
    assert admit_again(engine, one) == 0
    run(engine, one, 20)
    assert counted(engine)["recomputed_tokens tiers"] == 12


def test_no_scheduled_event_follows_a_failed_load_of_another_connector():
    ours = Stand("tiers", 32)
    engine = engine_with(ours, workers=1)
    one = arrive(engine)
    assert engine.admission.matched(one, 0) == 32
    engine.allocate(one, 0)
    assert engine.admit(one) == 32, "the other has failed: ours is taken"
    run(engine, one, 16)
    assert scheduled(engine) == []
    engine.report(ours.load, None)
    assert scheduled(engine) == [(32, 0)]
    found = counted(engine)
    assert (found["queries tiers"], found["hits tiers"]) == (1, 1)


def test_events_say_why_a_prompt_is_computed():
    looking, ready = Stand("peer", 16, looking=True), Stand("tiers", 0, miss=MissReason.EVICTED)
    engine = engine_with(looking, ready, patience=1.0)
    one = arrive(engine)
    assert engine.admission.matched(one, 0) is None
    engine.clock.now += 2
    assert engine.admit(one) == 0
    run(engine, one)
    assert [event.why for event in engine.told if isinstance(event, SourcesAsked)] == [
        DecisionReason.LOOKING,
        DecisionReason.UNANSWERED,
    ]
    assert {name: n for name, n in counted(engine).items() if name.startswith("misses")} == {
        "misses peer looking ": 1, "misses tiers evicted 0 full_attention": 1,
    }  # fmt: skip


def test_an_event_says_that_a_looking_source_was_passed_over():
    looking, ready = Stand("peer", 16, looking=True), Stand("tiers", 8)
    engine = engine_with(looking, ready, workers=1)
    one = arrive(engine)
    assert engine.admit(one) == 8
    engine.report(ready.load, None)
    run(engine, one, 8)
    (asked,) = events_of(engine, SourcesAsked)
    assert (asked.chosen.source, asked.why) == ("tiers", DecisionReason.ANSWERED)
    assert counted(engine)["misses peer looking "] == 1


def test_a_plan_dropped_for_lack_of_blocks_counts_as_no_room():
    few, many = Stand("few", 8), Stand("many", 16)
    engine = engine_with(few, many, workers=1)
    one = arrive(engine)
    engine.admit(one)
    engine.report(many.load, "gone")
    assert engine.admission.matched(one, 0) is None
    assert engine.admission.matched(one, 0) == 8
    assert engine.admission.matched(one, 0) == 0, "there was no room"
    engine.allocate(one, 0)
    run(engine, one)
    found = counted(engine)
    assert (found["misses few no_room "], found["misses many failed "]) == (1, 1)
    assert found["recomputed_tokens many"] == 16


def test_spent_attempts_count_as_a_miss():
    bad, good = Stand("bad", 16, strikes=False), Stand("good", 8)
    engine = engine_with(bad, good, workers=1, attempts=1)
    one = arrive(engine)
    engine.admit(one)
    engine.report(bad.load, "gone")
    assert admit_again(engine, one) == 0
    run(engine, one)
    found = counted(engine)
    assert (found["misses bad failed "], found["misses good attempts "]) == (1, 1)


def test_a_request_aborted_while_loading_counts_no_query_and_drops_its_load():
    source = Stand("peer", 16)
    engine = engine_with(source)
    one = arrive(engine)
    engine.admit(one)
    assert engine.fold.take().gauges == {("pending_loads", ("peer",)): 1}
    engine.admission.finished("a")
    (late,) = (event.blocks for event in engine.told if isinstance(event, LateBlocks))
    assert late == engine.fold.take().gauges["late_blocks", ()] > 0
    engine.report(source.load, None, None)
    found = engine.fold.take()
    assert found.counters == {("loads", ("peer", "dropped")): 1}
    assert found.gauges == {("pending_loads", ("peer",)): 0, ("late_blocks", ()): 0}


def test_a_declined_request_is_counted_only_with_a_reason():
    engine = engine_with(
        Stand("peer", 16, serves=False), Stand("tiers", 16, serves=False, miss=MissReason.UNNAMED)
    )
    arrive(engine)
    assert names_of_events(engine) == ["Arrived"]
    assert counted(engine) == {"queries tiers": 1, "misses tiers unnamed ": 1}


def test_a_preempted_request_is_counted_once_however_often_it_is_served():
    source = Stand("peer", 16)
    engine = engine_with(source, workers=1)
    one = arrive(engine)
    for _ in range(3):
        assert engine.admit(one) == 16
        engine.report(source.load, None)
        run(engine, one)
        engine.free(one)
    assert counted(engine) == {
        "loads peer ready": 3, "queries peer": 1, "hits peer": 1, "hit_tokens peer peer": 16,
        "load_bytes peer 0 full_attention copied": 300,
    }  # fmt: skip


def test_errors_of_events_are_logged_once_and_change_nothing(caplog, monkeypatch):
    def broken(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(StandFeed, "moved", broken)

    source, silent = Stand("peer", 16), Stand("tiers")
    silent.why_no_bid = broken
    engine = engine_with(source, silent, workers=1)
    for name in "ab":
        assert engine.admit(arrive(engine, name)) == 16
        engine.report(source.load, None)
        engine.admission.finished(name)
    assert len(source.forgotten) == 2
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == [
        "Admission._tell_asked",
        "Admission._tell_ended",
    ]


class Counting(RuleBasedStateMachine):
    """Requests that come, load, fail, are preempted and end in any order: what is counted stays sound."""

    @initialize(
        tokens=st.tuples(st.integers(0, 5), st.integers(0, 5)), head=st.integers(0, 4), strikes=st.booleans()
    )
    def start(self, tokens, head, strikes):
        sources = [
            Stand(name, number * BLOCK, strikes=strikes, miss=MissReason.EVICTED)
            for name, number in zip(("peer", "tiers"), tokens, strict=True)
        ]
        sources[1].head_until = head * BLOCK
        self.engine = engine_with(*sources, workers=1, policy=weight_policy({"tiers": 2.0}))
        self.whole, self.count = MetricsDelta(), 0
        self.waiting, self.loading, self.running, self.late = [], {}, [], []
        self.served, self.settled, self.failed = 0, set(), set()

    @rule()
    def arrive(self):
        self.count += 1
        self.waiting.append(arrive(self.engine, str(self.count)))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), room=st.booleans())
    def admit(self, data, room):
        one = data.draw(st.sampled_from(self.waiting))
        tokens = self.engine.admission.matched(one, 0)
        crowd = sum(any(one) for one in self.engine.tables.values())
        crowd += len(self.late)  # the pool has blocks for three
        if tokens is None or not room or crowd > 2:
            return
        self.engine.allocate(one, tokens)
        self.waiting.remove(one)
        if tokens:
            self.loading[one.request_id] = one, self.engine.step().loads
        else:
            run(self.engine, one)
            self.runs(one)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), how=st.sampled_from(["ready", "failed", "late"]))
    def report(self, data, how):
        one, loads = self.loading[data.draw(st.sampled_from(sorted(self.loading)))]
        load = loads.pop(data.draw(st.integers(0, len(loads) - 1)))
        self.engine.report(load, None if how == "ready" else how, late=how == "late")
        if how == "late":
            self.late.append(load)
        if how != "ready":
            self.failed.add(load.attempt)
        if loads:
            return
        del self.loading[one.request_id]
        if load.attempt not in self.failed:
            self.served += load.span.total
            self.runs(one)
        else:
            self.engine.free(one)
            self.waiting.append(one)

    def runs(self, one):
        self.settled.add(one.request_id)
        self.running.append(one)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data):
        one = data.draw(st.sampled_from(self.running))
        self.running.remove(one)
        self.engine.free(one)
        self.waiting.append(one)

    @precondition(lambda self: self.waiting or self.loading or self.running)
    @rule(data=st.data())
    def finish(self, data):
        everybody = [*self.waiting, *self.running, *(one for one, _ in self.loading.values())]
        one = data.draw(st.sampled_from(everybody))
        self.engine.finish(one)
        for those in (self.waiting, self.running):
            if one in those:
                those.remove(one)
        if one.request_id in self.loading:
            for load in self.loading.pop(one.request_id)[1]:
                self.engine.report(load, None)

    @precondition(lambda self: self.late)
    @rule()
    def land(self):
        self.engine.landed(self.late.pop(), 1)

    @invariant()
    def what_is_counted_is_sound(self):
        if not hasattr(self, "engine"):
            return
        step = self.engine.fold.take()
        assert all(n > 0 for n in step.counters.values())
        self.whole.add(step)
        counters, gauges = self.whole.counters, self.whole.gauges
        for source in ("peer", "tiers"):
            missed = sum(n for (name, of), n in counters.items() if name == "misses" and of[0] == source)
            assert counters["queries", (source,)] == len(self.settled)
            assert counters["hits", (source,)] + missed == len(self.settled)
        loads = sum(len(under_way) for _, under_way in self.loading.values())
        assert sum(n for (name, _), n in gauges.items() if name == "pending_loads") == loads
        assert sum(n for (name, _), n in counters.items() if name == "hit_tokens") <= self.served
        assert (gauges.get(("late_blocks", ()), 0) > 0) == bool(self.late)
        assert len(self.engine.fold) == len(self.engine.admission)


TestCounting = Counting.TestCase
TestCounting.settings = examples(40, stateful_step_count=30)


def test_a_bid_that_would_fill_a_block_partly_is_refused_with_whole_blocks():
    fine, coarse = Stand("fine", 24, alignment_tokens=2), Stand("coarse", 16)
    alone = engine_with(fine, coarse)
    assert alone.admit(arrive(alone)) == 24
    engine = engine_with(fine, coarse, whole=True)
    assert engine.admit(arrive(engine)) == 16
    fine.looking = fine.promised = True
    fine.alignments = {}.__getitem__  # a peer source knows no peer yet
    assert engine.admit(arrive(engine, "c")) is None, "its alignment is not known yet"
    del fine.alignments
    fine.looking, fine.alignment_tokens = False, BLOCK
    assert engine.admit(arrive(engine, "d")) == 24


def test_events_of_an_unserved_request_have_its_trace_and_its_end():
    engine = engine_with(Stand("peer", serves=False))
    one = request("a", range(PROMPT), trace_headers={"traceparent": "00-1-2-01"})
    engine.admission.on_new_request(one)
    engine.admission.finished("a")
    assert (names_of_events(engine), counted(engine)) == (["Arrived", "Finished"], {})
    came = engine.told[0]
    assert (came.tokens, came.sources, came.trace_headers) == (PROMPT, (), (("traceparent", "00-1-2-01"),))


class HalfPrefix:
    """A prefix cache that can continue after fewer tokens than it has attention blocks for."""

    def __init__(self, resumable_tokens):
        self.resumable, self.shortened = resumable_tokens, []

    def resumable_tokens(self, request):
        return self.resumable

    def shorten(self, request, tokens):
        self.shortened.append(tokens)


def test_a_load_begins_where_the_engines_blocks_end_though_it_could_not_continue_there():
    source, cache = Stand("one", 24), HalfPrefix(4)
    engine = engine_with(source, prefix_cache=cache)
    assert engine.admit(arrive(engine), local_tokens=16) == 8
    assert (source.heard, cache.shortened) == ([("begin", 16, 24)], [])
    (asked,) = events_of(engine, SourcesAsked)
    assert (asked.local_tokens, asked.resumable_tokens) == (16, 4)


@pytest.mark.parametrize(("total", "cut"), [(16, 12), (13, 12), (12, 8), (5, 4)])
def test_the_engines_prefix_is_shortened_once_for_a_shorter_load(total, cut):
    source, cache = Stand("one", total), HalfPrefix(4)
    engine = engine_with(source, prefix_cache=cache)
    one = arrive(engine)
    assert engine.admission.matched(one, 16) is None
    assert cache.shortened == [cut]
    assert engine.admission.matched(one, 16) == 0, "another request has cached the block again"
    assert cache.shortened == [cut]
    assert engine.admission.matched(one, cut) == total - cut
    engine.allocate(one, total - cut)
    assert source.heard[0] == ("begin", cut, total)


@pytest.mark.parametrize("total", [0, 3, 4])
def test_a_prefix_that_the_engine_can_continue_alone_is_not_given_up(total):
    cache = HalfPrefix(4)
    engine = engine_with(Stand("one", total), prefix_cache=cache)
    assert engine.admit(arrive(engine), local_tokens=16) == 0
    assert cache.shortened == []
    (asked,) = events_of(engine, SourcesAsked)
    assert (asked.local_tokens, asked.resumable_tokens, asked.chosen) == (16, 4, None)


def test_the_engines_prefix_is_kept_while_a_source_is_looking():
    source, cache = Stand("one", 16, looking=True), HalfPrefix(0)
    engine = engine_with(source, prefix_cache=cache)
    one = arrive(engine)
    assert engine.admission.matched(one, 16) is None
    assert cache.shortened == []
    source.looking = False
    assert engine.admission.matched(one, 16) is None
    assert cache.shortened == [12]


@pytest.mark.parametrize("looking_at", [16, 4])
def test_an_answer_that_only_one_of_two_questions_lacks_is_missing(looking_at):
    """An admission may ask again for a shorter prefix, and only then has the peer anything to say."""

    class Slow(Stand):
        def bids(self, request, local_tokens):
            return super().bids(request, local_tokens) if local_tokens == looking_at else []

    source = Slow("one", looking_at + 8, looking=True)
    engine = engine_with(source, prefix_cache=HalfPrefix(4), patience=0.0)
    one = arrive(engine)
    for _ in range(2):
        assert engine.admission.matched(one, 16) == 0
        engine.clock.now += 2.0
    engine.allocate(one, 0)
    assert engine.chooser.speeds.answer_seconds("one") == 4.0


class FromTheStart(Stand):
    """A source that can load all of its tokens or none."""

    def bids(self, request, local_tokens):
        return [] if local_tokens else super().bids(request, local_tokens)


def test_the_engines_prefix_is_kept_for_a_source_that_has_more_tokens():
    cache = HalfPrefix(0)
    engine = engine_with(FromTheStart("one", 24), prefix_cache=cache)
    assert engine.admit(arrive(engine), local_tokens=16) == 0
    assert cache.shortened == []


def test_all_blocks_of_a_prompt_without_its_state_are_worth_a_load():
    source, cache = Stand("one", PROMPT - 1), HalfPrefix(0)
    engine = engine_with(source, prefix_cache=cache)
    one = arrive(engine)
    assert engine.admission.matched(one, PROMPT - 1) is None
    assert cache.shortened == [PROMPT - BLOCK]


def test_a_prompt_computed_for_lack_of_blocks_continues_the_resumable_prefix():
    source = Stand("one", 24)
    source.has_room = lambda bid, blocks: False
    engine = engine_with(source, prefix_cache=HalfPrefix(4), patience=0.0)
    one = arrive(engine)
    assert engine.admit(one, local_tokens=16) == 0
    last = events_of(engine, SourcesAsked)[-1]
    assert (last.local_tokens, last.resumable_tokens, last.why) == (16, 4, DecisionReason.NO_ROOM)
