"""Leases claimed at producers: one redemption and one release, however many requests have the ticket."""

from __future__ import annotations

import pytest

from kvferry.connector.peers.claims import IDLE_STEP_WAIT_SECONDS, STEP_WAIT_SECONDS, Claims, Pull
from kvferry.transport.handshake import Pending, Unusable
from kvferry.transport.redeem import Grant, PromptContent, Redeemed
from support.clock import Clock
from transport.cards import ticket

AT = ("127.0.0.1", 5600)
MINE, OTHER = PromptContent("mine"), PromptContent("other")
GRANTED, REFUSED = Redeemed(0, 1, Grant.of(1, 2, [[1]]), 4), Unusable("other tokens")


class Client:
    """A control client whose producer takes the prompt `MINE`, once it answers."""

    def __init__(self) -> None:
        self.asked: list[PromptContent] = []
        self.released: list[bytes] = []
        self.waits: list[float] = []
        self.answers, self.clock = True, Clock()

    def redeem(self, address, ticket, tokens, content, *, foreseen=False) -> int:
        self.asked.append(content)
        return len(self.asked) - 1

    def redemption(self, number, wait_seconds):
        self.waits.append(wait_seconds)
        self.clock.now += wait_seconds
        if not self.answers:
            return Pending()
        return GRANTED if self.asked[number] == MINE else REFUSED

    def end_redemption(self, number) -> bool:
        return self.redemption(number, 0.0) is not REFUSED

    def release(self, address, ticket) -> None:
        self.released.append(ticket)


def begin(claims: Claims, content=MINE, name="a"):
    pull = Pull(
        request=None,
        peer="",
        address=AT,
        engine_id="engine",
        ticket=ticket(name),
        tokens=4,
        excluded={},
        began=0.0,
    )
    claims.begin(pull, content)
    return pull


def test_samples_of_a_prompt_redeem_and_release_once():
    claims = Claims(client := Client(), lambda: False, Clock())
    samples = [begin(claims) for _ in range(3)]
    assert len(client.asked) == 1
    assert [claims.update(one) for one in samples] == [None] * 3
    assert [one.granted for one in samples] == [GRANTED] * 3
    for one in samples:
        assert client.released == []
        claims.end(one)
    assert client.released == [ticket("a")]
    assert len(claims) == 0


def test_a_ticket_that_was_refused_is_not_released():
    claims = Claims(client := Client(), lambda: False, Clock())
    one = begin(claims, OTHER)
    assert claims.update(one) is REFUSED
    claims.end(one)
    assert (client.released, len(claims)) == ([], 0)


def test_an_unanswered_redemption_is_released_because_it_may_be_granted():
    claims = Claims(client := Client(), lambda: False, Clock())
    client.answers = False
    one = begin(claims)
    assert (claims.update(one), one.granted) == (None, None)
    claims.end(one)
    assert client.released == [ticket("a")]


def test_a_claim_with_another_prompt_does_not_release_the_ticket():
    claims = Claims(client := Client(), lambda: False, Clock())
    mine, other = begin(claims), begin(claims, OTHER)
    assert client.asked == [MINE, OTHER]
    client.answers = False  # gone before the producer has said no
    claims.end(other)
    assert client.released == []
    client.answers = True
    claims.end(mine)
    assert client.released == [ticket("a")]


def test_a_claim_is_released_even_if_a_refused_one_ends_last():
    claims = Claims(client := Client(), lambda: False, Clock())
    mine, other = begin(claims), begin(claims, OTHER)
    claims.end(mine)
    assert client.released == []
    claims.end(other)
    assert client.released == [ticket("a")]


def test_a_prompt_whose_requests_have_ended_is_redeemed_anew_with_the_ticket():
    claims = Claims(client := Client(), lambda: False, Clock())
    mine, other = begin(claims), begin(claims, OTHER)
    claims.end(mine)
    again = begin(claims)
    assert client.asked == [MINE, OTHER, MINE]
    claims.end(other)
    claims.end(again)
    assert client.released == [ticket("a")]


@pytest.mark.parametrize(
    ("idle", "waits"),
    [
        (True, [IDLE_STEP_WAIT_SECONDS, 0.0, IDLE_STEP_WAIT_SECONDS]),
        (False, [STEP_WAIT_SECONDS, 0.0, 0.0]),
    ],
    ids=["idle", "computing"],
)
def test_no_step_waits_twice_and_a_computing_engine_waits_only_right_after_the_question(idle, waits):
    clock = Clock()
    claims = Claims(client := Client(), lambda: idle, clock)
    client.answers, client.clock = False, clock
    one = begin(claims)
    for _ in range(2):
        claims.update(one)
    claims.waited_seconds = 0.0
    claims.update(one)
    assert client.waits == pytest.approx(waits)
