"""The outcome of a replay as values: for text, JSON and pictures alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvferry.tools.replay.curve import CurvePoint, curve_as_json
from kvferry.tools.replay.lookup import TierCounts
from kvferry.tools.replay.settings import UNLIMITED
from kvferry.tools.replay.simulation import Simulation
from kvferry.tools.replay.trace.base import ONLY_LENGTHS


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOutcome:
    """The outcome of a replay for one kind of tier, over all engines.

    Attributes:
        capacity_bytes: capacity of one such tier in bytes; None for no limit.
        tiers: number of such tiers: one per engine, or 1 if all engines share it.
        counts: numbers of chunks and bytes, over all such tiers. Requests that are not counted are included.
    """

    name: str
    capacity_bytes: int | None
    tiers: int
    hit_tokens: int
    counts: TierCounts
    group_counts: tuple[TierCounts, ...]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a replay that has ended or was interrupted.

    Attributes:
        curve: hit rate by capacity of host memory; empty if it was not computed.
        tells_prefixes: False if the trace has only lengths, so that its hit rate means nothing.
    """

    simulation: Simulation
    trace: str
    complete: bool
    curve: tuple[CurvePoint, ...] = ()
    tells_prefixes: bool = True

    @cached_property
    def tiers(self) -> tuple[TierOutcome, ...]:
        """Outcome of each kind of tier, host memory first."""
        return tuple(map(self._tier, range(len(self.simulation.tiers))))

    def _tier(self, number: int) -> TierOutcome:
        setting, same = self.simulation.settings.tiers[number], self.simulation.tiers[number]
        counts = zip(*(tier.counts for tier in same), strict=True)
        groups = tuple(map(TierCounts.sum, counts))
        return TierOutcome(
            name=setting.kind,
            capacity_bytes=None if setting.capacity_bytes == UNLIMITED else setting.capacity_bytes,
            tiers=len(same),
            hit_tokens=self.simulation.results.tier_tokens[number],
            counts=TierCounts.sum(groups),
            group_counts=groups,
        )


def as_json(found: Outcome) -> dict[str, Any]:
    """Return an outcome as values that can be written as JSON. docs/replay.md explains every key.

    Sizes are in bytes, times in seconds, lengths in tokens, and rates are shares from 0 to 1. Hits are None
    if the trace has only lengths.
    """
    simulation = found.simulation
    results, settings = simulation.results, simulation.settings
    prompt = max(results.prompt_tokens, 1)
    known = found.tells_prefixes

    # With lengths alone every prompt looks new, and a hit rate of 0 would be wrong.
    def told(value: float) -> float | None:
        return value if known else None

    return {
        "trace": found.trace,
        "unit_tokens": simulation.unit_tokens,
        "complete": found.complete,
        "why_no_hit_rate": None if known else f"the trace {ONLY_LENGTHS}",
        "model": simulation.model.name,
        "chunk_tokens": simulation.model.chunk_tokens,
        "engines": settings.engines,
        "engine_blocks": settings.pool.blocks,
        "engine_blocks_source": settings.pool.source,
        "policy": settings.policy,
        "route": settings.route,
        "requests": results.requests,
        "seconds": results.seconds,
        "prompt_tokens": results.prompt_tokens,
        "output_tokens": results.output_tokens,
        "hit_rate": told(results.hit_rate),
        "unit_hit_rate": told(results.unit_hit_rate),
        "hit_tokens": told(results.hit_tokens),
        "computed_tokens": told(results.prompt_tokens - results.hit_tokens),
        "local_tokens": told(results.local_tokens),
        "lost_tokens": told(results.lost_tokens),
        "tiers": [
            {
                **_tier(one, simulation),
                "hit_tokens": told(one.hit_tokens),
                "hit_rate": told(one.hit_tokens / prompt),
            }
            for one in found.tiers
        ],
        "groups": [
            {"label": group.label, "hit_rate": told(tokens / prompt)}
            for group, tokens in zip(simulation.model.groups, results.group_tokens, strict=True)
        ],
        "time_to_first_token": _times(simulation) if len(results.waits) else None,
        "curve": curve_as_json(found.curve),
    }


def _tier(one: TierOutcome, simulation: Simulation) -> dict[str, Any]:
    return {
        "name": one.name,
        "capacity_bytes": one.capacity_bytes,
        "tiers": one.tiers,
        **_counts(one.counts),
        "groups": [
            {"label": group.label, **_counts(counts)}
            for group, counts in zip(simulation.model.groups, one.group_counts, strict=True)
        ],
    }


def _counts(counts: TierCounts) -> dict[str, int]:
    return {name: getattr(counts, name) for name in TierCounts.__slots__}


def _times(simulation: Simulation) -> dict[str, dict[str, float]]:
    results = simulation.results
    each = {"with_tiers": results.waits, "without_tiers": results.waits_without_tiers}
    return {
        name: {"mean": times.mean, **{f"p{share}": times.quantile(share / 100) for share in (50, 90, 99)}}
        for name, times in each.items()
    }
