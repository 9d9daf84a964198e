"""Waiting for sources that are still looking: only a ticket is waited for longer than that can save time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, strategies as st

from kvferry.connector.bids import Bid, Speeds
from kvferry.connector.choosing import BidChooser, RequestState
from kvferry.connector.events import DecisionReason
from support.examples import examples
from support.offers import PARTS, PROMPT, RATES, WEIGHTS, best, bid, choose, speeds

NAMES = "abc"
SINGLE = st.builds(
    lambda source, parts, state: Bid(source, parts, state > 0, state > 1),
    st.sampled_from(NAMES),
    PARTS,
    st.integers(0, 2),
)
SOON = st.builds(
    lambda source, parts, seconds: Bid(source, parts, looking=True, within_seconds=seconds),
    st.sampled_from(NAMES),
    PARTS,
    st.sampled_from([0.05, 1.0, 20.0]),
)
COMPOSED = st.builds(Bid.composed, SINGLE, SINGLE)
BIDS = st.lists(SINGLE | COMPOSED, max_size=5)
ALL_BIDS = st.lists(SINGLE | COMPOSED | SOON, max_size=5)
NAMED = st.tuples(st.sampled_from(["weight", "first", "cost"]), WEIGHTS, RATES)
ANSWERS = st.dictionaries(st.sampled_from(NAMES), st.floats(0, 100))


def chooser(name, weights, rates, patience=10.0, answers=None):
    measured = speeds(rates)
    for answer, seconds in (answers or {}).items():
        measured.record_answer(answer, seconds)
    return BidChooser(name, measured, patience, weights)


def wait(ours, bids, missing=PROMPT, computed=None, step=0.01, until=30.0):
    """Ask again and again although no source answers; how long the request waits, and what it then takes."""
    waited = 0.0
    while True:
        found = choose(ours, bids, missing, waited=waited, computed=computed).bid
        if found is None or not found.looking:
            return waited, found
        waited += step
        assert waited < until


@examples(30)
@given(
    named=NAMED,
    bids=ALL_BIDS,
    patience=st.floats(0.1, 5),
    answers=ANSWERS,
    more=st.integers(0, 100),
    step=st.sampled_from([0.02, 0.3]),
)
def test_no_wait_is_longer_than_patience_or_computing(named, bids, patience, answers, more, step):
    _, _, rates = named
    waited, _ = wait(chooser(*named, patience, answers), bids, computed=PROMPT + more, step=step)
    limit = patience
    if "computed" in rates and not any(one.promised for one in bids):
        limit = min(patience, (PROMPT + more) / rates["computed"] * (1 + 1e-6))
    assert waited < limit + step, "the last question that is answered with a wait comes before the limit"


def seconds_to_first_token(speeds, one, missing):
    parts = () if one is None else one.parts
    loading = max((speeds.load_seconds(part.place, part.tokens) for part in parts), default=0.0)
    return loading + speeds.compute_seconds(missing - sum(part.tokens for part in parts))


def expected(ours, bids, excluded, waited, missing, computed):
    """The bid and the reason by the rules of `choosing`, each bid alone against all others."""
    speeds, computing = ours.speeds, ours.value(None, computed)
    allowed = [one for one in bids if missing > 1 and one.tokens and not excluded & {*one.sources}]
    values = {id(one): ours.value(one, missing) for one in bids}

    def first_of_best(some):
        some = [one for one in some if values[id(one)] > computing]
        for one in some:
            if all(values[id(one)] >= values[id(other)] for other in some):
                return one
        return None

    def waits(one, answered):
        limit = ours.patience_seconds
        if one.promised:
            return waited < limit and (answered is None or one.tokens > answered.tokens)
        if ours.policy == "cost" or one.within_seconds:
            other = seconds_to_first_token(speeds, answered, computed if answered is None else missing)
            saved = other - seconds_to_first_token(speeds, one, missing)
            slowest = max(speeds.answer_seconds(name) for name in one.unanswered)
            return slowest < saved and waited < min(saved, one.within_seconds or limit, limit)
        if speeds.computing_is_known:
            limit = min(limit, speeds.compute_seconds(computed))
        return answered is None and waited < limit

    answered = first_of_best([one for one in allowed if not one.looking])
    found = first_of_best(
        [one for one in allowed if one is answered or (one.looking and waits(one, answered))]
    )
    open_bids = [one for one in bids if not excluded & {*one.sources}]
    least = computing if found is None else values[id(found)]
    missed = any(one.looking and values[id(one)] > least for one in open_bids)
    if found is not None:
        ready = DecisionReason.ANSWERED if missed else DecisionReason.BEST
        return found, DecisionReason.LOOKING if found.looking else ready
    if any(not one.looking for one in open_bids):
        return None, DecisionReason.COMPUTING
    return None, DecisionReason.UNANSWERED if missed else DecisionReason.NOTHING


@examples(60)
@given(
    named=NAMED,
    bids=ALL_BIDS,
    excluded=st.sets(st.sampled_from(NAMES), max_size=2),
    waited=st.sampled_from([0.0, 0.5, 2.0, 11.0]) | st.floats(0, 5),
    answers=ANSWERS,
    missing=st.sampled_from([1, 2, PROMPT]),
    more=st.integers(0, 100),
)
def test_the_choice_is_the_best_bid_that_may_be_taken(named, bids, excluded, waited, answers, missing, more):
    ours = chooser(*named, answers=answers)
    state = RequestState(attempts=1, excluded=dict.fromkeys(excluded, "it failed"))
    found = choose(ours, bids, missing, waited=waited, computed=missing + more, state=state)
    bid, why = expected(ours, bids, excluded, waited, missing, missing + more)
    assert found.bid is bid
    assert found.why is why
    assert [one.bid for one in found.bids] == bids
    for one in found.bids:
        value = 0.0 if one.excluded else ours.value(one.bid, missing)
        assert (one.value, bool(one.excluded)) == (value, bool(excluded & {*one.bid.sources}))
    state.attempts = 0
    spent = choose(ours, bids, missing, waited=waited, computed=missing + more, state=state)
    assert spent.bid is None
    assert (spent.why is DecisionReason.ATTEMPTS) == bool(bids)


@examples(30)
@given(named=NAMED, bids=BIDS, waited=st.floats(0, 5), answers=ANSWERS)
def test_policies_weight_and_first_use_an_answered_source_at_once(named, bids, waited, answers):
    assume(named[0] != "cost")
    ours = chooser(*named, answers=answers)
    bids = [replace(one, promised=False) for one in bids]
    answered = best(ours, [one for one in bids if not one.looking])
    found = choose(ours, bids, waited=waited).bid
    assert found is answered or (answered is None and found.looking)


@examples(30)
@given(named=NAMED, bids=BIDS, answers=ANSWERS)
def test_a_request_without_an_answer_waits_as_long_as_computing_takes(named, bids, answers):
    name, _, rates = named
    assume(name != "cost")
    ours = chooser(*named, answers=answers)
    bids = [replace(one, looking=True, promised=False) for one in bids]
    assume(best(ours, [replace(one, looking=False) for one in bids]) is not None)
    limit = min(10.0, PROMPT / rates["computed"]) if "computed" in rates else 10.0
    assert choose(ours, bids, waited=limit * 0.99).bid is not None
    assert choose(ours, bids, waited=limit * 1.01).bid is None


@examples(30)
@given(named=NAMED, bids=BIDS, waited=st.floats(0, 5), answers=ANSWERS)
def test_the_cost_policy_waits_only_if_it_saves_time(named, bids, waited, answers):
    """Against the times to the first token, by the same speeds: what is saved, and what is waited."""
    _, weights, rates = named
    measured = speeds(rates)
    ours = chooser("cost", weights, rates, answers=answers)
    bids = [replace(one, promised=False) for one in bids]

    def seconds(one):
        loading = max((measured.load_seconds(p.place, p.tokens) for p in one.parts), default=0.0)
        return loading + measured.compute_seconds(PROMPT - one.tokens)

    soonest = min([measured.compute_seconds(PROMPT), *(seconds(one) for one in bids if not one.looking)])

    def pays(one):
        names = {part.source for part in (one.head, one.tail) if part and part.looking} or {one.source}
        expected = max(answers.get(name, 0.0) for name in names)
        return max(waited, expected) < soonest - seconds(one)

    found = choose(ours, bids, waited=waited).bid
    if found is not None and found.looking:
        assert pays(found)
        assert seconds(found) <= min(seconds(one) for one in bids if one.looking and pays(one)) + 1e-9
    else:
        assert not any(pays(one) and soonest - seconds(one) > 1e-6 for one in bids if one.looking)


TOKENS, COMPUTING = 10_000, {"computed": 5_000.0, "tiers": 1e6, "peer": 1e6}
PENDING = bid("peer", looking=True, peer=TOKENS - 1)


@pytest.mark.parametrize("sibling", [5_000, 9_000, TOKENS])
@pytest.mark.parametrize("name", ["weight", "first"])
def test_a_pending_sibling_holds_up_no_request_that_has_an_answer(name, sibling):
    ready = bid("tiers", tiers=sibling)
    assert wait(chooser(name, {}, COMPUTING), [PENDING, ready], TOKENS) == (0.0, ready)


def test_the_cost_policy_waits_as_long_as_the_missing_part_takes():
    ready = bid("tiers", tiers=5_000)
    waited, found = wait(chooser("cost", {}, COMPUTING), [PENDING, ready], TOKENS)
    assert (round(waited, 1), found) == (1.0, ready), "5,000 tokens are computed in 1 s"
    slow = chooser("cost", {}, COMPUTING, answers={"peer": 1.5})
    assert wait(slow, [PENDING, ready], TOKENS) == (0.0, ready), "its answers take longer than that"
    soon = chooser("cost", {}, COMPUTING, answers={"peer": 0.5})
    assert wait(soon, [PENDING, ready], TOKENS)[0] == pytest.approx(1.0, abs=0.02)
    whole = bid("tiers", tiers=TOKENS)
    assert wait(chooser("cost", {}, COMPUTING), [PENDING, whole], TOKENS) == (0.0, whole)


@pytest.mark.parametrize("name", ["weight", "first", "cost"])
def test_a_search_is_waited_for_while_it_may_find_a_faster_place(name):
    """A slower place has all tokens; the search, which ends within 50 ms, would find them in a faster one."""
    ready = bid("tiers", file=TOKENS)
    search = replace(bid("search", looking=True, peer=TOKENS), within_seconds=0.05)

    def waits(file, peer, answers=None):
        rates = {"computed": 5_000.0, "file": file, "peer": peer}
        waited, found = wait(chooser(name, {}, rates, answers=answers), [search, ready], TOKENS, step=0.001)
        assert found is ready
        return round(waited, 3)

    assert waits(file=1e5, peer=1e6) == 0.05, "90 ms would be saved"
    assert waits(file=1e6, peer=4e6) == 0.008, "7.5 ms would be saved"
    assert waits(file=1e6, peer=4e6, answers={"search": 0.01}) == 0.0, "searches take longer than they save"
    assert waits(file=1e6, peer=1e5) == 0.0, "what the search would find is slower"


@pytest.mark.parametrize("name", ["weight", "first", "cost"])
def test_an_unanswered_request_waits_as_long_as_computing_takes(name):
    waited, found = wait(chooser(name, {}, COMPUTING), [PENDING], TOKENS)
    assert (round(waited, 1), found) == (2.0, None)
    unknown, found = wait(chooser(name, {}, {}), [PENDING], TOKENS)
    assert (round(unknown, 1), found) == (10.0, None), "the speed of computing is not known yet"


def test_a_source_without_tokens_or_weight_is_no_answer():
    never = bid("tiers", file=TOKENS)
    waited, found = wait(chooser("weight", {"file": 0.0}, COMPUTING), [never, PENDING], TOKENS)
    assert (round(waited, 1), found) == (2.0, None)


TICKET = replace(PENDING, promised=True)


@pytest.mark.parametrize("answers", [{}, {"peer": 5.0}], ids=["", "slow lately"])
@pytest.mark.parametrize("rates", [COMPUTING, {}], ids=["", "the speed of computing is not known"])
@pytest.mark.parametrize("name", ["weight", "first", "cost"])
def test_a_ticket_is_waited_for_until_patience_ends_however_fast_the_engine_computes(name, rates, answers):
    waited, found = wait(chooser(name, {}, rates, answers=answers), [TICKET], TOKENS)
    assert (round(waited, 1), found) == (10.0, None)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(5_000, 10.0), (9_900, 10.0), (9_999, 0.0)], ids=["half", "nearly all", "all"]
)
@pytest.mark.parametrize("name", ["weight", "first"])
def test_a_ticket_is_waited_for_if_it_has_more_than_the_best_answer(name, tokens, seconds):
    ready = bid("tiers", tiers=tokens)
    waited, found = wait(chooser(name, {}, COMPUTING), [TICKET, ready], TOKENS)
    assert (round(waited, 1), found) == (seconds, ready)


def test_the_cost_policy_computes_at_once_what_loading_would_delay():
    slow = {"computed": 5_000.0, "peer": 1_000.0}
    assert wait(chooser("cost", {}, slow), [TICKET], TOKENS) == (0.0, None)


def test_first_waits_for_no_ticket_whose_source_comes_later():
    ready = bid("tiers", tiers=5_000)
    assert wait(chooser("first", {}, COMPUTING), [ready, TICKET], TOKENS) == (0.0, ready)


def test_the_rest_of_a_prefix_that_a_ticket_promises_is_waited_for_like_the_ticket():
    head, tail = bid("tiers", tiers=5_000), bid("peer", looking=True, promised=True, peer=4_999)
    both = Bid.composed(head, tail)
    assert (both.looking, both.promised) == (True, True)
    assert not Bid.composed(bid("tiers", looking=True, tiers=5_000), tail).promised
    ours = chooser("weight", {}, COMPUTING)
    assert choose(ours, [head, both], TOKENS, waited=9.9).bid is both
    assert choose(ours, [head, both], TOKENS, waited=10.1).bid is head


def test_a_choice_that_waits_for_blocks_is_left_for_a_ticket_that_is_better_by_the_margin():
    measured = speeds(COMPUTING)
    ours = BidChooser("weight", measured, 10.0)
    ready = bid("tiers", tiers=9_500)
    assert choose(ours, [TICKET, ready], TOKENS).bid is TICKET
    assert choose(ours, [TICKET, ready], TOKENS, before=ready).bid is ready


def test_answer_times_of_computing_peers_are_kept_apart():
    whole, computing = bid("peer", looking=True, promised=True, peer=10), replace(PENDING, growing=True)
    assert whole.unanswered == {"peer"}
    assert computing.unanswered == {"peer, computing"}
    assert Bid.composed(bid("host", host=5), computing).unanswered == {"peer, computing"}
    assert Bid.composed(bid("host", looking=True, host=5), computing).unanswered == {
        "host",
        "peer, computing",
    }
    assert bid("host", host=5).unanswered == frozenset()


@pytest.mark.parametrize("policy", ["first", "weight", "cost"])
def test_no_source_is_chosen_without_a_bid(policy):
    assert choose(BidChooser(policy, Speeds(), 10.0), []).bid is None
