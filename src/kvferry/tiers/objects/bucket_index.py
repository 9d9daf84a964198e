"""Learning from listings what is there, and leaving the note of a namespace.

A listing of a million chunks is a thousand requests: it is made seldom, by a thread that may wait, page by
page.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock

from kvferry.keys.namespace import Namespace
from kvferry.tiers.objects.access import GuardedBucket
from kvferry.tiers.objects.client import BucketClient, ListedObject
from kvferry.tiers.objects.faults import Fault, Unavailable
from kvferry.tiers.objects.known import Known
from kvferry.tiers.paths import chunk_name, key_of, note_name

_log = logging.getLogger(__name__)

# What a listing that takes longer has shown by then is known, and nothing is forgotten.
MAX_LISTING_SECONDS = 300.0
# After every page other threads get to run: an engine's step must not wait for a listing.
_REST_SECONDS = 0.001


class BucketIndex:
    """Keeps what is known of a namespace up to date. Any thread may use it; one at a time has an effect.

    Args:
        access: the way to the bucket.
        namespace: whose chunks are looked for.
        known: what is learnt.
        good_seconds: how long a listing is thought to be good.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        access: GuardedBucket,
        namespace: Namespace,
        known: Known,
        good_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._access = access
        self._namespace = namespace
        self._known = known
        self._good_seconds = good_seconds
        self._clock = clock
        self._due_at = clock()
        self._one = Lock()
        self._noted = self._told = False

    @property
    def due(self) -> bool:
        """Whether the last listing is too old to be relied on, or did not come to its end."""
        return self._clock() >= self._due_at

    def list(self, seconds: float = MAX_LISTING_SECONDS) -> int:
        """Go through what is there, for at most so long.

        Returns:
            1 if more or less is known than before, else 0.
        """
        if not self._one.acquire(blocking=False):
            return 0
        try:
            before = self._known.changes
            with suppress(Unavailable, FileNotFoundError):
                self._list(seconds)
            return int(self._known.changes != before)
        finally:
            self._one.release()

    def _list(self, seconds: float) -> None:
        noted = False
        until = self._clock() + seconds
        digest = self._namespace.digest
        try:
            with self._access.reading() as bucket, self._known.listing():
                for page in self._pages(bucket):
                    self._known.show(self._keys(page))
                    noted = noted or any(one.path == note_name(digest) for one in page)
                    time.sleep(_REST_SECONDS)
                    if self._clock() >= until:
                        raise _OutOfTime
        except _OutOfTime:
            level = logging.WARNING if seconds >= MAX_LISTING_SECONDS else logging.INFO
            _log.log(
                level,
                "object tier: in %g s, %d chunks were listed; there are more",
                seconds,
                len(self._known),
            )
            return
        self._due_at = self._clock() + self._good_seconds
        if not (noted or self._noted):
            # Once: who may not write need not be told every time.
            self._noted = True
            with self._access.writing() as bucket:
                bucket.put(note_name(digest), [self._namespace.note.encode("ascii")])

    def _pages(self, bucket: BucketClient) -> Iterator[Sequence[ListedObject]]:
        """What lies in the namespace; where a name spoils the listing, what lies in folders without one."""
        folder = self._namespace.digest.hex()
        try:
            yield from bucket.list(folder)
        except Unavailable as error:
            if error.fault is not Fault.ODD_NAME:
                raise
            if not self._told:
                self._told = True
                _log.warning(
                    "object tier: %s (%s); %s; until then every folder is listed by itself",
                    *(folder, error, error.fault.advice),
                )
            for number in range(256):
                with _but_odd_names():
                    yield from bucket.list(f"{folder}/{number:02x}")

    def _keys(self, page: Sequence[ListedObject]) -> Iterator[tuple[bytes, str]]:
        for one in page:
            key = key_of(one.path.rpartition("/")[2])
            if key is not None and one.path == chunk_name(self._namespace.digest, key):
                yield key, one.tag


@contextmanager
def _but_odd_names() -> Iterator[None]:
    """Go on where a name cannot be read."""
    try:
        yield
    except Unavailable as error:
        if error.fault is not Fault.ODD_NAME:
            raise


class _OutOfTime(Exception):
    """A listing has taken its time."""
