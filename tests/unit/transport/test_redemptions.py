"""Redemptions as the two threads of an engine see them, without a channel."""

from __future__ import annotations

import threading

import pytest

from kvferry.transport.handshake import Pending, Unusable
from kvferry.transport.redeem import Grant, NotRedeemed, PromptContent, Redeemed
from kvferry.transport.redemptions import Redemptions
from support.clock import Clock
from transport.cards import ticket

HERE, ELSEWHERE = ("127.0.0.1", 1), ("127.0.0.1", 2)
CONTENT, GRANT = PromptContent("tokens"), Grant.of(3, 7, [[1, 2]])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def redemptions(clock: Clock) -> Redemptions:
    return Redemptions(9, 5.0, clock)


def begun(redemptions: Redemptions, name: str = "a", at=HERE) -> int:
    return redemptions.begin(at, ticket(name), 4, CONTENT).number


def test_an_answer_counts_only_from_the_peer_that_was_asked(redemptions):
    number = begun(redemptions)
    assert redemptions.handle_reply(ELSEWHERE, Redeemed(number, 1, GRANT)) is None
    assert isinstance(redemptions.answer(number), Pending)
    assert redemptions.handle_reply(HERE, good := Redeemed(number, 1, GRANT)) == ticket("a")
    assert redemptions.answer(number) == good


def test_the_first_answer_stands(redemptions):
    """A question that was asked again is answered twice."""
    number = begun(redemptions)
    redemptions.handle_reply(HERE, first := Redeemed(number, 1, GRANT))
    assert redemptions.handle_reply(HERE, Redeemed(number, 1, Grant.of(4, 8, [[5]]))) is None
    assert redemptions.answer(number) == first


def test_of_a_ticket_that_is_refused_no_lease_is_kept_alive(redemptions):
    number = begun(redemptions)
    assert redemptions.handle_reply(HERE, NotRedeemed(number, 1, "other tokens")) is None
    assert redemptions.answer(number) == Unusable("other tokens")
    assert redemptions.silent_producer(number) is None
    assert redemptions.end(number) is False


def test_an_answer_to_what_nobody_waits_for_keeps_no_lease_alive(redemptions):
    number = begun(redemptions)
    assert redemptions.end(number) is True
    assert redemptions.handle_reply(HERE, Redeemed(number, 1, GRANT)) is None


def test_whoever_waits_is_woken_by_the_answer(redemptions):
    number, woken = begun(redemptions), []
    good = Redeemed(number, 1, GRANT)

    class Heard(threading.Condition):
        """The answer comes while somebody waits."""

        def wait(self, timeout: float | None = None) -> bool:
            threading.Thread(target=redemptions.handle_reply, args=(HERE, good)).start()
            woken.append(super().wait(timeout))
            return woken[-1]

    redemptions._heard = Heard()
    assert redemptions.answer(number, 30.0) == good
    assert woken == [True]


def test_only_what_this_peer_has_not_answered_is_asked_again_and_has_its_full_time(redemptions, clock):
    answered, waits, other = begun(redemptions), begun(redemptions, "b"), begun(redemptions, "c", ELSEWHERE)
    redemptions.handle_reply(HERE, Redeemed(answered, 1, GRANT))
    clock.now = 4.0
    assert [one.number for one in redemptions.unanswered(HERE)] == [waits]
    clock.now = 6.0
    assert isinstance(redemptions.answer(waits), Pending)
    assert isinstance(redemptions.answer(other), Unusable)
    clock.now = 9.0
    assert isinstance(redemptions.answer(waits), Unusable)
    assert redemptions.silent_producer(waits) == HERE
