"""Which chunks are in object storage, as far as this process knows.

That is learnt from listings, which take a while: what was stored or lost meanwhile is newer than what a
listing shows, and wins. An engine's thread asks while another goes through a listing: keys are kept in parts,
so that no step, such as the growth of one, takes long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock

from kvferry.tiers.index.key_table import TierKeys
from kvferry.tiers.index.recently_evicted import RecentlyEvicted

MOST = 1 << 22
"""Keys of a namespace, at most: a listing without end takes no more memory than that."""
_PARTS = 256


class Known:
    """Keys of one namespace. Any thread may use it; one at a time goes through a listing.

    A key is *distrusted* when its object turned out bad: it is not known until that object has changed.

    Attributes:
        changes: grows with every key that a listing adds or lacks.
        gone: keys that were known lately.

    Args:
        tags: empty; kept up to date.
    """

    def __init__(self, tags: TierKeys) -> None:
        self.changes, self.gone = 0, RecentlyEvicted()
        self._lock = Lock()
        self._listings = 0
        # By the first byte; with the number of the last listing that had it, or during or after which it was
        # stored.
        self._keys: list[dict[bytes, int]] = [{} for _ in range(_PARTS)]
        self._tags = tags
        # Discarded during this listing, which may have seen them before.
        self._gone: set[bytes] = set()
        self._bad: dict[bytes, str] = {}

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys[key[0]]

    def add(self, key: bytes) -> None:
        """A chunk was stored."""
        with self._lock:
            self._bad.pop(key, None)
            self._keys[key[0]][key] = self._listings
            self._tags.add(key)

    def discard(self, key: bytes) -> None:
        """A chunk is not there."""
        with self._lock:
            self._gone.add(key)
            if self._keys[key[0]].pop(key, None) is not None:
                self._lost(key)

    def is_bad(self, key: bytes) -> bool:
        """Whether a chunk is distrusted."""
        return key in self._bad

    def distrust(self, key: bytes, tag: str) -> None:
        """A chunk is bad, as long as its object has this tag."""
        self.discard(key)
        with self._lock:
            self._bad[key] = tag

    @contextmanager
    def listing(self) -> Iterator[None]:
        """Go through a listing by `show`. What it did not have is forgotten, if it comes to its end."""
        with self._lock:
            self._listings += 1
            self._gone.clear()
        yield
        for part in self._keys:
            with self._lock:
                lacking = [key for key, listing in part.items() if listing < self._listings]
                self.changes += len(lacking)
                for key in lacking:
                    del part[key]
                    self._lost(key)

    def show(self, page: Iterable[tuple[bytes, str]]) -> None:
        """Take in a page of a listing, as far as there is room: keys, and the tags of their objects."""
        with self._lock:
            room = MOST - len(self)
            for key, tag in page:
                if self._bad.get(key, tag) != tag:
                    del self._bad[key]
                if key not in self._gone and key not in self._bad:
                    part = self._keys[key[0]]
                    if key not in part:
                        if room <= 0:
                            continue
                        room -= 1
                        self.changes += 1
                        self._tags.add(key)
                    part[key] = self._listings

    def _lost(self, key: bytes) -> None:
        self.gone.add(key)
        self._tags.discard(key)
