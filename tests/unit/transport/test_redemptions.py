"""Redemptions as the two threads of an engine see them, without a channel."""

from __future__ import annotations

import math
import threading

import pytest
from msgspec import structs

from kvferry.transport import redemptions as module
from kvferry.transport.handshake import Pending, Unusable
from kvferry.transport.lease import LeaseWord
from kvferry.transport.redeem import Grant, NotRedeemed, PromptContent, Redeemed, Unchanged
from kvferry.transport.redemptions import LONGEST_PAUSE, SHORTEST_PAUSE, Redemption, Redemptions
from support.clock import Clock
from transport.cards import ticket

HERE, ELSEWHERE = ("127.0.0.1", 1), ("127.0.0.1", 2)
CONTENT, GRANT = PromptContent("tokens"), Grant.of(LeaseWord(3, 7, 1), 4, [[1, 2]])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def redemptions(clock: Clock) -> Redemptions:
    return Redemptions(9, 5.0, clock)


def begun(redemptions: Redemptions, name: str = "a", at=HERE, content=CONTENT) -> Redemption:
    return redemptions.begin(at, ticket(name), 4, content)


def test_an_answer_counts_only_from_the_peer_that_was_asked(redemptions):
    claim = begun(redemptions)
    assert redemptions.handle_reply(ELSEWHERE, Redeemed(claim.message.number, GRANT)) is None
    assert isinstance(redemptions.answer(claim), Pending)
    assert redemptions.handle_reply(HERE, good := Redeemed(claim.message.number, GRANT)) == ticket("a")
    assert redemptions.answer(claim) == good


def test_the_first_answer_stands(redemptions):
    """A question that was asked again is answered twice."""
    claim = begun(redemptions)
    redemptions.handle_reply(HERE, first := Redeemed(claim.message.number, GRANT))
    assert (
        redemptions.handle_reply(HERE, Redeemed(claim.message.number, Grant.of(LeaseWord(4, 8, 1), 4, [[5]])))
        is None
    )
    assert redemptions.answer(claim) == first


def growing(redemptions: Redemptions, clock: Clock, tokens: int = 2) -> tuple[Redemption, Redeemed]:
    """A redemption of which some tokens are granted."""
    claim = begun(redemptions)
    redemptions.handle_reply(
        HERE, some := Redeemed(claim.message.number, structs.replace(GRANT, tokens=tokens))
    )
    return claim, some


def test_a_producer_that_computes_is_asked_again_until_it_has_all_tokens(redemptions, clock):
    claim, some = growing(redemptions, clock)
    assert redemptions.answer(claim) == some
    assert redemptions.due() == []
    clock.now += SHORTEST_PAUSE
    ((at, asked),) = redemptions.due()
    assert (at, asked.number, asked.known_tokens) == (HERE, claim.message.number, 2)
    assert redemptions.due() == [], "it has not answered yet"
    assert redemptions.handle_reply(HERE, Unchanged(claim.message.number)) == ticket("a")
    assert redemptions.answer(claim) == some
    clock.now += 1.0
    assert len(redemptions.due()) == 1
    redemptions.handle_reply(HERE, all_of_it := Redeemed(claim.message.number, GRANT))
    assert redemptions.answer(claim) == all_of_it
    clock.now += 1.0
    assert (redemptions.due(), redemptions.soonest) == ([], math.inf)


SEALED = Redeemed(0, GRANT)


def test_a_sealed_grant_is_an_answer_before_the_producers(redemptions, clock):
    claim = redemptions.begin(HERE, ticket("a"), 4, CONTENT, grant=GRANT)
    assert redemptions.answer(claim, 30.0) == SEALED
    assert [one.number for one in redemptions.unanswered(HERE)] == [claim.message.number], "it is claimed"
    clock.now += 10.0
    assert redemptions.answer(claim) == SEALED, "the lease word tells whether it is valid, however late"
    reply = Redeemed(claim.message.number, GRANT, 3)
    assert redemptions.handle_reply(HERE, reply) == ticket("a"), "heartbeats begin"
    assert redemptions.answer(claim) == reply
    assert redemptions.due() == []
    assert redemptions.end(claim) is True


def test_a_claim_that_is_refused_takes_a_sealed_grant_back(redemptions):
    claim = redemptions.begin(HERE, ticket("a"), 4, CONTENT, grant=GRANT)
    redemptions.handle_reply(HERE, NotRedeemed(claim.message.number, "its lease has ended", unknown=True))
    assert redemptions.answer(claim) == Unusable("its lease has ended")
    assert redemptions.end(claim) is False


