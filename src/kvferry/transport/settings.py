"""How a worker moves bytes: decided by its operator, the same for all peers."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.planning.strategy import LANE_BYTES, Costs, Strategy
from kvferry.transport.allowed_peers import ANY_PEER, AllowedPeers
from kvferry.transport.security import Keys, random_keys


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """See the module.

    Attributes:
        strategy: pinned; None to choose the cheapest.
        costs: of this machine.
        staging_bytes: room for images, in each direction; 0 to move without.
        host: address that the gather channel listens on.
        advertise_host: address that readers are told.
        keys: CURVE keys of the gather channel; by default such as no other engine has.
        peers: who may ask to gather.
        lanes: threads that read, at least 1.
        lane_bytes: a route of fewer is not shared out among lanes.
    """

    strategy: Strategy | None = None
    costs: Costs = field(default_factory=Costs)
    staging_bytes: int = 64 << 20
    host: str = "127.0.0.1"
    advertise_host: str = "127.0.0.1"
    keys: Keys = field(default_factory=random_keys)
    peers: AllowedPeers = ANY_PEER
    lanes: int = 2
    lane_bytes: int = LANE_BYTES
