"""The object tier: chunks in a bucket that engines on many machines share.

Every call blocks, and any thread may make it. A chunk is one object, with the same bytes as a chunk file of
the file tier. It appears completely or not at all, and a hit counts only after its checksums match. A chunk
has only one encoding, so two processes may store it at the same time.

Failures of a network, a store or another process are outcomes. They are counted, and the first of each kind
is logged. Every request has a deadline. After some failures in a row, requests pause for a while. Reads and
writes pause separately, because a store may allow, or cope with, only one of them.

The store has no capacity and no times of use. The bucket's own rules, or `kvferry cache gc`, remove old
objects by their time of storing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType

from kvferry.errors import ChunkError
from kvferry.keys.namespace import Namespace
from kvferry.tiers.format.body import check_body, check_size, make_header, zero_padding
from kvferry.tiers.format.chunk import Chunk, ChunkGroup
from kvferry.tiers.format.decode import read_header
from kvferry.tiers.index.key_table import KeyTable
from kvferry.tiers.index.listed_keys import ListedKeys
from kvferry.tiers.index.tier_keys import TierKeys
from kvferry.tiers.objects.access import GuardedBucket
from kvferry.tiers.objects.bucket_index import BucketIndex
from kvferry.tiers.objects.client import BucketClient, OpenObject
from kvferry.tiers.objects.distrusted import DistrustedObjects
from kvferry.tiers.objects.faults import Fault, Unavailable
from kvferry.tiers.objects.stream import ObjectStream
from kvferry.tiers.outcome import GetOutcome, OutcomeCounter, PutOutcome, TierStats
from kvferry.tiers.paths import chunk_name, quarantine_name
from kvferry.tiers.storage_tier import StorageTier

_log = logging.getLogger(__name__)

MAX_KEYS = 1 << 22
"""Maximum number of known keys of a namespace, which bounds the memory that a listing takes."""

_ADVICE = {
    GetOutcome.CORRUPT: "see who else writes there; it is computed anew",
    GetOutcome.OTHER_SHAPE: "the namespace is the same, the groups are not: tell kvferry's authors",
}


class ObjectTier(StorageTier):
    """The chunks of one namespace under a URL, which may hold others and be used by other processes.

    Only the process that makes it may use it, not one forked from that process. The constructor lists the
    store for at most the time of one fetch, and ignores a missing answer.

    Args:
        url: s3://bucket/path, gs://bucket/path, az://container/path or file:///path.
        namespace: namespace of the chunks; its note is written if it is missing.
        options: client settings, by obstore's names: endpoint, region, allow_http, and so on. Other settings,
            credentials above all, are read from the environment.
        timeout_seconds: time limit of a fetch. A store first looks the object up and may take twice as long.
            A request has half of the limit, to the end of its answer, so large chunks on a slow line need
            more.
        pause_seconds: length of the pause after three failures in a row.
        listing_seconds: time until a listing is repeated; listing many chunks takes many requests.
        clock: monotonic seconds.
        table: key table that the tiers of a cache share; None for a table of its own.

    Raises:
        ConfigError: the form of the URL is unknown, or an option is unknown or cannot be used.
    """

    def __init__(
        self,
        url: str,
        namespace: Namespace,
        options: Mapping[str, str] = MappingProxyType({}),
        *,
        timeout_seconds: float = 20.0,
        pause_seconds: float = 30.0,
        listing_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        table: KeyTable | None = None,
    ) -> None:
        bucket = BucketClient(url, options, timeout_seconds)
        self._url = bucket.url
        if bucket.endpoint and not (bucket.endpoint.encrypted or bucket.endpoint.is_here):
            _log.warning(
                "object tier %s: %s is spoken to without encryption: who listens on the way reads chunks, "
                "who can change what passes plants some; use https, or see that only engines are on that "
                "network",
                *(self._url, bucket.endpoint.shown),
            )
        self._namespace = namespace.digest
        self._bucket = GuardedBucket(bucket, pause_seconds, clock)
        self.keys = TierKeys(table)
        self._listed = ListedKeys(self.keys, MAX_KEYS)
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
        self._index.list(timeout_seconds)

    @property
    def stats(self) -> TierStats:
        """Counts of this process since it opened the store."""
        return self._counter.stats()

    @property
    def faults(self) -> dict[Fault, int]:
        """The number of requests that failed because of the store, by reason."""
        return self._bucket.faults

    def __len__(self) -> int:
        """Return the number of known chunks of the namespace."""
        return len(self._listed)

    @property
    def paused(self) -> bool:
        """Return whether fetches are paused because earlier ones failed."""
        return self._bucket.reads_paused

    def put(self, key: bytes, group: ChunkGroup, body: memoryview) -> PutOutcome:
        """Store a chunk unless it is known to be there; see `StorageTier.put`."""
        chunk = Chunk(self._namespace, key, (group,))
        check_size(chunk, body)
        try:
            done = PutOutcome.PRESENT if key in self._listed else self._put(chunk, body)
        except Unavailable:
            done = PutOutcome.IO_ERROR
        self._counter.count_put(done, chunk.file_bytes)
        return done

    def get(self, key: bytes, group: ChunkGroup, into: memoryview) -> GetOutcome:
        """Fetch a chunk; see `StorageTier.get`."""
        chunk = Chunk(self._namespace, key, (group,))
        check_size(chunk, into)
        why = ""
        try:
            done, why = self._get(chunk, into)
        except FileNotFoundError:
            done = GetOutcome.ABSENT
            self._listed.discard(key)
        except Unavailable as error:
            done = GetOutcome.IO_ERROR
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
        """List chunks that other processes stored and removed, if the last listing is too old.

        Returns:
            1 if the known keys changed, else 0.
        """
        return self._index.list() if self._index.due else 0

    def close(self) -> None:
        """Do nothing: only connections stay open between calls, and they are closed with the client."""

    def _put(self, chunk: Chunk, body: memoryview) -> PutOutcome:
        path = chunk_name(self._namespace, chunk.key)
        with self._bucket.writing() as bucket:
            # To ask takes less than to send again what another engine stored, and does not replace an object
            # that others are reading, which some stores do not keep apart.
            there = chunk.key not in self._distrusted and bucket.size(path) == chunk.file_bytes
            if not there:
                zero_padding(chunk, body)
                bucket.put(path, [make_header(chunk, body), body])
        self._distrusted.discard(chunk.key)
        self._listed.add(chunk.key)
        return PutOutcome.PRESENT if there else PutOutcome.STORED

    def _get(self, chunk: Chunk, into: memoryview) -> tuple[GetOutcome, str]:
        """Fetch a chunk; return the outcome, and the defect of the object, empty if it has none."""
        with self._bucket.reading() as bucket:
            found = bucket.get(chunk_name(self._namespace, chunk.key))
            try:
                why = _read(chunk, found, into)
            except ChunkError as error:
                done, why = GetOutcome.CORRUPT, str(error)
            else:
                done = GetOutcome.OTHER_SHAPE if why else GetOutcome.HIT
        if done is not GetOutcome.HIT:
            # In this order, so that a listing under way cannot add the key in between.
            self._distrusted.add(chunk.key, found.etag)
            self._listed.discard(chunk.key)
        if done is GetOutcome.CORRUPT:
            self._set_aside(chunk.key, found)
        return done, why

    def _set_aside(self, key: bytes, found: OpenObject) -> None:
        """Move a bad object to quarantine. If that is not allowed, the next store replaces it.

        An object of another size or ETag stays: the bad answer came from a proxy, or another engine has
        stored the chunk again.
        """
        name = chunk_name(self._namespace, key)
        with suppress(FileNotFoundError, Unavailable), self._bucket.writing() as bucket:
            if bucket.head(name) == (found.size, found.etag):
                bucket.move(name, quarantine_name(self._namespace, key))
                self._counter.add(quarantined=1)


def _read(chunk: Chunk, found: OpenObject, into: memoryview) -> str:
    """Read and check the body of an object.

    Returns:
        An empty string, or a description of its content if it is a good chunk of other groups.

    Raises:
        ChunkError: the object is damaged or another chunk.
    """
    stream = ObjectStream(found.pieces)
    header = read_header(stream.read, found.size)
    if (header.chunk.namespace, header.chunk.key) != (chunk.namespace, chunk.key):
        raise ChunkError(f"it holds the chunk of key {header.chunk.key.hex()}, expected {chunk.key.hex()}")
    if header.chunk.groups != chunk.groups:
        return f"it holds {_shape(header.chunk)}; {_shape(chunk)} was wanted"
    stream.fill(header.chunk.offsets[0], into)
    check_body(header, into)
    return ""


def _shape(chunk: Chunk) -> str:
    """Return a readable description of a chunk's content."""
    return " and ".join(
        f"{group.tokens} tokens of {group.name}, "
        + ", ".join(f"{one.name} {one.units} x {one.unit_bytes}" for one in group.sections)
        for group in chunk.groups
    )
