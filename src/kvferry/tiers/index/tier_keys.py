"""The keys of the chunks that a tier has, and of those that left it recently."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.tiers.index.key_table import KeyTable, Tags, tag_of
from kvferry.tiers.index.recently_evicted import RecentlyEvicted
from kvferry.tiers.index.tag_rows import ALL_TIERS


class TierKeys:
    """A set of the keys of one tier's chunks, in a table that several tiers may share. Thread-safe.

    >>> from kvferry.tiers.index.key_table import tags_of
    >>> key = bytes(31) + b"a"
    >>> keys = TierKeys()
    >>> keys.add(key)
    >>> keys.contains(tags_of([key, bytes(32)])), keys.recently_evicted(key)
    (array([ True, False]), False)
    >>> keys.discard(key)
    >>> keys.contains(tags_of([key])), keys.recently_evicted(key)
    (array([False]), True)

    Args:
        table: key table to use; None for a new one.

    Attributes:
        bit: bit of the tier in the result of `KeyTable.tier_bits`.
    """

    def __init__(self, table: KeyTable | None = None) -> None:
        self.table = KeyTable() if table is None else table
        self.bit = self.table.add_tier()
        self._evicted = RecentlyEvicted()

    def __len__(self) -> int:
        """Return the number of keys. The time is proportional to the size of the table."""
        return self.table.count(self.bit)

    def contains(self, tags: Tags) -> npt.NDArray[np.bool_]:
        """Return a mask of the chunks that the tier has: bool of shape (len(tags),)."""
        found: npt.NDArray[np.bool_] = (self.table.tier_bits(tags) & self.bit) != 0
        return found

    def recently_evicted(self, key: bytes) -> bool:
        """Return whether a chunk that the tier does not have now left the tier recently.

        For a chunk that the tier has, the result may be True, because it left and came back.
        """
        return key in self._evicted

    def add(self, key: bytes) -> None:
        self.table.update(tag_of(key), add=self.bit)

    def discard(self, key: bytes) -> None:
        """Remove a key, and remember it as recently evicted. Do nothing if the tier does not have it."""
        if self.table.update(tag_of(key), keep=ALL_TIERS ^ self.bit) & self.bit:
            self._evicted.add(key)

    def clear(self) -> None:
        """Remove all keys, and forget evicted ones. The time is proportional to the size of the table."""
        self.table.clear(self.bit)
        self._evicted = RecentlyEvicted()
