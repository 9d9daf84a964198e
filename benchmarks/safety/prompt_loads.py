"""Load a prompt from files into the KV blocks of a rank in the same way as an engine.

The scheduler's cache lets the tier's threads read the chunks into host memory. The rank's thread copies each
complete chunk to the blocks. An engine passes complete chunks to the rank once per step; here this happens
every 200 µs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kvferry.cache.chunk_cache import ChunkCache, Fetch, PromptChunk
from kvferry.cache.tier_queue import TierQueue
from kvferry.common.errors import TransferError
from kvferry.connector.bids import Bid
from kvferry.connector.messages import ArenaCard, Load, LoadOrder, MachineRanks, Piece, StoreOrder
from kvferry.connector.mover import ChunkMover
from kvferry.geometry.canonical import canonical_form_of
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.files.tier import FileSettings, FileTier
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.format.decode import chunk_group
from kvferry.tiers.format.encryption import EncryptionKeys
from kvferry.tiers.host.tier import HostTier, Slot
from kvferry.tiers.index import KeyTable
from kvferry.tiers.names import TIERS, GetOutcome, PutOutcome
from kvferry.tools.bench.rank_chunks import CHUNK_TOKENS, RankPair
from kvferry.tools.bench.storage_chunks import bench_namespace
from kvferry.tools.models import ModelReading
from kvferry.tools.plan.side import EngineSide

_POLL_SECONDS = 200e-6
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """The times of one load, in seconds.

    Attributes:
        wall: elapsed time.
        cpu: CPU time of the threads that read and copy, without that of the thread that waits for them.
    """

    wall: float
    cpu: float


class PromptLoads:
    """Loads a prompt's chunks from a directory with the cache and the rank of an engine.

    Attributes:
        chunks: number of chunks of the prompt.
        chunk_bytes: size of a chunk, in bytes.
        group: format of a chunk as a file.
    """

    def __init__(self, ranks: RankPair, store: FileTier, group: ChunkGroup, mover: ChunkMover) -> None:
        """Store the prompt in the tier. Callers use `prompt_in_files` instead.

        Args:
            ranks: rank that holds the prompt, empty rank, and host memory of the cache.
            store: empty file tier.
            group: format of a chunk as a file.
            mover: object that copies chunks to the blocks of the empty rank.

        Raises:
            TransferError: a chunk cannot be stored.
        """
        self._ranks, self._store, self.group, self._mover = ranks, store, group, mover
        self.chunks, self.chunk_bytes = ranks.chunks, ranks.chunk_bytes
        self._keys = [blake2b(b"%d" % number, digest_size=32).digest() for number in range(self.chunks)]
        self._load = Load(
            key="prompt",
            request_id="prompt",
            attempt="prompt",
            loads=1,
            bid=Bid(TIERS, ()),
            span=ranks.span,
            tables=ranks.load_tables,
            timeout_seconds=_PATIENCE_SECONDS,
            began=0.0,
        )
        self._fill(store)
        geometry = ranks.destination.geometry
        canonical = canonical_form_of([geometry], CHUNK_TOKENS)
        host = HostTier(
            ranks.arena.region.length, [self.chunk_bytes], EVICTION_POLICIES["lru"], store.keys.table
        )
        self._cache = ChunkCache(
            host, ranks.arena.bytes_at, canonical.groups, [TierQueue(store, FileSettings.kind)]
        )
        machine = MachineRanks((geometry,), canonical, ranks.arena.handle)
        mover.attach(ArenaCard((machine,), ranks.arena.region.length))

    def close(self) -> None:
        """Stop the tier's threads."""
        self._cache.shutdown(_PATIENCE_SECONDS)

    def load(self) -> LoadTimes:
        """Clear host memory, load the prompt from the files, and return the times.

        Raises:
            TransferError: a chunk was not loaded.
        """
        self._cache.clear()
        wall, cpu = time.perf_counter(), _others_cpu()
        fetch = self._cache.fetch(
            [PromptChunk(0, number, key, CHUNK_TOKENS) for number, key in enumerate(self._keys)]
        )
        copying: dict[str, Sequence[Slot]] = {}
        while copying or not fetch.over:
            time.sleep(_POLL_SECONDS)
            self._cache.poll()
            self._hand_over(fetch, copying)
            for key, moved in self._mover.take_reports():
                if moved.failure is not None:
                    raise TransferError(f"a chunk was not copied to its blocks: {moved.failure}")
                for slot in copying.pop(key):
                    self._cache.host.close(slot)
            if time.perf_counter() - wall > _PATIENCE_SECONDS:
                raise TransferError(f"a prompt has not come within {_PATIENCE_SECONDS:g} s")
        if fetch.failure is not None:
            raise TransferError(f"a prompt did not come: {fetch.failure}")
        return LoadTimes(time.perf_counter() - wall, _others_cpu() - cpu)

    def read(self, number: int) -> float:
        """Read one chunk from its file into host memory in this thread, and return the CPU time in seconds.

        Raises:
            TransferError: the chunk was not read.
        """
        self._cache.clear()
        into = self._ranks.arena.bytes_at(number * self.chunk_bytes, self.chunk_bytes)
        cpu = time.thread_time()
        what = self._store.get(self._keys[number], self.group, into)
        seconds = time.thread_time() - cpu
        if what is not GetOutcome.HIT:
            raise TransferError(f"a chunk that was just stored is {what}; check this machine's memory")
        return seconds

    def check(self) -> None:
        """Load the prompt into empty blocks, and compare all blocks.

        Raises:
            TransferError: wrong bytes arrived.
        """
        self._ranks.clear()
        self.load()
        self._ranks.check()

    def _fill(self, store: FileTier) -> None:
        ranks = self._ranks
        offsets = [number * self.chunk_bytes for number in range(self.chunks)]
        pieces = tuple(Piece(0, number, offset) for number, offset in enumerate(offsets))
        ranks.routes(stores=True).store(StoreOrder("", pieces, ranks.store_tables, range(ranks.tokens)))
        for key, offset in zip(self._keys, offsets, strict=True):
            done = store.put(key, self.group, ranks.arena.bytes_at(offset, self.chunk_bytes))
            if done is not PutOutcome.STORED:
                raise TransferError(f"a chunk is {done}, expected {PutOutcome.STORED}")

    def _hand_over(self, fetch: Fetch, copying: dict[str, Sequence[Slot]]) -> None:
        """Let the rank copy the chunks that are complete in host memory.

        Args:
            fetch: chunks that are being read.
            copying: slots of the chunks that are being copied, by the key of the copy. Mutated.
        """
        if ready := fetch.take():
            key, first = str(ready[0][0].number), not copying
            pieces = tuple(sorted((Piece(0, w.number, s.offset) for w, s in ready), key=lambda p: p.number))
            copying[key] = [slot for _, slot in ready]
            self._mover.load(self._load, LoadOrder(key, pieces, first))


