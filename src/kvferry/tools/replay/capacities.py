"""The hit rate for many capacities of host memory, in as few passes over a trace as the policy allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import ceil, log2

from kvferry.tools.replay.content import RequestKeys, in_batches
from kvferry.tools.replay.curve import CurvePoint, StackDistances
from kvferry.tools.replay.engine_cache import EngineCache
from kvferry.tools.replay.pool import BlockPool
from kvferry.tools.replay.simulation import Simulation
from kvferry.tools.replay.tier import UNLIMITED
from kvferry.tools.replay.trace.request import TraceRequest

_LEAST_CHUNKS = 64
_PER_DOUBLING = 4
# Each pass replays the whole trace.
_PASSES = 8


def hit_rate_curve(passes: Iterator[Iterable[TraceRequest]], replayed: Simulation) -> list[CurvePoint]:
    """Return the hit rate of one engine by the capacity of its host memory, without slower tiers.

    The engine has the pools of all engines of the replay.

    Args:
        passes: yields the requests of the trace, once for each pass.
        replayed: replay of the same trace, which bounds the capacities.
    """
    model, settings = replayed.model, replayed.settings
    least = _LEAST_CHUNKS * max(group.chunk_bytes for group in model.groups)
    stored = sum(counts.stored_bytes for tier in replayed.tiers[0] for counts in tier.counts)
    largest = max(stored, 2 * least)
    pool = BlockPool(settings.pool.blocks * settings.engines)
    # One pass is enough if the chunks form a stack and all of them have one size (`curve`).
    if settings.policy == "lru" and model.has_one_row:
        capacities = capacities_up_to(largest, least)
        distances = StackDistances(model.groups[0].chunk_bytes, model.chunk_tokens, capacities)
        cache = EngineCache(model, pool.blocks, replayed.unit_tokens)
        for number, looked_up in enumerate(_looked_up(cache, next(passes))):
            distances.add(*looked_up, counted=number >= settings.skip)
        return distances.points()
    found = []
    for capacity in capacities_up_to(largest, least, _PASSES):
        host = replace(settings.tiers[0], capacity_bytes=min(capacity, UNLIMITED))
        alone = replace(settings, tiers=(host,), engines=1, pool=pool, prefill_tokens_per_second=0.0)
        simulation = Simulation(model, alone, replayed.unit_tokens)
        found.append(CurvePoint(capacity, simulation.run(next(passes)).hit_rate))
    return found


def _looked_up(
    cache: EngineCache, requests: Iterable[TraceRequest]
) -> Iterator[tuple[TraceRequest, RequestKeys, int]]:
    """Yield (request, keys of its chunks, number of tokens of its prompt that the engine has).

    The engine serves one request after the other, and `cache` keeps every one.
    """
    for batch in in_batches(requests):
        for request, keys, runs in zip(batch, *cache.keys_of_each(batch), strict=True):
            yield request, keys, cache.look_up(request.prompt_tokens, runs).tokens
            cache.keep(request, runs, (), 0)


def capacities_up_to(largest: int, least: int, most: int = 0) -> list[int]:
    """Return capacities from `least` to `largest` bytes, by equal factors.

    >>> capacities_up_to(1024, 256), capacities_up_to(1024, 256, 3)
    ([256, 304, 362, 431, 512, 609, 724, 861, 1024], [256, 512, 1024])

    Args:
        most: number of capacities; 0 for a factor of at most 2^(1/4).
    """
    steps = most - 1 if most else max(ceil(_PER_DOUBLING * log2(largest / least)), 1)
    return [round(least * (largest / least) ** (number / steps)) for number in range(steps)] + [largest]
