"""What a producer may say of tickets and turns, computed again from what it hears."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from msgspec import structs

from fuzz.seeds import CHUNK_TOKENS, CONTENT, GRANT, KEYS, LEASES, TOKENS, TURNS
from kvferry.common.errors import ProtocolError
from kvferry.transport.control_server import ControlServer, LeaseClaims
from kvferry.transport.messages import (
    AskTurn,
    Claim,
    KeptTurn,
    Turns,
    decode_reply,
    decode_request,
)
from kvferry.transport.redeem import MAX_CONSUMERS, NotRedeemed, Redeem, Redeemed, Unchanged
from kvferry.transport.turns import TurnContent
from transport.cards import ticket

HONEST = "honest"


class Model:
    """Watches a producer with tickets and turns: every answer and every event must be the one due.

    A lease that ends is granted anew under the same ticket, so there is always something to redeem.

    Attributes:
        wrong: answers and events that were not due, and those that were and did not come.
        redeemed, ended, found: how often a ticket was redeemed, a lease has ended, a turn was found.
    """

    def __init__(self, server: ControlServer) -> None:
        self.wrong: list[str] = []
        self.redeemed = self.ended = self.found = 0
        self._server = server
        self._leases = {ticket(name): name for name in (*LEASES, HONEST)}
        self._claimed: dict[bytes, set[int]] = defaultdict(set)
        self._released: dict[bytes, set[int]] = defaultdict(set)
        self._message: Any = None
        self._due: LeaseClaims | None = None
        self._grants = False
        self._receive, self._send = server._listener.receive, server._listener.send
        self._put = server.events.put
        for name in (*LEASES, HONEST):
            self._grant(name)
        for name in TURNS:
            kept = KeptTurn("P", ticket(name), structs.replace(GRANT, tokens=3 * CHUNK_TOKENS), 1, 0, [])
            server.turns.publish(TurnContent(CHUNK_TOKENS, KEYS, range(3 * CHUNK_TOKENS)), kept, name)
        server._listener.receive = self._heard  # type: ignore[method-assign]
        server._listener.send = self._said  # type: ignore[method-assign]
        server.events.put = self._told  # type: ignore[method-assign]

    def _grant(self, name: str) -> None:
        self._server.tickets.withdraw([name])  # a ticket names one lease
        self._server.tickets.publish(ticket(name), name, TOKENS, CONTENT, GRANT)
        self._claimed.pop(ticket(name), None)
        self._released.pop(ticket(name), None)

    def _heard(self) -> tuple[bytes, bytes]:
        """Take a message, and compute which event is due."""
        if self._due is not None:
            self.wrong.append(f"no {self._due} for {self._message}")
        self._message, self._due, self._grants = None, None, False
        sender, data = self._receive()
        try:
            self._message = asked = decode_request(data)
        except ProtocolError:
            return sender, data
        if isinstance(asked, Claim) and not asked.released:
            claimed = [one for one in self._leases if asked.consumer in self._claimed[one]]
            found = [self._leases[one] for one in claimed if one in asked.tickets]
            found += [name for name in TURNS if ticket(name) in asked.tickets]
            self._due = LeaseClaims(sorted(found)) if found else None
        elif isinstance(asked, Claim):
            named = [one for one in self._leases if one in asked.tickets]
            ended = [self._leases[one] for one in named if self._ends(one, asked.consumer)]
            self._due = LeaseClaims(sorted(ended), released=True) if ended else None
        elif isinstance(asked, Redeem) and self._may_redeem(asked):
            self._claimed[asked.ticket].add(asked.consumer)
            self._grants = asked.known_tokens < TOKENS
            if self._grants:
                self._due = LeaseClaims([self._leases[asked.ticket]])
        return sender, data

    def _ends(self, one: bytes, consumer: int) -> bool:
        """Whether a lease ends: with the last consumer that has claimed it."""
        claimed = self._claimed[one]
        if consumer not in claimed:
            return False
        claimed.discard(consumer)
        self._released[one].add(consumer)
        return not claimed

    def _may_redeem(self, asked: Redeem) -> bool:
        """Whether it has the ticket and the prompt, and has not released it."""
        known = asked.ticket in self._leases and (asked.tokens, asked.content) == (TOKENS, CONTENT)
        claimed, released = self._claimed[asked.ticket], self._released[asked.ticket]
        room = asked.consumer in claimed or len(claimed | released) < MAX_CONSUMERS
        return known and room and asked.consumer not in released

    def _said(self, to: bytes, answer: bytes) -> None:
        self._send(to, answer)
        said, asked = decode_reply(answer), self._message
        if isinstance(said, Redeemed | NotRedeemed):
            right = isinstance(asked, Redeem) and isinstance(said, Redeemed) == self._grants
            right &= self._due is None  # the event comes first
            self.redeemed += isinstance(said, Redeemed)
            if not right or said.number != asked.number:
                self.wrong.append(f"{said} for {asked}")
        elif isinstance(said, Unchanged):
            if not (isinstance(asked, Redeem) and self._may_redeem(asked) and asked.known_tokens >= TOKENS):
                self.wrong.append(f"{said} for {asked}")
        elif isinstance(said, Turns):
            self.found += bool(said.kept)
            self.wrong += [f"{kept} for {asked}" for kept in said.kept if not _may_find(asked, kept)]

    def _told(self, sender: bytes, event: LeaseClaims, **options: Any) -> bool:
        due, self._due = self._due, None
        if due != replace(event, leases=sorted(event.leases)):
            self.wrong.append(f"{event} in place of {due} for {self._message}")
        elif event.released:
            self.ended += 1
            for name in event.leases:
                self._grant(name)
        return self._put(sender, event, **options)


def _may_find(asked: Any, kept: KeptTurn) -> bool:
    """Whether it has named the last chunk that the turn is said to share: a key says all before it."""
    return (
        isinstance(asked, AskTurn)
        and asked.chunk_tokens == CHUNK_TOKENS
        and 0 < kept.chunks <= len(asked.keys)
        and asked.keys[kept.chunks - 1] == KEYS[kept.chunks - 1]
    )
