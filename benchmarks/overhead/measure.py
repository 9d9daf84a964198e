"""Run the parts of `benchmarks overhead` one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.overhead import hooks, planning, readiness
from kvferry.tools.measuring.producer_process import ProducerProcess, use_transports
from kvferry.tools.measuring.reader import Reader
from kvferry.tools.measuring.rounds import MachineFacts, Spread, machine_facts
from kvferry.tools.measuring.simulated import SimulatedEngine, simulate_engine
from kvferry.tools.models import ModelReading
from kvferry.tools.plan.side import EngineSide


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadJob:
    """The requests to plan and to move.

    Attributes:
        reading: description of the KV cache of a model whose layers are all alike.
        side: layout and block size of both engines, which have one rank each.
        planned_tokens: length of the request whose planning is timed, in tokens.
        moved_tokens: number of tokens in flight while hooks are timed.
        repeats: number of counted rounds of planning and of preparing for peers.
        transports: value of UCX_TLS; None to leave it unchanged.
    """

    reading: ModelReading
    side: EngineSide = field(default_factory=EngineSide)
    planned_tokens: int = 131_072
    moved_tokens: int = 4096
    repeats: int = 9
    transports: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOverhead:
    """The results of the benchmark.

    Attributes:
        job: measured requests.
        machine: machine of the measurement.
        planning: times in which kvferry plans the request.
        making: time in which NIXL creates a transfer of the request's pages, in seconds.
        readiness: times to prepare for peers with different block sizes, for some hybrid models.
        hooks: times inside the hooks of a step.
    """

    job: OverheadJob
    machine: MachineFacts
    planning: planning.PlanningTimes
    making: Spread
    readiness: tuple[readiness.Readiness, ...]
    hooks: hooks.HookTimes


def measure(job: OverheadJob, progress: Callable[[str], None]) -> MeasuredOverhead:
    """Measure all parts, and return the results. May set UCX_TLS in this process.

    Args:
        job: requests to plan and to move.
        progress: function that is called with a line of text before each step.

    Raises:
        ConfigError: memory or NIXL cannot be used.
        TransferError: the other process died, or something could not be moved.
    """
    settings = use_transports(job.transports)
    progress(f"planning {job.planned_tokens:,} tokens")
    planned = planning.measure(*_pair(job, job.planned_tokens), job.repeats)
    making = planning.time_making(job.reading, job.planned_tokens, job.repeats, settings)
    progress("getting ready for peers")
    ready = readiness.measure(job.repeats)
    progress("starting the producer process")
    src, dst = _pair(job, job.moved_tokens)
    with ProducerProcess([src], settings) as producer, Reader(dst, producer) as reader:
        hook_times = hooks.measure(reader, src, progress)
    return MeasuredOverhead(
        job=job, machine=machine_facts(), planning=planned, making=making, readiness=ready, hooks=hook_times
    )


def _pair(job: OverheadJob, tokens: int) -> tuple[SimulatedEngine, SimulatedEngine]:
    src, dst = (
        simulate_engine(name, job.reading, job.side, tokens, seed=seed)
        for seed, name in enumerate(("source", "destination"), 1)
    )
    return src, dst
