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
        address: address of the producer's control channel.
        engine_id: id of the producer.
        ticket: random id that claims the lease at the producer.
        tokens: number of offered tokens, from the start of the prompt.
        bidding: the request's excluded sources and remaining attempts.
        until: deadline for redeeming the ticket, monotonic seconds.
        claim: the request's share in the redemption of the ticket; None before the redemption has begun, and
            for a turn (a finished request's KV that the peer keeps).
        grant: the producer's block tables and lease word; None until they are known.
        incarnation: number of the producer's run that gave the grant; None until it is known.
        settled: True once the request no longer reads from this peer.
        bid: last bid made for the request; None if there was none.
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
        """Name of the peer. It contains the number of the peer's run (incarnation) once this is known."""
        host, port = self.address
        run = "" if self.incarnation is None else f"#{self.incarnation:x}"
        return f"{self.engine_id}@{host}:{port}{run}"

    def mismatch(self, peer: PeerInfo) -> str | None:
        """Return why `peer`, the engine at the address, cannot be read from; None if it can."""
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
    """Return (tokens per block, identities of the layers on all ranks) of each KV cache group.

    Layers identify a group, because another engine may keep a windowed layer as full attention.
    """
    found: list[tuple[int, set[str]]] = []
    for rank in ranks:
        for number, group in enumerate(rank.groups):
            if number == len(found):
                found.append((group.block_tokens, set()))
            found[number][1].update(layer.identity for layer in group.layers)
    return found
