"""Bidding: strike out and bid again, until nothing is left but to compute."""

from kvferry.cache.bids import Bid, Bidding


def test_most_tokens_win_and_the_first_among_equals():
    bids = [Bid("a", 16), Bid("b", 32), Bid("c", 32)]
    assert Bidding(2).best(bids).source == "b"


def test_no_tokens_are_no_bid():
    assert Bidding(2).best([]) is None
    assert Bidding(2).best([Bid("a", 0), Bid("b", -16)]) is None


def test_who_is_struck_out_is_not_asked_again_whatever_it_offers():
    bidding = Bidding(2)
    assert bidding.strike("a", "it failed")
    assert bidding.best([Bid("a", 100), Bid("b", 1)]).source == "b"
    bidding.strike("b", "it failed too")
    assert bidding.best([Bid("a", 100), Bid("b", 1)]) is None


def test_striking_twice_is_told_from_striking_once_and_keeps_the_first_reason():
    bidding = Bidding(2)
    assert bidding.why("a") is None
    assert bidding.strike("a", "first")
    assert not bidding.strike("a", "second")
    assert bidding.why("a") == "first"


def test_attempts_are_capped_so_that_admission_ends():
    bidding = Bidding(attempts=3)
    taken = 0
    while bidding.best([Bid(f"source {taken}", 16)]) is not None:
        bidding.take()
        taken += 1
        assert taken <= 3
    assert taken == 3


def test_asking_spends_nothing():
    bidding = Bidding(attempts=1)
    for _ in range(5):
        assert bidding.best([Bid("a", 16)]) is not None
    assert bidding.take() == 0
    assert bidding.best([Bid("a", 16)]) is None


def test_a_source_that_is_still_looking_bids_with_what_it_may_come_to():
    assert Bidding(1).best([Bid("a", 16), Bid("b", 32, looking=True)]).looking


def test_attempts_that_succeeded_do_not_count():
    bidding = Bidding(1)
    for _ in range(3):
        assert bidding.best([Bid("a", 1)]) is not None
        bidding.take()
        assert bidding.best([Bid("a", 1)]) is None
        bidding.succeeded()
