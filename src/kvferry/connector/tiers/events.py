"""Events about tiers: what they have read, stored and evicted, and which of the engine's blocks they hold.

Block events let a router send a request to where its KV is. A router knows a block by the hash that the
engine's prefix cache gives it. A tier knows a chunk by its key, and an engine computes both only while it has
the request. So `BlockEvents` remembers the blocks of each chunk that a request had, from the first step in
which the request's chunk was complete:

    remember ─▶ [BlocksStored of a tier ─▶ BlocksRemoved of that tier …] ─▶ forgotten

A chunk of an earlier run, or of another engine, has no blocks here until a request of this engine has its
tokens. A chunk beyond `MOST_CHUNKS` or `MOST_TOKENS` is reported as removed, although tiers still hold it: a
router then underestimates this engine, and never sends a request in vain.

A block belongs to the chunk in which it ends, because a chunk may be shorter than a block. Tiers evict the
chunks of a prompt from its end, so they then have the chunks before too. Whole chunks and the incomplete last
chunks of prompts share blocks. A block is reported as stored in a tier with the first chunk that covers it,
and as removed with the last one.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.cache.chunk_cache import ChunkCache, PromptChunk
from kvferry.cache.prompt_chunks import ChunkBeginnings
from kvferry.connector.engine import BlockRun, DescribeBlocks, Request
from kvferry.connector.events import BlocksRemoved, BlocksStored, EventStream, TierChanged, log_errors
from kvferry.tiers.host.settings import HostDropReason
from kvferry.tiers.index import KeyTable, tag_of
from kvferry.tiers.names import HOST, PutOutcome
from kvferry.tiers.tenants import TenantUsage

MOST_CHUNKS = 1 << 14
"""Maximum number of chunks whose blocks are remembered."""

MOST_TOKENS = MOST_CHUNKS * 256
"""Maximum number of tokens of these chunks. A chunk counts once for each of its KV cache groups."""


class TierEvents:
    """Emits an event for every tier in each step in which any tier has changed."""

    def __init__(self, cache: ChunkCache, not_stored: Counter[str], events: EventStream) -> None:
        """Begin before the first change. `not_stored` is `StoreOrders.dropped`."""
        self._cache, self._not_stored, self._events = cache, not_stored, events
        self._totals: dict[str, TierChanged] = {}  # of each tier at its last event, since the engine's start
        self._last_fingerprint: tuple[object, ...] = ()

    @log_errors
    def emit_changes(self) -> None:
        """Emit a `TierChanged` event for every tier if any tier has changed since the last call."""
        cache, host = self._cache, self._cache.host
        # Called in every engine step: the fingerprint takes half a microsecond, and all counts take much
        # longer. It is taken before them, so that the next call sees concurrent changes.
        fingerprint = (cache.events, *[one.usage for one in cache.slow_tiers])
        if fingerprint == self._last_fingerprint:
            return
        self._last_fingerprint = fingerprint
        counters, counts = host.counters, cache.counts
        dropped = {str(why): n for why, n in counters.dropped.items() if why is not HostDropReason.PRESENT}
        self._emit_since_last(
            TierChanged(
                time.monotonic(),
                HOST,
                used=host.used_bytes,
                capacity=host.capacity_bytes,
                fetched=counts.fetched[HOST],
                stored=counters.stored,
                stored_bytes=counters.stored_bytes,
                evicted=counters.evicted,
                dropped=(*dropped.items(), *self._not_stored.items()),
                fetch_seconds=tuple(cache.copy_seconds),
                tenants=_of_tenants(host.tenants),
            )
        )
        cache.copy_seconds.clear()
        for slow in cache.slow_tiers:
            name, stats = slow.name, slow.tier.stats
            dropped = {str(put): n for put, n in stats.dropped.items()}
            # The operator wants it so, and an alert watches dropped chunks.
            declined = Counter({str(why): n for why, n in slow.filter.declined.items()})
            over_budget = str(PutOutcome.OVER_BUDGET)
            declined[over_budget] += (beyond := dropped.pop(over_budget, 0))
            self._emit_since_last(
                TierChanged(
                    time.monotonic(),
                    name,
                    used=slow.usage.used,
                    capacity=slow.usage.capacity,
                    owed=len(slow),
                    fetched=counts.fetched[name],
                    stored=sum(stats.puts.values()) - sum(dropped.values()) - beyond,
                    stored_bytes=stats.stored_bytes,
                    evicted=stats.evicted,
                    missed=tuple((str(miss), n) for (tier, miss), n in counts.missed.items() if tier == name),
                    declined=tuple((why, n) for why, n in declined.items() if n),
                    dropped=(*dropped.items(), ("left host memory before its turn", slow.lost)),
                    fetch_seconds=tuple(slow.read_seconds),
                    store_seconds=tuple(slow.write_seconds),
                    served=slow.usage.served,
                    served_bytes=slow.usage.served_bytes,
                    refused=slow.usage.refused,
                    address=slow.usage.address,
                    tenants=_of_tenants(slow.usage.tenants),
                )
            )
            slow.read_seconds.clear()
            slow.write_seconds.clear()

    def _emit_since_last(self, now: TierChanged) -> None:
        """Emit the event of a tier. `now` has its counts since the engine's start."""
        last = self._totals.get(now.tier, TierChanged(0.0, now.tier))
        self._totals[now.tier] = now
        before = {label: evicted for label, _, evicted in last.tenants}
        self._events.emit(
            replace(
                now,
                fetched=now.fetched - last.fetched,
                stored=now.stored - last.stored,
                stored_bytes=now.stored_bytes - last.stored_bytes,
                evicted=now.evicted - last.evicted,
                served=now.served - last.served,
                served_bytes=now.served_bytes - last.served_bytes,
                refused=now.refused - last.refused,
                missed=tuple((Counter(dict(now.missed)) - Counter(dict(last.missed))).items()),
                dropped=tuple((Counter(dict(now.dropped)) - Counter(dict(last.dropped))).items()),
                declined=tuple((Counter(dict(now.declined)) - Counter(dict(last.declined))).items()),
                tenants=tuple(
                    (label, used, evicted - before.get(label, 0)) for label, used, evicted in now.tenants
                ),
            )
        )


