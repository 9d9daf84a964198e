"""Handshakes by themselves: no socket, no thread, a clock of their own."""

import pytest

from kvferry.errors import Incompatible
from kvferry.transport.handshake import REFUSAL_SECONDS, Handshakes, Known, Looking, NotUsable
from kvferry.transport.messages import PROTOCOL, Accepted, AskRanks, Hello, Ranks, Refused, encode
from support.clock import Clock
from transport.cards import cards, facts

PEER = "10.0.0.7", 7000
OURS = facts("D", 9)
ACCEPTED, RANKS = encode(Accepted(facts())), encode(Ranks(list(cards())))


@pytest.fixture
def clock():
    return Clock(1000.0)


@pytest.fixture
def handshakes(clock):
    return Handshakes(OURS, lambda ranks: None, 5.0, clock)


def begun(handshakes: Handshakes) -> Handshakes:
    handshakes.start(PEER)
    assert handshakes.open(PEER) == Hello(PROTOCOL, OURS)
    return handshakes


def test_a_peer_is_known_once_its_ranks_have_come(handshakes):
    assert handshakes.known(PEER, 1) is None
    begun(handshakes)
    assert handshakes.known(PEER, 1) == Looking()
    assert handshakes.hear(PEER, ACCEPTED) == AskRanks(PROTOCOL, OURS)
    assert handshakes.known(PEER, 1) == Looking()
    assert handshakes.hear(PEER, RANKS) is None
    assert handshakes.known(PEER, 1) == Known(facts(), cards())
    assert not handshakes.deadlines


def test_a_silent_peer_is_given_up_at_its_deadline_and_not_before(handshakes, clock):
    begun(handshakes)
    assert handshakes.deadlines == [clock.now + 5]
    clock.now += 4.9
    handshakes.give_up_on_silent()
    assert handshakes.known(PEER, 1) == Looking()
    clock.now += 0.1
    handshakes.give_up_on_silent()
    assert handshakes.known(PEER, 1) == NotUsable("no answer within 5 s; is it up, and reachable?")


def test_an_answer_that_comes_too_late_changes_nothing(handshakes, clock):
    begun(handshakes).hear(PEER, ACCEPTED)
    clock.now += 5
    handshakes.give_up_on_silent()
    assert handshakes.hear(PEER, RANKS) is None
    assert isinstance(handshakes.known(PEER, 1), NotUsable)


def test_what_was_accepted_in_an_earlier_handshake_does_not_count_in_the_next(handshakes):
    begun(handshakes).hear(PEER, ACCEPTED)
    begun(handshakes).hear(PEER, RANKS)
    assert "ranks came before the peer was accepted" in handshakes.known(PEER, 1).reason


def test_a_refusal_stands_for_its_time_and_is_then_forgotten(handshakes, clock):
    begun(handshakes).hear(PEER, encode(Refused(["one", "two"])))
    clock.now += REFUSAL_SECONDS
    assert handshakes.known(PEER, 1) == NotUsable("one; two")
    assert not handshakes.is_unknown(PEER)
    clock.now += 0.1
    assert handshakes.known(PEER, 1) is None
    assert handshakes.is_unknown(PEER)
    assert not handshakes._answers
    assert not handshakes._refused_at


def test_a_peer_that_is_asked_again_is_not_forgotten_with_its_old_refusal(handshakes, clock):
    begun(handshakes).hear(PEER, encode(Refused([])))
    clock.now += REFUSAL_SECONDS + 1
    handshakes.start(PEER)
    assert not handshakes.is_unknown(PEER)
    assert handshakes.known(PEER, 1) == Looking()


def test_a_peer_is_unknown_until_it_is_asked_and_once_it_is_forgotten(handshakes):
    assert handshakes.is_unknown(PEER)
    begun(handshakes).hear(PEER, ACCEPTED)
    handshakes.forget(PEER)
    assert not handshakes.is_unknown(PEER), "its answer is still to come"
    handshakes.hear(PEER, RANKS)
    assert not handshakes.is_unknown(PEER)
    handshakes.forget(PEER)
    assert handshakes.is_unknown(PEER)


def test_ranks_that_do_not_fit_are_refused_with_every_difference(clock):
    def check(ranks):
        assert ranks == cards()
        raise Incompatible(["first", "second"])

    handshakes = begun(Handshakes(OURS, check, 5.0, clock))
    handshakes.hear(PEER, ACCEPTED)
    handshakes.hear(PEER, RANKS)
    assert handshakes.known(PEER, 1) == NotUsable("first; second")
