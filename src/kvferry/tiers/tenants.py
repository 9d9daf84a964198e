"""The tenants of an engine by the operator's settings: what each may use of what all share.

What is full is divided by weight. A tenant's *level* is what it uses per weight. The tenant with the highest
level gives way, so no tenant below the mean level loses anything to another one, and what a tenant leaves
unused is used by the others (weighted max-min fairness).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.common.errors import ConfigError
from kvferry.common.units import format_bytes

# Levels are quotients: a tenant exactly at the mean must not seem to be above it.
ABOVE = 1 + 1e-9
"""Factor of the mean level above which a tenant gives way to others."""

OTHERS = "others"
"""Label of all tenants without a name."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant's weight, and the maximum part of a tier's capacity that it may use, above 0 and at most 1."""

    name: str = OTHERS
    weight: int = 1
    limit: float = 1.0


@dataclass(frozen=True, slots=True)
class Tenants:
    """The settings of all tenants, by digest, and those of each tenant that has none."""

    named: Mapping[bytes, Tenant]
    others: Tenant = field(default_factory=Tenant)

    def of(self, tenant: bytes) -> Tenant:
        return self.named.get(tenant, self.others)

    def check_limits(self, tier: str, capacity_bytes: int, chunk_bytes: int) -> None:
        """Raise ConfigError if a tenant may use too little of a tier to store even one chunk."""
        for tenant in (*self.named.values(), self.others):
            if (most := int(tenant.limit * capacity_bytes)) < chunk_bytes:
                raise ConfigError(
                    f"tenants: the limit of {tenant.name} is {tenant.limit:g} of the {tier} tier, "
                    f"{format_bytes(most)}, and a chunk has {format_bytes(chunk_bytes)}; raise the limit or "
                    "the tier's capacity"
                )

    def is_over_limit(self, tenant: bytes, used: int, capacity_bytes: int) -> bool:
        limit = self.of(tenant).limit
        return limit < 1 and used > limit * capacity_bytes

    def give_way(self, used: Mapping[bytes, int], storing: bytes | None, capacity_bytes: int) -> list[bytes]:
        """Return the tenants whose chunks may be evicted for a chunk of `storing`, the first one first.

        `used` are the bytes of each tenant, that chunk included. Without `storing`, all may be evicted.

        >>> tenants = Tenants({b"a": Tenant("a", 3), b"b": Tenant("b", 1)})
        >>> tenants.give_way({b"a": 50, b"b": 30, b"c": 20}, b"c", 100)
        [b'b', b'c']
        """
        levels = {tenant: size / self.of(tenant).weight for tenant, size in used.items()}
        if storing is None:
            return sorted(levels, key=lambda tenant: (-levels[tenant], tenant))
        if self.is_over_limit(storing, used[storing], capacity_bytes):
            return [storing]
        mean = sum(used.values()) / sum(self.of(tenant).weight for tenant in used) * ABOVE
        above = [tenant for tenant, level in levels.items() if level > mean and tenant != storing]
        if levels[storing] > mean:
            above.append(storing)
        # Of equal levels, the one that `FairEviction` takes first.
        above.sort(key=lambda tenant: (-levels[tenant], tenant))
        return above if storing in above else [*above, storing]

    def near_mean(self, used: Mapping[bytes, int]) -> set[bytes]:
        """Return the tenants that use at least half of their fair share."""
        half = sum(used.values()) / sum(self.of(tenant).weight for tenant in used) / 2 if used else 0
        return {tenant for tenant, size in used.items() if size >= half * self.of(tenant).weight}

    def usage(self, used: Mapping[bytes, int], evicted: Mapping[str, int]) -> dict[str, TenantUsage]:
        """Return the usage by label, of the bytes in use by tenant and the evicted chunks by label."""
        found = Counter[str]()
        for tenant, size in used.items():
            found[self.of(tenant).name] += size
        return {label: TenantUsage(found[label], evicted.get(label, 0)) for label in self.labels}

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the tenants in metrics, of bounded number."""
        return (*(tenant.name for tenant in self.named.values()), OTHERS)


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What a tenant, or all that have one label, use of a tier."""

    used_bytes: int = 0
    evicted: int = 0  # number of chunks since the start
