"""Chunks in object storage: a bucket that engines on many machines share.

Every call blocks, and any thread may make it. A chunk is one object, the same bytes as the chunk's file
elsewhere; it appears whole or not at all, and what was read is compared with its checksums before it counts.
A chunk has one image only, so two that store it at once do no harm.

Nothing here raises because of a network, a store or another process: what a request came to is counted, and
the first of each kind is said. Every request has a deadline; after some failures in a row the store is left
alone for a while, reads and writes each by themselves, since it may allow or manage only one of them.

What the store does not have is a capacity, and a note of what was used when: old objects are removed by the
bucket's own rules, or by `kvferry cache gc`, by when they were stored.
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
from kvferry.tiers.names import OBJECT
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
"""Bound on the known keys of a namespace: an endless listing takes no more memory than that."""

_ADVICE = {
    GetOutcome.CORRUPT: "see who else writes there; it is computed anew",
    GetOutcome.OTHER_SHAPE: "the namespace is the same, the groups are not: tell kvferry's authors",
}


class ObjectTier(StorageTier):
    """The chunks of one namespace under a URL, which may hold others and be used by other processes.

    It is used in the process that makes it, not in one that is forked from that. Making it looks at the store
    for no longer than one fetch may take, and does not mind if there is no answer.

    Args:
        url: s3://bucket/path, gs://bucket/path, az://container/path or file:///path.
        namespace: whose chunks are stored and fetched; its note is written if it is not there.
        options: settings of the client, by obstore's names: endpoint, region, allow_http, and so on. What is
            not among them, credentials above all, is read from the environment.
        timeout_seconds: how long a fetch may take; a store asks first, and may take as long again. A request
            has half of it, to the end of its answer: large chunks on a slow line need more.
        pause_seconds: how long no request is made after three failures in a row.
        listing_seconds: how long a listing is used; listing many chunks takes many requests.
        clock: monotonic seconds.
        table: the key table that the tiers of a cache share; None for one of its own.

    Raises:
        ConfigError: the URL is of an unknown form, or an option is unknown or cannot be used.
    """

    name = OBJECT

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
        """What this process did with the store since it was opened."""
        return self._counter.stats()

    @property
    def faults(self) -> dict[Fault, int]:
        """Requests that came to nothing because of the store, by reason."""
        return self._bucket.faults

    def __len__(self) -> int:
        """Chunks of the namespace, as far as is known."""
        return len(self._listed)

    @property
    def paused(self) -> bool:
        """Whether fetches are refused for a while because earlier ones failed."""
        return self._bucket.reads_paused

    def put(self, key: bytes, group: ChunkGroup, body: memoryview) -> PutOutcome:
        """Keep a chunk; see `StorageTier.put`. One that is known to be there is not sent again."""
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
        if self._counter.count_get(done, into.nbytes) and why:
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
        """Learn what other processes have stored and removed, if the last listing is not good any more.

        Returns:
            1 where that changed something, else 0.
        """
        return self._index.list() if self._index.due else 0

    def close(self) -> None:
        """Nothing stays open between calls but connections, which go with the store."""

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
        """Fetch it; with what is wrong with it."""
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
        """Move a bad object to quarantine; where that is not allowed, the next store of it replaces it.

        Not if another object is there: then the answer was a proxy's, or another engine has mended it.
        """
        name = chunk_name(self._namespace, key)
        with suppress(FileNotFoundError, Unavailable), self._bucket.writing() as bucket:
            if bucket.look(name) == (found.size, found.etag):
                bucket.move(name, quarantine_name(self._namespace, key))
                self._counter.add(quarantined=1)


def _read(chunk: Chunk, found: OpenObject, into: memoryview) -> str:
    """Read and check the body of an object; says what else it holds if it is a good one of other groups.

    Raises:
        ChunkError: it is not what was written.
    """
    stream = ObjectStream(found.pieces)
    header = read_header(stream.read, found.size)
    if (header.chunk.namespace, header.chunk.key) != (chunk.namespace, chunk.key):
        raise ChunkError(f"the chunk of key {header.chunk.key.hex()}")
    if header.chunk.groups != chunk.groups:
        return f"it holds {_shape(header.chunk)}; {_shape(chunk)} was wanted"
    stream.fill(header.chunk.offsets[0], into)
    check_body(header, into)
    return ""


def _shape(chunk: Chunk) -> str:
    """What a chunk holds, to be read."""
    return " and ".join(
        f"{group.tokens} tokens of {group.name}, "
        + ", ".join(f"{one.name} {one.units} x {one.unit_bytes}" for one in group.sections)
        for group in chunk.groups
    )