def _others_cpu() -> float:
    """Return the CPU time of all threads of this process but this one, in seconds."""
    return time.process_time() - time.thread_time()


@contextmanager
def prompt_in_files(
    reading: ModelReading, tokens: int, folder: Path, encryption: EncryptionKeys | None = None
) -> Iterator[PromptLoads]:
    """Store a prompt in files, and yield the object that loads it.

    Args:
        reading: description of the model's KV cache.
        tokens: length of the prompt in tokens. Only whole chunks are stored, and at least one.
        folder: empty folder for the files.
        encryption: keys of the files; None if they are not encrypted.

    Raises:
        ConfigError: memory or the folder cannot be used.
        TransferError: a chunk cannot be stored.
    """
    with ExitStack() as stack:
        ranks = stack.enter_context(RankPair(reading, EngineSide(), max(tokens // CHUNK_TOKENS, 1)))
        (canonical,) = canonical_form_of([ranks.source.geometry], CHUNK_TOKENS).groups
        group = chunk_group(canonical, CHUNK_TOKENS)
        capacity = 2 * ranks.chunks * ranks.chunk_bytes
        store = FileTier(
            folder, bench_namespace(group), capacity=capacity, encryption=encryption, table=KeyTable()
        )
        mover = ChunkMover((0, 0))
        stack.callback(mover.close)
        loads = PromptLoads(ranks, store, group, mover)
        stack.callback(loads.close)
        yield loads
