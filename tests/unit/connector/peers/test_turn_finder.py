"""Peers are asked for earlier turns, and the turn with the most tokens is taken."""

from __future__ import annotations

from kvferry.connector.content import CHUNK_TOKENS, Adapters, TurnNames
from kvferry.connector.peers.turns import TurnFinder
from kvferry.transport.handshake import Pending
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import KeptTurn
from kvferry.transport.redeem import Grant
from support.block_pool import request
from transport.cards import ticket

A, B = ("10.0.0.1", 1), ("10.0.0.2", 2)


class Client:
    def __init__(self, asks=True) -> None:
        self.asks, self.asked, self.answers, self.dropped = asks, [], None, []

    def ask_turn(self, peers, content):
        self.asked.append((list(peers), content))
        return len(self.asked) if self.asks else None

    def turns(self, number):
        return self.answers

    def drop_question(self, number):
        self.dropped.append(number)


def kept(tokens=300, least=1, name="r") -> KeptTurn:
    chunks = min(tokens, 400) // CHUNK_TOKENS
    after = list(range(chunks * 256, tokens))
    grant = Grant.of(LeaseWord(1, 2, 3), tokens, [[5], [6]])
    return KeptTurn("D", ticket(name), grant, least, chunks, after)


def asked(answers, tokens=400, client=None):
    client = client or Client()
    finder, one = (
        TurnFinder(client, lambda: {A: 1, B: 1}, TurnNames(Adapters())),
        request("a", list(range(tokens))),
    )
    search = finder.ask(one)
    assert finder.found(one, search) == Pending()
    client.answers = answers
    return finder.found(one, search)


def test_the_bid_with_the_most_tokens_is_taken():
    longer = kept(320, name="longer")
    assert asked([(A, kept(300)), (B, longer)]) == (320, B, longer)


def test_a_turn_that_cannot_be_continued_from_is_ignored():
    assert asked([(A, kept(300)), (B, kept(500, least=410))])[1] == A
    assert asked([(B, kept(300, least=301))]) is None
    assert asked([]) is None


def test_the_last_token_of_a_prompt_is_computed():
    assert asked([(A, kept(400))])[0] == 399
    assert asked([(A, kept(400, least=400))]) is None


def test_no_peer_is_asked_for_a_short_or_unnameable_prompt_or_without_keepers():
    client = Client()
    finder = TurnFinder(client, lambda: {A: 1}, TurnNames(Adapters()))
    assert not finder.ask(request("a", list(range(CHUNK_TOKENS))))
    assert not finder.ask(request("b", list(range(400)), prompt_embeds=object()))
    assert not TurnFinder(client, dict, TurnNames(Adapters())).ask(request("c", list(range(400))))
    assert client.asked == []
    assert not TurnFinder(Client(asks=False), lambda: {A: 1}, TurnNames(Adapters())).ask(
        request("d", list(range(400)))
    )


def test_peers_are_no_longer_asked_for_a_request_that_has_ended():
    client = Client()
    finder = TurnFinder(client, lambda: {A: 1}, TurnNames(Adapters()))
    finder.drop(finder.ask(request("a", list(range(400)))))
    assert client.dropped == [1]
