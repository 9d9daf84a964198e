"""Claims of this engine's requests on leases at producers, shared by requests with the same ticket.

A ticket is a random id that claims a lease. To *redeem* it is to send it to the producer, which replies with
the block tables. Samples of a prompt (``n`` above 1) arrive with the same ticket and share one redemption.
Requests with the same ticket but different prompts each redeem it, because the producer compares the prompt.
When the last request with the ticket ends its claim, the lease is released, if the producer may have granted
it to this engine.
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


@dataclass(frozen=True, slots=True)
class Claim:
    """One request's claim on a lease (blocks that a producer keeps allocated until they are read).

    Attributes:
        address: address (host, port) of the producer's control channel.
        ticket: random id that the request sends to the producer to claim the lease.
        prompt: digests of the content of the offered tokens, sent with the ticket.
        number: id of the message that sent the ticket. The control client finds the answer by this id.
        began: time at which the request claimed the lease, monotonic seconds.
    """

    address: Address
    ticket: bytes
    prompt: PromptContent
    number: int
    began: float


@dataclass(slots=True)
class _Shared:
    """The messages that redeem one ticket, shared by all requests with this ticket.

    To redeem a ticket (random id) is to send it to the producer to claim a lease. One message is sent per
    distinct prompt content.

    Attributes:
        users: number of requests that use each message, by message id. A message without users is removed.
        numbers: id of each message, by the digests of the prompt content that it contains.
        held: True if the producer may have granted the lease in reply to a message that has been removed,
            because it did not refuse that message.
    """

    users: dict[int, int] = field(default_factory=dict)
    numbers: dict[PromptContent, int] = field(default_factory=dict)
    held: bool = False


class Claims:
    """The claims of this engine's requests on leases at producers (engines that offer KV blocks).

    Requests with the same ticket (random id that claims a lease) share one lease. The lease is released when
    the last of these requests ends its claim. Only the engine's thread calls the methods.
    """

    def __init__(self, client: ControlClient, idle: Callable[[], bool], clock: Callable[[], float]) -> None:
        """Create an empty collection of claims.

        Args:
            client: control channel to the producers.
            idle: function that returns whether the engine computes no request at present.
            clock: function that returns monotonic seconds.
        """
        self._client, self._idle, self._clock = client, idle, clock
        self._shared: dict[tuple[Address, bytes], _Shared] = {}
        self._waited_seconds = 0.0

    def __len__(self) -> int:
        """Return the number of tickets (random ids that claim leases) that requests of this engine use."""
        return len(self._shared)

    def begin(
        self, address: Address, ticket: bytes, tokens: int, content: PromptContent, *, foreseen: bool = False
    ) -> Claim:
        """Claim a lease for a request, by sending the ticket to the producer. Return the claim.

        If another request has sent the ticket with the same prompt content, the ticket is not sent again.

        Args:
            address: address (host, port) of the producer's control channel.
            ticket: random id that claims the lease.
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
        """Return the producer's last answer to a claim on a lease: the block tables and the lease.

        While the producer computes the prompt, later calls return answers that cover more tokens.

        Wait for the answer if it has not arrived. All calls in one engine step together wait at most
        `IDLE_STEP_WAIT_SECONDS` if the engine computes nothing. Else they wait at most `STEP_WAIT_SECONDS`,
        and only that long after `begin`. Return Pending if there is still no answer. Return Unusable with the
        reason if the producer has refused the ticket, cannot be reached, or has not answered within
        ``handshake_seconds``.

        Args:
            claim: claim that `begin` returned.
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
        """End a request's claim on a lease.

        If no other claim uses the same ticket, also tell the producer to release the lease, unless the
        producer has refused the ticket.

        Args:
            claim: claim that `begin` returned; it must not be used again.
        """
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


# A look takes time in proportion to the number of requests, so it is not taken in every step.
LAPSE_SECONDS = 1.0
"""Seconds between two looks at the engine, and between two claims given up during one standstill."""


class Standstill:
    """Decides when a claim on another engine's lease must be given up. Only the engine's thread calls it.

    A request keeps its claim, and so blocks of the engine that made the offer, while it waits for blocks of
    its own engine. Two engines that offer KV to each other can then wait for each other for ever, each full
    of leases that requests at the other one claim. One engine can wait for itself in the same way, and more
    than two in a circle. At least one engine of every such circle must let go of a claim. Each one does: the
    request with the oldest claim gives it up and takes what is left, another source or computing.

    Nothing is given up while requests still get blocks, because then the others only wait for their turn.
    Nothing is given up by an engine without leases either: what it waits for are its own running requests.

    Attributes:
        reason: why a claim is given up, as text for people.
    """

    def __init__(self, patience_seconds: float, clock: Callable[[], float]) -> None:
        """Begin to watch an engine.

        Args:
            patience_seconds: seconds without any new blocks for a request after which a claim is given up.
            clock: function that returns monotonic seconds.
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
            leases_block: function that returns whether requests wait for blocks that leases for other engines
                keep.
        """
        now = self._clock()
        if now < self._look:
            return False
        self._look = now + LAPSE_SECONDS
        if admitted != self._admitted or not leases_block():
            self._admitted, self._due = admitted, now + self._patience_seconds
        return now >= self._due