def test_a_read_that_ends_before_the_reply_to_its_claim_releases_the_lease(redemptions):
    claim = redemptions.begin(HERE, ticket("a"), 4, CONTENT, grant=GRANT)
    assert redemptions.end(claim) is True
    assert redemptions.is_unsent(claim.message.number), "the producer must know the claim that ends"
    assert redemptions.handle_reply(HERE, Redeemed(claim.message.number, GRANT)) is None


def test_a_used_ticket_is_redeemed_before_it_is_read_again(redemptions, monkeypatch):
    monkeypatch.setattr(module, "MAX_USED", 2)

    def sealed(name: str, at=HERE) -> Redemption:
        return redemptions.begin(at, ticket(name), 4, CONTENT, grant=GRANT)

    samples = [sealed("a"), sealed("a")]
    assert [redemptions.answer(one) for one in samples] == [SEALED, SEALED]
    for one in samples:
        redemptions.end(one)
    again = sealed("a")
    assert isinstance(redemptions.answer(again), Pending)
    assert redemptions.answer(sealed("a", ELSEWHERE)) == SEALED, "that is another lease"
    redemptions.end(again)
    for name in "bc":
        redemptions.end(sealed(name))
    assert len(redemptions._used) == 2


def test_a_ticket_that_is_used_again_is_remembered_anew(redemptions, monkeypatch):
    monkeypatch.setattr(module, "MAX_USED", 2)
    for name in "abac":
        redemptions.end(redemptions.begin(HERE, ticket(name), 4, CONTENT, grant=GRANT))
    again, forgotten = (redemptions.begin(HERE, ticket(name), 4, CONTENT, grant=GRANT) for name in "ab")
    assert isinstance(redemptions.answer(again), Pending)
    assert redemptions.answer(forgotten) == SEALED


def test_a_reply_looks_at_no_other_redemption(redemptions, clock):
    class Lookups(dict):
        """Entries can be looked up, but not gone through."""

        def __iter__(self):
            raise AssertionError("all redemptions are looked at")

        items = keys = values = __iter__

    redemptions._asked = Lookups()
    others = [begun(redemptions, f"other {number}") for number in range(3)]
    claim, _ = growing(redemptions, clock)
    for _ in range(3):
        clock.now += 1.0
        assert [asked.number for _, asked in redemptions.due()] == [claim.message.number]
        redemptions.handle_reply(HERE, Unchanged(claim.message.number))
    redemptions.end(claim)
    clock.now += 1.0
    assert redemptions.due() == [], "it has ended"
    assert all(one.asked for one in others)


def test_the_longer_nothing_is_new_the_rarer_a_producer_is_asked(redemptions, clock):
    claim, _ = growing(redemptions, clock)
    pauses = []
    for _ in range(200):
        assert redemptions.due() == []
        pauses.append(redemptions.soonest - clock.now)
        clock.now = redemptions.soonest
        assert len(redemptions.due()) == 1
        redemptions.handle_reply(HERE, Unchanged(claim.message.number))
    assert pauses[0] == pytest.approx(SHORTEST_PAUSE)
    assert pauses == pytest.approx(sorted(pauses))
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE)


def test_a_producer_that_falls_silent_or_ends_the_lease_while_it_computes_is_given_up(redemptions, clock):
    for silent in (True, False):
        claim, _ = growing(redemptions, clock)
        clock.now += 1.0
        redemptions.due()
        if silent:
            clock.now += 5.0
            assert "did not answer" in redemptions.answer(claim).reason
        else:
            redemptions.handle_reply(HERE, NotRedeemed(claim.message.number, "it has ended", unknown=True))
            assert redemptions.answer(claim) == Unusable("it has ended")
        assert redemptions.end(claim) is True, "heartbeats for its lease must stop"
        assert redemptions.due() == []


def test_a_foreseen_ticket_may_be_unknown_until_it_is_granted(redemptions, clock):
    claim = redemptions.begin(HERE, ticket("a"), 4, CONTENT, foreseen=True)
    assert redemptions.handle_reply(HERE, NotRedeemed(claim.message.number, "unknown", unknown=True)) is None
    assert isinstance(redemptions.answer(claim), Pending)
    clock.now += 1.0
    ((_, asked),) = redemptions.due()
    assert asked.known_tokens == 0
    redemptions.handle_reply(HERE, Redeemed(claim.message.number, structs.replace(GRANT, tokens=2)))
    clock.now += 1.0
    redemptions.due()
    redemptions.handle_reply(HERE, NotRedeemed(claim.message.number, "unknown", unknown=True))
    assert redemptions.answer(claim) == Unusable("unknown"), "its lease has ended"
    other = redemptions.begin(HERE, ticket("b"), 4, CONTENT, foreseen=True)
    redemptions.handle_reply(HERE, NotRedeemed(other.message.number, "other tokens"))
    assert redemptions.answer(other) == Unusable("other tokens")


