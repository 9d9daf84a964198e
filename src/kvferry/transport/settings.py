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

    Over the gather channel, readers ask this worker to pack cells (parts of blocks) into staging memory.

    Attributes:
        strategy: transfer strategy to use for all reads; None to choose the cheapest for each read.
        costs: measured transfer costs of this machine, by which the cheapest strategy is chosen.
        timed_read_bytes: size in bytes of the READs by which the speed of a new peer is measured; 0 to
            measure nothing.
        staging_bytes: size in bytes of each of the three staging areas; 0 for no staging areas. The worker
            reads into one area, peers read from another, and peers of the same machine may map the third.
        host: address that the gather channel listens on.
        advertise_host: address of this worker's gather channel, as sent to readers.
        keys: CURVE keys of the gather channel; random by default.
        peers: machines that may connect to the gather channel.
        ports: TCP ports that the gather channel and UCX (NIXL's transport) may listen on; None for any.
        lanes: number of lanes (reading threads), at least 1.
        lane_bytes: approximate minimum number of bytes of a route (set of layers that are read together) that
            one lane reads. A small route is split among fewer lanes, or not at all.
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
