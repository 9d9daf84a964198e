"""A replay with the model and the settings of an engine that has recorded a trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvferry.geometry.models import read_model
from kvferry.plan.kept import KeptSettings
from kvferry.plan.side import EngineSide
from kvferry.replay.model import ServedModel, served_model
from kvferry.replay.settings import ReplaySettings, parse_tier
from kvferry.replay.simulation import Simulation
from kvferry.replay.trace.base import Trace


def model_of_engine(checkpoint: Path, trace: Trace, retention: int | None, dtype: str) -> ServedModel:
    """Return the model of a checkpoint as the engine that recorded a trace serves it.

    Args:
        checkpoint: folder with a config.json.
        trace: trace that the engine recorded.
        retention: the engine's ``prefix_cache_retention_interval``.
        dtype: element type of the KV cache.
    """
    header: dict[str, Any] = dict(trace.header)
    reading = read_model(json.loads((checkpoint / "config.json").read_text()), dtype)
    block = max(header["block_tokens"])
    kept = KeptSettings(header["step_tokens"], retention, header["chunk_tokens"], header["snapshot_tokens"])
    side = EngineSide(1, 1, "LBHNC", block)
    model = served_model(reading, side, kept)
    # vLLM for CPUs chooses the blocks of recurrent models by other rules than on a GPU.
    groups = tuple(replace(group, block_tokens=block) for group in model.block_groups)
    steps = replace(model.form.steps, block_tokens=block)
    return replace(model, block_groups=groups, form=replace(model.form, steps=steps))


def replay_of(model: ServedModel, trace: Trace, tiers: Sequence[str], *, prefix_caching: bool) -> Simulation:
    """Return a replay for one engine, which has seen no request."""
    blocks = trace.header["num_blocks"] if prefix_caching else 0
    assert isinstance(blocks, int)
    settings = ReplaySettings(tiers=tuple(map(parse_tier, tiers)), engine_blocks=blocks)
    return Simulation(model, settings, trace.unit_tokens)
