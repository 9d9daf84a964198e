"""Movers that store and load chunks between host memory and a storage tier with the connector's `TierQueue`.

The depth is the number of chunks in flight. Each thread of the queue works on one of them at a time. The
movers poll the queue for results in the same way as an engine's step, but more often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from typing import Self

import numpy as np

from kvferry.cache.tier_queue import Done, ReadEnded, TierQueue
from kvferry.errors import TransferError
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.keys.namespace import Namespace
from kvferry.tiers.format.body import chunk_group
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.host.arena import Arena
from kvferry.tiers.outcome import GetOutcome, PutOutcome
from kvferry.tiers.storage_tier import StorageTier

_POLL_SECONDS = 200e-6
_PATIENCE_SECONDS = 60.0
_LEAST_CHUNKS = 8


def bench_namespace(group: ChunkGroup, name: str = "") -> Namespace:
    """Return a namespace of chunk keys for benchmarks. No engine uses it, so no engine finds the chunks.

    Args:
        group: format of a chunk as a file.
        name: any text. Different names give different namespaces.
    """
    return Namespace.of(
        weights=f"none: kvferry bench {name}",
        model={},
        dtype="none",
        kv_dtype="none",
        scales={},
        form=[str(group)],
        name="kvferry bench",
    )


class RandomChunks:
    """Chunks of random bytes in host memory. ``chunks[n]`` is the memory of chunk n.

    Attributes:
        group: format of a chunk as a file.
        keys: key of each chunk, 32 bytes each.
        arena: host memory of all chunks; chunk n is at byte ``n * chunk_bytes``.
        chunk_bytes: size of a chunk, in bytes.
    """

    def __init__(self, group: CanonicalGroup, chunk_tokens: int, count: int) -> None:
        """Allocate the chunks' memory and fill it with random bytes.

        Args:
            group: format in which chunks are stored.
            chunk_tokens: number of tokens per chunk.
            count: number of chunks.
        """
        self.group, self.chunk_bytes = chunk_group(group, chunk_tokens), group.chunk_bytes
        self.keys = [blake2b(b"%d" % number).digest()[:32] for number in range(count)]
        self.arena = Arena.create(count * self.chunk_bytes)
        # Use random bytes, because storage may compress or skip zeros.
        content = np.random.default_rng(5)
        for number in range(count):
            self[number][:] = content.bytes(self.chunk_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.arena.close()

    def __len__(self) -> int:
        return len(self.keys)

    def clear(self, count: int) -> None:
        """Fill the memory of the first `count` chunks with zeros."""
        self.arena.memory[: count * self.chunk_bytes] = 0

    def __getitem__(self, number: int) -> memoryview:
        return self.arena.bytes_at(number * self.chunk_bytes, self.chunk_bytes)


def chunks_per_move(depth: int) -> int:
    """Return the number of chunks that a benchmark stores or loads in each round.

    Args:
        depth: number of chunks in flight at a time.
    """
    return max(depth, _LEAST_CHUNKS)


@contextmanager
def open_queue(tier: StorageTier, name: str) -> Iterator[TierQueue]:
    """Yield a queue that reads from and writes to a tier. Close the queue at the end.

    The queue has as many threads as the queue of a tier in a connector.

    Args:
        tier: tier to read from and write to.
        name: name of the tier in errors.
    """
    queue = TierQueue(tier, name)
    try:
        yield queue
    finally:
        queue.close(_PATIENCE_SECONDS)


def store_all(queue: TierQueue, chunks: RandomChunks, count: int, depth: int) -> float:
    """Store the first `count` chunks, and return the seconds until the last chunk is stored.

    Args:
        queue: queue for the tier.
        chunks: chunks to store.
        count: number of chunks to store.
        depth: maximum number of chunks in flight at a time.

    Raises:
        TransferError: a chunk was not stored.
    """
    return _run_all(queue, count, depth, lambda n: queue.write(chunks.keys[n], chunks.group, chunks[n]))


def load_all(queue: TierQueue, chunks: RandomChunks, count: int, depth: int) -> float:
    """Load the first `count` chunks, and return the seconds until the last chunk is loaded.

    Args:
        queue: queue for a tier that has the chunks.
        chunks: chunks to overwrite with the loaded bytes.
        count: number of chunks to load.
        depth: maximum number of chunks in flight at a time.

    Raises:
        TransferError: a chunk could not be loaded.
    """
    return _run_all(queue, count, depth, lambda n: queue.read(chunks.keys[n], chunks.group, chunks[n]))


class StoreMover:
    """A mover (benchmarked method of moving bytes) that stores chunks with kvferry in a new, empty tier."""

    name = "kvferry"

    def __init__(
        self,
        name: str,
        empty_tier: Callable[[], AbstractContextManager[StorageTier]],
        chunks: RandomChunks,
        depth: int,
    ) -> None:
        """Set the chunks to store and the function that opens a tier.

        Args:
            name: name of the tier.
            empty_tier: function that returns a context manager. The context manager opens an empty tier, and
                removes the tier at the end.
            chunks: chunks to store.
            depth: maximum number of chunks in flight at a time.
        """
        self._name, self._empty_tier, self._chunks, self._depth = name, empty_tier, chunks, depth
        self.bytes = chunks_per_move(depth) * chunks.chunk_bytes

    def move(self) -> float:
        """Store the chunks in a new, empty tier, and return the seconds until the last chunk is stored."""
        with self._empty_tier() as tier, open_queue(tier, self._name) as queue:
            return store_all(queue, self._chunks, chunks_per_move(self._depth), self._depth)


class LoadMover:
    """A mover (benchmarked method of moving bytes) that loads chunks with kvferry and checks their bytes."""

    name = "kvferry"

    def __init__(self, queue: TierQueue, chunks: RandomChunks, into: RandomChunks, depth: int) -> None:
        """Set the queue to load from and the memory of the chunks.

        Args:
            queue: queue for a tier that has the chunks.
            chunks: chunks with the expected bytes.
            into: chunks that each move overwrites with the loaded bytes.
            depth: maximum number of chunks in flight at a time.
        """
        self._queue, self._chunks, self._into, self._depth = queue, chunks, into, depth
        self.bytes = chunks_per_move(depth) * chunks.chunk_bytes

    def move(self) -> float:
        """Load the chunks, then check their bytes. Return the seconds of the loads without the check.

        Raises:
            TransferError: a load failed, or wrong bytes arrived.
        """
        count = chunks_per_move(self._depth)
        self._into.clear(count)
        seconds = load_all(self._queue, self._into, count, self._depth)
        if any(self._into[number] != self._chunks[number] for number in range(count)):
            raise TransferError(
                f"{self._queue.name} tier: a chunk came with other bytes than were stored: please report this"
            )
        return seconds


def _run_all(queue: TierQueue, count: int, depth: int, begin: Callable[[int], None]) -> float:
    """Store or load `count` chunks, and return the seconds until the last chunk is stored or loaded.

    Args:
        queue: queue for the tier.
        count: number of chunks.
        depth: maximum number of chunks in flight at a time.
        begin: function that takes the index of a chunk, and begins to store or load the chunk.

    Raises:
        TransferError: a chunk could not be stored or loaded.
    """
    begun = ended = 0
    started = time.perf_counter()
    while ended < count:
        while begun < count and begun - ended < depth:
            begin(begun)
            begun += 1
        for done in queue.done():
            _check(queue.name, done)
            ended += 1
        if queue.reads.stuck or queue.writes.stuck:
            raise TransferError(f"{queue.name} tier: nothing has ended for seconds")
        if ended < count:
            time.sleep(_POLL_SECONDS)
    return time.perf_counter() - started


def _check(name: str, done: Done) -> None:
    expected = GetOutcome.HIT if isinstance(done, ReadEnded) else PutOutcome.STORED
    if done.what is not expected:
        raise TransferError(f"{name} tier: a chunk is {done.what}, expected {expected}")
