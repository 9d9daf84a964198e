"""A producer with the key that answers each question, often more than once, or to another one."""

from __future__ import annotations

from msgspec import structs

from fuzz.odd import Odd
from fuzz.seeds import replies
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import (
    AskTurn,
    Hello,
    KeptTurn,
    PeerInfo,
    Reply,
    Turns,
    decode_request,
    encode,
)
from kvferry.transport.redeem import Grant, NotRedeemed, Redeem, Redeemed, Unchanged
from transport.cards import cards, facts, ticket

LIE = Grant.of(LeaseWord(9, 9, 1), 600, [[7, 7, 7]])
"""What only the liar grants."""


class Lies:
    """Answers messages of a consumer.

    Attributes:
        more: messages that are said after every answer.
    """

    def __init__(self, seed: int) -> None:
        self.more: list[list[bytes]] = []
        self._odd = Odd(seed, replies())

    def __call__(self, request: bytes) -> list[list[bytes]]:
        """Return messages, each a list of frames."""
        return [*self._said(request), *self.more]

    def _said(self, request: bytes) -> list[list[bytes]]:
        """Return mostly the answer that is due, or one near it."""
        draw = self._odd.draw
        answers = self._answers(decode_request(request))
        if not answers or draw.random() < 0.15:
            return [self._odd.frames() for _ in range(draw.choice((0, 1, 1, 3)))]
        said = [encode(one) for one in draw.choices(answers, k=draw.choice((1, 1, 1, 2, 4)))]
        if draw.random() < 0.3:
            said = [Odd(draw.getrandbits(32), said).message() for _ in said]
        return [[one] for one in said]

    def _answers(self, asked: object) -> list[Reply]:
        """Return answers of the kind that is due, some of them to other questions."""
        if isinstance(asked, Hello):
            return [PeerInfo(facts(), cards()), PeerInfo(facts(weights="others"), cards(2))]
        if not isinstance(asked, Redeem | AskTurn):
            return []
        number = max(0, asked.number + self._odd.draw.choice((0, 0, 0, -1, 1)))
        if isinstance(asked, Redeem):
            return [
                Redeemed(number, structs.replace(LIE, tokens=asked.tokens)),
                Redeemed(number, structs.replace(LIE, tokens=1 + asked.tokens // 2)),
                Unchanged(number),
                NotRedeemed(number, "no"),
                NotRedeemed(number, "never heard of it", unknown=True),
            ]
        turn = KeptTurn("P", ticket("t1"), LIE, 1, 2, [5, 6])
        return [
            Turns(number, [turn]),
            Turns(number, [structs.replace(turn, chunks=99, grant=structs.replace(LIE, tokens=1))] * 4),
        ]
