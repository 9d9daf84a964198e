"""The state of a request that may read KV from a peer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.connector.bids import Bid, Bidding
from kvferry.connector.engine import Request
from kvferry.connector.peers.claims import Claim
from kvferry.geometry import RankGeometry
from kvferry.planning.select import attends_to_all
from kvferry.transport.handshake import Address, PeerInfo, Pending, Unusable
from kvferry.transport.redeem import Grant, Redeemed


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
