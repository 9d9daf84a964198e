"""The keys of the chunks that a tier has, and of those that left it recently."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import numpy as np
import numpy.typing as npt

from kvferry.tiers.index.key_table import ALL_TIERS, KeyTable, Tags, tag_of

_SLOTS = 1 << 17

# A key's part is its first byte.
PARTS = 256
_ALL_PARTS = range(PARTS)


class RecentlyEvicted:
    """A set of at most 131072 recently evicted keys, in 1 MiB of memory. Thread-safe.

    >>> evicted = RecentlyEvicted()
    >>> evicted.add(bytes(range(32)))
    >>> bytes(range(32)) in evicted, bytes(32) in evicted
    (True, False)
    """

    def __init__(self, slots: int = _SLOTS) -> None:
        self._marks = memoryview(bytearray(8 * slots)).cast("Q")

    def __contains__(self, key: bytes) -> bool:
        slot, mark = self._slot_and_mark(key)
        return self._marks[slot] == mark

    def add(self, key: bytes) -> None:
        """Add the key of an evicted chunk, 12 bytes or more."""
        slot, mark = self._slot_and_mark(key)
        self._marks[slot] = mark

    def _slot_and_mark(self, key: bytes) -> tuple[int, int]:
        # The slot has 63 bits of the key. Two keys of one slot are confused with a probability of 2^-63.
        # The last byte is the index of the group. All groups of a chunk have the same bytes before it.
        slot = (int.from_bytes(key[:4], "big") + 0x9E37 * key[-1]) % len(self._marks)
        # Never 0, which means an empty slot.
        return slot, int.from_bytes(key[4:12], "big") | 1


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
        """Return the number of keys, in a time proportional to the size of the table."""
        return self.table.count(self.bit)

    def contains(self, tags: Tags) -> npt.NDArray[np.bool_]:
        """Return a mask of the chunks that the tier has: bool of shape (len(tags),)."""
        found: npt.NDArray[np.bool_] = (self.table.tier_bits(tags) & self.bit) != 0
        return found

    def recently_evicted(self, key: bytes) -> bool:
        """Return whether a chunk left the tier recently. It may have come back."""
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


class ListedKeys:
    """The keys of the chunks that a tier is known to have, kept up to date by listings.

    A listing takes time, so what this process adds or removes meanwhile takes precedence over it. Any thread
    may use the object, but two listings that run at the same time must not include the same part.

    Attributes:
        changes: number of keys that listings have added or removed.

    Args:
        keys: set of keys that gets every change, initially empty.
        max_keys: maximum number of known keys. Listings add no keys beyond it, but `add` ignores it.
    """

    def __init__(self, keys: TierKeys, max_keys: int = sys.maxsize) -> None:
        self.changes = 0
        self._tier = keys
        self._max_keys = max_keys
        self._lock = Lock()
        # For each part, the number of the listing that last showed each key. For a key that was added, the
        # number of the latest listing at that time.
        self._keys: list[dict[bytes, int]] = [{} for _ in _ALL_PARTS]
        self._listings = [0] * PARTS
        # For each part that is being listed, the keys discarded since then. The listing may still show them.
        self._discarded: dict[int, set[bytes]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys[key[0]]

    def add(self, key: bytes) -> None:
        with self._lock:
            self._keys[key[0]][key] = self._listings[key[0]]
            self._tier.add(key)

    def discard(self, key: bytes) -> None:
        """Remove the key of a chunk that was evicted, or that could not be fetched."""
        with self._lock:
            if key[0] in self._discarded:
                self._discarded[key[0]].add(key)
            if self._keys[key[0]].pop(key, None) is not None:
                self._tier.discard(key)

    @contextmanager
    def listing(self, parts: Sequence[int] = _ALL_PARTS) -> Iterator[None]:
        """List parts of the storage: call `add_page` with every page in the ``with`` statement.

        When it ends without an exception, known keys of these parts that were on no page are removed.
        """
        with self._lock:
            for part in parts:
                self._listings[part] += 1
                self._discarded[part] = set()
        try:
            yield
            for part in parts:
                # The lock is held for one part or page at a time, so that other threads do not wait long.
                self._remove_unlisted(part)
        finally:
            with self._lock:
                for part in parts:
                    self._discarded.pop(part, None)

    def add_page(self, page: Iterable[bytes]) -> None:
        """Add the keys of a page up to `max_keys`, except those discarded since the listing began."""
        with self._lock:
            room = self._max_keys - len(self)
            for key in page:
                known = self._keys[key[0]]
                if key in self._discarded.get(key[0], ()):
                    continue
                if key not in known:
                    if room <= 0:
                        continue
                    room -= 1
                    self.changes += 1
                    self._tier.add(key)
                known[key] = self._listings[key[0]]

    def _remove_unlisted(self, part: int) -> None:
        with self._lock:
            known, latest = self._keys[part], self._listings[part]
            missing = [key for key, listing in known.items() if listing < latest]
            self.changes += len(missing)
            for key in missing:
                del known[key]
                self._tier.discard(key)
