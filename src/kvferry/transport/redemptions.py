"""The consumer's side of redemptions: requests that exchange a ticket for block tables and a lease.

    begin ─▶ asked ─Redeemed for all tokens─▶ granted
      ┌───────▶│ ├─NotRedeemed, or silent until its deadline─▶ refused
      │        │ └─resent on a new connection to the same producer, which gives the same reply again
      └─time─ growing ◀─Redeemed for some of the tokens, or Unchanged

A redemption may begin with the grant that came sealed with the ticket. It then has an answer at once, and the
message only claims the lease. The reply confirms the grant or refuses the claim, like the reply to any other.
A second use of a ticket waits for the producer, which may have ended the lease since.

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
from heapq import heappop, heappush
from itertools import count

from msgspec import structs

from kvferry.transport.handshake import Address, Pending, Unusable
from kvferry.transport.redeem import Grant, NotRedeemed, PromptContent, Redeem, Redeemed, Unchanged

SILENT = "it did not answer within {seconds:g} s (handshake_seconds) when a ticket was to be redeemed"

# Shortest and longest time in seconds between a producer's reply and the next request, while it computes.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 0.1

# Maximum number of used tickets that are remembered. For older ones, the lease word alone decides.
MAX_USED = 4096

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
    answered: threading.Event = field(default_factory=threading.Event)
    # Last one that granted or refused. It may have come sealed, before a reply.
    answer: Redeemed | NotRedeemed | None = None

    @property
    def complete(self) -> Redeemed | None:
        """The last answer if it grants all tokens; else None."""
        answer = self.answer  # the channel's thread may replace it at any time
        if isinstance(answer, Redeemed) and answer.grant.tokens >= self.message.tokens:
            return answer
        return None


@dataclass(slots=True)
class _Ticket:
    """A ticket that requests of this engine use, with a redemption for each distinct prompt.

    `held` is True if a redemption that has ended was not refused: the lease may have been granted.
    """

    open: dict[PromptContent, Redemption] = field(default_factory=dict)
    held: bool = False


class Redemptions:
    """A consumer's requests to redeem tickets. The engine's thread begins, polls and ends them.

    Attributes:
        soonest: time at which `due` may have requests again; infinite if there is none.
    """

    def __init__(self, consumer: int, patience_seconds: float, clock: Callable[[], float]) -> None:
        self._consumer, self._patience_seconds, self._clock = consumer, patience_seconds, clock
        self._numbers = count()
        self._asked: dict[int, Redemption] = {}
        self._tickets: dict[tuple[Address, bytes], _Ticket] = {}
        # (time of the next request, number) of each growing redemption that has its reply, the soonest first.
        # An entry stays when its redemption ends.
        self._growing: list[tuple[float, int]] = []
        # Tickets whose last use has ended, the latest last.
        self._used: dict[tuple[Address, bytes], None] = {}

    # -- the engine's thread ------------------------------------------------------------------------------

    def begin(
        self,
        address: Address,
        ticket: bytes,
        tokens: int,
        content: PromptContent,
        *,
        foreseen: bool = False,
        grant: Grant | None = None,
    ) -> Redemption:
        """Use a ticket, with values as in `Redeem`. Send its message if this is the prompt's first use.

        `grant` is that of the ticket if it came with it.
        """
        found = self._tickets.setdefault((address, ticket), _Ticket()).open
        if (one := found.get(content)) is None:
            message, now = Redeem(next(self._numbers), self._consumer, ticket, tokens, content), self._clock()
            # A client could have blocks of ended leases read in vain as often as it likes.
            answer = None if grant is None or (address, ticket) in self._used else Redeemed(0, grant)
            one = Redemption(address, message, now + self._patience_seconds, foreseen, now, answer=answer)
            found[content] = self._asked[message.number] = one
        one.users += 1
        return one

    def answer(self, one: Redemption, wait_seconds: float = 0.0) -> Redeemed | Unusable | Pending:
        """Return the last grant; Unusable after a refusal or without a reply in time; otherwise Pending."""
        if one.answer is None and wait_seconds > 0:
            one.answered.wait(wait_seconds)
        # A grant that came sealed needs no reply: the lease word tells whether it is valid.
        if (complete := one.complete) is not None:
            return complete
        answer = one.answer
        if isinstance(answer, NotRedeemed):
            return Unusable(answer.reason)
        if one.asked and self._clock() >= one.deadline:
            return Unusable(SILENT.format(seconds=self._patience_seconds), gone=True)
        return Pending() if answer is None else answer

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
        self._used.pop(name, None)
        self._used[name] = None
        if len(self._used) > MAX_USED:
            del self._used[next(iter(self._used))]
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
            grows = one.answer.grant.tokens < one.message.tokens
        else:
            grows = one.answer is None and one.foreseen
        if grows:
            pause = (now - one.news) * _PAUSE_SHARE
            again = now + min(max(pause, SHORTEST_PAUSE), LONGEST_PAUSE)
            heappush(self._growing, (again, answer.number))
        one.asked = False
        one.granted |= not isinstance(answer, NotRedeemed)
        if one.answer is not None:
            one.answered.set()
        return None if isinstance(answer, NotRedeemed) else one.message.ticket

    def is_awaited(self, number: int) -> bool:
        """Return whether a request needs a reply to go on. A sealed grant is only confirmed by it."""
        one = self._asked.get(number)
        return one is not None and one.complete is None

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
        while self._growing and self._growing[0][0] <= now:
            one = self._asked.get(heappop(self._growing)[1])
            if one is None:
                continue  # it has ended
            known = one.answer.grant.tokens if isinstance(one.answer, Redeemed) else 0
            one.message = structs.replace(one.message, known_tokens=known)
            one.deadline = now + self._patience_seconds
            one.asked, one.sent = True, False
            found.append((one.address, one.message))
        return found

    @property
    def soonest(self) -> float:
        return self._growing[0][0] if self._growing else math.inf
