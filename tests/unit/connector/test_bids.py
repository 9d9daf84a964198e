"""Bidding: sources are excluded until only computing is left."""

from kvferry.connector.load import Bid, Bidding, PlaceTokens


def bid(source, tokens, place="host"):
    return Bid(source, (PlaceTokens(place, tokens),))


def test_no_tokens_are_no_bid():
    assert Bidding(2).eligible_bids([bid("a", 0), bid("b", -16), Bid("c", ())], 100) == []


def test_an_excluded_source_is_not_used_again():
    bidding = Bidding(2)
    assert bidding.exclude("a", "it failed")
    assert bidding.eligible_bids([bid("a", 100), bid("b", 1)], 100) == [bid("b", 1)]
    bidding.exclude("b", "it failed too")
    assert bidding.eligible_bids([bid("a", 100), bid("b", 1)], 100) == []


def test_a_second_exclusion_keeps_the_first_reason():
    bidding = Bidding(2)
    assert bidding.exclusion_reason("a") is None
    assert bidding.exclude("a", "first")
    assert not bidding.exclude("a", "second")
    assert bidding.exclusion_reason("a") == "first"


def test_attempts_are_capped_so_that_admission_ends():
    bidding = Bidding(attempts=3)
    taken = 0
    while bidding.eligible_bids([bid(f"source {taken}", 16)], 100):
        assert not bidding.spent
        bidding.use_attempt()
        taken += 1
        assert taken <= 3
    assert taken == 3
    assert bidding.spent


def test_asking_spends_nothing():
    bidding = Bidding(attempts=1)
    for _ in range(5):
        assert bidding.eligible_bids([bid("a", 16)], 100)
    assert bidding.use_attempt() == 0
    assert bidding.eligible_bids([bid("a", 16)], 100) == []


def test_attempts_that_succeeded_do_not_count_once_something_is_computed_after_them():
    bidding = Bidding(1)
    for _ in range(3):
        assert bidding.eligible_bids([bid("a", 1)], 100)
        bidding.use_attempt()
        assert not bidding.eligible_bids([bid("a", 1)], 100)
        bidding.on_succeeded()
        assert not bidding.eligible_bids([bid("a", 1)], 100), (
            "the engine asks again, and has computed nothing"
        )
        bidding.on_computed()
        bidding.on_computed()
    bidding.use_attempt()
    bidding.on_computed()
    assert not bidding.eligible_bids([bid("a", 1)], 100), "this one has failed"


def test_no_load_begins_if_only_the_last_token_is_missing():
    assert Bidding(2).eligible_bids([bid("a", 1), bid("b", 16)], 1) == []
    assert Bidding(2).eligible_bids([bid("a", 1)], 2) == [bid("a", 1)]


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
    assert (tail.parts_by_source, both.parts_by_source) == ((tail.parts,), (head.parts, tail.parts))
    assert both.has_same_sources(Bid.composed(bid("a", 1, "host"), bid("b", 1, "peer")))
    assert not both.has_same_sources(Bid("b", both.parts))
    assert not both.looking
    assert Bid.composed(head, Bid("b", tail.parts, looking=True)).looking
    assert Bid.composed(Bid("a", head.parts, looking=True), tail).looking
    assert not both.has_same_sources(Bid.composed(tail, head))


def test_a_bid_of_two_sources_is_excluded_with_either():
    both = Bid.composed(bid("a", 16), bid("b", 24))
    for source in "ab":
        bidding = Bidding(2)
        bidding.exclude(source, "it failed")
        assert bidding.eligible_bids([both, bid("a", 16), bid("b", 24)], 100) == [
            bid("b" if source == "a" else "a", 24 if source == "a" else 16)
        ]
