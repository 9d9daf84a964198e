"""A replay with the model and the settings of an engine that has recorded a trace."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.tools.models import read_model
from kvferry.tools.plan.kept import KeptSettings
from kvferry.tools.plan.side import EngineSide
from kvferry.tools.replay.arrivals import Arrivals
from kvferry.tools.replay.engine import EngineCache
from kvferry.tools.replay.settings import (
    BlockPool,
    ReplaySettings,
    ServedModel,
    parse_tier,
    recorded_engine,
    served_model,
    with_blocks,
)
from kvferry.tools.replay.simulation import Simulation
from kvferry.tools.replay.trace.base import Ids, Trace, TraceRequest, chained_each

Found = tuple[int, dict[str, int]]
"""Tokens of a prompt that an engine had itself, and those that it loaded from each tier."""


def chained(ids: npt.ArrayLike) -> Ids:
    """Return the identities of a request's prefixes, from the identity of each unit's own content."""
    own = np.asarray(ids).astype(np.uint64)
    return chained_each(own, np.array([len(own)]))


def model_of_engine(checkpoint: Path, trace: Trace, retention: int | None, dtype: str) -> ServedModel:
    """Return the model of a checkpoint as the engine that recorded a trace serves it.

    Args:
        checkpoint: folder with a config.json.
        trace: trace that the engine recorded.
        retention: the engine's ``prefix_cache_retention_interval``.
        dtype: element type of the KV cache.
    """
    engine = recorded_engine(trace.name, trace.header)
    block = engine.common_block
    assert block
    assert engine.step_tokens
    reading = read_model(json.loads((checkpoint / "config.json").read_text()), dtype)
    kept = KeptSettings(
        engine.step_tokens,
        retention,
        engine.chunk_tokens,
        engine.snapshot_tokens,
        first_snapshot_tokens=engine.first_snapshot_tokens,
    )
    return with_blocks(served_model(reading, EngineSide(1, 1, "LBHNC", block), kept), block)


def replay_of(model: ServedModel, trace: Trace, tiers: Sequence[str], *, prefix_caching: bool) -> Simulation:
    """Return a replay for one engine, which has seen no request."""
    blocks = (recorded_engine(trace.name, trace.header).num_blocks or 0) if prefix_caching else 0
    settings = ReplaySettings(tiers=tuple(map(parse_tier, tiers)), pool=BlockPool(blocks))
    return Simulation(model, settings, trace.unit_tokens)


def found_in_replay(
    replay: Simulation, requests: Sequence[TraceRequest], forgotten: Container[int] = ()
) -> list[Found]:
    """Serve requests one after the other.

    Args:
        replay: replay for one engine. Mutated.
        requests: requests to serve.
        forgotten: numbers of the requests before which the engine forgets its own prefixes.
    """
    found, (engine,), settings = [], replay.engines, replay.settings
    for number, request in enumerate(requests):
        if number in forgotten and settings.pool.blocks:
            engine.cache = EngineCache(replay.model, settings.pool.blocks, request.unit_tokens)
        arrived = Arrivals([request], engine.cache.keys_of_each).pop()
        running = engine.admit(arrived)
        engine.finish(running)
        tiers = zip(settings.tiers, running.hit.tier_tokens, strict=True)
        found.append((running.hit.local_tokens, {tier.kind: tokens for tier, tokens in tiers if tokens}))
    return found


def found_by_engine(requests: Sequence[TraceRequest]) -> list[Found]:
    """Return what the engine that recorded requests found for them."""
    return [(one.recorded.local_tokens, dict(one.recorded.loaded_tokens)) for one in requests]
