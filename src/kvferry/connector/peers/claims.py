"""The exchange with one peer for one request, from the ticket to the parts of a load.

There is one `Pull` for each request that came with a ticket, or for which a peer keeps an earlier turn of its
conversation (a *turn* is the KV of a finished request):

    TICKET ─the prompt has a name─▶ REDEEMING ─▶ GRANTED ─▶ SETTLED
       └──────────┴─peer excluded──────────────────┴───────────▲      a turn that was found begins as GRANTED

`Claims` redeems the ticket as the request arrives. From then on heartbeats keep the lease alive, however long
the request queues. The claim ends once: when the request's loads have succeeded, when the engine computes the
prompt instead, or when this peer is excluded. Samples of a prompt (``n`` above 1) arrive with the same ticket
and share one redemption. Requests with the same ticket but different prompts each redeem it, because the
producer compares the prompt.

A peer may grant blocks before it has computed the whole prompt. Then a load reads what is computed, and goes
on with each further grant (`PeerFeed`).

A request keeps its claim, and so blocks of the producer, while it waits for blocks of its own engine. Engines
that offer KV to each other could wait for each other for ever: `Standstill` breaks such circles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.connector.engine import Request
from kvferry.connector.events import MissReason
from kvferry.connector.load import Bid, GroupBytes, Load
from kvferry.connector.messages import LoadPart, Report
from kvferry.planning.select import next_part
from kvferry.tiers.names import PEER
from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import Address, PeerInfo, Pending, Unusable
from kvferry.transport.read_plan import ReadOrder
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


def peer_name(engine_id: str, address: Address, incarnation: int | None) -> str:
    """Return the name of a peer: engine id and address, with the run of the engine if known."""
    host, port = address
    run = "" if incarnation is None else f"#{incarnation:x}"
    return f"{engine_id}@{host}:{port}{run}"


@dataclass(slots=True, kw_only=True)
class Pull:
    """The KV at one peer that one request may read, and the state of the exchange with this peer.

    Attributes:
        peer: name of the peer (`peer_name`), with the run of its engine once that is known.
        address: address of the peer's control channel.
        tokens: number of offered tokens, from the start of the prompt.
        excluded: `RequestState.excluded` of the request.
        began: monotonic seconds at which the request arrived, or at which its ticket was sent.
        cached_tokens: number of prompt tokens that the peer's caches had when it computed the prompt; None
            until that is known, and for a turn.
        foreseen: True if the peer may still be computing the prompt, or may not know the ticket yet.
        content: digests of the prompt, sent with the ticket; None before, and for a turn.
        number: id of the message with the ticket, by which the control client finds the answer.
        granted: last answer with block tables and lease; None until there is one. For a turn, there is one
            from the start.
        info: description of the peer when it was last asked; None if the handshake was not complete.
        settled: True when the request will read no more from this peer.
        gone: True if the peer is excluded because it cannot be reached or has not answered in time.
        loading: the load under way from this peer, the newest if an earlier one is still awaited; else None.
        bid: last bid for the request; None if there was none.
    """

    request: Request
    peer: str
    address: Address
    engine_id: str
    ticket: bytes
    tokens: int
    excluded: dict[str, str]
    began: float
    cached_tokens: int | None = None
    foreseen: bool = False
    content: PromptContent | None = None
    number: int = -1
    granted: Redeemed | None = None
    info: PeerInfo | None = None
    settled: bool = False
    gone: bool = False
    loading: PeerFeed | None = None
    bid: Bid | None = None


@dataclass(slots=True)
class _Shared:
    """The messages that redeem one ticket, one for each distinct prompt content.

    Attributes:
        numbers: id of each message, by the prompt content that it contains.
        users: number of requests that use each message, by message id. A message without users is removed.
        held: True if a message that has been removed was not refused: the lease may have been granted.
    """

    numbers: dict[PromptContent, int] = field(default_factory=dict)
    users: Counter[int] = field(default_factory=Counter)
    held: bool = False


class Claims:
    """The claims of this engine's requests on leases at producers. Only the engine's thread calls it.

    Attributes:
        waited_seconds: seconds for which this engine step has waited for answers.
    """

    def __init__(self, client: ControlClient, idle: Callable[[], bool], clock: Callable[[], float]) -> None:
        """Create an empty collection of claims. `idle` tells whether the engine computes no request."""
        self._client, self._idle, self._clock = client, idle, clock
        self._shared: dict[tuple[Address, bytes], _Shared] = {}
        self.waited_seconds = 0.0

    def __len__(self) -> int:
        """Return the number of tickets that requests of this engine use."""
        return len(self._shared)

    def begin(self, pull: Pull, content: PromptContent) -> None:
        """Claim a lease for a request. The ticket is sent once for each prompt content. Mutates `pull`."""
        shared = self._shared.setdefault((pull.address, pull.ticket), _Shared())
        number = shared.numbers.get(content)
        if number is None:
            number = shared.numbers[content] = self._client.redeem(
                pull.address, pull.ticket, pull.tokens, content, foreseen=pull.foreseen
            )
        shared.users[number] += 1
        pull.content, pull.number, pull.began = content, number, self._clock()

    def update(self, pull: Pull) -> Unusable | None:
        """Store the peer's last answer to a ticket. Return why its KV cannot be read; None if it can.

        Wait a moment if there is no answer yet (`STEP_WAIT_SECONDS`). Answers cover more and more tokens
        while the producer computes the prompt. Mutates `pull`.
        """
        if pull.settled:
            why = pull.excluded.get(pull.peer) or "the claim on its lease has ended"
            return Unusable(why, pull.gone)
        before = pull.granted
        if pull.content is None or (before is not None and before.tokens >= pull.tokens):
            return None
        answer = self._answer(pull)
        if isinstance(answer, Redeemed):
            if before is None:
                pull.granted = answer
                pull.peer = peer_name(pull.engine_id, pull.address, answer.incarnation)
            # Further answers extend one lease. Blocks of another may hold other KV than parts already read.
            elif (answer.incarnation, answer.grant.slot, answer.grant.generation) != (
                before.incarnation,
                before.grant.slot,
                before.grant.generation,
            ):
                return Unusable("the peer has replaced the lease while its blocks were read")
            elif answer.tokens >= before.tokens:
                pull.granted = answer
        return answer if isinstance(answer, Unusable) else None

    def end(self, pull: Pull) -> None:
        """End a request's claim, and release the lease if it was the ticket's last claim. Mutates `pull`."""
        pull.settled = True
        if pull.content is None:
            if pull.granted is not None:  # a kept turn
                self._client.release(pull.address, pull.ticket)
            return
        if pull.foreseen:  # the answer may have come while another source loaded the KV
            self._answer(pull)
        name = pull.address, pull.ticket
        shared = self._shared[name]
        shared.users[pull.number] -= 1
        if not shared.users[pull.number]:
            del shared.users[pull.number], shared.numbers[pull.content]
            # An answer may still be on its way, so only a refusal proves that there is no lease to release.
            shared.held |= self._client.end_redemption(pull.number)
        if not shared.users:
            del self._shared[name]
            if shared.held:
                self._client.release(*name)

    def _answer(self, pull: Pull) -> Redeemed | Unusable | Pending:
        """Return the producer's last answer. Wait a moment if it has not arrived, but no step waits twice."""
        now = self._clock()
        most = IDLE_STEP_WAIT_SECONDS - self.waited_seconds
        if not self._idle():
            most = STEP_WAIT_SECONDS - max(self.waited_seconds, now - pull.began)
        answer = self._client.redemption(pull.number, max(0.0, most))
        self.waited_seconds += self._clock() - now
        if isinstance(answer, Redeemed) and answer.cached_tokens is not None:
            pull.cached_tokens = answer.cached_tokens
        return answer


