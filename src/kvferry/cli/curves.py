"""Hit-rate curves of host memory from a trace file, with a progress bar for each pass."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from kvferry.units import counted

if TYPE_CHECKING:
    from kvferry.replay.curve import CurvePoint
    from kvferry.replay.model import ServedModel
    from kvferry.replay.pool import BlockPool
    from kvferry.replay.simulation import Simulation
    from kvferry.replay.trace.base import Trace


def curve_after(trace: Trace, simulation: Simulation) -> list[CurvePoint]:
    """Return the hit rate by capacity of host memory, from further passes over a trace.

    Args:
        trace: trace that can be read several times.
        simulation: replay of the same trace, which bounds the capacities.
    """
    from kvferry.cli.progress import progress
    from kvferry.replay.capacities import hit_rate_curve

    passes = (progress(trace, f"curve, pass {number}") for number in count(1))
    return hit_rate_curve(passes, simulation)


def curve_of_model(
    trace: Trace, model: ServedModel, kv_cache_memory: str | None
) -> tuple[list[CurvePoint], str]:
    """Replay a trace on one engine with unlimited host memory, then compute the hit rate by capacity.

    Args:
        trace: trace that can be read several times.
        model: model and settings of the engine.
        kv_cache_memory: memory of each rank for KV cache, such as ``40GiB``; None for a default.

    Returns:
        (points, about). `about` says in sentences what the curve was computed from.
    """
    from kvferry.cli.progress import progress
    from kvferry.replay.pool import block_pool
    from kvferry.replay.settings import ReplaySettings, parse_tier
    from kvferry.replay.simulation import Simulation

    pool = block_pool(model, None, None, kv_cache_memory)
    settings = ReplaySettings(tiers=(parse_tier("host=unlimited"),), pool=pool)
    simulation = Simulation(model, settings, trace.unit_tokens)
    results = simulation.run(progress(trace, "unlimited memory"))
    about = (
        f"Replayed: {counted(results.requests, 'request')} of {trace.name}. {described(model, pool)} "
        f"Without host memory, the hit rate is {results.local_hit_rate:.1%}."
    )
    return curve_after(trace, simulation), about


def described(model: ServedModel, pool: BlockPool) -> str:
    """Return sentences about the engine and the settings of a curve.

    Settings of windows and snapshots are left out for models with full attention alone.

    Args:
        model: model and settings of the engine.
        pool: block pool of the engine.
    """
    steps = model.form.steps
    found = (
        f"One engine {pool.text} stores chunks of {counted(model.chunk_tokens, 'token')} in host memory. A "
        "capacity is that of all its ranks together."
    )
    if len(model.attention) < len(model.groups):
        found += (
            f" Windows and snapshots are kept at least {counted(model.form.snapshot_tokens, 'token')} apart, "
            f"with a retention of {steps.retention} and {counted(steps.step_tokens, 'token')} per step."
        )
    return found
