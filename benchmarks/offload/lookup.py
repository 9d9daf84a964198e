"""Measure the time in which the scheduler looks up the chunks of a long prompt in a large index.

The token ids of a new prompt are digested once. The chunks are looked up once, and a second time as in every
further admission attempt of a waiting request. The index is like the file tier's. It has a million chunks,
and host memory has some of them. Prompts whose chunks are in host memory, in files or nowhere are measured
separately. The index has keys only: no chunk has bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.cache.prompt_chunks import PromptChunks
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.keys.chunk import ChunkKeys
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.host.tier import HostTier
from kvferry.tiers.index import KeyTable, TierKeys
from kvferry.tiers.names import GetOutcome, PutOutcome, TierStats
from kvferry.tiers.storage_tier import StorageTier
from kvferry.tools.bench.rank_chunks import CHUNK_TOKENS
from kvferry.tools.bench.storage_chunks import open_queue
from kvferry.tools.measuring.rounds import Spread

PLACES = ("host", "file", "nowhere")
TARGET_SECONDS = 3e-3
NO_TIER = PLACES[-1]
_HOST_SHARE = 16
_KEY_BYTES = 32
_SLOT_BYTES = 4096
_VOCABULARY = 128_000


@dataclass(frozen=True, slots=True)
class LookUpTimes:
    """The times to look up prompts whose chunks are all in one place.

    Attributes:
        place: place of the chunks, one of `PLACES`.
        tokens: number of tokens found.
        first, again: times of the first and the second look-up of a prompt, in seconds.
    """

    place: str
    tokens: int
    first: Spread
    again: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUpResults:
    """The times to look up prompts in all places.

    Attributes:
        tokens, chunks: length of a prompt, in tokens and in chunks.
        stored: number of chunks in the index.
        in_host: number of chunks in host memory.
        keys: time to compute the chunks' keys from the token ids, in seconds.
        looks: times of the look-ups, one entry per place.
    """

    tokens: int
    chunks: int
    stored: int
    in_host: int
    keys: Spread
    looks: tuple[LookUpTimes, ...]

    @property
    def reached(self) -> bool:
        """Return whether the medians of all look-ups are below the target."""
        return all(max(one.first.median, one.again.median) < TARGET_SECONDS for one in self.looks)


class IndexOnlyTier(StorageTier):
    """A storage tier that has an index of keys but no chunks."""

    def __init__(self, keys: Iterable[bytes], table: KeyTable) -> None:
        self.keys = TierKeys(table)
        for key in keys:
            self.keys.add(key)

    def put(self, key: bytes, group: ChunkGroup, body: memoryview, cold: bool = False) -> PutOutcome:  # noqa: ARG002 - it keeps nothing
        """Reject the chunk, because the tier stores nothing."""
        return PutOutcome.FULL

    def get(self, key: bytes, group: ChunkGroup, into: memoryview) -> GetOutcome:  # noqa: ARG002 - it has nothing
        """Return a miss, because the tier has no chunks."""
        return GetOutcome.ABSENT

    def refresh(self) -> int:
        """Return 0 new chunks, because there is no folder to list."""
        return 0

    @property
    def stats(self) -> TierStats:
        """Return statistics in which all counts are 0."""
        return TierStats({}, {}, 0, 0, 0, 0, 0)

    def close(self) -> None:
        """Do nothing, because no file is open."""


def measure(
    group: CanonicalGroup, tokens: int, stored: int, repeats: int, progress: Callable[[str], None]
) -> LookUpResults:
    """Look up prompts whose chunks are in one place each, and return the times. The places take turns.

    Args:
        group: format of the model's chunks of `CHUNK_TOKENS` tokens.
        tokens: length of a prompt, in tokens.
        stored: number of chunks in the index.
        repeats: number of counted prompts per place. Another prompt before them is not counted.
        progress: function that is called with a line of text before each step.
    """
    progress(f"making {stored:,} chunks to look among")
    draw = np.random.default_rng(11)
    prompts = {
        place: [draw.integers(0, _VOCABULARY, tokens).tolist() for _ in range(repeats + 1)]
        for place in PLACES
    }
    keys = {place: _keys_of(group, prompts[place]) for place in PLACES if place != NO_TIER}
    others = stored - sum(map(len, keys.values()))
    random = draw.bytes(_KEY_BYTES * max(others, 0))
    made = [random[at : at + _KEY_BYTES] for at in range(0, len(random), _KEY_BYTES)]
    in_host = [*keys["host"], *made[: len(made) // _HOST_SHARE]]
    table = KeyTable()
    behind = IndexOnlyTier([*keys["file"], *in_host, *made[len(made) // _HOST_SHARE :]], table)
    with open_queue(behind, "file") as queue:
        cache = ChunkCache(_host_of(in_host, table), _no_memory, (group,), (queue,))
        progress(f"looking for prompts of {tokens:,} tokens")
        took = [
            (place, _look(group, prompts[place][n], cache)) for n in range(repeats + 1) for place in PLACES
        ]
    took = took[len(PLACES) :]
    looks = []
    for place in PLACES:
        of = [one for where, one in took if where == place]
        looks.append(
            LookUpTimes(
                place, of[0].tokens, Spread.of([t.first for t in of]), Spread.of([t.again for t in of])
            )
        )
    digesting = Spread.of([one.keys for _, one in took])
    return LookUpResults(
        tokens=tokens,
        chunks=tokens // CHUNK_TOKENS,
        stored=stored,
        in_host=len(in_host),
        keys=digesting,
        looks=tuple(looks),
    )


@dataclass(frozen=True, slots=True)
class _LookUpSeconds:
    """The times of one prompt in seconds (keys, first and second look-up), and the number of tokens found."""

    keys: float
    first: float
    again: float
    tokens: int


def _look(group: CanonicalGroup, prompt: list[int], cache: ChunkCache) -> _LookUpSeconds:
    began = time.perf_counter()
    chunks = PromptChunks((group,), ChunkKeys(CHUNK_TOKENS, prompt))
    digested = time.perf_counter()
    found = chunks.look_up(len(prompt), 0, cache.tier_numbers)
    looked = time.perf_counter()
    chunks.look_up(len(prompt), 0, cache.tier_numbers)
    again = time.perf_counter()
    return _LookUpSeconds(digested - began, looked - digested, again - looked, found.tokens)


def _keys_of(group: CanonicalGroup, prompts: Sequence[list[int]]) -> list[bytes]:
    """Return the keys of all chunks of the prompts."""
    found = []
    for prompt in prompts:
        chunks = PromptChunks((group,), ChunkKeys(CHUNK_TOKENS, prompt))
        found += [chunks.key(0, number) for number in range(len(prompt) // CHUNK_TOKENS)]
    return found


def _host_of(keys: Sequence[bytes], table: KeyTable) -> HostTier:
    """Return a host tier whose index has these keys. No memory is allocated for chunks."""
    host = HostTier(2 * _SLOT_BYTES * len(keys), [_SLOT_BYTES], EVICTION_POLICIES["lru"], table)
    for key in keys:
        slot = host.reserve(key, 0)
        if slot is not None:
            host.commit(slot)
    return host


def _no_memory(offset: int, size: int) -> memoryview:
    raise NotImplementedError("chunks that are only looked for have no bytes")