def _of_tenants(tenants: Mapping[str, TenantUsage]) -> tuple[tuple[str, int, int], ...]:
    return tuple((label, usage.used_bytes, usage.evicted) for label, usage in tenants.items())


@dataclass(slots=True)
class _Chunk:
    """The blocks of one chunk."""

    chunk: PromptChunk
    runs: Sequence[BlockRun]  # blocks that end in it
    begin: int  # position of its first token in the prompt
    beginnings: Sequence[bytes]  # keys of its beginnings; none if no prefix may end inside it
    tiers: int = 0  # bits of the tiers for which the blocks are reported as stored

    @property
    def tokens(self) -> int:
        return sum(len(run.tokens) for run in self.runs)


class BlockEvents:
    """Remembers the engine's blocks of each chunk, and emits events when a tier gains or loses the chunk.

    While a block is reported as stored, a prompt that shares only the tokens up to its end can load them: the
    chunk is found by its beginnings too. Only the engine's thread calls it.

    Attributes:
        beginnings: the chunks whose blocks are reported as stored in some tier, by their beginnings.
    """

    def __init__(
        self,
        describe: DescribeBlocks,
        table: KeyTable,
        tiers: Mapping[int, str],
        events: EventStream,
        block_tokens: int,
        most_chunks: int = MOST_CHUNKS,
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        """Watch a key table. No chunk is remembered yet.

        Args:
            table: table of the tiers' chunks. Nobody else may watch it.
            tiers: names of the tiers, by their bits in `table`.
            block_tokens: number of tokens per block of the engine; the least common multiple if its KV cache
                groups differ.
        """
        self._describe, self._table, self._tiers = describe, table, tiers
        self._events, self._most_chunks, self._most_tokens = events, most_chunks, most_tokens
        self.beginnings = ChunkBeginnings(block_tokens)
        self._tokens = 0  # of all remembered chunks
        self._chunks: OrderedDict[int, _Chunk] = OrderedDict()  # by tag, the least recently used first
        self._holders: Counter[tuple[int, int, bytes]] = Counter()  # chunks by (tier bit, group, block hash)
        self._watch = table.watch(self._chunks)

    @log_errors
    def remember(
        self,
        request: Request,
        chunk: PromptChunk,
        spans: Sequence[tuple[int, range]],
        beginnings: Iterable[bytes] = (),
    ) -> None:
        """Remember the blocks of a chunk of a request. `emit_changes` then reports the tiers that have it.

        Args:
            spans: (index of the engine's KV cache group, range of the request's tokens) of each part of the
                chunk.
            beginnings: keys of the chunk's beginnings, which are computed only if the chunk is new here.
        """
        tag = tag_of(chunk.key)
        if tag in self._chunks:
            self._chunks.move_to_end(tag)
            return
        described = (self._describe(request, group, tokens) for group, tokens in spans)
        runs = tuple(run for run in described if run is not None)
        if not runs:
            return
        begin = min(tokens.start for _, tokens in spans)
        self._chunks[tag] = new = _Chunk(chunk, runs, begin, tuple(beginnings))
        self._tokens += new.tokens
        self._watch.changed.append(tag)  # a tier may have had the chunk before

    @log_errors
    def emit_changes(self) -> None:
        """Emit events about the chunks that tiers have gained or lost since the last call."""
        watch = self._watch
        if not (watch.changed or watch.cleared):
            return
        # The table does not name the chunks that it lost when it was cleared, so all are looked up again.
        if watch.cleared:
            watch.cleared = False
            watch.changed.extend(self._chunks)
        tags = list(dict.fromkeys(watch.changed.popleft() for _ in range(len(watch.changed))))
        removed: dict[tuple[str, int], list[bytes]] = defaultdict(list)
        while len(self._chunks) > self._most_chunks or self._tokens > self._most_tokens:
            _, chunk = self._chunks.popitem(last=False)
            self._tokens -= chunk.tokens
            self._remove(chunk, chunk.tiers, removed)
        bits = self._table.tier_bits(np.array(tags, np.uint64)).tolist() if tags else ()
        changes = [
            (self._chunks[tag], now) for tag, now in zip(tags, bits, strict=True) if tag in self._chunks
        ]
        for chunk, now in changes:
            self._remove(chunk, chunk.tiers & ~now, removed)
        # Removals come first: a block that one chunk loses may come back with another chunk.
        self._emit_removed(removed)
        # A router that keeps a tree of blocks drops a block whose parent it does not know.
        for chunk, now in sorted(changes, key=lambda change: change[0].begin):
            self._add(chunk, now & ~chunk.tiers)

    @log_errors
    def start_anew(self) -> None:
        """Forget all chunks and report their blocks as removed, because no request can load them any more."""
        removed: dict[tuple[str, int], list[bytes]] = defaultdict(list)
        for chunk in self._chunks.values():
            self._remove(chunk, chunk.tiers, removed)
        self._chunks.clear()
        self._tokens = 0
        self._emit_removed(removed)

    def _add(self, chunk: _Chunk, bits: int) -> None:
        """Emit an event for each run of blocks that only this chunk brings to the tiers of these bits."""
        if bits and not chunk.tiers:
            self.beginnings.add(chunk.chunk, chunk.beginnings)
        chunk.tiers |= bits
        for bit, tier in self._tiers.items():
            if not bits & bit:
                continue
            for run in chunk.runs:
                places = [(bit, run.group, name) for name in run.hashes]
                new = [place not in self._holders for place in places]
                self._holders.update(places)
                for part in run.parts(new):
                    self._events.emit(BlocksStored(time.monotonic(), tier, part))

    def _remove(self, chunk: _Chunk, bits: int, removed: dict[tuple[str, int], list[bytes]]) -> None:
        """Add to `removed` the blocks that the tiers of these bits lose with this chunk."""
        if chunk.tiers and not chunk.tiers & ~bits:
            self.beginnings.discard(chunk.chunk, chunk.beginnings)
        chunk.tiers &= ~bits
        for bit, tier in self._tiers.items():
            if not bits & bit:
                continue
            for run in chunk.runs:
                for name in run.hashes:
                    place = (bit, run.group, name)
                    self._holders[place] -= 1
                    if not self._holders[place]:
                        del self._holders[place]
                        removed[tier, run.group].append(name)

    def _emit_removed(self, removed: Mapping[tuple[str, int], Sequence[bytes]]) -> None:
        for (tier, group), hashes in removed.items():
            self._events.emit(BlocksRemoved(time.monotonic(), tier, group, tuple(hashes)))
