"""Policies: the best bid is taken, and the choice does not alternate."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvferry.connector.bids import LATELY_SECONDS, Bid, PlaceTokens, Speeds
from kvferry.connector.choosing import MARGIN, BidChooser
from support.clock import Clock
from support.examples import examples
from support.offers import (
    PARTS,
    POLICIES,
    PROMPT,
    WEIGHTS,
    best,
    bid,
    cost_policy,
    first_policy,
    speeds,
    weight_policy,
)

BIDS = st.lists(st.builds(Bid, st.sampled_from("abc"), PARTS), max_size=5)


@examples(40)
@given(policy=POLICIES, bids=BIDS, before=st.none() | st.builds(Bid, st.sampled_from("abc"), PARTS))
def test_no_other_bid_is_better_by_the_margin(policy, bids, before):
    found = best(policy, bids, PROMPT, before=before)
    values = [policy.value(one, PROMPT) for one in bids]
    computing = policy.value(None, PROMPT)
    if found is None:
        assert all(value <= computing for value in values)
        return
    assert found in bids
    margin = MARGIN if found.has_same_sources(before) else 1
    assert policy.value(found, PROMPT) * margin >= max(values)
    assert max(values) > computing


@examples(40)
@given(bids=BIDS, weights=WEIGHTS, more=st.integers(1, 50))
def test_more_tokens_from_the_same_places_are_preferred(bids, weights, more):
    for policy in (weight_policy(weights), cost_policy(speeds({"computed": 10.0}))):
        found = best(policy, bids, PROMPT)
        if found is None:
            continue
        parts = (PlaceTokens(found.parts[0].place, found.parts[0].tokens + more), *found.parts[1:])
        better = Bid("better", parts)
        if policy.value(better, PROMPT) > policy.value(found, PROMPT):
            assert best(policy, [*bids, better], PROMPT) is better


def test_the_first_source_that_has_anything_wins_under_first():
    assert best(first_policy(), [bid("a", file=1), bid("b", host=300)], PROMPT).source == "a"
    assert best(first_policy(), [], PROMPT) is None


def test_weights_decide_between_much_from_afar_and_less_from_near():
    peer, host = bid("peer", peer=300), bid("tiers", host=200)
    assert best(weight_policy({}), [peer, host], PROMPT) is peer
    assert best(weight_policy({"host": 2.0}), [peer, host], PROMPT) is host
    assert best(weight_policy({"peer": 0.0}), [peer], PROMPT) is None, "a weight of 0 is never taken"
    assert best(weight_policy({}), [host, bid("other", file=200)], PROMPT) is host, "the first of equals"


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({"computed": 100.0, "host": 1e5, "file": 1e4}, 390),
        ({"computed": 100.0, "host": 1e5, "file": 50.0}, 300),
        ({"computed": 100.0, "host": 60.0, "file": 50.0}, None),
        ({"host": 80.0, "file": 50.0}, 390),
        ({"computed": 100.0}, 390),
    ],
    ids=[
        "both are fast",
        "the disk is slow",
        "computing is faster",
        "computing is not measured",
        "nothing else is",
    ],
)
def test_cost_takes_what_brings_the_first_token_soonest(rates, chosen):
    bids = [bid(host=300, file=90), bid(host=300)]
    found = best(cost_policy(speeds(rates)), bids, PROMPT)
    assert (found and found.tokens) == chosen


def test_the_chosen_bid_stays_until_another_is_better_by_a_margin():
    one, other = bid("a", host=100), bid("b", file=105)
    assert best(weight_policy({}), [one, other], PROMPT) is other
    assert best(weight_policy({}), [one, other], PROMPT, before=one) is one
    assert best(weight_policy({}), [one, bid("b", file=120)], PROMPT, before=one).source == "b"


# -- speeds


def test_unmeasured_loads_cost_nothing_and_computing_a_second_per_token():
    found = Speeds(Clock())
    assert (found.load_seconds("file", 1000), found.compute_seconds(1000)) == (0.0, 1000.0)


def test_a_load_measures_the_slowest_or_unmeasured_place():
    found = speeds({"host": 1000.0, "file": 100.0})
    found.record_load((PlaceTokens("host", 1000), PlaceTokens("file", 200)), 4.0)
    assert found.load_seconds("host", 1000) == pytest.approx(1.0), "it is not what took long"
    assert 2.0 < found.load_seconds("file", 200) < 4.0, "the newest counts for some"
    found.record_load((PlaceTokens("host", 9000), PlaceTokens("object", 100)), 5.0)
    assert found.load_seconds("object", 100) == pytest.approx(5.0)


def test_a_small_load_says_little_of_a_large_one():
    """What it takes besides its tokens would else be taken for slowness, and the place not be tried again."""
    found = Speeds(Clock())
    found.record_computation(1000, 0.25)
    found.record_load((PlaceTokens("file", 64),), 0.02)
    assert best(cost_policy(found), [bid(file=64)], PROMPT) is None, "64 tokens are computed in 16 ms"
    large = bid(file=350)
    assert best(cost_policy(found), [large], PROMPT) is large
    found.record_load((PlaceTokens("file", 1000),), 0.04)
    assert found.load_seconds("file", 532) == pytest.approx(0.03)
    assert found.load_seconds("file", 2000) == pytest.approx(0.0614, rel=1e-2)


def test_loads_of_one_size_are_what_a_larger_one_costs_at_least():
    found = Speeds(Clock())
    for seconds in (1.0, 1.0, 1.0):
        found.record_load((PlaceTokens("object", 100),), seconds)
    assert [found.load_seconds("object", n) for n in (50, 100, 800)] == pytest.approx([0.5, 1.0, 1.0])
    found.record_load((PlaceTokens("object", 800),), 8.0)
    assert found.load_seconds("object", 800) == pytest.approx(8.0), "it was tried, and is known now"


@examples(40)
@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-4, 60.0)), min_size=1, max_size=12), st.data())
def test_more_tokens_take_no_less_and_not_more_per_token(loads, data):
    found = Speeds(Clock())
    for tokens, seconds in loads:
        found.record_load((PlaceTokens("file", tokens),), seconds)
    few = data.draw(st.integers(1, 10_000))
    many = data.draw(st.integers(few, 10_000))
    less, more = (found.load_seconds("file", n) for n in (few, many))
    assert 0 <= less <= more * (1 + 1e-6)
    assert more / many <= less / few * (1 + 1e-6)


def test_steps_of_one_speed_give_that_speed():
    found = Speeds(Clock())
    for _ in range(50):
        found.record_computation(512, 0.5)
    assert found.compute_seconds(2048) == pytest.approx(2.0)
    found.record_computation(0, 1.0)
    found.record_computation(100, 0.0)
    assert found.compute_seconds(2048) == pytest.approx(2.0)


def test_a_place_without_recent_measurements_is_tried_again():
    clock = Clock()
    found = Speeds(clock)
    found.record_load((PlaceTokens("file", 10),), 10.0)
    assert found.load_seconds("file", 1) == 1.0
    clock.now += LATELY_SECONDS + 1
    assert found.load_seconds("file", 1) == 0.0
    found.record_load((PlaceTokens("file", 10),), 1.0)
    assert found.load_seconds("file", 10) == pytest.approx(1.0), "what was is forgotten"


def test_a_source_of_weight_0_is_no_part_of_a_plan():
    near, far = bid("near", host=16), bid("far", peer=23)
    both, own = Bid.composed(near, far), bid("near", host=8)
    assert best(weight_policy({"peer": 0}), [own, both], PROMPT) is own
    assert best(weight_policy({"peer": 0.1}), [own, both], PROMPT) is both
    tiers = bid("tiers", host=16, object=8)
    assert best(weight_policy({"object": 0}), [own, tiers], PROMPT) is tiers


@pytest.mark.parametrize(("name", "taken"), [("weight", "many"), ("cost", "fast"), ("first", "first")])
def test_each_configured_name_is_a_policy_of_its_own(name, taken):
    measured = speeds({"peer": 10.0, "host": 10.0, "computed": 20.0})
    policy = BidChooser(name, measured, 10.0, {"host": 3.0})
    bids = [bid("first", peer=100), bid("many", host=60), bid("fast", file=150)]
    assert best(policy, bids, PROMPT).source == taken
