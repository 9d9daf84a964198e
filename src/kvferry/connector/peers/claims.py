"""Claims of this engine's requests on leases at producers, and when one of them must be given up.

Samples of a prompt (``n`` above 1) arrive with the same ticket and share one redemption. Requests with the
same ticket but different prompts each redeem it, because the producer compares the prompt. When the last
request with the ticket ends its claim, the lease is released, if the producer may have granted it.

A request keeps its claim, and so blocks of the producer, while it waits for blocks of its own engine. Engines
that offer KV to each other could wait for each other for ever: `Standstill` breaks such circles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvferry.connector.engine import Request
from kvferry.connector.events import MissReason
from kvferry.connector.load import Bid, Bidding, GroupBytes, Load
from kvferry.connector.messages import LoadPart, Report
from kvferry.geometry import RankGeometry
from kvferry.planning.select import attends_to_all, next_part
from kvferry.tiers.names import PEER
from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import Address, PeerInfo, Pending, Unusable
from kvferry.transport.read_plan import ReadOrder
from kvferry.transport.redeem import Grant, PromptContent, Redeemed

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


@dataclass(slots=True)
class Pull:
    """The KV at one peer that one request may read, and the state of the exchange with this peer.

    Attributes:
        request: the request.
        address: address of the peer's control channel.
        engine_id: id of the peer's engine.
        ticket: ticket of the lease at the peer.
        tokens: number of offered tokens, from the start of the prompt.
        bidding: excluded sources of the request, and its remaining attempts to load KV.
        until: deadline for sending the ticket to the peer, monotonic seconds.
        cached_tokens: number of prompt tokens that the peer's caches had when it computed the prompt; None
            until that is known, and for a turn.
        claim: the request's claim on the lease; None before the ticket has been sent, and for a turn, which
            needs no claim.
        foreseen: True if the peer may still be computing the prompt, or may not know the ticket yet.
        grant: the peer's block tables and lease word; None until they are known.
        ready: number of tokens, from the start of the prompt, whose KV is in the peer's blocks.
        incarnation: run of the peer's engine that granted the lease; None until it is known.
        settled: True when the request will read no more from this peer.
        gone: True if the peer is excluded because it cannot be reached or has not answered in time.
        loading: True while a load from this peer is under way.
        bid: last bid for the request; None if there was none.
    """

    request: Request
    address: Address
    engine_id: str
    ticket: bytes
    tokens: int
    bidding: Bidding
    until: float
    cached_tokens: int | None = None
    claim: Claim | None = None
    foreseen: bool = False
    grant: Grant | None = None
    ready: int = 0
    incarnation: int | None = None
    settled: bool = False
    gone: bool = False
    loading: bool = False
    bid: Bid | None = None

    @property
    def is_whole(self) -> bool:
        """True if the peer's blocks hold the KV of all offered tokens."""
        return self.ready >= self.tokens

    def take(self, answer: Redeemed) -> str | None:
        """Store the peer's answer to the ticket, and return why it cannot be used; None if it can."""
        # Further answers extend one lease. Blocks of another may hold other KV than the parts already read.
        if self.grant is not None and (answer.incarnation, answer.grant.slot, answer.grant.generation) != (
            self.incarnation,
            self.grant.slot,
            self.grant.generation,
        ):
            return "the peer has replaced the lease while its blocks were read"
        self.grant, self.incarnation = answer.grant, answer.incarnation
        self.ready = max(self.ready, answer.tokens)
        self.note_cached_tokens(answer)
        return None

    def note_cached_tokens(self, answer: Redeemed | Unusable | Pending) -> None:
        """Store the number of prompt tokens that the peer's caches had, if the answer says it."""
        if isinstance(answer, Redeemed) and answer.cached_tokens is not None:
            self.cached_tokens = answer.cached_tokens

    @property
    def peer(self) -> str:
        """Name of the peer."""
        return peer_name(self.engine_id, self.address, self.incarnation)

    def mismatch(self, peer: PeerInfo) -> str | None:
        """Return why the KV that this peer offered cannot be read; None if it can.

        Args:
            peer: description of the engine that answers at this address now, from the handshake.
        """
        if peer.facts.engine_id != self.engine_id:
            return f"engine {peer.facts.engine_id} answers at the address of {self.engine_id}"
        if peer.facts.incarnation != self.incarnation:
            return "the engine has been restarted since it granted the lease"
        granted = 0 if self.grant is None else len(self.grant.tables)
        groups = len(peer.ranks[0].geometry.groups)
        if granted != groups:
            return f"block tables for {granted} groups, the peer has {groups}"
        return None


