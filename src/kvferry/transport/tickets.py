"""The producer's tickets: who may redeem them, and who has.

The engine's thread publishes a ticket when it grants the lease, and withdraws it when the lease ends, before
a word is raised. The thread of the control channel redeems, and passes on who claims and who releases.

    OPEN ─redeemed─▶ CLAIMED by one or more consumers ─all of them have released it─▶ ENDED
    from any state: withdrawn, because its time is up or the cache was reset ────────┘

A redemption that fails changes nothing, and only a consumer that has redeemed a ticket may release it. So a
stolen ticket alone ends nobody's lease.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvferry.transport.redeem import Grant, NotRedeemed, PromptContent, Redeem, Redeemed

UNKNOWN: Final = (
    "it does not know the ticket: its lease has ended (released, or not claimed within lease_seconds), or "
    "the ticket is not of this engine"
)
RELEASED: Final = "this engine has redeemed the ticket before, and released it"
MOST_CONSUMERS: Final = 256
"""Runs of engines that may redeem one ticket; anyone with the key can make runs up."""

CROWDED: Final = f"{MOST_CONSUMERS} engines have redeemed the ticket, and no more may"


@dataclass(slots=True)
class _OpenTicket:
    """A ticket whose lease is held.

    Attributes:
        lease: the lease's name in this engine.
        tokens, content: the prompt it is for.
        grant: what it is exchanged for.
        claimed: consumers that have redeemed it and not released it.
        released: consumers that have released it.
    """

    lease: str
    tokens: int
    content: PromptContent
    grant: Grant
    claimed: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)

    def refusal(self, asked: Redeem) -> str | None:
        """Return why it is not exchanged; None if it is."""
        if asked.tokens != self.tokens:
            return f"the ticket is for {self.tokens} tokens, not for {asked.tokens}"
        if (reason := asked.content.difference(self.content)) is not None:
            return reason
        if asked.consumer in self.released:
            return RELEASED
        crowded = len(self.claimed | self.released) >= MOST_CONSUMERS and asked.consumer not in self.claimed
        return CROWDED if crowded else None


class TicketBook:
    """All tickets of an engine's run whose leases are held. Any thread may call it."""

    def __init__(self, incarnation: int) -> None:
        """Begin without any; `incarnation` of the engine's run is part of every answer."""
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._open: dict[bytes, _OpenTicket] = {}
        self._tickets: dict[str, bytes] = {}  # by lease, until the lease is withdrawn

    def __len__(self) -> int:
        """Tickets that can be redeemed."""
        return len(self._open)

    # -- the engine's thread ------------------------------------------------------------------------------

    def publish(self, ticket: bytes, lease: str, tokens: int, content: PromptContent, grant: Grant) -> None:
        """Make a ticket redeemable.

        Args:
            ticket: random.
            lease: the lease's name in this engine.
            tokens, content: the prompt whose beginning the blocks hold.
            grant: what the ticket is exchanged for.
        """
        with self._lock:
            self._open[ticket] = _OpenTicket(lease, tokens, content, grant)
            self._tickets[lease] = ticket

    def withdraw(self, leases: Iterable[str]) -> None:
        """Withdraw the tickets of these leases; leases without one are ignored."""
        with self._lock:
            for lease in leases:
                self._open.pop(self._tickets.pop(lease, b""), None)

    # -- the thread of the control channel ----------------------------------------------------------------

    def redeem(self, asked: Redeem) -> Redeemed | NotRedeemed:
        """Exchange a ticket for its grant, and note who has claimed it.

        A consumer whose claim stands gets the same answer again: the first may have been lost.
        """
        with self._lock:
            if (found := self._open.get(asked.ticket)) is None:
                return NotRedeemed(asked.number, self._incarnation, UNKNOWN)
            if (reason := found.refusal(asked)) is not None:
                return NotRedeemed(asked.number, self._incarnation, reason)
            found.claimed.add(asked.consumer)
            return Redeemed(asked.number, self._incarnation, found.grant)

    def claimed(self, consumer: int, tickets: Iterable[bytes]) -> list[str]:
        """Return the leases of those of these tickets that the consumer has claimed."""
        with self._lock:
            found = [self._open[ticket] for ticket in dict.fromkeys(tickets) if ticket in self._open]
            return [one.lease for one in found if consumer in one.claimed]

    def release(self, consumer: int, tickets: Iterable[bytes]) -> list[str]:
        """End a consumer's claims; return the leases that end with them, which nobody else has claimed."""
        with self._lock:
            return [lease for ticket in tickets if (lease := self._released(consumer, ticket)) is not None]

    def _released(self, consumer: int, ticket: bytes) -> str | None:
        found = self._open.get(ticket)
        if found is None or consumer not in found.claimed:
            return None
        found.claimed.discard(consumer)
        found.released.add(consumer)
        return None if found.claimed else self._open.pop(ticket).lease
