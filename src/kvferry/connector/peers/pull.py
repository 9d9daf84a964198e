"""The state of a request that may read KV from a peer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.connector.bids import Bid, Bidding
from kvferry.connector.peers.claims import Claim
from kvferry.geometry import RankGeometry
from kvferry.transport.handshake import Address, PeerInfo
from kvferry.transport.redeem import Grant


@dataclass(slots=True)
class Pull:
    """The KV at one peer that one request may read, and the state of the exchange with this peer.

    Attributes:
        address: address (host, port) of the peer's control channel.
        engine_id: id of the peer's engine.
        ticket: random id that claims a lease on the KV blocks at the peer.
        tokens: number of offered tokens, from the start of the prompt.
        bidding: the request's excluded sources and remaining attempts.
        until: deadline for sending the ticket to the peer, monotonic seconds.
        claim: the request's claim on the lease; None before the ticket has been sent, and if the peer offered
            the KV of an earlier turn of the conversation, which needs no claim.
        grant: the peer's block tables and lease word (integer in registered memory that shows whether the
            lease is valid); None until they are known.
        incarnation: random number that identifies the run of the peer's engine that granted the lease; None
            until it is known.
        settled: True once the request no longer reads from this peer.
        bid: last offer of the peer source to load KV for the request; None if there was no offer.
    """

    address: Address
    engine_id: str
    ticket: bytes
    tokens: int
    bidding: Bidding
    until: float
    claim: Claim | None = None
    grant: Grant | None = None
    incarnation: int | None = None
    settled: bool = False
    bid: Bid | None = None

    @property
    def peer(self) -> str:
        """Name of the peer: engine id and address, with the random number of the peer's run once known."""
        host, port = self.address
        run = "" if self.incarnation is None else f"#{self.incarnation:x}"
        return f"{self.engine_id}@{host}:{port}{run}"

    def mismatch(self, peer: PeerInfo) -> str | None:
        """Return the reason why this KV cannot be read from the engine that now has the peer's address.

        Return None if the KV can be read: that engine is still the run that granted the lease, and block
        tables for all of its KV cache groups are known.

        Args:
            peer: description of the engine, from the handshake with it.
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


def blocks_of(ranks: Iterable[RankGeometry]) -> list[tuple[int, set[str]]]:
    """Return (tokens per block, identities of the layers on all ranks) for each KV cache group of an engine.

    With the layer identities, groups of two engines can be matched by the layers that they share. Group
    numbers do not match, because engines may group layers differently: one may keep a layer with a window as
    full attention.

    Args:
        ranks: geometry of all ranks of the engine.
    """
    found: list[tuple[int, set[str]]] = []
    for rank in ranks:
        for number, group in enumerate(rank.groups):
            if number == len(found):
                found.append((group.block_tokens, set()))
            found[number][1].update(layer.identity for layer in group.layers)
    return found
