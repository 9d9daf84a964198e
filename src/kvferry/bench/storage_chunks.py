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
    """Return a chunk namespace that no engine uses. Each `name` gives a different namespace."""
    return Namespace.of(
        weights=f"none: kvferry bench {name}",
        model={},
        dtype="none",
        kv_dtype="none",
        scales={},
        form=[str(group)],
        name="kvferry bench",
    )


class ChunkBodies:
    """Chunks of random bytes in host memory. The index operator returns the memory of a chunk.

    Attributes:
        group: format of a chunk as a file.
        keys: key of each chunk, 32 bytes.
        arena: host memory of the chunks; chunk n is at byte ``n * chunk_bytes``.
        chunk_bytes: size of a chunk, in bytes.
    """

    def __init__(self, group: CanonicalGroup, chunk_tokens: int, count: int) -> None:
        """Allocate the memory and fill it with random bytes.

        Args:
            group: format of the chunks.
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
    """Return the number of chunks that a mover with this depth moves each time."""
    return max(depth, _LEAST_CHUNKS)


@contextmanager
def open_queue(tier: StorageTier, name: str) -> Iterator[TierQueue]:
    """Yield a queue for a tier with as many threads as in a connector. Close it at the end."""
    queue = TierQueue(tier, name)
    try:
        yield queue
    finally:
        queue.close(_PATIENCE_SECONDS)


def store_all(queue: TierQueue, bodies: ChunkBodies, count: int, depth: int) -> float:
    """Store the first `count` chunks, and return the time until the last is stored, in seconds.

    Args:
        queue: queue for the tier.
        bodies: chunks to store.
        count: number of chunks.
        depth: number of chunks in flight.

    Raises:
        TransferError: a chunk was not stored.
    """
    return _all(queue, count, depth, lambda n: queue.write(bodies.keys[n], bodies.group, bodies[n]))


def load_all(queue: TierQueue, bodies: ChunkBodies, count: int, depth: int) -> float:
    """Load the first `count` chunks, and return the time until the last is complete, in seconds.

    Args:
        queue: queue for a tier that has the chunks.
        bodies: chunks to overwrite with the loaded bytes. Mutated.
        count: number of chunks.
        depth: number of chunks in flight.

    Raises:
        TransferError: a chunk could not be loaded.
    """
    return _all(queue, count, depth, lambda n: queue.read(bodies.keys[n], bodies.group, bodies[n]))


class StoreMover:
    """A mover that stores chunks in a new, empty tier on every move."""

    name = "kvferry"

    def __init__(
        self,
        name: str,
        fresh: Callable[[], AbstractContextManager[StorageTier]],
        bodies: ChunkBodies,
        depth: int,
    ) -> None:
        """Set the chunks to store and the function that opens a tier.

        Args:
            name: name of the tier.
            fresh: function that returns a context manager. The context manager opens an empty tier, and
                removes it at the end.
            bodies: chunks to store.
            depth: number of chunks in flight.
        """
        self._name, self._fresh, self._bodies, self._depth = name, fresh, bodies, depth
        self.bytes = chunks_per_move(depth) * bodies.chunk_bytes

    def move(self) -> float:
        """Store the chunks in a new tier, and return the time in seconds."""
        with self._fresh() as tier, open_queue(tier, self._name) as queue:
            return store_all(queue, self._bodies, chunks_per_move(self._depth), self._depth)


class LoadMover:
    """A mover that loads chunks from a tier and compares their bytes."""

    name = "kvferry"

    def __init__(self, queue: TierQueue, bodies: ChunkBodies, into: ChunkBodies, depth: int) -> None:
        """Set the queue to load from and the memory of the chunks.

        Args:
            queue: queue for a tier that has the chunks.
            bodies: chunks as they were stored.
            into: chunks that each move overwrites with the loaded bytes.
            depth: number of chunks in flight.
        """
        self._queue, self._bodies, self._into, self._depth = queue, bodies, into, depth
        self.bytes = chunks_per_move(depth) * bodies.chunk_bytes

    def move(self) -> float:
        """Load the chunks and compare them, and return the time of the loads in seconds.

        Raises:
            TransferError: wrong bytes arrived.
        """
        count = chunks_per_move(self._depth)
        self._into.clear(count)
        seconds = load_all(self._queue, self._into, count, self._depth)
        if any(self._into[number] != self._bodies[number] for number in range(count)):
            raise TransferError(
                f"{self._queue.name} tier: a chunk came with other bytes than were stored: please report this"
            )
        return seconds


def _all(queue: TierQueue, count: int, depth: int, begin: Callable[[int], None]) -> float:
    """Keep `depth` chunks in flight until `count` have ended, and return the time in seconds.

    Args:
        queue: queue for the tier.
        count: number of chunks.
        depth: number of chunks in flight.
        begin: function that takes the number of a chunk, and begins to store or load the chunk.
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
        if queue.stuck_for_reading or queue.stuck_for_writing:
            raise TransferError(f"{queue.name} tier: nothing has ended for seconds")
        if ended < count:
            time.sleep(_POLL_SECONDS)
    return time.perf_counter() - started


def _check(name: str, done: Done) -> None:
    expected = GetOutcome.HIT if isinstance(done, ReadEnded) else PutOutcome.STORED
    if done.what is not expected:
        raise TransferError(f"{name} tier: a chunk is {done.what}, expected {expected}")
