"""The consumer's side of redemptions: requests that exchange a ticket for block tables and a lease.

    begin ─▶ asked ─Redeemed for all tokens─▶ granted
      ┌───────▶│ ├─NotRedeemed, or silent until its deadline─▶ refused
      │        │ └─resent on a new connection to the same producer, which gives the same reply again
      └─time─ growing ◀─Redeemed for some of the tokens, or Unchanged

A redemption is *growing* while the producer computes the prompt. A *foreseen* ticket may be redeemed before
the producer knows it. It is growing until the producer's first grant.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from msgspec import structs

from kvferry.transport.handshake import Address, Pending, Unusable
from kvferry.transport.redeem import NotRedeemed, PromptContent, Redeem, Redeemed, Unchanged

SILENT = "it did not answer within {seconds:g} s (handshake_seconds) when a ticket was to be redeemed"

# Shortest and longest time in seconds between a producer's reply and the next request, while it computes.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 0.1

# Time until the next request, as a part of the time since the last reply that covered more tokens. So the
# delay after a step is about an eighth of the step's time at most, and a slow producer is asked seldom.
_PAUSE_SHARE = 0.125


@dataclass(slots=True)
class _Redemption:
    """A request, from `begin` until `end` of `Redemptions`. Times are seconds of its clock.

    Attributes:
        deadline: time until which the producer must reply.
        foreseen: True if the producer may learn of the ticket later.
        news: time of the last reply that covered more tokens; of `begin` before that.
        asked: True while a reply to `message` is missing.
        granted: True once the producer has accepted the ticket, even if it has ended the lease since.
        again: time of the next request while the redemption is growing.
        answer: last reply that granted or refused.
    """

    address: Address
    message: Redeem
    deadline: float
    foreseen: bool
    news: float
    asked: bool = True
    sent: bool = False
    granted: bool = False
    again: float = 0.0
    answer: Redeemed | NotRedeemed | None = None

    @property
    def grows(self) -> bool:
        """True if the producer may cover more tokens in a later reply."""
        if self.answer is None:
            return self.foreseen
        return isinstance(self.answer, Redeemed) and self.answer.tokens < self.message.tokens


class Redemptions:
    """A consumer's requests to redeem tickets, with the replies.

    The engine's thread begins, polls and ends redemptions. The control channel's thread stores the replies.
    """

    def __init__(self, consumer: int, patience_seconds: float, clock: Callable[[], float]) -> None:
        self._consumer, self._patience_seconds, self._clock = consumer, patience_seconds, clock
        self._numbers = count()
        self._asked: dict[int, _Redemption] = {}
        self._heard = threading.Condition()

    # -- the engine's thread ------------------------------------------------------------------------------

    def begin(
        self, address: Address, ticket: bytes, tokens: int, content: PromptContent, *, foreseen: bool = False
    ) -> Redeem:
        """Create a request. The caller must send it; the other methods take its attribute `number`.

        Args:
            tokens, content: number of tokens whose KV was offered, and digests of as many of this engine's
                prompt.
            foreseen: True if the producer may learn of the ticket later, because its request for the prompt
                may arrive after this one.
        """
        message, now = Redeem(next(self._numbers), self._consumer, ticket, tokens, content), self._clock()
        self._asked[message.number] = _Redemption(
            address, message, now + self._patience_seconds, foreseen, now
        )
        return message

    def answer(self, number: int, wait_seconds: float = 0.0) -> Redeemed | Unusable | Pending:
        """Return the last grant; Unusable after a refusal or without a reply in time; otherwise Pending."""
        asked = self._asked[number]
        if asked.answer is None and wait_seconds > 0:
            with self._heard:
                self._heard.wait_for(lambda: asked.answer is not None, wait_seconds)
        if isinstance(asked.answer, NotRedeemed):
            return Unusable(asked.answer.reason)
        if asked.asked and self._clock() >= asked.deadline:
            return Unusable(SILENT.format(seconds=self._patience_seconds), gone=True)
        return Pending() if asked.answer is None else asked.answer

    def silent_producer(self, number: int) -> Address | None:
        asked = self._asked[number]
        return asked.address if asked.asked else None

    def end(self, number: int) -> bool:
        """Forget a request and ignore later replies. Return False if the producer refused the ticket.

        Otherwise it has accepted it or has not replied, and may be keeping the KV for this engine.
        """
        asked = self._asked.pop(number)
        return asked.granted or not isinstance(asked.answer, NotRedeemed)

    # -- the channel's thread -----------------------------------------------------------------------------

    def handle_reply(self, address: Address, answer: Redeemed | Unchanged | NotRedeemed) -> bytes | None:
        """Store a producer's reply, and return the ticket if the producer has accepted it.

        A reply of another peer, to an ended request or to none is ignored.
        """
        asked = self._asked.get(answer.number)
        if asked is None or asked.address != address or not asked.asked:
            return None
        with self._heard:
            now = self._clock()
            if isinstance(answer, Redeemed):
                asked.answer, asked.news = answer, now
            # The producer does not know a foreseen ticket yet: the redemption stays growing.
            elif isinstance(answer, NotRedeemed) and not (
                answer.unknown and asked.foreseen and asked.answer is None
            ):
                asked.answer = answer
            pause = min(max((now - asked.news) * _PAUSE_SHARE, SHORTEST_PAUSE), LONGEST_PAUSE)
            asked.asked, asked.again = False, now + pause
            asked.granted |= not isinstance(answer, NotRedeemed)
            self._heard.notify_all()
        return None if isinstance(answer, NotRedeemed) else asked.message.ticket

    def unanswered(self, address: Address) -> list[Redeem]:
        """Return the requests to send over a new connection. Their timeouts begin again."""
        found = [one for one in list(self._asked.values()) if one.address == address and one.asked]
        for one in found:
            one.deadline, one.sent = self._clock() + self._patience_seconds, True
        return [one.message for one in found]

    def is_unsent(self, number: int) -> bool:
        """Return whether a request has not been sent, and record that it is sent now."""
        asked = self._asked.get(number)
        # After `end`, a release follows, and the producer ends only the lease of a ticket that it has seen.
        if asked is None:
            return True
        unsent, asked.sent = not asked.sent, True
        return unsent

    def due(self) -> list[tuple[Address, Redeem]]:
        """Return the requests to send again now, because there may be more tokens. Their timeouts begin."""
        now = self._clock()
        found = [one for one in self._paused() if one.again <= now]
        for one in found:
            known = one.answer.tokens if isinstance(one.answer, Redeemed) else 0
            one.message = structs.replace(one.message, known_tokens=known)
            one.deadline, one.asked, one.sent = now + self._patience_seconds, True, False
        return [(one.address, one.message) for one in found]

    @property
    def deadlines(self) -> list[float]:
        return [one.again for one in self._paused()]

    def _paused(self) -> list[_Redemption]:
        return [one for one in list(self._asked.values()) if not one.asked and one.grows]
