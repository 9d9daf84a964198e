"""Store and load chunks between host memory and a storage tier with the connector's `TierQueue`.

The depth is the number of chunks in flight. Each thread of the queue works on one of them at a time. The
movers poll the queue for results in the same way as an engine's step, but more often.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from hashlib import blake2b
from typing import Self, TypeAlias

import numpy as np

from kvferry.cache import TierQueue
from kvferry.common.errors import TransferError
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.keys import Namespace
from kvferry.tiers import (
    Arena,
    Chunk,
    ChunkGroup,
    GetOutcome,
    PutOutcome,
    StorageTier,
    chunk_group,
    whole_pages,
)
from kvferry.tools.bench.movers import CallMover, Mover
from kvferry.tools.bench.rank_chunks import CHUNK_TOKENS
from kvferry.tools.bench.rounds import TierCase

# An engine polls once per step. More often, so that the polling adds little to a chunk's time.
_POLL_SECONDS = 200e-6
_PATIENCE_SECONDS = 60.0
_LEAST_CHUNKS = 8


def bench_namespace(group: ChunkGroup, name: str = "") -> Namespace:
    """Return a namespace of chunk keys that no engine uses. Different names give different ones."""
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
    """Chunks of random bytes in host memory: ``chunks[n]`` is at byte ``n * chunk_bytes`` of `arena`."""

    def __init__(self, group: CanonicalGroup, chunk_tokens: int, count: int) -> None:
        self.group, self.chunk_bytes = chunk_group(group, chunk_tokens), group.chunk_bytes
        # Longer keys would have tenants, each one of its own.
        self.keys = [blake2b(b"%d" % number, digest_size=16).digest() for number in range(count)]
        self.arena = Arena.create(count * self.chunk_bytes)
        self.arena.wait_allocated()
        # Use random bytes, because storage may compress or skip zeros.
        content = np.random.default_rng(5)
        for number in range(count):
            self[number][:] = content.bytes(self.chunk_bytes)

    @property
    def file_bytes(self) -> int:
        """Size of a chunk as a file or an object, with header and padding."""
        return Chunk(bytes(32), self.keys[0], (self.group,)).file_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.arena.close()

    def __len__(self) -> int:
        return len(self.keys)

    def clear(self, count: int) -> None:
        self.arena.memory[: count * self.chunk_bytes] = 0

    def __getitem__(self, number: int) -> memoryview:
        return self.arena.bytes_at(number * self.chunk_bytes, self.chunk_bytes)


def chunks_per_move(depth: int) -> int:
    """Return the number of chunks that a benchmark stores or loads in each round, by its depth."""
    return max(depth, _LEAST_CHUNKS)


@contextmanager
def open_queue(tier: StorageTier, name: str) -> Iterator[TierQueue]:
    """Yield a queue with a connector's number of threads for a tier, and close it at the end."""
    queue = TierQueue(tier, name)
    try:
        yield queue
    finally:
        queue.close(_PATIENCE_SECONDS)


def store_all(queue: TierQueue, chunks: RandomChunks, count: int, depth: int) -> float:
    """Store the first `count` chunks, `depth` at a time, and return the seconds until all are stored."""
    return _run_all(
        queue, count, depth, lambda n: queue.writes.start(chunks.keys[n], chunks.group, chunks[n])
    )


def random_pages(size: int) -> memoryview:
    """Return `size` random bytes in page-aligned memory."""
    pages = whole_pages(size)
    # Storage may compress other content, or skip zeros.
    pages[:] = os.urandom(size)
    return pages


def load_mover(queue: TierQueue, chunks: RandomChunks, into: RandomChunks, depth: int) -> CallMover:
    """Return a mover that loads chunks over `into` and checks their bytes, which the time leaves out.

    It raises TransferError if a load failed, or wrong bytes arrived.
    """
    count = chunks_per_move(depth)

    def move() -> float:
        into.clear(count)
        seconds = _run_all(
            queue, count, depth, lambda n: queue.reads.start(into.keys[n], into.group, into[n])
        )
        if any(into[number] != chunks[number] for number in range(count)):
            raise TransferError(
                f"{queue.name} tier: a chunk came with other bytes than were stored: please report this"
            )
        return seconds

    return CallMover("kvferry", count * chunks.chunk_bytes, move)


OpenTier: TypeAlias = Callable[[RandomChunks], AbstractContextManager[StorageTier]]
"""Returns a context manager that opens an empty tier for such chunks, and removes it."""


class StorageCases:
    """Makes the cases of a storage tier that stores and loads random chunks."""

    def __init__(
        self,
        stack: ExitStack,
        group: CanonicalGroup,
        depths: Sequence[int],
        kind: str,
    ) -> None:
        """Make the chunks. The end of `stack` also ends the threads of queues and removes their tiers."""
        self._stack, self._kind, count = stack, kind, chunks_per_move(max(depths))
        self.chunks, self._into = (
            stack.enter_context(RandomChunks(group, CHUNK_TOKENS, count)) for _ in range(2)
        )

    def filled_queue(self, open_tier: OpenTier) -> TierQueue:
        """Return the queue of a new tier that holds all chunks."""
        tier = self._stack.enter_context(open_tier(self.chunks))
        queue = self._stack.enter_context(open_queue(tier, self._kind))
        store_all(queue, self.chunks, len(self.chunks), depth=8)
        return queue

    def store(self, depth: int, open_tier: OpenTier, target: float, limits: Sequence[Mover]) -> TierCase:
        """Return the case of storing chunks in new tiers."""
        moved_bytes = chunks_per_move(depth) * self.chunks.chunk_bytes
        ours = CallMover("kvferry", moved_bytes, partial(self._store, open_tier, depth))
        return TierCase(self._kind, "store", depth, target, ours, tuple(limits))

    def load(
        self,
        depth: int,
        queue: TierQueue,
        target: float,
        limits: Sequence[Mover],
        *controls: Mover,
        direction: str = "load",
    ) -> TierCase:
        """Return the case of loading chunks with a `filled_queue`."""
        ours = load_mover(queue, self.chunks, self._into, depth)
        return TierCase(self._kind, direction, depth, target, ours, tuple(limits), controls)

    def _store(self, open_tier: OpenTier, depth: int) -> float:
        with open_tier(self.chunks) as tier, open_queue(tier, self._kind) as queue:
            return store_all(queue, self.chunks, chunks_per_move(depth), depth)


def _run_all(queue: TierQueue, count: int, depth: int, begin: Callable[[int], None]) -> float:
    begun = ended = 0
    started = time.perf_counter()
    while ended < count:
        # Like loads of an engine, which begin as others end.
        while begun < count and begun - ended < depth:
            begin(begun)
            begun += 1
        for done in queue.done():
            # A store that found the chunk there has not written it, and its time means nothing.
            expected = GetOutcome.HIT if isinstance(done.what, GetOutcome) else PutOutcome.STORED
            if done.what is not expected:
                raise TransferError(f"{queue.name} tier: a chunk is {done.what}, expected {expected}")
            ended += 1
        # A storage that hangs would make the benchmark wait for good.
        if queue.reads.stuck or queue.writes.stuck:
            raise TransferError(f"{queue.name} tier: nothing has ended for seconds")
        if ended < count:
            time.sleep(_POLL_SECONDS)
    return time.perf_counter() - started
