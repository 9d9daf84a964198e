"""`kvferry bench transfer`: one geometry, moved and measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.bench import rounds
from kvferry.geometry.layout import lay_out
from kvferry.geometry.models import ModelReading
from kvferry.measuring.machine import MachineFacts, machine_facts
from kvferry.measuring.producer_process import ProducerProcess, use_transports
from kvferry.measuring.reader import Reader
from kvferry.measuring.simulated import simulate_engine
from kvferry.plan.side import Side

MIN_REPEATS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferJob:
    """What is measured.

    Attributes:
        reading: what the model keeps.
        side: how both engines are set up; one rank each.
        tokens: of the request that is moved.
        order: how block tables lie, as `simulate_engine` takes it.
        repeats: rounds, at least MIN_REPEATS.
        transports: value of UCX_TLS, None to leave it as it is.
    """

    reading: ModelReading
    side: Side
    tokens: int
    order: str
    repeats: int
    transports: str | None = None


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
    machine: MachineFacts
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
        simulate_engine(name, job.reading, job.side, job.tokens, order=job.order, seed=seed)
        for seed, name in enumerate(("source", "destination"), 1)
    )
    with ProducerProcess([src], settings) as producer, Reader(dst, producer) as reader:
        comparison = rounds.compare(reader, src, job.repeats, progress)
    (group,) = lay_out(dst.model, dst.shape)[0].groups
    return MeasuredTransfer(
        job=job,
        blocks=dst.blocks,
        layers=len(group.layers),
        page_bytes=group.layers[0].page.page_bytes,
        machine=machine_facts(),
        comparison=comparison,
    )
