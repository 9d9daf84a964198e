"""The keys of a tier that learns its content from listings.

Other processes store and evict chunks in the same directory or bucket, and only a listing shows that. A
listing takes time. So what this process adds or removes meanwhile takes precedence over it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

from kvferry.tiers.index.tier_keys import TierKeys

PARTS = 256
_ALL_PARTS = range(PARTS)


class ListedKeys:
    """The keys of the chunks that a tier is known to have, kept up to date by listings.

    The first byte of a key is the number of its *part* (one of 256). Every change is also made in `keys`. Any
    thread may use the object, but two listings that run at the same time must not include the same part.

    Attributes:
        changes: number of keys that listings have added or removed.

    Args:
        keys: set of keys in which the engine looks up the chunks of the tier, initially empty.
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
        """List the storage: call `add_page` with every page in the ``with`` statement.

        When it ends without an exception, known keys that were on no page are removed.

        Args:
            parts: first bytes of the keys that the listing covers. Keys with other first bytes do not change.
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
