"""A record of objects that failed a check. Listings may contain them, but nobody should fetch them again."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock


class DistrustedObjects:
    """The chunks whose stored objects failed a check, with the ETag of the object. Thread-safe.

    >>> distrusted = DistrustedObjects()
    >>> distrusted.add(b"a", "1")
    >>> distrusted.trusted([(b"a", "1"), (b"b", "1")]), distrusted.trusted([(b"a", "2")])
    ([b'b'], [b'a'])
    """

    def __init__(self) -> None:
        self._etags: dict[bytes, str] = {}
        self._lock = Lock()

    def __contains__(self, key: bytes) -> bool:
        return key in self._etags

    def add(self, key: bytes, etag: str) -> None:
        """Distrust a key as long as its object has this ETag; empty if the store has none."""
        with self._lock:
            self._etags[key] = etag

    def discard(self, key: bytes) -> None:
        """Trust a key again, because a good object was stored under it."""
        with self._lock:
            self._etags.pop(key, None)

    def trusted(self, page: Iterable[tuple[bytes, str]]) -> list[bytes]:
        """Return the trusted keys on a page of keys and ETags."""
        keys = []
        with self._lock:
            for key, etag in page:
                # Another ETag means other content.
                if self._etags.get(key, etag) != etag:
                    del self._etags[key]
                if key not in self._etags:
                    keys.append(key)
        return keys
