"""The object tier: chunks in a bucket that engines on many machines share.

A chunk is one object, with the same bytes as a chunk file of the file tier. It appears completely or not at
all, and a hit counts only after its checksums match. Two processes may store a chunk at the same time: a
chunk has only one encoding, or if it is encrypted, either encoding is valid. If a network, a store or another
process fails, calls return an outcome and raise no exception. Every request has a deadline. After three
consecutive failures, requests pause for a while.

The tier has no capacity, and does not record when chunks are used. The bucket's own lifecycle rules, or
`kvferry cache gc`, remove old objects by their time of storing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvferry.common.errors import ChunkError, ConfigError, OtherKey
from kvferry.keys.namespace import Namespace
from kvferry.tiers.files.chunk_file import whole_pages
from kvferry.tiers.format.chunk import TAG_BYTES, Buffer, Chunk, ChunkGroup
from kvferry.tiers.format.decode import (
    ChunkHeader,
    check_body,
    check_size,
    is_expected,
    make_header,
    read_header,
)
from kvferry.tiers.format.encryption import EncryptionKeys
from kvferry.tiers.index import KeyTable, ListedKeys, TierKeys
from kvferry.tiers.names import GetOutcome, OutcomeCounter, PutOutcome, TierStats
from kvferry.tiers.objects.access import GuardedBucket
from kvferry.tiers.objects.bucket_index import BucketIndex, DistrustedObjects
from kvferry.tiers.objects.client import BucketClient, OpenObject
from kvferry.tiers.objects.faults import Fault, Unavailable
from kvferry.tiers.objects.marker import find_conflict, write_marker
from kvferry.tiers.paths import chunk_name, quarantine_name
from kvferry.tiers.storage_tier import StorageTier

if TYPE_CHECKING:
    from kvferry.tiers.format.cipher import SegmentCipher

_log = logging.getLogger(__name__)

# Listings add no more known keys than this, to limit the memory that they take.
MAX_KEYS = 1 << 22

_ADVICE = {
    GetOutcome.CORRUPT: "see who else writes there; it is computed anew",
    GetOutcome.OTHER_SHAPE: "the namespace is the same, the groups are not: tell kvferry's authors",
    GetOutcome.OTHER_KEY: "give all engines that use the URL the same keys; the chunk is computed again",
}


class ObjectTier(StorageTier):
    """A storage tier with the chunks of one namespace under a URL, which others may use too.

    A forked process must not use the tier. The constructor lists the chunks for at most about
    `timeout_seconds`. If the store does not answer, `refresh` lists them. ConfigError is raised as by
    `BucketClient`, and if the chunks under the URL are encrypted and `encryption` is None, or vice versa. If
    the store does not answer, the first `put` finds that out, and nothing is stored.

    Args:
        url, options, timeout_seconds: as in `ObjectSettings`. Each attempt of a request must be complete
            within half of the limit.
        encryption: keys of an encrypted URL; None for one that is not encrypted.
        namespace: namespace of the chunks. If a complete listing finds no note of it, the tier tries once to
            write one.
        pause_seconds: time for which fetches and listings are refused after three of them in a row have
            failed. Writes to the store are refused in the same way.
        listing_seconds: time from one listing to the next. Listing many chunks takes many requests.
        max_keys: maximum number of keys that a listing adds.
    """

    def __init__(
        self,
        url: str,
        namespace: Namespace,
        options: Mapping[str, str] = MappingProxyType({}),
        *,
        timeout_seconds: float = 20.0,
        encryption: EncryptionKeys | None = None,
        pause_seconds: float = 30.0,
        listing_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        table: KeyTable | None = None,
        max_keys: int = MAX_KEYS,
    ) -> None:
        bucket = BucketClient(url, options, timeout_seconds)
        self._url = bucket.url
        self._encryption = encryption
        # What passes an encrypted tier's network is encrypted, and what others plant fails its tags.
        plain = encryption is None
        if plain and bucket.endpoint and not (bucket.endpoint.encrypted or bucket.endpoint.is_here):
            _log.warning(
                "object tier %s: %s is spoken to without encryption: who listens on the way reads chunks, "
                "who can change what passes plants some; use https, or see that only engines are on that "
                "network",
                *(self._url, bucket.endpoint.shown),
            )
        self._namespace = namespace.digest
        self._bucket = GuardedBucket(bucket, pause_seconds, clock)
        self.keys = TierKeys(table)
        self._listed = ListedKeys(self.keys, max_keys)
        self._distrusted = DistrustedObjects()
        self._index = BucketIndex(
            self._bucket,
            namespace=namespace,
            listed=self._listed,
            distrusted=self._distrusted,
            valid_seconds=listing_seconds,
            clock=clock,
        )
        self._counter = OutcomeCounter()
        self._is_checked = False
        with suppress(Unavailable):
            if conflict := self._find_conflict():
                raise ConfigError(f"object tier: {self._url}: {conflict}; {conflict.advice}")
            self._index.list(timeout_seconds)

    @property
    def stats(self) -> TierStats:
        return self._counter.stats()

    @property
    def faults(self) -> dict[Fault, int]:
        return self._bucket.faults

    def __len__(self) -> int:
        return len(self._listed)

    @property
    def paused(self) -> bool:
        return self._bucket.reads_paused

    def put(self, key: bytes, group: ChunkGroup, body: memoryview, cold: bool = False) -> PutOutcome:
        del cold
        chunk = self._chunk(key, group)
        check_size(chunk, body)
        try:
            done = PutOutcome.PRESENT if key in self._listed else self._put(chunk, body)
        except Unavailable:
            done = PutOutcome.IO_ERROR
        self._counter.count_put(done, chunk.file_bytes)
        return done

    def get(self, key: bytes, group: ChunkGroup, into: memoryview) -> GetOutcome:
        chunk = self._chunk(key, group)
        check_size(chunk, into)
        why = ""
        try:
            done, why = self._get(chunk, into)
        except FileNotFoundError:
            done = GetOutcome.ABSENT
            self._listed.discard(key)
        except Unavailable as error:
            done = GetOutcome.IO_ERROR
            # A refused request says nothing of the object.
            if error.fault is not Fault.PAUSED:
                self._listed.discard(key)
        if self._counter.count_get(done) and why:
            _log.warning(
                "object tier %s: chunk %s is not used: %s (%s); %s",
                self._url,
                key.hex(),
                done,
                why,
                _ADVICE[done],
            )
        return done

    def refresh(self) -> int:
        return self._index.list() if self._index.due else 0

    def close(self) -> None:
        """Do nothing. Only connections stay open between calls, and they close when the client is deleted."""

    def _chunk(self, key: bytes, group: ChunkGroup) -> Chunk:
        return Chunk(self._namespace, key, (group,), self._encryption is not None)

    def _find_conflict(self) -> Fault | None:
        """Return why the URL must not be used. If it is encrypted and new, mark it."""
        encrypted = self._encryption is not None
        with self._bucket.reading() as bucket:
            conflict = find_conflict(bucket, encrypted=encrypted)
        if conflict is None:
            if encrypted:
                with self._bucket.writing() as bucket:
                    write_marker(bucket)
            self._is_checked = True
        return conflict

    def _put(self, chunk: Chunk, body: memoryview) -> PutOutcome:
        """Store a chunk, unless the store has an object of its name and length that has failed no check."""
        path = chunk_name(self._namespace, chunk.key)
        conflict = None if self._is_checked else self._find_conflict()
        with self._bucket.writing() as bucket:
            if conflict is not None:
                raise Unavailable(conflict)
            # Looking the object up is cheaper than sending a chunk that another engine stored. It also avoids
            # replacing an object that others are reading, which some stores do not isolate.
            there = chunk.key not in self._distrusted and bucket.head(path)[0] == chunk.file_bytes
            if not there:
                bucket.put(path, self._encode(chunk, body))
        self._distrusted.discard(chunk.key)
        self._listed.add(chunk.key)
        return PutOutcome.PRESENT if there else PutOutcome.STORED

    def _encode(self, chunk: Chunk, body: memoryview) -> list[Buffer]:
        if self._encryption is None:
            return [make_header(chunk, body), body]
        from kvferry.tiers.format.cipher import encrypt_chunk, encrypted_room  # noqa: PLC0415

        room = whole_pages(encrypted_room(chunk))
        return [encrypt_chunk(chunk, body, self._encryption.newest, room)]

    def _get(self, chunk: Chunk, into: memoryview) -> tuple[GetOutcome, str]:
        """Fetch a chunk and check it. Return the outcome, and what is wrong with the object."""
        with self._bucket.reading() as bucket:
            found = bucket.get(chunk_name(self._namespace, chunk.key))
            try:
                why = _read(chunk, found, into, self._encryption)
            except OtherKey as error:
                done, why = GetOutcome.OTHER_KEY, str(error)
            except ChunkError as error:
                done, why = GetOutcome.CORRUPT, str(error)
            else:
                done = GetOutcome.OTHER_SHAPE if why else GetOutcome.HIT
        if done is not GetOutcome.HIT:
            # In this order, so that a listing in progress cannot add the key in between.
            self._distrusted.add(chunk.key, found.etag)
            self._listed.discard(chunk.key)
        if done is GetOutcome.CORRUPT:
            self._quarantine(chunk.key, found)
        return done, why

    def _quarantine(self, key: bytes, found: OpenObject) -> None:
        """Move a bad object to quarantine. If that fails, the next `put` of the chunk replaces it."""
        name = chunk_name(self._namespace, key)
        with suppress(FileNotFoundError, Unavailable), self._bucket.writing() as bucket:
            # Otherwise a proxy returned the bad content, or another engine has replaced the object.
            if bucket.head(name) == (found.size, found.etag):
                bucket.move(name, quarantine_name(self._namespace, key))
                self._counter.add(quarantined=1)


def _read(chunk: Chunk, found: OpenObject, into: memoryview, encryption: EncryptionKeys | None) -> str:
    """Read an object into memory, check and decrypt it. Return what differs if it has other groups."""
    header = read_header(found.read, found.size)
    expected = is_expected(header, chunk)
    # First, because it also tells whether the header is authentic.
    cipher = _segment_cipher(header, encryption) if encryption is not None else None
    if not expected:
        return f"it holds {_shape(header.chunk)}; {_shape(chunk)} was wanted"
    if cipher is not None:
        room = whole_pages(chunk.body_bytes + TAG_BYTES)
        found.fill(chunk.offsets[0], room[: chunk.body_bytes])
        cipher.decrypt(0, room, into)
        return ""
    found.fill(header.chunk.offsets[0], into)
    check_body(header, into)
    return ""


def _segment_cipher(header: ChunkHeader, encryption: EncryptionKeys) -> SegmentCipher:
    # The library is loaded only where chunks are encrypted.
    from kvferry.tiers.format.cipher import SegmentCipher  # noqa: PLC0415

    return SegmentCipher(header, encryption)


def _shape(chunk: Chunk) -> str:
    return " and ".join(
        f"{group.tokens} tokens of {group.name}, "
        + ", ".join(f"{one.name} {one.units} x {one.unit_bytes}" for one in group.sections)
        for group in chunk.groups
    )
