"""Settings of a worker's KV transfers."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.planning.strategy import LANE_BYTES, Costs, Strategy
from kvferry.transport.allowed_peers import ANY_PEER, AllowedPeers
from kvferry.transport.port_range import PortRange
from kvferry.transport.security import Keys, random_keys


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Settings of a worker's KV transfers, the same for all peers.

    Attributes:
        strategy: None to choose the cheapest for each read, by `costs`.
        timed_read_bytes: size of the READs by which the speed of a new peer is measured; 0 for no
            measurement.
        staging_bytes: size of each of the three staging areas; 0 for none. The worker reads into one, peers
            read from another, and peers of the same machine may map the third.
        host, advertise_host: the gather channel listens on `host`, and readers are sent `advertise_host`.
        keys, peers: of the gather channel.
        ports: ports that the gather channel and UCX may listen on; None for any.
        lane_bytes: approximate minimum number of bytes of a route that one lane reads.
    """

    strategy: Strategy | None = None
    costs: Costs = field(default_factory=Costs)
    timed_read_bytes: int = 2 << 20
    staging_bytes: int = 64 << 20
    host: str = "127.0.0.1"
    advertise_host: str = "127.0.0.1"
    keys: Keys = field(default_factory=random_keys)
    peers: AllowedPeers = ANY_PEER
    ports: PortRange | None = None
    lanes: int = 2
    lane_bytes: int = LANE_BYTES
