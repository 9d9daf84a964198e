"""The bids that a request may take: sources are excluded until only computing is left."""

from kvferry.connector.bids import Bid, PlaceTokens
from kvferry.connector.choosing import RequestState
from support.offers import choose, first_policy

CHOOSER = first_policy()


def bid(source, tokens, place="host"):
    return Bid(source, (PlaceTokens(place, tokens),))


def eligible(state, bids, missing=100):
    """Those of the bids that the request takes if there is no other."""
    return [one for one in bids if choose(CHOOSER, [one], missing, state=state).bid is one]


def use_attempt(state):
    state.proposed = bid("a", 16)
    assert state.admit(16, CHOOSER.speeds, 0.0) == bid("a", 16)


def test_no_tokens_are_no_bid():
    assert eligible(RequestState(attempts=2), [bid("a", 0), bid("b", -16), Bid("c", ())]) == []


def test_an_excluded_source_is_not_used_again():
    state = RequestState(attempts=2)
    state.excluded["a"] = "it failed"
    assert eligible(state, [bid("a", 100), bid("b", 1)]) == [bid("b", 1)]
    state.excluded["b"] = "it failed too"
    assert eligible(state, [bid("a", 100), bid("b", 1)]) == []
    assert [state.exclusion_reason(bid(source, 1)) for source in "abc"] == ["it failed", "it failed too", ""]


def test_attempts_are_capped_so_that_admission_ends():
    state = RequestState(attempts=3)
    taken = 0
    while eligible(state, [bid(f"source {taken}", 16)]):
        assert state.attempts > 0
        use_attempt(state)
        taken += 1
        assert taken <= 3
    assert taken == 3
    assert state.attempts == 0


def test_asking_spends_nothing():
    state = RequestState(attempts=1)
    for _ in range(5):
        assert eligible(state, [bid("a", 16)])
    use_attempt(state)
    assert state.attempts == 0
    assert eligible(state, [bid("a", 16)]) == []


def test_an_admission_without_a_load_uses_no_attempt():
    state = RequestState(attempts=1)
    assert state.admit(16, CHOOSER.speeds, 0.0) is None, "nothing was proposed"
    state.proposed = bid("a", 16)
    assert state.admit(0, CHOOSER.speeds, 0.0) is None, "the engine wants none"
    assert state.attempts == 1


def test_attempts_that_succeeded_do_not_count_once_something_is_computed_after_them():
    state = RequestState(attempts=1)
    for _ in range(3):
        assert eligible(state, [bid("a", 1)])
        use_attempt(state)
        assert not eligible(state, [bid("a", 1)])
        state.on_loaded()
        assert not eligible(state, [bid("a", 1)]), "the engine asks again, and has computed nothing"
        state.on_computed()
        state.on_computed()
    use_attempt(state)
    state.on_computed()
    assert not eligible(state, [bid("a", 1)]), "this one has failed"


def test_no_load_begins_if_only_the_last_token_is_missing():
    assert eligible(RequestState(attempts=2), [bid("a", 1), bid("b", 16)], missing=1) == []
    assert eligible(RequestState(attempts=2), [bid("a", 1)], missing=2) == [bid("a", 1)]


def test_bids_are_alike_if_they_come_from_the_same_places_however_much():
    two = Bid("a", (PlaceTokens("host", 3), PlaceTokens("file", 4)))
    assert two.has_same_sources(Bid("a", (PlaceTokens("file", 1), PlaceTokens("host", 9))))
    for other in (bid("a", 7), Bid("b", two.parts), None):
        assert not two.has_same_sources(other)
    assert (two.tokens, two.places) == (7, {"host", "file"})


def test_a_plan_of_two_sources_is_a_bid_of_both():
    head, tail = bid("a", 16, "host"), bid("b", 24, "peer")
    both = Bid.composed(head, tail)
    assert (both.tokens, both.places, both.sources) == (40, {"host", "peer"}, ("a", "b"))
    assert (both.parts, both.head, both.tail) == (head.parts + tail.parts, head, tail)
    assert both.has_same_sources(Bid.composed(bid("a", 1, "host"), bid("b", 1, "peer")))
    assert not both.has_same_sources(Bid("b", both.parts))
    assert not both.looking
    assert Bid.composed(head, Bid("b", tail.parts, looking=True)).looking
    assert Bid.composed(Bid("a", head.parts, looking=True), tail).looking
    assert not both.has_same_sources(Bid.composed(tail, head))


def test_a_bid_of_two_sources_is_excluded_with_either():
    both = Bid.composed(bid("a", 16), bid("b", 24))
    for source in "ab":
        state = RequestState(attempts=2, excluded={source: "it failed"})
        other = bid("b", 24) if source == "a" else bid("a", 16)
        assert eligible(state, [both, bid("a", 16), bid("b", 24)]) == [other]
        assert state.exclusion_reason(both) == "it failed"
