"""A record of objects that failed a check. Listings may contain them, but no one should fetch them again."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock


class DistrustedObjects:
    """A record of the chunks whose stored objects failed a check, by chunk key, with the object's ETag.

    A key is trusted again when its object has another ETag (content tag), because a new ETag means new
    content. Any thread may use the record.

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
        """Distrust a chunk key as long as its object has this ETag (content tag).

        The ETag is empty if the store has none.
        """
        with self._lock:
            self._etags[key] = etag

    def discard(self, key: bytes) -> None:
        """Trust a chunk key again, because a good object was stored under the key."""
        with self._lock:
            self._etags.pop(key, None)

    def trusted(self, page: Iterable[tuple[bytes, str]]) -> list[bytes]:
        """Return those keys on a page of a listing that are trusted.

        If the ETag of a key has changed, trust the key again.

        Args:
            page: chunk key and ETag (content tag) of each listed object.
        """
        keys = []
        with self._lock:
            for key, etag in page:
                if self._etags.get(key, etag) != etag:
                    del self._etags[key]
                if key not in self._etags:
                    keys.append(key)
        return keys
