"""The consumer's side of redemptions: requests that exchange a ticket for block tables and a lease.

    begin ─▶ asked ─Redeemed for all tokens─▶ granted
      ┌───────▶│ ├─NotRedeemed, or silent until its deadline─▶ refused
      │        │ └─resent on a new connection to the same producer, which gives the same reply again
      └─time─ growing ◀─Redeemed for some of the tokens, or Unchanged

A redemption is *growing* while the producer computes the prompt. A *foreseen* ticket may be redeemed before
the producer knows it. It is growing until the producer's first grant.

Samples of a prompt (``n`` above 1) arrive with the same ticket and share one redemption. Requests with the
same ticket but different prompts each redeem it, because the producer compares the prompt.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(slots=True, eq=False)
class Redemption:
    """A request to redeem a ticket, until its last user ends it. Times are seconds of the client's clock."""

    address: Address
    message: Redeem
    deadline: float
    foreseen: bool  # the producer may learn of the ticket later, from a request that arrives after this
    news: float  # time of the last reply that covered more tokens; of the first request before that
    users: int = 0  # this engine's requests that use it
    asked: bool = True  # a reply to `message` is missing
    sent: bool = False
    granted: bool = False  # the producer has accepted the ticket, even if it has ended the lease since
    again: float = math.inf  # time of the next request; infinite while a reply is missing, and if not growing
    answered: threading.Event = field(default_factory=threading.Event)
    answer: Redeemed | NotRedeemed | None = None  # last one that granted or refused


@dataclass(slots=True)
class _Ticket:
    """A ticket that requests of this engine use, with a redemption for each distinct prompt.

    `held` is True if a redemption that has ended was not refused: the lease may have been granted.
    """

    open: dict[PromptContent, Redemption] = field(default_factory=dict)
    held: bool = False


class Redemptions:
    """A consumer's requests to redeem tickets. The engine's thread begins, polls and ends them.

    `soonest` is the time of the next due request, as of the last call of `due`; may be infinite.
    """

    def __init__(self, consumer: int, patience_seconds: float, clock: Callable[[], float]) -> None:
        self._consumer, self._patience_seconds, self._clock = consumer, patience_seconds, clock
        self._numbers = count()
        self._asked: dict[int, Redemption] = {}
        self._tickets: dict[tuple[Address, bytes], _Ticket] = {}
        self.soonest = math.inf

    # -- the engine's thread ------------------------------------------------------------------------------

    def begin(
        self, address: Address, ticket: bytes, tokens: int, content: PromptContent, *, foreseen: bool = False
    ) -> Redemption:
        """Use a ticket, with values as in `Redeem`. Send its message if this is the prompt's first use."""
        found = self._tickets.setdefault((address, ticket), _Ticket()).open
        if (one := found.get(content)) is None:
            message, now = Redeem(next(self._numbers), self._consumer, ticket, tokens, content), self._clock()
            one = Redemption(address, message, now + self._patience_seconds, foreseen, now)
            found[content] = self._asked[message.number] = one
        one.users += 1
        return one

    def answer(self, one: Redemption, wait_seconds: float = 0.0) -> Redeemed | Unusable | Pending:
        """Return the last grant; Unusable after a refusal or without a reply in time; otherwise Pending."""
        if one.answer is None and wait_seconds > 0:
            one.answered.wait(wait_seconds)
        if isinstance(one.answer, NotRedeemed):
            return Unusable(one.answer.reason)
        if one.asked and self._clock() >= one.deadline:
            return Unusable(SILENT.format(seconds=self._patience_seconds), gone=True)
        return Pending() if one.answer is None else one.answer

    def end(self, one: Redemption) -> bool:
        """End a request's use of a ticket. After the last one, ignore later replies.

        Return True if the lease must be released now: it was granted, or may have been.
        """
        one.users -= 1
        if one.users:
            return False
        del self._asked[one.message.number]
        name = one.address, one.message.ticket
        ticket = self._tickets[name]
        del ticket.open[one.message.content]
        # An answer may still be on its way, so only a refusal proves that there is no lease to release.
        ticket.held |= one.granted or not isinstance(one.answer, NotRedeemed)
        if ticket.open:
            return False
        del self._tickets[name]
        return ticket.held

    # -- the channel's thread -----------------------------------------------------------------------------

    def handle_reply(self, address: Address, answer: Redeemed | Unchanged | NotRedeemed) -> bytes | None:
        """Store a reply to a request to this peer. Return the ticket if the producer has accepted it."""
        one = self._asked.get(answer.number)
        if one is None or one.address != address or not one.asked:
            return None
        now = self._clock()
        if isinstance(answer, Redeemed):
            one.answer, one.news = answer, now
        # The producer does not know a foreseen ticket yet: the redemption stays growing.
        elif isinstance(answer, NotRedeemed) and not (answer.unknown and one.foreseen and one.answer is None):
            one.answer = answer
        if isinstance(one.answer, Redeemed):
            grows = one.answer.tokens < one.message.tokens
        else:
            grows = one.answer is None and one.foreseen
        if grows:
            pause = (now - one.news) * _PAUSE_SHARE
            one.again = now + min(max(pause, SHORTEST_PAUSE), LONGEST_PAUSE)
        one.asked = False
        one.granted |= not isinstance(answer, NotRedeemed)
        if one.answer is not None:
            one.answered.set()
        return None if isinstance(answer, NotRedeemed) else one.message.ticket

    def unanswered(self, address: Address) -> list[Redeem]:
        """Return the requests to this peer without a reply, to send them again. Their timeouts begin anew."""
        found = [one for one in list(self._asked.values()) if one.address == address and one.asked]
        for one in found:
            one.deadline, one.sent = self._clock() + self._patience_seconds, True
        return [one.message for one in found]

    def is_unsent(self, number: int) -> bool:
        """Return whether a request has not been sent, and record that it is sent now."""
        one = self._asked.get(number)
        # After `end`, a release follows, and the producer ends only the lease of a ticket that it has seen.
        if one is None:
            return True
        unsent, one.sent = not one.sent, True
        return unsent

    def due(self) -> list[tuple[Address, Redeem]]:
        """Return the requests to send again now, because there may be more tokens. Their timeouts begin."""
        now, found = self._clock(), list[tuple[Address, Redeem]]()
        self.soonest = math.inf
        for one in list(self._asked.values()):
            if one.again <= now:
                known = one.answer.tokens if isinstance(one.answer, Redeemed) else 0
                one.message = structs.replace(one.message, known_tokens=known)
                one.deadline, one.again = now + self._patience_seconds, math.inf
                one.asked, one.sent = True, False
                found.append((one.address, one.message))
            self.soonest = min(self.soonest, one.again)
        return found
