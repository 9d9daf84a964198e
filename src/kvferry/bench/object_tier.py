"""The object tier, beside its client alone: as many threads that put and get objects of the same size.

Everything is written under names of its own below the URL, and removed. What the client needs besides the
URL it takes from the environment (``AWS_ENDPOINT``, ``AWS_ACCESS_KEY_ID``, ...).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import obstore
from obstore.store import from_url

from kvferry.bench.chunks import CHUNK_TOKENS
from kvferry.bench.contest import Contest
from kvferry.bench.raw_files import random_pages
from kvferry.bench.slow_tier import Bodies, Loads, Stores, chunks_at, namespace, queue_over, store_all
from kvferry.errors import TransferError
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.tiers.format.chunk import Chunk
from kvferry.tiers.objects.client import BucketClient
from kvferry.tiers.objects.faults import Unavailable
from kvferry.tiers.objects.tier import ObjectTier

TARGET_RATIO = 0.8
_PATIENCE_SECONDS = 60.0
_PIECE_BYTES = 512 << 10


class Requests:
    """One request for each of some objects, by threads; a `Mover`."""

    def __init__(
        self,
        name: str,
        pool: ThreadPoolExecutor,
        request: Callable[[str], object],
        names: Sequence[str],
        size: int,
    ) -> None:
        """Prepare.

        Args:
            name: for people.
            pool: as many threads as requests are under way.
            request: makes one, for an object's name.
            names: of objects.
            size: bytes of each.
        """
        self.name, self.bytes = name, len(names) * size
        self._pool, self._request, self._names = pool, request, names

    def move(self) -> float:
        """Make them once; seconds until the last is answered."""
        started = time.perf_counter()
        for _ in self._pool.map(self._request, self._names):
            pass
        return time.perf_counter() - started


def contests(stack: ExitStack, group: CanonicalGroup, url: str, depths: Sequence[int]) -> list[Contest]:
    """Stores and loads at every depth.

    Args:
        stack: ends threads, and removes what was written.
        group: what chunks hold.
        url: of the bucket, and a path in it.
        depths: chunks under way at a time.

    Raises:
        ConfigError: memory, or the URL, cannot be used.
        TransferError: the store does not keep what it is given.
    """
    count = chunks_at(max(depths))
    bodies, into = (stack.enter_context(Bodies(group, CHUNK_TOKENS, count)) for _ in range(2))
    size = Chunk(bytes(32), bodies.keys[0], (bodies.group,)).file_bytes
    kept = stack.enter_context(_fresh(url, bodies))
    queue = stack.enter_context(queue_over(kept))
    store_all(queue, bodies, count, depth=8)
    prefix = stack.enter_context(_removed(url, f"bench-{secrets.token_hex(8)}"))
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
        some = names[: chunks_at(depth)]
        stores = Stores(lambda: _fresh(url, bodies), bodies, depth)
        loads = Loads(queue, bodies, into, depth)
        puts, gets = (Requests("obstore", pool, request, some, size) for request in (put, get))
        streams = Requests("obstore in pieces of 512 KiB", pool, stream, some, size)
        found.append(Contest("object", "store", depth, TARGET_RATIO, stores, (puts,)))
        found.append(Contest("object", "load", depth, TARGET_RATIO, loads, (gets,), (streams,)))
    return found


@contextmanager
def _fresh(url: str, bodies: Bodies) -> Iterator[ObjectTier]:
    """A store of a namespace that nobody has, which is removed."""
    own = namespace(bodies.group, secrets.token_hex(8))
    with _removed(url, own.digest.hex()):
        yield ObjectTier(url, own, timeout_seconds=_PATIENCE_SECONDS)


@contextmanager
def _removed(url: str, prefix: str) -> Iterator[str]:
    """A path below a URL; what is written there is removed."""
    bucket = BucketClient(url, {}, _PATIENCE_SECONDS)
    try:
        yield prefix
    finally:
        try:
            bucket.remove([one.path for page in bucket.list(prefix) for one in page])
        except Unavailable as error:
            raise TransferError(f"object tier: {url}/{prefix} could not be removed: {error}") from error
