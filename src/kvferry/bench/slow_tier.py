"""Chunks to and from a slow tier, as the connector moves them: by a `TierQueue`, between it and an arena.

Depth is how many chunks are under way at a time. Of those, as many are worked on as the queue has threads;
it is asked for what has ended as an engine's step would ask, but more often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from typing import Self

import numpy as np

from kvferry.cache.tier_queue import Done, Read, TierQueue
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


def namespace(group: ChunkGroup, name: str = "") -> Namespace:
    """One that no engine has, another for every name."""
    return Namespace.of(
        weights=f"none: kvferry bench {name}",
        model={},
        dtype="none",
        kv_dtype="none",
        scales={},
        form=[str(group)],
        name="kvferry bench",
    )


class Bodies:
    """Chunks in an arena.

    Attributes:
        group: what each is as a file.
        keys: of each.
        arena: number n lies at ``n * chunk_bytes``.
        chunk_bytes: of each.
    """

    def __init__(self, group: CanonicalGroup, chunk_tokens: int, count: int) -> None:
        self.group, self.chunk_bytes = chunk_group(group, chunk_tokens), group.chunk_bytes
        self.keys = [blake2b(b"%d" % number).digest()[:32] for number in range(count)]
        self.arena = Arena.create(count * self.chunk_bytes)
        # Storage that compresses, or notices zeros, shall have nothing of it.
        content = np.random.default_rng(5)
        for number in range(count):
            self[number][:] = content.bytes(self.chunk_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.arena.close()

    def __len__(self) -> int:
        return len(self.keys)

    def wipe(self, count: int) -> None:
        """Zero the first chunks."""
        self.arena.memory[: count * self.chunk_bytes] = 0

    def __getitem__(self, number: int) -> memoryview:
        return self.arena.bytes_at(number * self.chunk_bytes, self.chunk_bytes)


def chunks_at(depth: int) -> int:
    """How many chunks a mover of a depth moves."""
    return max(depth, _LEAST_CHUNKS)


@contextmanager
def queue_over(tier: StorageTier) -> Iterator[TierQueue]:
    """A tier's threads, as many as the connector has, which end."""
    queue = TierQueue(tier)
    try:
        yield queue
    finally:
        queue.close(_PATIENCE_SECONDS)


def store_all(queue: TierQueue, bodies: Bodies, count: int, depth: int) -> float:
    """Store so many chunks; seconds until the last counts as stored.

    Raises:
        TransferError: one was not stored.
    """
    return _all(queue, count, depth, lambda n: queue.write(bodies.keys[n], bodies.group, bodies[n]))


def load_all(queue: TierQueue, bodies: Bodies, count: int, depth: int) -> float:
    """Load so many chunks; seconds until the last is there.

    Raises:
        TransferError: one did not come.
    """
    return _all(queue, count, depth, lambda n: queue.read(bodies.keys[n], bodies.group, bodies[n]))


class Stores:
    """Chunks to a tier that has none of them, every time anew; a `Mover`."""

    name = "kvferry"

    def __init__(
        self, fresh: Callable[[], AbstractContextManager[StorageTier]], bodies: Bodies, depth: int
    ) -> None:
        """Prepare.

        Args:
            fresh: an empty tier; what was stored is removed at the end.
            bodies: what is stored.
            depth: chunks under way at a time.
        """
        self._fresh, self._bodies, self._depth = fresh, bodies, depth
        self.bytes = chunks_at(depth) * bodies.chunk_bytes

    def move(self) -> float:
        """Store all once."""
        with self._fresh() as tier, queue_over(tier) as queue:
            return store_all(queue, self._bodies, chunks_at(self._depth), self._depth)


class Loads:
    """Chunks from a tier that has them; a `Mover`."""

    name = "kvferry"

    def __init__(self, queue: TierQueue, bodies: Bodies, into: Bodies, depth: int) -> None:
        """Prepare.

        Args:
            queue: over a tier that has what is in `bodies`.
            bodies: what is to come.
            into: where to.
            depth: chunks under way at a time.
        """
        self._queue, self._bodies, self._into, self._depth = queue, bodies, into, depth
        self.bytes = chunks_at(depth) * bodies.chunk_bytes

    def move(self) -> float:
        """Load all once, and compare.

        Raises:
            TransferError: other bytes came.
        """
        count = chunks_at(self._depth)
        self._into.wipe(count)
        seconds = load_all(self._queue, self._into, count, self._depth)
        if any(self._into[number] != self._bodies[number] for number in range(count)):
            raise TransferError(
                f"{self._queue.name} tier: a chunk came with other bytes than were stored: please report this"
            )
        return seconds


def _all(queue: TierQueue, count: int, depth: int, begin: Callable[[int], None]) -> float:
    """Begin with `depth`, and another one for each that has ended; seconds."""
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
    expected = GetOutcome.HIT if isinstance(done, Read) else PutOutcome.STORED
    if done.what is not expected:
        raise TransferError(f"{name} tier: a chunk is {done.what}, expected {expected}")
