"""The consumer's side of redemptions: requests that exchange a ticket for block tables and a lease.

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
    """A request to exchange a ticket for block tables and a lease, from `begin` until `end` of `Redemptions`.

    Attributes:
        address: (host, port) of the producer's control channel.
        message: request to the producer, with the ticket (random id that names the lease).
        deadline: time until which the producer must reply, in seconds of the clock of `Redemptions`.
        answer: reply of the producer; None if it has not arrived.
    """

    address: Address
    message: Redeem
    deadline: float
    answer: Redeemed | NotRedeemed | None = None


class Redemptions:
    """A consumer's requests to exchange tickets (random ids) for block tables and leases, with the replies.

    The engine's thread begins, polls and ends redemptions. The thread of the control channel stores the
    replies.
    """

    def __init__(
        self, consumer: int, patience_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create an empty collection of requests.

        Args:
            consumer: incarnation of this engine (random number that identifies its run), sent in every
                request.
            patience_seconds: maximum time in seconds to wait for a producer's reply.
            clock: function that returns the current time in seconds.
        """
        self._consumer, self._patience_seconds, self._clock = consumer, patience_seconds, clock
        self._numbers = count()
        self._asked: dict[int, _PendingRedemption] = {}
        self._heard = threading.Condition()

    # -- the engine's thread ------------------------------------------------------------------------------

    def begin(self, address: Address, ticket: bytes, tokens: int, content: PromptContent) -> Redeem:
        """Create a request to exchange a ticket for block tables and a lease. The caller must send it.

        Args:
            address: (host, port) of the producer's control channel.
            ticket: random id that names the lease.
            tokens: number of tokens whose KV the producer has offered.
            content: digests of the first `tokens` tokens of this engine's prompt.

        Returns:
            The request. The other methods take its attribute `number`.
        """
        message = Redeem(next(self._numbers), self._consumer, ticket, tokens, content)
        self._asked[message.number] = _PendingRedemption(
            address, message, self._clock() + self._patience_seconds
        )
        return message

    def answer(self, number: int, wait_seconds: float = 0.0) -> Redeemed | Unusable | Pending:
        """Return the producer's reply to a request to exchange a ticket for block tables and a lease.

        Args:
            number: id of the request, from `begin`.
            wait_seconds: maximum time in seconds to wait for the reply.

        Returns:
            Redeemed, with block tables and lease, if the producer accepted the ticket. Unusable, with the
            reason, if the producer refused or has not replied in time. Otherwise Pending.
        """
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
        """Return the producer to which a request was sent, if that producer has not replied yet.

        Args:
            number: id of the request, from `begin`.

        Returns:
            (host, port) of the producer's control channel; None if the producer has replied.
        """
        asked = self._asked[number]
        return asked.address if asked.answer is None else None

    def end(self, number: int) -> bool:
        """Forget a request to exchange a ticket for block tables and a lease. Ignore later replies.

        Args:
            number: id of the request, from `begin`.

        Returns:
            False if the producer refused the ticket. True if it accepted the ticket or has not replied: then
            it may be keeping the KV for this engine.
        """
        return not isinstance(self._asked.pop(number).answer, NotRedeemed)

    # -- the channel's thread -----------------------------------------------------------------------------

    def handle_reply(self, address: Address, answer: Redeemed | NotRedeemed) -> bytes | None:
        """Store a producer's reply to a request to exchange a ticket for block tables and a lease.

        Ignore the reply if it does not come from the producer that was asked, if `end` was called for the
        request, or if there is a reply already.

        Args:
            address: (host, port) of the peer that sent the reply.
            answer: reply.

        Returns:
            The ticket if the reply was stored and the producer accepted the ticket; otherwise None.
        """
        asked = self._asked.get(answer.number)
        if asked is None or asked.address != address or asked.answer is not None:
            return None
        with self._heard:
            asked.answer = answer
            self._heard.notify_all()
        return asked.message.ticket if isinstance(answer, Redeemed) else None

    def unanswered(self, address: Address) -> list[Redeem]:
        """Return the requests that a producer has not replied to, and restart their timeouts.

        Call this after a new connection to the producer was opened, and send the requests again over it.

        Args:
            address: (host, port) of the producer's control channel.
        """
        found = [one for one in list(self._asked.values()) if one.address == address and one.answer is None]
        for one in found:
            one.deadline = self._clock() + self._patience_seconds
        return [one.message for one in found]
