"""The known chunks of a bucket, read from listings.

A listing of a million chunks takes a thousand requests. So a background thread lists rarely, and page by
page. It also writes the note of the namespace.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from threading import Lock

from kvferry.keys.namespace import Namespace
from kvferry.tiers.index import ListedKeys
from kvferry.tiers.objects.access import GuardedBucket
from kvferry.tiers.objects.client import BucketClient, ListedObject
from kvferry.tiers.objects.faults import Fault, Unavailable
from kvferry.tiers.paths import chunk_name, key_of, note_name

_log = logging.getLogger(__name__)

# Time limit of a listing. If it takes longer, the keys listed so far are added, and no key is removed.
MAX_LISTING_SECONDS = 300.0
# Pause after every page, in which other threads run. An engine's step must not wait for a listing.
_PAUSE_SECONDS = 0.001


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


class BucketIndex:
    """Keeps the known keys of one namespace up to date, without `distrusted` ones. Thread-safe.

    `valid_seconds` is the time from a complete listing until the next one is due.
    """

    def __init__(
        self,
        bucket: GuardedBucket,
        *,
        namespace: Namespace,
        listed: ListedKeys,
        distrusted: DistrustedObjects,
        valid_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._bucket = bucket
        self._namespace = namespace
        self._listed = listed
        self._distrusted = distrusted
        self._valid_seconds = valid_seconds
        self._clock = clock
        self._due_at = clock()
        self._listing = Lock()
        self._note_written = self._warned = False

    @property
    def due(self) -> bool:
        """Whether the last listing is too old or incomplete."""
        return self._clock() >= self._due_at

    def list(self, seconds: float = MAX_LISTING_SECONDS) -> int:
        """List for about `seconds`, unless another thread does. Return 1 if known keys changed, else 0."""
        if not self._listing.acquire(blocking=False):
            return 0
        try:
            before = self._listed.changes
            with suppress(Unavailable, FileNotFoundError):
                self._list(seconds)
            return int(self._listed.changes != before)
        finally:
            self._listing.release()

    def _list(self, seconds: float) -> None:
        """List the chunks. If that is complete and there is no note, write it."""
        noted = False
        until = self._clock() + seconds
        digest = self._namespace.digest
        try:
            with self._bucket.reading() as bucket, self._listed.listing():
                for page in self._pages(bucket):
                    self._listed.add_page(self._distrusted.trusted(self._keys(page)))
                    noted = noted or any(one.path == note_name(digest) for one in page)
                    time.sleep(_PAUSE_SECONDS)
                    if self._clock() >= until:
                        raise _OutOfTime
        except _OutOfTime:
            level = logging.WARNING if seconds >= MAX_LISTING_SECONDS else logging.INFO
            _log.log(
                level,
                "object tier: in %g s, %d chunks were listed; there are more",
                seconds,
                len(self._listed),
            )
            return
        self._due_at = self._clock() + self._valid_seconds
        if not (noted or self._note_written):
            # Try only once, because an engine without permission to write would fail every time.
            self._note_written = True
            with self._bucket.writing() as bucket:
                bucket.put(note_name(digest), [self._namespace.note.encode("ascii")])

    def _pages(self, bucket: BucketClient) -> Iterator[Sequence[ListedObject]]:
        """Yield the pages of a listing. Some objects may be yielded twice."""
        folder = self._namespace.digest.hex()
        try:
            yield from bucket.list(folder)
        except Unavailable as error:
            if error.fault is not Fault.ODD_NAME:
                raise
            if not self._warned:
                self._warned = True
                _log.warning(
                    "object tier: %s (%s); %s; until then every folder is listed by itself",
                    *(folder, error, error.fault.advice),
                )
            # obstore ends a listing at a name that it cannot read. So list the chunk folders one by one, and
            # skip the rest of a folder with such a name.
            for number in range(256):
                try:
                    yield from bucket.list(f"{folder}/{number:02x}")
                except Unavailable as error:
                    if error.fault is not Fault.ODD_NAME:
                        raise

    def _keys(self, page: Sequence[ListedObject]) -> Iterator[tuple[bytes, str]]:
        for one in page:
            key = key_of(one.path.rpartition("/")[2])
            if key is not None and one.path == chunk_name(self._namespace.digest, key):
                yield key, one.etag


class _OutOfTime(Exception):
    """Raised to end a listing whose time limit is reached."""
