"""Redemptions as the two threads of an engine see them, without a channel."""

from __future__ import annotations

import threading

import pytest

from kvferry.transport.handshake import Pending, Unusable
from kvferry.transport.redeem import Grant, NotRedeemed, PromptContent, Redeemed, Unchanged
from kvferry.transport.redemptions import LONGEST_PAUSE, SHORTEST_PAUSE, Redemptions
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
    assert redemptions.handle_reply(ELSEWHERE, Redeemed(number, 1, GRANT, 4)) is None
    assert isinstance(redemptions.answer(number), Pending)
    assert redemptions.handle_reply(HERE, good := Redeemed(number, 1, GRANT, 4)) == ticket("a")
    assert redemptions.answer(number) == good


def test_the_first_answer_stands(redemptions):
    """A question that was asked again is answered twice."""
    number = begun(redemptions)
    redemptions.handle_reply(HERE, first := Redeemed(number, 1, GRANT, 4))
    assert redemptions.handle_reply(HERE, Redeemed(number, 1, Grant.of(4, 8, [[5]]), 4)) is None
    assert redemptions.answer(number) == first


def growing(redemptions: Redemptions, clock: Clock, tokens: int = 2) -> tuple[int, Redeemed]:
    """A redemption of which some tokens are granted."""
    number = begun(redemptions)
    redemptions.handle_reply(HERE, some := Redeemed(number, 1, GRANT, tokens))
    return number, some


def test_a_producer_that_computes_is_asked_again_until_it_has_all_tokens(redemptions, clock):
    number, some = growing(redemptions, clock)
    assert redemptions.answer(number) == some
    assert redemptions.due() == []
    clock.now += SHORTEST_PAUSE
    ((at, asked),) = redemptions.due()
    assert (at, asked.number, asked.known_tokens) == (HERE, number, 2)
    assert redemptions.due() == [], "it has not answered yet"
    assert redemptions.handle_reply(HERE, Unchanged(number, 1)) == ticket("a")
    assert redemptions.answer(number) == some
    clock.now += 1.0
    assert len(redemptions.due()) == 1
    redemptions.handle_reply(HERE, all_of_it := Redeemed(number, 1, GRANT, 4))
    assert redemptions.answer(number) == all_of_it
    clock.now += 1.0
    assert (redemptions.due(), redemptions.deadlines) == ([], [])


def test_the_longer_nothing_is_new_the_rarer_a_producer_is_asked(redemptions, clock):
    number, _ = growing(redemptions, clock)
    pauses = []
    for _ in range(200):
        (again,) = redemptions.deadlines
        pauses.append(again - clock.now)
        clock.now = again
        redemptions.due()
        redemptions.handle_reply(HERE, Unchanged(number, 1))
    assert pauses[0] == pytest.approx(SHORTEST_PAUSE)
    assert pauses == pytest.approx(sorted(pauses))
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE)


def test_a_producer_that_falls_silent_or_ends_the_lease_while_it_computes_is_given_up(redemptions, clock):
    for silent in (True, False):
        number, _ = growing(redemptions, clock)
        clock.now += 1.0
        redemptions.due()
        if silent:
            clock.now += 5.0
            assert "did not answer" in redemptions.answer(number).reason
            assert redemptions.silent_producer(number) == HERE
        else:
            redemptions.handle_reply(HERE, NotRedeemed(number, 1, "it has ended", unknown=True))
            assert redemptions.answer(number) == Unusable("it has ended")
        assert redemptions.end(number) is True, "heartbeats for its lease must stop"
        assert redemptions.due() == []


def test_a_foreseen_ticket_may_be_unknown_until_it_is_granted(redemptions, clock):
    number = redemptions.begin(HERE, ticket("a"), 4, CONTENT, foreseen=True).number
    assert redemptions.handle_reply(HERE, NotRedeemed(number, 1, "unknown", unknown=True)) is None
    assert isinstance(redemptions.answer(number), Pending)
    clock.now += 1.0
    ((_, asked),) = redemptions.due()
    assert asked.known_tokens == 0
    redemptions.handle_reply(HERE, Redeemed(number, 1, GRANT, 2))
    clock.now += 1.0
    redemptions.due()
    redemptions.handle_reply(HERE, NotRedeemed(number, 1, "unknown", unknown=True))
    assert redemptions.answer(number) == Unusable("unknown"), "its lease has ended"
    other = redemptions.begin(HERE, ticket("b"), 4, CONTENT, foreseen=True).number
    redemptions.handle_reply(HERE, NotRedeemed(other, 1, "other tokens"))
    assert redemptions.answer(other) == Unusable("other tokens")


def test_a_refused_ticket_keeps_no_lease_alive(redemptions):
    number = begun(redemptions)
    assert redemptions.handle_reply(HERE, NotRedeemed(number, 1, "other tokens")) is None
    assert redemptions.answer(number) == Unusable("other tokens")
    assert redemptions.silent_producer(number) is None
    assert redemptions.end(number) is False


def test_an_answer_to_what_nobody_waits_for_keeps_no_lease_alive(redemptions):
    number = begun(redemptions)
    assert redemptions.end(number) is True
    assert redemptions.handle_reply(HERE, Redeemed(number, 1, GRANT, 4)) is None


def test_a_waiting_caller_is_woken_by_the_answer(redemptions):
    number, woken = begun(redemptions), []
    good = Redeemed(number, 1, GRANT, 4)

    class Heard(threading.Condition):
        """The answer comes while somebody waits."""

        def wait(self, timeout: float | None = None) -> bool:
            threading.Thread(target=redemptions.handle_reply, args=(HERE, good)).start()
            woken.append(super().wait(timeout))
            return woken[-1]

    redemptions._heard = Heard()
    assert redemptions.answer(number, 30.0) == good
    assert woken == [True]


def test_unanswered_questions_to_one_peer_are_asked_again_with_their_full_time(redemptions, clock):
    answered, waits, other = begun(redemptions), begun(redemptions, "b"), begun(redemptions, "c", ELSEWHERE)
    redemptions.handle_reply(HERE, Redeemed(answered, 1, GRANT, 4))
    clock.now = 4.0
    assert [one.number for one in redemptions.unanswered(HERE)] == [waits]
    clock.now = 6.0
    assert isinstance(redemptions.answer(waits), Pending)
    assert isinstance(redemptions.answer(other), Unusable)
    clock.now = 9.0
    assert isinstance(redemptions.answer(waits), Unusable)
    assert redemptions.silent_producer(waits) == HERE
