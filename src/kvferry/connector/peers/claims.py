"""Claims of this engine's requests on leases at producers, shared by requests with the same ticket.

A ticket is a random id that claims a lease. To *redeem* it is to send it to the producer, which replies with
the block tables. Samples of a prompt (``n`` above 1) arrive with the same ticket and share one redemption.
Requests with the same ticket but different prompts each redeem it, because the producer compares the prompt.
When the last request with the ticket ends its claim, the lease is released, if the producer may have granted
it to this engine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import Address, Pending, Unusable
from kvferry.transport.redeem import PromptContent, Redeemed

STEP_WAIT_SECONDS = 0.0005
"""Maximum seconds that a step waits for answers of producers, over all requests. A nearby peer that is
already connected answers within this time, so the prompt need not wait for the next step."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One request's share in the redemption of a ticket, the random id that claims a lease.

    Attributes:
        address: address of the producer's control channel.
        ticket: ticket that claims the lease.
        prompt: digests of the prompt content, sent with the ticket.
        number: number of the redemption in the control client.
    """

    address: Address
    ticket: bytes
    prompt: PromptContent
    number: int


@dataclass(slots=True)
class _Shared:
    """The redemptions of one ticket.

    Attributes:
        users: number of requests that share each redemption, by redemption number.
        numbers: redemption number of each prompt content.
        held: True if a redemption that has ended may have claimed the lease.
    """

    users: dict[int, int] = field(default_factory=dict)
    numbers: dict[PromptContent, int] = field(default_factory=dict)
    held: bool = False


class Claims:
    """The claims of an engine's requests on leases at producers. Only the engine's thread calls it."""

    def __init__(self, client: ControlClient) -> None:
        """Create the record without claims. `client` is the control channel to the producers."""
        self._client = client
        self._shared: dict[tuple[Address, bytes], _Shared] = {}
        self._wait_seconds = STEP_WAIT_SECONDS

    def __len__(self) -> int:
        """Return the number of tickets on which requests of this engine have a claim."""
        return len(self._shared)

    def begin(self, address: Address, ticket: bytes, tokens: int, content: PromptContent) -> Claim:
        """Redeem a request's ticket: send it to the producer, unless it was sent before for the same prompt.

        Args:
            address: address of the producer's control channel.
            ticket: the ticket.
            tokens: number of offered tokens, from the start of the prompt.
            content: digests of the content of these tokens.
        """
        shared = self._shared.setdefault((address, ticket), _Shared())
        number = shared.numbers.get(content)
        if number is None:
            number = shared.numbers[content] = self._client.redeem(address, ticket, tokens, content)
        shared.users[number] = shared.users.get(number, 0) + 1
        return Claim(address, ticket, content, number)

    def answer(self, claim: Claim) -> Redeemed | Unusable | Pending:
        """Return the producer's answer to the ticket of a claim.

        Wait for the answer for as long as this step may still wait, then return Pending. Return Unusable
        with the reason if the producer refuses.
        """
        began = time.monotonic()
        answer = self._client.redemption(claim.number, self._wait_seconds)
        self._wait_seconds -= time.monotonic() - began
        return answer

    def step(self) -> None:
        """Begin a step: `answer` may again wait for up to `STEP_WAIT_SECONDS` in total."""
        self._wait_seconds = STEP_WAIT_SECONDS

    def end(self, claim: Claim) -> None:
        """End a request's claim on a lease. After the last claim with the same ticket, release the lease."""
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
