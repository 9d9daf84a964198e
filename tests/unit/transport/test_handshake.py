"""Handshakes by themselves: no socket, no thread, a clock of their own."""

import math

import pytest

from kvferry.common.errors import Incompatible
from kvferry.transport.handshake import (
    HURRY_HANDSHAKES,
    HURRY_SECONDS,
    MAX_HANDSHAKES,
    MAX_REMEMBERED,
    REFRESH_SECONDS,
    REFUSAL_SECONDS,
    Handshakes,
    Pending,
    Unusable,
)
from kvferry.transport.messages import PROTOCOL, Hello, PeerInfo, Refused, encode
from support.clock import Clock
from transport.cards import cards, facts

PEER = "10.0.0.7", 7000
OURS = facts("D", 9)
REPLY = encode(PeerInfo(facts(), cards()))


@pytest.fixture
def clock():
    return Clock(1000.0)


@pytest.fixture
def handshakes(clock):
    return Handshakes(OURS, lambda address, ranks: ranks, 5.0, clock)


def begun(handshakes: Handshakes) -> Handshakes:
    handshakes.start(PEER)
    assert handshakes.open(PEER) == Hello(PROTOCOL, OURS)
    return handshakes


def test_a_peer_is_known_once_its_ranks_have_come(handshakes):
    assert handshakes.status(PEER, 1) is None
    begun(handshakes)
    assert handshakes.status(PEER, 1) == Pending()
    handshakes.handle_reply(PEER, REPLY)
    assert handshakes.status(PEER, 1) == PeerInfo(facts(), cards())
    assert (handshakes.refuse_silent(), handshakes.soonest) == ([], math.inf)


def test_a_silent_peer_is_given_up_at_its_deadline_and_not_before(handshakes, clock):
    begun(handshakes)
    assert (handshakes.refuse_silent(), handshakes.soonest) == ([], clock.now + 5)
    clock.now += 4.9
    handshakes.refuse_silent()
    assert handshakes.status(PEER, 1) == Pending()
    clock.now += 0.1
    handshakes.refuse_silent()
    assert handshakes.status(PEER, 1) == Unusable(
        "no answer within 5 s; is it up and reachable, and does it have the same key?", gone=True
    )


def test_an_answer_that_comes_too_late_changes_nothing(handshakes, clock):
    begun(handshakes)
    clock.now += 5
    handshakes.refuse_silent()
    handshakes.handle_reply(PEER, REPLY)
    assert isinstance(handshakes.status(PEER, 1), Unusable)


def test_a_refusal_stands_for_its_time_and_is_then_forgotten(handshakes, clock):
    begun(handshakes).handle_reply(PEER, encode(Refused(["one", "two"])))
    clock.now += REFUSAL_SECONDS
    assert handshakes.status(PEER, 1) == Unusable("one; two")
    assert not handshakes.is_unknown(PEER)
    clock.now += 0.1
    assert handshakes.status(PEER, 1) is None
    handshakes.forget_refusals()
    assert handshakes.is_unknown(PEER)


def test_a_peer_that_is_asked_again_is_not_forgotten_with_its_old_refusal(handshakes, clock):
    begun(handshakes).handle_reply(PEER, encode(Refused([])))
    clock.now += REFUSAL_SECONDS + 1
    handshakes.start(PEER)
    handshakes.forget_refusals()
    assert not handshakes.is_unknown(PEER)
    assert handshakes.status(PEER, 1) == Pending()


def test_a_peer_is_unknown_until_it_is_asked_and_once_it_is_forgotten(handshakes):
    assert handshakes.is_unknown(PEER)
    begun(handshakes)
    handshakes.forget(PEER)
    assert not handshakes.is_unknown(PEER), "its answer is still to come"
    handshakes.handle_reply(PEER, REPLY)
    assert not handshakes.is_unknown(PEER)
    handshakes.forget(PEER)
    assert handshakes.is_unknown(PEER)


def test_ranks_that_do_not_fit_are_refused_with_every_difference(clock):
    def check(address, ranks):
        assert (address, ranks) == (PEER, cards())
        raise Incompatible(["first", "second"])

    handshakes = begun(Handshakes(OURS, check, 5.0, clock))
    handshakes.handle_reply(PEER, REPLY)
    assert handshakes.status(PEER, 1) == Unusable("first; second")


def sizes(handshakes: Handshakes) -> list[int]:
    return [len(one) for one in vars(handshakes).values() if isinstance(one, dict | set | list)]


def test_no_number_of_made_up_addresses_makes_anything_grow(handshakes, clock, caplog):
    for number in range(5000):
        address = f"10.1.{number // 250}.{number % 250}", 7000
        if handshakes.status(address, 1) is None and not handshakes.is_full:
            handshakes.start(address)
            handshakes.open(address)
        clock.now += 0.01
        handshakes.refuse_silent()
    assert max(sizes(handshakes)) <= MAX_REMEMBERED + MAX_HANDSHAKES
    assert 0 < len(caplog.records) <= 21
    clock.now += REFUSAL_SECONDS + 5
    handshakes.refuse_silent()
    clock.now += REFUSAL_SECONDS + 5
    handshakes.forget_refusals()
    assert sizes(handshakes) == [0] * len(sizes(handshakes))


def test_made_up_runs_of_a_known_peer_are_asked_for_once_in_a_while_and_not_remembered(handshakes, clock):
    begun(handshakes).handle_reply(PEER, REPLY)
    asked = 0
    for run in range(1000):
        if handshakes.status(PEER, 1000 + run) is None:
            asked += 1
        clock.now += 0.01
    assert asked == pytest.approx(10 / REFRESH_SECONDS, abs=1)
    assert max(sizes(handshakes)) == 1


def test_a_peer_that_was_restarted_is_asked_at_once_though_made_up_runs_were_asked_for(handshakes, clock):
    begun(handshakes).handle_reply(PEER, REPLY)
    assert handshakes.status(PEER, 99) is None, "asked, and still run 1"
    clock.now += REFRESH_SECONDS
    assert handshakes.status(PEER, 2) is None


def test_silent_peers_are_given_up_early_while_many_are_asked_and_one_that_has_connected_is_not(
    handshakes, clock
):
    begun(handshakes).note_connected(PEER)
    for number in range(MAX_HANDSHAKES - 1):
        assert not handshakes.is_full
        handshakes.start(("10.2.0.1", number))
        handshakes.open(("10.2.0.1", number))
    assert handshakes.is_full
    clock.now += HURRY_SECONDS
    assert len(handshakes.refuse_silent()) == MAX_HANDSHAKES - HURRY_HANDSHAKES
    assert not handshakes.is_full
    assert handshakes.status(PEER, 1) == Pending()
    handshakes.handle_reply(PEER, REPLY)
    assert isinstance(handshakes.status(PEER, 1), PeerInfo)


def test_the_peers_that_are_known_are_bounded(handshakes):
    addresses = [(f"10.3.{number // 250}.{number % 250}", 7000) for number in range(MAX_REMEMBERED + 10)]
    for address in addresses:
        handshakes.start(address)
        handshakes.open(address)
        handshakes.handle_reply(address, REPLY)
    assert sum(not handshakes.is_unknown(one) for one in addresses) == MAX_REMEMBERED
    assert isinstance(handshakes.status(addresses[-1], 1), PeerInfo)


def test_a_reason_of_megabytes_is_cut(handshakes, caplog):
    begun(handshakes).handle_reply(PEER, encode(Refused(["x" * 10_000] * 60)))
    assert len(handshakes.status(PEER, 1).reason) < 2100
    assert len(caplog.text) < 3000
