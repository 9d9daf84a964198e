"""Claims of this engine's requests on leases at producers, and when one of them must be given up.

Samples of a prompt (``n`` above 1) arrive with the same ticket and share one redemption. Requests with the
same ticket but different prompts each redeem it, because the producer compares the prompt. When the last
request with the ticket ends its claim, the lease is released, if the producer may have granted it.

A request keeps its claim, and so blocks of the producer, while it waits for blocks of its own engine. Engines
that offer KV to each other could wait for each other for ever: `Standstill` breaks such circles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import Address, Pending, Unusable
from kvferry.transport.redeem import PromptContent, Redeemed

STEP_WAIT_SECONDS = 0.0005
"""Maximum seconds after its question that a step waits for a producer's answer, and that a step waits in all.
A nearby peer that is already connected answers within this time, so the prompt need not wait for the next
step. No later step waits, so a slow producer does not delay the requests that run."""

IDLE_STEP_WAIT_SECONDS = 0.002
"""Maximum seconds that a step waits if the engine computes nothing. This delays no running request."""

# A look takes time in proportion to the number of requests, so it is not taken in every step.
LAPSE_SECONDS = 1.0
"""Seconds between two looks at the engine, and between two claims given up during one standstill."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One request's claim on a lease.

    Attributes:
        address: address of the producer's control channel.
        ticket: ticket of the lease.
        prompt: digests of the content of the offered tokens, sent with the ticket.
        number: id of the message that sent the ticket, by which the control client finds the answer.
        began: time at which the request claimed the lease, monotonic seconds.
    """

    address: Address
    ticket: bytes
    prompt: PromptContent
    number: int
    began: float


@dataclass(slots=True)
class _Shared:
    """The messages that redeem one ticket, one for each distinct prompt content.

    Attributes:
        users: number of requests that use each message, by message id. A message without users is removed.
        numbers: id of each message, by the prompt content that it contains.
        held: True if a message that has been removed was not refused: the lease may have been granted.
    """

    users: dict[int, int] = field(default_factory=dict)
    numbers: dict[PromptContent, int] = field(default_factory=dict)
    held: bool = False


class Claims:
    """The claims of this engine's requests on leases at producers. Only the engine's thread calls it."""

    def __init__(self, client: ControlClient, idle: Callable[[], bool], clock: Callable[[], float]) -> None:
        """Create an empty collection of claims.

        Args:
            client: control channel to the producers.
            idle: returns whether the engine computes no request at present.
            clock: returns monotonic seconds.
        """
        self._client, self._idle, self._clock = client, idle, clock
        self._shared: dict[tuple[Address, bytes], _Shared] = {}
        self._waited_seconds = 0.0

    def __len__(self) -> int:
        """Return the number of tickets that requests of this engine use."""
        return len(self._shared)

    def begin(
        self, address: Address, ticket: bytes, tokens: int, content: PromptContent, *, foreseen: bool = False
    ) -> Claim:
        """Claim a lease for a request. The ticket is sent once for each prompt content.

        Args:
            address: address of the producer's control channel.
            ticket: ticket of the lease.
            tokens: number of offered tokens, from the start of the prompt.
            content: digests of the content of these tokens.
            foreseen: True if the producer may learn of the ticket later than this engine.
        """
        shared = self._shared.setdefault((address, ticket), _Shared())
        number = shared.numbers.get(content)
        if number is None:
            number = shared.numbers[content] = self._client.redeem(
                address, ticket, tokens, content, foreseen=foreseen
            )
        shared.users[number] = shared.users.get(number, 0) + 1
        return Claim(address, ticket, content, number, self._clock())

    def answer(self, claim: Claim) -> Redeemed | Unusable | Pending:
        """Return the producer's last answer to a claim. Wait a moment if it has not arrived.

        All calls in one engine step together wait at most `IDLE_STEP_WAIT_SECONDS` if the engine computes
        nothing. Else they wait at most `STEP_WAIT_SECONDS`, and only that long after `begin`.

        Returns:
            The block tables and the lease, for more tokens with each answer while the producer computes the
            prompt. Pending if there is no answer yet. Unusable if the producer has refused the ticket, cannot
            be reached, or has not answered within ``handshake_seconds``.
        """
        now = self._clock()
        most = IDLE_STEP_WAIT_SECONDS - self._waited_seconds
        if not self._idle():
            most = STEP_WAIT_SECONDS - max(self._waited_seconds, now - claim.began)
        answer = self._client.redemption(claim.number, max(0.0, most))
        self._waited_seconds += self._clock() - now
        return answer

    def step(self) -> None:
        """Begin an engine step: calls of `answer` may wait again."""
        self._waited_seconds = 0.0

    def end(self, claim: Claim) -> None:
        """End a request's claim, and release the lease if this was the ticket's last claim.

        Args:
            claim: claim that `begin` returned; it must not be used again.
        """
        name = claim.address, claim.ticket
        shared = self._shared[name]
        shared.users[claim.number] -= 1
        if not shared.users[claim.number]:
            del shared.users[claim.number], shared.numbers[claim.prompt]
            # An answer may still be on its way, so only a refusal proves that there is no lease to release.
            shared.held |= self._client.end_redemption(claim.number)
        if not shared.users:
            del self._shared[name]
            if shared.held:
                self._client.release(*name)


class Standstill:
    """Decides when a claim on another engine's lease must be given up. Only the engine's thread calls it.

    Two engines that offer KV to each other can wait for each other for ever, each full of leases that
    requests at the other one claim. One engine can wait for itself in the same way, and more than two in a
    circle. At least one engine of every such circle must let go of a claim. Each one does: the request with
    the oldest claim gives it up and takes what is left, another source or computing.

    Attributes:
        reason: why a claim is given up, as text for people.
    """

    def __init__(self, patience_seconds: float, clock: Callable[[], float]) -> None:
        """Begin to watch an engine.

        Args:
            patience_seconds: seconds without any new blocks for a request after which a claim is given up.
            clock: returns monotonic seconds.
        """
        self._patience_seconds, self._clock = patience_seconds, clock
        self._admitted, self._look, self._due = 0, 0.0, 0.0
        self.reason = (
            f"no request has got blocks for {patience_seconds:g} s (patience_seconds), and this engine keeps "
            "blocks for others, so the claim is given up"
        )

    def claim_lapses(self, admitted: int, leases_block: Callable[[], bool]) -> bool:
        """Return whether one claim must be given up now. Call this once per engine step.

        Args:
            admitted: number of times so far that the engine has allocated blocks to a waiting request.
            leases_block: returns whether requests wait for blocks that leases for other engines pin.
        """
        now = self._clock()
        if now < self._look:
            return False
        self._look = now + LAPSE_SECONDS
        # While requests still get blocks, the others only wait for their turn. An engine without leases waits
        # for its own running requests, which end.
        if admitted != self._admitted or not leases_block():
            self._admitted, self._due = admitted, now + self._patience_seconds
        return now >= self._due