def peer_name(engine_id: str, address: Address, incarnation: int | None) -> str:
    """Return the name of a peer: engine id and address, with the run of the engine if known."""
    host, port = address
    run = "" if incarnation is None else f"#{incarnation:x}"
    return f"{engine_id}@{host}:{port}{run}"


def layers_of(ranks: Iterable[RankGeometry], *, attend_to_all: bool) -> set[str]:
    """Return the identities of an engine's layers that attend to all tokens, or of all other layers."""
    return {
        layer.identity
        for rank in ranks
        for group in rank.groups
        for layer in group.layers
        if attends_to_all(group.kind) is attend_to_all
    }


def blocks_of(ranks: Iterable[RankGeometry]) -> list[tuple[int, set[str]]]:
    """Return (tokens per block, identities of the layers on all ranks) for each KV cache group of an engine.

    Groups of two engines must be matched by the layers that they share, not by their index. Engines may group
    the same layers differently: one may treat a sliding-window layer as full attention, for example.
    """
    found: list[tuple[int, set[str]]] = []
    for rank in ranks:
        for number, group in enumerate(rank.groups):
            if number == len(found):
                found.append((group.block_tokens, set()))
            found[number][1].update(layer.identity for layer in group.layers)
    return found


class PeerFeed:
    """Orders the parts of one load from a peer, one for each stretch of KV that the peer has computed."""

    origin = PEER

    def __init__(
        self,
        load: Load,
        pull: Pull,
        *,
        alignment_tokens: int,
        labels: Sequence[str],
        update: Callable[[Pull], Unusable | None],
        on_failed: Callable[[Pull, Report], None],
    ) -> None:
        """Create the feed of a load that begins now.

        Args:
            load: load to order.
            pull: state of the exchange with the peer. It has a grant.
            alignment_tokens: alignment of the positions at which two parts may meet (`common_alignment`).
            labels: label of each KV cache group of this engine.
            update: takes in the peer's last answer, and returns why its KV cannot be read any more.
            on_failed: called if the load has failed and its request waits for it.
        """
        self._load, self._pull, self._alignment_tokens, self._labels = load, pull, alignment_tokens, labels
        self._update, self._on_failed = update, on_failed
        self._done, self._parts, self._ready = load.span.begins, 0, 0
        self._dropped = False
        pull.loading = True

    def next_parts(self) -> Sequence[LoadPart]:
        load, pull = self._load, self._pull
        unusable = Unusable("no request waits for it any more") if self._dropped else self._update(pull)
        if unusable is not None:
            return [LoadPart(load.key, None, failure=unusable.reason)]
        news, self._ready = pull.ready > self._ready, pull.ready
        assert pull.grant is not None
        assert pull.incarnation is not None
        span = next_part(
            load.span,
            self._done,
            pull.ready,
            alignment_tokens=self._alignment_tokens,
            whole=pull.is_whole,
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
            src_tables=pull.grant.block_ids,
            dst_tables=load.tables,
            lease=pull.grant.word(pull.incarnation),
        )
        return [LoadPart(load.key, order, last=span.ends == load.span.ends)]

    def drop(self) -> None:
        # The workers cannot cancel reads in flight.
        self._dropped, self._pull.loading = True, False

    def moved(self, report: Report) -> tuple[GroupBytes, ...]:
        figures = report.figures
        each = zip(self._labels, figures.strategy_by_group, figures.bytes_by_group, strict=False)
        return tuple(GroupBytes(label, strategy, size) for label, strategy, size in each if size)

    def miss(self, report: Report) -> MissReason:
        return MissReason.DEADLINE if report.late else MissReason.FAILED

    def ended(self, report: Report, *, wanted: bool) -> None:
        self._pull.loading = False
        if wanted and report.failure is not None:
            self._on_failed(self._pull, report)
