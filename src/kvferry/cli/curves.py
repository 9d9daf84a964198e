"""Hit-rate curves of host memory from a trace file, with a progress bar for each pass."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.replay.curve import CurvePoint
    from kvferry.replay.model import ServedModel
    from kvferry.replay.simulation import Simulation
    from kvferry.replay.trace.base import Trace


def curve_after(trace: Trace, simulation: Simulation) -> list[CurvePoint]:
    """Return the hit rate of host memory alone by capacity, from further passes over a trace.

    Args:
        trace: trace that can be read several times.
        simulation: replay of the same trace, which bounds the capacities.
    """
    from kvferry.cli.progress import progress
    from kvferry.replay.capacities import hit_rate_curve

    passes = (progress(trace, f"curve, pass {number}") for number in count(1))
    return hit_rate_curve(passes, simulation)


def curve_of_model(trace: Trace, model: ServedModel) -> tuple[list[CurvePoint], str]:
    """Replay a trace on one engine with unlimited host memory, then compute the hit rate by capacity.

    Args:
        trace: trace that can be read several times.
        model: model and settings of the engine.

    Returns:
        (points, about). `about` says in sentences what the curve was computed from.
    """
    from kvferry.cli.progress import progress
    from kvferry.replay.settings import ReplaySettings, parse_tier
    from kvferry.replay.simulation import Simulation

    settings = ReplaySettings(tiers=(parse_tier("host=unlimited"),))
    simulation = Simulation(model, settings, trace.unit_tokens)
    results = simulation.run(progress(trace, "unlimited memory"))
    about = f"Replayed: {results.requests:,} requests of {trace.name}. {described(model)}"
    return curve_after(trace, simulation), about


def described(model: ServedModel) -> str:
    """Return sentences about the engine and the settings of a curve.

    Settings of windows and snapshots are left out for models with full attention alone.
    """
    steps = model.form.steps
    found = (
        f"One engine without its own prefix cache stores chunks of {model.chunk_tokens:,} tokens in host "
        "memory. A capacity is that of all its ranks together."
    )
    if len(model.attention) < len(model.groups):
        found += (
            f" Windows and snapshots are kept at least {model.form.snapshot_tokens:,} tokens apart, with a "
            f"retention of {steps.retention} and {steps.step_tokens:,} tokens per step."
        )
    return found
