"""The order in which the threads of a tier work for tenants: start-time fair queueing.

Pawan Goyal, Harrick M. Vin, Haichen Cheng, "Start-time Fair Queueing: A Scheduling Algorithm for Integrated
Services Packet Switching Networks", SIGCOMM 1996. Each operation gets a *rank*, the virtual time of its
start, and that with the lowest rank is next. The operations of one tenant follow each other at distances of
their bytes per weight. So a tenant with thousands of them delays another tenant's first one by about one
operation.
"""

from __future__ import annotations

from kvferry.tiers.tenants import Tenants

# Tenants that are remembered although all their operations may have ended.
_MOST_REMEMBERED = 1024


class FairOrder:
    """Ranks the operations of a tier. The engine's thread calls `rank`, other threads `begin`.

    >>> order = FairOrder(Tenants({}))
    >>> [order.rank(tenant, 10) for tenant in (b"a", b"a", b"a", b"b")]
    [0.0, 10.0, 20.0, 0.0]
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._now = 0.0  # rank of the operation that began last
        self._ends: dict[bytes, float] = {}  # virtual time at which each tenant's operations end

    def rank(self, tenant: bytes, size: int) -> float:
        """Return the rank of a tenant's next operation, of `size` bytes."""
        if len(self._ends) > _MOST_REMEMBERED:
            self._ends = {one: end for one, end in self._ends.items() if end > self._now}
        start = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + size / self._tenants.of(tenant).weight
        return start

    def begin(self, rank: float) -> None:
        """Tell that the operation of this rank begins."""
        self._now = max(self._now, rank)