class PeerFeed:
    """Orders the parts of one load from a peer, one for each stretch of KV that the peer has computed."""

    origin = PEER

    def __init__(
        self,
        load: Load,
        pull: Pull,
        claims: Claims,
        *,
        alignment_tokens: int,
        labels: Sequence[str],
        on_failed: Callable[[Pull, Report], None],
    ) -> None:
        """Create the feed of a load that begins now. The peer has granted a lease."""
        self._load, self._pull, self._claims = load, pull, claims
        self._alignment_tokens, self._labels, self._on_failed = alignment_tokens, labels, on_failed
        self._done, self._parts, self._ready = load.span.begins, 0, 0
        self._dropped = False
        pull.loading = self

    def next_parts(self) -> Sequence[LoadPart]:
        load, pull = self._load, self._pull
        unusable = (
            Unusable("no request waits for it any more") if self._dropped else self._claims.update(pull)
        )
        if unusable is not None:
            return [LoadPart(load.key, None, failure=unusable.reason)]
        assert pull.granted is not None
        news, self._ready = pull.granted.tokens > self._ready, pull.granted.tokens
        span = next_part(
            load.span,
            self._done,
            self._ready,
            alignment_tokens=self._alignment_tokens,
            whole=self._ready >= pull.tokens,
        )
        if span is None:
            # The load's deadline begins anew with each part, so the workers are told of progress that cannot
            # be read yet.
            return [LoadPart(load.key, None)] if news else []
        self._done, self._parts = span.ends, self._parts + 1
        order = ReadOrder(
            key=f"{load.key}.{self._parts}",
            peer=pull.peer,
            span=span,
            src_tables=pull.granted.grant.block_ids,
            dst_tables=load.tables,
            lease=pull.granted.grant.word(pull.granted.incarnation),
        )
        return [LoadPart(load.key, order, last=span.ends == load.span.ends)]

    def drop(self) -> None:
        # The workers cannot cancel reads in flight.
        self._dropped = True
        self._leave()

    def moved(self, report: Report) -> tuple[GroupBytes, ...]:
        figures = report.figures
        each = zip(self._labels, figures.strategies_by_group, figures.bytes_by_group, strict=False)
        return tuple(GroupBytes(label, "+".join(names), size) for label, names, size in each if size)

    def miss(self, report: Report) -> MissReason:
        return MissReason.DEADLINE if report.late else MissReason.FAILED

    def ended(self, report: Report, *, wanted: bool) -> None:
        self._leave()
        if wanted and report.failure is not None:
            self._on_failed(self._pull, report)

    def _leave(self) -> None:
        # After a failure the request may have begun another load, which goes on.
        if self._pull.loading is self:
            self._pull.loading = None


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
        """Begin to watch an engine, which gives up a claim if no request gets blocks for so long."""
        self._patience_seconds, self._clock = patience_seconds, clock
        self._admitted, self._look, self._due = 0, 0.0, 0.0
        self.reason = (
            f"no request has got blocks for {patience_seconds:g} s (patience_seconds), and this engine keeps "
            "blocks for others, so the claim is given up"
        )

    def claim_lapses(self, admitted: int, leases_block: Callable[[], bool]) -> bool:
        """Return whether one claim must be given up now. Call this once per engine step."""
        now = self._clock()
        if now < self._look:
            return False
        self._look = now + LAPSE_SECONDS
        # While requests still get blocks, the others only wait for their turn. An engine without leases waits
        # for its own running requests, which end.
        if admitted != self._admitted or not leases_block():
            self._admitted, self._due = admitted, now + self._patience_seconds
        return now >= self._due
