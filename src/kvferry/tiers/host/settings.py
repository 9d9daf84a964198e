"""The settings of the host tier."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from kvferry.errors import ConfigError
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.names import HOST
from kvferry.tiers.sizes import check_capacity


class HostSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the host tier, which keeps chunks in memory that the ranks of the engine share.

    Every chunk passes through this tier on its way to or from the other tiers.

    Attributes:
        capacity: size of the shared memory: a number of bytes, or a text such as ``4GiB``; None for a tenth
            of the available memory.
        eviction_policy: name of the policy that chooses the chunk to evict: ``lru``, ``arc`` or ``s3fifo``.
        load_weight: factor by which the source policy ``weight`` multiplies the number of tokens that this
            tier offers, to compare the sources of KV. Other source policies ignore it.
    """

    kind: ClassVar[str] = HOST

    capacity: int | str | None = None
    eviction_policy: str = "lru"
    load_weight: float = 1.0

    def check(self, where: str) -> None:
        """Check the values. `where` is the name of these settings in the configuration, for messages.

        Raises:
            ConfigError: a value is out of range.
        """
        check_capacity(where, self.capacity)
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ConfigError(
                f"{where} ({HOST}): eviction_policy is {self.eviction_policy!r}; it must be one of "
                f"{', '.join(EVICTION_POLICIES)}"
            )
