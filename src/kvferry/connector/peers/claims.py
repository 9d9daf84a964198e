"""Leases that this engine's requests claim at producers: redeemed once and released once for all of them.

Samples of a prompt (``n`` above 1) come with one ticket, and share one redemption. Requests with the same
ticket and other prompts redeem it each for themselves, because the producer compares the prompt. The lease is
released with the last request that has the ticket, if the producer may keep it for this engine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import Address, Pending, Unusable
from kvferry.transport.redeem import PromptContent, Redeemed

STEP_WAIT_SECONDS = 0.0005
"""Time that a step waits at most for producers to answer, all requests together. A known peer nearby answers
within it, so its prompt need not wait for the next step."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One request's part in a redemption.

    Attributes:
        address: of the producer.
        ticket: names the lease there.
        prompt: content that the ticket is redeemed with.
        number: of the redemption.
    """

    address: Address
    ticket: bytes
    prompt: PromptContent
    number: int


@dataclass(slots=True)
class _Shared:
    """Requests with the same ticket.

    Attributes:
        users: requests with a claim, by the redemption they share.
        numbers: the redemption of each prompt.
        held: a redemption that has ended may have claimed the lease.
    """

    users: dict[int, int] = field(default_factory=dict)
    numbers: dict[PromptContent, int] = field(default_factory=dict)
    held: bool = False


class Claims:
    """Claims by ticket. Only the engine's thread calls it."""

    def __init__(self, client: ControlClient) -> None:
        """Begin without any; `client` speaks to producers."""
        self._client = client
        self._shared: dict[tuple[Address, bytes], _Shared] = {}
        self._wait_seconds = STEP_WAIT_SECONDS

    def __len__(self) -> int:
        """Tickets that requests of this engine have redeemed, or are redeeming."""
        return len(self._shared)

    def begin(self, address: Address, ticket: bytes, tokens: int, content: PromptContent) -> Claim:
        """Redeem a ticket for a request, or join a request with the same ticket and prompt."""
        shared = self._shared.setdefault((address, ticket), _Shared())
        number = shared.numbers.get(content)
        if number is None:
            number = shared.numbers[content] = self._client.redeem(address, ticket, tokens, content)
        shared.users[number] = shared.users.get(number, 0) + 1
        return Claim(address, ticket, content, number)

    def answer(self, claim: Claim) -> Redeemed | Unusable | Pending:
        """Return the producer's answer; waits for it as far as this step's time allows."""
        began = time.monotonic()
        answer = self._client.redemption(claim.number, self._wait_seconds)
        self._wait_seconds -= time.monotonic() - began
        return answer

    def step(self) -> None:
        """Begin a step, which has its full time to wait again."""
        self._wait_seconds = STEP_WAIT_SECONDS

    def end(self, claim: Claim) -> None:
        """End a request's claim; the last one of a ticket releases the lease."""
        name = claim.address, claim.ticket
        shared = self._shared[name]
        shared.users[claim.number] -= 1
        if not shared.users[claim.number]:
            del shared.users[claim.number], shared.numbers[claim.prompt]
            shared.held |= self._client.end_redemption(claim.number)
        if not shared.users:
            del self._shared[name]
            if shared.held:
                self._client.release(*name)
