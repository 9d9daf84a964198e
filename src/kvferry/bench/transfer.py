"""`kvferry bench transfer`: one geometry, moved and measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench import rounds
from kvferry.bench.engines import engine
from kvferry.bench.link import Producer, use_transports
from kvferry.bench.reader import Reader
from kvferry.geometry.layout import lay_out
from kvferry.geometry.models import ModelReading
from kvferry.plan.side import Side

MIN_REPEATS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferJob:
    """What is measured.

    Attributes:
        reading: what the model keeps.
        side: how both engines are set up; one rank each.
        tokens: of the request that is moved.
        order: how block tables lie, see `engines.engine`.
        repeats: rounds, at least MIN_REPEATS.
        transports: value of UCX_TLS, None to leave it as it is.
    """

    reading: ModelReading
    side: Side
    tokens: int
    order: str
    repeats: int
    transports: str | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTransfer:
    """All results of a job.

    Attributes:
        job, machine: what was measured, and where.
        blocks, layers, page_bytes: of the request that was moved.
        comparison: of that request, in every way.
    """

    job: TransferJob
    blocks: int
    layers: int
    page_bytes: int
    machine: Machine
    comparison: rounds.Comparison


def measure(job: TransferJob, progress: Callable[[str], None]) -> MeasuredTransfer:
    """Do a job; sets UCX_TLS in this process if the job says so.

    Raises:
        ConfigError: memory or NIXL cannot be had.
        TransferError: the other process died, or something could not be moved.
    """
    settings = use_transports(job.transports)
    progress("starting the producer process")
    src, dst = (
        engine(name, job.reading, job.side, job.tokens, job.order, seed)
        for seed, name in enumerate(("source", "destination"), 1)
    )
    with Producer([src], settings) as producer, Reader(dst, producer) as reader:
        comparison = rounds.compare(reader, src, job.repeats, progress)
    (group,) = lay_out(dst.model, dst.shape)[0].groups
    return MeasuredTransfer(
        job=job,
        blocks=dst.blocks,
        layers=len(group.layers),
        page_bytes=group.layers[0].page.page_bytes,
        machine=machine(),
        comparison=comparison,
    )


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
