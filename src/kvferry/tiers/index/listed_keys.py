"""The keys of a tier whose content is known from listings.

Other processes store and evict in the same directory or bucket, and only a listing shows that. A listing
takes time, so keys that this process adds or removes meanwhile are newer than the listing and take
precedence.
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
    """The complete keys of a tier, in 256 parts by their first byte. Keeps a `TierKeys` up to date.

    Any thread may use it. Each part is in one listing at a time. A call works on one part, or one page of a
    listing, so no step takes long enough to delay an engine's thread.

    Attributes:
        changes: number of keys that listings have added or removed.

    Args:
        keys: the tier's keys, initially empty; gets every change.
        max_keys: maximum number of keys that listings add.
    """

    def __init__(self, keys: TierKeys, max_keys: int = sys.maxsize) -> None:
        self.changes = 0
        self._tier = keys
        self._max_keys = max_keys
        self._lock = Lock()
        # For each key the number of its part's listing that showed it last, or that was the latest when the
        # key was added.
        self._keys: list[dict[bytes, int]] = [{} for _ in _ALL_PARTS]
        self._listings = [0] * PARTS
        # By part that is being listed: keys discarded since the listing began, which may show them.
        self._discarded: dict[int, set[bytes]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys[key[0]]

    def add(self, key: bytes) -> None:
        """Add a key that was stored or found."""
        with self._lock:
            self._keys[key[0]][key] = self._listings[key[0]]
            self._tier.add(key)

    def discard(self, key: bytes) -> None:
        """Remove a key that was evicted or found missing."""
        with self._lock:
            if key[0] in self._discarded:
                self._discarded[key[0]].add(key)
            if self._keys[key[0]].pop(key, None) is not None:
                self._tier.discard(key)

    @contextmanager
    def listing(self, parts: Sequence[int] = _ALL_PARTS) -> Iterator[None]:
        """List some parts: call `show` with every page. At the end, remove the keys that no page showed.

        A listing that ends with an exception removes nothing.
        """
        with self._lock:
            for part in parts:
                self._listings[part] += 1
                self._discarded[part] = set()
        try:
            yield
            for part in parts:
                self._remove_unlisted(part)
        finally:
            with self._lock:
                for part in parts:
                    self._discarded.pop(part, None)

    def show(self, page: Iterable[bytes]) -> None:
        """Add the keys of a page of a listing, as far as `max_keys` allows."""
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
