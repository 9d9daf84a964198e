"""The settings of the host tier."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from kvferry.errors import ConfigError
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.names import HOST
from kvferry.tiers.sizes import check_capacity


class HostSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Chunks in host memory, shared by the ranks of the engine. Every chunk passes through it.

    Attributes:
        capacity: bytes, or a text such as ``4GiB``; by default a tenth of the memory that is available.
        eviction_policy: name of the policy that chooses the chunk to evict (`tiers.eviction`).
        load_weight: weight of tokens from here, for source policy ``weight``.
    """

    kind: ClassVar[str] = HOST

    capacity: int | str | None = None
    eviction_policy: str = "lru"
    load_weight: float = 1.0

    def check(self, where: str) -> None:
        """Check values. Raises ConfigError if one is out of range; `where` names the object."""
        check_capacity(where, self.capacity)
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ConfigError(
                f"{where} ({HOST}): eviction_policy is {self.eviction_policy!r}; it must be one of "
                f"{', '.join(EVICTION_POLICIES)}"
            )
