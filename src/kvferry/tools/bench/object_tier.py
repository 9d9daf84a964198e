"""Cases of the object tier: store and load chunks in a bucket, compared with obstore's own put and get.

All objects have random names below the URL and are removed at the end. Credentials come from the environment
(``AWS_ENDPOINT``, ``AWS_ACCESS_KEY_ID``, ...).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import obstore
from obstore.store import from_url

from kvferry.common.errors import TransferError
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.tiers import BucketClient, ObjectSettings, ObjectTier, Unavailable
from kvferry.tools.bench.movers import pool_mover
from kvferry.tools.bench.rounds import TierCase
from kvferry.tools.bench.storage_chunks import (
    RandomChunks,
    StorageCases,
    bench_namespace,
    chunks_per_move,
    random_pages,
)

TARGET_RATIO = 0.8
_PATIENCE_SECONDS = 60.0
_PIECE_BYTES = 512 << 10


def tier_cases(stack: ExitStack, group: CanonicalGroup, url: str, depths: Sequence[int]) -> list[TierCase]:
    """Return the cases of each depth: storing, then loading. `stack` ends threads and removes objects."""
    made = StorageCases(stack, group, depths, ObjectSettings.kind)
    empty = partial(_empty_tier, url)
    queue = made.filled_queue(empty)
    # A random name: two benchmarks may run in one bucket.
    prefix = stack.enter_context(_removing(url, f"bench-{secrets.token_hex(8)}"))
    # Other objects have the size of chunks, with the header.
    size = made.chunks.file_bytes
    client, content = from_url(url), random_pages(size)

    def put(name: str) -> None:
        # One request, as the object tier's.
        obstore.put(client, name, content, use_multipart=False)

    def get(name: str) -> None:
        # The request returns with the headers, and this waits for the body.
        obstore.get(client, name).bytes()

    def stream(name: str) -> None:
        # As the object tier reads, which digests pieces while others arrive.
        for _ in obstore.get(client, name).stream(_PIECE_BYTES):
            pass

    names = [f"{prefix}/{number}" for number in range(len(made.chunks))]
    for name in names:
        put(name)
    found = []
    for depth in depths:
        pool = stack.enter_context(ThreadPoolExecutor(depth, "bench-objects"))
        some = names[: chunks_per_move(depth)]
        puts, gets, streams = (
            pool_mover(name, len(some) * size, pool, request, some)
            for name, request in (
                ("obstore", put),
                ("obstore", get),
                ("obstore in pieces of 512 KiB", stream),
            )
        )
        found += [
            made.store(depth, empty, TARGET_RATIO, [puts]),
            made.load(depth, queue, TARGET_RATIO, [gets], streams),
        ]
    return found


@contextmanager
def _empty_tier(url: str, chunks: RandomChunks) -> Iterator[ObjectTier]:
    # A store must find none of the chunks there, so each round has a namespace of its own.
    own = bench_namespace(chunks.group, secrets.token_hex(8))
    with _removing(url, own.digest.hex()):
        yield ObjectTier(url, own, timeout_seconds=_PATIENCE_SECONDS)


@contextmanager
def _removing(url: str, prefix: str) -> Iterator[str]:
    """Yield `prefix`. At the end, remove all objects whose path begins with it."""
    bucket = BucketClient(url, {}, _PATIENCE_SECONDS)
    try:
        yield prefix
    finally:
        try:
            bucket.remove([one.path for page in bucket.list(prefix) for one in page])
        except Unavailable as error:
            raise TransferError(f"object tier: {url}/{prefix} could not be removed: {error}") from error
