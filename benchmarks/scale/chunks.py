"""Case: chunks in host memory.

The chunks are in the index that a scheduler keeps: the host tier with its slots and its eviction policy, and
the key table in which all tiers are looked up. No chunk has bytes.

- *insert*: reserve a slot and commit it, from an empty tier to a full one, with all growth of the tables.
- *look up*: find the chunks of prompts of 32,768 tokens (128 chunks), per chunk. Up to 256 prompts are looked
  up in turn, as many as the tier has. Their keys exist already.
- *replace*: reserve and commit a slot in the full tier, which evicts the chunk that was not used for longest.
- *memory*: what Python and numpy allocate while a tier is filled, with the keys (tracemalloc). An empty tier
  takes 1 MiB for the keys of recently evicted chunks, which is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import numpy as np

from benchmarks.offload.sources import chunks_of, model
from benchmarks.scale.case import Case, Figures
from benchmarks.scale.memory import traced_bytes
from benchmarks.scale.result import Measure
from kvferry.cache.chunk_cache import ChunkCache
from kvferry.cache.prompt_chunks import PromptChunks
from kvferry.geometry import GroupKind
from kvferry.keys.chunk import KEY_BYTES, ChunkKeys
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.host.settings import HostSettings
from kvferry.tiers.host.tier import HostTier
from kvferry.tiers.index import KeyTable
from kvferry.tools.bench.rank_chunks import CHUNK_TOKENS

_PROMPT_CHUNKS, _LOOK_UPS, _REPLACED = 128, 256, 20_000
_SLOT_BYTES = 4096
_VOCABULARY = 128_000
_SPARE_SLOTS = 4096
_GROUPS = chunks_of(model("chunks", (GroupKind.FULL,))).groups


@contextmanager
def _prepare(size: int) -> Iterator[Callable[[], Figures]]:
    """Yield a function that measures one round with `size` chunks."""
    draw = np.random.default_rng(3)
    prompts = [
        PromptChunks(_GROUPS, ChunkKeys(CHUNK_TOKENS, draw.integers(0, _VOCABULARY, tokens)))
        for tokens in _prompt_tokens(size)
    ]
    known = [one.key(0, number) for one in prompts for number in range(len(one.keys.chunks()))]
    keys = known + _random_keys(draw, size - len(known))
    keys = [keys[at] for at in draw.permutation(len(keys)).tolist()]
    new = _random_keys(draw, min(size, _REPLACED) + _SPARE_SLOTS)
    yield partial(_round, keys, new, prompts)


def _round(keys: Sequence[bytes], new: Sequence[bytes], prompts: Sequence[PromptChunks]) -> Figures:
    host = _empty_tier(len(keys))
    began = time.perf_counter()
    _insert(host, keys)
    inserted = time.perf_counter() - began
    cache = ChunkCache(host, _no_memory, _GROUPS)
    numbers = cache.tier_numbers
    tokens = len(prompts[0].keys)
    began = time.perf_counter()
    for number in range(_LOOK_UPS):
        prompts[number % len(prompts)].look_up(tokens, 0, numbers)
    looked = time.perf_counter() - began
    # A few slots are spare, because the arena is divided into slabs.
    spare = next(at for at, key in enumerate(new) if _insert(host, (key,)) and host.counters.evicted)
    new = new[spare + 1 :]
    began = time.perf_counter()
    _insert(host, new)
    replaced = time.perf_counter() - began
    return {
        "insert": inserted / len(keys),
        "look up": looked / (_LOOK_UPS * (tokens // CHUNK_TOKENS)),
        "replace": replaced / len(new),
    }


def _memory(size: int) -> Figures:
    host = _empty_tier(size)

    def make() -> object:
        keys = _random_keys(np.random.default_rng(4), size)
        _insert(host, keys)
        return keys

    return {"memory": traced_bytes(make) / size}


def _insert(host: HostTier, keys: Sequence[bytes]) -> int:
    """Store chunks without bytes. Return the number of chunks that were stored."""
    stored = 0
    for key in keys:
        if (slot := host.reserve(key, 0)) is not None:
            stored += host.commit(slot)
    return stored


def _empty_tier(size: int) -> HostTier:
    policy = EVICTION_POLICIES[HostSettings().eviction_policy]
    return HostTier(_SLOT_BYTES * size, [_SLOT_BYTES], policy, KeyTable())


def _prompt_tokens(size: int) -> list[int]:
    """Return the lengths of the prompts whose chunks are in a tier of `size` chunks, in tokens."""
    chunks = min(_PROMPT_CHUNKS, size)
    return [chunks * CHUNK_TOKENS] * max(1, min(_LOOK_UPS, size // chunks))


def _random_keys(draw: np.random.Generator, count: int) -> list[bytes]:
    """Return keys of chunks in KV cache group 0."""
    made = np.frombuffer(draw.bytes(KEY_BYTES * count), np.uint8).reshape(count, KEY_BYTES).copy()
    made[:, -1] = 0
    data = made.tobytes()
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]


def _no_memory(offset: int, size: int) -> NoReturn:
    raise NotImplementedError("chunks that are only looked for have no bytes")


CASE = Case(
    name="chunks",
    noun="chunks",
    sizes=(1_000, 10_000, 100_000, 1_000_000),
    measures=(
        Measure(name="insert", label="insert {n} chunks", per="chunk", unit="seconds"),
        Measure(
            name="look up", label="look up a prompt among {n} chunks", per="chunk looked up", unit="seconds"
        ),
        Measure(name="replace", label="replace a chunk, evicting one of {n}", per="chunk", unit="seconds"),
        Measure(name="memory", label="memory for the index of {n} chunks", per="chunk", unit="bytes"),
    ),
    prepare=_prepare,
    once=_memory,
)
