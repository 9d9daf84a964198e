"""The hit rate of host memory for many capacities, in as few passes over a trace as the policy allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import ceil, log2

from kvferry.replay.content import in_batches, keys_of_each
from kvferry.replay.curve import CurvePoint, StackDistances
from kvferry.replay.simulation import Simulation
from kvferry.replay.tier import UNLIMITED
from kvferry.replay.trace.request import TraceRequest

_LEAST_CHUNKS = 64
_PER_DOUBLING = 4
_PASSES = 8


def hit_rate_curve(passes: Iterator[Iterable[TraceRequest]], replayed: Simulation) -> list[CurvePoint]:
    """Return the hit rate of one engine by the capacity of its host memory, without other caches.

    One pass is enough for the policy `lru` and a model with one KV cache group. Otherwise the trace is
    replayed for each of `_PASSES` capacities.

    Args:
        passes: yields the requests of the trace, once for each pass.
        replayed: replay of the same trace, which bounds the capacities.
    """
    model, settings = replayed.model, replayed.settings
    least = _LEAST_CHUNKS * max(group.chunk_bytes for group in model.groups)
    stored = sum(counts.stored_bytes for tier in replayed.tiers[0] for counts in tier.counts)
    largest = max(stored, 2 * least)
    if settings.policy == "lru" and len(model.groups) == 1:
        capacities = capacities_up_to(largest, least)
        distances = StackDistances(model.groups[0].chunk_bytes, model.chunk_tokens, capacities)
        seen = 0
        for batch in in_batches(next(passes)):
            for request, keys in zip(batch, keys_of_each(batch, model.chunk_tokens, 1), strict=True):
                distances.add(request, keys, counted=seen >= settings.skip)
                seen += 1
        return distances.points()
    found = []
    for capacity in capacities_up_to(largest, least, _PASSES):
        host = replace(settings.tiers[0], capacity_bytes=min(capacity, UNLIMITED))
        alone = replace(settings, tiers=(host,), engines=1, engine_blocks=0, prefill_tokens_per_second=0.0)
        simulation = Simulation(model, alone, 1)
        found.append(CurvePoint(capacity, simulation.run(next(passes)).hit_rate))
    return found


def capacities_up_to(largest: int, least: int, most: int = 0) -> list[int]:
    """Return capacities from `least` to `largest` bytes, by equal factors.

    >>> capacities_up_to(1024, 256), capacities_up_to(1024, 256, 3)
    ([256, 304, 362, 431, 512, 609, 724, 861, 1024], [256, 512, 1024])

    Args:
        largest, least: limits in bytes.
        most: number of capacities; 0 for a factor of at most 2^(1/4).
    """
    steps = most - 1 if most else max(ceil(_PER_DOUBLING * log2(largest / least)), 1)
    return [round(least * (largest / least) ** (number / steps)) for number in range(steps)] + [largest]
