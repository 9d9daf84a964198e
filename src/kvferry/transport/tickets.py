"""The producer's tickets, and the consumers that have redeemed them.

The engine's thread publishes a ticket when it grants the lease. If it is still computing the prompt, it adds
the blocks of further tokens as they are computed. It withdraws the ticket when the lease ends, before any
lease word is raised. The thread of the control channel redeems tickets, and reports claims and releases.

    OPEN ─redeemed─▶ CLAIMED by one or more consumers ─all of them have released it─▶ ENDED
    from any state: withdrawn, because its time is up or the cache was reset ────────┘

A refused redemption changes nothing, and only a consumer that has redeemed a ticket may release it. So a
stolen ticket alone cannot end a lease.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvferry.transport.redeem import Grant, NotRedeemed, PromptContent, Redeem, Redeemed, Unchanged
from kvferry.units import counted

UNKNOWN: Final = (
    "it does not know the ticket: its lease has ended (released, or not claimed within lease_seconds), or "
    "the ticket is not of this engine"
)
RELEASED: Final = "this engine has redeemed the ticket before, and released it"
# Maximum number of consumers of a ticket, because a client with the key can invent consumers.
MAX_CONSUMERS: Final = 256

CROWDED: Final = f"{MAX_CONSUMERS} engines have redeemed the ticket, and no more may"


@dataclass(slots=True)
class _OpenTicket:
    """A ticket whose lease has not ended.

    Attributes:
        lease: name of the lease in this engine.
        tokens, content: number of tokens whose KV the blocks hold in the end, and digests of them.
        ready: number of tokens whose KV the blocks hold already.
        cached_tokens: number of prompt tokens that this engine's caches had; None if the offer says it.
        claimed, released: incarnations of consumers that have redeemed the ticket, or released it since.
    """

    lease: str
    tokens: int
    content: PromptContent
    grant: Grant
    ready: int
    cached_tokens: int | None = None
    claimed: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)

    def refusal(self, asked: Redeem) -> str | None:
        """Return why a request is refused; None if it can be granted."""
        if asked.tokens != self.tokens:
            return f"the ticket is for {counted(self.tokens, 'token')}, not for {asked.tokens}"
        if (reason := asked.content.difference(self.content)) is not None:
            return reason
        if asked.consumer in self.released:
            return RELEASED
        # Those that released it count, too: the sets must not grow without bound.
        crowded = len(self.claimed | self.released) >= MAX_CONSUMERS and asked.consumer not in self.claimed
        return CROWDED if crowded else None


class TicketBook:
    """The tickets of a producer, and the consumers that have redeemed them. Thread-safe."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._open: dict[bytes, _OpenTicket] = {}
        self._tickets: dict[str, bytes] = {}  # ticket by lease, until it is withdrawn

    def renew(self, incarnation: int) -> None:
        self._incarnation = incarnation

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, ticket: bytes) -> bool:
        return ticket in self._open

    # -- the engine's thread ------------------------------------------------------------------------------

    def publish(
        self,
        ticket: bytes,
        lease: str,
        tokens: int,
        content: PromptContent,
        grant: Grant,
        *,
        ready: int | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """Add a ticket, which consumers can redeem from now on.

        Args:
            tokens, content: number of tokens whose KV the leased blocks hold in the end, and digests of them.
            ready: number of tokens whose KV the blocks hold already; None for all. `advance` raises it.
            cached_tokens: number of prompt tokens that this engine's caches had; None if the offer says it.

        Raises:
            ValueError: the book has this ticket already.
        """
        with self._lock:
            if ticket in self._open:
                raise ValueError("the ticket names another lease already")
            self._open[ticket] = _OpenTicket(
                lease, tokens, content, grant, tokens if ready is None else ready, cached_tokens
            )
            self._tickets[lease] = ticket

    def advance(self, lease: str, grant: Grant, ready: int) -> None:
        """Record that the blocks of a lease hold the KV of more tokens. A lease without a ticket is ignored.

        Args:
            grant: block tables of all these tokens, and the same lease word as before.
            ready: number of tokens whose KV the blocks hold now, from the start of the prompt.
        """
        with self._lock:
            if (found := self._open.get(self._tickets.get(lease, b""))) is not None:
                found.grant, found.ready = grant, ready

    def withdraw(self, leases: Iterable[str]) -> None:
        with self._lock:
            for lease in leases:
                self._open.pop(self._tickets.pop(lease, b""), None)

    # -- the thread of the control channel ----------------------------------------------------------------

    def redeem(self, asked: Redeem) -> Redeemed | Unchanged | NotRedeemed:
        with self._lock:
            if (found := self._open.get(asked.ticket)) is None:
                return NotRedeemed(asked.number, self._incarnation, UNKNOWN, unknown=True)
            if (reason := found.refusal(asked)) is not None:
                return NotRedeemed(asked.number, self._incarnation, reason)
            # A consumer may repeat its request, because the first reply was lost: it gets the reply again.
            found.claimed.add(asked.consumer)
            if found.ready <= asked.known_tokens:
                return Unchanged(asked.number, self._incarnation)
            return Redeemed(asked.number, self._incarnation, found.grant, found.ready, found.cached_tokens)

    def claimed(self, consumer: int, tickets: Iterable[bytes]) -> list[str]:
        """Return the names of those leases that the consumer has claimed and not released."""
        with self._lock:
            found = [self._open[ticket] for ticket in dict.fromkeys(tickets) if ticket in self._open]
            return [one.lease for one in found if consumer in one.claimed]

    def release(self, consumer: int, tickets: Iterable[bytes]) -> list[str]:
        """End a consumer's claims, and return the leases that nobody claims any more, to be ended."""
        with self._lock:
            return [lease for ticket in tickets if (lease := self._released(consumer, ticket)) is not None]

    def _released(self, consumer: int, ticket: bytes) -> str | None:
        found = self._open.get(ticket)
        if found is None or consumer not in found.claimed:
            return None
        found.claimed.discard(consumer)
        found.released.add(consumer)
        if found.claimed:
            return None
        # Another lease may get the same ticket before this one is withdrawn.
        self._tickets.pop(found.lease, None)
        return self._open.pop(ticket).lease