def test_a_refused_ticket_keeps_no_lease_alive(redemptions):
    claim = begun(redemptions)
    assert redemptions.handle_reply(HERE, NotRedeemed(claim.message.number, "other tokens")) is None
    assert redemptions.answer(claim) == Unusable("other tokens")
    assert not claim.asked
    assert redemptions.end(claim) is False


def test_an_answer_to_what_nobody_waits_for_keeps_no_lease_alive(redemptions):
    claim = begun(redemptions)
    assert redemptions.end(claim) is True
    assert redemptions.handle_reply(HERE, Redeemed(claim.message.number, GRANT)) is None


def test_a_waiting_caller_is_woken_by_the_answer(redemptions):
    claim, woken = begun(redemptions), []
    good = Redeemed(claim.message.number, GRANT)

    class Heard(threading.Event):
        """The answer comes while somebody waits."""

        def wait(self, timeout: float | None = None) -> bool:
            threading.Thread(target=redemptions.handle_reply, args=(HERE, good)).start()
            woken.append(super().wait(timeout))
            return woken[-1]

    claim.answered = Heard()
    assert redemptions.answer(claim, 30.0) == good
    assert woken == [True]


def test_unanswered_questions_to_one_peer_are_asked_again_with_their_full_time(redemptions, clock):
    answered, waits, other = begun(redemptions), begun(redemptions, "b"), begun(redemptions, "c", ELSEWHERE)
    redemptions.handle_reply(HERE, Redeemed(answered.message.number, GRANT))
    clock.now = 4.0
    assert [one.number for one in redemptions.unanswered(HERE)] == [waits.message.number]
    clock.now = 6.0
    assert isinstance(redemptions.answer(waits), Pending)
    assert isinstance(redemptions.answer(other), Unusable)
    clock.now = 9.0
    assert isinstance(redemptions.answer(waits), Unusable)
    assert waits.asked


MINE, OTHER = CONTENT, PromptContent("other")


def reply(redemptions: Redemptions, one: Redemption, *, refuses: bool = False) -> None:
    number = one.message.number
    answer = NotRedeemed(number, "other tokens") if refuses else Redeemed(number, GRANT)
    redemptions.handle_reply(HERE, answer)


def test_samples_of_a_prompt_share_one_redemption_and_one_release(redemptions):
    samples = [begun(redemptions) for _ in range(3)]
    assert len(set(map(id, samples))) == 1
    assert samples[0].users == 3
    reply(redemptions, samples[0])
    assert [redemptions.end(one) for one in samples] == [False, False, True]
    assert (redemptions._asked, redemptions._tickets) == ({}, {})


def test_the_same_ticket_of_another_producer_is_another_lease(redemptions):
    here, there = begun(redemptions), begun(redemptions, at=ELSEWHERE)
    assert [redemptions.end(one) for one in (here, there)] == [True, True]


def test_a_ticket_that_was_refused_is_not_released(redemptions):
    one = begun(redemptions, content=OTHER)
    reply(redemptions, one, refuses=True)
    assert not redemptions.end(one)
    assert not redemptions._tickets


def test_an_unanswered_redemption_is_released_because_it_may_be_granted(redemptions):
    assert redemptions.end(begun(redemptions))


def test_a_claim_with_another_prompt_does_not_release_the_ticket(redemptions):
    mine, other = begun(redemptions), begun(redemptions, content=OTHER)
    assert mine.message.number != other.message.number
    assert not redemptions.end(other), "gone before the producer has said no"
    reply(redemptions, mine)
    assert redemptions.end(mine)


def test_a_claim_is_released_even_if_a_refused_one_ends_last(redemptions):
    mine, other = begun(redemptions), begun(redemptions, content=OTHER)
    reply(redemptions, mine)
    reply(redemptions, other, refuses=True)
    assert not redemptions.end(mine)
    assert redemptions.end(other)


def test_a_prompt_whose_requests_have_ended_is_redeemed_anew_with_the_ticket(redemptions):
    mine, other = begun(redemptions), begun(redemptions, content=OTHER)
    reply(redemptions, mine)
    assert not redemptions.end(mine)
    again = begun(redemptions)
    assert again is not mine
    assert again.message.number not in (mine.message.number, other.message.number)
    assert not redemptions.end(other)
    assert redemptions.end(again)
