"""`kvferry bench transfer`: one geometry, moved and measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench import hooks, planning, rounds
from kvferry.bench.reader import Reader
from kvferry.bench.shapes import Shape

MIN_REPEATS = 7
PLANNED_TOKENS = 131_072


@dataclass(frozen=True, slots=True)
class Job:
    """What is measured.

    Attributes:
        shape: whose blocks.
        tokens: of the request that is moved.
        order: how block tables lie, see `shapes.block_table`.
        repeats: rounds, at least MIN_REPEATS.
        transports: value of UCX_TLS, None to leave it as it is.
        planned_tokens: of the request that is planned.
    """

    shape: Shape
    tokens: int
    order: str
    repeats: int
    transports: str | None = None
    planned_tokens: int = PLANNED_TOKENS


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured.

    Attributes:
        cores: that this process may use.
        cpu: the processor's name for itself.
        transports: value of UCX_TLS, None if it is not set.
    """

    cores: int
    cpu: str
    transports: str | None


@dataclass(frozen=True, slots=True)
class Measured:
    """All results of a job."""

    job: Job
    machine: Machine
    comparison: rounds.Comparison
    hooks: hooks.HookTimes
    planning: planning.Planning


def measure(job: Job, progress: Callable[[str], None]) -> Measured:
    """Do a job; sets UCX_TLS in this process if the job says so.

    Raises:
        ConfigError: memory or NIXL cannot be had.
        TransferError: the other process died, or something could not be moved.
    """
    settings = {} if job.transports is None else {"UCX_TLS": job.transports}
    os.environ.update(settings)
    progress("starting the producer process")
    with Reader(job.shape, job.shape.blocks(job.tokens) + 1, settings) as reader:
        comparison = rounds.compare(reader, job.tokens, job.order, job.repeats, progress)
        hook_times = hooks.measure(reader, job.tokens, job.order, progress)
    planned = planning.measure(job.shape, job.planned_tokens, job.repeats, settings, progress)
    return Measured(job, machine(), comparison, hook_times, planned)


def machine() -> Machine:
    """This machine, as this process sees it."""
    return Machine(len(os.sched_getaffinity(0)), _cpu_name(), os.environ.get("UCX_TLS"))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown processor"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"
