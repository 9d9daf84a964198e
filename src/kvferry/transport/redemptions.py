"""The consumer's redemptions: the requests to producers, and their replies.

begin ─▶ asked ─Redeemed─▶ granted
├─NotRedeemed, or silent until its deadline─▶ refused
└─resent on a new connection to the same producer, which gives the same reply again
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from kvferry.transport.handshake import Address, Pending, Unusable
from kvferry.transport.redeem import NotRedeemed, PromptContent, Redeem, Redeemed

SILENT = "it did not answer within {seconds:g} s (handshake_seconds) when a ticket was to be redeemed"


@dataclass(slots=True)
class _PendingRedemption:
    """A ticket that is being redeemed.

    Attributes:
        address: address of the producer.
        message: the request.
        deadline: seconds of the clock.
        answer: its reply; None if there is none yet.
    """

    address: Address
    message: Redeem
    deadline: float
    answer: Redeemed | NotRedeemed | None = None


class Redemptions:
    """Redemptions by number.

    The engine's thread opens, polls and ends them; the channel's thread adds replies.
    """

    def __init__(
        self, consumer: int, patience_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create it without redemptions.

        Args:
            consumer: this engine's incarnation.
            patience_seconds: time for a producer to reply.
            clock: seconds.
        """
        self._consumer, self._patience_seconds, self._clock = consumer, patience_seconds, clock
        self._numbers = count()
        self._asked: dict[int, _PendingRedemption] = {}
        self._heard = threading.Condition()

    # -- the engine's thread ------------------------------------------------------------------------------

    def begin(self, address: Address, ticket: bytes, tokens: int, content: PromptContent) -> Redeem:
        """Return the request to send; its number identifies the redemption until it is ended."""
        message = Redeem(next(self._numbers), self._consumer, ticket, tokens, content)
        self._asked[message.number] = _PendingRedemption(
            address, message, self._clock() + self._patience_seconds
        )
        return message

    def answer(self, number: int, wait_seconds: float = 0.0) -> Redeemed | Unusable | Pending:
        """Return the reply; Pending if there is none after at most `wait_seconds`."""
        asked = self._asked[number]
        if asked.answer is None and wait_seconds > 0:
            with self._heard:
                self._heard.wait_for(lambda: asked.answer is not None, wait_seconds)
        if isinstance(asked.answer, NotRedeemed):
            return Unusable(asked.answer.reason)
        if asked.answer is not None:
            return asked.answer
        if self._clock() >= asked.deadline:
            return Unusable(SILENT.format(seconds=self._patience_seconds))
        return Pending()

    def silent_producer(self, number: int) -> Address | None:
        """Return the address of the producer if it has not replied; None if it has."""
        asked = self._asked[number]
        return asked.address if asked.answer is None else None

    def end(self, number: int) -> bool:
        """Forget a redemption; return False if the producer has refused, so that it holds no lease.

        Later replies to it are dropped.
        """
        return not isinstance(self._asked.pop(number).answer, NotRedeemed)

    # -- the channel's thread -----------------------------------------------------------------------------

    def handle_reply(self, address: Address, answer: Redeemed | NotRedeemed) -> bytes | None:
        """Process a reply; return the ticket if it was redeemed and the redemption is still open."""
        asked = self._asked.get(answer.number)
        if asked is None or asked.address != address or asked.answer is not None:
            return None
        with self._heard:
            asked.answer = answer
            self._heard.notify_all()
        return asked.message.ticket if isinstance(answer, Redeemed) else None

    def unanswered(self, address: Address) -> list[Redeem]:
        """Return the requests to resend on a new connection, and restart their timeouts."""
        found = [one for one in list(self._asked.values()) if one.address == address and one.answer is None]
        for one in found:
            one.deadline = self._clock() + self._patience_seconds
        return [one.message for one in found]
