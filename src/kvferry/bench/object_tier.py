"""Cases of the object tier: store and load chunks in a bucket, compared with obstore's own put and get.

All objects have random names below the URL and are removed at the end. Credentials come from the environment
(``AWS_ENDPOINT``, ``AWS_ACCESS_KEY_ID``, ...).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import obstore
from obstore.store import from_url

from kvferry.bench.movers import Mover, PoolMover
from kvferry.bench.rank_chunks import CHUNK_TOKENS
from kvferry.bench.raw_files import random_pages
from kvferry.bench.storage_chunks import (
    LoadMover,
    RandomChunks,
    StoreMover,
    bench_namespace,
    chunks_per_move,
    open_queue,
    store_all,
)
from kvferry.bench.tier_cases import TierCase
from kvferry.errors import TransferError
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.tiers.format.chunk import Chunk
from kvferry.tiers.objects.client import BucketClient
from kvferry.tiers.objects.faults import Unavailable
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.tier import ObjectTier

TARGET_RATIO = 0.8
_PATIENCE_SECONDS = 60.0
_PIECE_BYTES = 512 << 10


def tier_cases(stack: ExitStack, group: CanonicalGroup, url: str, depths: Sequence[int]) -> list[TierCase]:
    """Return the benchmark cases of the object tier: storing and loading chunks, compared with obstore.

    There are two cases per depth, the first for storing and the second for loading. This function also writes
    the objects that the loading cases read.

    Args:
        stack: exit stack. When it is closed, it ends the threads and removes the objects.
        group: format in which chunks are stored.
        url: URL of a path in a bucket, such as ``s3://bucket/path``.
        depths: depths to measure. A depth is a number of chunks in flight at a time.

    Raises:
        ConfigError: memory cannot be allocated, or the URL cannot be used.
        TransferError: a chunk could not be stored.
    """
    count = chunks_per_move(max(depths))
    chunks, into = (stack.enter_context(RandomChunks(group, CHUNK_TOKENS, count)) for _ in range(2))
    size = Chunk(bytes(32), chunks.keys[0], (chunks.group,)).file_bytes
    kept = stack.enter_context(_empty_tier(url, chunks))
    queue = stack.enter_context(open_queue(kept, ObjectSettings.kind))
    store_all(queue, chunks, count, depth=8)
    prefix = stack.enter_context(_removing(url, f"bench-{secrets.token_hex(8)}"))
    client, content = from_url(url), random_pages(size)

    def put(name: str) -> None:
        obstore.put(client, name, content, use_multipart=False)

    def get(name: str) -> None:
        obstore.get(client, name).bytes()

    def stream(name: str) -> None:
        for _ in obstore.get(client, name).stream(_PIECE_BYTES):
            pass

    names = [f"{prefix}/{number}" for number in range(count)]
    for name in names:
        put(name)
    found = []
    for depth in depths:
        pool = stack.enter_context(ThreadPoolExecutor(depth, "bench-objects"))
        some = names[: chunks_per_move(depth)]
        stores = StoreMover(ObjectSettings.kind, lambda: _empty_tier(url, chunks), chunks, depth)
        loads = LoadMover(queue, chunks, into, depth)
        total = len(some) * size
        puts, gets = (PoolMover("obstore", total, pool, request, some) for request in (put, get))
        streams = PoolMover("obstore in pieces of 512 KiB", total, pool, stream, some)
        found.append(_case("store", depth, stores, puts))
        found.append(_case("load", depth, loads, gets, (streams,)))
    return found


def _case(
    direction: str, depth: int, ours: Mover, limit: Mover, controls: tuple[Mover, ...] = ()
) -> TierCase:
    return TierCase(
        tier=ObjectSettings.kind,
        direction=direction,
        depth=depth,
        target=TARGET_RATIO,
        ours=ours,
        limits=(limit,),
        controls=controls,
    )


@contextmanager
def _empty_tier(url: str, chunks: RandomChunks) -> Iterator[ObjectTier]:
    """Yield an empty object tier with a new namespace. Remove the objects of the namespace at the end.

    Args:
        url: URL of a path in a bucket.
        chunks: chunks to store; their format is part of the namespace.
    """
    own = bench_namespace(chunks.group, secrets.token_hex(8))
    with _removing(url, own.digest.hex()):
        yield ObjectTier(url, own, timeout_seconds=_PATIENCE_SECONDS)


@contextmanager
def _removing(url: str, prefix: str) -> Iterator[str]:
    """Yield `prefix`. At the end, remove all objects whose path begins with this prefix.

    Args:
        url: URL of a path in a bucket.
        prefix: path below the URL.

    Raises:
        TransferError: the objects could not be removed.
    """
    bucket = BucketClient(url, {}, _PATIENCE_SECONDS)
    try:
        yield prefix
    finally:
        try:
            bucket.remove([one.path for page in bucket.list(prefix) for one in page])
        except Unavailable as error:
            raise TransferError(f"object tier: {url}/{prefix} could not be removed: {error}") from error
